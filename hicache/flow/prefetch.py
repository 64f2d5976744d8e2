"""Stores to host, the requests: who waits for which read, and for how long.

A request's prefetch extends the prefix that memory can serve, by a read of its own or by one in flight that brings the
same pages; it continues where that ends. A share of the host pool bounds what is read for requests that were not
admitted. What does not fit, or not now, is tried again while the request waits to be admitted.

    start -> queued -> read (its own, or shared) -> ended
                          ^            |
                          |            v
                          +-------- postponed      no free host page, or a full queue of the readers

Few prefixes are read at a time and the others are queued, so that a step costs the same however many requests wait.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from operator import attrgetter

from hicache.config import PrefetchMode
from hicache.errors import PrefetchPending
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel, Requests
from hicache.flow.located import Located, StorePrefix
from hicache.flow.movement import Movement
from hicache.flow.prefix_read import PrefixReads
from hicache.flow.prompt import Prompts
from hicache.flow.reading import PrefixRead
from hicache.flow.waiting import Claims, Prefetch, PrefetchCounters, Waiter, Weigher
from hicache.host import HostRun
from hicache.storage.process.jobs import Stalled
from hicache.tiers import FULL, Component, Store
from hicache.tree.key import Tokens
from hicache.tree.node import TreeNode

log = logging.getLogger(__name__)

# Between two attempts to start what was postponed: doubled while they bring nothing.
_RETRY_S, _MAX_RETRY_S = 0.05, 1.0
_ARRIVAL = attrgetter("arrival")
# Of one step, so that it ends soon: prefixes in flight, tokens of prompts whose keys are computed, requests weighed.
_MAX_READS, _MAX_STARTED_TOKENS, _MAX_WEIGHED = 64, 64 << 10, 64


class Prefetcher(Movement):
    """Owned by the scheduler thread. `waiters`, by request, are in order of arrival."""

    def __init__(self, context: EngineContext, prompts: Prompts, cost: CostModel, requests: Requests) -> None:
        self._context, self._prompts, self._cost, self._requests = context, prompts, cost, requests
        self._clock = next(tier.clock for tier in context.stores.values())
        self._reads = PrefixReads(context, cost)
        self._waiters: dict[str, Waiter] = {}
        self._by_read: dict[PrefixRead, dict[str, Waiter]] = {}
        self._arrivals = itertools.count()
        # Lines of those that wait, and of nobody else (see `_forget`); the postponed ones by arrival.
        self._urgent_queue, self._background_queue = dict[Waiter, None](), dict[Waiter, None]()
        self._to_weigh, self._postponed = dict[Waiter, None](), list[Waiter]()
        self._claims = Claims()  # pages that landed for requests that were not admitted
        self._max_pages = int(context.config.prefetch_host_share * context.full.host.num_pages)
        self._retry_at_s, self._retry_s = -math.inf, _RETRY_S
        self._counters = PrefetchCounters(context)
        self._weigher = Weigher(context, cost, self._reads, self._counters, requests)
        self._has_been_full = False
        self._num_claimed = 0  # what a snapshot in another thread may read
        gauge = context.metrics.gauge
        help = "host pages that were read, or are, for requests that were not admitted"
        gauge("prefetch.claimed_pages", help, lambda: self._num_claimed)
        gauge("prefetch.limit_pages", "what prefetch_host_share allows of them", lambda: self._max_pages)
        gauge("prefetch.waiting_requests", "requests with a prefetch that has not ended", lambda: len(self._waiters))

    def start(self, request_id: str, tokens: Tokens, namespace: str, mode: PrefetchMode) -> Prefetch:
        """Extend the prefix of `tokens` that memory can serve (the caller leaves out what must be computed anyway)."""
        if request_id in self._waiters:
            return self._waiters[request_id].handle
        now_s = self._clock()
        handle = Prefetch(request_id, mode, now_s + self._context.config.prefetch_timeout_s, self._clock)
        self._counters.requests.value += 1
        num_pages = len(tokens) // self._context.tree.page_size
        waiter = Waiter(next(self._arrivals), handle, tokens, namespace, now_s, num_pages)
        self._waiters[request_id] = waiter
        if mode == "auto":
            self._to_weigh[waiter] = None
        if handle.waits:
            self._requests.waiting.add(request_id)
        try:
            self._begin(waiter)
        except BaseException:
            if self._is_waiting(waiter):
                self._forget(waiter)
            raise
        return handle

    def lookup(self, located: Located, wait_s: float) -> tuple[dict[Store, int], bool]:
        """Tokens that each store adds to what memory can serve, and whether all of them answered in time."""
        prefix = StorePrefix(located)
        found, until_s, all_known = prefix.nothing, time.monotonic() + wait_s, True
        for store, tier in self._context.stores.items():
            keys, others = found.missing(prefix)
            done = tier.find(keys, max(0.0, until_s - time.monotonic()), others)
            if done is None:
                all_known = False
            else:
                found = found.with_answer(store, done.num_pages, done.others)
        end = prefix.usable_end(found, len(found.pages))
        stores = list(prefix.stores_of(found, prefix.num_usable, end))
        # Where memory has the full pages, a store adds windows or states to them: the one asked last, of several.
        added = [store for component, store, _ in prefix.to_read(end, found) if component.name != FULL]
        stores += [max(added)] * (max(0, end - prefix.num_usable) - len(stores)) if added else []
        return {store: stores.count(store) * self._context.tree.page_size for store in Store}, all_known

    def require_ready(self, request_id: str) -> None:
        """The request asks to be admitted: raise if it must wait."""
        waiter = self._waiters.get(request_id)
        if waiter is not None and not waiter.handle.ready:
            raise PrefetchPending(f"prefetch of {request_id} is in flight: poll() until it is ready, or cancel it")

    def cancel(self, request_id: str) -> None:
        """The request is admitted or gone: read no further for it, unless others want the same."""
        num_pages = self._claims.pop(request_id)
        waiter = self._waiters.get(request_id)
        if waiter is not None:
            read = waiter.read
            self._forget(waiter)
            if read is not None:
                self._claim(read, num_pages)
                self._stop_unwanted(read)
        if num_pages:
            self._num_claimed, self._retry_s = self._claimed(), _RETRY_S

    def poll(self) -> bool:
        """Enter what the readers have answered, and give them more to do; whether there was any of it."""
        found: list[PrefixRead] = []
        answered: dict[PrefixRead, bool] = {}  # and whether a reader of it is stalled
        for read, done in self._reads.poll():
            self.is_torn = True
            landed, was_known = read.landed_end, read.found is not None
            self._reads.apply(read, done)
            self._claim(read, read.prefix.num_missing(landed, read.landed_end))
            if read.found is not None and not was_known:
                found.append(read)
            answered[read] = answered.get(read, False) or isinstance(done, Stalled)
        if found:
            self._fetch(found)
        for read in self._reads.queue() if self._reads.to_queue else ():
            self.is_torn = True
            answered.setdefault(read, False)
        if not answered:
            return False
        for read, is_stalled in answered.items():
            for waiter in self._waiters_of(read):
                if is_stalled and not read.is_live:
                    self._end(waiter)
                else:
                    self._advance(waiter)
            self._stop_unwanted(read)
            if read.is_done:
                self._end_read(read)
        self._start_queued()
        self._num_claimed, self.is_torn = self._claimed(), False
        return True

    def step(self) -> None:
        """Decide anew who waits, and start what was queued or postponed. Once a poll; free where nobody waits."""
        if self._waiters:
            self._retry()
            self._start_queued()
            turn = list(itertools.islice(self._to_weigh, _MAX_WEIGHED))
            for waiter in turn:  # to the end of the line
                del self._to_weigh[waiter]
            weighed = self._undecided(turn)
            self._to_weigh.update(dict.fromkeys(weighed))
            self._weigher.decide(weighed)

    def is_busy(self) -> bool:
        return bool(len(self._reads) or self._urgent_queue or self._background_queue)

    def pages_in_flight(self, component: Component) -> int:
        return self._reads.pages_in_flight(component)

    def locks(self) -> Sequence[TreeNode]:
        return ()

    def host_locks(self, component: Component) -> Iterable[HostRun]:
        return self._reads.host_locks(component)

    # From waiting to reading and back

    def _begin(self, waiter: Waiter) -> None:
        """Read what the waiter still lacks, with others where a read in flight brings it."""
        self._assign(waiter, None)
        if len(self._reads) >= _MAX_READS:
            (self._urgent_queue if waiter.handle.waits else self._background_queue)[waiter] = None
            return
        prefix = self._prefix(waiter)
        if prefix.is_complete or not self._max_pages:
            self._end(waiter)
            return
        waiter.num_usable, waiter.seen_end, waiter.end = prefix.num_usable, prefix.start, prefix.num_pages
        ends = [(self._shared_end(read, prefix, waiter), read) for read in self._reads.in_flight()]
        shared_end, read = max(ends, key=lambda end: end[0], default=(0, None))
        if read is not None and shared_end:
            self._counters.shared.value += 1
            waiter.end = shared_end
            self._assign(waiter, read)
            if read.found is not None:
                self._note_found([waiter], read)
            return
        handle = waiter.handle
        until_s = handle.deadline_s if handle.mode == "timeout" else math.inf
        own = self._reads.start(prefix, is_urgent=handle.waits, until_s=until_s) if self._room(handle) > 0 else None
        if own is None:
            self._postpone(waiter)
        else:
            self._assign(waiter, own, owns=True)

    def _prefix(self, waiter: Waiter) -> StorePrefix:
        match = self._context.tree.match(waiter.tokens, waiter.namespace)
        prompt = self._prompts.of(waiter.tokens, waiter.namespace, match, waiter.handle.request_id)
        return StorePrefix(Located(self._context, prompt, match))

    def _assign(self, waiter: Waiter, read: PrefixRead | None, *, owns: bool = False) -> None:
        """What brings pages for the waiter from now on."""
        if waiter.read is not None:
            del self._by_read[waiter.read][waiter.handle.request_id]
        if read is not None:
            self._by_read.setdefault(read, {})[waiter.handle.request_id] = waiter
        waiter.read, waiter.owns = read, owns

    def _forget(self, waiter: Waiter) -> None:
        """The request waits no longer."""
        waiter.handle.ended = True
        self._requests.waiting.discard(waiter.handle.request_id)
        self._assign(waiter, None)
        for line in (self._urgent_queue, self._background_queue, self._to_weigh):
            line.pop(waiter, None)
        at = bisect_left(self._postponed, waiter.arrival, key=_ARRIVAL)
        if self._postponed[at : at + 1] == [waiter]:
            del self._postponed[at]
        del self._waiters[waiter.handle.request_id]

    def _is_waiting(self, waiter: Waiter) -> bool:
        return self._waiters.get(waiter.handle.request_id) is waiter

    def _undecided(self, waiters: Iterable[Waiter]) -> list[Waiter]:
        """Those that may stop before the end."""
        return [w for w in waiters if w.handle.waits and w.handle.mode == "auto"]

    def _start_queued(self) -> None:
        """Begin with those that wait for their turn, requests that wait before others, until enough was begun."""
        num_tokens = 0
        while (queue := self._urgent_queue or self._background_queue) and len(self._reads) < _MAX_READS:
            if num_tokens >= _MAX_STARTED_TOKENS and len(self._reads):
                break
            waiter = next(iter(queue))
            del queue[waiter]
            num_tokens += len(waiter.tokens)
            self._begin(waiter)

    @staticmethod
    def _shared_end(read: PrefixRead, prefix: StorePrefix, waiter: Waiter) -> int:
        """The end of the pages that `prefix` lacks and `read` brings; 0 for none. Who waits joins no read that nobody
        waits for: those come after all others."""
        if not read.is_live or (waiter.handle.waits and not read.is_urgent):
            return 0
        common = read.prefix.prompt.common_pages(prefix.prompt)
        if common == prefix.num_pages == read.prefix.num_pages:
            return common
        end = min(common, read.end)
        return end if read.landed_end <= prefix.start < end else 0

    def _fetch(self, reads: Sequence[PrefixRead]) -> None:
        """The stores have told what they hold of these: read it, for those who wait before others."""
        by_read = [(read, self._waiters_of(read)) for read in reads]
        for read, waiters in by_read:
            self._note_found(waiters, read)
        self._weigher.decide(self._undecided(waiter for _, waiters in by_read for waiter in waiters))
        for read, waiters in by_read:
            read.is_urgent = any(waiter.handle.waits for waiter in waiters)
            self._reads.fetch(read, self._room(waiters[0].handle) if waiters else 0)

    def _note_found(self, waiters: Sequence[Waiter], read: PrefixRead) -> None:
        for waiter in waiters:
            num_found = read.prefix.num_missing(waiter.seen_end, min(waiter.end, read.found_end))
            waiter.handle.found_tokens = waiter.handle.landed_tokens + num_found * self._context.tree.page_size

    def _advance(self, waiter: Waiter) -> None:
        """Tell the waiter what has landed. Who shares a part only continues behind it."""
        read = waiter.read
        assert read is not None
        landed = min(read.landed_end, waiter.wanted_end)
        if landed > waiter.seen_end:
            num_landed = read.prefix.num_missing(waiter.seen_end, landed)
            waiter.handle.landed_tokens += num_landed * self._context.tree.page_size
            waiter.seen_end, waiter.progress_s = landed, self._clock()
        if not waiter.owns and waiter.end < read.prefix.num_pages and read.landed_end >= waiter.end:
            self._begin(waiter)

    def _end_read(self, read: PrefixRead) -> None:
        self._reads.end(read)
        self._retry_s = _RETRY_S if read.has_landed else self._retry_s
        waiters = self._waiters_of(read)
        for waiter in waiters:
            # A read that was cut short by the queue alone goes on, as long as each attempt brings something.
            goes_on = read.is_short and read.has_landed and self._room(waiter.handle) > 0
            if not waiter.owns or goes_on:
                self._begin(waiter)
            elif read.is_short:
                self._postpone(waiter)
            else:
                self._end(waiter)
        self._by_read.pop(read, None)

    def _postpone(self, waiter: Waiter) -> None:
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
        self._assign(waiter, None)
        insort(self._postponed, waiter, key=_ARRIVAL)
        others = len(self._reads) or self._claims.total > self._claims.of(handle)
        if handle.mode == "wait_complete" or not others:
            self._weigher.stop(waiter)

    def _retry(self) -> None:
        """The request that came first goes first, and the others after it."""
        if not self._postponed or self._clock() < self._retry_at_s:
            return
        postponed = self._postponed[0]
        if self._room(postponed.handle) <= 0:
            return
        self._retry_at_s = self._clock() + self._retry_s
        self._retry_s = min(_MAX_RETRY_S, 2 * self._retry_s)
        self._counters.retries.value += 1
        self._begin(self._postponed.pop(0))

    def _end(self, waiter: Waiter) -> None:
        handle = waiter.handle
        if handle.waits and waiter.decided_s is not None and waiter.estimate_s is not None:
            self._counters.estimated_s.value += waiter.estimate_s
            self._counters.waited_s.observe(self._clock() - waiter.decided_s)
        self._forget(waiter)

    def _waiters_of(self, read: PrefixRead) -> list[Waiter]:
        return list(self._by_read.get(read, {}).values())

    def _stop_unwanted(self, read: PrefixRead) -> None:
        """Read no further than somebody wants."""
        ends = [waiter.wanted_end for waiter in self._waiters_of(read)]
        if not ends or (read.found is not None and max(ends) < read.end and read.landed_end >= max(ends)):
            self._reads.stop(read)

    # The share of the host pool

    def _claim(self, read: PrefixRead, num_pages: int) -> None:
        """Pages that landed count for the first request that waits for them."""
        waiter = next(iter(self._waiters_of(read)), None)
        if waiter is not None and num_pages:
            self._claims.add(waiter.handle, num_pages)

    def _claimed(self) -> int:
        return self._claims.total + self._reads.pages_claimed(FULL)

    def _room(self, handle: Prefetch) -> int:
        """Pages that may be read for a request: of the share, or of the whole pool where no other claims any."""
        claimed, own = self._claimed(), self._claims.of(handle)
        return max(0, (self._max_pages if claimed > own else self._context.full.host.num_pages) - claimed)
