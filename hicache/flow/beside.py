"""Compute and load at once: a request is computed from its beginning while its pages come from its end.

    [0, computed)          on the device, computed or loaded
    [computed, coming[0])  on the host, where a run has come that continues what is computed: it is joined
    [coming)               is to come, from the right on, or to be computed, from the left on
    [coming[1], end)       has come to the host, and waits for what is before it

Where the two meet is found: whatever page comes next is on the host, or is computed. A store that brings little, or
nothing any more, leaves more to compute, and nobody waits for it. docs/decisions/050-compute-and-load-at-once.md.
"""

from __future__ import annotations

from hicache.flow.asked import Asked
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel
from hicache.flow.counters import PrefetchCounters
from hicache.flow.lease import Lease
from hicache.flow.readers import Readers
from hicache.host.run import HostRun
from hicache.tiers import FULL

# A pass costs as much however little it computes: at least so many pages, however near the run is that comes, and what
# is less than so many in all is loaded or computed. So is what would be computed for less than this share: a pass
# cannot be stopped, and a fast store has brought everything before it ends.
_LEAST_PASS_PAGES, _LEAST_WAY_PAGES, _LEAST_SHARE = 8, 32, 1 / 6


class Beside:
    """The requests that are computed while they read. Owned by the scheduler thread.

    `is_wanted`: else the rule chooses, for a bench that compares. `least_pages`: that are to come, for less is not
    worth it.
    """

    def __init__(self, context: EngineContext, cost: CostModel, counters: PrefetchCounters, readers: Readers) -> None:
        self._context, self._cost, self._counters, self._readers = context, cost, counters, readers
        self._clock = next(tier.clock for tier in context.stores.values())
        self._asked: dict[str, Asked] = {}
        self._page, self.least_pages = context.tree.page_size, _LEAST_WAY_PAGES
        self.is_wanted = True

    def may_join(self, asked: Asked) -> bool:
        """Whether so much is to come for a request that computing it meanwhile pays."""
        return asked.handle.overlaps and asked.end - asked.coming[0] >= self.least_pages

    def pays(self, asked: Asked, wait_s: float | None) -> bool:
        """Whether what would be computed until the rest has come is enough. `wait_s`: until all has come, by the rates
        or by the last sign of it; None where that is not known."""
        start, end = asked.coming
        compute_s = self._cost.prefill_s(start * self._page, end * self._page)
        if wait_s is None or not compute_s:
            return True
        return wait_s >= _LEAST_SHARE * (wait_s + compute_s)

    def begin(self, asked: Asked, lease: Lease) -> bool:
        """The request is admitted; False where it joins nothing."""
        if not self.may_join(asked) or asked.is_idle:
            return False
        self._asked[lease.request_id] = asked
        asked.lease, asked.computed_end = lease, lease.cached_len // self._page
        self._counters.beside.value += 1
        return True

    def reads_for(self, lease: Lease) -> bool:
        asked = self._asked.get(lease.request_id)
        return asked is not None and asked.lease is lease

    def has_come(self, lease: Lease, num_tokens: int) -> bool:
        """Whether the host has the page behind the first `num_tokens`, which are computed."""
        page, index = num_tokens // self._page, self._context.full.index
        return self.reads_for(lease) and page < len(lease.keys) and lease.keys[page] in index

    def joined(self, before: Lease, num_tokens: int, after: Lease) -> Asked:
        """`after` is in the place of `before`, of which `num_tokens` were computed."""
        asked = self._asked[after.request_id]
        asked.lease, asked.computed_end = after, after.cached_len // self._page
        self._counters.count_joined(num_tokens - before.cached_len, after.cached_len - num_tokens)
        return asked

    def forget(self, asked: Asked) -> None:
        if asked.lease is not None:
            del self._asked[asked.handle.request_id]
            asked.lease = None

    def stop(self, lease: Lease, start: int, end: int) -> int:
        """Where a pass from token `start` should end, at most at `end`: where a page ends, so that all that is computed
        is shared, a recurrent state with it; where the next run begins that has come; and about where it will meet what
        comes. Nothing is read any more of what it computes."""
        if not self.reads_for(lease):
            return end
        asked, keys, index = self._asked[lease.request_id], lease.keys, self._context.full.index
        first, last = start // self._page, min(len(keys), -(-end // self._page))
        for page in range(first + 1, last):
            if keys[page] in index and keys[page - 1] not in index:
                end = page * self._page
                break
        if not asked.is_idle:
            end = min(end, self._meeting(asked, start, end))
        if start < (page_end := end // self._page * self._page) < len(keys) * self._page:
            end = page_end
        asked.computed_end = max(asked.computed_end, -(-end // self._page))
        passed = [run for run in asked.runs if run.job.component.name == FULL and self._is_computed(asked, run)]
        self._readers.cancel(asked.leave(passed))
        return end

    @staticmethod
    def _is_computed(asked: Asked, run: HostRun) -> bool:
        return run.first + len(run.keys) <= asked.computed_end

    def _meeting(self, asked: Asked, start: int, end: int) -> int:
        """Where a pass to `end` should end, so that what comes meanwhile ends there too: the way between is divided by
        the rates at which both go. A store that has brought less than it did, or should, counts as it does now."""
        way = asked.coming[1] * self._page - start
        compute_s = self._cost.prefill_s(start, start + way) if way > 0 else None
        if not compute_s or not asked.to_come:
            return end
        read_s = self._read_s(asked, way)
        if not (read_s or asked.num_came):
            return end
        read_s = max(read_s, self._observed_s(asked, way))
        num_tokens = max(_LEAST_PASS_PAGES * self._page, int(way * read_s / (read_s + compute_s)))
        return (start + num_tokens) // self._page * self._page

    def _read_s(self, asked: Asked, num_tokens: int) -> float:
        """By the rates of the stores that it reads from, side by side; 0 where none is known."""
        page_bytes, stores = self._context.full.host.page_bytes, {run.job.store for run in asked.runs}
        stores.update(store for store in self._context.stores for piece in asked.to_read if piece.stores & store.bit)
        num_bytes, rate = num_tokens // self._page * page_bytes, 0.0
        for store in stores:
            num_jobs = -(-num_bytes // (self._context.stores[store].job_pages * page_bytes))
            if read_s := self._cost.read_s(num_bytes, num_jobs, store):
                rate += 1 / read_s
        return 1 / rate if rate else 0.0

    def _observed_s(self, asked: Asked, num_tokens: int) -> float:
        """By what has come since its reads began, if the first job under way came now."""
        num_pages = asked.num_came + next((run.job.num_pages for run in asked.runs), 0)
        if not num_pages:
            return 0.0
        return (self._clock() - asked.begun_s) * num_tokens / (num_pages * self._page)
