"""The write path of an lmdb page store: commits, the budget, and what happens when the medium refuses.

How the size is held. The map is opened at its final size M, 4 % above the budget B, which costs address space only:
lmdb can then never write beyond it, and no map ever moves under a reader. A commit writes one group G, 1/64 of the
budget or one value, and first evicts until the tables need no more than the limit L = B - 3 G - R. lmdb copies what it
changes and reuses what a commit freed two commits later, so of M are

    at most L          in use                       at most G + one value   freed by the last commit, not usable yet
    at most G          what this commit writes      at least R              left

R, 32 file pages, is what a commit needs that only evicts. Without it a full map could never be emptied again. Where a
large value finds no neighbouring pages, or a reader holds freed ones, lmdb undoes the commit; then more is evicted,
down to a floor, and the commit is tried again.

Where values are in slots, the map is for the tables alone: an index share I of the budget, enough for pages that pack
to 16 KiB, between 1/64 and 1/8 of it, and at least 64 file pages and 8 more
for each further page size. L is lower by I, and what the slots take of the
medium stays below M - I, by the same arithmetic: slots are reused two commits after they were freed, too, and a commit
that would pass the wall is undone as if lmdb had no room. Where pages pack even better, the tables are full first: then
pages go until these need no more than I - R. As leaves of a tree are merged when three quarters are gone, that is most.

May import lmdb, the standard library, base, counters, lmdb_env and lru.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hicache.storage.counters import Counters, Counts
from hicache.storage.lmdb_env import StoreEnv
from hicache.storage.lru import AccessLog, Ledger, Value
from hicache.storage.packages import lmdb, medium_errors, opening_errors

log = logging.getLogger("hicache.storage")
T = TypeVar("T")

_SLACK_SHARE = 25  # the file may pass the budget by 1/25
_GROUP_SHARE, _MAX_GROUP_BYTES = 64, 64 << 20  # far below the 512 MiB at which lmdb's list of dirty pages is full
_RESERVE_PAGES = 32
_PACKED_BYTES, _INDEX_SHARES, _LEAST_INDEX_PAGES, _PAGES_A_SIZE = 16 << 10, (8, 64), 64, 8
_FLOOR_SHARE = 4  # a commit that finds no room evicts up to this share of the budget below the limit, not more
# Of the largest values, that a budget has to hold. In tables each needs neighbouring pages.
_MIN_VALUES_IN_TABLES, _MIN_VALUES_IN_SLOTS = 16, 8
_ATTEMPTS = 6
_EVICTED_GROUPS = 16
_COMMITS_TO_EMPTY = 2  # until a slot that the last commit freed is a hole


@dataclass(frozen=True)
class Budget:
    """The arithmetic of the module's docstring, in bytes, for a budget and the largest value with its file pages.
    `min_page_bytes`: the smallest page; `num_sizes`: how many sizes pages may have."""

    budget_bytes: int
    value_bytes: int
    min_page_bytes: int
    num_sizes: int
    psize: int
    has_slots: bool = False

    @property
    def least_bytes(self) -> int:
        """The smallest budget with which eviction works and something is left to be found."""
        index_bytes = self.index_bytes if self.has_slots else 0
        num_values = _MIN_VALUES_IN_SLOTS if self.has_slots else _MIN_VALUES_IN_TABLES
        return num_values * self.value_bytes + 2 * _RESERVE_PAGES * self.psize + index_bytes

    @property
    def map_bytes(self) -> int:
        """The hard wall: the files can never pass this size."""
        return (self.budget_bytes + self.budget_bytes // _SLACK_SHARE) // self.psize * self.psize

    @property
    def index_bytes(self) -> int:
        """What of that is set aside for the tables where values are in slots."""
        share = min(max(self.min_page_bytes // _PACKED_BYTES, _INDEX_SHARES[0]), _INDEX_SHARES[1])
        least_pages = _LEAST_INDEX_PAGES + (self.num_sizes - 1) * _PAGES_A_SIZE
        return max(self.budget_bytes // share // self.psize, least_pages) * self.psize

    @property
    def index_limit_bytes(self) -> int:
        """What the tables may need of that before a commit adds to them."""
        return self.index_bytes - _RESERVE_PAGES * self.psize

    @property
    def commit_bytes(self) -> int:
        """How many bytes of values one commit takes, unless it takes a single one."""
        return min(self.budget_bytes // _GROUP_SHARE, _MAX_GROUP_BYTES)

    @property
    def group_bytes(self) -> int:
        """How many bytes of values one commit takes at most."""
        return max(self.value_bytes, self.commit_bytes)

    @property
    def limit_bytes(self) -> int:
        index_bytes = self.index_bytes if self.has_slots else 0
        return self.budget_bytes - 3 * self.group_bytes - _RESERVE_PAGES * self.psize - index_bytes

    @property
    def floor_bytes(self) -> int:
        return self.limit_bytes - max(self.budget_bytes // _FLOOR_SHARE, 4 * self.value_bytes)


class GroupWriter:
    """Commits changes to a `StoreEnv`, and folds in what readers noted in `accesses`. One thread.

    Once a commit failed for another reason than room, `read_only` is true and every call but `revive` does nothing.
    """

    def __init__(self, env: StoreEnv, accesses: AccessLog, counters: Counters, budget: Budget, name: str) -> None:
        self._env, self._accesses, self._counters = env, accesses, counters
        self._budget, self._name = budget, name
        self.read_only = False

    def put(self, group: Iterable[tuple[bytes, Value]], most_bytes: int, used: Sequence[bytes] | None = None) -> bool:
        """Store key-value pairs in one commit, evicting as the budget demands. The last is the most recently used.

        `most_bytes`: what they need at most, by `entry_bytes`. `group` is asked for each pair when it is written, and
        again from the first one on when the commit has to be repeated. `used`, present keys of the same call, become
        the most recently used before, after what readers noted. None: readers' notes wait, so that they cannot push out
        what earlier commits of the same call stored.
        """
        # Evictions come a group at a time: in runs they free neighbouring pages.
        target_bytes = self._budget.limit_bytes - max(most_bytes, self._budget.commit_bytes)

        def work(ledger: Ledger) -> bool:
            if used is not None:
                self._fold_into(ledger)
                for key in used:
                    ledger.touch(key)
            is_full = ledger.used_bytes + most_bytes > self._budget.limit_bytes
            ledger.evict_to(target_bytes if is_full else ledger.used_bytes, self._budget.index_limit_bytes)
            for key, value in group:
                ledger.add(key, value)
            return True

        return self._transact(work, most_bytes) is not None

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove keys in one commit; returns how many there were."""

        def work(ledger: Ledger) -> int:
            self._fold_into(ledger)
            return sum(ledger.remove(key) for key in keys)

        return self._transact(work, 0) or 0

    def change(self, work: Callable[[Ledger], T]) -> T | None:
        """`work` in one commit of its own; None when it was not stored, and then it changed nothing."""
        return self._transact(work, 0)

    def evict_to(self, used_bytes: int) -> int:
        """Evict, a few groups to a commit, until the tables need no more than `used_bytes`; returns how many went."""
        num_evicted, step_bytes = 0, _EVICTED_GROUPS * self._budget.commit_bytes

        def work(ledger: Ledger) -> tuple[int, bool]:
            now_bytes = ledger.used_bytes
            gone = ledger.evict_to(max(used_bytes, now_bytes - step_bytes))
            return gone, bool(gone) and now_bytes - step_bytes > used_bytes

        goes_on = True
        while goes_on:
            gone, goes_on = self._transact(work, 0) or (0, False)
            num_evicted += gone
        return num_evicted

    def fold(self) -> None:
        """Store what readers noted: uses, and values to drop."""
        while not self._accesses.empty:
            if self._transact(self._fold_into, 0) is None:
                return

    def sync(self) -> None:
        self.fold()
        if not self.read_only:
            try:
                self._env.require_changeable()
                self._env.tables.env.sync(True)
            except medium_errors as error:
                self._refuse(error)

    def compact(self) -> int:
        """Give free space back to the file system; returns the bytes by which the files shrank."""
        if self.read_only:
            return 0
        before_bytes = self._env.file_bytes()
        for _ in range(_COMMITS_TO_EMPTY):
            if self._env.tables.slots is not None:
                self._transact(self._fold_into, 0)
        self._env.compact()
        return max(0, before_bytes - self._env.file_bytes())

    def revive(self, value_bytes: int) -> bool:
        """After a refusal: open the file anew, store a value of `value_bytes` and remove it; true when that worked."""
        if not self.read_only:
            return True
        try:
            self._env.reopen()
        except opening_errors as error:
            log.warning("the store %s stays read-only: %s", self._name, error)
            return False
        self.read_only = False
        revived = self._transact(lambda ledger: ledger.probe(value_bytes), value_bytes)
        removed = revived and self._transact(lambda ledger: ledger.probe(0), 0)
        self.read_only = not removed
        if removed:
            log.info("the store %s is writable again", self._name)
        return not self.read_only

    def _transact(self, work: Callable[[Ledger], T], room_bytes: int) -> T | None:
        """Run `work` in one commit; None when it was not stored, and then `work` changed nothing.

        When lmdb finds no room the commit is undone and `room_bytes` is evicted, then twice that, and so on; from the
        second time on without readers, since their transactions keep freed pages from being used. First of all the
        slots of dead readers are freed.
        """
        if self.read_only:
            return None
        for attempt in range(_ATTEMPTS):
            try:
                if not attempt or (attempt == 1 and self._env.clear_dead_readers()):
                    return self._commit(work)
                with self._env.quiet() if attempt > 1 else contextlib.nullcontext():
                    self._make_room(room_bytes * attempt)
                    return self._commit(work)
            except lmdb.MapFullError:
                continue
            except medium_errors as error:
                self._refuse(error)
                return None
        self._counters.add(Counts(write_errors=1))
        log.warning("no room for %d bytes in the store %s; raise budget_bytes", room_bytes, self._name)
        return None

    def _fold_into(self, ledger: Ledger) -> bool:
        ledger.fold(*self._accesses.peek())
        return True

    def _commit(self, work: Callable[[Ledger], T]) -> T:
        self._env.require_changeable()
        tables = self._env.tables
        tables.values.warm_head()
        with tables.env.begin(write=True) as txn:
            tables.resolve(txn)
            ledger = Ledger(txn, tables)
            result = work(ledger)
            ledger.save()
            entries = txn.stat(tables.pages)["entries"]
        self._env.committed(entries, ledger.live_bytes, ledger.raw_bytes)
        self._accesses.folded(ledger.folded_used, ledger.folded_doomed)
        self._counters.add(Counts(evicted=ledger.num_evicted))
        return result

    def _make_room(self, room_bytes: int) -> None:
        """Evict `room_bytes` and make the freed pages usable, which lmdb does two commits later."""

        def evict(ledger: Ledger) -> None:
            target_bytes = max(self._budget.floor_bytes, ledger.used_bytes - room_bytes)
            ledger.evict_to(target_bytes, self._budget.index_limit_bytes)

        self._commit(evict)
        self._commit(lambda ledger: None)

    def _refuse(self, error: Exception) -> None:
        """A medium that failed is not written until `revive`; what it holds is still served."""
        self.read_only = True
        self._counters.add(Counts(write_errors=1))
        log.warning("the store %s is read-only from now on: %s; free space or mend the medium", self._name, error)
        if self._env.poisoned():
            try:
                self._env.reopen()
            except opening_errors as failure:
                log.warning("the store %s cannot be read either: %s; open it again", self._name, failure)
