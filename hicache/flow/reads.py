"""Reads of stores: pages that are read to the host for requests before their admission, or while they are computed.

Each request with a prefetch is one `PendingPrefetch` in one `Stage`. An event takes it to the next stage:

    | event          | from        | to          | action              |
    |----------------|-------------|-------------|---------------------|
    | BEGIN          | QUEUED      | ASKING      | look_up             |
    | BEGIN          | POSTPONED   | ASKING      | look_up             |
    | ANSWERED       | ASKING      | READING     | plan                |
    | ANSWERED       | OVERLAPPING | OVERLAPPING | plan                |
    | LANDED         | READING     | READING     | advance             |
    | LANDED         | OVERLAPPING | OVERLAPPING | advance             |
    | RETRY          | READING     | ASKING      | restart             |
    | RETRY          | OVERLAPPING | OVERLAPPING | restart             |
    | LACKS_PAGES    | ASKING      | POSTPONED   | postpone            |
    | LACKS_PAGES    | READING     | POSTPONED   | postpone            |
    | LACKS_PAGES    | OVERLAPPING | OVERLAPPING | stop_reading        |
    | EXHAUSTED      | ASKING      | ENDED       | complete            |
    | EXHAUSTED      | READING     | ENDED       | complete            |
    | EXHAUSTED      | OVERLAPPING | OVERLAPPING | stop_reading        |
    | ADMIT          | ASKING      | OVERLAPPING | overlap             |
    | ADMIT          | READING     | OVERLAPPING | overlap             |
    | JOIN           | OVERLAPPING | OVERLAPPING | join                |
    | CANCEL         | QUEUED      | ENDED       | forget              |
    | CANCEL         | ASKING      | ENDED       | forget              |
    | CANCEL         | READING     | ENDED       | forget              |
    | CANCEL         | POSTPONED   | ENDED       | forget              |
    | CANCEL         | OVERLAPPING | ENDED       | forget              |

An action may apply the next event. All other pairs of stage and event raise `InvariantError`.

A job knows which requests wait for which of its pages. So a request waits for pages that other requests read, and
queues jobs only for the rest. The last request that leaves a job cancels it, and its pages may be read again at once. A
share of the host pool bounds the pages that are read for requests before their admission.

The read list of a request is sorted: from the beginning of its prompt, or from the end if the prompt is computed from
its beginning meanwhile (an overlapped prefill):

    [0, computed_end)          on the device, computed or loaded
    [computed_end, missing[0]) on the host; `join` loads these pages once they continue the computed ones
    [missing)                  not yet on the host: read from the right, computed from the left
    [missing[1], end)          on the host, waiting for the pages before them

Computing and reading meet where the next page is on the host or is computed. A store that reads slowly, or stalls,
leaves more pages to compute, and no request waits for it. docs/decisions/050-compute-and-load-at-once.md.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import partial
from operator import attrgetter
from typing import ClassVar, NamedTuple
from weakref import ref

import numpy as np

from hicache.config import PrefetchMode
from hicache.errors import InvariantError, PrefetchPending
from hicache.flow.components.base import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel, LoadEstimate, LoadPolicy, Requests
from hicache.flow.counters import PrefetchCounters
from hicache.flow.lease import Lease, Prefetch
from hicache.flow.located import Located, first_gap, spans
from hicache.flow.movement import Movement
from hicache.flow.prompt import Prompts
from hicache.pages.key import Tokens
from hicache.pages.states import COPY, HELD, READ, Counts
from hicache.pages.table import NO_ROW, Columns, Mask, Rows
from hicache.storage.process.jobs import FindDone, FindJob, LeaseDone, ReadClass, ReadDone, ReadJob, Stalled
from hicache.tiers import DISK, FULL, REMOTE, Component, Store

log = logging.getLogger(__name__)

# Without news, a poll looks at the active requests after this number of polls. The time between two turns in which a
# poll compares waiting with computing again.
_LOOK_POLLS, _TURN_S = 16, 0.002
# Bounds of one step, so that it ends soon: active requests, and tokens of prompts whose keys are computed; jobs and
# pages that are queued; requests that compare waiting with computing again. Passes make steps long, so a preemptible
# request has the bounds of several short steps: one for each `_STEP_S` since the last step, from 4 to `_MOST_STEPS`.
_MAX_ACTIVE, _MAX_STARTED_TOKENS, _MAX_JOBS, _MAX_PAGES, _MAX_CHOSEN = 64, 64 << 10, 6, 128, 64
_STEP_S, _MOST_STEPS = 0.005, 16
# The time between two attempts to begin with a postponed request.
_RETRY_S = 0.05
# Pages of a prompt that are looked up on the host at a time.
_WINDOW = 128
# The first job of each reader while the rate of a store is unknown: it measures the rate, soon if the store is slow.
_GAUGE_BYTES = 8 << 20
# The time of one job at most, because its reader begins no other job before.
_MAX_JOB_S = 0.25
# The least number of jobs of an overlapped prompt, or of pages that both stores have.
_LEAST_JOBS = 16
# Jobs of a store, urgent ones and background ones each: work of several steps for its readers.
_MAX_IN_FLIGHT = 32
# The remote tier is asked for pages of the disk too if there are at least this number of pages, unless its rate is
# below this share of the rate of the disk.
_LEAST_SHARED_PAGES, _LEAST_REMOTE_SHARE = 32, 1 / 8
# A pass costs as much for few tokens as for some, so an overlapped pass computes `_LEAST_PASS_PAGES` or more, and fewer
# than `_LEAST_OVERLAP_PAGES` missing pages are loaded or computed without overlap. So they are if less than
# `_LEAST_COMPUTED_SHARE` of them would be computed: no pass can be stopped, and a fast store ends before the pass does.
_LEAST_PASS_PAGES, _LEAST_OVERLAP_PAGES, _LEAST_COMPUTED_SHARE = 8, 32, 1 / 6
# The wait for answers of stores if computing delays no other request, as a share of the time of computing.
_ANSWER_SHARE = 0.02
# The factor by which a wait that has begun may cost more than computing.
_PATIENCE = 2.0
# The state of a page in `LookupResults`, in addition to the bits of stores.
_LACKING, _READ, _IN_MEMORY = 0, 0x40, 0x80
_ARRIVAL, _BIT, _IS_URGENT = attrgetter("arrival"), attrgetter("bit"), attrgetter("is_urgent")


class Stage(IntEnum):
    """The stage of a prefetch."""

    QUEUED = auto()  # Too many requests are active.
    ASKING = auto()  # Stores look up its pages.
    READING = auto()  # Its pages are read to the host.
    POSTPONED = auto()  # The host has no free pages for it.
    OVERLAPPING = auto()  # It is computed from its beginning while pages are looked up and read from its end.
    ENDED = auto()


_QUEUED_STAGES = (Stage.QUEUED, Stage.POSTPONED)


class Event(IntEnum):
    """An event in the life of a prefetch."""

    BEGIN = auto()  # Fewer requests are active now.
    ANSWERED = auto()  # All stores that were asked have answered, or none need be asked.
    LANDED = auto()  # A job ended, or pages of the read list arrived by other jobs.
    RETRY = auto()  # Pages did not arrive, or host pages are free for the rest.
    LACKS_PAGES = auto()  # No host page is free for it, and nothing of it is in flight.
    EXHAUSTED = auto()  # No further page arrives.
    ADMIT = auto()  # The request has a lease, and is computed while its pages arrive.
    JOIN = auto()  # Pages that arrived were loaded behind the computed ones.
    CANCEL = auto()  # The request was admitted and reads no further, or is gone.


_PageTest = Callable[[CacheComponent, int], bool]  # of a row of a component


class ReadSpan(NamedTuple):
    """An entry of a read list: consecutive pages of a prompt in reading order, in each store of the set `stores`; 0: a
    read in flight loads them."""

    component: CacheComponent
    stores: int
    pages: range


class LookupResults:
    """Which stores have which pages of a prompt that memory lacks, by the answers so far.

    [0, num_usable)          memory serves these pages, for all components
    [num_usable, num_pages)  stores are asked for windows and states of these pages too

    `memory`: where its pages are in memory. `may_share`: whether the request may wait for a page that is read.
    `step`: -1 if pages are read from the end of the prompt, else 1. `_stores[page]`: the stores of a full page.
    """

    def __init__(self, memory: Located, may_share: _PageTest | None = None, step: int = 1) -> None:
        full = memory.context.full
        self.memory = memory
        self._may_share, self._step = may_share, step
        self.num_pages, self.num_stores = memory.num_pages, len(memory.context.stores)
        self.num_usable = memory.last_end(memory.host_end, 0, memory.in_memory)
        rows = memory.rows_named(full, range(memory.device_end, self.num_pages))
        lacking = np.flatnonzero(~full.pages.has(rows, HELD | COPY))
        self.first_gap = memory.device_end + int(lacking[0]) if len(lacking) else self.num_pages
        stores = np.full(self.num_pages, _IN_MEMORY, np.uint8)
        stores[memory.device_end + lacking] = _LACKING
        self._stores = bytearray(stores.tobytes())
        if may_share is not None and full.pages.num_in_flight:
            for at in np.flatnonzero(full.pages.has(rows, READ)).tolist():
                if may_share(full, int(rows[at])):
                    self._stores[memory.device_end + at] = _READ
        self._others: dict[bytes, int] = {}
        others, pages = memory.context.components[1:], range(self.num_usable, self.num_pages)
        self._other_keys = [key for other in others for key in memory.prompt.keys_of(other.name, pages)]

    @property
    def known(self) -> list[tuple[int, int, int]]:
        """Full pages that stores have, or that a read in flight loads (0): (start, end, set of stores)."""
        found, rest = list[tuple[int, int, int]](), bytes(self._stores)
        while rest:
            start, value = self.num_pages - len(rest), rest[0]
            rest = rest.lstrip(rest[:1])
            if value not in (_LACKING, _IN_MEMORY):
                found.append((start, self.num_pages - len(rest), value & ~_READ))
        return found

    @property
    def is_complete(self) -> bool:
        """Whether memory serves the complete prompt, or the device copies the rest to the host."""
        return self._stores.count(_IN_MEMORY) == self.num_usable == self.num_pages

    @property
    def is_open(self) -> bool:
        """Whether any page is left to ask a store for."""
        return _LACKING in self._stores or len(self._others) < len(self._other_keys)

    def unknown(self) -> tuple[list[int], tuple[bytes, ...]]:
        """Full pages that no store is known to have, and the keys to ask a store for: theirs first, then those of
        windows and states."""
        pages = [page for page, value in enumerate(self._stores) if value == _LACKING]
        others = [key for key in self._other_keys if key not in self._others]
        return pages, (*self.memory.prompt.keys_of(FULL, pages), *others)

    def in_stores(self) -> tuple[list[int], tuple[bytes, ...]]:
        """Full pages that a store has, and their keys."""
        pages = [page for page, value in enumerate(self._stores) if _LACKING < value < _READ]
        return pages, (*self.memory.prompt.keys_of(FULL, pages),)

    def add(self, store: Store, pages: Sequence[int], keys: Sequence[bytes], ok: Sequence[bool]) -> None:
        """Record the answer of a store: of `keys`, the first of which belong to full `pages`, it has those that are
        `ok`."""
        for page in itertools.compress(pages, ok):
            self._stores[page] |= store.bit
        for key in itertools.compress(keys[len(pages) :], ok[len(pages) :]):
            self._others[key] = self._others.get(key, 0) | store.bit

    def lose(self, component: CacheComponent, pages: Sequence[int], store: Store) -> list[int]:
        """Record that `store` does not read these pages. Returns the pages that the other store lacks."""
        if component.name == FULL:
            for page in pages:
                self._stores[page] &= ~store.bit
        else:
            for key in self.memory.prompt.keys_of(component.name, pages):
                if left := self._others.pop(key, 0) & ~store.bit:
                    self._others[key] = left
        return [page for page in pages if not self.stores_of(component, page)]

    @property
    def is_empty(self) -> bool:
        """Whether no page is known to arrive."""
        return not self._others and self.num_arriving(self.num_pages) == 0

    @property
    def full_end(self) -> int:
        """The end of the full pages that memory has, or that may arrive, without a gap."""
        end = self._stores.find(_LACKING)
        return self.num_pages if end < 0 else end

    def end_with(self, num_pages: int) -> int:
        """The same end if stores read only the first `num_pages`."""
        for start, end, stores in self.known:
            if stores and end - start > num_pages:
                return min(start + num_pages, self.full_end)
            num_pages -= end - start if stores else 0
        return self.full_end

    def usable_end(self, limit: int) -> int:
        """The longest prefix of at most `limit` pages that all components can use, with the pages that may arrive; at
        most `num_usable` if these add nothing."""
        return self.memory.last_end(limit, min(limit, self.num_usable), self._has)

    def read_list(self, end: int) -> Iterator[ReadSpan]:
        """The pages that may arrive and that a prefix of `end` pages needs: full pages, then windows and states."""
        for start, known_end, stores in self.known:
            if start < end:
                yield ReadSpan(self.memory.context.full, stores, range(start, min(known_end, end))[:: self._step])
        for component in self.memory.context.components[1:] if end > self.num_usable else ():
            first = min(component.first_required(end), end - 1)  # the last page of an optional component
            wanted = [page for page in range(first, end) if not self.memory.coming(component, page)]
            yield from self.spans(component, [page for page in wanted if self._has(component, page)])

    def spans(self, component: CacheComponent, pages: Sequence[int]) -> Iterator[ReadSpan]:
        """These pages, ascending, by the stores that have them."""
        for stores, group in itertools.groupby(pages, key=lambda page: self.stores_of(component, page)):
            for start, end in spans([*group]):
                yield ReadSpan(component, stores, range(start, end)[:: self._step])

    def stores_of(self, component: CacheComponent, page: int) -> int:
        """The set of stores that have a page that memory lacks."""
        if component.name == FULL:
            return self._stores[page] & ~(_READ | _IN_MEMORY)
        return self._others.get(self.memory.prompt.key(component.name, page), 0)

    def num_arriving(self, end: int) -> int:
        """The number of full pages below `end` that may arrive."""
        return end - self._stores.count(_LACKING, 0, end) - self._stores.count(_IN_MEMORY, 0, end)

    def by_store(self, start: int, end: int) -> Counter[Store]:
        """The number of full pages [start, end) in each store; a page of both counts for the first one asked."""
        found, context = Counter[Store](), self.memory.context
        for known_start, known_end, stores in self.known:
            first = next((store for store in context.stores if stores & store.bit), None)
            if first is not None:
                found[first] += max(0, min(end, known_end) - max(start, known_start))
        return found

    def _has(self, component: CacheComponent, page: int) -> bool:
        key = self.memory.prompt.key(component.name, page)
        if self.memory.coming(component, page) or self._others.get(key):
            return True
        row = component.pages.table.row(key)
        return row != NO_ROW and self._may_share is not None and self._may_share(component, row)


def look_up(memory: Located, wait_s: float) -> tuple[int, int, bool]:
    """Tokens that the disk adds to the prefix in memory, tokens that the remote tier adds to both, and whether all
    stores answered within `wait_s`. No side effect."""
    located, until_s, all_known = LookupResults(memory), time.monotonic() + wait_s, True
    for store, tier in memory.context.stores.items():
        pages, keys = located.unknown()
        done = tier.find((), max(0.0, until_s - time.monotonic()), keys)
        if done is None:
            all_known = False
        else:
            located.add(store, pages, keys, done.others)
    end = located.usable_end(located.full_end)
    num_pages = located.by_store(located.num_usable, end)
    # Stores may add windows or states to full pages that memory has.
    added = [span.stores for span in located.read_list(end) if span.component.name != FULL and span.stores]
    if added:
        last = REMOTE if added[-1] == REMOTE.bit else DISK
        num_pages[last] += max(0, end - located.num_usable - num_pages.total())
    page = memory.context.tree.page_size
    return num_pages[DISK] * page, num_pages[REMOTE] * page, all_known


@dataclass(eq=False, slots=True)
class PendingPrefetch:
    """A request with a prefetch. `stage` alone says how far it is; `Prefetcher.apply` alone changes `stage`.

    `is_urgent`: it waits for its pages, or would if computing it delayed other requests.

    `located`: where its pages are, from its first lookup until it is queued again. `lookup`: the job of a store that
    it waits for. `num_asked_stores`: in the order of `StoreJobs`. `read_list`: pages to read that no job reads yet, in
    reading order. `awaited`: full pages that have not arrived, in reading order, and `missing`: the pages [start, end)
    around them. `jobs`: those that read pages that it waits for, for whichever request they were queued. `locked`:
    pages of the host that its pages continue.

    `lease`: of an overlapped prefill; `computed_end`: its pages that are computed, or that the next pass computes.
    `begun_s`: when its reads began; `num_landed`: full pages that these read.

    `num_planned`: full pages in the read list. `lacks_host_room`: stores have more pages than the host had free.
    `has_failed`: a page did not arrive; `was_retried`: the stores were asked again for it. `has_landed`: a page
    arrived since the stores were asked. `was_postponed`, `has_shared`: for the counters.

    `progress_s`: when the last page arrived. `chosen_s`: when the policy chose to wait, `estimate_s`: for how long, and
    `num_delayed`: the other requests that computing would have delayed then.
    """

    arrival: int
    handle: Prefetch
    tokens: Tokens
    namespace: str
    progress_s: float
    end: int
    is_urgent: bool
    stage: Stage = Stage.QUEUED
    located: LookupResults | None = None
    lookup: Lookup | None = None
    num_asked_stores: int = 0
    read_list: list[ReadSpan] = field(default_factory=list)
    awaited: deque[range] = field(default_factory=deque)
    missing: tuple[int, int] = (0, 0)
    jobs: dict[PageRead, None] = field(default_factory=dict)
    locked: list[tuple[CacheComponent, Rows]] = field(default_factory=list)
    num_usable: int = 0
    lease: Lease | None = None
    computed_end: int = 0
    begun_s: float = 0.0
    num_landed: int = 0
    num_planned: int = 0
    lacks_host_room: bool = False
    has_failed: bool = False
    was_retried: bool = False
    has_landed: bool = False
    has_shared: bool = False
    was_postponed: bool = False
    estimate_s: float | None = None
    chosen_s: float | None = None
    num_delayed: int | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is in flight or in the read list."""
        return self.lookup is None and not (self.read_list or self.jobs)

    @property
    def until_s(self) -> float:
        """The deadline of its reads."""
        return self.handle.deadline_s if self.handle.mode == "timeout" else math.inf

    def begin(self, located: LookupResults) -> None:
        """Record which pages are in memory or in flight."""
        self.located = located
        self.num_usable, self.end = located.num_usable, located.num_pages
        self.missing = (located.first_gap, self.end)
        self.num_asked_stores = 0
        self.lacks_host_room = self.has_failed = self.has_landed = False

    def plan(self, end: int, now_s: float) -> None:
        """Make the read list of a prefix of `end` pages. Pages still awaited from an earlier list may have arrived."""
        assert self.located is not None
        self.end, self.begun_s, self.num_landed = end, now_s, 0
        self.read_list += self.located.read_list(end)
        self._sort()
        awaited = [span.pages for span in self.read_list if span.component.name == FULL]
        if self.awaited:
            pages = {page for span in (*self.awaited, *awaited) for page in span if page < end}
            awaited = [range(*span) for span in spans(sorted(pages))]
            if self.handle.overlaps:
                awaited = [span[::-1] for span in awaited[::-1]]
        self.awaited = deque(awaited)
        self.missing = (self.missing[0], end)

    def _sort(self) -> None:
        """Sort the read list: full pages from the beginning, then windows and states. For an overlapped prefill from
        the end, windows and states first, because the end of the prompt needs them."""
        if len(self.read_list) < 2:
            return
        if self.handle.overlaps:
            self.read_list.sort(key=lambda span: (span.component.name == FULL, -span.pages[-1]))
        else:
            self.read_list.sort(key=lambda span: (span.component.name != FULL, span.pages[0]))

    @property
    def lacks_end(self) -> bool:
        """Whether an overlapped prompt lacks windows or states at its end, without which it cannot use full pages. Full
        pages are read after them."""
        if not self.handle.overlaps:
            return False
        is_listed = any(span.component.name != FULL for span in self.read_list)
        return is_listed or any(job.component.name != FULL for job in self.jobs)

    def num_to_read(self, component: CacheComponent) -> int:
        """The number of pages of a component in the read list that a store has."""
        num_pages = 0
        for span in self.read_list:
            if span.component is component and span.stores:
                num_pages += len(span.pages)
        return num_pages

    def add_store(self) -> None:
        """Divide the read list again: another store has some of its pages too."""
        assert self.located is not None
        before, self.read_list = self.read_list, []
        for span in before:
            if span.stores:
                self.read_list += self.located.spans(span.component, sorted(span.pages))
            else:
                self.read_list.append(span)
        self._sort()

    def read_elsewhere(self, component: CacheComponent, pages: Sequence[int], store: Store) -> list[int]:
        """Read these pages, ascending, from the other store in place of `store`. Returns the pages that it lacks."""
        assert self.located is not None
        gone = self.located.lose(component, pages, store)
        left = [page for page in pages if page not in gone] if gone else pages
        if left and not self.handle.ended:
            self.read_list += self.located.spans(component, left)
            self._sort()
        return gone

    def lock(self, component: CacheComponent, rows: Rows) -> None:
        """Keep these pages on the host while pages that continue them arrive."""
        if len(rows):
            component.pages.lock(rows)
            self.locked.append((component, rows))

    def follow(self, component: CacheComponent, landed: Rows, now_s: float) -> None:
        """Keep these pages of a job for the pages that continue them."""
        if not len(landed):
            return
        self.lock(component, landed)
        if self.handle.overlaps:
            self.progress_s = now_s
        if component.name == FULL:
            self.num_landed += len(landed)

    def num_waited(self, component: CacheComponent) -> int:
        """Pages of a component in flight that it waits for."""
        return sum([len(job.requests[self]) for job in self.jobs if job.component is component])

    def skip_arriving(self, at: int, jobs: StoreJobs) -> bool:
        """Remove from span `at` of the read list pages that are in memory by now, and wait for pages that other jobs
        read. Whether its next page is read by no job. An empty span is removed."""
        component, stores, pages = self.read_list[at]
        if self.computed_end and component.name == FULL:  # computed pages are the last in the reading order
            pages = pages[: max(0, pages[0] + 1 - self.computed_end)]
        num_pages = _WINDOW
        while pages and num_pages == _WINDOW:
            rows = self._rows(component, pages[:_WINDOW])
            num_pages = first_gap(jobs.are_arriving(self, component, rows))
            if num_pages:
                self.has_shared |= jobs.share(self, component, rows[:num_pages])
                pages = pages[num_pages:]
        self.read_list[at : at + 1] = [ReadSpan(component, stores, pages)] if pages else []
        if pages and not stores:  # the read in flight did not load it
            self.has_failed = True
            self.read_list.clear()
        return bool(pages) and stores != 0

    def next_pages(self, at: int, max_pages: int, jobs: StoreJobs) -> range:
        """The next pages of span `at` that no job reads, at most `max_pages`, in reading order."""
        component, _, pages = self.read_list[at]
        pages = pages[:max_pages]
        return pages[: first_gap(~jobs.are_arriving(self, component, self._rows(component, pages)))]

    def advance(self, full: CacheComponent) -> int:
        """Remove from `awaited` the pages that have arrived without a gap. Returns their number."""
        num_landed, num_pages = 0, _WINDOW
        while self.awaited and num_pages == _WINDOW:
            pages = self.awaited[0]
            num_pages = first_gap(full.pages.has(self._rows(full, pages[:_WINDOW]), HELD | COPY))
            num_landed += num_pages
            if num_pages < len(pages):
                self.awaited[0] = pages[num_pages:]
            else:
                self.awaited.popleft()
                num_pages = _WINDOW
        ends = (self.awaited[0][0], self.awaited[-1][-1]) if self.awaited else ()
        self.missing = (min(ends), max(ends) + 1) if ends else (self.end, self.end)
        self.has_landed |= num_landed > 0
        return num_landed

    def _rows(self, component: CacheComponent, pages: range) -> Rows:
        assert self.located is not None
        return self.located.memory.rows_named(component, pages)

    def stop_reading(self) -> list[PageRead]:
        """Wait for no further page, and keep those that arrived. Returns jobs without waiting requests."""
        self.handle.end()
        self.read_list.clear()
        self.lookup = None
        return self.leave()

    def cut(self, page: int) -> list[PageRead]:
        """Record that a page does not arrive. Pages behind it are of no use, unless the request computes the page: a
        full page, but no state or window at the end. Returns jobs without waiting requests."""
        assert self.located is not None
        self.has_failed = True
        overlaps = self.handle.overlaps
        if overlaps and self.located.usable_end(self.end) == self.end:
            return []
        self.read_list.clear()
        return self.leave() if overlaps else self.leave(lambda _, pages: pages > page)

    def leave(self, of_pages: Callable[[CacheComponent, Counts], Mask] | None = None) -> list[PageRead]:
        """Wait no longer for pages in flight: for those of its prompt that `of_pages` chooses of a component, all by
        default. Returns jobs without waiting requests."""
        left = list[PageRead]()
        for job in [*self.jobs]:
            rows, component = job.requests[self], job.component
            stays = rows[:0] if of_pages is None else rows[~of_pages(component, component.pages.table.index[rows])]
            if len(stays):
                job.requests[self] = stays
            else:
                del job.requests[self], self.jobs[job]
                left += [] if job.requests else [job]
        return left

    def release(self) -> list[PageRead]:
        """Wait for nothing in flight, and unlock all pages. Returns jobs without waiting requests."""
        for component in dict.fromkeys([component for component, _ in self.locked]):
            rows = np.concatenate([rows for locked, rows in reversed(self.locked) if locked is component])
            while len(rows):  # once, unless pages were locked more than once
                distinct = np.sort(np.unique(rows, return_index=True)[1])
                component.pages.unlock(rows[distinct])
                rows = np.delete(rows, distinct)
        if self.located is not None:
            self.end = self.located.num_pages
            self.missing = (self.missing[0], self.end)
        self.locked, self.located = [], None
        self.lookup = None
        self.read_list.clear()
        return self.leave()


def _in_turn(requests: Iterable[PendingPrefetch]) -> list[PendingPrefetch]:
    """The order of their jobs: urgent requests first, then by arrival."""
    return sorted(sorted(requests, key=_ARRIVAL), key=_IS_URGENT, reverse=True)


@dataclass(eq=False, slots=True)
class Lookup:
    """A job that asks a store for pages of a request: the full `pages`, whose keys come first in `keys`. `located`: the
    results that its answer adds to."""

    request: PendingPrefetch
    store: Store
    located: LookupResults
    pages: list[int]
    keys: tuple[bytes, ...]
    is_awaited: bool
    is_stalled: bool = False


@dataclass(eq=False, slots=True)
class PageRead:
    """A job that reads pages of a component from a store, which follow each other in a prompt. `is_urgent`: of an
    urgent request.

    `rows`: as they are read; those that `is_live` are its own, the others were given up, and their places are
    `disowned`. `requests`: which of its pages each request waits for.
    """

    component: CacheComponent
    store: Store
    rows: Rows
    is_urgent: bool
    is_live: Mask
    requests: dict[PendingPrefetch, Rows]
    disowned: list[int] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    is_stalled: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * self.component.host.page_bytes

    def is_for(self, request: PendingPrefetch) -> bool:
        """Whether a request may wait for it: an urgent request waits for no background job."""
        return self.is_urgent or not request.is_urgent


class _ReadPages(Columns):
    """`ticket`: the number of the job that reads a page, if its state is READ."""

    fields: ClassVar = {"ticket": (np.int64, 0)}
    ticket: Rows


class StoreJobs:
    """The jobs that stores were given: `lookups` and `reads`, by number, in the order in which they were queued. Owned
    by the scheduler thread.

    A store counts as fast as its earlier reads, and no faster than its present ones: if its next job is late, each job
    behind that counts as late. `num_pages`: pages in flight by component. `bereft`: requests whose pages a job gave up.
    """

    def __init__(self, context: EngineContext, cost: CostModel, counters: PrefetchCounters) -> None:
        self._context, self._cost, self._counters = context, cost, counters
        self._tickets = itertools.count()
        self._tiers, self._polled = context.stores, tuple(context.stores.values())
        self._stores = tuple(context.stores)  # in the order in which requests ask them
        self._clock = next(tier.clock for tier in context.stores.values())
        self._answered_s = dict.fromkeys(context.stores, -math.inf)
        self.lookups, self.reads = dict[int, Lookup](), dict[int, PageRead]()
        self._read_pages = {component.name: _ReadPages() for component in context.components}
        for component in context.components:
            component.pages.table.add_columns(self._read_pages[component.name])
        self.num_pages = dict.fromkeys(context.by_name, 0)
        self.bereft = list[PendingPrefetch]()

    def poll(self) -> list[FindDone | ReadDone | Stalled]:
        """The answers since the last call. An engine asks for no leases."""
        answers = (done for tier in self._polled for done in tier.reads.poll())
        return [done for done in answers if not isinstance(done, LeaseDone)]

    def is_busy(self) -> bool:
        """Whether any job is under way that no stalled thread has."""
        lookups, reads = self.lookups.values(), self.reads.values()
        return not (all(job.is_stalled for job in lookups) and all(job.is_stalled for job in reads))

    def rows(self, component: Component) -> Iterable[Rows]:
        """Of each job the pages that it reads."""
        return (job.rows[job.is_live] for job in self.reads.values() if job.component.name == component)

    def may_share(self, request: PendingPrefetch, component: CacheComponent, row: int) -> bool:
        """Whether a request may wait for a page that is read."""
        is_read = bool(component.pages.state[row] & READ)
        return is_read and self.reads[int(self._read_pages[component.name].ticket[row])].is_for(request)

    def _reading(self, component: CacheComponent, rows: Rows) -> Iterator[tuple[PageRead, Mask]]:
        """The jobs that read any of these pages, and which pages each of them reads."""
        if component.pages.num_in_flight and (is_read := component.pages.has(rows, READ)).any():
            tickets = np.where(is_read, self._read_pages[component.name].ticket[rows], NO_ROW)
            for ticket in dict.fromkeys(tickets[is_read].tolist()):
                yield self.reads[ticket], tickets == ticket

    def are_arriving(self, request: PendingPrefetch, component: CacheComponent, rows: Rows) -> Mask:
        """Which of these pages are in memory, or arrive without a read of the request."""
        arriving = component.pages.has(rows, HELD | COPY | READ)
        if arriving.any():
            for job, of_job in self._reading(component, rows):
                if not job.is_for(request):
                    arriving &= ~of_job
        return arriving

    def share(self, request: PendingPrefetch, component: CacheComponent, rows: Rows) -> bool:
        """Have a request wait for those of these pages that are read; whether there are any."""
        has_any = False
        for job, of_job in self._reading(component, rows):
            job.requests[request] = np.union1d(job.requests.get(request, rows[:0]), rows[of_job])
            request.jobs[job] = None
            has_any = True
        return has_any

    @property
    def num_awaited_lookups(self) -> int:
        """The number of lookups for which a request waits, or waited before it was cancelled."""
        return sum([lookup.is_awaited for lookup in self.lookups.values()])

    # Lookups

    def look_up(self, request: PendingPrefetch) -> bool:
        """Ask the next store for the pages that the stores before it lack. False if there is no such store or page, or
        if its queue is full."""
        assert request.located is not None
        if request.num_asked_stores == len(self._stores) or not request.located.is_open:
            return False
        store = self._stores[request.num_asked_stores]
        request.num_asked_stores += 1
        request.lookup = self._ask(request, store, *request.located.unknown(), is_awaited=True)
        return request.lookup is not None

    def ask_remote_too(self, request: PendingPrefetch) -> None:
        """Ask the remote tier for the pages of the disk too, if it would read a good part of them in the same time and
        was not asked for pages that the disk lacks."""
        assert request.located is not None
        if REMOTE not in self._tiers or request.num_asked_stores == len(self._stores):
            return
        pages, keys = request.located.in_stores()
        num_bytes = len(pages) * self._context.full.host.page_bytes
        if len(pages) >= _LEAST_SHARED_PAGES and self._is_remote_fast(num_bytes):
            self._ask(request, REMOTE, pages, keys, is_awaited=False)

    def take_lookup(self, done: FindDone | Stalled) -> Lookup:
        """The lookup that was answered, or that stalled."""
        if isinstance(done, FindDone):
            return self.lookups.pop(done.ticket)
        lookup = self.lookups[done.ticket]
        lookup.is_stalled = True
        return lookup

    def note_answer(self, lookup: Lookup, done: FindDone) -> None:
        """Add the answer of a store to the results. Events get the first page that the disk lacks, unless the answers
        of its writes name removed pages."""
        lookup.located.add(lookup.store, lookup.pages, lookup.keys, done.others)
        events = self._context.tree.events
        if events is None or lookup.store is not DISK or not done.answered or self._tiers[DISK].tells_removed:
            return
        missed = (page for page in lookup.pages if not lookup.located.stores_of(self._context.full, page))
        events.missed_on_disk(lookup.located.memory.prompt.keys_of(FULL, [*itertools.islice(missed, 1)]))

    def _ask(
        self, request: PendingPrefetch, store: Store, pages: list[int], keys: tuple[bytes, ...], *, is_awaited: bool
    ) -> Lookup | None:
        assert request.located is not None
        ticket = next(self._tickets)
        queue_class = ReadClass.URGENT_FIND if request.is_urgent else ReadClass.BACKGROUND_FIND
        if not self._tiers[store].reads.submit(FindJob(ticket, (), queue_class, keys)):
            self._counters.refused.value += 1
            return None
        lookup = self.lookups[ticket] = Lookup(request, store, request.located, pages, keys, is_awaited)
        return lookup

    def _is_remote_fast(self, num_bytes: int) -> bool:
        """Whether the remote tier reads a good part of `num_bytes` in the time in which the disk reads all, as far as
        both rates are known."""
        disk_s = self._cost.read_s(num_bytes, self._tiers[DISK].num_readers, DISK)
        remote_s = self._cost.read_s(num_bytes, self._tiers[REMOTE].num_readers, REMOTE)
        return disk_s is None or remote_s is None or _LEAST_REMOTE_SHARE * remote_s <= disk_s

    # Reads

    def next_of(self, request: PendingPrefetch, num_times: int) -> tuple[int, Store, int] | None:
        """The next span of a read list, the store that reads it sooner, and the number of jobs that this store may get.
        If that store has enough jobs (`num_times` the number that suffices for short steps), the next span of the other
        store."""
        free = self._free_jobs(request, num_times)
        at, skipped, free_bits = 0, 0, sum(map(_BIT, free))  # skipped: stores with enough jobs
        while at < len(request.read_list):
            span = request.read_list[at]
            if span.component.name == FULL and request.lacks_end:
                return None
            if at and (span.stores == skipped or not span.stores & free_bits):
                at += 1
            elif request.skip_arriving(at, self):
                store = self._sooner(span.stores, is_urgent=request.is_urgent)
                if store in free:
                    return at, store, free[store]
                at, skipped = at + 1, span.stores
        return None

    def read(self, request: PendingPrefetch, at: int, store: Store, max_jobs: int, max_pages: int) -> list[Rows]:
        """Queue at most `max_jobs` jobs of a store for the next pages of a span, until they have `max_pages`, as far as
        the host has free pages. Returns the pages of each; none if the first page has no free page."""
        component, stores, left = request.read_list[at]
        has_both, overlaps, pages = stores & (stores - 1) != 0, request.handle.overlaps, component.pages
        job_pages, num_jobs = self._job_pages(component, store)
        if overlaps or has_both:  # between two jobs, computed pages or those of the other store are skipped
            job_pages = min(job_pages, -(-request.num_to_read(component) // _LEAST_JOBS))
        num_jobs = 1 if has_both else min(num_jobs, max_jobs, -(-max_pages // job_pages))
        taken = self._reserve(request, component, request.next_pages(at, num_jobs * job_pages, self))
        if not len(taken):
            return []
        if not self._of(store):
            self._answered_s[store] = self._clock()
        pages.source[taken] = store.bit
        self.num_pages[component.name] += len(taken)
        request.read_list[at : at + 1] = [ReadSpan(component, stores, left)] if (left := left[len(taken) :]) else []
        until_s, is_urgent = request.until_s, request.is_urgent
        queue_class = ReadClass.URGENT_READ if is_urgent else ReadClass.BACKGROUND_READ
        keys, places, step = pages.table.keys_of(taken), pages.place[taken].tolist(), -1 if overlaps else 1
        queued, jobs = list[Rows](), list[ReadJob]()
        for start in range(0, len(taken), job_pages):
            at_job = slice(start, start + job_pages)
            rows, ticket = taken[at_job][::step], next(self._tickets)
            job = PageRead(component, store, rows, is_urgent, np.ones(len(rows), np.bool_), {request: rows})
            self.reads[ticket] = job
            request.jobs[job] = None
            self._read_pages[component.name].ticket[rows] = ticket
            job_keys, views = tuple(keys[at_job][::step]), component.host.views(places[at_job][::step])
            jobs.append(ReadJob(ticket, 0, job_keys, views, job.cancelled, until_s, queue_class))
            queued.append(rows)
        are_queued = self._tiers[store].reads.submit(*jobs)
        assert are_queued, "the queue has free entries"
        return queued

    def _reserve(self, request: PendingPrefetch, component: CacheComponent, wanted: range) -> Rows:
        """Host pages for these pages of a prompt, in reading order: the first ones, so far as others leave for them. A
        background job that reads some of them gives them up."""
        assert request.located is not None
        memory, table, first = request.located.memory, component.pages.table, min(wanted)
        ascending = range(first, first + len(wanted))
        named = memory.rows_named(component, ascending)
        for job, of_job in [*self._reading(component, named)]:
            self._give_up(job, np.isin(job.rows, named[of_job]))
        rows = memory.rows_added(component, ascending)
        taken = component.pages.reserve(rows if wanted == ascending else rows[::-1], READ)
        if component.name == FULL and self._context.tree.events is not None and self._context.watch is not None:
            pages = memory.prompt.event_pages(first, first + len(wanted))
            self._context.watch.note(pages, table.keys_of(taken))
        return taken

    def _give_up(self, job: PageRead, which: Mask) -> None:
        """A job reads those of its pages that are in `which` no more; requests that wait for them look them up
        again."""
        gone = job.rows[which & job.is_live]
        for request in [*job.requests]:
            waited = job.requests[request]
            stays = waited[~np.isin(waited, gone)]
            if len(stays) == len(waited):
                continue
            request.has_failed = True
            self.bereft.append(request)
            if len(stays):
                job.requests[request] = stays
            else:
                del job.requests[request], request.jobs[job]
        if job.component.name == FULL and self._context.watch is not None:
            self._context.watch.forget(job.component.pages.table.keys_of(gone))
        job.disowned += job.component.pages.disown(gone)
        job.is_live &= ~which

    def take(self, done: ReadDone) -> tuple[PageRead, Mask]:
        """The job that was answered, and which of its pages it read."""
        job = self.reads.pop(done.ticket)
        if job.disowned:
            job.component.pages.free_disowned(job.disowned)
        self._answered_s[job.store] = self._clock()
        self.num_pages[job.component.name] -= len(job.rows)
        num_ok = sum(done.ok)
        num_bytes = num_ok * job.component.host.page_bytes
        self._counters.lost.value += done.asked - num_ok
        if num_ok:
            self._counters.count_read(job.store, num_bytes, done.seconds)
        self._cost.observe_read(num_bytes, done.seconds, job.store)
        ok = np.zeros(len(job.rows), np.bool_)
        ok[: len(done.ok)] = done.ok
        return job, ok

    def publish(self, component: CacheComponent, ended: Sequence[tuple[PageRead, Mask]]) -> None:
        """Publish the pages of a component that jobs read, count them, and tell events of them. `ended`: jobs, and
        which of their pages they read."""
        if not ended:
            return
        # The jobs that ended last come first, as uses of pages do.
        rows = np.concatenate([job.rows[job.is_live] for job, _ in reversed(ended)])
        ok = np.concatenate([ok[job.is_live] for job, ok in reversed(ended)])
        events, watch, pages = self._context.tree.events, self._context.watch, component.pages
        if component.name == FULL and watch is not None:
            watch.forget(pages.table.keys_of(rows[~ok]))
        landed = pages.landed(rows, ok)
        pages.mark_stored(landed, pages.source[landed])
        from_disk = pages.source[landed] == DISK.bit
        self._context.page_uses.read(pages.table.name[landed[from_disk]])
        if component.name == FULL:
            self._counters.landed.value += len(landed) * self._context.tree.page_size
        if component.name == FULL and events is not None and watch is not None:
            for job, ok in ended:
                for told in watch.told(pages.table.keys_of(job.rows[job.is_live & ok])):
                    events.landed(told, from_disk=job.store is DISK)

    def give_back(self, job: PageRead) -> list[PendingPrefetch]:
        """Have all requests of a stalled job read its pages from the other store. Returns the requests for which that
        store lacks some."""
        job.is_stalled = True
        stranded = list[PendingPrefetch]()
        table = job.component.pages.table
        for request, rows in [*job.requests.items()]:
            pages = table.index[rows].tolist()
            del job.requests[request], request.jobs[job]
            if request.read_elsewhere(job.component, pages, job.store):
                stranded.append(request)
        self.cancel([job])
        return stranded

    def cancel(self, jobs: Iterable[PageRead]) -> None:
        """Cancel jobs for which no request waits. Their pages may be read by other jobs at once."""
        stores = set[Store]()
        for job in jobs:
            self._give_up(job, job.is_live)
            job.cancelled.set()
            stores.add(job.store)
        for store in stores:
            self._tiers[store].reads.tell_cancelled()

    def _of(self, store: Store) -> list[PageRead]:
        return [job for job in self.reads.values() if job.store is store]

    def _free_jobs(self, request: PendingPrefetch, num_times: int) -> dict[Store, int]:
        """The number of jobs of the kind of the request, urgent or background, that each store lacks."""
        found, is_urgent = dict[Store, int](), request.is_urgent
        for store, tier in self._tiers.items():
            if (num_free := tier.reads.num_free) == 0:
                self._counters.refused.value += 1
                continue
            jobs = self._of(store)
            num_jobs = sum([job.is_urgent == is_urgent and not job.is_stalled for job in jobs])
            if num_jobs < num_times * _MAX_IN_FLIGHT:
                found[store] = min(num_free, num_times * _MAX_IN_FLIGHT - num_jobs)
        return found

    def _sooner(self, stores: int, *, is_urgent: bool) -> Store:
        """Of a set of stores, the one that would read the next full page first."""
        if stores == DISK.bit:
            return DISK
        if stores == REMOTE.bit:
            return REMOTE
        return min((DISK, REMOTE), key=lambda store: self._wait_s(store, is_urgent=is_urgent))

    def _wait_s(self, store: Store, *, is_urgent: bool) -> tuple[float, int]:
        """Seconds until a store would have read one more page, and the bytes queued there, which decide between equal
        times. A store whose rate is unknown gets a job for each of its readers, and no more."""
        jobs, page_bytes = self._of(store), self._context.full.host.page_bytes
        if self._tiers[store].reads.refuses() or any(job.is_stalled for job in jobs):
            return math.inf, 0
        jobs = [job for job in jobs if job.is_urgent or not is_urgent]
        queued_bytes = sum([job.num_bytes for job in jobs])
        read_s = self._cost.read_s(queued_bytes + page_bytes, len(jobs) + 1, store)
        if read_s is None:
            return 0.0 if len(jobs) < self._tiers[store].num_readers else math.inf, queued_bytes
        num_rounds = math.ceil(len(jobs) / self._tiers[store].num_readers)
        late_s = (self._clock() - self._answered_s[store]) * num_rounds if num_rounds else 0.0
        return max(read_s, late_s), queued_bytes

    def _job_pages(self, component: CacheComponent, store: Store) -> tuple[int, int]:
        """The most pages of one job, and of how many jobs: a reader reads them within `_MAX_JOB_S`, and few of a store
        of unknown rate, once each reader has a job."""
        tier, page_bytes = self._tiers[store], component.host.page_bytes
        job_s = self._cost.read_s(tier.job_pages * page_bytes, 1, store)
        if job_s is not None:
            max_pages = tier.job_pages if job_s <= _MAX_JOB_S else max(1, int(tier.job_pages * _MAX_JOB_S / job_s))
        elif num_idle := max(0, tier.num_readers - len(self._of(store))):
            return min(tier.job_pages, max(1, _GAUGE_BYTES // page_bytes)), num_idle
        else:
            max_pages = tier.job_pages
        return max_pages, _MAX_IN_FLIGHT


class _Claim(ref[Prefetch]):
    """The claim of one handle: its number of pages."""

    __slots__ = ("num_pages", "request_id")

    def __init__(self, handle: Prefetch, callback: Callable[[_Claim], None]) -> None:
        super().__init__(handle, callback)  # type: ignore[call-arg]
        self.request_id, self.num_pages = handle.request_id, 0


class HostShare:
    """Pages that landed for requests before their admission, by request. Owned by the scheduler thread.

    A claim ends with the last handle of its request, so that a caller who forgets a request does not reduce the share
    for good. A handle may end in any thread, and inside any call: that is recorded then, and counted at the next call.
    """

    def __init__(self) -> None:
        self._total = 0
        self._claims: dict[str, _Claim] = {}
        self._gone = deque[_Claim]()

    @property
    def total(self) -> int:
        """The pages of all requests."""
        if self._gone:
            self._forget_gone()
        return self._total

    @property
    def sole(self) -> str | None:
        """The only request with a claim, if there is only one."""
        self._forget_gone()
        return next(iter(self._claims)) if len(self._claims) == 1 else None

    def of(self, request_id: str) -> int:
        claim = self._claims.get(request_id)
        return 0 if claim is None else claim.num_pages

    def add(self, handle: Prefetch, num_pages: int) -> None:
        """Add landed pages to the claim of a request."""
        self._forget_gone()
        claim = self._claims.get(handle.request_id)
        if claim is None or claim() is not handle:
            held = 0 if claim is None else claim.num_pages
            claim = self._claims[handle.request_id] = _Claim(handle, self._gone.append)
            claim.num_pages = held
        claim.num_pages += num_pages
        self._total += num_pages

    def end(self, request_id: str) -> int:
        """End the claim of a request. Returns its pages."""
        claim = self._claims.pop(request_id, None)
        num_pages = 0 if claim is None else claim.num_pages
        self._total -= num_pages
        return num_pages

    def _forget_gone(self) -> None:
        while self._gone:
            gone = self._gone.popleft()
            if self._claims.get(gone.request_id) is gone:
                self.end(gone.request_id)


class OverlappedPrefill:
    """Prompts that are computed from their beginning while their pages are read from the end. Owned by the scheduler
    thread.

    `is_wanted`: else the policy chooses to load or to recompute, for a benchmark that compares. `least_pages`: missing
    pages of a prompt that is worth it. `requests`: all requests by id.
    """

    def __init__(
        self,
        context: EngineContext,
        cost: CostModel,
        counters: PrefetchCounters,
        jobs: StoreJobs,
        requests: Mapping[str, PendingPrefetch],
    ) -> None:
        self._context, self._cost, self._counters, self._jobs, self._requests = context, cost, counters, jobs, requests
        self._clock = next(tier.clock for tier in context.stores.values())
        self._page, self.least_pages = context.tree.page_size, _LEAST_OVERLAP_PAGES
        self.is_wanted = True

    def can_overlap(self, request: PendingPrefetch) -> bool:
        """Whether a request lacks enough pages."""
        return request.handle.overlaps and request.end - request.missing[0] >= self.least_pages

    def is_worth_computing(self, request: PendingPrefetch, wait_s: float | None) -> bool:
        """Whether enough pages are computed before the rest arrives. `wait_s`: seconds until all arrive, by the rates
        or by the silence so far; None: unknown."""
        start, end = request.missing
        compute_s = self._cost.prefill_s(start * self._page, end * self._page)
        if wait_s is None or not compute_s:
            return True
        return wait_s >= _LEAST_COMPUTED_SHARE * (wait_s + compute_s)

    def of(self, lease: Lease) -> PendingPrefetch | None:
        """The request of a lease, if pages are read for it."""
        request = self._requests.get(lease.request_id)
        return request if request is not None and request.lease is lease else None

    def is_next_on_host(self, lease: Lease, num_tokens: int) -> bool:
        """Whether the host has the page behind the first `num_tokens`, which are computed."""
        page = num_tokens // self._page
        return page < len(lease.keys) and self.of(lease) is not None and lease.keys[page] in self._context.full.pages

    def next_stop(self, lease: Lease, start: int, end: int) -> int:
        """The end of a pass from token `start` to at most `end`: the end of a page, so that requests share all computed
        pages and a recurrent state; the beginning of the next pages that arrived; or about where computing and reading
        meet. Reads of pages that the pass computes are cancelled."""
        request = self.of(lease)
        if request is None:
            return end
        keys, pages = lease.keys, self._context.full.pages
        first, last = start // self._page, min(len(keys), -(-end // self._page))
        has = pages.has(pages.table.find(keys[first:last]))
        if len(begins := np.flatnonzero(has[1:] & ~has[:-1])):
            end = (first + 1 + int(begins[0])) * self._page
        if not request.is_idle:
            end = min(end, self._meeting(request, start, end))
        if start < (page_end := end // self._page * self._page) < len(keys) * self._page:
            end = page_end
        request.computed_end = computed = max(request.computed_end, -(-end // self._page))
        self._jobs.cancel(request.leave(lambda at, pages: (pages < computed) & (at.name == FULL)))
        return end

    def _meeting(self, request: PendingPrefetch, start: int, end: int) -> int:
        """The end of a pass to at most `end`, so that reading arrives there when the pass ends: the tokens between are
        divided by the two rates. A store that reads less than before, or than its rate, counts by its present reads."""
        num_left = request.missing[1] * self._page - start
        compute_s = self._cost.prefill_s(start, start + num_left) if num_left > 0 else None
        if not compute_s or not request.awaited:
            return end
        read_s = self._read_s(request, num_left)
        if not (read_s or request.num_landed):
            return end
        read_s = max(read_s, self._observed_s(request, num_left))
        num_tokens = max(_LEAST_PASS_PAGES * self._page, int(num_left * read_s / (read_s + compute_s)))
        return (start + num_tokens) // self._page * self._page

    def _read_s(self, request: PendingPrefetch, num_tokens: int) -> float:
        """Seconds of reading by the rates of its stores, in parallel; 0 if none is known."""
        page_bytes, stores = self._context.full.host.page_bytes, {job.store for job in request.jobs}
        stores.update(s for s in self._context.stores for span in request.read_list if span.stores & s.bit)
        num_bytes, rate = num_tokens // self._page * page_bytes, 0.0
        for store in stores:
            num_jobs = -(-num_bytes // (self._context.stores[store].job_pages * page_bytes))
            if read_s := self._cost.read_s(num_bytes, num_jobs, store):
                rate += 1 / read_s
        return 1 / rate if rate else 0.0

    def _observed_s(self, request: PendingPrefetch, num_tokens: int) -> float:
        """Seconds of reading by the pages that landed since its reads began, if its first job in flight ended now."""
        num_pages = request.num_landed + next((len(job.rows) for job in request.jobs), 0)
        if not num_pages:
            return 0.0
        return (self._clock() - request.begun_s) * num_tokens / (num_pages * self._page)


class _Backlog:
    """Bytes before the last page of a request, by store: of urgent jobs in flight, and then of read lists in turn."""

    def __init__(self, cost: CostModel, stores: Iterable[Store], jobs: Iterable[PageRead]) -> None:
        self._cost, self.num_bytes, self._until = cost, dict.fromkeys(stores, 0.0), dict[PageRead, float]()
        for job in jobs:
            if job.is_urgent and any(request.is_urgent for request in job.requests):
                self.num_bytes[job.store] += job.num_bytes
            self._until[job] = self.num_bytes[job.store]

    def add(self, request: PendingPrefetch) -> None:
        """Queue the read list of a request behind those before it."""
        for store, num_bytes in self._listed(request):
            self.num_bytes[store] += num_bytes

    def until(self, request: PendingPrefetch) -> dict[Store, float]:
        """Bytes up to the last of its own, for each store that it waits for."""
        found = dict[Store, float]()
        for job in request.jobs:
            found[job.store] = max(found.get(job.store, 0), self._until[job])
        for store, num_bytes in self._listed(request):
            found[store] = max(found.get(store, 0), self.num_bytes[store]) + num_bytes
        return found

    def _listed(self, request: PendingPrefetch) -> list[tuple[Store, float]]:
        """Bytes of each span in a read list, and its store; a span of both stores is divided by their rates."""
        found = list[tuple[Store, float]]()
        for span in request.read_list:
            num_bytes = len(span.pages) * span.component.host.page_bytes
            stores = [store for store in self.num_bytes if span.stores & store.bit]
            found += [(store, part * num_bytes) for store, part in self._cost.parts(stores).items()]
        return found


class Prefetcher(Movement):
    """All requests with a prefetch, and their transitions. Owned by the scheduler thread.

    `_requests`: by id, until they end. `_queues`: those in stage QUEUED or POSTPONED, by arrival, apart by whether the
    request waits. `_active`: those in stage ASKING, READING or OVERLAPPING. `_undecided`: those whose wait the policy
    may end; `_timed`: those with a deadline. `_has_news`: a request was added, began or ended, or a job was queued,
    since the last poll that looked. `_num_to_choose`: undecided requests to compare again, because there was news;
    `_turn_at_s`: when some of them are next; `_choose_at_s`: when the deadline or the silence of a request may end its
    wait. `_look_at_s`: when a postponed request may begin. `_num_planned`: full pages in all read lists.
    """

    def __init__(self, context: EngineContext, prompts: Prompts, policy: LoadPolicy, load: Requests) -> None:
        self._context, self._prompts, self._policy, self._load = context, prompts, policy, load
        self._clock = next(tier.clock for tier in context.stores.values())
        self._counters = PrefetchCounters(context)
        self._jobs = StoreJobs(context, policy.cost, self._counters)
        self._requests = dict[str, PendingPrefetch]()
        self._arrivals = itertools.count()
        kinds = itertools.product((False, True), _QUEUED_STAGES)
        self._queues = {(waits, stage): list[PendingPrefetch]() for waits, stage in kinds}
        self._active = dict[PendingPrefetch, None]()
        self._undecided, self._timed = dict[PendingPrefetch, None](), dict[PendingPrefetch, None]()
        self._share = HostShare()
        self._max_pages = int(context.config.prefetch_host_share * context.full.host.num_pages)
        self._num_planned = self._num_claimed = 0
        self._submitted_s, self._retry_at_s = self._clock(), -math.inf
        self._look_at_s, self._num_quiet, self._inputs, self._has_news = math.inf, 0, self._inputs_of_policy(), False
        self._choose_at_s, self._turn_at_s, self._num_to_choose = math.inf, math.inf, 0
        self.overlap = OverlappedPrefill(context, policy.cost, self._counters, self._jobs, self._requests)
        gauge = context.metrics.gauge
        gauge("prefetch.waiting_requests", "requests with a prefetch that has not ended", lambda: len(self._requests))
        gauge("prefetch.queued_reads", "prefixes being read", lambda: len(self._active))
        help = "host pages that were read, or are, for requests that were not admitted"
        gauge("prefetch.claimed_pages", help, lambda: self._num_claimed)
        gauge("prefetch.limit_pages", "what prefetch_host_share allows of them", lambda: self._max_pages)

    # Calls of the engine

    def start(
        self, request_id: str, tokens: Tokens, namespace: str, mode: PrefetchMode, *, overlaps: bool = False
    ) -> Prefetch:
        """Extend the prefix of `tokens` that memory serves; the caller leaves out tokens that must be computed.
        `overlaps`: the caller computes the prompt while its pages arrive, if the mode is auto."""
        if request_id in self._requests:
            return self._requests[request_id].handle
        now_s = self._clock()
        overlaps = overlaps and mode == "auto" and self.overlap.is_wanted
        handle = Prefetch(request_id, mode, now_s + self._context.config.prefetch_timeout_s, overlaps=overlaps)
        self._counters.requests.value += 1
        num_pages = len(tokens) // self._context.tree.page_size
        request = PendingPrefetch(next(self._arrivals), handle, tokens, namespace, now_s, num_pages, handle.waits)
        self._requests[request_id] = request
        self._has_news = True
        if mode == "auto":
            self._undecided[request] = None
        elif mode == "timeout":
            self._timed[request] = None
            self._choose_at_s = min(self._choose_at_s, handle.deadline_s)
        if handle.waits:
            self._load.waiting.add(request_id)
        try:
            if self._may_begin(waits=handle.waits):
                self.apply(request, Event.BEGIN)
            else:
                insort(self._queue_of(request), request, key=_ARRIVAL)
        except BaseException:
            self._forget(request)
            raise
        return handle

    def require_ready(self, request_id: str) -> None:
        """Raise if a request that is to be admitted must wait."""
        request = self._requests.get(request_id)
        if request is not None and not request.handle.ready:
            raise PrefetchPending(f"prefetch of {request_id} is in flight: poll() until it is ready, or cancel it")

    def admit(self, lease: Lease) -> None:
        """The request of a lease is admitted. Go on reading for an overlapped prefill, and for no other request."""
        request = self._requests.get(lease.request_id)
        is_active = request is not None and request.stage in (Stage.ASKING, Stage.READING)
        if request is None or not is_active or request.is_idle or not self.overlap.can_overlap(request):
            self.cancel(lease.request_id)
        else:
            request.lease = lease
            self.apply(request, Event.ADMIT)

    def joined(self, lease: Lease, num_computed: int, num_loaded: int) -> None:
        """The lease of an overlapped request loaded `num_loaded` tokens behind `num_computed` computed ones."""
        self._counters.count_joined(num_computed, num_loaded)
        self.apply(self._requests[lease.request_id], Event.JOIN)

    def end_reads(self, lease: Lease) -> None:
        """The prompt of a lease is computed, or the lease ends: read no further for it."""
        if self.overlap.of(lease) is not None:
            self.cancel(lease.request_id)

    def cancel(self, request_id: str) -> None:
        """The request is admitted or gone: read no further for it, unless other requests need the same pages."""
        self._prompts.forget(request_id)
        if self._share.end(request_id):
            self._retry_at_s = -math.inf
            self._has_news = True
        if (request := self._requests.get(request_id)) is not None:
            self.apply(request, Event.CANCEL)
        self._num_claimed = self._claimed()

    def poll(self) -> bool:
        """Enter the answers of the stores, queue further jobs, and compare waiting with computing again. Whether any
        request was affected. Few polls without news do more than look for answers."""
        answered, has_changed = list[PendingPrefetch](), False
        for kind, ended in itertools.groupby(self._jobs.poll(), type):
            self.is_torn = has_changed = True
            if kind is ReadDone:
                self._land([self._jobs.take(done) for done in ended if isinstance(done, ReadDone)])
                continue
            for done in ended:
                if not isinstance(done, ReadDone) and done.ticket in self._jobs.lookups:
                    answered += self._note_answer(done)
                    continue
                for request in self._jobs.give_back(self._jobs.reads[done.ticket]):
                    self.apply(request, Event.EXHAUSTED)
        if not (has_changed or self._requests):
            return False
        now_s, inputs = self._clock(), self._inputs_of_policy()
        is_new = has_changed or self._has_news or inputs != self._inputs
        self._num_quiet += 1
        is_due = is_new or now_s >= min(self._look_at_s, self._choose_at_s) or self._num_quiet >= _LOOK_POLLS
        if not (is_due or now_s >= self._turn_at_s):
            return False
        self.is_torn = True
        if is_due:
            self._inputs, self._num_quiet, self._has_news = inputs, 0, False
            for request in answered:
                self.apply(request, Event.ANSWERED)
            if answered:
                self._choose(answered)
            has_changed |= self._begin_next()
            has_changed |= self._submit()
            self._has_news |= has_changed
            self._num_claimed = self._claimed()
            self._look_at_s = self._retry_at_s if self._retry_at_s > now_s else math.inf
        self._choose_again(is_new=is_new)
        self.is_torn = False
        return has_changed

    def _inputs_of_policy(self) -> tuple[int, ...]:
        """Numbers that change with the inputs of the policy that prefetches do not change."""
        return *self._load.counts, self._policy.cost.num_observed

    def is_busy(self) -> bool:
        has_queued = any(self._queues[waits, Stage.QUEUED] for waits in (False, True))
        return has_queued or any(request.read_list for request in self._active) or self._jobs.is_busy()

    def host_locks(self, component: Component) -> Iterable[Rows]:
        locked = (locked for request in self._active for locked in request.locked)
        yield from (rows for held, rows in locked if held.name == component)
        yield from self._jobs.rows(component)

    # Transitions

    def apply(self, request: PendingPrefetch, event: Event) -> None:
        """Move a request by the table of the module, and run the action. Raises `InvariantError` for other pairs. The
        action moves a request to ENDED itself, last, so that an end which raised can be repeated."""
        if (transition := TRANSITIONS.get((request.stage, event))) is None:
            raise InvariantError("prefetch", [f"{event.name} in stage {request.stage.name}"])
        stage, action = transition
        if stage not in (request.stage, Stage.ENDED):
            self._move(request, stage)
        action(self, request)

    def _move(self, request: PendingPrefetch, stage: Stage) -> None:
        if request.stage in _QUEUED_STAGES:
            self._discard(request)
        else:
            self._active.pop(request, None)
        request.stage = stage
        if stage in _QUEUED_STAGES:
            insort(self._queue_of(request), request, key=_ARRIVAL)
        elif stage is not Stage.ENDED:
            self._active[request] = None

    def _look_up(self, request: PendingPrefetch) -> None:
        """Find its pages in memory, and ask the first store for the rest."""
        context = self._context
        match = context.tree.match(request.tokens, request.namespace)
        prompt = self._prompts.of(request.tokens, request.namespace, match, request.handle.request_id)
        memory, overlaps = Located(context, prompt, match), request.handle.overlaps
        may_share = partial(self._jobs.may_share, request)
        located = LookupResults(memory, may_share, -1 if overlaps else 1)
        if located.is_complete or not self._max_pages:
            self.apply(request, Event.EXHAUSTED)
            return
        request.begin(located)
        for component in context.components:
            pages = range(component.first_required(located.num_usable), located.num_usable)
            if component.name == FULL:
                pages = range(memory.device_end, memory.num_pages if overlaps else memory.host_end)
            request.lock(component, memory.rows_of(component, pages).rows)
        if located.is_open:
            request.lacks_host_room = self._pages_left(request) <= 0 or not self._jobs.look_up(request)
        if request.lacks_host_room and located.is_empty:
            self.apply(request, Event.LACKS_PAGES)
        elif request.lookup is None:
            self.apply(request, Event.ANSWERED)

    def _plan(self, request: PendingPrefetch) -> None:
        """Make the read list: the longest prefix that all components can use, and for which the host has free pages
        besides the pages that the prefix continues, which stay."""
        located, full, handle = request.located, self._context.full, request.handle
        assert located is not None
        followed = [located.memory.prompt.keys[start - 1] for start, _, _ in located.known if start]
        request.lock(full, full.pages.held(followed))
        found_end = end = located.usable_end(located.full_end)
        limit = located.end_with(min(self._pages_left(request), full.pages.capacity))
        if limit < found_end:
            end, request.lacks_host_room = located.usable_end(limit), True
        for component in self._context.components[1:]:
            pages = range(max(located.num_usable, component.first_required(end)), end)
            request.lock(component, located.memory.rows_of(component, pages).rows)
        found_tokens = handle.landed_tokens + located.num_arriving(found_end) * self._context.tree.page_size
        handle.found_tokens = max(handle.found_tokens, found_tokens)
        request.plan(end, self._clock())
        self._jobs.ask_remote_too(request)
        if any(request.num_to_read(component) > component.pages.capacity for component in self._context.components):
            request.read_list.clear()
            request.awaited.clear()
            request.lacks_host_room = True
        self._note_planned(request)
        if request.is_idle:
            self._settle(request)

    def _advance(self, request: PendingPrefetch) -> None:
        """Add the pages that arrived without a gap to the handle."""
        if num_pages := request.advance(self._context.full):
            request.handle.landed_tokens += num_pages * self._context.tree.page_size
            request.progress_s = self._clock()
        if request.is_idle:
            self._settle(request)

    def _settle(self, request: PendingPrefetch) -> None:
        """Nothing of the request is in flight or in its read list. Pages that failed are looked up again once, in all
        stores; pages without free host pages as long as each attempt reads some."""
        lacks_pages = bool(request.awaited) and request.missing[1] > request.computed_end
        is_again = (request.has_failed or lacks_pages) and not request.was_retried and self._clock() < request.until_s
        if is_again or (request.lacks_host_room and request.has_landed and self._pages_left(request) > 0):
            request.was_retried |= is_again
            self.apply(request, Event.RETRY)
        else:
            self.apply(request, Event.LACKS_PAGES if request.lacks_host_room else Event.EXHAUSTED)

    def _restart(self, request: PendingPrefetch) -> None:
        """Look up its pages again."""
        self._release(request)
        self._look_up(request)

    def _postpone(self, request: PendingPrefetch) -> None:
        """Wait for host pages, which become free only when other requests are admitted or gone: end the wait if there
        are none, or if the mode does not bound it."""
        self._release(request)
        handle = request.handle
        if not request.was_postponed:
            claimed = 0 if self._pages_left(request) > 0 else self._claimed()
            self._counters.count_postponed(claimed, self._max_pages)
        request.was_postponed = True
        has_others = len(self._active) or self._share.total > self._share.of(handle.request_id)
        if handle.waits and (handle.mode == "wait_complete" or not has_others):
            self._stop_waiting(request)

    def _overlap(self, request: PendingPrefetch) -> None:
        """Read on from the end of the prompt while it is computed from its beginning."""
        assert request.lease is not None
        request.computed_end = request.lease.cached_len // self._context.tree.page_size
        self._counters.overlapped.value += 1

    def _join(self, request: PendingPrefetch) -> None:
        """Record the loaded pages. If no page is missing any more, read those for which the host had none free."""
        assert request.lease is not None
        page, cached_len = self._context.tree.page_size, request.lease.cached_len
        request.computed_end = cached_len // page
        if cached_len < request.end * page:
            return
        if request.lacks_host_room:
            self._share.end(request.handle.request_id)
            self.apply(request, Event.RETRY)
        else:
            self.cancel(request.handle.request_id)

    def _stop_reading(self, request: PendingPrefetch) -> None:
        """Keep the pages that arrived until the request joins them, and read no further."""
        self._jobs.cancel(request.stop_reading())
        self._note_planned(request)

    def _complete(self, request: PendingPrefetch) -> None:
        """Compare the estimate of a wait with the time that it took."""
        if request.handle.waits and request.chosen_s is not None and request.estimate_s is not None:
            self._counters.estimated_s.value += request.estimate_s
            self._counters.waited_s.observe(self._clock() - request.chosen_s)
        self._forget(request)

    def _forget(self, request: PendingPrefetch) -> None:
        if request.stage in _QUEUED_STAGES:
            self._discard(request)
        request.handle.end()
        self._load.waiting.discard(request.handle.request_id)
        self._release(request)
        self._undecided.pop(request, None)
        self._timed.pop(request, None)
        self._move(request, Stage.ENDED)
        self._requests.pop(request.handle.request_id, None)

    def _release(self, request: PendingPrefetch) -> None:
        self._has_news = True
        self._jobs.cancel(request.release())
        self._note_planned(request)

    # Turns

    def _may_begin(self, *, waits: bool) -> bool:
        """Whether a request may become active, in addition to the active ones and to lookups of requests that are gone.
        Requests that do not wait never delay requests that do."""
        if self._jobs.num_awaited_lookups >= _MAX_ACTIVE * len(self._context.stores):
            return False
        num_waiting = sum([request.handle.waits for request in self._active])
        return (num_waiting if waits else len(self._active) - num_waiting) < _MAX_ACTIVE

    def _begin_next(self) -> bool:
        """Begin with queued requests until enough are active, and with a postponed one now and then. Whether any
        began."""
        num_tokens = 0
        while num_tokens < _MAX_STARTED_TOKENS and (request := self._next_queued()) is not None:
            self._counters.retries.value += request.stage is Stage.POSTPONED
            num_tokens += len(request.tokens)
            self.apply(request, Event.BEGIN)
        return num_tokens > 0

    def _next_queued(self) -> PendingPrefetch | None:
        """The request that begins next: the first to arrive, and requests that wait before all others. A postponed
        request begins if the host has pages for it, one each `_RETRY_S`."""
        for waits in (True, False):
            queued, postponed = self._queues[waits, Stage.QUEUED], self._queues[waits, Stage.POSTPONED]
            if not (queued or postponed) or not self._may_begin(waits=waits):
                continue
            first = queued[:1]
            if postponed and self._clock() >= self._retry_at_s:
                first += [request for request in self._retriable(postponed) if self._pages_left(request) > 0]
            if first:
                request = min(first, key=_ARRIVAL)
                if request.stage is Stage.POSTPONED:
                    self._retry_at_s = self._clock() + _RETRY_S
                return request
        return None

    def _retriable(self, postponed: list[PendingPrefetch]) -> list[PendingPrefetch]:
        """The first postponed request; if all pages are claimed, the one that alone claims any."""
        if self._claimed() < self._max_pages:
            return postponed[:1]
        sole = self._requests.get(self._share.sole or "")
        is_queued = sole is not None and sole.stage is Stage.POSTPONED and self._queue_of(sole) is postponed
        return [sole] if sole is not None and is_queued else []

    def _queue_of(self, request: PendingPrefetch) -> list[PendingPrefetch]:
        return self._queues[request.handle.waits, request.stage]

    def _discard(self, request: PendingPrefetch) -> None:
        """Remove a request from its queue."""
        requests = self._queue_of(request)
        at = bisect_left(requests, request.arrival, key=_ARRIVAL)
        if at < len(requests) and requests[at] is request:
            del requests[at]

    # Host pages

    def _claimed(self) -> int:
        """Full host pages that landed for requests before their admission, are in flight, or are in a read list."""
        return self._share.total + self._jobs.num_pages[FULL] + self._num_planned

    def _note_planned(self, request: PendingPrefetch) -> None:
        """The read list of a request has changed."""
        before, request.num_planned = request.num_planned, request.num_to_read(self._context.full)
        self._num_planned += request.num_planned - before

    def _pages_left(self, request: PendingPrefetch) -> int:
        """Pages that may be read for a request: of the share, or of the pool if no other request claims any."""
        claimed, full = self._claimed(), self._context.full
        own = self._share.of(request.handle.request_id) + request.num_planned
        own += request.num_waited(full)
        return max(0, (self._max_pages if claimed > own else full.host.num_pages) - claimed)

    # Answers and jobs

    def _note_answer(self, done: FindDone | Stalled) -> list[PendingPrefetch]:
        """Enter the answer of a store, or its stall, and ask the next store. Returns the request if all have answered.
        A late answer adds a store to the read list."""
        lookup = self._jobs.take_lookup(done)
        request = lookup.request
        if request.located is not lookup.located:
            return []  # the request has ended, or was queued again
        is_awaited = request.lookup is lookup
        if isinstance(done, FindDone):
            self._jobs.note_answer(lookup, done)
            if request.lookup is None:
                request.add_store()
        if not is_awaited:
            return []
        request.lookup = None
        return [] if self._jobs.look_up(request) else [request]

    def _submit(self) -> bool:
        """Reserve host pages and queue jobs that read them, a few, so that the step ends soon. Whether any was queued.
        A request without free host pages blocks the requests behind it while it has pages in flight; else it is
        postponed."""
        num_jobs, num_pages, has_room = 0, 0, True
        now_s = self._clock()
        num_steps, self._submitted_s = (now_s - self._submitted_s) / _STEP_S, now_s
        for request in _in_turn([request for request in self._active if request.read_list]):
            had_shared, more = request.has_shared, 1
            if request.handle.is_preemptible:
                more = min(_MOST_STEPS, max(4, int(num_steps)))
            chosen = self._jobs.next_of(request, max(1, more // 4))
            left_jobs, left_pages = more * _MAX_JOBS - num_jobs, more * _MAX_PAGES - num_pages
            while chosen is not None and has_room and left_jobs > 0 and left_pages > 0:
                at, store, num_free = chosen
                queued = self._jobs.read(request, at, store, min(num_free, left_jobs), left_pages)
                has_room = len(queued) > 0
                left_jobs, left_pages = left_jobs - len(queued), left_pages - sum(map(len, queued))
                if left_jobs > 0 and left_pages > 0:
                    chosen = self._jobs.next_of(request, max(1, more // 4))
            num_jobs, num_pages = more * _MAX_JOBS - left_jobs, more * _MAX_PAGES - left_pages
            self._counters.shared.value += request.has_shared and not had_shared
            self._note_planned(request)
            if not (has_room or request.jobs):
                self.apply(request, Event.LACKS_PAGES)
                has_room = True
            elif request.is_idle:
                self.apply(request, Event.LANDED)
        bereft, self._jobs.bereft = self._jobs.bereft, []
        for request in bereft:
            if request.stage in (Stage.READING, Stage.OVERLAPPING):
                self.apply(request, Event.LANDED)
        return num_jobs > 0

    def _land(self, ended: Sequence[tuple[PageRead, Mask]]) -> None:
        """Publish the pages that jobs read. Pages that a job did not read are read from the other store. If that store
        lacks them, a request cannot use the pages behind them."""
        landed = dict[tuple[PendingPrefetch, CacheComponent], list[Rows]]()
        lost, claims = list[tuple[PendingPrefetch, PageRead, list[int]]](), Counter[PendingPrefetch]()
        for job, ok in ended:
            if job.component.name == FULL and job.requests:  # pages count for the first request
                claims[min(job.requests, key=_ARRIVAL)] += int(np.count_nonzero(ok & job.is_live))
            for request, waited in job.requests.items():
                del request.jobs[job]
                rows, is_ok = job.rows, ok
                if len(waited) < len(rows):
                    is_waited = np.isin(rows, waited)
                    rows, is_ok = rows[is_waited], ok[is_waited]
                landed.setdefault((request, job.component), []).append(rows[is_ok])
                if not is_ok.all():
                    lost.append((request, job, job.component.pages.table.index[rows[~is_ok]].tolist()))
        for component in self._context.components:
            self._jobs.publish(component, [(job, ok) for job, ok in ended if job.component is component])
        for request, num_pages in (+claims).items():
            self._share.add(request.handle, num_pages)
        for (request, component), parts in landed.items():
            request.follow(component, np.concatenate(parts), self._clock())
        for request, job, pages in lost:
            gone = request.read_elsewhere(job.component, pages, job.store)
            self._jobs.cancel(request.cut(gone[0]) if gone else ())
            self._note_planned(request)
        for request in dict.fromkeys([request for request, _ in landed]):
            self.apply(request, Event.LANDED)

    # Load or recompute

    def _choose_again(self, *, is_new: bool) -> None:
        """Stop the waits whose time has passed. If there is news, or a wait may have become too long, compare for the
        others, some at each poll."""
        now_s = self._clock()
        is_late = now_s >= self._choose_at_s
        while self._timed and (request := next(iter(self._timed))).until_s <= now_s:
            del self._timed[request]
            self._stop_waiting(request)
        if is_late:
            self._choose_at_s = next(iter(self._timed)).until_s if self._timed else math.inf
        num_left = len(self._undecided) if is_new or is_late else min(self._num_to_choose, len(self._undecided))
        turn = list(itertools.islice(self._undecided, min(num_left, _MAX_CHOSEN)))
        self._num_to_choose = num_left - len(turn)
        self._turn_at_s = now_s + _TURN_S if self._num_to_choose else math.inf
        for request in turn:
            del self._undecided[request]
        if turn:
            self._undecided.update({request: None for request in turn if request.is_urgent})  # to the end
            self._choose(turn)

    def _choose(self, requests: Iterable[PendingPrefetch]) -> None:
        """End the waits, in mode auto, that cost all requests more than computing the missing pages. The read list of a
        request that stops delays no request behind it. A preemptible request is so no longer on the same condition.
        Active requests come in turn; queued ones after them."""
        waiting = {r: None for r in requests if r.handle.mode == "auto" and r.is_urgent and not r.handle.ended}
        if not waiting:
            return
        backlog = _Backlog(self._policy.cost, self._context.stores, self._jobs.reads.values())
        num_delayed, now_s = self._load.num_delayed, self._clock()
        queued = [request for request in waiting if request not in self._active]
        for request in (*_in_turn(self._active), *queued):
            if request in waiting:
                num_delayed += self._compare(request, backlog, num_delayed, now_s)
            if request.read_list and request.is_urgent:
                backlog.add(request)

    def _compare(self, request: PendingPrefetch, backlog: _Backlog, num_delayed: int, now_s: float) -> bool:
        """Compare waiting with computing for one request; whether it stops waiting. `num_delayed`: other requests that
        computing would delay now. If there are none, an overlapped prefill waits for the answers of the stores, and
        longer only if they read much faster than the GPU computes.

        A wait that has begun counts the delayed requests of its beginning, because the device is idle once all wait,
        and all would stop together. It has patience, because rates vary with parallel writes. A wait without progress
        ends when computing would have ended: a stalled disk doubles the time at most.
        """
        page, has_begun = self._context.tree.page_size, request.num_delayed is not None
        # Windows and states come last, and full pages are of no use without them.
        start, end = request.missing if len(self._context.components) == 1 else (0, request.end)
        start, end = max(request.num_usable, request.computed_end, start) * page, end * page
        if start >= end:
            return False
        wait_s, silent_s, policy = self._wait_s(request, backlog), now_s - request.progress_s, self._policy
        if request.handle.is_preemptible:
            others = num_delayed - self._load.is_delayed(request.handle.request_id)
            estimate = policy.compare_wait(wait_s, start, end, others)
            if others and not estimate.is_worth_loading(silent_s):
                self._stop_waiting(request)
            elif others:
                self._note_limit(request, estimate.limit_s)
            return False
        if not num_delayed and self.overlap.can_overlap(request):
            compute_s = policy.cost.longest_wait_s(start, end)
            likely_s = None if wait_s is None else max(wait_s, silent_s)
            if request.stage is Stage.READING:
                overlaps = self.overlap.is_worth_computing(request, likely_s)
            else:
                overlaps = silent_s > _ANSWER_SHARE * compute_s
            if overlaps and math.isfinite(compute_s):
                self._stop_waiting(request, is_preemptible=True)
                return True
            self._note_limit(request, 0.0 if math.isfinite(compute_s) else math.inf)
        num_delayed = num_delayed if request.num_delayed is None else request.num_delayed
        estimate = policy.compare_wait(wait_s, start, end, num_delayed)
        if not estimate.is_worth_loading(silent_s, _PATIENCE if has_begun else 1.0):
            self._log_first(estimate)
            is_first = request.stage is Stage.READING and not has_begun
            (self._counters.skipped if is_first else self._counters.abandoned).value += 1
            self._stop_waiting(request)
            return True
        self._note_limit(request, estimate.limit_s)
        if request.stage is Stage.READING and not has_begun:
            request.num_delayed, request.chosen_s, request.estimate_s = num_delayed, now_s, wait_s
            self._counters.waited.value += 1
        return False

    def _note_limit(self, request: PendingPrefetch, silent_s: float) -> None:
        """Have a poll compare for a request again once no page of it has arrived for `silent_s`."""
        self._choose_at_s = min(self._choose_at_s, request.progress_s + silent_s)

    def _stop_waiting(self, request: PendingPrefetch, *, is_preemptible: bool = False) -> None:
        """Let a request be admitted; computing delays it from now on."""
        is_queued = request.stage in _QUEUED_STAGES
        if is_queued:
            self._discard(request)
        request.is_urgent = is_preemptible
        request.handle.stop_waiting(is_preemptible=is_preemptible)
        if is_queued:
            insort(self._queue_of(request), request, key=_ARRIVAL)
        self._load.waiting.discard(request.handle.request_id)

    def _log_first(self, estimate: LoadEstimate) -> None:
        if not (self._counters.skipped.value or self._counters.abandoned.value):
            log.info(
                "a prefix on the disk is computed again: computing it takes %.3g s, in which %d other requests wait, "
                "and waiting for the disk would cost more",
                estimate.compute_s,
                estimate.num_delayed,
            )

    def _wait_s(self, request: PendingPrefetch, backlog: _Backlog) -> float | None:
        """Seconds until its last page is on the device, behind the jobs before it; stores read in parallel. For a
        queued request a lower bound: until its turn. None if unknown."""
        if request.located is None:
            queues_s = [self._read_s(store, num_bytes) for store, num_bytes in backlog.num_bytes.items()]
            return min([queue_s for queue_s in queues_s if queue_s is not None], default=None)
        if request.lookup is not None:
            return None
        stores_s = [self._read_s(store, num_bytes) for store, num_bytes in backlog.until(request).items()]
        read_s = [store_s for store_s in stores_s if store_s is not None]
        if stores_s and not read_s:
            return None
        num_bytes = sum([len(job.requests[request]) * job.component.host.page_bytes for job in request.jobs])
        num_bytes += sum([len(span.pages) * span.component.host.page_bytes for span in request.read_list])
        return max(read_s, default=0.0) + (self._policy.cost.load_s(num_bytes) or 0.0)

    def _read_s(self, store: Store, num_bytes: float) -> float | None:
        job_bytes = self._context.stores[store].job_pages * self._context.full.host.page_bytes
        return self._policy.cost.read_s(num_bytes, math.ceil(num_bytes / job_bytes), store)


_Action = Callable[[Prefetcher, PendingPrefetch], None]
TRANSITIONS: dict[tuple[Stage, Event], tuple[Stage, _Action]] = {
    (Stage.QUEUED, Event.BEGIN): (Stage.ASKING, Prefetcher._look_up),
    (Stage.POSTPONED, Event.BEGIN): (Stage.ASKING, Prefetcher._look_up),
    (Stage.ASKING, Event.ANSWERED): (Stage.READING, Prefetcher._plan),
    (Stage.OVERLAPPING, Event.ANSWERED): (Stage.OVERLAPPING, Prefetcher._plan),
    (Stage.READING, Event.LANDED): (Stage.READING, Prefetcher._advance),
    (Stage.OVERLAPPING, Event.LANDED): (Stage.OVERLAPPING, Prefetcher._advance),
    (Stage.READING, Event.RETRY): (Stage.ASKING, Prefetcher._restart),
    (Stage.OVERLAPPING, Event.RETRY): (Stage.OVERLAPPING, Prefetcher._restart),
    (Stage.ASKING, Event.LACKS_PAGES): (Stage.POSTPONED, Prefetcher._postpone),
    (Stage.READING, Event.LACKS_PAGES): (Stage.POSTPONED, Prefetcher._postpone),
    (Stage.OVERLAPPING, Event.LACKS_PAGES): (Stage.OVERLAPPING, Prefetcher._stop_reading),
    (Stage.ASKING, Event.EXHAUSTED): (Stage.ENDED, Prefetcher._complete),
    (Stage.READING, Event.EXHAUSTED): (Stage.ENDED, Prefetcher._complete),
    (Stage.OVERLAPPING, Event.EXHAUSTED): (Stage.OVERLAPPING, Prefetcher._stop_reading),
    (Stage.ASKING, Event.ADMIT): (Stage.OVERLAPPING, Prefetcher._overlap),
    (Stage.READING, Event.ADMIT): (Stage.OVERLAPPING, Prefetcher._overlap),
    (Stage.OVERLAPPING, Event.JOIN): (Stage.OVERLAPPING, Prefetcher._join),
    (Stage.QUEUED, Event.CANCEL): (Stage.ENDED, Prefetcher._forget),
    (Stage.ASKING, Event.CANCEL): (Stage.ENDED, Prefetcher._forget),
    (Stage.READING, Event.CANCEL): (Stage.ENDED, Prefetcher._forget),
    (Stage.POSTPONED, Event.CANCEL): (Stage.ENDED, Prefetcher._forget),
    (Stage.OVERLAPPING, Event.CANCEL): (Stage.ENDED, Prefetcher._forget),
}
