"""Readers beside a writer, closing beside readers, and a disk that refuses."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from hicache.storage import PageFilter, StoreError
from storage_pages import (
    PAGE_BYTES,
    blocks_bytes,
    budget_of,
    found_numbers,
    key_of,
    open_store,
    page_of,
    put_numbers,
)

NUM_BUDGETED = 60  # pages of the budget


def run_threads(threads: list[threading.Thread], failures: list[BaseException]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures


@pytest.mark.parametrize("kind", ["random", "normal"])
def test_readers_beside_a_writer(tmp_path: Path, kind: str) -> None:
    """Four readers only ever see whole, right pages while a writer stores, evicts, deletes and compacts."""
    budget_bytes = budget_of(NUM_BUDGETED)
    store = open_store(tmp_path, budget_bytes=budget_bytes, filter=PageFilter("byte_shuffle", 2))
    pages = {n: page_of(n, kind=kind) for n in range(160)}
    failures: list[BaseException] = []
    done = threading.Event()
    hits = [0] * 4

    def write() -> None:
        try:
            for turn in range(120):
                numbers = [(turn * 4 + i) % 160 for i in range(4)]
                assert store.put([(key_of(n), pages[n]) for n in numbers]) == [True] * 4
                assert store.stats().file_bytes <= 1.05 * budget_bytes
                if turn % 10 == 9:
                    store.delete([key_of(n) for n in numbers])
                if turn % 40 == 39:
                    store.compact()
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            done.set()

    def read(which: int) -> None:
        buffers = [np.empty(PAGE_BYTES, dtype=np.uint8) for _ in range(10)]
        generator = np.random.default_rng(which)
        try:
            while not done.is_set():
                numbers = [int(n) for n in generator.integers(0, 160, 10)]
                for n, buffer, hit in zip(
                    numbers, buffers, store.get_into([key_of(n) for n in numbers], buffers), strict=True
                ):
                    hits[which] += hit
                    assert not hit or np.array_equal(buffer, pages[n]), n
                done.wait(0.002)  # else four readers on idle cores leave the writer little of the interpreter's lock
        except BaseException as error:
            failures.append(error)
            raise

    readers = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    run_threads([threading.Thread(target=write), *readers], failures)
    assert all(count > 0 for count in hits)
    assert store.stats().corrupt == 0 and store.stats().read_errors == 0 and store.stats().write_errors == 0
    assert store.stats().hits == sum(hits)
    store.check()
    store.close()


def test_close_waits_for_readers(tmp_path: Path) -> None:
    """Closing while threads read neither crashes nor spoils a page: each reader ends with an error that says closed."""
    for _ in range(5):
        store = open_store(tmp_path)
        put_numbers(store, range(16))
        failures: list[BaseException] = []
        ended: list[str] = []
        reading = threading.Barrier(4)

        def read(store=store, failures=failures, ended=ended, reading=reading) -> None:
            try:
                assert found_numbers(store, range(16)) == set(range(16))
                reading.wait(30)
                while True:
                    assert found_numbers(store, range(16)) == set(range(16))
            except StoreError as error:
                ended.append(str(error))
            except AssertionError as error:
                failures.append(error)

        def close(store=store, reading=reading) -> None:
            reading.wait(30)
            store.close()

        run_threads([threading.Thread(target=read) for _ in range(3)] + [threading.Thread(target=close)], failures)
        assert len(ended) == 3 and all("closed" in text for text in ended)


def fill_until_refused(path: Path) -> None:
    """The store at `path` meets the end of its disk below its budget, turns read-only and serves what it has."""
    store = open_store(path)
    stored: list[int] = []
    for number in range(4000):
        if put_numbers(store, [number]) == [False]:
            break
        stored.append(number)
    stats = store.stats()
    assert stats.read_only and stats.write_errors == 1 and 10 < len(stored) < 3000
    assert put_numbers(store, [0, 5000]) == [False, False]
    assert store.delete([key_of(0)]) == 0 and store.compact() == 0
    assert found_numbers(store, range(len(stored) + 10)) == set(stored)
    store.check()
    store.close()
    again = open_store(path)
    assert found_numbers(again, range(len(stored) + 10)) == set(stored)
    assert not again.stats().read_only
    again.close()


def test_file_size_limit(tmp_path: Path) -> None:
    """A write that the system refuses turns the store read-only; reads go on, and so does a store opened again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, hard))
    try:
        fill_until_refused(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store = open_store(tmp_path)
    assert put_numbers(store, [5000]) == [True]
    store.close()


def test_full_disk(small_disk: Path) -> None:
    """A full disk turns the store read-only; reads go on, and it opens again on the full disk with everything."""
    fill_until_refused(small_disk / "store")


def test_space_comes_back_on_a_full_disk(small_disk: Path) -> None:
    """With the disk full, what was deleted is given back, all else stays, and pages are stored again."""
    store = open_store(small_disk / "store")
    put_numbers(store, range(300))
    fill_up(small_disk / "ballast")
    before = blocks_bytes(small_disk / "store")
    assert store.delete([key_of(n) for n in range(0, 300, 3)]) == 100
    store.compact()
    assert blocks_bytes(small_disk / "store") <= before - 100 * PAGE_BYTES
    assert not store.stats().read_only
    assert found_numbers(store, range(300)) == {n for n in range(300) if n % 3}
    assert put_numbers(store, range(300, 350)) == [True] * 50
    assert found_numbers(store, range(350)) == {n for n in range(300) if n % 3} | set(range(300, 350))
    store.check()
    store.close()


def fill_up(ballast: Path) -> None:
    """Leave nothing of a disk but 64 KiB."""
    free = os.statvfs(ballast.parent)
    ballast.write_bytes(bytes(free.f_bavail * free.f_bsize - (64 << 10)))
