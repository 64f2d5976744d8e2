"""Requests that wait for a prefetch: how their callers see it, whose the host pages are, and whether waiting for more
costs less than computing.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

from hicache.config import PrefetchMode
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel, LoadEstimate, Requests
from hicache.flow.prefix_read import PrefixReads
from hicache.flow.reading import PrefixRead
from hicache.metrics import Counter
from hicache.tiers import Store
from hicache.tree.key import Tokens

log = logging.getLogger(__name__)

_STEADY = 2.0  # of what computing costs, how much what is left of a wait may cost that has begun


class PrefetchCounters:
    """Decisions and outcomes."""

    def __init__(self, context: EngineContext) -> None:
        count, histogram = context.metrics.counter, context.metrics.histogram

        def outcome(name: str, help: str) -> Counter:
            return count(f"prefetch.{name}_requests", help, "prefetch_outcome_requests", outcome=name)

        self.requests = count("prefetch.requests", "prefetches asked for")
        self.waited = outcome("waited", "requests for which waiting was estimated to cost less than computing")
        self.skipped = outcome("skipped", "requests that did not wait because computing was estimated to cost less")
        self.gave_up = outcome(
            "gave_up", "requests that stopped waiting: computing the rest cost less, or nothing came"
        )
        self.shared = outcome("shared", "prefetches that joined a read in flight")
        self.postponed = outcome("postponed", "prefetches refused or cut short by host pages or the read queue")
        self.retries = count("prefetch.retries", "attempts to start what was postponed")
        self.estimated_s = count(
            "prefetch.estimated_seconds", "what the waits that came to their end were estimated to take"
        )
        self.waited_s = histogram("prefetch.waited_seconds", "time that a wait took which came to its end")


class Handle(Protocol):
    """What a caller holds of its prefetch."""

    request_id: str


class _Claim(ref[Handle]):
    """Of one handle, by its identity. `num_pages`: what it claims."""

    __slots__ = ("num_pages", "request_id")

    def __init__(self, handle: Handle, callback: Callable[[_Claim], None]) -> None:
        super().__init__(handle, callback)  # type: ignore[call-arg]
        self.request_id, self.num_pages = handle.request_id, 0


class Claims:
    """Pages by the handle of a prefetch; a request may have had several. Owned by the scheduler thread.

    A claim goes with its handle, so that a caller who forgets a request takes nothing from others for good. Handles go
    in any thread, and in the middle of anything: that is noted then, and counted at the next call.
    """

    def __init__(self) -> None:
        self._total = 0
        self._by_request: dict[str, list[_Claim]] = {}
        self._gone = deque[_Claim]()

    @property
    def total(self) -> int:
        """The pages of all claims."""
        while self._gone:
            gone = self._gone.popleft()
            claims = self._by_request.get(gone.request_id, [])
            if gone in claims:  # dead ones are equal to themselves alone
                claims.remove(gone)
                self._total -= gone.num_pages
            if not claims:
                self._by_request.pop(gone.request_id, None)
        return self._total

    def of(self, handle: Handle) -> int:
        return sum(claim.num_pages for claim in self._by_request.get(handle.request_id, ()) if claim() is handle)

    def add(self, handle: Handle, num_pages: int) -> None:
        claims = self._by_request.setdefault(handle.request_id, [])
        claim = next((claim for claim in claims if claim() is handle), None)
        if claim is None:
            claim = _Claim(handle, self._gone.append)
            claims.append(claim)
        claim.num_pages += num_pages
        self._total += num_pages

    def pop(self, request_id: str) -> int:
        """The pages of all prefetches of a request, which are nobody's from now on."""
        num_pages = sum(claim.num_pages for claim in self._by_request.pop(request_id, ()))
        self._total -= num_pages
        return num_pages


class Prefetch:
    """A caller's view of one prefetch. `ready`: admission need not wait. Changes in `poll()` and `cancel()` alone, but
    for a deadline that passes."""

    def __init__(
        self, request_id: str, mode: PrefetchMode, deadline_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.request_id, self.mode, self.deadline_s, self._clock = request_id, mode, deadline_s, clock
        self.found_tokens = self.landed_tokens = 0
        self.waits = mode != "best_effort"
        self.ended = False

    @property
    def ready(self) -> bool:
        """Best effort never waits; a timeout waits until its deadline; wait_complete until the end; auto where
        that is estimated to cost less than computing."""
        if self.ended or not self.waits:
            return True
        return self.mode == "timeout" and self._clock() >= self.deadline_s


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that was not admitted yet. `read`: what brings pages for it; None while it is queued or postponed.

    [seen_end, end)   pages of its prompt that are to land: those of its own read, or the part that it shares
    `owns`: the read is for its whole prompt. `progress_s`: when something last landed for it. `decided_s`: when the
    store had told what it holds and the request chose to wait; `estimate_s`: for how long, where that is known;
    `num_delayed`: the others that computing would have delayed then.
    """

    arrival: int
    handle: Prefetch
    tokens: Tokens
    namespace: str
    progress_s: float
    end: int
    read: PrefixRead | None = None
    owns: bool = False
    num_usable: int = 0
    seen_end: int = 0
    estimate_s: float | None = None
    decided_s: float | None = None
    num_delayed: int | None = None

    @property
    def wanted_end(self) -> int:
        return self.end if self.read is None else min(self.end, self.read.end)

    @property
    def is_found(self) -> bool:
        """Whether the stores have told what they hold of it."""
        return self.read is not None and self.read.found is not None


class Weigher:
    """Who waits in mode auto, and who computes, by the rule of `LoadEstimate`. Owned by the scheduler thread."""

    def __init__(
        self,
        context: EngineContext,
        cost: CostModel,
        reads: PrefixReads,
        counters: PrefetchCounters,
        requests: Requests,
    ) -> None:
        self._context, self._cost, self._reads, self._counters = context, cost, reads, counters
        self._requests, self._clock = requests, next(tier.clock for tier in context.stores.values())

    def decide(self, waiting: Sequence[Waiter]) -> None:
        """Of these, which wait in mode auto, some stop: where computing what is missing costs less. What one that stops
        would have read is not before those that come after it."""
        if not waiting:
            return
        by_read: dict[PrefixRead | None, list[Waiter]] = {}
        for waiter in waiting:
            by_read.setdefault(waiter.read, []).append(waiter)
        ahead_bytes, num_delayed = dict.fromkeys(self._context.stores, 0), self._requests.num_delayed
        for read in self._reads.in_flight():
            waiters = by_read.pop(read, [])
            for waiter in waiters:
                num_delayed += self._weigh(waiter, ahead_bytes, num_delayed)
            is_wanted = not waiters or any(waiter.handle.waits for waiter in waiters)
            if read.is_live and read.is_urgent and is_wanted:
                for store in ahead_bytes:
                    ahead_bytes[store] += read.bytes_left(read.end, store)
        for waiters in by_read.values():  # no read of theirs has begun
            for waiter in waiters:
                num_delayed += self._weigh(waiter, ahead_bytes, num_delayed)

    def stop(self, waiter: Waiter) -> None:
        """It waits no more: it may be admitted, and computing delays it from now on."""
        waiter.handle.waits = False
        self._requests.waiting.discard(waiter.handle.request_id)

    def _weigh(self, waiter: Waiter, ahead_bytes: Mapping[Store, int], num_delayed: int) -> bool:
        """Compare for one waiter; whether it stops. `ahead_bytes`: of other reads of a store, which come before its
        own. `num_delayed`: others that computing would delay now.

        A wait that has begun counts the others of its beginning: once all wait the device is idle, and all would stop
        together; and it ends where computing is cheaper by far, for rates swing with the writes beside. Whatever the
        estimate, nobody waits for longer without progress than computing would cost: a disk that stands still costs at
        most as much again.
        """
        page, now_s, has_begun = self._context.tree.page_size, self._clock(), waiter.num_delayed is not None
        # Windows and states come last, and nothing is of use without them.
        landed = waiter.seen_end if len(self._context.components) == 1 else 0
        start, end = max(waiter.num_usable, landed) * page, waiter.wanted_end * page
        if start >= end:
            return False
        num_delayed = num_delayed if waiter.num_delayed is None else waiter.num_delayed
        wait_s = self._wait_s(waiter, ahead_bytes)
        estimate = LoadEstimate(wait_s, self._cost.longest_wait_s(start, end), num_delayed)
        limit_s = estimate.limit_s * (_STEADY if has_begun else 1.0)
        if (wait_s is not None and wait_s > limit_s) or now_s - waiter.progress_s > estimate.limit_s:
            self._log_first(estimate)
            counted = self._counters.skipped if waiter.is_found and not has_begun else self._counters.gave_up
            counted.value += 1
            self.stop(waiter)
            return True
        if waiter.is_found and not has_begun:
            waiter.num_delayed, waiter.decided_s, waiter.estimate_s = num_delayed, now_s, wait_s
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

    def _wait_s(self, waiter: Waiter, ahead_bytes: Mapping[Store, int]) -> float | None:
        """Until what it waits for is on the device, behind `ahead_bytes` of each store; stores are read side by side.
        For one whose read has not begun: until one can begin, at least. None where that is not known."""
        read = waiter.read
        if read is None:
            queues_s = [self._read_s(store, num_bytes) for store, num_bytes in ahead_bytes.items()]
            return min((queue_s for queue_s in queues_s if queue_s is not None), default=None)
        if read.found is None:
            return None
        read_s, num_bytes = 0.0, 0
        for store, queued_bytes in ahead_bytes.items():
            own_bytes = read.bytes_left(waiter.wanted_end, store)
            store_s = self._read_s(store, queued_bytes + own_bytes) if own_bytes else 0.0
            if store_s is None:
                return None
            read_s, num_bytes = max(read_s, store_s), num_bytes + own_bytes
        return read_s + (self._cost.load_s(num_bytes) or 0.0)

    def _read_s(self, store: Store, num_bytes: int) -> float | None:
        job_bytes = self._context.stores[store].job_pages * self._context.full.host.page_bytes
        return self._cost.read_s(num_bytes, math.ceil(num_bytes / job_bytes), store)
