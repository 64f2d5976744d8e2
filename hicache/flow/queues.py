"""The reads that are queued at each store, and which store would finish the next read first."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hicache.flow.asked import ReadOfRuns
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel
from hicache.tiers import DISK, REMOTE, Store

# The remote tier is asked for pages of the disk unless its rate is below this share of the rate of the disk.
_LEAST_SHARE = 1 / 8


class ReadQueues:
    """Owned by the scheduler thread. `reads`: jobs by number, in the order in which they were queued.

    A store is as fast as its reads were, and no faster than what it brings now: where its next job is late, each behind
    that counts as late.
    """

    def __init__(self, context: EngineContext, cost: CostModel, reads: Mapping[int, ReadOfRuns]) -> None:
        self._tiers, self._cost, self._reads = context.stores, cost, reads
        self._clock = next(tier.clock for tier in context.stores.values())
        self._heard_s = dict.fromkeys(context.stores, -math.inf)

    def begin(self, store: Store) -> None:
        """A job was queued."""
        if sum(job.store == store for job in self._reads.values()) == 1:
            self._heard_s[store] = self._clock()

    def hear(self, store: Store) -> None:
        """A job was answered."""
        self._heard_s[store] = self._clock()

    def num_jobs(self, store: Store, *, is_urgent: bool) -> int:
        """Under way, for what is urgent or for what is not."""
        jobs = self._reads.values()
        return sum(job.store == store and job.is_urgent == is_urgent and not job.is_stalled for job in jobs)

    def sooner(self, stores: int, num_bytes: int, *, is_urgent: bool) -> Store:
        """Of a set of stores the one that would bring the next `num_bytes` first."""
        if stores == DISK.bit:
            return DISK
        if stores == REMOTE.bit:
            return REMOTE
        return min((DISK, REMOTE), key=lambda store: self._wait_s(store, num_bytes, is_urgent=is_urgent))

    def is_remote_worth_asking(self, num_bytes: int) -> bool:
        """Whether the remote tier would read a good part of `num_bytes` in the time that the disk takes for them, as
        far as both rates are known."""
        disk_s = self._cost.read_s(num_bytes, self._tiers[DISK].num_readers, DISK)
        remote_s = self._cost.read_s(num_bytes, self._tiers[REMOTE].num_readers, REMOTE)
        return disk_s is None or remote_s is None or _LEAST_SHARE * remote_s <= disk_s

    def _wait_s(self, store: Store, num_bytes: int, *, is_urgent: bool) -> tuple[float, int]:
        """Until a store would have brought so much more, and what is queued there, which tells where nothing else does.
        One whose rate is unknown is tried by each of its readers, and not relied on."""
        jobs = [job for job in self._reads.values() if job.store == store]
        if self._tiers[store].reads.refuses() or any(job.is_stalled for job in jobs):
            return math.inf, 0
        jobs = [job for job in jobs if job.is_urgent or not is_urgent]
        queued_bytes = sum(job.num_bytes for job in jobs)
        read_s = self._cost.read_s(queued_bytes + num_bytes, len(jobs) + 1, store)
        if read_s is None:
            return 0.0 if len(jobs) < self._tiers[store].num_readers else math.inf, queued_bytes
        return max(read_s, self._late_s(store, len(jobs))), queued_bytes

    def _late_s(self, store: Store, num_jobs: int) -> float:
        """How long `num_jobs` take at least, if the next of them came now."""
        rounds = math.ceil(num_jobs / self._tiers[store].num_readers)
        return (self._clock() - self._heard_s[store]) * rounds if rounds else 0.0
