"""The write path of a store: commits, the budget, and the read-only state after a failed write.

A commit stores one group of pages. The writer evicts pages until enough slots of the needed lengths are free or can be
allocated within the budget. The writer writes the new pages to slots, syncs the slots, and enters the pages in the
index. So the index names a slot only after the page in this slot is written, and a commit never overwrites a slot that
the index names. Used slots, free slots and the index together need at most the budget.

The least recently used pages are evicted. Eviction may leave many free slots of a length that the writer no longer
needs. If many such slots are free, the writer empties the segment with the most free bytes, so that slots of any length
can use the disk space of this segment.

With durability "commit", slots are on disk before `put` reports their pages as stored. With "relaxed", slots are on
disk one commit later, because a thread syncs one group while the writer writes the next group.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from hicache.storage.base import StoreError
from hicache.storage.calls import Counters
from hicache.storage.header import HeaderAndPayload, page_bytes_of
from hicache.storage.index import Entry, io_errors
from hicache.storage.records import StoreRecord
from hicache.storage.slot_file import MAX_RUN, SlotBlock, SlotLength, SlotWrite, runs
from hicache.storage.slots import Segment, Sizes, Slots
from hicache.storage.store_files import StoreFiles
from hicache.storage.store_folder import StoreBudget

log = logging.getLogger("hicache.storage")
T = TypeVar("T")
_Batch: TypeAlias = list[tuple[bytes, HeaderAndPayload]]

_GROUP_SHARE, _MAX_GROUP_BYTES = 64, 64 << 20
_MAX_EVICTIONS = 256  # maximum pages evicted in one commit
# maximum bytes of values for which slots are chosen together; one call writes all adjacent slots of a batch
_BATCH_BYTES = 16 << 20
_SCATTERED_SHARE = 16  # a segment is emptied if free slots in segments with pages take more than 1/16 of the budget
_MIN_SLOTS, _MIN_INDEX_BYTES = 8, 256 << 10
_ENTRY_BYTES = 300  # approximate bytes that a page adds to the index, in addition to three times its key
_SPARE_BYTES = 32 << 10  # bytes reserved for B-tree pages of the index that are split


def commit_bytes(budget_bytes: int) -> int:
    """Return the maximum bytes of values in one commit; a commit of a single value may have more."""
    return min(budget_bytes // _GROUP_SHARE, _MAX_GROUP_BYTES)


def min_budget_bytes(record: StoreRecord) -> int:
    """Return the smallest budget with which eviction works and stored pages are found again."""
    return _MIN_SLOTS * record.max_slot_bytes(record.page_sizes[-1]) + _MIN_INDEX_BYTES


def require_budget(record: StoreRecord) -> None:
    """Raise `StoreError` if the budget is too small."""
    largest, min_bytes = record.page_sizes[-1], min_budget_bytes(record)
    if record.budget_bytes < min_bytes:
        raise StoreError(
            f"budget_bytes={record.budget_bytes} is too small for pages of {largest} bytes; raise it to {min_bytes}"
        )


class GroupWriter:
    """Commits changes to the files, and deletes the pages in `corrupt`, whose verification failed in a reader. One
    thread calls the methods.

    When a commit fails, `read_only` becomes true, and every call except `reopen` and `delete` does nothing.
    `on_removed` is called after a commit with the keys that it removed. `sizes` and `file_bytes`: values after the last
    commit. `others_bytes`: see `StoreBudget`; the value after the last commit. `shares_budget`: see `LmdbPageStore`.
    """

    def __init__(
        self,
        files: StoreFiles,
        corrupt: dict[bytes, None],
        counters: Counters,
        on_removed: Callable[[Sequence[bytes]], None],
        *,
        shares_budget: bool,
    ) -> None:
        self._files = files
        self._corrupt = corrupt
        self._counters = counters
        self._on_removed = on_removed
        budget_bytes, min_bytes = files.record.budget_bytes, min_budget_bytes(files.record)
        self._budget = StoreBudget(files.path, budget_bytes, min_bytes, is_shared=shares_budget)
        self.read_only = self._has_evicted = self._is_index_lost = False
        self._call_tick = 0
        self.sizes: Sizes = files.slots.sizes
        self.file_bytes = files.file_bytes()
        self.others_bytes = 0
        self._syncing: Future[None] | None = None
        self._sync_thread = ThreadPoolExecutor(1, thread_name_prefix="hicache-disk-sync")
        self._open_within_budget()

    @property
    def slots(self) -> Slots:
        return self._files.slots

    def put(self, keys: Sequence[bytes], values: Iterable[HeaderAndPayload]) -> bool:
        """Store the values of absent pages in one commit. Evicts other pages if the budget requires it. Returns False
        if the commit failed. The last key becomes the most recently used."""
        stored = self._run(lambda: self._store(keys, values))
        if stored is None:
            return False
        raw_bytes = sum(entry.page_bytes for entry in stored)
        stored_bytes = sum(entry.value_bytes for entry in stored)
        self._counters.add(puts=len(stored), put_bytes_raw=raw_bytes, put_bytes_stored=stored_bytes)
        return True

    def begin_call(self) -> None:
        """Start a call of the store. Until the next `begin_call`, the writer empties no segment that has a page stored
        or used after this moment."""
        self._call_tick = self._files.index.uses.next_tick()

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove pages, and return the number of pages that were present. Removing pages needs no disk space."""

        def work() -> int:
            self._delete_corrupt()
            with self._files.index.changes() as changes:
                removed = [(key, changes.delete(key)) for key in keys]
            num_removed = self._free(removed)
            self._files.slots.erase()  # also erases the blocks of pages that were evicted before
            return num_removed

        return self._change(work) or 0

    def keep_budget(self) -> int:
        """Evict pages until the other stores of the folder have their share of the common budget, and record a use of
        this store. Returns the number of evicted pages."""
        max_bytes = self._run(lambda: self._budget.bytes_for(self.file_bytes))
        return self.evict_to(max_bytes) if max_bytes is not None and self.file_bytes > max_bytes else 0

    def evict_to(self, used_bytes: int) -> int:
        """Evict pages until used slots and index need at most `used_bytes`, and truncate the files. Returns the number
        of evicted pages."""

        def work() -> int:
            self._delete_corrupt()
            num_evicted = self._evict(used_bytes)
            self._files.slots.trim()
            self._files.index.uses.trim()
            return num_evicted

        return self._run(work) or 0

    def delete_corrupt(self) -> None:
        if self._corrupt:
            self._run(self._delete_corrupt)

    def sync(self) -> None:

        def work() -> None:
            self._delete_corrupt()
            if self._syncing is not None:
                self._syncing.result()
            self._sync_files()

        self._run(work)

    def rebuild(self) -> None:
        self._run(self._rebuild)

    def reopen(self) -> bool:
        """After a failed write, try to write a page. Returns whether the store is writable now."""

        def work() -> None:
            if self._is_index_lost:
                self._rebuild()
            self._files.slots.probe()

        if self.read_only:
            self.read_only = False
            self._run(work)
            state = "stays read-only" if self.read_only else "is writable again"
            log.info("the store %s %s", self._files.path, state)
        return not self.read_only

    def close(self) -> None:
        self.sync()
        self._sync_thread.shutdown()
        self._run(self._budget.note_use)
        self._files.close(is_complete=not self._is_index_lost)

    def _run(self, work: Callable[[], T]) -> T | None:
        """Call `work`, which changes the store, and return its result. Returns None if `work` failed, or if the store
        is read-only."""
        return None if self.read_only else self._change(work)

    def _change(self, work: Callable[[], T]) -> T | None:
        """Call `work`, which changes the store, and return its result. This method also works while the store refuses
        writes of clients. Returns None if `work` failed."""
        try:
            self._files.lock.require_same()
            result = work()
            self.sizes = self._files.slots.sizes
            self.file_bytes = self._files.file_bytes()
            self.others_bytes = self._budget.others_bytes
            return result
        except io_errors as error:
            self._become_read_only(error)
            return None

    def _rebuild(self) -> None:
        self._is_index_lost = True
        self._files.rebuild()
        self._is_index_lost = False

    def _delete_corrupt(self) -> None:
        if corrupt := list(self._corrupt):
            with self._files.index.changes() as changes:
                removed = [(key, changes.delete(key)) for key in corrupt]
            self._free(removed)
            self._files.slots.erase()
            for key in corrupt:
                del self._corrupt[key]

    def _open_within_budget(self) -> None:
        before_bytes, num_pages = self._files.recorded.budget_bytes, self.sizes.entries
        num_evicted = self.keep_budget()
        if num_evicted or self._budget.removed:
            budgets = f"had a budget of {before_bytes} bytes, and has {self._budget.num_bytes} now"
            evicted = f"{num_evicted} of its {num_pages} pages and {len(self._budget.removed)} other stores"
            log.warning("the store %s %s: %s are evicted", self._files.path, budgets, evicted)

    def _evict_for(self, needed: Counter[SlotLength], max_index_bytes: int) -> None:
        """Evict pages until the `needed` slots are free or can be allocated within the budget, then reserve these
        slots. `max_index_bytes`: maximum growth of the index in the commit. Raises OSError (ENOSPC) if evicting does
        not free enough space."""
        slots, index = self._files.slots, self._files.index
        while True:
            index_bytes = _SPARE_BYTES + max_index_bytes + index.num_bytes()
            max_bytes = self._budget.bytes_for(slots.missing_bytes(needed, -index_bytes)) - index_bytes
            missing_bytes = slots.missing_bytes(needed, max_bytes)
            if missing_bytes <= 0:
                return slots.reserve(needed, max_bytes)
            if not self._has_evicted:
                self._has_evicted = True
                reached = "the store %s has reached its budget of %d bytes: the least recently used pages are evicted"
                log.info(reached, self._files.path, self._budget.num_bytes)
            segment = slots.most_scattered(self._budget.num_bytes // _SCATTERED_SHARE)
            if segment and (index.uses.newest(*segment) > self._call_tick or index.uses.has_deadline(*segment)):
                segment = None
            if not (self._evict_segment(segment) if segment else self._evict_oldest(missing_bytes)):
                slots.trim()  # frees the end of a file, also on file systems without holes
                if slots.missing_bytes(needed, max_bytes) > 0:
                    raise OSError(errno.ENOSPC, f"{missing_bytes} bytes more than the budget are needed")

    def _evict(self, used_bytes: int) -> int:
        """Evict the least recently used pages until used slots and index have at most `used_bytes`. Returns the number
        of evicted pages. Evicts in batches, because the index becomes smaller with each batch."""
        slots, index, num_evicted = self._files.slots, self._files.index, 0
        while (excess_bytes := slots.used_bytes + index.num_bytes() - used_bytes) > 0:
            if not (evicted := self._evict_oldest(excess_bytes)):
                break
            num_evicted += evicted
        return num_evicted

    def _evict_oldest(self, num_bytes: int) -> int:
        """Evict least recently used pages in one commit, until their slots have `num_bytes` or `_MAX_EVICTIONS` pages
        are evicted. Returns the number of evicted pages."""
        removed = list[tuple[bytes, Entry | None]]()
        with self._files.index.changes() as changes:
            while num_bytes > 0 and len(removed) < _MAX_EVICTIONS and (oldest := changes.pop_oldest()):
                removed.append(oldest)
                num_bytes -= oldest[1].length.slot_bytes
        self._counters.add(evicted=len(removed))
        return self._free(removed)

    def _evict_segment(self, segment: Segment) -> int:
        with self._files.index.changes() as changes:
            removed = changes.delete_slots(*segment)
        self._counters.add(evicted=len(removed))
        return self._free(removed)

    def _free(self, removed: Sequence[tuple[bytes, Entry | None]]) -> int:
        """Release the slots of pages removed from the index, and call `on_removed`; returns the number of pages."""
        removed_pages = [(key, entry) for key, entry in removed if entry is not None]
        for _, entry in removed_pages:
            self._files.slots.release(entry)
        if removed_pages:
            self._on_removed([key for key, _ in removed_pages])
        return len(removed_pages)

    def _store(self, keys: Sequence[bytes], values: Iterable[HeaderAndPayload]) -> list[Entry]:
        """Write pages to slots, sync the slots, and enter the pages in the index; returns their entries."""
        index, written = self._files.index, list[tuple[bytes, Entry, int]]()
        index_bytes = sum(3 * len(key) + _ENTRY_BYTES for key in keys)
        try:
            for batch in _batches(zip(keys, values, strict=False)):  # `values` also has values of later commits
                self._write(batch, written, index_bytes)
            self._sync_group()
            with index.changes() as changes:
                for one in written:
                    changes.put(*one)
        except BaseException:
            for _, entry, _ in written:
                self._files.slots.release(entry)
            raise
        return [entry for _, entry, _ in written]

    def _write(self, batch: _Batch, written: list[tuple[bytes, Entry, int]], index_bytes: int) -> None:
        """Write pages to free slots, with one call for consecutive slots. Append the key, entry and tick of each page
        to `written`."""
        needed = Counter(_length_of(value) for _, value in batch)
        self._evict_for(needed, index_bytes)
        taken, writes = self._files.slots.take(needed), defaultdict[SlotLength, list[SlotWrite]](list)
        for key, value in batch:
            length, tick = _length_of(value), self._files.index.uses.next_tick()
            entry = Entry(next(taken[length]), len(value.payload), length.page_bytes)
            self._files.slots.fill(entry)
            written.append((key, entry, tick))
            block = SlotBlock(key, tick, value.header).pack()
            writes[length].append(SlotWrite(entry.slot, block, value.payload))
        for length, of_file in writes.items():
            for run in runs(of_file, lambda one: one.slot):
                self._files.slot_files[length].write(run)

    def _sync_group(self) -> None:
        """Start to sync the written slots. With durability "commit", wait until this sync ends; with "relaxed", wait
        until the previous sync ends."""
        before = self._syncing
        try:
            self._syncing = self._sync_thread.submit(self._sync_files)
        except RuntimeError:  # the interpreter exits and its threads accept no more work
            self._sync_files()
        awaited = self._syncing if self._files.record.durability == "commit" else before
        if awaited is not None:
            awaited.result()

    def _sync_files(self) -> None:
        for file in list(self._files.slot_files.values()):
            file.sync()

    def _become_read_only(self, error: Exception) -> None:
        """Stop writing until `reopen` succeeds; stored pages are still served."""
        self.read_only = True
        self._syncing = None
        self._is_index_lost = self._is_index_lost or not isinstance(error, OSError)
        self._counters.add(write_errors=1)
        log.warning("the store %s is read-only from now on: %s; free space or repair the disk", self._files.path, error)


def _length_of(value: HeaderAndPayload) -> SlotLength:
    return SlotLength.of(page_bytes_of(value.header), len(value.payload))


def _batches(items: Iterable[tuple[bytes, HeaderAndPayload]]) -> Iterator[_Batch]:
    """Divide values into batches that are written together."""
    batch, batch_bytes = _Batch(), 0
    for item in items:
        batch.append(item)
        batch_bytes += len(item[1])
        if batch_bytes >= _BATCH_BYTES or len(batch) == MAX_RUN:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch
