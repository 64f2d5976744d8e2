"""Requests that wait for a prefetch: how their callers see it, whose the host pages are, and whether waiting for more
is faster than computing.
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
from hicache.flow.cost import CostModel
from hicache.flow.prefix_read import PrefixReads
from hicache.flow.reading import PrefixRead
from hicache.metrics import Counter
from hicache.tiers import Store
from hicache.tree.key import Tokens

log = logging.getLogger(__name__)


class PrefetchCounters:
    """Decisions and outcomes."""

    def __init__(self, context: EngineContext) -> None:
        count, histogram = context.metrics.counter, context.metrics.histogram

        def outcome(name: str, help: str) -> Counter:
            return count(f"prefetch.{name}_requests", help, "prefetch_outcome_requests", outcome=name)

        self.requests = count("prefetch.requests", "prefetches asked for")
        self.waited = outcome("waited", "requests for which waiting was estimated to be faster than computing")
        self.skipped = outcome("skipped", "requests that did not wait because computing was estimated faster")
        self.gave_up = outcome("gave_up", "requests that stopped waiting because computing the rest was faster")
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
        """Best effort never waits; a timeout waits until its deadline; wait_complete until the end; auto as long as
        that is estimated to be faster than computing."""
        if self.ended or not self.waits:
            return True
        return self.mode == "timeout" and self._clock() >= self.deadline_s


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that was not admitted yet. `read`: what brings pages for it; None while it is queued or postponed.

    [seen_end, end)   pages of its prompt that are to land: those of its own read, or the part that it shares
    `owns`: the read is for its whole prompt. `progress_s`: when something last landed for it. `decided_s`: when the
    store had told what it holds and the request chose to wait; `estimate_s`: for how long, where that is known.
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

    @property
    def wanted_end(self) -> int:
        assert self.read is not None
        return min(self.end, self.read.end)


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
