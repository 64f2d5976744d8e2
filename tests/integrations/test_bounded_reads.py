"""Reads of a remote store behind a disk: they end in time, and write to no buffer later."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from disk_case import wait_until
from hicache.integrations import bounded_reads
from hicache.integrations.bounded_reads import BoundedReads
from hicache.storage import ChainStore, PageBuffer, StoreError
from memory_store import MemoryPageStore

PAGE_BYTES = 4096
KEYS = [b"%d" % n for n in range(6)]


class GatedStore(MemoryPageStore):
    """A store whose reads wait until they may begin, and fail as they are told to."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.may_read = threading.Event()
        self.may_read.set()
        self.error: Exception | None = None
        self.fails = False
        self.num_asked, self.hangs_at = 0, 0
        self.is_closed = False
        self._errors: Counter[int] = Counter()  # by thread

    def contains(self, keys: Sequence[bytes], **limits: float) -> list[bool]:
        self._pass()
        return super().contains(keys)

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], **limits: float) -> list[bool]:
        self._pass()
        return [False] * len(keys) if self.fails else super().get_into(keys, buffers)

    def thread_read_errors(self) -> int:
        return self._errors[threading.get_ident()]

    def close(self) -> None:
        self.is_closed = True

    def _pass(self) -> None:
        self.num_asked += 1
        if self.num_asked == self.hangs_at:
            self.may_read.clear()
        assert self.may_read.wait(60)
        if self.error is not None:
            raise self.error
        if self.fails:
            self._errors[threading.get_ident()] += 1


@contextmanager
def gated(wait_s: float = 60.0) -> Iterator[tuple[GatedStore, BoundedReads]]:
    store = GatedStore()
    store.put([(key, page(n)) for n, key in enumerate(KEYS)])
    reads = BoundedReads(store, wait_s=wait_s)
    try:
        yield store, reads
    finally:
        store.may_read.set()
        reads.close()
        assert store.is_closed


def page(n: int) -> PageBuffer:
    return np.full(PAGE_BYTES, n, np.uint8)


def test_reads_from_many_threads_get_their_pages() -> None:
    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(50):
            numbers = rng.permutation(len(KEYS))[: rng.integers(1, len(KEYS) + 1)]
            pages = [page(99) for _ in range(len(numbers) + 1)]
            assert reads.get_into([*(KEYS[n] for n in numbers), b"other"], pages) == [True] * len(numbers) + [False]
            if [set(one.tolist()) for one in pages] != [*({n} for n in numbers), {99}]:
                wrong.append(seed)

    wrong: list[int] = []
    with gated() as (_, reads):
        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong and reads.contains([*KEYS, b"other"]) == [True] * len(KEYS) + [False]
        assert reads.get_into([], []) == [] and reads.contains([]) == []
        assert reads.stats().read_errors == reads.thread_read_errors() == 0


@pytest.mark.parametrize("method", ["contains", "get_into"])
def test_a_store_that_hangs_is_given_up_and_not_asked_again(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its keys are misses meanwhile, and the disk serves on. What it answers later reaches no buffer; then it is asked
    again."""
    monkeypatch.setattr(bounded_reads, "_GRACE_S", 0.0)
    disk = MemoryPageStore(1 << 30)
    disk.put([(b"on disk", page(7))])
    with gated(wait_s=0.01) as (store, reads):
        store.may_read.clear()
        buffers = [page(99), page(99)]
        if method == "contains":
            assert reads.contains(KEYS[:2]) == [False, False]
        else:
            assert reads.get_into(KEYS[:2], buffers) == [False, False]
        both = ChainStore([disk, reads])
        assert both.contains([b"on disk", KEYS[0]]) == [True, False]
        assert both.get_into([b"on disk", KEYS[0]], buffers) == [True, False]
        wait_until(lambda: store.num_asked > 0)
        assert store.num_asked == 1 and "does not answer" in caplog.text
        assert reads.thread_read_errors() == reads.stats().read_errors == 2  # the chain leaves it out after the second
        assert both.thread_read_errors() == 0
        monkeypatch.setattr(bounded_reads, "_GRACE_S", 60.0)
        store.may_read.set()
        wait_until(lambda: reads.contains(KEYS[:1]) == [True])
        assert [set(one.tolist()) for one in buffers] == [{7}, {99}]
        assert reads.get_into(KEYS[:2], buffers) == [True, True]
        assert [set(one.tolist()) for one in buffers] == [{0}, {1}]


def test_pages_that_came_in_time_are_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that hangs in the middle costs the rest, which reaches no buffer later."""
    monkeypatch.setattr(bounded_reads, "_PART_BYTES", 2 * PAGE_BYTES)
    buffers = [page(99) for _ in KEYS]
    with gated(wait_s=1.0) as (store, reads):
        store.hangs_at = 3
        found = reads.get_into(KEYS, buffers)
        assert sum(found) in (0, 2, 4) and found == sorted(found, reverse=True)  # 4, unless this machine stood still
        store.may_read.set()
        wait_until(lambda: reads.contains(KEYS[:1]) == [True])
    assert [set(one.tolist()) for one in buffers] == [{n} if hit else {99} for n, hit in enumerate(found)]


def test_failures_are_those_of_the_thread_that_asked() -> None:
    with gated() as (store, reads):
        store.fails = True
        assert reads.get_into(KEYS[:1], [page(99)]) == [False]
        assert reads.thread_read_errors() == 1 and store.thread_read_errors() == 0
        counts: list[int] = []
        other = threading.Thread(target=lambda: counts.append(reads.thread_read_errors()))
        other.start()
        other.join(60)
        assert counts == [0]


@pytest.mark.parametrize("error", [StoreError("gone"), OSError("gone"), ZeroDivisionError("gone")])
def test_what_the_store_raises_reaches_the_caller(error: Exception) -> None:
    with gated() as (store, reads):
        store.error = error
        for call in (lambda: reads.contains(KEYS), lambda: reads.get_into(KEYS[:1], [page(99)])):
            with pytest.raises(type(error), match="gone"):
                call()
        store.error = None
        assert reads.contains(KEYS) == [True] * len(KEYS)


def test_a_store_with_a_read_under_way_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_reads, "_GRACE_S", 0.0)
    store = GatedStore()
    reads = BoundedReads(store, wait_s=0.01, close_s=0.01)
    store.may_read.clear()
    assert reads.contains(KEYS) == [False] * len(KEYS)
    reads.close()
    assert not store.is_closed
    with pytest.raises(StoreError):
        reads.contains(KEYS)
    store.may_read.set()
    reads.close()
