"""Packed pages and raw ones of two parts that are damaged in a store, or are not what their keys say: each is a miss
that is counted, what comes before it is used, and no byte of it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from cases import each_value
from disk_case import LossyStore, TroubledStore
from hicache import CacheEngine, DiskConfig, build_engine
from hicache.host import PageKind, rest_keys
from hicache.storage import LmdbPageStore, open_existing, store_at
from hicache.storage.slot_file import BLOCK_BYTES, SlotBlock
from hicache.tiers import FULL, SWA
from hicache.tree.names import PageNames
from memory_store import MemoryPageStore
from packed_case import MODELS, PAGE, config, prompt, serve

NUM_PAGES = 6
TOKENS = prompt(3, NUM_PAGES)  # of which pages 0, 2 and 4 do not fit
# A value of a page, by the page's number: of a packed one, and both of a raw one.
PACKED, FIRST, REST = "packed 1", "first 2", "rest 2"
PARTS = (PACKED, FIRST, REST)


class Values:
    """The pages of TOKENS in the store of a closed engine, and their bytes by name."""

    def __init__(self, path: Path, model: str = "mha", component: str = FULL, bits: str = "4") -> None:
        self.path, self.model = path, model
        self.settings = config(disk=DiskConfig(path=str(path), budget_bytes=4 << 20), kv_packing=bits)
        with build_engine(self.settings, MODELS[model]) as engine:
            serve(engine, "fill", TOKENS, "some")
            tree = engine.inspect.context.tree
            keys = PageNames.of_component(component, tree.names.of_prompt(tree.match(TOKENS), TOKENS))  # type: ignore
            page_bytes = engine.inspect.context.by_name[component].host.page_bytes  # type: ignore[index]
        self.keys = {f"{('first', 'packed')[n % 2]} {n}": key for n, key in enumerate(keys)}
        self.keys |= {f"rest {n}": key for n, key in enumerate(rest_keys(keys)) if n % 2 == 0}
        with self.store() as store:
            self.bytes = {name: np.empty(page_bytes, np.uint8) for name in self.keys}
            assert all(store.get_into([*self.keys.values()], [*self.bytes.values()]))

    def store(self) -> contextlib.closing[LmdbPageStore]:
        return contextlib.closing(open_existing(self.path))

    def replace(self, name: str, value: np.ndarray | None) -> None:
        """By a value that verifies; None: by none."""
        with self.store() as store:
            assert store.delete([self.keys[name]]) == 1
            assert value is None or store.put([(self.keys[name], value)]) == [True]

    def overwrite(self, name: str, at: int, change: Callable[[bytes], bytes]) -> None:
        """The bytes on the disk from `at` of the value on."""
        (file,) = (file for file in store_at(self.path).iterdir() if self._place(file, name) >= 0)
        content, start = file.read_bytes(), self._place(file, name) + BLOCK_BYTES + at
        end = start + len(self.bytes[name]) - at
        file.write_bytes(content[:start] + change(content[start:end]) + content[end:])

    def _place(self, file: Path, name: str) -> int:
        content = file.read_bytes()
        for at in range(0, len(content), BLOCK_BYTES):
            block = SlotBlock.unpack(content[at : at + BLOCK_BYTES])
            if block is not None and block.key == self.keys[name]:
                return at
        return -1

    def serve(self, remote: MemoryPageStore | None = None) -> tuple[CacheEngine, int]:
        """An engine that has ended, and how many tokens it found; what it used is compared with the truth."""
        with build_engine(self.settings, MODELS[self.model], remote=remote) as engine:
            return engine, serve(engine, "again", TOKENS, "some").cached_len


def flipped(rest: bytes) -> bytes:
    return bytes([rest[0] ^ 4]) + rest[1:]


def torn(rest: bytes) -> bytes:
    return bytes(len(rest))


def overwritten(at: int, change: Callable[[bytes], bytes]) -> Callable[[Values, str], None]:
    return lambda values, part: values.overwrite(part, at % len(values.bytes[part]), change)


def of_kind(kind: int) -> Callable[[Values, str], None]:
    def damage(values: Values, part: str) -> None:
        values.bytes[part][-16] = kind
        values.replace(part, values.bytes[part])

    return damage


def another(of_part: Mapping[str, str]) -> Callable[[Values, str], None]:
    return lambda values, part: values.replace(part, values.bytes[of_part[part]])


# What became of a value, and whether its store counts a corrupt page.
DAMAGES: dict[str, tuple[Callable[[Values, str], None], bool]] = {
    "first byte": (overwritten(0, flipped), True),
    "a byte": (overwritten(1000, flipped), True),
    "kind": (overwritten(-16, flipped), True),
    "last byte": (overwritten(-1, flipped), True),
    "torn": (overwritten(1000, torn), True),
    "gone": (lambda values, part: values.replace(part, None), False),
    # What verifies under its key, and belongs under another: of another page, or another part of the page.
    "packed of another": (another({PACKED: "packed 3", FIRST: "packed 1", REST: "packed 1"}), False),
    "first of another": (another({PACKED: "first 2", FIRST: "first 4", REST: "first 2"}), False),
    "rest of another": (another({PACKED: "rest 2", FIRST: "rest 2", REST: "rest 4"}), False),
    "a kind too many": (of_kind(len(PageKind)), False),
    "no kind": (of_kind(255), False),
}


@each_value(bits=["4", "3"], part=PARTS, damage=list(DAMAGES))
def test_what_is_not_the_page_is_a_miss(tmp_path: Path, bits: str, part: str, damage: str) -> None:
    """The prefix ends before that page, lost where a store had announced it: a first part makes known that there is a
    rest. Computed anew it is stored again, in the place of what was there."""
    values, (spoil, is_corrupt) = Values(tmp_path / "s", bits=bits), DAMAGES[damage]
    spoil(values, part)
    engine, cached_len = values.serve()
    assert cached_len == int(part[-1]) * PAGE
    lost = int(damage != "gone" or part == REST)
    assert (engine.stats()["prefetch.lost_pages"], engine.stats()["disk.corrupt_pages"]) == (lost, int(is_corrupt))
    assert values.serve()[1] == NUM_PAGES * PAGE


@pytest.mark.parametrize(
    "where", ["disk", "remote", pytest.param("process", marks=[pytest.mark.store_process, pytest.mark.long])]
)
def test_a_first_part_without_rest_makes_room_for_its_page(tmp_path: Path, where: str) -> None:
    """Pages that were stored raw, whose second parts have left, are packed when they are computed anew. They are stored
    then, and a prompt is found whole again, behind them too."""
    values, shared = Values(tmp_path / "s"), MemoryPageStore(1 << 20)
    for name in ("packed 1", "packed 3"):
        values.bytes[name][-16] = PageKind.RAW
        values.replace(name, values.bytes[name])
    if where == "remote":
        shared.put([(values.keys[name], value) for name, value in values.bytes.items()])
        values.settings = config()
    remote = shared if where == "remote" else None
    for num_pages in (1, NUM_PAGES, NUM_PAGES):
        assert values.serve(remote)[1] == num_pages * PAGE


@pytest.mark.parametrize("fails", [True, False])
def test_a_store_that_cannot_tell_loses_nothing(tmp_path: Path, fails: bool) -> None:
    """Where the call for second parts raises, they may be there: the first stay. Where it answers, those go whose
    second is not there, and no others."""
    values, deleted = Values(tmp_path / "s"), list[bytes]()
    shared = TroubledStore(MemoryPageStore(1 << 20))
    shared.put([(values.keys[name], value) for name, value in values.bytes.items() if fails or name != "rest 4"])
    shared.delete = deleted.extend  # type: ignore[method-assign, assignment]

    def trouble(verb: str) -> None:
        if fails and verb == "get_into" and shared.verbs("get_into") == 1:
            raise OSError("the connection is lost")

    shared.trouble, values.settings = trouble, config()
    assert values.serve(shared)[1] == (0 if fails else 4 * PAGE)  # type: ignore[arg-type]
    assert deleted == ([] if fails else [values.keys["first 4"], *rest_keys([values.keys["first 4"]])])


@pytest.mark.parametrize("part", PARTS)
def test_values_that_do_not_verify(tmp_path: Path, part: str) -> None:
    """Nothing of them is used, though the host has their bytes, and those are the right ones."""
    values, shared = Values(tmp_path / "s"), LossyStore(1 << 20)
    shared.put([(values.keys[name], value) for name, value in values.bytes.items()])
    shared.lost, values.settings = values.keys[part], config()
    engine, cached_len = values.serve(shared)
    assert cached_len == int(part[-1]) * PAGE and engine.stats()["prefetch.lost_pages"] == 1


@each_value(num_bytes=[0, 15, 16, -1], part=PARTS)
def test_values_that_are_too_short(tmp_path: Path, part: str, num_bytes: int) -> None:
    """Of a remote store that checks nothing."""
    values, shared = Values(tmp_path / "s"), MemoryPageStore(1 << 20)
    values.bytes[part] = values.bytes[part][:num_bytes]
    shared.put([(values.keys[name], value) for name, value in values.bytes.items()])
    values.settings = config()
    engine, cached_len = values.serve(shared)
    assert cached_len == int(part[-1]) * PAGE and engine.stats()["prefetch.lost_pages"] == 1


@pytest.mark.parametrize("part", ["first 4", "rest 4", "packed 5"])
def test_windows(tmp_path: Path, part: str) -> None:
    """Without a page of the last window a shorter prefix is used, or none."""
    values = Values(tmp_path / "s", "windows", SWA)
    values.overwrite(part, 100, flipped)
    engine, cached_len = values.serve()
    assert cached_len < NUM_PAGES * PAGE and engine.stats()["prefetch.lost_pages"] == 1
