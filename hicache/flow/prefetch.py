"""Stores to host, the requests: who waits for which read, and for how long.

A request's prefetch extends the prefix that memory can serve, by a read of its own or by one in flight that brings the
same pages; it continues where that ends. A share of the host pool bounds what is read for requests that were not
admitted. What does not fit, or not now, is tried again while the request waits to be admitted.

    start -> read (its own, or shared) -> ended
                ^            |
                |            v
                +-------- postponed      no free host page, or a full queue of the readers
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from hicache.config import PrefetchMode
from hicache.disk.jobs import Stalled
from hicache.errors import PrefetchPending
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel
from hicache.flow.disk_prefix import DiskPrefix
from hicache.flow.host_eviction import HostEviction
from hicache.flow.prefetch_counters import PrefetchCounters
from hicache.flow.prefix_read import PrefixReads
from hicache.flow.read_state import PrefixRead
from hicache.tree.key import Tokens
from hicache.tree.node import DISK, FULL, Component, Store

log = logging.getLogger(__name__)

# Between two attempts to start what was postponed: doubled while they bring nothing.
_RETRY_S, _MAX_RETRY_S = 0.05, 1.0


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


@dataclass(eq=False)
class _Waiter:
    """A request that was not admitted yet. `read`: what brings pages for it; None while it is postponed.

    [seen_end, end)   pages of its prompt that are to land: those of its own read, or the part that it shares
    `owns`: the read is for its whole prompt. `progress_s`: when something last landed for it. `decided_s`: when the
    store had told what it holds and the request chose to wait; `estimate_s`: for how long, where that is known.
    """

    handle: Prefetch
    tokens: Tokens
    namespace: str
    progress_s: float
    read: PrefixRead | None = None
    owns: bool = False
    num_usable: int = 0
    seen_end: int = 0
    end: int = 0
    estimate_s: float | None = None
    decided_s: float | None = None

    @property
    def wanted_end(self) -> int:
        assert self.read is not None
        return min(self.end, self.read.end)


class Prefetcher:
    """Owned by the scheduler thread. `waiters`, by request, are in order of arrival."""

    def __init__(self, context: EngineContext, host_eviction: HostEviction, cost: CostModel) -> None:
        self._context, self._cost = context, cost
        self._clock = next(tier.clock for tier in context.stores.values())
        self._reads = PrefixReads(context, host_eviction, cost)
        self._waiters: dict[str, _Waiter] = {}
        # Pages that landed for requests that were not admitted. A claim goes with its handle, so that a caller who
        # forgets a request takes nothing from others for good.
        self._claims: WeakKeyDictionary[Prefetch, int] = WeakKeyDictionary()
        self._max_pages = int(context.config.prefetch_host_share * context.full.host.num_pages)
        self._retry_at_s, self._retry_s = -math.inf, _RETRY_S
        self._counters = PrefetchCounters(context)
        self._has_been_full = False
        self._num_claimed = 0  # what a snapshot in another thread may read
        gauge = context.metrics.gauge
        help = "host pages that were read, or are, for requests that were not admitted"
        gauge("prefetch.claimed_pages", help, lambda: self._num_claimed)
        gauge("prefetch.limit_pages", "what prefetch_host_share allows of them", lambda: self._max_pages)
        gauge("prefetch.waiting_requests", "requests with a prefetch that has not ended", lambda: len(self._waiters))

    def start(self, request_id: str, tokens: Tokens, namespace: str, mode: PrefetchMode) -> Prefetch:
        """Extend the prefix of `tokens` that memory can serve (the caller leaves out what must be computed anyway)."""
        now_s = self._clock()
        handle = Prefetch(request_id, mode, now_s + self._context.config.prefetch_timeout_s, self._clock)
        if request_id in self._waiters:
            handle.ended = True
            return handle
        self._counters.requests.value += 1
        waiter = self._waiters[request_id] = _Waiter(handle, tokens, namespace, now_s)
        self._begin(waiter)
        return handle

    def lookup(self, tokens: Tokens, namespace: str, wait_s: float) -> tuple[dict[Store, int], bool]:
        """Tokens that each store adds to what memory can serve, and whether all of them answered in time."""
        prefix = DiskPrefix.of(self._context, tokens, namespace)
        found, until_s, all_known = prefix.nothing, time.monotonic() + wait_s, True
        for store, tier in self._context.stores.items():
            keys, others = found.missing(prefix)
            done = tier.find(keys, max(0.0, until_s - time.monotonic()), others)
            if done is None:
                all_known = False
            else:
                found = found.with_answer(store, done.num_pages, done.others)
        end = prefix.usable_end(found, len(found.pages))
        # Where memory has the full pages, the disk adds windows or states to them.
        added = [found.pages[at - prefix.num_host_pages] if at >= prefix.num_host_pages else DISK
                 for at in range(prefix.num_usable, end)]  # fmt: skip
        return {store: added.count(store) * self._context.tree.page_size for store in Store}, all_known

    def settle(self, request_id: str) -> None:
        """The request is about to be admitted: raise if it must wait, else read no further for it."""
        waiter = self._waiters.get(request_id)
        if waiter is not None and not waiter.handle.ready:
            raise PrefetchPending(f"prefetch of {request_id} is in flight: poll() until it is ready, or cancel it")
        self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """The request is admitted or gone: read no further for it, unless others want the same."""
        claimants = [handle for handle in self._claims if handle.request_id == request_id]
        num_pages = sum(self._claims.pop(handle) for handle in claimants)
        waiter = self._waiters.pop(request_id, None)
        if waiter is not None:
            waiter.handle.ended = True
            if waiter.read is not None:
                self._claim(waiter.read, num_pages)
                self._stop_unwanted(waiter.read)
        if claimants:
            self._num_claimed, self._retry_s = self._claimed(), _RETRY_S

    def poll(self) -> bool:
        """Enter what the readers have answered; whether there was an answer."""
        answered = False
        for read, done in self._reads.poll():
            answered = True
            landed, was_known = read.landed_end, read.found is not None
            self._reads.apply(read, done)
            self._claim(read, read.landed_end - landed)
            if read.found is not None and not was_known:
                self._found(read)
            for waiter in self._waiters_of(read):
                if isinstance(done, Stalled) and not read.is_live:
                    self._end(waiter)
                else:
                    self._advance(waiter)
            self._stop_unwanted(read)
            if read.is_done:
                self._end_read(read)
        if answered:
            self._num_claimed = self._claimed()
        return answered

    def step(self) -> None:
        """Decide anew who waits, and start what was postponed. Once a poll; costs nothing where nobody waits."""
        if self._waiters:
            self._retry()
            self._decide(self._waiters.values())

    def is_busy(self) -> bool:
        return bool(len(self._reads))

    def pages_in_flight(self, component: Component) -> int:
        """Host pages of a component that were taken for reads and are not in the tree."""
        return self._reads.pages_in_flight(component)

    # From waiting to reading and back

    def _begin(self, waiter: _Waiter) -> None:
        """Read what the waiter still lacks, with others where a read in flight brings it."""
        prefix = DiskPrefix.of(self._context, waiter.tokens, waiter.namespace)
        if prefix.is_complete or not self._max_pages:
            self._end(waiter)
            return
        waiter.num_usable, waiter.seen_end, waiter.end = prefix.num_usable, prefix.num_host_pages, prefix.num_pages
        ends = [(self._shared_end(read, prefix, waiter), read) for read in self._reads.in_flight()]
        shared_end, read = max(ends, key=lambda end: end[0], default=(0, None))
        if read is not None and shared_end:
            self._counters.shared.value += 1
            waiter.read, waiter.owns, waiter.end = read, False, shared_end
            if read.found is not None:
                self._note_found([waiter], read)
            return
        handle = waiter.handle
        until_s = handle.deadline_s if handle.mode == "timeout" else math.inf
        own = self._reads.start(prefix, is_urgent=handle.waits, until_s=until_s) if self._room(handle) > 0 else None
        waiter.read, waiter.owns = own, own is not None
        if own is None:
            self._postpone(waiter)

    @staticmethod
    def _shared_end(read: PrefixRead, prefix: DiskPrefix, waiter: _Waiter) -> int:
        """The end of the pages that `prefix` lacks and `read` brings; 0 for none. Who waits joins no read that nobody
        waits for: those come after all others."""
        if not read.is_live or (waiter.handle.waits and not read.is_urgent):
            return 0
        common = read.prefix.common_pages(prefix)
        if common == prefix.num_pages == read.prefix.num_pages:
            return common
        end = min(common, read.end)
        return end if read.landed_end <= prefix.num_host_pages < end else 0

    def _found(self, read: PrefixRead) -> None:
        """The store has told what it holds: read it, for those who wait before others."""
        waiters = self._waiters_of(read)
        self._note_found(waiters, read)
        self._decide(waiters)
        read.is_urgent = any(waiter.handle.waits for waiter in waiters)
        self._reads.fetch(read, self._room(waiters[0].handle) if waiters else 0)

    def _note_found(self, waiters: Sequence[_Waiter], read: PrefixRead) -> None:
        for waiter in waiters:
            num_found = max(0, min(waiter.end, read.found_end) - waiter.seen_end)
            waiter.handle.found_tokens = waiter.handle.landed_tokens + num_found * self._context.tree.page_size

    def _advance(self, waiter: _Waiter) -> None:
        """Tell the waiter what has landed. Who shares a part only continues behind it."""
        read = waiter.read
        assert read is not None
        landed = min(read.landed_end, waiter.wanted_end)
        if landed > waiter.seen_end:
            waiter.handle.landed_tokens += (landed - waiter.seen_end) * self._context.tree.page_size
            waiter.seen_end, waiter.progress_s = landed, self._clock()
        if not waiter.owns and waiter.end < read.prefix.num_pages and read.landed_end >= waiter.end:
            self._begin(waiter)

    def _end_read(self, read: PrefixRead) -> None:
        self._reads.end(read)
        self._retry_s = _RETRY_S if read.has_landed else self._retry_s
        for waiter in self._waiters_of(read):
            # A read that was cut short by the queue alone goes on, as long as each attempt brings something.
            goes_on = read.is_short and read.has_landed and self._room(waiter.handle) > 0
            if not waiter.owns or goes_on:
                self._begin(waiter)
            elif read.is_short:
                self._postpone(waiter)
            else:
                self._end(waiter)

    def _postpone(self, waiter: _Waiter) -> None:
        """Wait for free pages. They come from others alone, when they are admitted or gone: a wait has an end only
        where there are such, and where its mode bounds it."""
        handle = waiter.handle
        if not self._has_been_full and self._room(handle) <= 0:
            self._has_been_full = True
            log.warning(
                "prefetches wait for host pages: %d are claimed by requests that were not admitted, "
                "prefetch_host_share=%g allows %d; raise it, or host_bytes",
                self._claimed(),
                self._context.config.prefetch_host_share,
                self._max_pages,
            )
        self._counters.postponed.value += 1
        waiter.read, waiter.owns = None, False
        others = len(self._reads) or any(other is not handle for other in self._claims)
        if handle.mode == "wait_complete" or not others:
            handle.waits = False

    def _retry(self) -> None:
        """The request that came first goes first, and the others after it."""
        postponed = next((waiter for waiter in self._waiters.values() if waiter.read is None), None)
        if postponed is None or self._clock() < self._retry_at_s or self._room(postponed.handle) <= 0:
            return
        self._retry_at_s = self._clock() + self._retry_s
        self._retry_s = min(_MAX_RETRY_S, 2 * self._retry_s)
        self._counters.retries.value += 1
        self._begin(postponed)

    def _end(self, waiter: _Waiter) -> None:
        handle = waiter.handle
        if handle.waits and waiter.decided_s is not None and waiter.estimate_s is not None:
            self._counters.estimated_s.value += waiter.estimate_s
            self._counters.waited_s.observe(self._clock() - waiter.decided_s)
        handle.ended = True
        del self._waiters[handle.request_id]

    def _waiters_of(self, read: PrefixRead) -> list[_Waiter]:
        return [waiter for waiter in self._waiters.values() if waiter.read is read]

    def _stop_unwanted(self, read: PrefixRead) -> None:
        """Read no further than somebody wants."""
        ends = [waiter.wanted_end for waiter in self._waiters_of(read)]
        if not ends or (read.found is not None and max(ends) < read.end and read.landed_end >= max(ends)):
            self._reads.stop(read)

    # Whether waiting is faster than computing

    def _decide(self, waiters: Iterable[_Waiter]) -> None:
        """Those in mode auto stop waiting where computing what is missing is estimated to be faster."""
        waiting = [waiter for waiter in waiters if waiter.handle.mode == "auto" and waiter.handle.waits]
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

    def _weigh(self, waiter: _Waiter, ahead_bytes: Mapping[Store, int]) -> None:
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

    # The share of the host pool

    def _claim(self, read: PrefixRead, num_pages: int) -> None:
        """Pages that landed count for the first request that waits for them."""
        waiter = next(iter(self._waiters_of(read)), None)
        if waiter is not None and num_pages:
            self._claims[waiter.handle] = self._claims.get(waiter.handle, 0) + num_pages

    def _claimed(self) -> int:
        return sum(self._claims.values()) + self._reads.pages_in_flight(FULL)

    def _room(self, handle: Prefetch) -> int:
        """Pages that may be read for a request: of the share, or of the whole pool where no other claims any."""
        claimed, own = self._claimed(), self._claims.get(handle, 0)
        return (self._max_pages if claimed > own else self._context.full.host.num_pages) - claimed
