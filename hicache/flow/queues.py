"""What stores have to read, and which of several that have a page would bring it soonest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from hicache.flow.asked import ReadOfRuns
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel
from hicache.tiers import Store

# A page is asked of another store where that is so many times as soon, for what was begun is lost; and a store for what
# others have where it would bring at least this part of it meanwhile.
_TAKES, _LEAST_SHARE = 2.0, 1 / 8


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

    def soonest(self, stores: int, num_bytes: int, *, is_urgent: bool) -> Store:
        """Of a set of stores the one that would bring the next `num_bytes` first."""
        chosen = [*self._of(stores)]
        if len(chosen) == 1:
            return chosen[0]
        return min(chosen, key=lambda store: self._wait_s(store, num_bytes, is_urgent=is_urgent))

    def gives_sooner(self, stores: int, job: ReadOfRuns) -> bool:
        """Whether one of `stores` would bring what a job does much sooner than this."""
        before = list[ReadOfRuns]()
        for other in self._reads.values():
            before += [other] if other.store == job.store else []
            if other is job:
                break
        there_s = self._late_s(job.store, len(before))
        if len(before) > self._tiers[job.store].num_readers:  # it has not begun
            num_bytes = sum(other.num_bytes for other in before)
            there_s = max(there_s, self._cost.read_s(num_bytes, len(before), job.store) or 0.0)
        here_s = min(self._wait_s(store, job.num_bytes, is_urgent=job.is_urgent)[0] for store in self._of(stores))
        return here_s > 0 and _TAKES * here_s < there_s

    def is_worth_asking(self, store: Store, num_bytes: int) -> bool:
        """Whether a store would bring a good part of what others have in the time that these take, as far as is
        known."""
        own_s = self._cost.read_s(num_bytes, self._tiers[store].num_readers, store)
        others = [other for other in self._tiers if other != store]
        times_s = [self._cost.read_s(num_bytes, self._tiers[other].num_readers, other) for other in others]
        known_s = [time_s for time_s in times_s if time_s is not None]
        return own_s is None or not known_s or _LEAST_SHARE * own_s <= min(known_s)

    def _of(self, stores: int) -> Iterator[Store]:
        return (store for store in self._tiers if store.bit & stores)

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
