"""The write path of a store: commits, the budget, and what happens when a write fails.

A commit takes one group of pages: it evicts as the budget demands, which makes slots free; writes the pages to slots;
syncs them; and enters them in the index. So a page is found only when its slot holds it, and a slot is written only
when no page in the index is there. The files of a store need at most its budget: slots in use, freed ones that are no
holes yet, and the index.

With durability "commit" the slots are on disk before their pages are acknowledged. With "relaxed" the kernel has begun
to write them, and they are on disk one commit later: a thread syncs one group while the next one is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import lmdb

from hicache.storage.access_log import AccessLog
from hicache.storage.base import Durability
from hicache.storage.counters import Counters, Counts
from hicache.storage.header import HeaderAndPayload, page_bytes_of
from hicache.storage.index import Entry, io_errors
from hicache.storage.slot_block import SlotBlock
from hicache.storage.store_files import Sizes, StoreFiles

log = logging.getLogger("hicache.storage")
T = TypeVar("T")

_GROUP_SHARE, _MAX_GROUP_BYTES = 64, 64 << 20
_MIN_SLOTS, _MIN_INDEX_BYTES = 8, 256 << 10
_ENTRY_BYTES = 300  # about what a page adds to the index, beside three times its key
_SPARE_BYTES = 32 << 10  # for pages of the index that are split


@dataclass(frozen=True)
class Budget:
    """In bytes. `slot_bytes`: of the largest slot."""

    budget_bytes: int
    slot_bytes: int

    @property
    def min_bytes(self) -> int:
        """The smallest budget with which eviction works and pages are found again."""
        return _MIN_SLOTS * self.slot_bytes + _MIN_INDEX_BYTES

    @property
    def commit_bytes(self) -> int:
        """How many bytes of values one commit takes, unless it takes a single larger value."""
        return min(self.budget_bytes // _GROUP_SHARE, _MAX_GROUP_BYTES)


class GroupWriter:
    """Commits changes to `StoreFiles`, and applies what readers noted in the access log; one thread.

    When a commit fails, `read_only` becomes true, and every call but `reopen` does nothing. `on_removed` is told of the
    pages that a commit removed, after it. `sizes`: after the last commit.
    """

    def __init__(
        self,
        files: StoreFiles,
        access_log: AccessLog,
        counters: Counters,
        budget: Budget,
        durability: Durability,
        name: str,
        on_removed: Callable[[Sequence[bytes]], None] | None,
    ) -> None:
        self._files, self._access_log, self._counters = files, access_log, counters
        self._budget, self._durability, self._name, self._on_removed = budget, durability, name, on_removed
        self.read_only = self._has_evicted = self._is_index_lost = False
        self.sizes: Sizes = files.pages.sizes()
        self._syncing: Future[None] | None = None
        self._sync_thread = ThreadPoolExecutor(1, thread_name_prefix="hicache-disk-sync")

    def put(
        self, group: Iterable[tuple[bytes, HeaderAndPayload]], max_bytes: int, used: Sequence[bytes] | None = None
    ) -> int:
        """Store absent pages in one commit, evicting as the budget demands; returns how many bytes their values have, 0
        when that failed. The last is the most recently used.

        `max_bytes`: what they need at most, by `needed_bytes`. `used`, present keys of the same call, become the most
        recently used before that, after what readers noted. None: the access log waits, so that it cannot push out what
        earlier commits of the same call stored.
        """

        def work() -> int:
            if used is not None:
                self._apply_access_log(used)
            self._evict_for(max_bytes)
            return self._store(group)

        return self._run(work) or 0

    def needed_bytes(self, key: bytes, page_bytes: int, payload_bytes: int) -> int:
        """About what a page adds to the files, rather too much than too little."""
        return self._files.slots.space_of(page_bytes, payload_bytes) + 3 * len(key) + _ENTRY_BYTES

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove pages, and free their disk space; returns how many there were."""

        def work() -> int:
            self._apply_access_log()
            with self._files.pages.index.changes() as changes:
                removed = [(key, changes.delete(key)) for key in keys]
            return self._free(removed, punch=True)

        return self._run(work) or 0

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove pages that do not verify."""
        self._access_log.quarantine(keys)
        self.apply_access_log()

    def evict_to(self, used_bytes: int) -> int:
        """Evict until slots in use and index need at most `used_bytes`, and cut the files; returns how many pages."""

        def work() -> int:
            self._apply_access_log()
            num_evicted = 0
            while evicted := self._evict(used_bytes - self._files.pages.index.num_bytes()):
                num_evicted += evicted
            self._files.slots.trim()
            return num_evicted

        return self._run(work) or 0

    def apply_access_log(self) -> None:
        """Commit what readers noted: uses, and pages to delete."""
        while not self._access_log.empty:
            if self._run(self._apply_access_log, pages=self._access_log.any_quarantined) is None:
                return

    def sync(self) -> None:
        """Return when every page is on disk."""

        def work() -> None:
            if self._syncing is not None:
                self._syncing.result()
            self._sync_files()

        self.apply_access_log()
        self._run(work, pages=None)

    def compact(self) -> int:
        """Return free space to the file system; returns by how many bytes the files shrank."""
        before_bytes = self.sizes.file_bytes
        self._run(self._files.slots.trim)
        return max(0, before_bytes - self.sizes.file_bytes)

    def rebuild(self) -> bool:
        """Build the index anew from the slots; whether that worked."""
        self._run(self._files.rebuild)
        return not self.read_only

    def reopen(self) -> bool:
        """After a failed write: find out whether the disk takes another page; whether it does."""

        def work() -> None:
            if self._is_index_lost:
                self._files.rebuild()
                self._is_index_lost = False
            self._files.slots.probe()

        if self.read_only:
            self.read_only = False
            self._run(work)
            log.info("the store %s %s", self._name, "stays read-only" if self.read_only else "is writable again")
        return not self.read_only

    def close(self) -> None:
        """Sync, and seal the index."""
        self.sync()
        self._sync_thread.shutdown()
        self._files.close(is_whole=not self._is_index_lost)

    def _run(self, work: Callable[[], T], *, pages: bool | None = True) -> T | None:
        """`work`, which changes `pages`, or (False) their use order alone, or (None) nothing; None when that failed, or
        the store is read-only."""
        if self.read_only:
            return None
        try:
            if pages is not None:
                self._files.require_changeable(pages=pages)
            result = work()
            self.sizes = self._files.pages.sizes()
            return result
        except io_errors as error:
            self._become_read_only(error)
            return None

    def _apply_access_log(self, used_now: Sequence[bytes] = ()) -> bool:
        used, bad = self._access_log.peek()
        if used or bad or used_now:
            with self._files.pages.index.changes() as changes:
                removed = [(key, changes.delete(key)) for key in bad]
                for key in (*used, *used_now):
                    changes.touch(key)
            self._free([one for one in removed if self._is_own(*one)], punch=True)
            self._access_log.remove(used, bad)
        return True

    def _is_own(self, key: bytes, entry: Entry | None) -> bool:
        """Whether the slot that a damaged page had may be freed: not if another page of the index is there."""
        block = None if entry is None else self._files.pages.files[entry.page_bytes].read_block(entry.slot)
        if entry is None or block is None or block.key == key:
            return True
        (other,) = self._files.pages.index.locate([block.key])
        return other is None or (other.slot, other.page_bytes) != (entry.slot, entry.page_bytes)

    def _evict_for(self, num_bytes: int) -> None:
        """Evict what the budget demands before so much is added."""
        slots_bytes = self._budget.budget_bytes - _SPARE_BYTES - self._files.pages.index.num_bytes() - num_bytes
        if self._evict(slots_bytes) and not self._has_evicted:
            self._has_evicted = True
            log.info(
                "the store %s has reached its budget of %d bytes: the least recently used pages are evicted from "
                "now on",
                self._name,
                self._budget.budget_bytes,
            )

    def _evict(self, slots_bytes: int) -> int:
        """Evict the least recently used pages, in one commit, until slots in use have at most `slots_bytes`."""
        slots, removed = self._files.slots, list[tuple[bytes, Entry | None]]()
        left_bytes = slots.used_bytes
        if left_bytes <= slots_bytes:
            return 0
        with self._files.pages.index.changes() as changes:
            while left_bytes > slots_bytes and (oldest := changes.pop_oldest()) is not None:
                removed.append(oldest)
                left_bytes -= slots.space_of(oldest[1].page_bytes, oldest[1].payload_bytes)
        self._counters.add(Counts(evicted=len(removed)))
        return self._free(removed, punch=False)

    def _free(self, removed: Sequence[tuple[bytes, Entry | None]], *, punch: bool) -> int:
        """Free the slots of pages that the index lacks now, and tell of them; returns how many there were."""
        gone = [(key, entry) for key, entry in removed if entry is not None]
        for _, entry in gone:
            self._files.slots.release(entry.page_bytes, entry.slot, entry.payload_bytes)
        if punch and gone:
            self._files.slots.punch()
        if self._on_removed is not None and gone:
            self._on_removed([key for key, _ in gone])
        return len(gone)

    def _store(self, group: Iterable[tuple[bytes, HeaderAndPayload]]) -> int:
        """Write pages to slots, sync these, and enter the pages in the index; returns the bytes of their values."""
        index, slots = self._files.pages.index, self._files.slots
        max_bytes = self._budget.budget_bytes - _SPARE_BYTES - index.num_bytes()
        sequence = index.totals().next_tick
        written: list[tuple[bytes, Entry]] = []
        try:
            for key, value in group:
                page_bytes, payload_bytes = page_bytes_of(value.header), len(value.payload)
                taken = slots.take(page_bytes, payload_bytes, max_bytes)
                written.append((key, Entry(sequence + len(written), taken.slot, payload_bytes, page_bytes)))
                block = SlotBlock(key, written[-1][1].tick, value.header).pack()
                self._files.pages.files[page_bytes].write(taken.slot, block, value.payload, is_hole=taken.is_hole)
            self._sync_group()
            with index.changes() as changes:
                for key, entry in written:
                    changes.put(key, entry.slot, entry.payload_bytes, entry.page_bytes)
        except BaseException:
            for _, entry in written:
                slots.release(entry.page_bytes, entry.slot, entry.payload_bytes)
            raise
        return sum(entry.value_bytes for _, entry in written)

    def _sync_group(self) -> None:
        """Have the slots that were written synced: these before it returns, or, relaxed, those of the last time."""
        before = self._syncing
        try:
            self._syncing = self._sync_thread.submit(self._sync_files)
        except RuntimeError:  # at the interpreter's exit threads accept no work any more
            self._sync_files()
        awaited = self._syncing if self._durability == "commit" else before
        if awaited is not None:
            awaited.result()

    def _sync_files(self) -> None:
        for file in self._files.pages.files.values():
            file.sync()

    def _become_read_only(self, error: Exception) -> None:
        """Nothing is written until `reopen` succeeds; stored pages are still served."""
        self.read_only, self._syncing = True, None
        self._is_index_lost = self._is_index_lost or isinstance(error, lmdb.Error)
        self._counters.add(Counts(write_errors=1))
        log.warning("the store %s is read-only from now on: %s; free space or repair the disk", self._name, error)
