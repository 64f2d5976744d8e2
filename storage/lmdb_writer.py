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
from typing import TypeVar

from hicache.storage.base import StoreError
from hicache.storage.counters import Counters
from hicache.storage.header import HeaderAndPayload, page_bytes_of
from hicache.storage.index import Entry, io_errors
from hicache.storage.records import StoreRecord
from hicache.storage.slot_file import SlotBlock
from hicache.storage.slots import Sizes, Slots
from hicache.storage.store_files import StoreFiles

log = logging.getLogger("hicache.storage")
T = TypeVar("T")

_GROUP_SHARE, _MAX_GROUP_BYTES = 64, 64 << 20
_MAX_EVICTIONS = 256  # of one commit
_MIN_SLOTS, _MIN_INDEX_BYTES = 8, 256 << 10
_ENTRY_BYTES = 300  # about what a page adds to the index, beside three times its key
_SPARE_BYTES = 32 << 10  # for pages of the index that are split


def commit_bytes(budget_bytes: int) -> int:
    """How many bytes of values one commit takes, unless it takes a single larger value."""
    return min(budget_bytes // _GROUP_SHARE, _MAX_GROUP_BYTES)


def require_budget(record: StoreRecord) -> None:
    """`StoreError` unless eviction works within the budget, and pages are found again."""
    largest = record.page_sizes[-1]
    min_bytes = _MIN_SLOTS * record.slot_bytes(largest) + _MIN_INDEX_BYTES
    if record.budget_bytes < min_bytes:
        raise StoreError(
            f"budget_bytes={record.budget_bytes} is too small for pages of {largest} bytes; raise it to {min_bytes}"
        )


class GroupWriter:
    """Commits changes to the files, and deletes the pages that readers found `corrupt`; one thread.

    When a commit fails, `read_only` becomes true, and every call but `reopen` and `delete` does nothing.
    `on_removed` is told of the pages that a commit removed, after it. `sizes` and `file_bytes`: after the last commit.
    """

    def __init__(
        self,
        files: StoreFiles,
        corrupt: dict[bytes, None],
        counters: Counters,
        on_removed: Callable[[Sequence[bytes]], None],
    ) -> None:
        self._files, self._corrupt, self._counters, self._on_removed = files, corrupt, counters, on_removed
        self._budget_bytes = files.record.budget_bytes
        self.read_only = self._has_evicted = self._is_index_lost = False
        self.sizes: Sizes = files.slots.sizes
        self.file_bytes = files.pages.file_bytes()
        self._syncing: Future[None] | None = None
        self._sync_thread = ThreadPoolExecutor(1, thread_name_prefix="hicache-disk-sync")
        if self.file_bytes > self._budget_bytes:
            self.evict_to(self._budget_bytes)

    @property
    def slots(self) -> Slots:
        """Which slots are in use."""
        return self._files.slots

    def put(self, group: Sequence[tuple[bytes, int]], values: Iterable[HeaderAndPayload]) -> bool:
        """Store absent pages, given as keys and page sizes and by their values, in one commit, evicting as the budget
        demands; whether that succeeded. The last is the most recently used."""
        max_bytes = sum(self._files.record.slot_bytes(size) + 3 * len(key) + _ENTRY_BYTES for key, size in group)

        def work() -> int:
            if self._evict(self._budget_bytes - _SPARE_BYTES - max_bytes) and not self._has_evicted:
                self._has_evicted = True
                reached = "the store %s has reached its budget of %d bytes: the least recently used pages are evicted"
                log.info(reached, self._files.path, self._budget_bytes)
            return self._store([key for key, _ in group], values)

        num_bytes = self._run(work)
        if num_bytes is None:
            return False
        raw_bytes = sum(page_bytes for _, page_bytes in group)
        self._counters.add(puts=len(group), put_bytes_raw=raw_bytes, put_bytes_stored=num_bytes)
        return True

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove pages, and free their disk space, which needs none; returns how many there were."""

        def work() -> int:
            self._delete_corrupt()
            with self._files.pages.index.changes() as changes:
                removed = [(key, changes.delete(key)) for key in keys]
            num_removed = self._free(removed)
            self._files.slots.punch()  # a page that was evicted before has its block still
            return num_removed

        return self._change(work) or 0

    def evict_to(self, used_bytes: int) -> int:
        """Evict until slots in use and index need at most `used_bytes`, and cut the files; returns how many pages."""

        def work() -> int:
            self._delete_corrupt()
            num_evicted = self._evict(used_bytes)
            self._files.slots.trim()
            self._files.pages.index.uses.trim()
            return num_evicted

        return self._run(work) or 0

    def delete_corrupt(self) -> None:
        """Delete the pages that do not verify."""
        if self._corrupt:
            self._run(self._delete_corrupt)

    def sync(self) -> None:
        """Return when every page is on disk."""

        def work() -> None:
            self._delete_corrupt()
            if self._syncing is not None:
                self._syncing.result()
            self._sync_files()

        self._run(work)

    def rebuild(self) -> None:
        """Build the index anew from the slots."""
        self._run(self._files.rebuild)

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
            state = "stays read-only" if self.read_only else "is writable again"
            log.info("the store %s %s", self._files.path, state)
        return not self.read_only

    def close(self) -> None:
        """Sync, and seal the index."""
        self.sync()
        self._sync_thread.shutdown()
        self._files.close(is_whole=not self._is_index_lost)

    def _run(self, work: Callable[[], T]) -> T | None:
        """`work`, which changes something; None when that failed, or the store is read-only."""
        return None if self.read_only else self._change(work)

    def _change(self, work: Callable[[], T]) -> T | None:
        """The same, also of a store that is read-only."""
        try:
            self._files.lock.require_same()
            result = work()
            self.sizes, self.file_bytes = self._files.slots.sizes, self._files.pages.file_bytes()
            return result
        except io_errors as error:
            self._become_read_only(error)
            return None

    def _delete_corrupt(self) -> None:
        if corrupt := list(self._corrupt):
            with self._files.pages.index.changes() as changes:
                removed = [(key, changes.delete(key)) for key in corrupt]
            self._free(removed)
            self._files.slots.punch()
            for key in corrupt:
                del self._corrupt[key]

    def _max_slots_bytes(self) -> int:
        """What the budget leaves to slots."""
        return self._budget_bytes - _SPARE_BYTES - self._files.pages.index.num_bytes()

    def _evict(self, used_bytes: int) -> int:
        """Evict the least recently used pages until slots in use and index have at most `used_bytes`; returns how many.
        In batches, for the index shrinks with its pages."""
        num_evicted = 0
        while evicted := self._evict_batch(used_bytes - self._files.pages.index.num_bytes()):
            num_evicted += evicted
        return num_evicted

    def _evict_batch(self, slots_bytes: int) -> int:
        """The same in one commit, until slots in use have at most `slots_bytes`."""
        slots, removed = self._files.slots, list[tuple[bytes, Entry | None]]()
        left_bytes = slots.used_bytes
        if left_bytes <= slots_bytes:
            return 0
        with self._files.pages.index.changes() as changes:
            while left_bytes > slots_bytes and len(removed) < _MAX_EVICTIONS and (oldest := changes.pop_oldest()):
                removed.append(oldest)
                left_bytes -= slots.space_of(oldest[1].page_bytes, oldest[1].payload_bytes)
        self._counters.add(evicted=len(removed))
        return self._free(removed)

    def _free(self, removed: Sequence[tuple[bytes, Entry | None]]) -> int:
        """Free the slots of pages that the index lacks now, and tell of them; returns how many there were."""
        gone = [(key, entry) for key, entry in removed if entry is not None]
        for _, entry in gone:
            self._files.slots.release(entry.page_bytes, entry.slot, entry.payload_bytes)
        if gone:
            self._on_removed([key for key, _ in gone])
        return len(gone)

    def _store(self, keys: Sequence[bytes], values: Iterable[HeaderAndPayload]) -> int:
        """Write pages to slots, sync these, and enter the pages in the index; returns the bytes of their values."""
        index, slots, files = self._files.pages.index, self._files.slots, self._files.pages.files
        max_bytes, written, ticks = self._max_slots_bytes(), list[Entry](), list[int]()
        try:
            for key, value in zip(keys, values, strict=False):  # there may be values for the next commit
                page_bytes, payload_bytes = page_bytes_of(value.header), len(value.payload)
                taken = slots.take(page_bytes, payload_bytes)
                written.append(Entry(taken.slot, payload_bytes, page_bytes))
                ticks.append(index.uses.next_tick())
                slots.punch(max_bytes)
                block = SlotBlock(key, ticks[-1], value.header).pack()
                files[page_bytes].write(taken.slot, block, value.payload, is_hole=taken.is_hole)
            self._sync_group()
            with index.changes() as changes:
                for key, entry, tick in zip(keys, written, ticks, strict=True):
                    changes.put(key, entry, tick)
        except BaseException:
            for entry in written:
                slots.release(entry.page_bytes, entry.slot, entry.payload_bytes)
            raise
        return sum(entry.value_bytes for entry in written)

    def _sync_group(self) -> None:
        """Have the slots that were written synced: these before it returns, or, relaxed, those of the last time."""
        before = self._syncing
        try:
            self._syncing = self._sync_thread.submit(self._sync_files)
        except RuntimeError:  # at the interpreter's exit threads accept no work any more
            self._sync_files()
        awaited = self._syncing if self._files.record.durability == "commit" else before
        if awaited is not None:
            awaited.result()

    def _sync_files(self) -> None:
        for file in self._files.pages.files.values():
            file.sync()

    def _become_read_only(self, error: Exception) -> None:
        """Nothing is written until `reopen` succeeds; stored pages are still served."""
        self.read_only, self._syncing = True, None
        self._is_index_lost = self._is_index_lost or not isinstance(error, OSError)
        self._counters.add(write_errors=1)
        log.warning("the store %s is read-only from now on: %s; free space or repair the disk", self._files.path, error)
