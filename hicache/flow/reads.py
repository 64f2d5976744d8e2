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
leaves more pages to compute, and no request waits for it. docs/decisions/050-compute-while-pages-are-read.md.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import partial
from operator import attrgetter
from typing import ClassVar, NamedTuple, cast
from weakref import ref

import numpy as np
import numpy.typing as npt

from hicache.config import PrefetchMode
from hicache.errors import InvariantError, PrefetchPending
from hicache.flow.components.base import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel, LoadEstimate, LoadPolicy, Requests
from hicache.flow.counters import PrefetchCounters
from hicache.flow.lease import Lease, Prefetch
from hicache.flow.located import Located, first_gap, spans
from hicache.flow.misses import Unused
from hicache.flow.movement import Movement
from hicache.flow.prompt import Prompts
from hicache.pages.key import Tokens
from hicache.pages.misses import MissReason
from hicache.pages.states import COPY, HELD, READ, Counts
from hicache.pages.table import NO_ROWS, Columns, Mask, Rows
from hicache.storage.process.jobs import (
    FindDone,
    FindJob,
    LeaseDone,
    PageRows,
    ReadClass,
    ReadDone,
    ReadJob,
    Stalled,
)
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
_MOST_PAGES = _MOST_STEPS * _MAX_PAGES
# The time between two attempts to begin with a postponed request.
_RETRY_S = 0.05
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
# Where a page is, in addition to the bits of stores, see `LookupResults`.
_NO_STORES = np.empty(0, np.uint8)
_READ, _IN_MEMORY, _STORES = np.uint8(0x40), np.uint8(0x80), np.uint8(DISK.bit | REMOTE.bit)
_ARRIVAL, _BIT, _IS_URGENT = attrgetter("arrival"), attrgetter("bit"), attrgetter("is_urgent")
_READ_LIST, _WAITS = attrgetter("read_list"), attrgetter("handle.waits")


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


_Where = npt.NDArray[np.uint8]
_Indices = npt.NDArray[np.int64]  # of pages in their prompt, ascending unless something else is stated
_Asked = dict[Component, _Indices]


@dataclass(eq=False, slots=True)
class ReadList:
    """Pages of a component that a request has to read, in reading order: their `rows`, and the set of `stores` that
    have each page; 0: a read in flight loads it."""

    rows: Rows
    stores: _Where


class LookupResults:
    """Where the pages of a prompt are, by the answers of stores so far.

    [0, num_usable)          memory serves these pages, for all components
    [num_usable, num_pages)  stores are asked for windows and states of these pages too

    `may_share`: whether the request may wait for a page that is read. `where[component][page]`: `_IN_MEMORY`, `_READ`,
    or the bits of stores; 0: no store is known to have it.
    """

    def __init__(self, memory: Located, may_share: Callable[[CacheComponent, Rows], Mask] | None = None) -> None:
        self.memory, self.num_pages = memory, memory.num_pages
        self.num_usable = memory.last_end(memory.host_end, 0, memory.in_memory)
        self.where = dict[Component, _Where]()
        for component in memory.context.components:
            first = memory.device_end if component.name == FULL else self.num_usable
            rows = memory.rows_named(component, range(first, self.num_pages))
            is_lacking = ~component.pages.has(rows, HELD | COPY)
            if component.name != FULL:
                on_device = memory.resident[component.name][first:]
                is_lacking[: len(on_device)] &= ~on_device
            self.where[component.name] = where = np.full(self.num_pages, _IN_MEMORY, np.uint8)
            where[first:][is_lacking] = 0
            if may_share is not None and component.pages.num_in_flight:
                where[first:][is_lacking & may_share(component, rows)] = _READ
        self.full = self.where[FULL]

    @property
    def is_empty(self) -> bool:
        """Whether no page is known to arrive."""
        return not any((where & ~_IN_MEMORY).any() for where in self.where.values())

    @property
    def full_end(self) -> int:
        """The end of the full pages that memory has, or that may arrive, without a gap."""
        return first_gap(self.full != 0)

    def unknown(self) -> _Asked:
        """The pages that no store is known to have, by component; empty if there are none."""
        asked = _Asked()
        for name, where in self.where.items():
            if len(pages := np.flatnonzero(where == 0)):
                asked[name] = pages
        return asked

    def keys_of(self, asked: _Asked) -> tuple[bytes, ...]:
        keys = list[bytes]()
        for name, pages in asked.items():
            keys += self.memory.prompt.keys_of(name, pages.tolist())
        return tuple(keys)

    def add(self, store: Store, asked: _Asked, ok: Sequence[bool]) -> None:
        """Record the answer of a store: it has those of the `asked` pages that are `ok`."""
        is_stored, start = np.array(ok, np.bool_), 0
        for name, pages in asked.items():
            self.where[name][pages[is_stored[start : start + len(pages)]]] |= store.bit
            start += len(pages)

    def lose(self, component: CacheComponent, pages: Counts, store: Store) -> Mask:
        """Record that `store` does not read these pages. Returns which of them the other store lacks too."""
        where = self.where[component.name]
        where[pages] &= ~np.uint8(store.bit)
        lacks: Mask = where[pages] & _STORES == 0
        return lacks

    def end_with(self, num_pages: int) -> int:
        """`full_end` if stores read only the first `num_pages`."""
        stored = np.flatnonzero(self.full & _STORES)
        return self.full_end if len(stored) <= num_pages else min(int(stored[num_pages]), self.full_end)

    def usable_end(self, limit: int) -> int:
        """The longest prefix of at most `limit` pages that all components can use, with the pages that may arrive; at
        most `num_usable` if these add nothing."""
        return self.memory.last_end(limit, min(limit, self.num_usable), self._has)

    def num_arriving(self, end: int) -> int:
        """The number of full pages below `end` that may arrive."""
        return int(np.count_nonzero(self.full[:end] & ~_IN_MEMORY))

    def to_read(self, component: CacheComponent, end: int) -> _Indices:
        """The pages that may arrive and that a prefix of `end` pages needs."""
        first = 0
        if component.name != FULL:  # the last page of an optional component
            first = min(component.first_required(end), end - 1) if end > self.num_usable else end
        return first + np.flatnonzero(self.where[component.name][first:end] & ~_IN_MEMORY)

    def _has(self, component: CacheComponent, page: int) -> bool:
        return bool(self.where[component.name][page])


def look_up(memory: Located, wait_s: float) -> tuple[int, int, bool]:
    """Tokens that the disk adds to the prefix in memory, tokens that the remote tier adds to both, and whether all
    stores answered within `wait_s`. No side effect."""
    located, until_s, all_known = LookupResults(memory), time.monotonic() + wait_s, True
    for store, tier in memory.context.stores.items():
        asked = located.unknown()
        done = tier.find((), max(0.0, until_s - time.monotonic()), located.keys_of(asked))
        if done is None:
            all_known = False
        else:
            located.add(store, asked, done.others)
    end = located.usable_end(located.full_end)
    stores, num_pages = located.full[located.num_usable : end], Counter[Store]()
    for store in memory.context.stores:  # no page was found in two
        num_pages[store] = int(np.count_nonzero(stores & store.bit))
    # Stores may add windows or states to full pages that memory has.
    others = memory.context.components[1:]
    added = [located.where[other.name][located.to_read(other, end)].tolist() for other in others]
    if last := [*itertools.chain(*added)]:
        store = REMOTE if last[-1] == REMOTE.bit else DISK
        num_pages[store] += max(0, end - located.num_usable - num_pages.total())
    page = memory.context.tree.page_size
    return num_pages[DISK] * page, num_pages[REMOTE] * page, all_known


@dataclass(eq=False, slots=True)
class PendingPrefetch:
    """A request with a prefetch. `stage` alone says how far it is; `Prefetcher.apply` alone changes `stage`.

    `is_urgent`: it waits for its pages, or would if computing it delayed other requests.

    `located`: where its pages are, from its first lookup until it is queued again. `lookup`: the job of a store that
    it waits for. `num_asked_stores`: in the order of `StoreJobs`. `read_list`: pages to read that no job reads yet, by
    component; no part is empty. `awaited`: full pages that have not arrived, in reading order, and `missing`: the
    pages [start, end) around them. `named`: rows of its pages that it holds; `rows`: those of the full pages from page
    `first` on. `waited`: pages in flight that it waits for, and `jobs`: their jobs, for whichever request they were
    queued. `locked`: pages of the host that its pages continue.

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
    read_list: dict[CacheComponent, ReadList] = field(default_factory=dict)
    awaited: _Indices = field(default_factory=NO_ROWS.copy)
    missing: tuple[int, int] = (0, 0)
    named: list[tuple[CacheComponent, Rows]] = field(default_factory=list)
    rows: Rows = field(default_factory=NO_ROWS.copy)
    first: int = 0
    waited: dict[CacheComponent, Rows] = field(default_factory=dict)
    jobs: dict[PageRead, None] = field(default_factory=dict)
    locked: dict[CacheComponent, list[Rows]] = field(default_factory=dict)
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

    @property
    def lacks_end(self) -> bool:
        """Whether an overlapped prompt lacks windows or states at its end, without which it cannot use full pages. Full
        pages are read after them."""
        if not self.handle.overlaps:
            return False
        if any(component.name != FULL for component in self.read_list):
            return True
        return any(len(rows) > 0 and component.name != FULL for component, rows in self.waited.items())

    def begin(self, located: LookupResults) -> None:
        """Record which pages are in memory or in flight."""
        self.located = located
        self.num_usable, self.end = located.num_usable, located.num_pages
        self.missing = (first_gap(located.full == _IN_MEMORY), self.end)
        self.num_asked_stores = 0
        self.lacks_host_room = self.has_failed = self.has_landed = False

    def plan(self, end: int, now_s: float) -> None:
        """Make the read list of a prefix of `end` pages. Pages still awaited from an earlier list may have arrived."""
        assert self.located is not None
        self.end, self.begun_s, self.num_landed = end, now_s, 0
        self.read_list.clear()
        self.awaited, self.rows = np.sort(self.awaited[self.awaited < end]), NO_ROWS
        for component in self.located.memory.context.components:
            pages = named = self.located.to_read(component, end)
            if component.name == FULL and len(self.awaited):
                named = np.union1d(pages, self.awaited)
            if not len(named):
                continue
            first = int(named[0])
            rows = self.located.memory.rows_added(component, range(first, int(named[-1]) + 1))
            component.pages.table.hold(rows)
            self.named.append((component, rows))
            if component.name == FULL:
                self.awaited, self.first, self.rows = named, first, rows
            if len(pages):
                self.to_read(component, rows[pages - first])
        if self.handle.overlaps:
            self.awaited = self.awaited[::-1]
        self.missing = (self.missing[0], end)

    def to_read(self, component: CacheComponent, rows: Rows) -> None:
        """Add pages to the read list, which is sorted from the beginning of the prompt, for an overlapped prefill from
        its end."""
        if (part := self.read_list.get(component)) is not None:
            rows = np.concatenate((part.rows, rows))
        rows = rows[np.argsort(component.pages.table.index[rows])]
        self.read_list[component] = ReadList(rows[::-1] if self.handle.overlaps else rows, _NO_STORES)
        self.find_stores()

    def find_stores(self) -> None:
        """Record which stores have the pages of the read list."""
        assert self.located is not None
        for component, part in self.read_list.items():
            part.stores = self.located.where[component.name][component.pages.table.index[part.rows]] & _STORES

    def num_to_read(self, component: CacheComponent) -> int:
        """The number of pages of a component in the read list that a store has."""
        part = self.read_list.get(component)
        return 0 if part is None else int(np.count_nonzero(part.stores))

    def remove(self, component: CacheComponent, start: int, end: int) -> None:
        """Remove pages [start, end) of a component from the read list."""
        part, removed = self.read_list[component], slice(start, end)
        part.rows, part.stores = np.delete(part.rows, removed), np.delete(part.stores, removed)
        if not len(part.rows):
            del self.read_list[component]

    def read_elsewhere(self, component: CacheComponent, rows: Rows, store: Store) -> Counts:
        """Read these pages from the other store in place of `store`. Returns the pages that it lacks."""
        assert self.located is not None
        pages = component.pages.table.index[rows]
        is_gone = self.located.lose(component, pages, store)
        if not (is_gone.all() or self.handle.ended):
            self.to_read(component, rows[~is_gone])
        return pages[is_gone]

    def lock(self, component: CacheComponent, rows: Rows) -> None:
        """Keep these pages on the host while pages that continue them arrive."""
        if len(rows):
            component.pages.lock(rows)
            self.locked.setdefault(component, []).append(rows)

    def advance(self, full: CacheComponent) -> int:
        """Remove from `awaited` the pages that have arrived without a gap. Returns their number."""
        if len(self.awaited) and not len(self.rows):
            return 0
        num_landed = first_gap(full.pages.has(self.rows[self.awaited - self.first], HELD | COPY))
        self.awaited = awaited = self.awaited[num_landed:]
        self.missing = (int(awaited.min()), int(awaited.max()) + 1) if len(awaited) else (self.end, self.end)
        self.has_landed |= num_landed > 0
        return num_landed

    def release(self) -> None:
        """Unlock all pages, and hold no rows."""
        for component, parts in self.locked.items():
            rows = np.concatenate(parts[::-1])
            while len(rows):  # once, unless pages were locked more than once
                distinct = np.sort(np.unique(rows, return_index=True)[1])
                component.pages.unlock(rows[distinct])
                rows = np.delete(rows, distinct)
        for component, rows in self.named:
            component.pages.table.drop(rows)
        if self.located is not None:
            self.end = self.located.num_pages
            self.missing = (self.missing[0], self.end)
        self.locked, self.named, self.rows = {}, [], NO_ROWS
        self.located = self.lookup = None
        self.read_list.clear()


def _in_turn(requests: Iterable[PendingPrefetch]) -> list[PendingPrefetch]:
    """The order of their jobs: urgent requests first, then by arrival."""
    return sorted(sorted(requests, key=_ARRIVAL), key=_IS_URGENT, reverse=True)


@dataclass(eq=False, slots=True)
class Lookup:
    """A job that asks a store for the `asked` pages of a request. `located`: the results that its answer adds to."""

    request: PendingPrefetch
    store: Store
    located: LookupResults
    asked: _Asked
    is_awaited: bool
    is_stalled: bool = False


@dataclass(eq=False, slots=True)
class PageRead:
    """A job that reads pages of a component from a store. `is_urgent`: of an urgent request.

    `rows`: as they are read; the `ticket` column of a page that was given up names another job, and `disowned` has its
    place. `requests`: which wait for some of its pages. `landed`: the pages that it has read.
    """

    ticket: int
    component: CacheComponent
    store: Store
    rows: Rows
    is_urgent: bool
    requests: dict[PendingPrefetch, None]
    landed: Rows = field(default_factory=NO_ROWS.copy)
    disowned: list[int] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    is_stalled: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * self.component.host.page_bytes

    def is_for(self, request: PendingPrefetch) -> bool:
        """Whether a request may wait for it: an urgent request waits for no background job."""
        return self.is_urgent or not request.is_urgent


class NextRead(NamedTuple):
    """Pages [start, end) of a component in a read list, and the number of jobs that `store` may get for them."""

    component: CacheComponent
    start: int
    end: int
    store: Store
    num_free: int


class _ReadPages(Columns):
    """`ticket`: the number of the job that reads a page, if its state is READ."""

    fields: ClassVar = {"ticket": (np.int64, 0)}
    ticket: Rows


class StoreJobs:
    """The jobs that stores were given: `lookups` and `reads`, by number, in the order in which they were queued. Owned
    by the scheduler thread.

    A store counts as fast as its earlier reads, and no faster than its present ones: if its next job is late, each job
    behind that counts as late. `num_pages`: full pages of all jobs. `num_awaited_lookups`: those for which a request
    waits, or waited before it was cancelled. `bereft`: requests whose pages a job gave up.
    """

    def __init__(self, context: EngineContext, cost: CostModel, counters: PrefetchCounters) -> None:
        self._context, self._cost, self._counters = context, cost, counters
        self._tickets = itertools.count(1)
        self._tiers = context.stores
        self._stores = tuple(context.stores)  # in the order in which requests ask them
        self._clock = next(tier.clock for tier in context.stores.values())
        self._answered_s = dict.fromkeys(context.stores, -math.inf)
        self.lookups, self.reads = dict[int, Lookup](), dict[int, PageRead]()
        self._num_jobs = Counter[tuple[Store, bool]]()  # reads by store and `is_urgent`, without stalled ones
        self._read_pages = {component.name: _ReadPages() for component in context.components}
        for component in context.components:
            component.pages.table.add_columns(self._read_pages[component.name])
        self.num_pages = self.num_awaited_lookups = 0
        self.bereft = list[PendingPrefetch]()

    def is_busy(self) -> bool:
        """Whether any job is under way that no stalled thread has."""
        lookups, reads = self.lookups.values(), self.reads.values()
        return not (all(job.is_stalled for job in lookups) and all(job.is_stalled for job in reads))

    def may_share(self, request: PendingPrefetch, component: CacheComponent, rows: Rows) -> Mask:
        """Which of these pages are read by jobs for which the request may wait."""
        is_read = component.pages.has(rows, READ)
        for job, of_job in self._reading(component, rows, is_read):
            if not job.is_for(request):
                is_read &= ~of_job
        return is_read

    def share(self, request: PendingPrefetch, component: CacheComponent, rows: Rows) -> None:
        """Have a request wait for those of these pages that are read."""
        is_read = component.pages.has(rows, READ)
        for job, _ in self._reading(component, rows, is_read):
            job.requests[request] = request.jobs[job] = None
            request.has_shared = True
        if is_read.any():
            request.waited[component] = np.union1d(request.waited.get(component, NO_ROWS), rows[is_read])

    def leave(self, request: PendingPrefetch, which: Callable[[CacheComponent, Counts], Mask] | None = None) -> None:
        """Have a request wait no longer for its pages in flight: for pages of a component that `which` chooses by their
        index, by default for all. Jobs for which no request waits are cancelled."""
        for component, rows in request.waited.items():
            is_left = slice(None) if which is None else which(component, component.pages.table.index[rows])
            request.waited[component] = np.delete(rows, is_left)
        self.cancel([job for job in self._leave_jobs(request) if not job.requests])

    def _leave_jobs(self, request: PendingPrefetch) -> list[PageRead]:
        """A request waits for fewer pages: it leaves the jobs that read none of them, which are returned."""
        tickets, left = set[int](), list[PageRead]()
        for component, rows in request.waited.items():
            tickets.update(self._read_pages[component.name].ticket[rows].tolist())
        for job in [*request.jobs]:
            if job.ticket not in tickets:
                del request.jobs[job], job.requests[request]
                left.append(job)
        return left

    def _reading(self, component: CacheComponent, rows: Rows, is_read: Mask) -> Iterator[tuple[PageRead, Mask]]:
        """The jobs that read these pages, of which `is_read` are read, and which of them each job reads."""
        if is_read.any():
            tickets = np.where(is_read, self._read_pages[component.name].ticket[rows], 0)
            for ticket in dict.fromkeys(tickets[is_read].tolist()):
                yield self.reads[ticket], tickets == ticket

    # Lookups

    def look_up(self, request: PendingPrefetch, located: LookupResults, asked: _Asked) -> bool:
        """Ask the next store for the pages that the stores before it lack. False if there is no such store or page, or
        if its queue is full."""
        if request.num_asked_stores == len(self._stores) or not asked:
            return False
        store = self._stores[request.num_asked_stores]
        request.num_asked_stores += 1
        request.lookup = self._ask(request, located, store, asked, is_awaited=True)
        return request.lookup is not None

    def ask_remote_too(self, request: PendingPrefetch) -> None:
        """Ask the remote tier for the pages of the disk too, if it would read a good part of them in the same time and
        was not asked for pages that the disk lacks."""
        located = request.located
        assert located is not None
        if REMOTE not in self._tiers or request.num_asked_stores == len(self._stores):
            return
        pages = np.flatnonzero(located.full & _STORES)
        num_bytes = len(pages) * self._context.full.host.page_bytes
        if len(pages) >= _LEAST_SHARED_PAGES and self._is_remote_fast(num_bytes):
            self._ask(request, located, REMOTE, {FULL: pages}, is_awaited=False)

    def take_lookup(self, done: FindDone | Stalled) -> Lookup:
        """The lookup that was answered, or that stalled."""
        lookup = self.lookups[done.ticket]
        if isinstance(done, FindDone):
            del self.lookups[done.ticket]
            self.num_awaited_lookups -= lookup.is_awaited
            return lookup
        lookup.is_stalled = True
        return lookup

    def note_answer(self, lookup: Lookup, done: FindDone) -> None:
        """Add the answer of a store to the results. Events get the first page that the disk lacks, unless the answers
        of its writes name removed pages."""
        located, pages = lookup.located, lookup.asked.get(FULL, NO_ROWS)
        located.add(lookup.store, lookup.asked, done.others)
        events = self._context.tree.events
        if events is None or lookup.store is not DISK or not done.answered or self._tiers[DISK].tells_removed:
            return
        missed = pages[located.full[pages] & _STORES == 0][:1]
        events.missed_on_disk(located.memory.prompt.keys_of(FULL, missed.tolist()))

    def _ask(
        self, request: PendingPrefetch, located: LookupResults, store: Store, asked: _Asked, *, is_awaited: bool
    ) -> Lookup | None:
        ticket = next(self._tickets)
        queue_class = ReadClass.URGENT_FIND if request.is_urgent else ReadClass.BACKGROUND_FIND
        if not self._tiers[store].reads.submit(FindJob(ticket, (), queue_class, located.keys_of(asked))):
            self._counters.refused.value += 1
            return None
        self.num_awaited_lookups += is_awaited
        lookup = self.lookups[ticket] = Lookup(request, store, located, asked, is_awaited)
        return lookup

    def _is_remote_fast(self, num_bytes: int) -> bool:
        """Whether the remote tier reads a good part of `num_bytes` in the time in which the disk reads all, as far as
        both rates are known."""
        disk_s = self._cost.read_s(num_bytes, self._tiers[DISK].num_readers, DISK)
        remote_s = self._cost.read_s(num_bytes, self._tiers[REMOTE].num_readers, REMOTE)
        return disk_s is None or remote_s is None or _LEAST_REMOTE_SHARE * remote_s <= disk_s

    # Reads

    def next_of(self, request: PendingPrefetch, num_times: int) -> NextRead | None:
        """The next pages of a read list that no job reads, and the store that reads them sooner. If that store has
        enough jobs (`num_times` the number that suffices for short steps), the next pages of the other store. Pages
        that are in memory by now leave the read list; so do pages that other jobs read, for which the request waits
        then."""
        free = self._free_jobs(request, num_times)
        free_bits = sum(map(_BIT, free))
        components = self._context.components
        for component in reversed(components) if request.handle.overlaps else components:
            skipped, at = list[int](), 0
            if (part := request.read_list.get(component)) is None:
                continue
            if component.name == FULL:
                if request.lacks_end:
                    return None
                if request.computed_end:  # computed pages are the last in the reading order
                    num_left = first_gap(component.pages.table.index[part.rows] >= request.computed_end)
                    request.remove(component, num_left, len(part.rows))
            while at < len(part.rows):
                rows, stores = part.rows[at : at + _MOST_PAGES], part.stores[at : at + _MOST_PAGES]
                arriving = component.pages.has(rows, HELD | COPY)
                if component.pages.num_in_flight:
                    arriving |= self.may_share(request, component, rows)
                if arriving[0]:
                    end = at + first_gap(arriving)
                    self.share(request, component, part.rows[at:end])
                    request.remove(component, at, end)
                elif not stores[0]:  # the read in flight did not load it
                    request.has_failed = True
                    request.read_list.clear()
                    return None
                elif (store := self._sooner(int(stores[0]), is_urgent=request.is_urgent)) in free:
                    end = at + first_gap(~arriving & (stores == stores[0]))
                    return NextRead(component, at, end, store, free[store])
                else:
                    skipped.append(int(stores[0]))
                    is_next = (part.stores[at:] & free_bits != 0) & ~np.isin(part.stores[at:], skipped)
                    at = at + int(is_next.argmax()) if is_next.any() else len(part.rows)
        return None

    def read(self, request: PendingPrefetch, chosen: NextRead, max_jobs: int, max_pages: int) -> tuple[int, int]:
        """Queue at most `max_jobs` jobs for the chosen pages, until they have `max_pages`, as far as the host has free
        pages. Returns the numbers of jobs and pages; none if the first page has no free page."""
        component, at, end, store, num_free = chosen
        part, pages, overlaps = request.read_list[component], component.pages, request.handle.overlaps
        has_both = part.stores[at] == _STORES
        job_pages, num_jobs = self._job_pages(component, store)
        if overlaps or has_both:  # between two jobs, computed pages or those of the other store are skipped
            job_pages = min(job_pages, -(-request.num_to_read(component) // _LEAST_JOBS))
        num_jobs = 1 if has_both else min(num_jobs, max_jobs, num_free, -(-max_pages // job_pages))
        taken = self._reserve(request, component, part.rows[at : min(end, at + num_jobs * job_pages)])
        if not len(taken):
            return 0, 0
        if not (self._num_jobs[store, True] or self._num_jobs[store, False]):
            self._answered_s[store] = self._clock()
        request.remove(component, at, at + len(taken))
        request.waited[component] = np.concatenate((request.waited.get(component, NO_ROWS), taken))
        pages.source[taken] = store.bit
        self.num_pages += len(taken) if component.name == FULL else 0
        until_s, is_urgent = request.until_s, request.is_urgent
        queue_class = ReadClass.URGENT_READ if is_urgent else ReadClass.BACKGROUND_READ
        keys, places, step = pages.table.keys_of(taken), pages.place[taken].tolist(), -1 if overlaps else 1
        jobs, tickets, memory = list[ReadJob](), self._read_pages[component.name].ticket, component.host.memory
        for start in range(0, len(taken), job_pages):
            of_job, ticket = slice(start, start + job_pages), next(self._tickets)
            rows = taken[of_job][::step]
            tickets[rows] = ticket
            job = self.reads[ticket] = PageRead(ticket, component, store, rows, is_urgent, {request: None})
            request.jobs[job] = None
            job_keys, job_pages_at = tuple(keys[of_job][::step]), PageRows(memory, places[of_job][::step])
            jobs.append(ReadJob(ticket, 0, job_keys, job_pages_at, job.cancelled, until_s, queue_class))
        self._num_jobs[store, is_urgent] += len(jobs)
        are_queued = self._tiers[store].reads.submit(*jobs)
        assert are_queued, "the queue has free entries"
        return len(jobs), len(taken)

    def _reserve(self, request: PendingPrefetch, component: CacheComponent, rows: Rows) -> Rows:
        """Host pages for these pages of a prompt, in reading order: the first ones, so far as others leave for them. A
        background job that reads some of them gives them up."""
        assert request.located is not None
        pages, watch = component.pages, self._context.watch
        if pages.num_in_flight:
            for job, of_job in [*self._reading(component, rows, pages.has(rows, READ))]:
                self._give_up(job, rows[of_job])
        taken = pages.reserve(rows, READ)
        if component.name == FULL and self._context.tree.events is not None and watch is not None:
            index, prompt = pages.table.index[rows], request.located.memory.prompt
            watch.note(prompt.event_pages(int(index.min()), int(index.max()) + 1), pages.table.keys_of(taken))
        return taken

    def _give_up(self, job: PageRead, gone: Rows) -> None:
        """A job reads some of its pages no more; requests that wait for them look them up again."""
        component = job.component
        for request in [*job.requests]:
            waited = request.waited[component]
            stays = waited[~np.isin(waited, gone)]
            if len(stays) < len(waited):
                request.waited[component] = stays
                request.has_failed = True
                self.bereft.append(request)
                self._leave_jobs(request)
        if component.name == FULL and self._context.watch is not None:
            self._context.watch.forget(component.pages.table.keys_of(gone))
        self._read_pages[component.name].ticket[gone] = 0
        job.disowned += component.pages.disown(gone)

    def take(self, answers: Iterable[ReadDone]) -> list[PageRead]:
        """Publish the pages of the jobs that were answered, count them, and tell events of them. Returns the jobs."""
        now_s, ended = self._clock(), dict[CacheComponent, list[tuple[PageRead, ReadDone]]]()
        jobs, moved = list[PageRead](), dict[Store, list[tuple[int, float]]]()
        for done in answers:
            job, num_ok = self.reads.pop(done.ticket), sum(done.ok)
            jobs.append(job)
            ended.setdefault(job.component, []).append((job, done))
            if job.disowned:
                job.component.pages.free_disowned(job.disowned)
            self._answered_s[job.store] = now_s
            self._num_jobs[job.store, job.is_urgent] -= not job.is_stalled
            self._counters.lost.value += done.asked - num_ok
            if num_ok < done.asked and self._context.watch is not None:
                failed = job.rows[: done.asked][~np.array(done.ok[: done.asked], np.bool_)]
                self._context.watch.fates.note(job.component.pages.table.name[failed], MissReason.FAILED)
            if num_ok:
                num_bytes = num_ok * job.component.host.page_bytes
                moved.setdefault(job.store, []).append((num_bytes, done.seconds))
        for store, of_store in moved.items():
            self._counters.count_reads(store, of_store)
            self._cost.observe_reads(of_store, store)
        for component in self._context.components:
            if component in ended:
                self._publish(component, ended[component])
        return jobs

    def _publish(self, component: CacheComponent, ended: Sequence[tuple[PageRead, ReadDone]]) -> None:
        """Publish the pages of a component that jobs read. The jobs that ended last come first, as uses of pages do."""
        events, watch, pages = self._context.tree.events, self._context.watch, component.pages
        is_full, parts, oks, of_jobs = component.name == FULL, list[Rows](), list[bool](), list[int]()
        for job, done in reversed(ended):
            parts.append(job.rows)
            oks += done.ok
            of_jobs += [job.ticket] * len(job.rows)
        rows, ok, tickets = np.concatenate(parts), np.array(oks, np.bool_), np.array(of_jobs)
        is_live = self._read_pages[component.name].ticket[rows] == tickets
        self.num_pages -= len(rows) if is_full else 0
        if not is_live.all():
            rows, ok, tickets = rows[is_live], ok[is_live], tickets[is_live]
        if is_full and watch is not None:
            watch.forget(pages.table.keys_of(rows[~ok]))
        landed = pages.landed(rows, ok)
        pages.mark_stored(landed, pages.source[landed])
        from_disk = pages.source[landed] == DISK.bit
        self._context.page_uses.read(pages.table.name[landed[from_disk]])
        if is_full:
            self._counters.landed.value += len(landed) * self._context.tree.page_size
        tickets = tickets[ok]
        for job, _ in ended:
            job.landed = landed[tickets == job.ticket]
            if is_full and events is not None and watch is not None:
                for told in watch.told(pages.table.keys_of(job.landed)):
                    events.landed(told, from_disk=job.store is DISK)

    def give_back(self, job: PageRead) -> list[PendingPrefetch]:
        """Have all requests of a stalled job read its pages from the other store. Returns the requests for which that
        store lacks some."""
        if not job.is_stalled:
            self._num_jobs[job.store, job.is_urgent] -= 1
        job.is_stalled = True
        stranded, tickets = list[PendingPrefetch](), self._read_pages[job.component.name].ticket
        for request in [*job.requests]:
            waited = request.waited[job.component]
            is_given = tickets[waited] == job.ticket
            request.waited[job.component] = waited[~is_given]
            del request.jobs[job], job.requests[request]
            if len(request.read_elsewhere(job.component, waited[is_given], job.store)):
                stranded.append(request)
        self.cancel([job])
        return stranded

    def cancel(self, jobs: Sequence[PageRead]) -> None:
        """Cancel jobs for which no request waits. Their pages may be read by other jobs at once."""
        for job in jobs:
            self._give_up(job, job.rows[self._read_pages[job.component.name].ticket[job.rows] == job.ticket])
            job.cancelled.set()
        for store in {job.store for job in jobs}:
            self._tiers[store].reads.tell_cancelled()

    def _free_jobs(self, request: PendingPrefetch, num_times: int) -> dict[Store, int]:
        """The number of jobs of the kind of the request, urgent or background, that each store lacks."""
        found = dict[Store, int]()
        for store, tier in self._tiers.items():
            num_missing = num_times * _MAX_IN_FLIGHT - self._num_jobs[store, request.is_urgent]
            if (num_free := tier.reads.num_free) == 0:
                self._counters.refused.value += 1
            elif num_missing > 0:
                found[store] = min(num_free, num_missing)
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
        jobs, page_bytes = (
            [job for job in self.reads.values() if job.store is store],
            self._context.full.host.page_bytes,
        )
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
            return max_pages, _MAX_IN_FLIGHT
        num_jobs = self._num_jobs[store, True] + self._num_jobs[store, False]
        if num_jobs < tier.num_readers:
            return min(tier.job_pages, max(1, _GAUGE_BYTES // page_bytes)), tier.num_readers - num_jobs
        return tier.job_pages, _MAX_IN_FLIGHT


class _Claim(ref[Prefetch]):
    """The claim of one handle: its number of pages."""

    __slots__ = ("num_pages", "request_id")
    num_pages: int
    request_id: str


class HostShare:
    """Pages that landed for requests before their admission, by request. Owned by the scheduler thread.

    A claim ends with the last handle of its request, so that a caller who forgets a request does not reduce the share
    for good. A handle may end in any thread, and inside any call: that is recorded in `gone`, and counted by
    `forget_gone`. `num_pages`: of all requests.
    """

    def __init__(self) -> None:
        self.num_pages = 0
        self.gone = deque[_Claim]()
        self._claims: dict[str, _Claim] = {}

    @property
    def sole(self) -> str | None:
        """The only request with a claim, if there is only one."""
        return next(iter(self._claims)) if len(self._claims) == 1 else None

    def of(self, request_id: str) -> int:
        claim = self._claims.get(request_id)
        return 0 if claim is None else claim.num_pages

    def add(self, handle: Prefetch, num_pages: int) -> None:
        """Add landed pages to the claim of a request."""
        claim, request_id = self._claims.get(handle.request_id), handle.request_id
        if claim is None or claim() is not handle:
            held = 0 if claim is None else claim.num_pages
            claim = self._claims[request_id] = _Claim(handle, self.gone.append)
            claim.request_id, claim.num_pages = request_id, held
        claim.num_pages += num_pages
        self.num_pages += num_pages

    def end(self, request_id: str) -> int:
        """End the claim of a request. Returns its pages."""
        claim = self._claims.pop(request_id, None)
        num_pages = 0 if claim is None else claim.num_pages
        self.num_pages -= num_pages
        return num_pages

    def forget_gone(self) -> None:
        """End the claims whose handles ended."""
        while self.gone:
            gone = self.gone.popleft()
            if self._claims.get(gone.request_id) is gone:
                self.end(gone.request_id)


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
        """Bytes in a read list, and their stores; pages of both stores are divided by their rates."""
        found = list[tuple[Store, float]]()
        for component, part in request.read_list.items():
            for stores, num_pages in enumerate(np.bincount(part.stores).tolist()):
                if num_pages and stores:
                    of_set = [store for store in self.num_bytes if stores & store.bit]
                    num_bytes = num_pages * component.host.page_bytes
                    found += [(store, share * num_bytes) for store, share in self._cost.parts(of_set).items()]
        return found


class Prefetcher(Movement):
    """All requests with a prefetch, and their transitions. Owned by the scheduler thread.

    `overlap_is_wanted`: prompts may be computed from their beginning while their pages are read from the end; False for
    a benchmark that compares. `least_overlap_pages`: missing pages of a prompt that is worth it.

    `_requests`: by id, until they end. `_queues`: those in stage QUEUED or POSTPONED, by arrival, apart by whether the
    request waits. `_active`: those in stage ASKING, READING or OVERLAPPING. `_undecided`: those whose wait the policy
    may end; `_timed`: those with a deadline. `_has_news`: a request was added, began or ended, or a job was queued,
    since the last poll that looked. `_num_to_choose`: undecided requests to compare again, because there was news;
    `_turn_at_s`: when some of them are next; `_choose_at_s`: when the deadline or the silence of a request may end its
    wait. `_look_at_s`: when a postponed request may begin. `_num_planned`: full pages in all read lists.
    """

    def __init__(self, context: EngineContext, prompts: Prompts, policy: LoadPolicy, load: Requests) -> None:
        self._context, self._prompts, self._policy, self._load = context, prompts, policy, load
        self._tiers = tuple(context.stores.values())
        self._clock = self._tiers[0].clock
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
        self._num_planned = 0
        self._submitted_s, self._retry_at_s = self._clock(), -math.inf
        self._look_at_s, self._num_quiet, self._inputs, self._has_news = math.inf, 0, (0, 0, 0, 0), False
        self._choose_at_s, self._turn_at_s, self._num_to_choose = math.inf, math.inf, 0
        self.overlap_is_wanted, self.least_overlap_pages = True, _LEAST_OVERLAP_PAGES
        gauge = context.metrics.gauge
        gauge("prefetch.waiting_requests", "requests with a prefetch that has not ended", lambda: len(self._requests))
        gauge("prefetch.queued_reads", "prefixes being read", lambda: len(self._active))
        help = "host pages that were read, or are, for requests that were not admitted"
        gauge("prefetch.claimed_pages", help, self._claimed)
        gauge("prefetch.limit_pages", "what prefetch_host_share allows of them", lambda: self._max_pages)

    # Calls of the engine

    def start(
        self, request_id: str, tokens: Tokens, namespace: str, mode: PrefetchMode, *, overlaps: bool = False
    ) -> Prefetch:
        """Extend the prefix of `tokens` that memory serves; the caller leaves out tokens that must be computed.
        `overlaps`: the caller computes the prompt while its pages arrive, if the mode is auto."""
        if request_id in self._requests:
            return self._requests[request_id].handle
        self._share.forget_gone()
        now_s = self._clock()
        overlaps = overlaps and mode == "auto" and self.overlap_is_wanted
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
        if request is None or not is_active or request.is_idle or not self._can_overlap(request):
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
        if self._request_of(lease) is not None:
            self.cancel(lease.request_id)

    def unread(self, request_id: str) -> list[Unused]:
        """The pages that stores have for a request that is admitted now, and why they were not read for it."""
        request = self._requests.get(request_id)
        if request is None or request.located is None:
            return []
        reason = MissReason.NO_ROWS if request.was_postponed or request.lacks_host_room else MissReason.GATE
        if request.lookup is not None:  # the request waits no longer for the answer
            return [(request.num_usable, request.located.num_pages, reason)]
        arriving = np.flatnonzero(request.located.full & ~_IN_MEMORY)
        return [(start, end, reason) for start, end in spans(arriving.tolist())]

    def cancel(self, request_id: str) -> None:
        """The request is admitted or gone: read no further for it, unless other requests need the same pages."""
        self._prompts.forget(request_id)
        if self._share.end(request_id):
            self._retry_at_s = -math.inf
            self._has_news = True
        if (request := self._requests.get(request_id)) is not None:
            self.apply(request, Event.CANCEL)

    def poll(self) -> bool:
        """Enter the answers of the stores, queue further jobs, and compare waiting with computing again. Whether any
        request was affected. Few polls without news do more than look for answers."""
        answers = list[FindDone | ReadDone | Stalled]()
        for tier in self._tiers:
            for done in tier.reads.poll():
                assert not isinstance(done, LeaseDone), "an engine asks for no leases"
                answers.append(done)
        if not (answers or self._requests):
            return False
        answered, now_s = self._enter(answers) if answers else [], self._clock()
        inputs = (*self._load.counts, self._policy.cost.num_observed)
        is_new = self._has_news or inputs != self._inputs or len(answers) > 0
        self._num_quiet += 1
        is_due = is_new or now_s >= min(self._look_at_s, self._choose_at_s) or self._num_quiet >= _LOOK_POLLS
        if not (is_due or now_s >= self._turn_at_s):
            return False
        has_changed, self.is_torn = len(answers) > 0, True
        if is_due:
            self._inputs, self._num_quiet, self._has_news = inputs, 0, False
            self._share.forget_gone()
            for request in answered:
                self.apply(request, Event.ANSWERED)
            if answered and self._undecided:
                self._choose(answered)
            if len(self._requests) > len(self._active):
                has_changed |= self._begin_next()
            has_changed |= self._submit()
            self._has_news |= has_changed
            self._look_at_s = self._retry_at_s if self._retry_at_s > now_s else math.inf
        if self._undecided or self._timed:
            self._choose_again(is_new=is_new)
        else:
            self._choose_at_s = self._turn_at_s = math.inf
        self.is_torn = False
        return has_changed

    def is_busy(self) -> bool:
        has_queued = any(self._queues[waits, Stage.QUEUED] for waits in (False, True))
        return has_queued or any(request.read_list for request in self._active) or self._jobs.is_busy()

    def host_locks(self, component: Component) -> Iterable[Rows]:
        at = self._context.by_name[component]
        for request in self._active:
            yield from request.locked.get(at, ())
        yield np.flatnonzero(at.pages.state & READ)

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
        located = LookupResults(memory, partial(self._jobs.may_share, request))
        if located.num_usable == located.num_pages or not self._max_pages:
            self.apply(request, Event.EXHAUSTED)
            return
        request.begin(located)
        for component in context.components:
            pages = range(component.first_required(located.num_usable), located.num_usable)
            if component.name == FULL:
                pages = range(memory.device_end, memory.num_pages if overlaps else memory.host_end)
            request.lock(component, memory.rows_of(component, pages).rows)
        if asked := located.unknown():
            request.lacks_host_room = self._pages_left(request) <= 0 or not self._jobs.look_up(request, located, asked)
        if request.lacks_host_room and located.is_empty:
            self.apply(request, Event.LACKS_PAGES)
        elif request.lookup is None:
            self.apply(request, Event.ANSWERED)

    def _plan(self, request: PendingPrefetch) -> None:
        """Make the read list: the longest prefix that all components can use, and for which the host has free pages
        besides the pages that the prefix continues, which stay."""
        located, full, handle = request.located, self._context.full, request.handle
        assert located is not None
        followed = np.flatnonzero((located.full[:-1] == _IN_MEMORY) & (located.full[1:] & ~_IN_MEMORY != 0))
        request.lock(full, located.memory.rows_of(full, followed.tolist()).rows)
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
        for component, part in request.read_list.items():
            if np.count_nonzero(part.stores) > component.pages.capacity:
                request.read_list, request.awaited, request.lacks_host_room = {}, NO_ROWS, True
                break
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
        lacks_pages = len(request.awaited) > 0 and request.missing[1] > request.computed_end
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
        has_others = len(self._active) or self._share.num_pages > self._share.of(handle.request_id)
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
        request.handle.end()
        request.read_list.clear()
        request.lookup = None
        self._jobs.leave(request)
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
        self._jobs.leave(request)
        request.release()
        self._note_planned(request)

    # Turns

    def _may_begin(self, *, waits: bool) -> bool:
        """Whether a request may become active, in addition to the active ones and to lookups of requests that are gone.
        Requests that do not wait never delay requests that do."""
        if self._jobs.num_awaited_lookups >= _MAX_ACTIVE * len(self._context.stores):
            return False
        num_waiting: int = sum(map(_WAITS, self._active))
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
        return self._share.num_pages + self._jobs.num_pages + self._num_planned

    def _note_planned(self, request: PendingPrefetch) -> None:
        """The read list of a request has changed."""
        before, request.num_planned = request.num_planned, request.num_to_read(self._context.full)
        self._num_planned += request.num_planned - before

    def _pages_left(self, request: PendingPrefetch) -> int:
        """Pages that may be read for a request: of the share, or of the pool if no other request claims any."""
        claimed, full = self._claimed(), self._context.full
        own = self._share.of(request.handle.request_id) + request.num_planned
        own += len(request.waited.get(full, NO_ROWS))
        return max(0, (self._max_pages if claimed > own else full.host.num_pages) - claimed)

    # Answers and jobs

    def _enter(self, answers: Sequence[FindDone | ReadDone | Stalled]) -> list[PendingPrefetch]:
        """Enter the answers of the stores. Returns the requests for which all have answered."""
        self.is_torn, answered = True, list[PendingPrefetch]()
        for kind, ended in itertools.groupby(answers, type):
            if kind is ReadDone:
                self._land(cast("Iterable[ReadDone]", ended))
                continue
            for done in ended:
                if not isinstance(done, ReadDone) and done.ticket in self._jobs.lookups:
                    answered += self._note_answer(done)
                    continue
                for request in self._jobs.give_back(self._jobs.reads[done.ticket]):
                    self.apply(request, Event.EXHAUSTED)
        return answered

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
                request.find_stores()
        if not is_awaited:
            return []
        request.lookup = None
        located = lookup.located
        return [] if self._jobs.look_up(request, located, located.unknown()) else [request]

    def _submit(self) -> bool:
        """Reserve host pages and queue jobs that read them, a few, so that the step ends soon. Whether any was queued.
        A request without free host pages blocks the requests behind it while it has pages in flight; else it is
        postponed."""
        num_jobs, num_pages, has_room = 0, 0, True
        now_s = self._clock()
        num_steps, self._submitted_s = (now_s - self._submitted_s) / _STEP_S, now_s
        for request in _in_turn(filter(_READ_LIST, self._active)):
            had_shared, more = request.has_shared, 1
            if request.handle.is_preemptible:
                more = min(_MOST_STEPS, max(4, int(num_steps)))
            num_times, max_jobs, max_pages = max(1, more // 4), more * _MAX_JOBS, more * _MAX_PAGES
            chosen = self._jobs.next_of(request, num_times)
            while chosen is not None and has_room and num_jobs < max_jobs and num_pages < max_pages:
                queued = self._jobs.read(request, chosen, max_jobs - num_jobs, max_pages - num_pages)
                num_jobs, num_pages, has_room = num_jobs + queued[0], num_pages + queued[1], queued[0] > 0
                if num_jobs < max_jobs and num_pages < max_pages:
                    chosen = self._jobs.next_of(request, num_times)
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

    def _land(self, answers: Iterable[ReadDone]) -> None:
        """Give the pages that jobs read to the requests that wait for them. Pages that a job did not read are read from
        the other store. If that store lacks them, a request cannot use the pages behind them."""
        full, ended, waiting = self._context.full, self._jobs.take(answers), dict[PendingPrefetch, None]()
        claims = Counter[Prefetch]()
        for job in ended:
            if job.component is full and job.requests and len(job.landed):  # pages count for the first request
                claims[min(job.requests, key=_ARRIVAL).handle] += len(job.landed)
            waiting |= job.requests
            for request in job.requests:
                del request.jobs[job]
        for handle, num_pages in claims.items():
            self._share.add(handle, num_pages)
        now_s, lost = self._clock(), list[tuple[PendingPrefetch, CacheComponent, Rows]]()
        for request in waiting:
            for component, rows in request.waited.items():
                is_read, is_held = component.pages.has(rows, READ), component.pages.has(rows)
                request.waited[component] = rows[is_read]
                if is_held.any():
                    request.lock(component, rows[is_held])
                    request.num_landed += int(np.count_nonzero(is_held)) if component is full else 0
                    request.progress_s = now_s if request.handle.overlaps else request.progress_s
                if not (is_read | is_held).all():
                    lost.append((request, component, rows[~(is_read | is_held)]))
        for request, component, rows in lost:
            self._read_elsewhere(request, component, rows, [job for job in ended if job.component is component])
        for request in waiting:
            self.apply(request, Event.LANDED)

    def _read_elsewhere(
        self, request: PendingPrefetch, component: CacheComponent, rows: Rows, ended: Sequence[PageRead]
    ) -> None:
        """Read pages from the other store that jobs did not read."""
        for store in {job.store for job in ended}:
            of_store = np.concatenate([job.rows for job in ended if job.store is store])
            gone = request.read_elsewhere(component, rows[np.isin(rows, of_store)], store)
            if len(gone):
                self._cut(request, int(gone.min()))
        self._note_planned(request)

    def _cut(self, request: PendingPrefetch, page: int) -> None:
        """Record that a page does not arrive. Pages behind it are of no use, unless the request computes the page: a
        full page, but no state or window at the end."""
        request.has_failed, located = True, request.located
        assert located is not None
        if not request.handle.overlaps:
            request.read_list.clear()
            self._jobs.leave(request, lambda _, pages: pages > page)
        elif located.usable_end(request.end) < request.end:
            request.read_list.clear()
            self._jobs.leave(request)

    # Overlapped prefills

    def is_next_on_host(self, lease: Lease, num_tokens: int) -> bool:
        """Whether the host has the page behind the first `num_tokens`, which are computed."""
        page = num_tokens // self._context.tree.page_size
        if page >= len(lease.keys) or self._request_of(lease) is None:
            return False
        return lease.keys[page] in self._context.full.pages

    def next_stop(self, lease: Lease, start: int, end: int) -> int:
        """The end of a pass from token `start` to at most `end`: the end of a page, so that requests share all computed
        pages and a recurrent state; the beginning of the next pages that arrived; or about where computing and reading
        meet. Reads of pages that the pass computes are cancelled."""
        if not self._requests or (request := self._request_of(lease)) is None:
            return end
        keys, pages, page = lease.keys, self._context.full.pages, self._context.tree.page_size
        first, last = start // page, min(len(keys), -(-end // page))
        has = pages.has(pages.table.find(keys[first:last]))
        if len(begins := np.flatnonzero(has[1:] & ~has[:-1])):
            end = (first + 1 + int(begins[0])) * page
        if not request.is_idle:
            end = min(end, self._meeting(request, start, end))
        if start < (page_end := end // page * page) < len(keys) * page:
            end = page_end
        request.computed_end = computed = max(request.computed_end, -(-end // page))
        self._jobs.leave(request, lambda at, indices: (indices < computed) & (at.name == FULL))
        return end

    def _request_of(self, lease: Lease) -> PendingPrefetch | None:
        """The request of a lease, if pages are read for it."""
        request = self._requests.get(lease.request_id)
        return request if request is not None and request.lease is lease else None

    def _can_overlap(self, request: PendingPrefetch) -> bool:
        """Whether a request lacks enough pages."""
        return request.handle.overlaps and request.end - request.missing[0] >= self.least_overlap_pages

    def _is_worth_computing(self, request: PendingPrefetch, wait_s: float | None) -> bool:
        """Whether enough pages are computed before the rest arrives. `wait_s`: seconds until all arrive, by the rates
        or by the silence so far; None: unknown."""
        start, end = request.missing
        page = self._context.tree.page_size
        compute_s = self._policy.cost.prefill_s(start * page, end * page)
        return wait_s is None or not compute_s or wait_s >= _LEAST_COMPUTED_SHARE * (wait_s + compute_s)

    def _meeting(self, request: PendingPrefetch, start: int, end: int) -> int:
        """The end of a pass to at most `end`, so that reading arrives there when the pass ends: the tokens between are
        divided by the two rates. A store that reads less than before, or than its rate, counts by its present reads."""
        page = self._context.tree.page_size
        num_left = request.missing[1] * page - start
        compute_s = self._policy.cost.prefill_s(start, start + num_left) if num_left > 0 else None
        if not compute_s or not len(request.awaited):
            return end
        read_s = self._rest_s(request, num_left // page)
        if not (read_s or request.num_landed):
            return end
        # The pages that landed since its reads began, and those of its first job in flight, as if it ended now.
        num_pages = request.num_landed + next((len(job.rows) for job in request.jobs), 0)
        if num_pages:
            read_s = max(read_s, (self._clock() - request.begun_s) * num_left / (num_pages * page))
        num_tokens = max(_LEAST_PASS_PAGES * page, int(num_left * read_s / (read_s + compute_s)))
        return (start + num_tokens) // page * page

    def _rest_s(self, request: PendingPrefetch, num_pages: int) -> float:
        """Seconds of reading by the rates of its stores, in parallel; 0 if none is known."""
        stores = {job.store for job in request.jobs}
        bits = [int(np.bitwise_or.reduce(part.stores)) for part in request.read_list.values()]
        stores.update(store for store in self._context.stores if any(of & store.bit for of in bits))
        num_bytes = num_pages * self._context.full.host.page_bytes
        rates = [1 / read_s for store in stores if (read_s := self._read_s(store, num_bytes))]
        return 1 / sum(rates) if rates else 0.0

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
        if not num_delayed and self._can_overlap(request):
            compute_s = policy.cost.longest_wait_s(start, end)
            likely_s = None if wait_s is None else max(wait_s, silent_s)
            if request.stage is Stage.READING:
                overlaps = self._is_worth_computing(request, likely_s)
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
        pages = [*request.waited.items(), *((at, part.rows) for at, part in request.read_list.items())]
        num_bytes = sum([len(rows) * component.host.page_bytes for component, rows in pages])
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
