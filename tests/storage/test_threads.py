"""Threads that read while a writer fills the budget, and a store that closes while threads read."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hicache.storage import PageBuffer, PageFilter, StoreError
from storage_pages import blocks_bytes, budget_of, found_numbers, key_of, open_store, page_of, put_numbers

PAGE_BYTES = 96 << 10  # bytes of pages that are large enough to be compressed in threads
NUM_BUDGETED, MIN_LOOKS = 40, 20


def mixed_page(number: int) -> PageBuffer:
    """A page with random bytes up to a position that the number decides, and zeros after it, so that values have many
    sizes."""
    page = page_of(number, PAGE_BYTES)
    page[(number * 2654435761) % PAGE_BYTES :] = 0
    return page


@pytest.mark.parametrize("num_turns", [40, pytest.param(400, marks=pytest.mark.long)])
def test_readers_with_a_concurrent_writer(tmp_path: Path, num_turns: int) -> None:
    """While pages are stored for many times the budget, deleted, and files compacted, readers get only complete, right
    pages. The files never exceed the budget by 5 %, and every put is stored."""
    budget_bytes = budget_of(NUM_BUDGETED, PAGE_BYTES)
    settings = {"page_bytes": PAGE_BYTES, "budget_bytes": budget_bytes, "filter": PageFilter("byte_shuffle", 2)}
    store, newest, done, turns = open_store(tmp_path, **settings), [0], threading.Event(), threading.Semaphore(0)

    def read(seed: int) -> int:
        draw, num_hits, num_looks = np.random.default_rng(seed), 0, 0
        buffers = [np.empty(PAGE_BYTES, dtype=np.uint8) for _ in range(6)]
        while num_looks < MIN_LOOKS or not done.is_set():
            turns.acquire()
            numbers = [max(0, newest[0] - int(back)) for back in draw.integers(0, 2 * NUM_BUDGETED, 6)]
            hits = store.get_into([key_of(n) for n in numbers], buffers)
            for number, buffer, hit in zip(numbers, buffers, hits, strict=True):
                assert not hit or np.array_equal(buffer, mixed_page(number))
            assert blocks_bytes(tmp_path) <= 1.05 * budget_bytes
            num_hits, num_looks = num_hits + sum(hits), num_looks + 1
        return num_hits

    with ThreadPoolExecutor(3) as threads:
        readers = [threads.submit(read, seed) for seed in range(3)]
        try:
            for turn in range(num_turns):
                numbers = range(10 * turn, 10 * turn + 10)
                assert store.put([(key_of(n), mixed_page(n)) for n in numbers]) == [True] * 10
                assert max(blocks_bytes(tmp_path), store.stats().file_bytes) <= 1.05 * budget_bytes
                newest[0] = numbers[-1]
                turns.release(3)
                if turn % 10 == 5:
                    assert store.delete([key_of(n) for n in numbers[::2]]) == 5
                if turn % 20 == 15:
                    store.compact()
        finally:
            done.set()
            turns.release(3 * MIN_LOOKS)
    stats = store.stats()
    assert sum(reader.result() for reader in readers) == stats.hits > 0
    assert stats.corrupt == stats.read_errors == stats.write_errors == 0
    assert stats.evicted > 2 * NUM_BUDGETED and stats.put_bytes_stored > 3 * budget_bytes
    assert stats.live_bytes > 0.7 * NUM_BUDGETED * PAGE_BYTES, "more was evicted than the budget demands"
    store.check()
    store.close()


def test_close_waits_for_readers(tmp_path: Path) -> None:
    """Closing a store while threads read neither crashes nor corrupts a page. Each reader ends with an error of the
    store."""
    for _ in range(3):
        store, reading = open_store(tmp_path), threading.Barrier(4)
        put_numbers(store, range(16))

        def read(store=store, reading=reading) -> None:
            assert found_numbers(store, range(16)) == set(range(16))
            reading.wait()
            with contextlib.suppress(StoreError):
                while True:
                    assert found_numbers(store, range(16)) == set(range(16))

        with ThreadPoolExecutor(3) as threads:
            readers = [threads.submit(read) for _ in range(3)]
            reading.wait()
            store.close()
        assert [reader.result() for reader in readers] == [None] * 3
