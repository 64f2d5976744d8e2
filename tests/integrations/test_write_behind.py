"""Writes to a remote store behind a disk: copies of the pages, in time of their own, within a budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from disk_case import wait_until
from hicache.integrations.bounded_reads import BoundedReads
from hicache.integrations.write_behind import WriteBehind
from hicache.storage import ChainStore, LmdbPageStore, PageBuffer, PageStore, StoreError, StoreStats
from hicache.storage.conformance import MakeStore, StoreConformance
from memory_store import MemoryPageStore

PAGE_BYTES = 4096
BUDGET_BYTES = 16 << 20


class TestBehindADisk(StoreConformance):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        def make(**settings: object) -> PageStore:
            opened = partial(LmdbPageStore, budget_bytes=BUDGET_BYTES, **settings)  # type: ignore[arg-type]
            return ChainStore([opened(tmp_path / "near"), WriteBehind(BoundedReads(opened(tmp_path / "far")))])

        return make


class HeldStore(MemoryPageStore):
    """A store whose puts wait until they may begin, and fail as they are told to."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.may_put, self.began = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.read_only = False
        self.groups: list[list[bytes]] = []

    def put(self, items: Sequence[tuple[bytes, PageBuffer]], **limits: float) -> list[bool]:
        self.began.set()
        assert self.may_put.wait(60)
        self.groups.append([key for key, _ in items])
        if self.error is not None:
            raise self.error
        return super().put(items, **limits)

    def stats(self) -> StoreStats:
        return StoreStats(read_only=self.read_only)

    def reopen(self) -> bool:
        self.read_only = False
        return True


@contextmanager
def held(**settings: float) -> Iterator[tuple[HeldStore, WriteBehind]]:
    store = HeldStore()
    behind = WriteBehind(store, **settings)  # type: ignore[arg-type]
    try:
        yield store, behind
    finally:
        store.may_put.set()
        behind.close()


def page(n: int) -> PageBuffer:
    return np.full(PAGE_BYTES, n, np.uint8)


def values(store: PageStore, keys: Sequence[bytes]) -> list[int | None]:
    """The byte that each page is full of, None for a miss."""
    pages = [np.zeros(PAGE_BYTES, np.uint8) for _ in keys]
    found = store.get_into(keys, pages)
    assert all(len(set(p.tobytes())) == 1 for p in pages)
    return [int(p[0]) if hit else None for p, hit in zip(pages, found, strict=True)]


def test_a_store_that_hangs_does_not_hold_up_the_disk() -> None:
    """What waits is a copy: the store gets the bytes of then, though the caller's memory has others by now."""
    disk = MemoryPageStore(1 << 30)
    with held() as (store, behind):
        both = ChainStore([disk, behind])
        for n in range(5):
            memory = page(n + 1)
            assert both.put([(b"%d" % n, memory)]) == [True]
            memory[:] = 99
        keys = [b"%d" % n for n in range(5)]
        assert store.began.wait(60) and values(store, keys) == values(behind, keys) == [None] * 5
        assert values(both, [*keys, b"other"]) == [1, 2, 3, 4, 5, None]
        assert both.contains([b"other", *keys]) == [False] + [True] * 5
        store.may_put.set()
        both.sync()
        assert values(store, keys) == [1, 2, 3, 4, 5] and behind.dropped_pages == 0
        assert list(chain.from_iterable(store.groups)) == keys and len(store.groups) < 5


def test_a_present_key_keeps_its_page_while_another_waits() -> None:
    """A page of another size, which the disk does not have under this key, is not read from its copy either."""
    with held() as (store, behind):
        both = ChainStore([MemoryPageStore(1 << 30), behind])
        store.may_put.set()
        both.put([(b"a", page(1))])
        both.sync()
        store.may_put.clear()
        store.began.clear()
        larger = np.full(2 * PAGE_BYTES, 2, np.uint8)
        assert both.put([(b"a", larger)]) == [True] and store.began.wait(60)
        assert both.get_into([b"a"], [np.zeros(2 * PAGE_BYTES, np.uint8)]) == [False]
        store.may_put.set()
        both.sync()
        assert both.get_into([b"a"], [np.zeros(2 * PAGE_BYTES, np.uint8)]) == [False] and values(both, [b"a"]) == [1]


def test_pages_beyond_the_budget_are_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    """Of a call the first ones are taken, which are a prefix; a page that waits counts once; one that is larger
    than the budget is taken alone."""
    with held(budget_bytes=3 * PAGE_BYTES) as (store, behind):
        keys = [b"%d" % n for n in range(5)]
        assert behind.put([(key, page(n)) for n, key in enumerate(keys)]) == [True] * 3 + [False] * 2
        assert behind.put([(keys[1], page(1)), (keys[4], page(4))]) == [True, False]
        assert behind.dropped_pages == 3 and "does not keep up" in caplog.text
        store.may_put.set()
        behind.sync()
        assert values(store, keys) == [0, 1, 2, None, None]
        assert behind.put([(keys[4], page(4))]) == [True]
        behind.sync()
        assert behind.put([(b"large", np.zeros(5 * PAGE_BYTES, np.uint8))]) == [True]
        behind.sync()
        assert values(store, keys) == [0, 1, 2, None, 4] and behind.dropped_pages == 3
    assert "3 pages were not written" in caplog.text


@pytest.mark.parametrize("error", [StoreError("gone"), OSError("gone"), ZeroDivisionError("gone")])
def test_a_store_that_fails_costs_the_pages_of_that_put(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with held() as (store, behind):
        store.may_put.set()
        store.error = error
        assert behind.put([(b"a", page(1))]) == [True]
        behind.sync()
        assert behind.dropped_pages == 1 and "gone" in caplog.text
        store.error = None
        assert behind.put([(b"a", page(2))]) == [True]
        behind.sync()
        assert values(store, [b"a"]) == [2] and behind.dropped_pages == 1


def test_a_store_that_is_read_only_is_opened_again() -> None:
    with held() as (store, behind):
        store.may_put.set()
        store.read_only = True
        assert not behind.reopen() and behind.put([(b"a", page(1))]) == [True]
        behind.sync()
        assert values(store, [b"a"]) == [1] and behind.reopen()


def test_what_is_deleted_does_not_come_back() -> None:
    """Neither a page that waits nor one whose put is under way."""
    with held() as (store, behind):
        behind.put([(b"under way", page(1))])
        assert store.began.wait(60)
        behind.put([(b"waits", page(2)), (b"stays", page(3))])
        deleted: list[int] = []
        deleting = threading.Thread(target=lambda: deleted.append(behind.delete([b"waits", b"under way"])))
        deleting.start()
        store.may_put.set()
        deleting.join(60)
        behind.sync()
        assert deleted == [1] and values(store, [b"under way", b"waits", b"stays"]) == [None, None, 3]


def test_closing_writes_what_waits_and_gives_up_in_time() -> None:
    """A store that hangs is waited for no longer than said; what it was not given counts as dropped."""
    store = HeldStore()
    behind = WriteBehind(store, close_s=0.01)
    behind.put([(b"under way", page(1))])
    assert store.began.wait(60)
    behind.put([(b"waits", page(2))])
    closing_thread = threading.Thread(target=behind.close)
    closing_thread.start()
    wait_until(lambda: behind.dropped_pages == 1)
    store.may_put.set()
    closing_thread.join(60)
    assert not closing_thread.is_alive() and store.groups == [[b"under way"]]
    behind.close()
    with pytest.raises(StoreError):
        behind.put([(b"late", page(3))])

    store = HeldStore()
    store.may_put.set()
    with closing(WriteBehind(store)) as behind:
        behind.put([(b"a", page(1)), (b"b", page(2))])
    assert list(chain.from_iterable(store.groups)) == [b"a", b"b"] and behind.dropped_pages == 0
