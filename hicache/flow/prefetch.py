"""Stores to host: pages that requests wait for, before they are admitted.

A run in flight in the host's map knows who waits for it and which job brings it (`HostRun.wanted`, `HostRun.job`). So
a request takes each page where it is: those that are here, those that come for another, and the rest by jobs of its
own. Its way:

    start -> _begin   where are its pages?       here: ended; else a store is asked for those that nobody brings
    _note_answer      a store has told           the next is asked for the rest
    _plan             all have told              the longest prefix that all components can use and there is room for
    _submit           a few jobs a step          who waits before who does not, then who came first; nobody overtakes
    _land             a job was answered         its runs are published, or given back
    _finish           nothing more comes         what failed is asked for again, once; without room it is postponed
    admit             it goes on beside computing, where it joins what comes: see `hicache.flow.beside`
    cancel            admitted, or gone          it leaves its runs; who leaves a job last cancels it

A share of the host pool bounds what is read for requests that were not admitted. Who finds no room, and has nothing in
flight, waits in line, and begins anew. What a stalled thread has comes when it returns: nobody waits for that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from operator import attrgetter

from hicache.config import PrefetchMode
from hicache.errors import PrefetchPending
from hicache.eviction.write_budget import names_of
from hicache.flow.asked import Asked, ReadOfRuns
from hicache.flow.beside import Beside
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel, Requests
from hicache.flow.counters import PrefetchCounters
from hicache.flow.host_room import HostRoom
from hicache.flow.lease import Lease, Prefetch
from hicache.flow.line import Line
from hicache.flow.located import Located, StoreAnswers
from hicache.flow.movement import Movement
from hicache.flow.prompt import Prompts
from hicache.flow.readers import Readers
from hicache.flow.weigher import Weigher
from hicache.host.run import HostRun
from hicache.storage.process.jobs import FindDone, ReadDone, Stalled
from hicache.tiers import DISK, FULL, Component
from hicache.tree.key import Tokens

_LOOK_S, _LOOK_POLLS = 0.002, 16  # after either, a poll without news looks at all requests that have begun
# Of one step, so that it ends soon: requests in work, and tokens of prompts whose keys are computed; jobs and pages
# that are queued: four times as many for a request that yields, or as many for each `_STEP_S`, as passes make steps
# long, up to `_MOST_STEPS`.
_MAX_BEGUN, _MAX_STARTED_TOKENS = 64, 64 << 10
_MAX_JOBS, _MAX_PAGES, _STEP_S, _MOST_STEPS = 6, 128, 0.005, 16
_ARRIVAL, _TURN = attrgetter("arrival"), attrgetter("turn")


class Prefetcher(Movement):
    """Owned by the scheduler thread. A request whose prefetch has not ended is in `_begun` or in `_line`.

    `_has_news`: a request was added, began or ended, or a job was queued, since the last poll that looked.
    """

    def __init__(self, context: EngineContext, prompts: Prompts, cost: CostModel, requests: Requests) -> None:
        self._context, self._prompts, self._requests = context, prompts, requests
        self._clock = next(tier.clock for tier in context.stores.values())
        self._asked, self._arrivals = dict[str, Asked](), itertools.count()
        self._begun, self._submitted_s = dict[Asked, None](), self._clock()
        self._has_news, self._num_quiet, self._look_at_s, self._counts = False, 0, -math.inf, requests.counts
        self._counters = counters = PrefetchCounters(context)
        self._readers = readers = Readers(context, cost, counters)
        self._room = HostRoom(context, readers.num_pages)
        self._line = Line(self._asked, self._room, self._clock)
        self.beside = Beside(context, cost, counters, readers)
        self._weigher = Weigher(context, cost, counters, requests, readers.reads, self.beside, self._line)
        gauge = context.metrics.gauge
        gauge("prefetch.waiting_requests", "requests with a prefetch that has not ended", lambda: len(self._asked))
        gauge("prefetch.queued_reads", "prefixes being read", lambda: len(self._begun))

    def start(
        self, request_id: str, tokens: Tokens, namespace: str, mode: PrefetchMode, *, overlaps: bool = False
    ) -> Prefetch:
        """Extend the prefix of `tokens` that memory can serve (the caller leaves out what must be computed anyway).
        `overlaps`: the caller computes the prompt while its pages arrive, if the mode is auto."""
        if request_id in self._asked:
            return self._asked[request_id].handle
        deadline_s = (now_s := self._clock()) + self._context.config.prefetch_timeout_s
        overlaps = overlaps and mode == "auto" and self.beside.is_wanted
        handle = Prefetch(request_id, mode, deadline_s, overlaps=overlaps)
        self._counters.requests.value += 1
        num_pages = len(tokens) // self._context.tree.page_size
        asked = Asked(next(self._arrivals), handle, tokens, namespace, now_s, num_pages)
        self._asked[request_id] = asked
        self._has_news = True
        self._weigher.add(asked)
        if handle.waits:
            self._requests.waiting.add(request_id)
        try:
            if asked.handle.waits in self._may_begin():
                self._begin(asked)
            else:
                self._line.add(asked)
        except BaseException:
            self._forget(asked)
            raise
        return handle

    def require_ready(self, request_id: str) -> None:
        """The request asks to be admitted: raise if it must wait."""
        asked = self._asked.get(request_id)
        if asked is not None and not asked.handle.ready:
            raise PrefetchPending(f"prefetch of {request_id} is in flight: poll() until it is ready, or cancel it")

    def admit(self, lease: Lease) -> None:
        """The request of a lease is admitted: what comes for it goes on coming where it will join that."""
        asked = self._asked.get(lease.request_id)
        if asked not in self._begun or not self.beside.begin(asked, lease):
            self.cancel(lease.request_id)

    def joined(self, before: Lease, num_tokens: int, after: Lease) -> None:
        """See `Beside.joined`. What there was no room for before is read now."""
        asked = self.beside.joined(before, num_tokens, after)
        if after.cached_len < asked.end * self._context.tree.page_size:
            return
        if not asked.is_short:
            self.cancel(after.request_id)
        else:
            self._room.share.end(after.request_id)
            self._release(asked)
            self._begin(asked)

    def end_reads(self, lease: Lease) -> None:
        """The prompt of a lease is computed, or the lease ends: its request joins nothing any more."""
        if self.beside.reads_for(lease):
            self.cancel(lease.request_id)

    def cancel(self, request_id: str) -> None:
        """The request is admitted or gone: read no further for it, unless others want the same."""
        self._prompts.forget(request_id)
        if self._room.share.end(request_id):
            self._line.retry()
            self._has_news = True
        if (asked := self._asked.get(request_id)) is not None:
            self._forget(asked)
        self._room.publish()

    def poll(self) -> bool:
        """Enter what the readers have answered, and give them more to do; whether there was any of it. Decide again
        which requests wait. Of polls without news few do that."""
        found, has_changed = list[Asked](), False
        for done in self._readers.poll():
            self.is_torn = has_changed = True
            if isinstance(done, ReadDone):
                self._land(*self._readers.take(done))
            elif done.ticket in self._readers.finds:
                found += self._note_answer(done)
            else:
                self._note_stall(self._readers.reads[done.ticket])
        if not (has_changed or self._is_due()):
            return False
        self.is_torn, self._has_news = True, False
        for asked in found:
            self._plan(asked)
        self._weigher.decide(found, self._begun)
        has_changed |= self._begin_next()
        has_changed |= self._submit()
        self._has_news |= has_changed
        self._room.publish()
        self._weigher.decide_again(self._begun)
        self.is_torn = False
        return has_changed

    def _is_due(self) -> bool:
        """Whether requests asked or left since the last poll, or that was long ago."""
        if not self._asked:
            return False
        now_s, counts = self._clock(), self._requests.counts
        self._num_quiet += 1
        is_due = now_s >= self._look_at_s or self._num_quiet >= _LOOK_POLLS
        if not (is_due or self._has_news or counts != self._counts):
            return False
        self._look_at_s, self._counts, self._num_quiet = now_s + _LOOK_S, counts, 0
        return True

    def is_busy(self) -> bool:
        may_go_on = any(asked.to_read for asked in self._begun) or self._line.has_new
        return may_go_on or self._readers.is_busy()

    def host_locks(self, component: Component) -> Iterable[HostRun]:
        locked = (locked for asked in self._begun for locked in asked.locked)
        yield from (run for held, runs in locked if held.name == component for run in runs)
        yield from (asked.tail for asked in self._begun if component == FULL and asked.tail is not None)
        yield from self._readers.runs(component)

    # Where its pages are

    def _may_begin(self) -> tuple[bool, ...]:
        """Whether one that waits (True) may begin, and whether one that does not (False), beside those that have, and
        those that a store was asked for and that are gone since. Who does not wait holds up nobody who does."""
        if self._readers.num_finds >= _MAX_BEGUN * len(self._context.stores):
            return ()
        num_waiting = sum([asked.handle.waits for asked in self._begun])
        return (True,) * (num_waiting < _MAX_BEGUN) + (False,) * (len(self._begun) - num_waiting < _MAX_BEGUN)

    def _begin_next(self) -> bool:
        """Begin with those in line, until enough was begun; of those that were postponed with the first, now and then,
        once there is room. Whether any was begun."""
        num_tokens = 0
        while asked := self._line.take(self._may_begin() if num_tokens < _MAX_STARTED_TOKENS else ()):
            self._counters.retries.value += asked.is_postponed
            num_tokens += len(asked.tokens)
            self._begin(asked)
        return num_tokens > 0

    def _begin(self, asked: Asked) -> None:
        """Look where its pages are, and have a store asked for those that nobody brings."""
        context = self._context
        match = context.tree.match(asked.tokens, asked.namespace)
        prompt = self._prompts.of(asked.tokens, asked.namespace, match, asked.handle.request_id)
        located = Located(context, prompt, match)
        has = StoreAnswers(located, lambda component, key: asked.may_share(component.index.find(key)))
        if has.is_complete or not self._room.max_pages:
            self._end(asked)
            return
        self._begun[asked] = None
        asked.begin(has)
        for component in context.components:
            pages = range(component.first_required(has.num_usable), has.num_usable)
            if component.name == FULL:
                pages = range(located.device_end, located.num_pages if asked.handle.overlaps else located.host_end)
            asked.lock(component, [part.run for part in located.parts(component, pages)])
        if has.is_open:
            asked.is_short = self._room.left(asked) <= 0 or not self._readers.find(asked)
        if asked.is_short and has.has_none:
            self._postpone(asked)
        elif asked.find is None:
            self._plan(asked)

    def _note_answer(self, done: FindDone | Stalled) -> list[Asked]:
        """Enter the answer of a store, or its stall, and ask the next store. Returns the request to plan for."""
        find = self._readers.take_find(done)
        asked = find.asked
        if asked.has is not find.has or (asked.is_found and isinstance(done, Stalled)):
            return []  # it has ended, or begun anew
        is_waited_for = asked.find is find
        asked.find = None if is_waited_for else asked.find
        if isinstance(done, FindDone):
            self._readers.note_found(find, done)
        if asked.is_found:
            asked.add_store()
        return [asked] if is_waited_for and not self._readers.find(asked) else []

    def _plan(self, asked: Asked) -> None:
        """It is known where all pages are: those of the longest prefix are read that all components can use, and that
        there is room for beside what they follow, which stays."""
        has, full, handle = asked.has, self._context.full, asked.handle
        assert has is not None
        followed = [has.located.prompt.keys[start - 1] for start, _, _ in has.known if start]
        asked.lock(full, [run for key in followed if (run := full.index.get(key)) is not None])
        found_end = end = has.usable_end(has.full_end)
        limit = has.end_with(min(self._room.left(asked), full.index.capacity))
        if limit < found_end:
            end, asked.is_short = has.usable_end(limit), True
        for component in self._context.components[1:]:
            pages = range(max(has.num_usable, component.first_required(end)), end)
            asked.lock(component, [part.run for part in has.located.parts(component, pages)])
        found_tokens = handle.landed_tokens + has.num_coming(found_end) * self._context.tree.page_size
        handle.found_tokens = max(handle.found_tokens, found_tokens)
        asked.plan(end, self._clock())
        self._readers.find_also(asked)
        if any(asked.num_to_read(component) > component.index.capacity for component in self._context.components):
            asked.have_no_room()
        self._room.note(asked)
        if asked.is_idle:
            self._finish(asked)

    # From the stores

    def _submit(self) -> bool:
        """Reserve host pages and queue jobs that read them, a few, so that the step ends soon; whether any was queued.
        Who finds no room holds up those behind, or is postponed where nothing of its own is in flight."""
        num_jobs, num_pages, has_room = 0, 0, True
        now_s = self._clock()
        num_steps, self._submitted_s = (now_s - self._submitted_s) / _STEP_S, now_s
        for asked in sorted([asked for asked in self._begun if asked.to_read], key=_TURN):
            had_shared, more = (
                asked.has_shared,
                min(_MOST_STEPS, max(4, int(num_steps))) if asked.handle.is_preemptible else 1,
            )
            times = max(1, more // 4)
            while (chosen := self._readers.next_of(asked, times)) is not None:
                if not has_room or num_jobs >= more * _MAX_JOBS or num_pages >= more * _MAX_PAGES:
                    break
                job = self._readers.read(asked, *chosen)
                has_room = job is not None
                num_jobs, num_pages = num_jobs + has_room, num_pages + (job.num_pages if job else 0)
            self._counters.shared.value += asked.has_shared and not had_shared
            self._room.note(asked)
            if has_room or asked.runs:
                self._advance(asked)
            else:
                self._postpone(asked)
                has_room = True
        return num_jobs > 0

    def _note_stall(self, job: ReadOfRuns) -> None:
        """Read the pages of a stalled job from the other store, or end the requests for pages that it lacks."""
        job.is_stalled = True
        for asked in self._readers.give_back(job):
            self._end(asked)

    def _land(self, job: ReadOfRuns, ok: Sequence[bool]) -> None:
        """Publish the pages that a job read. Pages that it did not read are read from the other store. If that lacks
        them, a request cannot use the pages behind."""
        index, at, wanted = job.component.index, 0, job.wanted
        for run in job.runs:
            keys, first, waiting = [*run.keys], run.first, run.wanted
            came, at = ok[at : at + len(keys)], at + len(keys)
            published = index.publish(run, came)
            for part in published:
                part.stored |= job.store.bit
                if job.store is DISK:
                    self._context.page_uses.read(names_of(part.keys))
            if job.component.name == FULL and published:
                num_pages = self._readers.count_landed(job.store, published)
                if waiting:  # they count for the one that came first
                    self._room.share.add(min(waiting, key=_ARRIVAL).handle, num_pages)
            lost = [i for i, key in enumerate(keys, first) if not index.is_coming(key)] if not all(came) else []
            for asked in waiting:
                del asked.runs[run]
                asked.follow(job.component, published, self._clock())
                if lost:
                    own = asked.own_pages(job.component, first, keys)
                    gone = asked.read_elsewhere(job.component, [i for i in lost if i in own], job.store)
                    self._readers.cancel(asked.cut(gone[0]) if gone else ())
                self._room.note(asked)
        for asked in wanted:
            self._advance(asked)

    def _advance(self, asked: Asked) -> None:
        """Tell the request what has landed without a gap, and whether anything more comes."""
        if num_pages := asked.advance(self._context.full):
            asked.handle.landed_tokens += num_pages * self._context.tree.page_size
            asked.progress_s = self._clock()
        if asked.is_idle:
            self._finish(asked)

    # The end

    def _finish(self, asked: Asked) -> None:
        """Nothing of it is in flight, or to be read. What failed is asked for again, once, from whatever store; what
        there was no room for comes next, as long as each attempt brings something."""
        is_again = (asked.has_failed or asked.lacks) and not asked.was_asked_again and self._clock() < asked.until_s
        if is_again or (asked.is_short and asked.has_landed and self._room.left(asked) > 0):
            asked.was_asked_again |= is_again
            self._release(asked)
            self._begin(asked)
        elif asked.is_short:
            self._postpone(asked)
        else:
            self._end(asked)

    def _postpone(self, asked: Asked) -> None:
        """Wait for free pages. They come from others alone, when they are admitted or gone: a wait has an end only
        where there are such, and where its mode bounds it. Who is computed meanwhile does not."""
        if asked.lease is not None:
            self._end(asked)
            return
        self._release(asked)
        handle, room = asked.handle, self._room
        if not asked.is_postponed:
            self._counters.count_postponed(0 if room.left(asked) > 0 else room.claimed, room.max_pages)
        asked.is_postponed = True
        self._line.add(asked)
        others = len(self._begun) or room.share.total > room.share.of(handle.request_id)
        if handle.waits and (handle.mode == "wait_complete" or not others):
            self._weigher.stop(asked)

    def _end(self, asked: Asked) -> None:
        """Nothing more comes for it. What has come for one that is computed meanwhile stays until it has joined it."""
        if asked.lease is not None:
            self._readers.cancel(asked.stop_reading())
            self._room.note(asked)
            return
        if asked.handle.waits and asked.decided_s is not None and asked.estimate_s is not None:
            self._counters.estimated_s.value += asked.estimate_s
            self._counters.waited_s.observe(self._clock() - asked.decided_s)
        self._forget(asked)

    def _forget(self, asked: Asked) -> None:
        """The request waits no longer."""
        self._line.discard(asked)
        asked.handle.end()
        self._requests.waiting.discard(asked.handle.request_id)
        self._release(asked)
        self._weigher.discard(asked)
        self.beside.forget(asked)
        del self._asked[asked.handle.request_id]

    def _release(self, asked: Asked) -> None:
        self._has_news = True
        self._begun.pop(asked, None)
        self._readers.cancel(asked.release())
        self._room.note(asked)
