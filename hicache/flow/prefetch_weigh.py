"""Whether waiting for a prefetch is faster than computing: for requests in mode auto."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel
from hicache.flow.prefetch_counters import PrefetchCounters
from hicache.flow.prefetch_waiter import Waiter
from hicache.flow.prefix_read import PrefixReads
from hicache.flow.read_state import PrefixRead
from hicache.tiers import Store

log = logging.getLogger(__name__)


class Weigher:
    """Owned by the scheduler thread."""

    def __init__(
        self,
        context: EngineContext,
        cost: CostModel,
        reads: PrefixReads,
        counters: PrefetchCounters,
        clock: Callable[[], float],
    ) -> None:
        self._context, self._cost, self._reads, self._counters, self._clock = context, cost, reads, counters, clock

    def decide(self, waiting: Sequence[Waiter]) -> None:
        """Of these, which wait in mode auto, some stop: where computing what is missing is estimated to be faster."""
        if not waiting:
            return
        ahead: dict[PrefixRead, dict[Store, int]] = {}
        num_bytes = dict.fromkeys(self._context.stores, 0)
        for read in self._reads.in_flight():
            ahead[read] = dict(num_bytes)
            if read.is_live and read.is_urgent:
                for store in num_bytes:
                    num_bytes[store] += read.bytes_left(read.end, store)
        for waiter in waiting:
            self._weigh(waiter, {} if waiter.read is None else ahead.get(waiter.read, {}))

    def _weigh(self, waiter: Waiter, ahead_bytes: Mapping[Store, int]) -> None:
        """Compare for one waiter. `ahead_bytes`: of other reads of a store, which come before its own.

        Whatever the estimate, nobody waits for longer without progress than computing would take: with unknown rates,
        or a disk that has just become slow, a wait costs at most as much again.
        """
        read, page, now_s = waiter.read, self._context.tree.page_size, self._clock()
        # Windows and states come last, and nothing is of use without them.
        landed = waiter.seen_end if len(self._context.components) == 1 else 0
        start, end = max(waiter.num_usable, landed) * page, (waiter.end if read is None else waiter.wanted_end) * page
        if start >= end:
            return
        compute_s, wait_s = self._cost.longest_wait_s(start, end), None
        is_known = read is not None and read.found is not None
        if read is not None and is_known:
            wait_s = self._wait_s(ahead_bytes, read, waiter.wanted_end)
        if now_s - waiter.progress_s > compute_s or (wait_s is not None and wait_s > compute_s):
            waiter.handle.waits = False
            if not (self._counters.skipped.value or self._counters.gave_up.value):
                log.info(
                    "a prefix on the disk is computed again: computing it takes %.3g s, the disk longer", compute_s
                )
            counted = self._counters.skipped if is_known and waiter.decided_s is None else self._counters.gave_up
            counted.value += 1
        elif is_known and waiter.decided_s is None:
            waiter.decided_s, waiter.estimate_s = now_s, wait_s
            self._counters.waited.value += 1

    def _wait_s(self, ahead_bytes: Mapping[Store, int], read: PrefixRead, end: int) -> float | None:
        """Until the first `end` pages of `read` are on the device; None where a store's rate is unknown. Stores are
        read side by side."""
        read_s, num_bytes = 0.0, 0
        for store, tier in self._context.stores.items():
            own_bytes = read.bytes_left(end, store)
            if own_bytes:
                total_bytes = ahead_bytes.get(store, 0) + own_bytes
                num_jobs = math.ceil(total_bytes / (tier.job_pages * self._context.full.host.page_bytes))
                store_s = self._cost.read_s(total_bytes, num_jobs, store)
                if store_s is None:
                    return None
                read_s, num_bytes = max(read_s, store_s), num_bytes + own_bytes
        return read_s + (self._cost.load_s(num_bytes) or 0.0)
