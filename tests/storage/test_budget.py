"""The files of a store stay within its budget, whatever pages are put. The store evicts the least recently used pages
for new ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hicache.storage import LmdbPageStore, PageBuffer, StoreError, evict
from hicache.storage.slot_file import SlotFile
from storage_pages import (
    MEMORY,
    PAGE_BYTES,
    blocks_bytes,
    budget_of,
    found_numbers,
    key_of,
    open_store,
    page_of,
    put_numbers,
    slots_path,
)

LARGE_BYTES = 96 << 10  # bytes of pages that are large enough to be compressed in threads


def test_a_call_larger_than_the_budget(tmp_path: Path) -> None:
    """A put of more pages than the budget allows has many commits, and threads compress later pages ahead. The store
    keeps the first pages, and the answer says which ones."""
    store = open_store(tmp_path, page_bytes=LARGE_BYTES, budget_bytes=budget_of(50, LARGE_BYTES))
    stored = put_numbers(store, range(80), LARGE_BYTES)
    kept = stored.count(True)
    assert 30 < kept <= 56 and stored == [True] * kept + [False] * (80 - kept)
    assert found_numbers(store, range(80), LARGE_BYTES) == set(range(kept))
    store.check()
    store.close()


STEPS = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 24), st.integers(0, 200)), min_size=8, max_size=24)


@settings(max_examples=settings.default.max_examples // 5)
@given(steps=STEPS)
@example(steps=[(1, 24, 0)] * 24 + [(16, 4, 4)])  # the last page of each segment is in use
def test_pages_of_changing_lengths_share_a_budget(steps: list[tuple[int, int, int]]) -> None:
    """Each page is stored, however well pages compress and whichever were used. The files are within the budget after
    each commit, the store evicts about the bytes that it needs, and all kept pages are right."""
    page_bytes, budget_bytes = 64 << 10, 4 << 20
    lengths: dict[int, int] = {}

    def page(number: int) -> PageBuffer:
        made = page_of(number, page_bytes)
        made[lengths[number] * page_bytes // 16 :] = 0
        return made

    def slot_bytes(numbers: Iterable[int]) -> int:
        return sum(4096 + (1 + lengths[number]) * 4096 for number in numbers)

    with (
        TemporaryDirectory(dir=MEMORY) as path,
        contextlib.closing(open_store(path, page_bytes=page_bytes, budget_bytes=budget_bytes)) as store,
    ):
        held = list[int]()
        for length, count, used in [*steps, *steps]:
            new = range(len(lengths), len(lengths) + count)
            lengths.update(dict.fromkeys(new, length))
            store.touch([key_of(n) for n in held[used % 7 :: 1 + used]])
            assert store.put([(key_of(n), page(n)) for n in new]) == [True] * count
            assert max(store.stats().file_bytes, blocks_bytes(Path(path))) <= budget_bytes
            before = [*held, *new]
            held = [
                n for n, is_held in zip(before, store.contains([key_of(n) for n in before]), strict=True) if is_held
            ]
            assert set(new) <= set(held)
            assert slot_bytes(set(before) - set(held)) <= slot_bytes(new) + budget_bytes // 8
        buffers = [np.empty(page_bytes, dtype=np.uint8) for _ in held]
        assert all(store.get_into([key_of(n) for n in held], buffers))
        assert all(np.array_equal(buffer, page(n)) for n, buffer in zip(held, buffers, strict=True))
        store.check()


@pytest.mark.parametrize("num_kept", [40, 400])
def test_pages_with_a_deadline_outlast_pages_that_are_stored_later(tmp_path: Path, num_kept: int) -> None:
    """Pages with a deadline outlast later pages, up to nine tenths of the stored bytes. If more pages have deadlines,
    the most recently used of them stay. Other pages are always stored. A page whose deadline has passed is evicted like
    others."""
    store: LmdbPageStore = open_store(tmp_path, budget_bytes=budget_of(100))
    for first in range(0, num_kept, 10):
        put_numbers(
            store, range(first + 9, first - 1, -1)
        )  # within one call, the first page counts as the most recently used
        store.keep_until([key_of(n) for n in range(first + 9, first - 1, -1)], math.inf)
    for first in range(500, 800, 10):
        assert all(put_numbers(store, range(first, first + 10)))
    found, num_pages = found_numbers(store, range(num_kept)), store.stats().entries
    assert found == set(range(num_kept - len(found), num_kept))
    assert len(found) == num_kept or 0.8 * num_pages < len(found) <= 0.9 * num_pages
    assert (len(found) == num_kept) == (num_kept == 40)
    store.keep_until([key_of(n) for n in found], 0.0)
    put_numbers(store, range(1000, 1200))
    assert not found_numbers(store, range(num_kept))
    store.check()
    store.close()


@pytest.mark.parametrize("operation", ["evicted to 1 MiB", "evicted to nothing", "opened with a smaller budget"])
def test_a_store_is_made_smaller(tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicting pages, or opening a store with a smaller budget, removes the oldest pages and frees their space at once;
    neighbours are freed in one call. The store stays valid and writable, and is at most as large as requested."""
    store: LmdbPageStore = open_store(tmp_path)
    for first in range(0, 200, 10):
        assert all(put_numbers(store, range(first + 9, first - 1, -1)))  # the first page of a call is used last
    with pytest.raises(StoreError):
        evict(store, -1)
    to_bytes, punch, num_calls = {"evicted to nothing": 0}.get(operation, 1 << 20), SlotFile._punch, [0]

    def counted(*of_call: Any) -> bool:
        num_calls[0] += 1
        return punch(*of_call)

    monkeypatch.setattr(SlotFile, "_punch", counted)
    if operation == "opened with a smaller budget":
        store.close()
        store = open_store(tmp_path, budget_bytes=to_bytes)
    else:
        assert evict(store, to_bytes) == 200 - store.stats().entries
    stats = store.stats()
    assert num_calls[0] <= 5
    assert stats.evicted == 200 - stats.entries and (stats.entries > 40 if to_bytes else stats.entries == 0)
    assert max(stats.file_bytes, blocks_bytes(tmp_path) - (64 << 10)) <= max(to_bytes, 64 << 10)
    assert found_numbers(store, range(200)) == set(range(200 - stats.entries, 200))
    assert store.put([(key_of(500), page_of(500))]) == [True]
    store.check()
    store.close()


def test_an_index_larger_than_the_budget_costs_no_more_pages_than_it_must(tmp_path: Path) -> None:
    """The index of many tiny pages alone exceeds a new budget. The index shrinks when pages are evicted, so the newest
    pages stay."""
    with contextlib.closing(open_store(tmp_path, page_bytes=64)) as store:
        assert all(put_numbers(store, range(3000), 64))
        with store.reading() as pages:
            assert pages.index.num_bytes() > 350_000
    with contextlib.closing(open_store(tmp_path, page_bytes=64, budget_bytes=350_000)) as store:
        assert store.stats().entries >= 8 and store.stats().file_bytes <= 350_000
        assert found_numbers(store, range(8), 64) == set(
            range(8)
        )  # within one call, the first page counts as the most recently used
        store.check()


def test_no_more_is_evicted_than_it_takes(tmp_path: Path) -> None:
    """The store evicts just enough pages for the bytes to be freed, and one more page for one more byte."""
    with contextlib.closing(open_store(tmp_path, level=0)) as store:
        put_numbers(store, range(20))
        for more_bytes, num_pages in ((0, 3), (1, 4)):
            with store.writing() as writer, store.reading() as pages:
                needed_bytes = writer.slots.used_bytes + pages.index.num_bytes()
            assert evict(store, needed_bytes - 3 * (4096 + 16384) - more_bytes) == num_pages


def test_a_call_keeps_its_own_pages(tmp_path: Path) -> None:
    """Pages of another length need space, most free slots are in segments with pages, and the segment with most free
    slots has pages of the same call. The store does not empty this segment."""
    page_bytes, budget_bytes, number = 64 << 10, budget_of(80, 64 << 10), 0
    with contextlib.closing(open_store(tmp_path, page_bytes=page_bytes, budget_bytes=budget_bytes)) as store:
        while not store.stats().evicted:
            put_numbers(store, [number], page_bytes, "flat")
            number += 1
        with store.writing() as writer:
            segment = writer.slots.most_scattered(-1)
            assert segment is not None
        per_segment = len(segment.slots)
        store.delete([key_of(n) for n in range(number) if n < per_segment - 1 or n % per_segment < 4])
        flat = [(key_of(n), page_of(n, page_bytes, "flat")) for n in (number, number + 1)]
        raw = [(key_of(n), page_of(n, page_bytes)) for n in range(number + 2, number + 5)]
        assert store.put([*raw, *flat]) == [True] * 5
        store.check()


def test_space_comes_back(tmp_path: Path) -> None:
    """The space of deleted pages is used again. Compacting returns it to the file system, also the space after the last
    page, and then the store counts its smaller size. All other pages are kept."""
    with contextlib.closing(open_store(tmp_path)) as store:
        put_numbers(store, range(60))
        before_bytes = blocks_bytes(tmp_path)
        assert store.delete([key_of(n) for n in range(0, 60, 2)]) == 30
        assert all(put_numbers(store, range(60, 90))) and blocks_bytes(tmp_path) == before_bytes
        store.delete([key_of(n) for n in [*range(1, 30, 2), *range(60, 90)]])
        assert store.compact() >= 25 * PAGE_BYTES
        assert max(blocks_bytes(tmp_path), store.stats().file_bytes) < before_bytes - 25 * PAGE_BYTES
        assert slots_path(tmp_path).stat().st_size < 33 * (PAGE_BYTES + 4096 + 64)
    with contextlib.closing(open_store(tmp_path)) as store:
        with store.writing() as writer:
            assert writer.slots.disk_bytes <= blocks_bytes(tmp_path)
        assert found_numbers(store, range(60)) == set(range(31, 60, 2))
        assert put_numbers(store, [200]) == [True]
        store.check()
