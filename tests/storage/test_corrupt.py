"""Damaged stores: a page that cannot be verified is a miss, is counted and deleted, and never returns wrong bytes."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.storage import PageFilter, StoreCorrupt, StoreError, StoreMismatch, verify
from hicache.storage.slot_file import BLOCK_BYTES, SlotBlock
from storage_pages import PAGE_BYTES, change_index, found_numbers, key_of, open_store, put_numbers, slots_path

SLOT_BYTES = 5 * BLOCK_BYTES
USED_BYTES = 68 + 32 + 8  # used bytes of the first block: its fields, the key, the checksum
SETTINGS = {"filter": PageFilter("byte_shuffle", 2)}
MIXED = (700, PAGE_BYTES)
FILES = ("store.json", "index.mdb", "pages-700-8192.dat", "pages-16320-20480.dat")


def fill(path: Path, num_pages: int, kind: str = "random") -> None:
    with contextlib.closing(open_store(path, **SETTINGS)) as store:
        assert put_numbers(store, range(num_pages), kind=kind) == [True] * num_pages


def slots_of(path: Path) -> dict[bytes, int]:
    """The slot of each key, as the blocks of slots name them."""
    content = slots_path(path).read_bytes()
    blocks = [SlotBlock.unpack(content[at : at + BLOCK_BYTES]) for at in range(0, len(content), SLOT_BYTES)]
    return {block.key: slot for slot, block in enumerate(blocks) if block is not None}


def flip(path: Path, at: int, bits: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bits]))


def test_flipped_bytes(tmp_path: Path) -> None:
    """After a flip of any byte of a block, or of sampled payload bytes, the page is a miss and is counted. The next put
    removes it."""
    places, kind = [*range(USED_BYTES), *range(BLOCK_BYTES, BLOCK_BYTES + 8), *range(5000, 13_000, 900)], "normal"
    fill(tmp_path, len(places) + 3, kind)
    slots = slots_of(tmp_path)
    for number, place in enumerate(places):
        flip(slots_path(tmp_path), slots[key_of(number)] * SLOT_BYTES + place, 1 << number % 8)
    store = open_store(tmp_path, **SETTINGS)
    intact = set(range(len(places), len(places) + 3))
    assert store.contains([key_of(0)]) == [True]
    assert found_numbers(store, range(len(places) + 3), kind=kind) == intact
    assert store.stats().corrupt == len(places) and store.stats().misses == len(places)
    assert store.contains([key_of(0)]) == [False]
    assert put_numbers(store, [500], kind=kind) == [True]
    assert store.stats().entries == len(intact) + 1
    store.check()
    shutil.copytree(tmp_path, tmp_path / "killed", ignore=shutil.ignore_patterns("live*"))
    with contextlib.closing(open_store(tmp_path / "killed", **SETTINGS)) as killed:
        assert killed.rebuilt_pages == len(intact) + 1
    assert put_numbers(store, range(len(places)), kind=kind) == [True] * len(places)
    assert found_numbers(store, range(len(places) + 3), kind=kind) == set(range(len(places) + 3))
    store.check()
    store.close()


def test_of_two_slots_with_one_key_the_newer_counts(tmp_path: Path) -> None:
    """If two slots have one key, the newer slot counts; the older one was freed and not written again. A slot with so
    high a sequence that none is left for later pages counts as free, and new pages are stored as before."""
    fill(tmp_path, 4)
    slot, file = slots_of(tmp_path)[key_of(2)], slots_path(tmp_path)
    content = file.read_bytes().ljust(4 * SLOT_BYTES, b"\0")
    old = content[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
    block = SlotBlock.unpack(old[:BLOCK_BYTES])
    assert block is not None
    for sequence, expected in ((block.sequence - 1, 4), (block.sequence + 9, 3), ((1 << 64) - 1, 4), (1 << 63, 4)):
        file.write_bytes(content + block._replace(sequence=sequence).pack() + bytes(SLOT_BYTES - BLOCK_BYTES))
        (tmp_path / "index.mdb").unlink(missing_ok=True)
        with contextlib.closing(open_store(tmp_path, **SETTINGS)) as store:
            assert store.rebuilt_pages == 4
            assert len(found_numbers(store, range(4))) == expected
            assert put_numbers(store, [9]) == [True] and store.delete([key_of(9)]) == 1


def test_pages_of_another_namespace(tmp_path: Path) -> None:
    """Slots of a store of another identity are never served, with or without the index that was copied with them."""
    for name in ("theirs", "ours"):
        with contextlib.closing(open_store(tmp_path / name, identity={"model": name})) as store:
            put_numbers(store, [1])
    for name in ("index.mdb", slots_path(tmp_path / "theirs").name):
        shutil.copy(tmp_path / "theirs" / name, tmp_path / "ours" / name)
    shutil.copytree(tmp_path / "ours", tmp_path / "unsealed")
    (tmp_path / "unsealed" / "index.mdb").unlink()
    page = np.empty(PAGE_BYTES, dtype=np.uint8)
    for name, corrupt in (("ours", 1), ("unsealed", 0)):
        with contextlib.closing(open_store(tmp_path / name, identity={"model": "ours"})) as store:
            assert store.get_into([key_of(1)], [page]) == [False] and store.stats().corrupt == corrupt


@pytest.mark.parametrize("left_bytes", [0, SLOT_BYTES + 1, 7 * SLOT_BYTES, 9 * SLOT_BYTES + 5000])
def test_slots_cut_short(tmp_path: Path, left_bytes: int) -> None:
    """If a slot file was cut short or is missing, the store serves the pages that are still complete, whether or not
    the index is sealed."""
    fill(tmp_path, 10)
    complete = {
        n for n in range(10) if slots_of(tmp_path)[key_of(n)] * SLOT_BYTES + BLOCK_BYTES + PAGE_BYTES <= left_bytes
    }
    shutil.copytree(tmp_path, tmp_path / "unsealed")
    (tmp_path / "unsealed" / "index.mdb").unlink()
    for path in (tmp_path, tmp_path / "unsealed"):
        slots_path(path).write_bytes(slots_path(path).read_bytes()[:left_bytes])
        with contextlib.closing(open_store(path, **SETTINGS)) as store:
            assert found_numbers(store, range(10)) == complete
            assert put_numbers(store, range(10)) == [True] * 10
            assert found_numbers(store, range(10)) == set(range(10))
            store.check()


def test_every_bit_of_the_record_counts(tmp_path: Path) -> None:
    """A store.json with any flipped bit is refused by name, and so are pages without store.json."""
    fill(tmp_path, 2)
    file = tmp_path / "store.json"
    content = file.read_bytes()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        file.write_bytes(changed)
        with pytest.raises((StoreCorrupt, StoreMismatch)):
            open_store(tmp_path, **SETTINGS)
    file.unlink()
    with pytest.raises(StoreCorrupt):
        open_store(tmp_path, **SETTINGS)
    file.write_bytes(content)
    with contextlib.closing(open_store(tmp_path, **SETTINGS)) as store:
        assert found_numbers(store, range(3)) == {0, 1}


@pytest.mark.parametrize("slot", ["of another page", "far away", "behind the end", "too short"])
def test_an_index_that_contradicts_itself_is_not_used(tmp_path: Path, slot: str) -> None:
    """An index with two pages in one slot, a page outside its file, or one too long for all slots is rebuilt."""
    fill(tmp_path, 4)

    def contradict(txn: Any, tables: dict[str, Any]) -> None:
        one, other = (bytes(txn.get(key_of(n), db=tables["pages"])) for n in range(2))
        places = {"far away": 1 << 40, "behind the end": 4}
        place = places[slot].to_bytes(8, "little") if slot in places else other[:8]
        length = (1 << 31).to_bytes(4, "little") if slot == "too short" else one[8:12]
        txn.put(key_of(0), place + length + one[12:], db=tables["pages"])

    change_index(tmp_path, contradict)
    with contextlib.closing(open_store(tmp_path, **SETTINGS)) as store:
        assert store.rebuilt_pages == 4 and found_numbers(store, range(4)) == set(range(4))
        store.check()


def test_a_wrong_index_costs_misses(tmp_path: Path) -> None:
    """If an index entry names the wrong page or the wrong length, its key is a miss and never returns another page.
    After another put the page is found."""
    fill(tmp_path, 4)

    def mislead(txn: Any, tables: dict[str, Any]) -> None:
        one, other, long = (bytes(txn.get(key_of(n), db=tables["pages"])) for n in range(3))
        txn.put(key_of(0), other, db=tables["pages"])
        txn.put(key_of(1), one, db=tables["pages"])
        txn.put(key_of(2), long[:8] + (PAGE_BYTES - 9).to_bytes(4, "little") + long[12:], db=tables["pages"])

    change_index(tmp_path, mislead)
    with contextlib.closing(open_store(tmp_path, **SETTINGS)) as store:
        assert store.rebuilt_pages is None and found_numbers(store, range(4)) == {3}
        assert put_numbers(store, range(4)) == [True] * 4
        assert found_numbers(store, range(4)) == set(range(4)) and not verify(store).faults


def damage(path: Path, generator: random.Random) -> None:
    """One to three faults in the files of a closed store."""
    for _ in range(generator.randint(1, 3)):
        file = path / generator.choice(FILES)
        size = file.stat().st_size if file.exists() else 0
        kind = generator.choice(["flip", "flip", "page", "garbage", "cut", "longer", "gone", "swap"])
        if kind == "gone" or not size:
            file.unlink(missing_ok=True)
        elif kind == "flip":
            flip(file, generator.randrange(size), 1 << generator.randrange(8))
        elif kind in ("cut", "longer"):
            content = file.read_bytes()
            tail = generator.randbytes(generator.randint(1, 9000))
            file.write_bytes(content[: generator.randrange(size)] if kind == "cut" else content + tail)
        else:
            content = bytearray(file.read_bytes())
            at = generator.randrange(size) // BLOCK_BYTES * BLOCK_BYTES
            other = generator.randrange(size) // BLOCK_BYTES * BLOCK_BYTES
            taken = content[other : other + BLOCK_BYTES] if kind == "swap" else b""
            new = {"page": bytes(BLOCK_BYTES), "garbage": generator.randbytes(BLOCK_BYTES), "swap": bytes(taken)}[kind]
            content[at : at + len(new)] = new
            file.write_bytes(content)


def run_damaged(path: Path, complete: Path, seed: int) -> str:
    """Damage a copy of a store and use it; returns the outcome."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(complete, path)
    damage(path, random.Random(seed))
    settings = {"page_bytes": MIXED}
    try:
        store = open_store(path, **settings)
    except StoreError:
        return "refused"
    with contextlib.closing(store):
        found = found_numbers(store, range(30), MIXED)
        verify(store, repair=True)
        assert not verify(store).faults
        assert found_numbers(store, found, MIXED) == found
        assert put_numbers(store, range(40), MIXED) == [True] * 40
        assert found_numbers(store, range(40), MIXED) == set(range(40))
    with contextlib.closing(open_store(path, **settings)) as store:
        assert found_numbers(store, range(40), MIXED) == set(range(40)) and store.rebuilt_pages is None
        store.check()
    return "whole" if len(found) == 30 else "damaged"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_stores", [30, pytest.param(1000, marks=pytest.mark.long)])
def test_damaged_stores(tmp_path: Path, num_stores: int) -> None:
    """However the files of a store are damaged, the store is refused by name, or it serves right bytes, is repaired,
    and accepts all pages again."""
    with contextlib.closing(open_store(tmp_path / "whole", page_bytes=MIXED)) as store:
        assert put_numbers(store, range(30), MIXED, "normal") == [True] * 30
        store.delete([key_of(n) for n in range(30)])
        assert put_numbers(store, range(30), MIXED) == [True] * 30
    outcomes = [run_damaged(tmp_path / "damaged", tmp_path / "whole", seed) for seed in range(num_stores)]
    assert {outcome: outcomes.count(outcome) > num_stores // 20 for outcome in set(outcomes)} == {
        "refused": True,
        "damaged": True,
        "whole": True,
    }
