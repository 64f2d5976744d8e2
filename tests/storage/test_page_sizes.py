"""Pages of several sizes in one store, which has one identity, one budget and one order of use."""

from __future__ import annotations

import contextlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.storage import (
    LmdbPageStore,
    PageBuffer,
    PageCipher,
    PageFilter,
    PageFormat,
    StoreError,
    evict,
    index,
    list_pages,
    memory,
)
from hicache.storage.index import Entry, Index, IndexChanges
from storage_pages import MEMORY, blocks_bytes, found_numbers, key_of, open_store, page_of, put_numbers

SIZES = (700, 5_000, 60_000)
FORMATS = (
    PageFormat(60_000, PageFilter("byte_shuffle", 2)),
    PageFormat(700),
    PageFormat(5_000, PageFilter("byte_shuffle", 4)),
)
BUDGET = 2 << 20  # bytes of about 30 of the largest pages


def open_mixed(path: Any, **changes: Any) -> LmdbPageStore:
    return open_store(path, **{"formats": FORMATS, "budget_bytes": BUDGET, **changes})


def size_of(number: int) -> int:
    return SIZES[number % 3]


def mixed_page(number: int) -> PageBuffer:
    """A page whose number decides its size, and whether it compresses."""
    return page_of(number, size_of(number), ("random", "normal", "flat")[number // 3 % 3])


def put(store: LmdbPageStore, numbers: Any) -> list[bool]:
    return store.put([(key_of(n), mixed_page(n)) for n in numbers])


def get(store: LmdbPageStore, numbers: Any) -> list[int]:
    """The numbers of the pages that are there. Compares every byte."""
    requested = list(numbers)
    buffers = [np.empty(size_of(n), dtype=np.uint8) for n in requested]
    hits = store.get_into([key_of(n) for n in requested], buffers)
    found = [(n, buffer) for n, buffer, hit in zip(requested, buffers, hits, strict=True) if hit]
    for number, buffer in found:
        np.testing.assert_array_equal(buffer, mixed_page(number))
    return [number for number, _ in found]


class Model:
    """A reference model: a store, and the numbers of its pages in the order of use, the least recently used first.
    `emptied`: a set that receives the keys of pages in emptied segments."""

    def __init__(self, path: Path, emptied: set[bytes]) -> None:
        self.path, self.order, self.emptied = path, list[int](), emptied
        self.store = open_mixed(path)
        self.num_evicted = 0

    def step(self, verb: str, numbers: list[int]) -> None:
        self.emptied.clear()
        getattr(self, verb)(numbers)
        held = [n for n, is_held in zip(self.order, self._contains(self.order), strict=True) if is_held]
        # Except in emptied segments, the evicted pages were the least recently used ones of all sizes, in order.
        in_order = [n for n in self.order if key_of(n) not in self.emptied]
        assert held == in_order[len(in_order) - len(held) :]
        self.num_evicted += len(self.order) - len(held)
        self.order = held
        self.require()
        listed = [page.key for page in list_pages(self.store)]
        assert listed == [key_of(n) for n in self.order]

    def put(self, numbers: list[int]) -> None:
        present = [n for n in numbers if n in self.order]
        self._use(present)
        self.order += [n for n in reversed(numbers) if n not in present]
        stored = put(self.store, numbers)
        assert stored == self._contains(numbers)

    def get(self, numbers: list[int]) -> None:
        """Read pages, and check that a use changes nothing in the index."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Index, "changes", None)
            assert get(self.store, numbers) == [n for n in numbers if n in self.order]
        self._use([n for n in numbers if n in self.order])

    def touch(self, numbers: list[int]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Index, "changes", None)
            self.store.touch([key_of(n) for n in numbers])
        self._use([n for n in numbers if n in self.order])

    def delete(self, numbers: list[int]) -> None:
        deleted = [n for n in numbers if n in self.order]
        assert self.store.delete([key_of(n) for n in numbers]) == len(deleted)
        self.order = [n for n in self.order if n not in deleted]

    def other_size(self, numbers: list[int]) -> None:
        """A read of a page with another size is a miss. The page stays, and is not counted as corrupt."""
        buffers = [np.empty(size_of(n + 1), dtype=np.uint8) for n in numbers]
        assert self.store.get_into([key_of(n) for n in numbers], buffers) == [False] * len(numbers)

    def compact(self, numbers: list[int]) -> None:
        del numbers
        self.store.compact()

    def reopen(self, numbers: list[int]) -> None:
        del numbers
        self.store.close()
        self.store = open_mixed(self.path)

    def require(self) -> None:
        self.store.check()
        stats = self.store.stats()
        assert (stats.entries, stats.raw_bytes) == (len(self.order), sum(map(size_of, self.order)))
        assert (stats.corrupt, stats.read_errors, stats.write_errors, stats.read_only) == (0, 0, 0, False)
        assert stats.file_bytes <= 1.05 * BUDGET and blocks_bytes(self.path) <= 1.05 * BUDGET

    def _use(self, numbers: list[int]) -> None:
        self.order = [n for n in self.order if n not in numbers] + numbers[::-1]

    def _contains(self, numbers: list[int]) -> list[bool]:
        return self.store.contains([key_of(n) for n in numbers])


NUMBERS = st.lists(st.integers(0, 149), min_size=1, max_size=20, unique=True)
VERBS = st.sampled_from(["put"] * 5 + ["get", "touch", "delete", "other_size", "compact", "reopen"])
STEPS = st.lists(st.tuples(VERBS, NUMBERS), min_size=1, max_size=30)


def run_model(steps: list[tuple[str, list[int]]], num_chosen: int = 4096) -> Model:
    """Run the steps on a store and its model. `num_chosen`: how many victims the store selects ahead."""
    delete_slots, emptied = IndexChanges.delete_slots, set[bytes]()

    def noted(changes: IndexChanges, *segment: Any) -> list[tuple[bytes, Entry | None]]:
        removed = delete_slots(changes, *segment)
        emptied.update(key for key, _ in removed)
        return removed

    with TemporaryDirectory(dir=MEMORY) as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexChanges, "delete_slots", noted)
        patch.setattr(index, "_MIN_CHOSEN", num_chosen)
        model = Model(Path(path), emptied)
        for verb, numbers in steps:
            model.step(verb, numbers)
        model.store.sync()
        newest = [page.key for page in list_pages(model.store, newest=True, limit=2)]
        assert newest == [key_of(n) for n in model.order[:-3:-1]]
        assert get(model.store, model.order) == model.order
        model.store.close()
    return model


@given(STEPS, st.sampled_from([1, 5, 4096]))
def test_a_store_holds_what_a_model_holds(steps: list[tuple[str, list[int]]], num_chosen: int) -> None:
    """After random puts, uses, deletes and openings, pages of three sizes have been evicted in the order of use, except
    in emptied segments. Every byte is read back, indexes and counters agree, and the files are within the budget."""
    run_model(steps, num_chosen)


def test_a_history_that_evicts_every_size() -> None:
    """Pages of one size, some of which are used, evict pages of the other sizes in turn, for many times the budget."""
    sizes = [[n for n in range(600) if n % 3 == index] for index in range(3)]
    steps = []
    for turn in range(5):
        numbers = sizes[turn % 3]
        steps += [("put", numbers[at : at + 15]) for at in range(turn * 15 % 60, 195 if turn % 3 == 2 else 120, 15)]
        last = steps[-1][1]
        steps += [("get", last[4:8]), ("touch", last[:6])]
    assert run_model(steps).num_evicted > 100


def test_sixteen_sizes_at_the_smallest_budget(tmp_path: Path) -> None:
    """With the maximum number of sizes and the smallest valid budget, every put is stored, and the last pages are
    found."""
    sizes = [1_000 * n for n in range(1, 17)]
    settings: dict[str, Any] = {"formats": [PageFormat(size) for size in sizes]}
    with pytest.raises(StoreError, match="raise it to") as refused:
        open_store(tmp_path, budget_bytes=1 << 16, **settings)
    budget_bytes = int(str(refused.value).split()[-1])
    with contextlib.closing(open_store(tmp_path, budget_bytes=budget_bytes, **settings)) as store:
        for first in range(0, 320, 4):
            numbers = range(first, first + 4)
            assert put_numbers(store, numbers, sizes) == [True] * 4
            assert found_numbers(store, numbers, sizes) == set(numbers)
        store.check()
        assert store.stats().evicted > 200 and blocks_bytes(tmp_path) <= 1.05 * budget_bytes


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cipher", [None, PageCipher(bytes(32))], ids=["plain", "encrypted"])
@pytest.mark.parametrize("page_bytes", [(3 << 20) + 8, pytest.param(1 << 30, marks=pytest.mark.long)])
def test_a_state_longer_than_what_is_kept(
    tmp_path: Path, page_bytes: int, cipher: PageCipher | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that is longer than any kept buffer, in a store with small pages, is read back, also after opening the
    store again, and is evicted. The plain state does not compress, the encrypted one does."""
    monkeypatch.setattr(memory, "MAX_KEPT_BYTES", min(memory.MAX_KEPT_BYTES, page_bytes // 2))
    formats = [PageFormat(4096), PageFormat(page_bytes, PageFilter("byte_shuffle", 2))]
    settings: dict[str, Any] = {"formats": formats, "budget_bytes": 20 * page_bytes, "cipher": cipher}
    state = np.resize(page_of(3, 1 << 20, "normal" if cipher else "random"), page_bytes)
    state[:8] = 1
    back, small = np.empty(page_bytes, dtype=np.uint8), [page_of(n, 4096) for n in range(20)]
    with contextlib.closing(open_store(tmp_path, **settings)) as store:
        items = [(key_of(n), page) for n, page in enumerate(small)]
        assert store.put([*items, (b"state", state)]) == [True] * 21
        assert store.get_into([b"state"], [back]) == [True]
        np.testing.assert_array_equal(back, state)
        assert store.stats().raw_bytes == page_bytes + 20 * 4096
        assert (store.stats().live_bytes < page_bytes) == (cipher is not None)
    with contextlib.closing(open_store(tmp_path, **settings)) as store:
        back[:] = 0
        assert store.get_into([b"state"], [back]) == [True]
        np.testing.assert_array_equal(back, state)
        store.check()
        assert store.get_into([key_of(n) for n in range(20)], [np.empty(4096, dtype=np.uint8)] * 20) == [True] * 20
        assert evict(store, min(page_bytes // 2, 4 << 20)) >= 1 and store.contains([b"state"]) == [False]
        store.check()
