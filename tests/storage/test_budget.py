"""The bytes on the disk stay within the budget, whatever is written and whoever reads meanwhile."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hicache.storage import PageBuffer, describe, evict
from storage_pages import (
    blocks_bytes,
    budget_of,
    found_numbers,
    key_of,
    open_store,
    page_of,
)

PAGE_BYTES = 96 << 10  # above the size from which pages are compressed beside the writer
NUM_BUDGETED = 100  # pages of the budget


def mixed_page(number: int) -> PageBuffer:
    """Random bytes up to a place that the number decides, zeros behind: values of many sizes."""
    page = page_of(number, PAGE_BYTES)
    page[(number * 2654435761) % PAGE_BYTES :] = 0
    return page


def right(number: int, buffer: PageBuffer) -> bool:
    return np.array_equal(buffer, mixed_page(number))


@pytest.mark.parametrize("num_pages", [700, pytest.param(4000, marks=pytest.mark.long)])
def test_blocks_stay_within_the_budget(tmp_path: Path, num_pages: int) -> None:
    """Many times the budget is written while readers hold transactions: the blocks of the files, sampled all the time,
    never pass the budget by 5 %, every put is taken, and what is read is right.
    """
    budget_bytes = budget_of(NUM_BUDGETED, PAGE_BYTES)
    store = open_store(tmp_path, page_bytes=PAGE_BYTES, budget_bytes=budget_bytes)
    done, failures, samples, newest = threading.Event(), list[object](), list[int](), [0]

    def guarded(body: Callable[[], None]) -> None:
        try:
            while not done.wait(0.001):
                body()
        except BaseException as error:
            failures.append(error)
            raise

    def sample() -> None:
        samples.append(blocks_bytes(tmp_path))

    def read() -> None:
        numbers = [max(0, newest[0] - 5 * i) for i in range(6)]
        buffers = [np.empty(PAGE_BYTES, dtype=np.uint8) for _ in numbers]
        hits = store.get_into([key_of(n) for n in numbers], buffers)
        assert all(right(n, buffer) for n, buffer, hit in zip(numbers, buffers, hits, strict=True) if hit)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in (sample, read, read)]
    for thread in threads:
        thread.start()
    written_bytes = 0
    try:
        for first in range(0, num_pages, 10):
            items = [(key_of(n), mixed_page(n)) for n in range(first, first + 10)]
            assert store.put(items) == [True] * 10
            written_bytes = store.stats().put_bytes_stored
            newest[0] = first + 9
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    assert not failures and len(samples) > 20
    assert max(samples) <= 1.05 * budget_bytes and written_bytes > 3 * NUM_BUDGETED * PAGE_BYTES * num_pages // 700
    stats = store.stats()
    assert stats.write_errors == stats.read_errors == stats.corrupt == 0 and stats.evicted > num_pages // 2
    store.check()
    store.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_million_small_pages(tmp_path: Path) -> None:
    """A store of a million pages finds each of them, and no other, also after it was opened again."""
    number_of_pages, page_bytes = 1_000_000, 64

    def key(number: int) -> bytes:
        return hashlib.sha256(b"%d" % number).digest()

    def page(number: int) -> PageBuffer:
        return np.full(page_bytes // 4, number, dtype=np.uint32).view(np.uint8)

    store = open_store(tmp_path, page_bytes=page_bytes, budget_bytes=10 << 30, level=0)
    for first in range(0, number_of_pages, 20_000):
        items = [(key(n), page(n)) for n in range(first, first + 20_000)]
        assert store.put(items) == [True] * len(items)
    store.close()
    assert describe(tmp_path).entries == number_of_pages
    store = open_store(tmp_path, page_bytes=page_bytes, budget_bytes=10 << 30, level=0)
    numbers = [int(n) for n in np.random.default_rng(1).integers(0, 2 * number_of_pages, 20_000)]
    held = [n < number_of_pages for n in numbers]
    assert store.contains([key(n) for n in numbers]) == held
    buffers = [np.zeros(page_bytes, dtype=np.uint8) for _ in numbers]
    assert store.get_into([key(n) for n in numbers], buffers) == held
    assert all(np.array_equal(b, page(n)) for n, b, hit in zip(numbers, buffers, held, strict=True) if hit)
    store.close()


def test_a_call_of_many_groups(tmp_path: Path) -> None:
    """A call of many commits, compressed ahead of them in threads, stores each page under its key, and again
    afterwards."""
    store = open_store(tmp_path, page_bytes=PAGE_BYTES)
    for first in (0, 200):
        numbers = range(first, first + 200)
        assert store.put([(key_of(n), page_of(n, PAGE_BYTES)) for n in numbers]) == [True] * 200
        assert found_numbers(store, numbers, PAGE_BYTES) == set(numbers)
    store.check()
    store.close()


def test_a_call_larger_than_the_budget(tmp_path: Path) -> None:
    """Of a call that does not fit the budget the head stays, and the answer says so."""
    budget_bytes = budget_of(NUM_BUDGETED, PAGE_BYTES)
    store = open_store(tmp_path, page_bytes=PAGE_BYTES, budget_bytes=budget_bytes)
    numbers = range(160)
    stored = store.put([(key_of(n), page_of(n, PAGE_BYTES)) for n in numbers])
    kept = stored.count(True)
    assert 60 < kept <= 112 and stored == [True] * kept + [False] * (160 - kept)
    assert found_numbers(store, numbers, PAGE_BYTES) == set(range(kept))
    store.check()
    store.close()


def test_pages_that_fill_the_tables_first(tmp_path: Path) -> None:
    """Of pages that compress to next to nothing the tables of a store with slots are full before the slots: the oldest
    go, every put is taken, and deleting and evicting work."""
    page_bytes, budget_bytes = 256 << 10, 20 << 20
    with contextlib.closing(open_store(tmp_path, page_bytes=page_bytes, budget_bytes=budget_bytes)) as store:
        page = np.zeros(page_bytes, dtype=np.uint8)
        for first in range(0, 4_600, 200):
            items = []
            for n in range(first, first + 200):
                items.append((key_of(n), page.copy()))
                items[-1][1][:8] = np.frombuffer(n.to_bytes(8, "little"), dtype=np.uint8)
            assert store.put(items) == [True] * 200
            assert store.stats().file_bytes <= 1.05 * budget_bytes
        stats = store.stats()
        assert 0 < stats.evicted < 4_600 and stats.write_errors == 0
        assert store.get_into([key_of(4_500)], [page]) == [True] and int.from_bytes(page[:8], "little") == 4_500
        assert store.delete([key_of(n) for n in range(4_500, 4_600)]) == 100
        store.check()
        assert evict(store, 0) > 0 and store.stats().entries == 0
