"""The write path of a store: commits, the budget, and what happens when a write fails.

How the size is bounded. The map is opened at its final size M, 4 % above the budget B, which costs address space only:
LMDB can never write beyond it, and the map never moves while someone reads. A commit writes one group of at most G
bytes, 1/64 of the budget or one value, and first evicts until the tables need at most the limit L = B - 3 G - R. LMDB
copies what it changes, and reuses what a commit freed two commits later, so M contains

    at most L          in use                       at most G + one value   freed by the last commit, not reusable yet
    at most G          written by this commit       at least R              left

R, 32 file pages, is what a commit needs that only evicts. Without it a full map could never be emptied again. Where a
large value finds no contiguous pages, or a reader keeps freed ones, LMDB aborts the commit; then more is evicted, down
to a floor, and the commit is repeated.

If values are in slots, the map is for the tables alone: an index share I of the budget, enough for pages that compress
to 16 KiB, between 1/64 and 1/8 of it, and at least 64 file pages and 8 more for each further page size. L is lower by
I, and the disk space of the slots stays below M - I by the same arithmetic: slots are reused two commits after they
were freed too, and a commit that would pass that bound is aborted as if LMDB had no space. If pages compress even
better, the tables are full first: then pages are evicted until these need at most I - R. As leaf pages are merged when
three quarters are free, that evicts most pages.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hicache.storage.counters import Counters, Counts
from hicache.storage.lmdb_env import StoreEnv
from hicache.storage.optional_packages import io_errors, lmdb, opening_errors
from hicache.storage.write_transaction import AccessLog, Value, WriteTransaction

log = logging.getLogger("hicache.storage")
T = TypeVar("T")

_SLACK_SHARE = 25  # the files may pass the budget by 1/25
_GROUP_SHARE, _MAX_GROUP_BYTES = 64, 64 << 20  # far below the 512 MiB at which LMDB's list of dirty pages is full
_RESERVE_PAGES = 32
_COMPRESSED_BYTES, _INDEX_SHARES = 16 << 10, (8, 64)
_MIN_INDEX_PAGES, _INDEX_PAGES_PER_SIZE = 64, 8
_FLOOR_SHARE = 4  # a commit without space evicts at most this share of the budget below the limit
# How many of the largest values a budget has to hold. In tables each needs contiguous pages.
_MIN_VALUES_IN_TABLES, _MIN_VALUES_IN_SLOTS = 16, 8
_ATTEMPTS = 6
_EVICTED_GROUPS = 16
_COMMITS_UNTIL_HOLE = 2  # after the commit that freed a slot


@dataclass(frozen=True)
class Budget:
    """The arithmetic of the module docstring, in bytes. `value_bytes`: the largest value with its file pages;
    `min_page_bytes`: the smallest page; `num_sizes`: how many page sizes there are; `psize`: a page of the file."""

    budget_bytes: int
    value_bytes: int
    min_page_bytes: int
    num_sizes: int
    psize: int
    has_slots: bool = False

    @property
    def min_bytes(self) -> int:
        """The smallest budget with which eviction works and pages are found again."""
        index_bytes = self.index_bytes if self.has_slots else 0
        num_values = _MIN_VALUES_IN_SLOTS if self.has_slots else _MIN_VALUES_IN_TABLES
        return num_values * self.value_bytes + 2 * _RESERVE_PAGES * self.psize + index_bytes

    @property
    def max_file_bytes(self) -> int:
        """The files never pass this size."""
        return (self.budget_bytes + self.budget_bytes // _SLACK_SHARE) // self.psize * self.psize

    @property
    def index_bytes(self) -> int:
        """The part of that for the tables, if values are in slots."""
        share = min(max(self.min_page_bytes // _COMPRESSED_BYTES, _INDEX_SHARES[0]), _INDEX_SHARES[1])
        min_pages = _MIN_INDEX_PAGES + (self.num_sizes - 1) * _INDEX_PAGES_PER_SIZE
        return max(self.budget_bytes // share // self.psize, min_pages) * self.psize

    @property
    def index_limit_bytes(self) -> int:
        """What the tables may need of that before a commit adds to them."""
        return self.index_bytes - _RESERVE_PAGES * self.psize

    @property
    def commit_bytes(self) -> int:
        """How many bytes of values one commit takes, unless it takes a single larger value."""
        return min(self.budget_bytes // _GROUP_SHARE, _MAX_GROUP_BYTES)

    @property
    def limit_bytes(self) -> int:
        """What values may use before a commit adds to them."""
        index_bytes = self.index_bytes if self.has_slots else 0
        group_bytes = max(self.value_bytes, self.commit_bytes)
        return self.budget_bytes - 3 * group_bytes - _RESERVE_PAGES * self.psize - index_bytes

    @property
    def floor_bytes(self) -> int:
        """Down to this a commit that finds no space evicts."""
        return self.limit_bytes - max(self.budget_bytes // _FLOOR_SHARE, 4 * self.value_bytes)


class GroupWriter:
    """Commits changes to a `StoreEnv`, and applies what readers noted in the access log; one thread.

    When a commit fails for another reason than space, `read_only` becomes true, and every call but `reopen` does
    nothing. `on_removed` is told of the pages that a commit removed, after it.
    """

    def __init__(
        self,
        env: StoreEnv,
        access_log: AccessLog,
        counters: Counters,
        budget: Budget,
        name: str,
        on_removed: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        self._env, self._access_log, self._counters = env, access_log, counters
        self._budget, self._name, self._on_removed = budget, name, on_removed
        self.read_only = self._has_evicted = False

    def put(self, group: Iterable[tuple[bytes, Value]], max_bytes: int, used: Sequence[bytes] | None = None) -> bool:
        """Store key-value pairs in one commit, evicting as the budget demands. The last is the most recently used.

        `max_bytes`: what they need at most, by `entry_bytes`. `group` is asked for each pair when it is written, and
        again from the first on when the commit is repeated. `used`, present keys of the same call, become the most
        recently used before that, after what readers noted. None: the access log waits, so that it cannot push out what
        earlier commits of the same call stored.
        """

        def work(transaction: WriteTransaction) -> bool:
            if used is not None:
                self._apply_access_log(transaction)
                for key in used:
                    transaction.touch(key)
            limit_bytes = self._budget.limit_bytes + transaction.index_bytes
            target_bytes = transaction.used_bytes
            if target_bytes + max_bytes > limit_bytes:
                # A whole group at a time: in runs the oldest pages free contiguous pages of the file.
                target_bytes = limit_bytes - max(max_bytes, self._budget.commit_bytes)
            evicted = transaction.evict_to(target_bytes, self._budget.index_limit_bytes)
            if evicted and not self._has_evicted:
                self._has_evicted = True
                log.info(
                    "the store %s has reached its budget of %d bytes: the least recently used pages are evicted from "
                    "now on",
                    self._name,
                    self._budget.budget_bytes,
                )
            for key, value in group:
                transaction.put(key, value)
            return True

        return self._transact(work, max_bytes) is not None

    def delete(self, keys: Sequence[bytes]) -> int:
        """Remove keys in one commit; returns how many there were."""

        def work(transaction: WriteTransaction) -> int:
            self._apply_access_log(transaction)
            return sum(transaction.delete(key) for key in keys)

        return self._transact(work, 0) or 0

    def change(self, work: Callable[[WriteTransaction], T]) -> T | None:
        """`work` in one commit of its own; None when that failed, and then nothing was changed."""
        return self._transact(work, 0)

    def evict_to(self, used_bytes: int) -> int:
        """Evict, a few groups per commit, until the store needs at most `used_bytes`; returns how many pages."""
        num_evicted, step_bytes = 0, _EVICTED_GROUPS * self._budget.commit_bytes

        def work(transaction: WriteTransaction) -> tuple[int, bool]:
            now_bytes = transaction.used_bytes
            evicted = transaction.evict_to(max(used_bytes, now_bytes - step_bytes))
            return evicted, bool(evicted) and now_bytes - step_bytes > used_bytes

        goes_on = True
        while goes_on:
            evicted, goes_on = self._transact(work, 0) or (0, False)
            num_evicted += evicted
        return num_evicted

    def apply_access_log(self) -> None:
        """Commit what readers noted: uses, and values to delete."""
        while not self._access_log.empty:
            if self._transact(self._apply_access_log, 0) is None:
                return

    def sync(self) -> None:
        self.apply_access_log()
        if not self.read_only:
            try:
                self._env.require_changeable()
                self._env.tables.env.sync(True)
            except io_errors as error:
                self._become_read_only(error)

    def compact(self) -> int:
        """Return free space to the file system; returns by how many bytes the files shrank."""
        if self.read_only:
            return 0
        before_bytes = self._env.file_bytes()
        for _ in range(_COMMITS_UNTIL_HOLE):
            if self._env.tables.slots is not None:
                self._transact(self._apply_access_log, 0)
        self._env.compact()
        return max(0, before_bytes - self._env.file_bytes())

    def reopen(self, value_bytes: int) -> bool:
        """After a failed write: open the files again, write a value of `value_bytes` and remove it; whether that
        worked."""
        if not self.read_only:
            return True
        try:
            self._env.reopen()
        except opening_errors as error:
            log.warning("the store %s stays read-only: %s", self._name, error)
            return False
        self.read_only = False
        written = self._transact(lambda transaction: transaction.probe(value_bytes), value_bytes)
        removed = written and self._transact(lambda transaction: transaction.probe(0), 0)
        self.read_only = not removed
        if removed:
            log.info("the store %s is writable again", self._name)
        return not self.read_only

    def _transact(self, work: Callable[[WriteTransaction], T], space_bytes: int) -> T | None:
        """Run `work` in one commit; None when that failed, and then nothing was changed.

        When LMDB finds no space the commit is aborted and `space_bytes` is evicted, then twice that, and so on; from
        the second repetition on without readers, whose transactions keep freed pages from being reused. Dead readers
        are removed first of all.
        """
        if self.read_only:
            return None
        for attempt in range(_ATTEMPTS):
            try:
                if not attempt or (attempt == 1 and self._env.clear_dead_readers()):
                    return self._commit(work)
                with self._env.without_readers() if attempt > 1 else contextlib.nullcontext():
                    self._evict_for(space_bytes * attempt)
                    return self._commit(work)
            except lmdb.MapFullError:
                continue
            except io_errors as error:
                self._become_read_only(error)
                return None
        self._counters.add(Counts(write_errors=1))
        log.warning("no space for %d bytes in the store %s; raise budget_bytes", space_bytes, self._name)
        return None

    def _apply_access_log(self, transaction: WriteTransaction) -> bool:
        transaction.apply_access_log(*self._access_log.peek())
        return True

    def _commit(self, work: Callable[[WriteTransaction], T]) -> T:
        self._env.require_changeable()
        tables = self._env.tables
        tables.values.preload_meta()
        with tables.env.begin(write=True) as txn:
            tables.preload_roots(txn)
            transaction = WriteTransaction(txn, tables)
            result = work(transaction)
            transaction.save()
            entries = txn.stat(tables.pages)["entries"]
        self._env.note_commit(entries, transaction.live_bytes, transaction.raw_bytes)
        self._access_log.remove(transaction.applied_used, transaction.applied_quarantined)
        self._counters.add(Counts(evicted=transaction.num_evicted))
        if self._on_removed is not None and transaction.removed:
            self._on_removed(transaction.removed)
        return result

    def _evict_for(self, space_bytes: int) -> None:
        """Evict `space_bytes`, and commit once more, so that LMDB may reuse the freed pages."""

        def evict(transaction: WriteTransaction) -> None:
            floor_bytes = self._budget.floor_bytes + transaction.index_bytes
            target_bytes = max(floor_bytes, transaction.used_bytes - space_bytes)
            transaction.evict_to(target_bytes, self._budget.index_limit_bytes)

        self._commit(evict)
        self._commit(lambda transaction: None)

    def _become_read_only(self, error: Exception) -> None:
        """Nothing is written until `reopen` succeeds; stored pages are still served."""
        self.read_only = True
        self._counters.add(Counts(write_errors=1))
        log.warning("the store %s is read-only from now on: %s; free space or repair the disk", self._name, error)
        if self._env.is_panicked():
            try:
                self._env.reopen()
            except opening_errors as failure:
                log.warning("the store %s cannot be read either: %s; open it again", self._name, failure)
