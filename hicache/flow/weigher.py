"""Who waits for pages that a store has, in mode auto, and who computes them."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import attrgetter

from hicache.flow.asked import Asked, ReadOfRuns
from hicache.flow.beside import Beside
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel, LoadEstimate, Requests
from hicache.flow.counters import PrefetchCounters
from hicache.flow.line import Line
from hicache.tiers import Store

log = logging.getLogger(__name__)

_ANSWER_SHARE = 0.02  # of what computing takes, how long a request waits for stores to answer that delays no other
_MAX_DECIDED = 64  # requests of one step, so that it ends soon
_STEADY = 2.0  # of what computing costs, how much what is left of a wait may cost that has begun


class _Queue:
    """Bytes that requests wait for, by store: of jobs in flight, each with those before it, and of what comes next."""

    def __init__(self, cost: CostModel, stores: Iterable[Store], jobs: Iterable[ReadOfRuns]) -> None:
        self._cost, self.num_bytes, self._until = cost, dict.fromkeys(stores, 0.0), dict[ReadOfRuns, float]()
        for job in jobs:
            if job.is_urgent and any(asked.is_urgent for asked in job.wanted):
                self.num_bytes[job.store] += job.num_bytes
            self._until[job] = self.num_bytes[job.store]

    def add(self, asked: Asked) -> None:
        """What is to be read for a request comes next."""
        for store, num_bytes in self._to_read(asked):
            self.num_bytes[store] += num_bytes

    def until(self, asked: Asked) -> dict[Store, float]:
        """Of each store that it waits for: bytes until the last of its own."""
        found = dict[Store, float]()
        for run in asked.runs:
            job: ReadOfRuns = run.job
            found[job.store] = max(found.get(job.store, 0), self._until[job])
        for store, num_bytes in self._to_read(asked):
            found[store] = max(found.get(store, 0), self.num_bytes[store]) + num_bytes
        return found

    def _to_read(self, asked: Asked) -> Iterator[tuple[Store, float]]:
        """Bytes of each piece, and its store; of a piece that both stores have, as much of each as it brings."""
        for piece in asked.to_read:
            num_bytes = (piece.end - piece.start) * piece.component.host.page_bytes
            stores = [store for store in self.num_bytes if piece.stores & store.bit]
            yield from ((store, part * num_bytes) for store, part in self._cost.parts(stores).items())


class Weigher:
    """By the rule of `LoadEstimate`. Owned by the scheduler thread. `jobs`: that read, in the order in which they were
    queued."""

    def __init__(
        self,
        context: EngineContext,
        cost: CostModel,
        counters: PrefetchCounters,
        requests: Requests,
        jobs: Mapping[int, ReadOfRuns],
        beside: Beside,
        line: Line,
    ) -> None:
        self._context, self._cost, self._counters = context, cost, counters
        self._requests, self._jobs, self._beside, self._line = requests, jobs, beside, line
        self._clock = next(tier.clock for tier in context.stores.values())
        self._undecided, self._timed = dict[Asked, None](), dict[Asked, None]()

    def add(self, asked: Asked) -> None:
        """A request waits for as long as `decide_again` does not stop it."""
        if asked.handle.mode == "auto":
            self._undecided[asked] = None
        elif asked.handle.mode == "timeout":
            self._timed[asked] = None

    def discard(self, asked: Asked) -> None:
        self._undecided.pop(asked, None)
        self._timed.pop(asked, None)

    def decide_again(self, begun: Collection[Asked]) -> None:
        """Stop requests whose time has passed, and `decide` for some of the others, in turn."""
        while self._timed and (asked := next(iter(self._timed))).until_s <= self._clock():
            del self._timed[asked]
            self.stop(asked)
        turn = list(itertools.islice(self._undecided, _MAX_DECIDED))
        for asked in turn:  # to the end
            del self._undecided[asked]
        self._undecided.update({asked: None for asked in turn if asked.is_urgent})
        self.decide(turn, begun)

    def decide(self, undecided: Iterable[Asked], begun: Collection[Asked]) -> None:
        """Of `undecided` those that wait in mode auto may stop: where computing what is missing costs less. What one
        that stops would have read is not before those that come after it. A request that yields stops
        yielding on the same condition. `begun`: those whose turn has come, with others; the rest come after these."""
        waiting = {a: None for a in undecided if a.is_urgent and a.handle.mode == "auto" and not a.handle.ended}
        if not waiting:
            return
        queue, num_delayed = _Queue(self._cost, self._context.stores, self._jobs.values()), self._requests.num_delayed
        for asked in (*sorted(begun, key=attrgetter("turn")), *(a for a in waiting if a not in begun)):
            if asked in waiting:
                num_delayed += self._weigh(asked, queue, num_delayed)
            if asked.is_urgent:
                queue.add(asked)

    def stop(self, asked: Asked, *, is_preemptible: bool = False) -> None:
        """It waits no more: it may be admitted, and computing delays it from now on."""
        is_in_line = self._line.discard(asked)
        asked.handle.stop_waiting(is_preemptible=is_preemptible)
        if is_in_line:
            self._line.add(asked)
        self._requests.waiting.discard(asked.handle.request_id)

    def _weigh(self, asked: Asked, queue: _Queue, num_delayed: int) -> bool:
        """Compare for one request; whether it stops. `num_delayed`: others that computing would delay now. Where there
        are none, one that reads on while it is computed waits for the stores' answers, and for no more unless they are
        much faster than computing.

        A wait that has begun counts the others of its beginning: once all wait the device is idle, and all would stop
        together; and it ends where computing is cheaper by far, for rates swing with the writes beside. Whatever the
        estimate, nobody waits for longer without progress than computing would cost: a disk that stands still costs at
        most as much again.
        """
        page, now_s, has_begun = self._context.tree.page_size, self._clock(), asked.num_delayed is not None
        # Windows and states come last, and nothing is of use without them.
        start, end = asked.coming if len(self._context.components) == 1 else (0, asked.end)
        start, end = max(asked.num_usable, asked.computed_end, start) * page, end * page
        if start >= end:
            return False
        wait_s, silent_s = self._wait_s(asked, queue), now_s - asked.progress_s
        if asked.handle.is_preemptible:
            others = num_delayed - self._requests.is_delayed(asked.handle.request_id)
            estimate = LoadEstimate(wait_s, self._cost.longest_wait_s(start, end), others)
            if others and not estimate.is_worth_loading(silent_s):
                self.stop(asked)
            return False
        if not num_delayed and self._beside.may_join(asked):
            compute_s = self._cost.longest_wait_s(start, end)
            likely_s = None if wait_s is None else max(wait_s, silent_s)
            pays = self._beside.pays(asked, likely_s) if asked.is_found else silent_s > _ANSWER_SHARE * compute_s
            if pays and math.isfinite(compute_s):
                self.stop(asked, is_preemptible=True)
                return True
        num_delayed = num_delayed if asked.num_delayed is None else asked.num_delayed
        estimate = LoadEstimate(wait_s, self._cost.longest_wait_s(start, end), num_delayed)
        if not estimate.is_worth_loading(silent_s, _STEADY if has_begun else 1.0):
            self._log_first(estimate)
            counted = self._counters.skipped if asked.is_found and not has_begun else self._counters.gave_up
            counted.value += 1
            self.stop(asked)
            return True
        if asked.is_found and not has_begun:
            asked.num_delayed, asked.decided_s, asked.estimate_s = num_delayed, now_s, wait_s
            self._counters.waited.value += 1
        return False

    def _log_first(self, estimate: LoadEstimate) -> None:
        if not (self._counters.skipped.value or self._counters.gave_up.value):
            log.info(
                "a prefix on the disk is computed again: computing it takes %.3g s, in which %d other requests wait, "
                "and waiting for the disk would cost more",
                estimate.compute_s,
                estimate.num_delayed,
            )

    def _wait_s(self, asked: Asked, queue: _Queue) -> float | None:
        """Until what it waits for is on the device, behind what comes before it; stores are read side by side. For one
        that has to wait for its turn: until that can come, at least. None where that is not known."""
        if asked.has is None:
            queues_s = [self._read_s(store, num_bytes) for store, num_bytes in queue.num_bytes.items()]
            return min((queue_s for queue_s in queues_s if queue_s is not None), default=None)
        if not asked.is_found:
            return None
        stores_s = [self._read_s(store, num_bytes) for store, num_bytes in queue.until(asked).items()]
        read_s = [store_s for store_s in stores_s if store_s is not None]
        if stores_s and not read_s:
            return None
        return max(read_s, default=0.0) + (self._cost.load_s(self._bytes_left(asked)) or 0.0)

    def _bytes_left(self, asked: Asked) -> int:
        num_bytes: int = sum(len(run.keys) * run.job.component.host.page_bytes for run in asked.runs)
        return num_bytes + sum((p.end - p.start) * p.component.host.page_bytes for p in asked.to_read)

    def _read_s(self, store: Store, num_bytes: float) -> float | None:
        job_bytes = self._context.stores[store].job_pages * self._context.full.host.page_bytes
        return self._cost.read_s(num_bytes, math.ceil(num_bytes / job_bytes), store)
