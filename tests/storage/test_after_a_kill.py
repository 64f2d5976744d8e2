"""After its process was killed before any change of its slots, a store has the newest page of each key, and no deleted
page. Tests simulate a kill by copying the files."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.storage import LmdbPageStore, PageBuffer, verify
from hicache.storage.slot_file import SlotFile
from storage_pages import budget_of, key_of, open_store, page_of

PAGE_BYTES, NUM_KEYS = 64 << 10, 100
KEYS = [key_of(key) for key in range(NUM_KEYS)]
SETTINGS: dict[str, Any] = {"page_bytes": PAGE_BYTES, "budget_bytes": budget_of(8, PAGE_BYTES)}
SEGMENTS = {**SETTINGS, "budget_bytes": 4 << 20}  # segments of eight slots each for pages that compress well

WRITE = SlotFile._write

Versions = dict[int, int]  # by key: the version of its page


@functools.cache
def page(key: int, version: int) -> PageBuffer:
    """A page of a key and version. Most pages compress well. A page that does not compress makes the store evict many
    of them, and some of their slots stay free."""
    return page_of(1000 * key + version, PAGE_BYTES, "flat" if (key + version) % 4 else "random")


def held(store: LmdbPageStore) -> Versions:
    """The version that the store has of each page. Compares every byte."""
    buffers = [np.empty(PAGE_BYTES, dtype=np.uint8) for _ in range(NUM_KEYS)]
    return {
        key: next(version for version in range(1, 250) if np.array_equal(buffer, page(key, version)))
        for key, (buffer, hit) in enumerate(zip(buffers, store.get_into(KEYS, buffers), strict=True))
        if hit
    }


def kill(folder: Path, copy: Path) -> None:
    """Copy to `copy` the files that a kill of the store's process would leave now."""
    shutil.copytree(folder, copy)


def begin_write(file: SlotFile, content: bytes, slot: int, random: random.Random) -> None:
    """Write some blocks of `content`, not always the first ones."""
    stop = random.randrange(0, len(content) + 1, 4096)
    start = random.choice([0, random.randrange(0, stop + 1, 4096)])
    with file._data.open("r+b") as written:
        written.seek(slot * file.slot_bytes + start)
        written.write(content[start:stop])


class History:
    """The history of a store in numbered folders below `root`, one after each kill, and the pages that each key may
    have after a kill."""

    def __init__(self, root: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.random, self.num_kills = root, random.Random(seed), 0
        self.newest = dict.fromkeys(range(NUM_KEYS), 0)
        self.deleted = dict.fromkeys(range(NUM_KEYS), 0)  # by key: the newest version at its last delete
        self.kill_at = -1  # number of changes of slots before the kill
        for name in ("_write", "_punch"):
            monkeypatch.setattr(SlotFile, name, self.before(getattr(SlotFile, name)))

    def before(self, change: Callable[..., bool | None]) -> Callable[..., bool | None]:
        def perhaps_copy(file: SlotFile, *arguments: Any) -> bool | None:
            if self.kill_at == 0:
                if change is WRITE:  # a kill may cut a write off
                    parts, slot = arguments
                    begin_write(file, b"".join(parts), slot, self.random)
                self.copy()
            self.kill_at -= 1
            return change(file, *arguments)

        return perhaps_copy

    @property
    def folder(self) -> Path:
        return self.root / str(self.num_kills)

    def copy(self) -> None:
        kill(self.folder, self.root / "copy")

    def run(self, num_steps: int) -> None:
        store, now = open_store(self.folder, **SETTINGS), Versions()
        for _ in range(num_steps):
            before, dies = now, self.random.random() < 0.2
            self.kill_at = self.random.randrange(24) if dies else -1
            deleted, now = self.step(store, before)
            if not dies or self.kill_at >= 0:  # the kill came after the step
                self.deleted.update((key, self.newest[key]) for key in deleted)
            if self.kill_at >= 0:
                self.copy()
            self.kill_at = -1
            if dies:
                store.close()
                store = self.reopened()
                self.compare(before, now, after := held(store))
                now = after
        store.close()

    def step(self, store: LmdbPageStore, before: Versions) -> tuple[list[int], Versions]:
        """Put or delete pages; returns the deleted keys, and the versions in the store. No page counts as used."""
        keys = self.random.sample(range(NUM_KEYS), self.random.choice([1, 1, 2, 9]))
        deletes = self.random.random() < 0.3
        if deletes:
            store.delete([KEYS[key] for key in keys])
        else:
            self.newest.update((key, self.newest[key] + 1) for key in keys)
            items = [(KEYS[key], page(key, self.newest[key])) for key in keys]
            assert store.put(items) == [True] * len(keys)
            before = {key: self.newest[key] for key in keys} | before
        present = store.contains(KEYS)
        return keys if deletes else [], {key: version for key, version in before.items() if present[key]}

    def reopened(self) -> LmdbPageStore:
        """Open the copy, and sometimes close and open it again."""
        shutil.rmtree(self.folder)
        self.num_kills += 1
        (self.root / "copy").rename(self.folder)
        store = open_store(self.folder, **SETTINGS)
        assert {fault.action for fault in verify(store, repair=True).faults} <= {"dropped"}  # pages with cut-off writes
        store.check()
        assert store.rebuilt_pages is not None
        if self.random.random() < 0.5:
            store.close()
            store = open_store(self.folder, **SETTINGS)
            assert store.rebuilt_pages is None
        return store

    def compare(self, before: Versions, now: Versions, after: Versions) -> None:
        """Compare the versions after a kill with the expected ones. `before`: before the step of the kill; `now`: the
        versions without the kill; `after`: after the kill."""
        for key in range(NUM_KEYS):
            if key in before and before[key] == now.get(key):
                assert after.get(key) == before[key]
            elif key in after:
                assert self.deleted[key] < after[key] <= self.newest[key]


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(n, marks=pytest.mark.long) for n in range(3, 30))])
def test_after_a_kill(disk: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random puts, evictions, deletes and puts of other bytes run with several kills, some of them within a step. After
    each kill all held pages are there, and no deleted page is. Evicted pages may be back."""
    History(disk, seed, monkeypatch).run(100)


def evict(store: LmdbPageStore, count: int) -> list[bytes]:
    """Put pages, one of which does not compress and needs the space of many others, from several segments. Returns the
    evicted keys. Some slots of evicted pages stay free."""
    numbers = range(1000, 1000 + count)
    before = [*KEYS, *map(key_of, numbers)]
    for n in numbers:
        assert store.put([(key_of(n), page_of(n, PAGE_BYTES, "random" if n == numbers[-2] else "flat"))]) == [True]
    return [key for key, present in zip(before, store.contains(before), strict=True) if not present]


def test_what_was_deleted_after_it_was_evicted_does_not_come_back(tmp_path: Path) -> None:
    """A kill may bring an evicted page back, but not if it was deleted after its eviction, although that delete found
    no page."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    with contextlib.closing(open_store(first, **SEGMENTS)) as store:
        evicted = evict(store, 600)
        kill(first, second)
        assert store.delete(evicted) == 0
        kill(first, third)
    for folder, may_be_back in ((second, True), (third, False)):
        with contextlib.closing(open_store(folder, **SEGMENTS)) as store:
            assert any(store.contains(evicted)) == may_be_back


@pytest.mark.parametrize("closes", [False, True])
def test_the_page_that_was_put_last_wins(closes: bool, tmp_path: Path) -> None:
    """The page that was put last wins, even over a page that was put after more uses than a rebuilt index, possibly
    closed since, has counted."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    with contextlib.closing(open_store(first, **SEGMENTS)) as store:
        store.put([(KEYS[0], page(0, 1))])
        store.touch([KEYS[0]] * 5000)
        assert all(store.put([(key, page_of(n, PAGE_BYTES, "flat")) for n, key in enumerate(KEYS)]))
        kill(first, second)
    if closes:
        open_store(second, **SEGMENTS).close()
    with contextlib.closing(open_store(second, **SEGMENTS)) as store:
        again = sorted(set(KEYS) & set(evict(store, 600)))
        new = page_of(1, PAGE_BYTES, "flat")
        assert len(again) > 1, "new pages were evicted before those that the rebuilt index found"
        new[0] = 200
        assert store.put([(key, new) for key in again]) == [True] * len(again)
        kill(second, third)
    with contextlib.closing(open_store(third, **SEGMENTS)) as store:
        buffers = [np.empty(PAGE_BYTES, dtype=np.uint8) for _ in again]
        assert store.get_into(again, buffers) == [True] * len(again)
        assert all(np.array_equal(buffer, new) for buffer in buffers)


def test_a_page_whose_commit_failed_yields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page whose commit failed after its write is not stored. A later page under its key wins. If that page is
    deleted, no page of the key comes back, also if the store was closed in between."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    settings = {**SETTINGS, "budget_bytes": 64 << 20, "durability": "commit"}  # three pages fit one commit

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with contextlib.closing(open_store(first, **settings)) as store:
        assert all(store.put([(KEYS[key], page_of(key, PAGE_BYTES)) for key in (3, 4, 5, 6)]))
        assert store.delete(KEYS[5:7]) == 2
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", fail)
            assert store.put([(KEYS[key], page_of(key, PAGE_BYTES)) for key in (1, 0, 2)]) == [False] * 3
        assert store.reopen() and store.put([(KEYS[1], page_of(7, PAGE_BYTES))]) == [True]
        kill(first, second)
    with contextlib.closing(open_store(second, **settings)) as store:
        buffer = np.empty(PAGE_BYTES, dtype=np.uint8)
        assert store.get_into([KEYS[1]], [buffer]) == [True] and np.array_equal(buffer, page_of(7, PAGE_BYTES))
        assert store.stats().entries > 3  # pages whose commit failed may be there
    with contextlib.closing(open_store(first, **settings)) as store:
        assert store.delete([KEYS[0], KEYS[2]]) == 0
        kill(first, third)
    with contextlib.closing(open_store(third, **settings)) as store:
        assert store.contains(KEYS[:7]) == [False, True, False, True, True, False, False]
