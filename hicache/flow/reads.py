"""Reads from stores: pages are read to the host for requests that wait for admission, or that are being computed.

Each request with a prefetch is one `PendingPrefetch` in one `Stage`. An event moves the request to the next stage:

    | event          | from        | to          | action              |
    |----------------|-------------|-------------|---------------------|
    | BEGIN          | QUEUED      | LOOKING_UP  | look_up             |
    | BEGIN          | DEFERRED    | LOOKING_UP  | look_up             |
    | ANSWERED       | LOOKING_UP  | READING     | plan                |
    | ANSWERED       | OVERLAPPING | OVERLAPPING | plan                |
    | ARRIVED        | READING     | READING     | advance             |
    | ARRIVED        | OVERLAPPING | OVERLAPPING | advance             |
    | RETRY          | READING     | LOOKING_UP  | restart             |
    | RETRY          | OVERLAPPING | OVERLAPPING | restart             |
    | LACKS_PAGES    | LOOKING_UP  | DEFERRED    | defer               |
    | LACKS_PAGES    | READING     | DEFERRED    | defer               |
    | LACKS_PAGES    | OVERLAPPING | OVERLAPPING | stop_reading        |
    | EXHAUSTED      | LOOKING_UP  | ENDED       | complete            |
    | EXHAUSTED      | READING     | ENDED       | complete            |
    | EXHAUSTED      | OVERLAPPING | OVERLAPPING | stop_reading        |
    | ADMIT          | LOOKING_UP  | OVERLAPPING | overlap             |
    | ADMIT          | READING     | OVERLAPPING | overlap             |
    | JOIN           | OVERLAPPING | OVERLAPPING | join                |
    | CANCEL         | QUEUED      | ENDED       | forget              |
    | CANCEL         | LOOKING_UP  | ENDED       | forget              |
    | CANCEL         | READING     | ENDED       | forget              |
    | CANCEL         | DEFERRED    | ENDED       | forget              |
    | CANCEL         | OVERLAPPING | ENDED       | forget              |

An action may apply the next event. A pair of event and stage that is not in the table raises `InvariantError`.

Each job has a list of the requests that wait for its pages. If a job already reads some pages that a request needs, the
request waits for this job, and queues jobs only for its other pages. A job for which no request waits any more is
cancelled, and other jobs may read its pages at once. The setting `prefetch_host_share` bounds the host pages that are
read for requests before their admission.

The pages of a prompt are read from its beginning. In an overlapped prefill, the GPU computes a prompt from its
beginning while pages are read from the end of the prompt:

    [0, computed_end)          on the device, computed or loaded
    [computed_end, missing[0]) on the host; `join` loads these pages when all pages before are computed
    [missing)                  not yet on the host: read from the right, computed from the left
    [missing[1], end)          on the host, locked until the missing pages are computed or read

Computing stops where the next page is on the host; reading stops where the next page is being computed. If a store is
slow or stalls, the GPU computes more pages, and the request does not wait for the store. See
docs/decisions/050-compute-while-pages-are-read.md.
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
from hicache.flow.lease import Lease, Prefetch
from hicache.flow.located import Located, Unused, first_gap, spans
from hicache.flow.page_transfer import PageTransfer
from hicache.flow.prompt import Prompts
from hicache.metrics import Counter as MetricCounter
from hicache.metrics import Histogram
from hicache.pages.key import PromptPages, Tokens
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

# `_LOOK_POLLS`: if nothing has changed, only one of this number of polls visits the active requests. `_TURN_S`: seconds
# between two polls that compare waiting with computing again.
_LOOK_POLLS, _TURN_S = 16, 0.002
# Bounds of one poll, so that the poll ends soon: the numbers of active requests, of tokens whose keys are computed, of
# queued jobs, of queued pages, and of requests for which waiting is compared with computing. While a preemptible
# request is computed, polls are rare because passes are long. The bounds of jobs and pages of this request are
# multiplied by the time since the last poll, in units of `_STEP_S`, but at least by 4 and at most by `_MOST_STEPS`.
_MAX_ACTIVE, _MAX_STARTED_TOKENS, _MAX_JOBS, _MAX_PAGES, _MAX_CHOSEN = 64, 64 << 10, 6, 128, 64
_STEP_S, _MOST_STEPS = 0.005, 16
_MOST_PAGES = _MOST_STEPS * _MAX_PAGES
# The seconds between two attempts to start a deferred request.
_RETRY_S = 0.05
# The size of the first job of each reader while the rate of a store is unknown. A small job measures even a slow store
# soon.
_GAUGE_BYTES = 8 << 20
# The longest time of one job. A reader thread starts no other job, not even an urgent one, before this job has ended.
_MAX_JOB_S = 0.25
# The smallest number of jobs that read the pages of an overlapped prompt, or pages that both stores have.
_LEAST_JOBS = 16
# The maximum number of urgent jobs in flight at a store, and also of background jobs. This number keeps the store's
# reader threads busy until the next polls.
_MAX_IN_FLIGHT = 32
# If a prompt has at least `_LEAST_SHARED_PAGES` pages on the disk, and the remote store reads at
# `_LEAST_REMOTE_SHARE` of the disk's rate or faster, these pages are looked up in the remote store too.
_LEAST_SHARED_PAGES, _LEAST_REMOTE_SHARE = 32, 1 / 8
# A pass has a minimum cost. So an overlapped pass computes at least `_LEAST_PASS_PAGES`, and a prompt with fewer than
# `_LEAST_OVERLAP_PAGES` missing pages is not overlapped. A prompt is also not overlapped if the GPU would compute less
# than `_LEAST_COMPUTED_SHARE` of its pages: a pass cannot be stopped, and a fast store would have read all pages before
# the pass ends.
_LEAST_PASS_PAGES, _LEAST_OVERLAP_PAGES, _LEAST_COMPUTED_SHARE = 8, 32, 1 / 6
# The longest wait for lookups if computing delays no other request, as a share of the computing time.
_ANSWER_SHARE = 0.02
# The factor by which a wait in progress may take longer than computing.
_TOLERANCE = 2.0
# Locations of a page in addition to the bits of stores, see `LookupResults`.
_READ, _IN_MEMORY, _STORES = np.uint8(0x40), np.uint8(0x80), np.uint8(DISK.bit | REMOTE.bit)
_ARRIVAL, _BIT, _IS_URGENT = attrgetter("arrival"), attrgetter("bit"), attrgetter("is_urgent")
_OF_BIT = {DISK.bit: DISK, REMOTE.bit: REMOTE}
_READ_LIST, _WAITS = attrgetter("read_list"), attrgetter("handle.waits")


class Stage(IntEnum):
    """The stage of a prefetch."""

    QUEUED = auto()  # Too many requests are active, so the request waits.
    LOOKING_UP = auto()  # Stores look up the pages of the prompt.
    READING = auto()  # Stores read pages of the prompt to the host.
    DEFERRED = auto()  # The request waits for free host pages.
    OVERLAPPING = auto()  # The GPU computes the prompt from its beginning while stores read pages from its end.
    ENDED = auto()


_QUEUED_STAGES = (Stage.QUEUED, Stage.DEFERRED)


class Event(IntEnum):
    """An event in the life of a prefetch."""

    BEGIN = auto()  # The number of active requests is below the maximum.
    ANSWERED = auto()  # All lookups have been answered, or no lookup is necessary.
    ARRIVED = auto()  # A job ended, or jobs of other requests read pages of the read list.
    RETRY = auto()  # A read failed, or host pages are free for the remaining pages.
    LACKS_PAGES = auto()  # The host has no free page for the request, and the request has no job in flight.
    EXHAUSTED = auto()  # No further page arrives.
    ADMIT = auto()  # The request was admitted, and is computed while its pages arrive.
    JOIN = auto()  # Pages that arrived are being loaded to the device after the computed pages.
    CANCEL = auto()  # The request was admitted without overlap, or was cancelled.


_Where = npt.NDArray[np.uint8]
_Indices = npt.NDArray[np.int64]  # indices of pages in their prompt, ascending unless stated otherwise
_Queried = dict[Component, _Indices]


@dataclass(eq=False, slots=True)
class ReadList:
    """The pages of a component that a request has to read, in reading order. `rows`: the rows of the pages. `stores`:
    for each page, the bit set of the stores that have it; 0 if a job in flight reads the page."""

    rows: Rows
    stores: _Where


class LookupResults:
    """The locations of the pages of a prompt, as far as lookups have been answered.

    [0, num_usable)          memory serves these pages, for all components
    [num_usable, num_pages)  stores are asked for windows and states of these pages too

    `may_share`: returns for each page whether the request may wait for the job that reads the page.
    `where[component][page]`: `_IN_MEMORY`; `_READ` if the request may wait for the job that reads the page; else the
    bits of the stores that are known to have the page.
    """

    def __init__(self, memory: Located, may_share: Callable[[CacheComponent, Rows], Mask] | None = None) -> None:
        self.memory, self.num_pages = memory, memory.num_pages
        self.num_usable = memory.last_end(memory.host_end, 0, memory.in_memory)
        self.where = dict[Component, _Where]()
        for component in memory.context.components:
            if component.name == FULL:
                first, rows = memory.device_end, memory.host_rows
            else:
                first, rows = self.num_usable, memory.rows_named(component, range(self.num_usable, self.num_pages))
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
        """Return whether all missing pages are unknown to the stores, and no job reads any of them."""
        return not any((where & ~_IN_MEMORY).any() for where in self.where.values())

    @property
    def full_end(self) -> int:
        """The number of full pages, from the first page of the prompt without a gap, that are in memory or may
        arrive."""
        return first_gap(self.full != 0)

    def unknown(self) -> _Queried:
        """Return the pages that no store is known to have, by component."""
        queried = _Queried()
        for name, where in self.where.items():
            if len(pages := np.flatnonzero(where == 0)):
                queried[name] = pages
        return queried

    def keys_of(self, queried: _Queried) -> tuple[bytes, ...]:
        keys = list[bytes]()
        for name, pages in queried.items():
            keys += self.memory.keys_of(name, pages.tolist())
        return tuple(keys)

    def add(self, store: Store, queried: _Queried, ok: Sequence[bool]) -> None:
        """Record the answer of a store. `ok`: for each of the `queried` pages, whether the store has it."""
        is_stored, start = np.array(ok, np.bool_), 0
        for name, pages in queried.items():
            self.where[name][pages[is_stored[start : start + len(pages)]]] |= store.bit
            start += len(pages)

    def lose(self, component: CacheComponent, pages: Counts, store: Store) -> Mask:
        """Record that `store` does not read `pages`. Returns which of these pages the other store lacks too."""
        where = self.where[component.name]
        where[pages] &= ~np.uint8(store.bit)
        lacks: Mask = where[pages] & _STORES == 0
        return lacks

    def end_with(self, num_pages: int, full_end: int) -> int:
        """Return `full_end` if stores may read only `num_pages` pages."""
        stored = np.flatnonzero(self.full & _STORES)
        return full_end if len(stored) <= num_pages else min(int(stored[num_pages]), full_end)

    def usable_end(self, limit: int) -> int:
        """Return the pages, at most `limit`, of the longest prefix that all components can use if all pages that may
        arrive do arrive. If these pages extend no prefix, the result is at most `num_usable`."""
        return self.memory.last_end(limit, min(limit, self.num_usable), self._has)

    def num_arriving(self, end: int) -> int:
        """Return the number of full pages before `end` that may arrive."""
        return int(np.count_nonzero(self.full[:end] & ~_IN_MEMORY))

    def to_read(self, component: CacheComponent, end: int) -> _Indices:
        """Return the pages that may arrive and that a prefix of `end` pages needs."""
        first = 0
        if component.name != FULL:  # an optional component needs only the last pages of a prefix
            first = min(component.first_required(end), end - 1) if end > self.num_usable else end
        return first + np.flatnonzero(self.where[component.name][first:end] & ~_IN_MEMORY)

    def _has(self, component: CacheComponent, page: int) -> bool:
        return bool(self.where[component.name][page])


def look_up(memory: Located, wait_s: float) -> tuple[int, int, bool]:
    """Return the number of tokens that the disk adds to the prefix in memory, the number that the remote store adds to
    memory and disk, and whether all stores answered within `wait_s`. Changes nothing."""
    located, until_s, all_known = LookupResults(memory), time.monotonic() + wait_s, True
    for store, tier in memory.context.stores.items():
        queried = located.unknown()
        done = tier.find((), max(0.0, until_s - time.monotonic()), located.keys_of(queried))
        if done is None:
            all_known = False
        else:
            located.add(store, queried, done.others)
    end = located.usable_end(located.full_end)
    stores, num_pages = located.full[located.num_usable : end], Counter[Store]()
    for store in memory.context.stores:  # each page was found in one store only
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
    """A request with a prefetch. Only `Prefetcher.apply` changes its `stage`.

    `is_urgent`: the request waits for its pages, or would wait if computing its prompt delayed other requests.

    `located`: the locations of the prompt's pages, from the first lookup until the request is queued again. `lookup`:
    the lookup in flight for which the request waits. `num_queried_stores`: the number of stores that were queried, in
    the order of `StoreJobs`. `read_list`: pages that no job reads yet, by component; no list is empty. `awaited`: full
    pages that have not arrived, in reading order; `missing`: an interval [start, end) that contains all awaited pages.
    `named`: rows of the prompt's pages that the page table keeps for this request; `rows`: the rows of the full pages
    from page `first` on. `waited`: rows of pages in flight for which the request waits; `jobs`: the jobs that read
    these pages, including jobs that other requests queued. `locked`: host pages of the prompt that are locked until
    later pages have arrived.

    `lease`: the lease of an overlapped prefill; `computed_end`: the index after the last page that is computed or that
    the next pass computes. `begun_s`: the time at which the reads of the request began; `num_arrived`: the number of
    full pages that arrived since `begun_s`.

    `num_planned`: the number of full pages in the read list. `lacks_host_pages`: the stores have more pages than the
    host has free. `has_failed`: a read of a page failed; `was_retried`: pages were looked up again after a failed read.
    `has_arrived`: a page arrived since the last lookup. `was_deferred`: the request had to wait for host pages;
    `has_coalesced`: the request waited for a job of another request.

    `progress_s`: the time at which the last page arrived. `chosen_s`: the time at which the policy chose to wait;
    `estimate_s`: the estimated seconds of this wait; `num_delayed`: the number of requests that computing would have
    delayed at `chosen_s`.
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
    num_queried_stores: int = 0
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
    num_arrived: int = 0
    num_planned: int = 0
    lacks_host_pages: bool = False
    has_failed: bool = False
    was_retried: bool = False
    has_arrived: bool = False
    has_coalesced: bool = False
    was_deferred: bool = False
    estimate_s: float | None = None
    chosen_s: float | None = None
    num_delayed: int | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether the request has no lookup, no job in flight and an empty read list."""
        return self.lookup is None and not (self.read_list or self.jobs)

    @property
    def until_s(self) -> float:
        """The deadline of the request's reads in mode `timeout`; infinite in other modes."""
        return self.handle.deadline_s if self.handle.mode == "timeout" else math.inf

    @property
    def lacks_end(self) -> bool:
        """Return whether a prompt still lacks windows or states at its end. If prompts overlap, windows and states are
        read before full pages, because full pages are of no use without them."""
        if any(component.name != FULL for component in self.read_list):
            return True
        return any(len(rows) > 0 and component.name != FULL for component, rows in self.waited.items())

    def plan(self, end: int, now_s: float) -> None:
        """Make the read list for a prefix of `end` pages. Pages of an earlier read list that have not arrived stay in
        `awaited`."""
        assert self.located is not None
        self.end, self.begun_s, self.num_arrived = end, now_s, 0
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
        """Add pages to the read list, in reading order: from the beginning of the prompt, or from its end for an
        overlapped prefill."""
        if (part := self.read_list.get(component)) is not None:
            rows = np.concatenate((part.rows, rows))
        rows = rows[np.argsort(component.pages.table.index[rows])]
        self.find_stores(component, rows[::-1] if self.handle.overlaps else rows)

    def find_stores(self, component: CacheComponent, rows: Rows) -> None:
        """Set the pages of a component in the read list, with the stores that have them."""
        assert self.located is not None
        stores = self.located.where[component.name][component.pages.table.index[rows]] & _STORES
        self.read_list[component] = ReadList(rows, stores)

    def remove(self, component: CacheComponent, start: int, end: int) -> None:
        """Remove pages [start, end) of a component from the read list."""
        part, removed = self.read_list[component], slice(start, end)
        if start:
            part.rows, part.stores = np.delete(part.rows, removed), np.delete(part.stores, removed)
        else:
            part.rows, part.stores = part.rows[end:], part.stores[end:]
        if not len(part.rows):
            del self.read_list[component]

    def read_elsewhere(self, component: CacheComponent, rows: Rows, store: Store) -> Counts:
        """Add the pages `rows` to the read list, to be read from the other store instead of `store`. Returns the pages
        that the other store lacks."""
        assert self.located is not None
        pages = component.pages.table.index[rows]
        is_gone = self.located.lose(component, pages, store)
        if not (is_gone.all() or self.handle.ended):
            self.to_read(component, rows[~is_gone])
        return pages[is_gone]

    def lock(self, component: CacheComponent, rows: Rows) -> None:
        """Lock the host pages `rows` while later pages of the prompt arrive."""
        if len(rows):
            component.pages.lock(rows)
            self.locked.setdefault(component, []).append(rows)

    def release(self) -> None:
        """Unlock all pages and release all rows."""
        for component, parts in self.locked.items():
            rows = np.concatenate(parts[::-1])
            while len(rows):  # repeats only if pages were locked more than once
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
    """Return requests in the order in which they queue jobs: urgent requests first, then by arrival."""
    return sorted(sorted(requests, key=_ARRIVAL), key=_IS_URGENT, reverse=True)


@dataclass(eq=False, slots=True)
class Lookup:
    """A job that looks up the `queried` pages of a request in a store. `located`: the results to which the answer of
    the store is added."""

    request: PendingPrefetch
    store: Store
    located: LookupResults
    queried: _Queried
    is_awaited: bool
    is_stalled: bool = False


@dataclass(eq=False, slots=True)
class PageRead:
    """A job that reads pages of a component from a store. `is_urgent`: whether an urgent request queued the job.

    `rows`: rows of the pages, in reading order. If the job has dropped a page, the column `ticket` of the page no
    longer has the job's number, and the host page is in `disowned`. `requests`: the requests that wait for pages of the
    job. `read_rows`: rows of the pages that the job has read.
    """

    ticket: int
    component: CacheComponent
    store: Store
    rows: Rows
    is_urgent: bool
    requests: dict[PendingPrefetch, None]
    read_rows: Rows = field(default_factory=NO_ROWS.copy)
    disowned: list[int] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    is_stalled: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * self.component.host.page_bytes

    def is_for(self, request: PendingPrefetch) -> bool:
        """Return whether a request may wait for this job. An urgent request does not wait for a background job."""
        return self.is_urgent or not request.is_urgent


class NextRead(NamedTuple):
    """Pages [start, end) of a component in a read list, and the number of jobs that `store` may get for them."""

    component: CacheComponent
    start: int
    end: int
    store: Store
    num_free: int


class _ReadPages(Columns):
    """`ticket`: the number of the job that reads the page, if the page is in state READ."""

    fields: ClassVar = {"ticket": (np.int64, 0)}
    ticket: Rows


class StoreJobs:
    """The jobs in flight at stores: `lookups` and `reads`, by number, in the order of submission. Owned by the
    scheduler thread.

    The estimated rate of a store is the rate of its earlier reads. If the next job of the store is late, the estimate
    assumes that all jobs after this job are late too. `num_pages`: full pages of all jobs. `num_awaited_lookups`:
    lookups for which a request waits, or waited before it was cancelled. `lost_reads`: requests that waited for pages
    that a job has dropped.
    """

    def __init__(self, context: EngineContext, cost: CostModel, counters: PrefetchCounters) -> None:
        self._context, self._cost, self._counters = context, cost, counters
        self._tickets = itertools.count(1)
        self._tiers = context.stores
        self._stores = tuple(context.stores)  # in the order of lookups
        self._clock = next(tier.clock for tier in context.stores.values())
        self._answered_s = dict.fromkeys(context.stores, -math.inf)
        self.lookups, self.reads = dict[int, Lookup](), dict[int, PageRead]()
        self._num_jobs = Counter[tuple[Store, bool]]()  # reads by store and `is_urgent`, without stalled reads
        self._read_pages = {component.name: _ReadPages() for component in context.components}
        for component in context.components:
            component.pages.table.add_columns(self._read_pages[component.name])
        self.num_pages = self.num_awaited_lookups = 0
        self.lost_reads = list[PendingPrefetch]()

    def is_busy(self) -> bool:
        """Return whether any job is in flight. Jobs of stalled threads do not count."""
        lookups, reads = self.lookups.values(), self.reads.values()
        return not (all(job.is_stalled for job in lookups) and all(job.is_stalled for job in reads))

    def may_share(self, request: PendingPrefetch, component: CacheComponent, rows: Rows) -> Mask:
        """Return which pages are read by jobs for which the request may wait."""
        is_read = component.pages.has(rows, READ)
        for job, of_job in self._reading(component, rows, is_read):
            if not job.is_for(request):
                is_read &= ~of_job
        return is_read

    def share(self, request: PendingPrefetch, component: CacheComponent, rows: Rows) -> None:
        """Let a request wait for the jobs that read some of the pages `rows`."""
        is_read = component.pages.has(rows, READ)
        for job, _ in self._reading(component, rows, is_read):
            job.requests[request] = request.jobs[job] = None
            request.has_coalesced = True
        if is_read.any():
            request.waited[component] = np.union1d(request.waited.get(component, NO_ROWS), rows[is_read])

    def stop_waiting(
        self, request: PendingPrefetch, which: Callable[[CacheComponent, Counts], Mask] | None = None
    ) -> None:
        """Let a request stop waiting for the pages in flight that `which` selects by component and index; by default,
        for all pages. Jobs for which no request waits any more are cancelled."""
        for component, rows in request.waited.items():
            is_left = slice(None) if which is None else which(component, component.pages.table.index[rows])
            request.waited[component] = np.delete(rows, is_left)
        if request.jobs:
            self.cancel([job for job in self._leave_jobs(request) if not job.requests])

    def _leave_jobs(self, request: PendingPrefetch) -> list[PageRead]:
        """Remove a request from the jobs that read none of its pages any more. Returns these jobs."""
        tickets, left = set[int](), list[PageRead]()
        for component, rows in request.waited.items():
            tickets.update(self._read_pages[component.name].ticket[rows].tolist())
        for job in [*request.jobs]:
            if job.ticket not in tickets:
                del request.jobs[job], job.requests[request]
                left.append(job)
        return left

    def _reading(self, component: CacheComponent, rows: Rows, is_read: Mask) -> Iterator[tuple[PageRead, Mask]]:
        """Yield the jobs that read the pages `rows`, each with a mask of the pages that the job reads. `is_read`: which
        pages are in state READ."""
        if is_read.any():
            tickets = np.where(is_read, self._read_pages[component.name].ticket[rows], 0)
            for ticket in dict.fromkeys(tickets[is_read].tolist()):
                yield self.reads[ticket], tickets == ticket

    # Lookups

    def look_up(self, request: PendingPrefetch, queried: _Queried | None = None) -> bool:
        """Ask the next store for the `queried` pages, by default all pages that the earlier stores lack. Returns False
        if there is no next store or no such page, or if the queue of the store is full."""
        located = request.located
        assert located is not None
        if request.num_queried_stores == len(self._stores) or not (queried := queried or located.unknown()):
            return False
        store = self._stores[request.num_queried_stores]
        request.num_queried_stores += 1
        request.lookup = self._ask(request, located, store, queried, is_awaited=True)
        return request.lookup is not None

    def ask_remote_too(self, request: PendingPrefetch) -> None:
        """Ask the remote store for pages that the disk has, so that both stores can read in parallel. Does nothing if
        the remote store was queried before, or if it would read too few pages in the time of the disk."""
        located = request.located
        assert located is not None
        if request.num_queried_stores == len(self._stores):
            return
        pages = np.flatnonzero(located.full & _STORES)
        num_bytes = len(pages) * self._context.full.host.page_bytes
        if len(pages) >= _LEAST_SHARED_PAGES and self._is_remote_fast(num_bytes):
            self._ask(request, located, REMOTE, {FULL: pages}, is_awaited=False)

    def take_lookup(self, done: FindDone | Stalled) -> Lookup | None:
        """Return the lookup that was answered or that stalled, and add the answer to its results. Returns None if the
        request has ended or was queued again. If the disk does not report evicted pages, the event log gets the first
        page that the disk lacks."""
        lookup, events = self.lookups[done.ticket], self._context.tree.events
        located, is_current = lookup.located, lookup.request.located is lookup.located
        if isinstance(done, Stalled):
            lookup.is_stalled = True
            return lookup if is_current else None
        del self.lookups[done.ticket]
        self.num_awaited_lookups -= lookup.is_awaited
        if not is_current:
            return None
        located.add(lookup.store, lookup.queried, done.others)
        if events is not None and lookup.store is DISK and done.answered and not self._tiers[DISK].reports_removed:
            pages = lookup.queried.get(FULL, NO_ROWS)
            missed = pages[located.full[pages] & _STORES == 0][:1]
            events.missed_on_disk(located.memory.keys_of(FULL, missed.tolist()))
        return lookup

    def _ask(
        self, request: PendingPrefetch, located: LookupResults, store: Store, queried: _Queried, *, is_awaited: bool
    ) -> Lookup | None:
        ticket = next(self._tickets)
        queue_class = ReadClass.URGENT_FIND if request.is_urgent else ReadClass.BACKGROUND_FIND
        if not self._tiers[store].reads.submit(FindJob(ticket, (), queue_class, located.keys_of(queried))):
            self._counters.refused.value += 1
            return None
        self.num_awaited_lookups += is_awaited
        lookup = self.lookups[ticket] = Lookup(request, store, located, queried, is_awaited)
        return lookup

    def _is_remote_fast(self, num_bytes: int) -> bool:
        """Return whether the remote store would read at least the share `_LEAST_REMOTE_SHARE` of `num_bytes` in the
        time in which the disk reads all of them. True while the rate of either store is unknown."""
        disk_s = self._cost.read_s(num_bytes, self._tiers[DISK].num_readers, DISK)
        remote_s = self._cost.read_s(num_bytes, self._tiers[REMOTE].num_readers, REMOTE)
        return disk_s is None or remote_s is None or _LEAST_REMOTE_SHARE * remote_s <= disk_s

    # Reads

    def next_of(self, request: PendingPrefetch, num_times: int) -> NextRead | None:
        """Return the next pages of a read list and the store that would read them first. If this store already has
        `num_times * _MAX_IN_FLIGHT` jobs, return the next pages for the other store. Pages that are already in memory,
        or that jobs in flight read, are removed from the read list."""
        free = self._free_jobs(request, num_times)
        free_bits = sum(map(_BIT, free))
        components = self._context.components
        for component in reversed(components) if request.handle.overlaps else components:
            skipped, at = list[int](), 0
            if (part := request.read_list.get(component)) is None:
                continue
            if component.name == FULL:
                if request.handle.overlaps and request.lacks_end:
                    return None
                if request.computed_end:  # computed pages are last in reading order
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
                elif not stores[0]:  # the job in flight that should have read the first page has failed
                    request.has_failed = True
                    request.read_list.clear()
                    return None
                elif (store := _OF_BIT.get(int(stores[0])) or self._sooner(is_urgent=request.is_urgent)) in free:
                    end = at + first_gap(~arriving & (stores == stores[0]))
                    return NextRead(component, at, end, store, free[store])
                else:
                    if not free:
                        break
                    skipped.append(int(stores[0]))
                    is_next = (part.stores[at:] & free_bits != 0) & ~np.isin(part.stores[at:], skipped)
                    at = at + int(is_next.argmax()) if is_next.any() else len(part.rows)
        return None

    def read(self, request: PendingPrefetch, chosen: NextRead, max_jobs: int, max_pages: int) -> tuple[int, int]:
        """Queue jobs for the chosen pages: at most `max_jobs` jobs and `max_pages` pages, as far as the host has free
        pages. Returns the numbers of queued jobs and pages; (0, 0) if the host has no free page for the first page."""
        component, at, end, store, num_free = chosen
        part, pages, overlaps = request.read_list[component], component.pages, request.handle.overlaps
        has_both = part.stores[at] == _STORES
        job_pages, num_jobs = self._job_pages(component, store)
        if overlaps or has_both:  # small jobs: each job leaves out pages that were computed or read in the meantime
            job_pages = min(job_pages, -(-int(np.count_nonzero(part.stores)) // _LEAST_JOBS))
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
        keys, pool_pages, step = pages.table.keys_of(taken), pages.pool_page[taken].tolist(), -1 if overlaps else 1
        jobs, tickets, memory = list[ReadJob](), self._read_pages[component.name].ticket, component.host.memory
        for start in range(0, len(taken), job_pages):
            of_job, ticket = slice(start, start + job_pages), next(self._tickets)
            rows = taken[of_job][::step]
            tickets[rows] = ticket
            job = self.reads[ticket] = PageRead(ticket, component, store, rows, is_urgent, {request: None})
            request.jobs[job] = None
            job_keys, job_pages_at = tuple(keys[of_job][::step]), PageRows(memory, pool_pages[of_job][::step])
            jobs.append(ReadJob(ticket, 0, job_keys, job_pages_at, job.cancelled, until_s, queue_class))
        self._num_jobs[store, is_urgent] += len(jobs)
        are_queued = self._tiers[store].reads.submit(*jobs)
        assert are_queued, "the queue has free entries"
        return len(jobs), len(taken)

    def _reserve(self, request: PendingPrefetch, component: CacheComponent, rows: Rows) -> Rows:
        """Reserve host pages for the pages `rows`, in reading order, as far as the host has free or evictable pages.
        Returns the rows that got a host page. If a background job reads some of these pages, the job drops them."""
        assert request.located is not None
        pages, watch = component.pages, self._context.watch
        if pages.num_in_flight:
            for job, of_job in [*self._reading(component, rows, pages.has(rows, READ))]:
                self._drop_pages(job, rows[of_job])
        taken = pages.reserve(rows, READ)
        if component.name == FULL and self._context.tree.events is not None and watch is not None:
            index, prompt = pages.table.index[rows], request.located.memory.prompt
            of_prompt = PromptPages(prompt.keys, None, prompt.tokens, prompt.namespace)
            watch.note(of_prompt.part(int(index.min()), int(index.max()) + 1), pages.table.keys_of(taken))
        return taken

    def _drop_pages(self, job: PageRead, dropped: Rows) -> None:
        """Remove pages from a job. Requests that wait for the removed pages look up these pages again."""
        component = job.component
        for request in [*job.requests]:
            waited = request.waited[component]
            remaining = waited[~np.isin(waited, dropped)]
            if len(remaining) < len(waited):
                request.waited[component] = remaining
                request.has_failed = True
                self.lost_reads.append(request)
                self._leave_jobs(request)
        if component.name == FULL and self._context.watch is not None:
            self._context.watch.forget(component.pages.table.keys_of(dropped))
        self._read_pages[component.name].ticket[dropped] = 0
        job.disowned += component.pages.disown(dropped)

    def take(self, answers: Iterable[ReadDone]) -> list[PageRead]:
        """Publish, count and report the pages that ended jobs have read. Returns the jobs."""
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
                self._context.watch.miss_reasons.note(job.component.pages.table.name[failed], MissReason.FAILED)
            if num_ok:
                num_bytes = num_ok * job.component.host.page_bytes
                moved.setdefault(job.store, []).append((num_bytes, done.seconds))
        for store, of_store in moved.items():
            for histogram, values in zip(self._counters.moved[store], zip(*of_store, strict=True), strict=False):
                histogram.observe(*values)
            self._cost.observe_reads(of_store, store)
        for component in self._context.components:
            if component in ended:
                self._publish(component, ended[component])
        return jobs

    def _publish(self, component: CacheComponent, ended: Sequence[tuple[PageRead, ReadDone]]) -> None:
        """Publish the pages of a component that jobs have read, the pages of the latest job first: later pages of a
        prompt are evicted first."""
        events, watch, pages = self._context.tree.events, self._context.watch, component.pages
        is_full, parts, oks, tickets = component.name == FULL, list[Rows](), list[Mask](), self._read_pages
        for job, done in reversed(ended):
            rows, ok = job.rows, np.array(done.ok, np.bool_)
            self.num_pages -= len(rows) if is_full else 0
            is_live = tickets[component.name].ticket[rows] == job.ticket
            if not is_live.all():
                rows, ok = rows[is_live], ok[is_live]
            job.read_rows = rows if ok.all() else rows[ok]
            parts.append(rows)
            oks.append(ok)
        rows, ok = (parts[0], oks[0]) if len(ended) == 1 else (np.concatenate(parts), np.concatenate(oks))
        if is_full and watch is not None and not ok.all():
            watch.forget(pages.table.keys_of(rows[~ok]))
        read_rows = pages.complete(rows, ok)
        sources = pages.source[read_rows]
        pages.mark_stored(read_rows, sources)
        from_disk = read_rows[sources == DISK.bit]
        if len(from_disk):
            self._context.page_uses.read(pages.table.name[from_disk])
        if is_full:
            self._counters.read_tokens.value += len(read_rows) * self._context.tree.page_size
        for job, _ in ended:
            if is_full and events is not None and watch is not None:
                for announced in watch.announced(pages.table.keys_of(job.read_rows)):
                    events.loaded(announced, from_disk=job.store is DISK)

    def give_back(self, job: PageRead) -> list[PendingPrefetch]:
        """Let all requests of a stalled job read its pages from the other store. Returns the requests for which the
        other store lacks some of these pages."""
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
        """Cancel jobs for which no request waits. Other jobs may read the pages of a cancelled job at once."""
        for job in jobs:
            self._drop_pages(job, job.rows[self._read_pages[job.component.name].ticket[job.rows] == job.ticket])
            job.cancelled.set()
        for store in {job.store for job in jobs}:
            self._tiers[store].reads.notify_cancelled()

    def _free_jobs(self, request: PendingPrefetch, num_times: int) -> dict[Store, int]:
        """Return the number of further jobs that each store may get: urgent jobs for an urgent request, background jobs
        for other requests."""
        found = dict[Store, int]()
        for store, tier in self._tiers.items():
            num_missing = num_times * _MAX_IN_FLIGHT - self._num_jobs[store, request.is_urgent]
            if (num_free := tier.reads.num_free) == 0:
                self._counters.refused.value += 1
            elif num_missing > 0:
                found[store] = min(num_free, num_missing)
        return found

    def _sooner(self, *, is_urgent: bool) -> Store:
        """Return the store that would read the next full page first, if both stores have the page."""
        return min((DISK, REMOTE), key=lambda store: self._wait_s(store, is_urgent=is_urgent))

    def _wait_s(self, store: Store, *, is_urgent: bool) -> tuple[float, int]:
        """Return the seconds until a store would have read one more page, and the bytes queued at this store. If the
        times of two stores are equal, the bytes decide. While its rate is unknown, a store gets only one job per
        reader."""
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
        """Return the maximum number of pages of one job, and the maximum number of jobs. A reader should read a job
        within `_MAX_JOB_S`. While its rate is unknown, a store gets small jobs, one per reader."""
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
    """The number of host pages that were read for the prefetch of one handle."""

    __slots__ = ("num_pages", "request_id")
    num_pages: int
    request_id: str


class PrefetchCounters:
    """Counters of the decisions and outcomes of prefetches, and of the pages that prefetches read."""

    def __init__(self, context: EngineContext) -> None:
        count, histogram = context.metrics.counter, context.metrics.histogram

        def outcome(name: str, help: str) -> MetricCounter:
            return count(f"prefetch.{name}_requests", help, "prefetch_outcome_requests", outcome=name)

        self.requests = count("prefetch.requests", "prefetches that were requested")
        self.waited = outcome(
            "waited", "requests that waited because waiting was estimated to cost less than computing"
        )
        self.skipped = outcome("skipped", "requests that did not wait because computing was estimated to cost less")
        self.abandoned = outcome(
            "abandoned",
            "requests that stopped waiting because computing the remaining pages would take less time, or because no "
            "page was read",
        )
        self.overlapped = outcome(
            "overlapped", "requests whose first tokens were computed while their last pages were read"
        )
        self.overlap_computed = count(
            "prefetch.overlap_computed_tokens",
            "tokens that requests computed while pages of their later tokens were read",
        )
        self.overlap_loaded = count(
            "prefetch.overlap_loaded_tokens",
            "tokens that requests loaded from pages that were read while their first tokens were computed",
        )
        context.metrics.gauge(
            "prefetch.overlap_loaded_ratio",
            "overlap_loaded_tokens divided by the sum of overlap_loaded_tokens and overlap_computed_tokens",
            self._loaded_ratio,
        )
        self.coalesced = outcome("coalesced", "prefetches that waited for a read that another request had started")
        self.deferred = outcome(
            "deferred", "prefetches that waited because no host page was free or the queue of reads was full"
        )
        self.retries = count("prefetch.retries", "repeated attempts to start deferred prefetches")
        self.estimated_s = count("prefetch.estimated_seconds", "estimated duration of completed waits for stores")
        self.waited_s = histogram("prefetch.waited_seconds", "measured duration of completed waits for stores")
        self.lost = count("prefetch.lost_pages", "pages that a store had announced but could not return intact")
        self.read_tokens = count("prefetch.read_tokens", "tokens that prefetches added to the host tier")
        self.refused = count("prefetch.refused_jobs", "read jobs that were not queued because the queue was full")
        moved, took = (
            "bytes of verified pages that a job read from the store to the host",
            "time for which a read job occupied a reader thread",
        )
        self.moved: dict[Store, tuple[Histogram, Histogram]] = {}
        for store in context.stores:
            labels = {"operation": "read", "direction": f"{store.name}_to_host"}
            self.moved[store] = context.metrics.transfer(f"{store.prefix}prefetch", moved, took, **labels)

    def _loaded_ratio(self) -> float:
        return self.overlap_loaded.value / max(1, self.overlap_loaded.value + self.overlap_computed.value)


class HostShare:
    """Host pages that were read for requests that are not admitted yet, by request. Owned by the scheduler thread.

    A claim ends when the last handle of its request is garbage collected. So a request that its caller has dropped does
    not reduce the share forever. A handle may be garbage collected in any thread and during any call. The claim of a
    collected handle is added to `dropped`, and `forget_dropped` ends the claim. `num_pages`: host pages that all
    requests claim.
    """

    def __init__(self) -> None:
        self.num_pages = 0
        self.dropped = deque[_Claim]()
        self._claims: dict[str, _Claim] = {}

    @property
    def sole(self) -> str | None:
        """The request with a claim, if there is exactly one."""
        return next(iter(self._claims)) if len(self._claims) == 1 else None

    def of(self, request_id: str) -> int:
        claim = self._claims.get(request_id)
        return 0 if claim is None else claim.num_pages

    def add(self, handle: Prefetch, num_pages: int) -> None:
        """Count `num_pages` host pages, which were read for a request, as claimed by the request."""
        claim, request_id = self._claims.get(handle.request_id), handle.request_id
        if claim is None or claim() is not handle:
            held = 0 if claim is None else claim.num_pages
            claim = self._claims[request_id] = _Claim(handle, self.dropped.append)
            claim.request_id, claim.num_pages = request_id, held
        claim.num_pages += num_pages
        self.num_pages += num_pages

    def end(self, request_id: str) -> int:
        """End the claim of a request. Returns the number of pages of the claim."""
        claim = self._claims.pop(request_id, None)
        num_pages = 0 if claim is None else claim.num_pages
        self.num_pages -= num_pages
        return num_pages

    def forget_dropped(self) -> None:
        """End the claims of garbage collected handles."""
        while self.dropped:
            dropped = self.dropped.popleft()
            if self._claims.get(dropped.request_id) is dropped:
                self.end(dropped.request_id)


class _Backlog:
    """Bytes that each store reads before it reads the last page of a request: the bytes of urgent jobs in flight, then
    of the read lists of earlier requests."""

    def __init__(self, cost: CostModel, stores: Iterable[Store], jobs: Iterable[PageRead]) -> None:
        self._cost, self.num_bytes, self._until = cost, dict.fromkeys(stores, 0.0), dict[PageRead, float]()
        for job in jobs:
            if job.is_urgent and any(request.is_urgent for request in job.requests):
                self.num_bytes[job.store] += job.num_bytes
            self._until[job] = self.num_bytes[job.store]

    def add(self, request: PendingPrefetch) -> None:
        """Add the read list of the next request."""
        for store, num_bytes in self._listed(request):
            self.num_bytes[store] += num_bytes

    def until(self, request: PendingPrefetch) -> dict[Store, float]:
        """Return the bytes up to the last page of the request, for each store for which the request waits."""
        found = dict[Store, float]()
        for job in request.jobs:
            found[job.store] = max(found.get(job.store, 0), self._until[job])
        for store, num_bytes in self._listed(request):
            found[store] = max(found.get(store, 0), self.num_bytes[store]) + num_bytes
        return found

    def _listed(self, request: PendingPrefetch) -> list[tuple[Store, float]]:
        """Return the bytes of a read list by store. Pages that both stores have are divided in proportion to the
        stores' rates."""
        found = list[tuple[Store, float]]()
        for component, part in request.read_list.items():
            for stores, num_pages in enumerate(np.bincount(part.stores).tolist()):
                if num_pages and stores:
                    of_set = [store for store in self.num_bytes if stores & store.bit]
                    num_bytes = num_pages * component.host.page_bytes
                    found += [(store, share * num_bytes) for store, share in self._cost.parts(of_set).items()]
        return found


class Prefetcher(PageTransfer):
    """Owns all requests with a prefetch and applies their transitions. Scheduler thread only.

    `is_overlap_enabled`: whether prompts may be computed from their beginning while pages are read from their end;
    benchmarks set it to False. `least_overlap_pages`: the smallest number of missing pages for which a prompt is
    overlapped.

    `_requests`: all requests by id, until their prefetch ends. `_queues`: the requests in stage QUEUED or DEFERRED, by
    arrival, with separate queues for requests that wait for their prefetch. `_active`: the requests in stage
    LOOKING_UP, READING or OVERLAPPING. `_undecided`: the requests whose wait the policy may end; `_timed`: the requests
    with a deadline. `_has_changes`: since the last poll that visited requests, a request was added, began or ended, or
    a job was queued. `_num_to_choose`: the number of undecided requests for which waiting must still be compared with
    computing after a change; `_turn_at_s`: the time of the next comparisons; `_choose_at_s`: the earliest time at which
    a deadline, or a read without progress, may end a wait. `_look_at_s`: the time at which a deferred request may
    begin. `_num_planned`: full pages in all read lists.
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
        self._num_planned, self._has_been_full = 0, False
        self._submitted_s, self._retry_at_s = self._clock(), -math.inf
        self._look_at_s, self._num_quiet, self._inputs, self._has_changes = math.inf, 0, (0, 0, 0, 0), False
        self._choose_at_s, self._turn_at_s, self._num_to_choose = math.inf, math.inf, 0
        self.is_overlap_enabled, self.least_overlap_pages = True, _LEAST_OVERLAP_PAGES
        gauge = context.metrics.gauge
        gauge("prefetch.waiting_requests", "requests with a prefetch that has not ended", lambda: len(self._requests))
        gauge("prefetch.queued_reads", "prefixes whose pages are being read", lambda: len(self._active))
        help = "host pages that prefetches have claimed for requests that are not admitted yet"
        gauge("prefetch.claimed_pages", help, self._claimed)
        gauge(
            "prefetch.limit_pages",
            "maximum number of host pages that prefetches may claim, computed from prefetch_host_share",
            lambda: self._max_pages,
        )

    # Called by the engine

    def start(
        self, request_id: str, tokens: Tokens, namespace: str, mode: PrefetchMode, *, overlaps: bool = False
    ) -> Prefetch:
        """Prefetch pages of `tokens`, a prompt without the tokens that must be computed in any case. `overlaps`: in
        mode auto, the caller computes the prompt while its pages arrive."""
        if request_id in self._requests:
            return self._requests[request_id].handle
        if self._share.dropped:
            self._share.forget_dropped()
        now_s = self._clock()
        overlaps = overlaps and mode == "auto" and self.is_overlap_enabled
        handle = Prefetch(request_id, mode, now_s + self._context.config.prefetch_timeout_s, overlaps=overlaps)
        self._counters.requests.value += 1
        num_pages = len(tokens) // self._context.tree.page_size
        request = PendingPrefetch(next(self._arrivals), handle, tokens, namespace, now_s, num_pages, handle.waits)
        self._requests[request_id] = request
        self._has_changes = True
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
        """Raise PrefetchPending if a request must still wait for its admission."""
        request = self._requests.get(request_id)
        if request is not None and not request.handle.ready:
            raise PrefetchPending(f"prefetch of {request_id} is in flight: poll() until it is ready, or cancel it")

    def admit(self, lease: Lease) -> None:
        """Record that the request of a lease was admitted. Only reads of an overlapped prefill continue."""
        request = self._requests.get(lease.request_id)
        is_active = request is not None and request.stage in (Stage.LOOKING_UP, Stage.READING)
        if request is None or not is_active or request.is_idle or not self._can_overlap(request):
            self.cancel(lease.request_id)
        else:
            request.lease = lease
            self.apply(request, Event.ADMIT)

    def joined(self, lease: Lease, num_computed: int, num_loaded: int) -> None:
        """Record that an overlapped request loads `num_loaded` tokens after `num_computed` computed tokens."""
        self._counters.overlap_computed.value += num_computed
        self._counters.overlap_loaded.value += num_loaded
        self.apply(self._requests[lease.request_id], Event.JOIN)

    def end_reads(self, lease: Lease) -> None:
        """End the reads for a lease, because its prompt is computed or the lease ends."""
        if self._request_of(lease) is not None:
            self.cancel(lease.request_id)

    def unread(self, request_id: str) -> list[Unused]:
        """Return the pages that stores have for a request that is being admitted, and the reasons for which these pages
        were not read."""
        request = self._requests.get(request_id)
        if request is None or request.located is None:
            return []
        reason = MissReason.NO_ROWS if request.was_deferred or request.lacks_host_pages else MissReason.GATE
        if request.lookup is not None:  # admission does not wait for the answer of the store
            return [(request.num_usable, request.located.num_pages, reason)]
        arriving = np.flatnonzero(request.located.full & ~_IN_MEMORY)
        return [(start, end, reason) for start, end in spans(arriving.tolist())]

    def cancel(self, request_id: str) -> None:
        """End the reads for a request that was admitted or cancelled. Jobs continue if other requests need their
        pages."""
        self._prompts.forget(request_id)
        if self._share.end(request_id):
            self._retry_at_s = -math.inf
            self._has_changes = True
        if (request := self._requests.get(request_id)) is not None:
            self.apply(request, Event.CANCEL)

    def poll(self) -> bool:
        """Apply the answers of the stores, queue jobs, and compare waiting with computing again. Returns whether any
        request was affected. If nothing has changed, most polls only ask for answers of the stores."""
        answers = list[FindDone | ReadDone | Stalled]()
        for tier in self._tiers:
            for done in tier.reads.poll():
                assert not isinstance(done, LeaseDone), "an engine uses no leases of pages"
                answers.append(done)
        if not (answers or self._requests):
            return False
        answered, now_s = self._enter(answers) if answers else [], self._clock()
        load = self._load
        inputs = (len(load.running), len(load.expected), len(load.waiting), self._policy.cost.num_observed)
        is_new = self._has_changes or inputs != self._inputs or len(answers) > 0
        self._num_quiet += 1
        is_due = is_new or now_s >= min(self._look_at_s, self._choose_at_s) or self._num_quiet >= _LOOK_POLLS
        if not (is_due or now_s >= self._turn_at_s):
            return False
        has_changed, self.is_partly_applied = len(answers) > 0, True
        if is_due:
            self._inputs, self._num_quiet, self._has_changes = inputs, 0, False
            if self._share.dropped:
                self._share.forget_dropped()
            for request in answered:
                self.apply(request, Event.ANSWERED)
            if answered and self._undecided:
                self._choose(answered)
            if len(self._requests) > len(self._active):
                has_changed |= self._begin_next()
            has_changed |= self._submit()
            self._has_changes |= has_changed
            self._look_at_s = self._retry_at_s if self._retry_at_s > now_s else math.inf
        if self._undecided or self._timed:
            self._choose_again(is_new=is_new)
        else:
            self._choose_at_s = self._turn_at_s = math.inf
        self.is_partly_applied = False
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
        """Move a request to its next stage by the table in the module's docstring, and run the action. Raises
        `InvariantError` if the table lacks this pair of event and stage. An action that ends a request sets the stage
        ENDED last, so that an action that raised can be repeated."""
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
        """Locate the pages of a request in memory, and look up the missing pages in the first store."""
        context = self._context
        match = context.tree.match(request.tokens, request.namespace)
        prompt = self._prompts.of(request.tokens, request.namespace, match, request.handle.request_id)
        memory, overlaps = Located(context, prompt, match), request.handle.overlaps
        located = LookupResults(memory, partial(self._jobs.may_share, request))
        if located.num_usable == located.num_pages or not self._max_pages:
            self.apply(request, Event.EXHAUSTED)
            return
        request.located, request.num_usable, request.end = located, located.num_usable, located.num_pages
        request.missing = (first_gap(located.full == _IN_MEMORY), request.end)
        request.num_queried_stores = 0
        request.lacks_host_pages = request.has_failed = request.has_arrived = False
        for component in context.components:
            if component.name == FULL:
                pages = range(memory.device_end, memory.num_pages if overlaps else memory.host_end)
            else:
                pages = range(component.first_required(located.num_usable), located.num_usable)
            if pages:
                request.lock(component, memory.rows_of(component, pages).rows)
        if queried := located.unknown():
            request.lacks_host_pages = self._pages_left(request) <= 0 or not self._jobs.look_up(request, queried)
        if request.lacks_host_pages and located.is_empty:
            self.apply(request, Event.LACKS_PAGES)
        elif request.lookup is None:
            self.apply(request, Event.ANSWERED)

    def _plan(self, request: PendingPrefetch) -> None:
        """Make the read list of the longest prefix that all components can use and for which the host has capacity.
        Host pages that precede pages of the read list are locked."""
        located, full, handle = request.located, self._context.full, request.handle
        assert located is not None
        followed = np.flatnonzero((located.full[:-1] == _IN_MEMORY) & (located.full[1:] & ~_IN_MEMORY != 0))
        if len(followed):
            request.lock(full, located.memory.rows_of(full, followed.tolist()).rows)
        full_end = located.full_end
        found_end = end = located.usable_end(full_end)
        limit = located.end_with(min(self._pages_left(request), full.pages.capacity), full_end)
        if limit < found_end:
            end, request.lacks_host_pages = located.usable_end(limit), True
        for component in self._context.others:
            pages = range(max(located.num_usable, component.first_required(end)), end)
            request.lock(component, located.memory.rows_of(component, pages).rows)
        found_tokens = handle.read_tokens + located.num_arriving(found_end) * self._context.tree.page_size
        handle.found_tokens = max(handle.found_tokens, found_tokens)
        request.plan(end, self._clock())
        if REMOTE in self._context.stores:
            self._jobs.ask_remote_too(request)
        for component, part in request.read_list.items():
            if component is not full and np.count_nonzero(part.stores) > component.pages.capacity:
                request.read_list, request.awaited, request.lacks_host_pages = {}, NO_ROWS, True
                break
        self._note_planned(request)
        if request.is_idle:
            self._settle(request)

    def _advance(self, request: PendingPrefetch) -> None:
        """Remove from `awaited` all pages before the first page that has not arrived, and add these pages to the
        handle's `read_tokens`."""
        awaited, num_pages = request.awaited, 0
        if len(request.rows) or not len(awaited):
            while len(part := awaited[num_pages : num_pages + _MAX_PAGES]):
                has = self._context.full.pages.has(request.rows[part - request.first], HELD | COPY)
                num_pages += first_gap(has)
                if not has.all():
                    break
            request.awaited = awaited = awaited[num_pages:]
            request.missing = (request.end, request.end)
            if len(awaited):  # ascending, or descending for an overlapped prompt
                request.missing = (int(min(awaited[0], awaited[-1])), int(max(awaited[0], awaited[-1])) + 1)
            if num_pages:
                request.has_arrived = True
                request.handle.read_tokens += num_pages * self._context.tree.page_size
                request.progress_s = self._clock()
        if request.is_idle:
            self._settle(request)

    def _settle(self, request: PendingPrefetch) -> None:
        """Handle a request without jobs and with an empty read list. Failed pages are looked up again once, in all
        stores. Pages for which the host had no capacity are looked up again as long as each attempt reads at least one
        page."""
        lacks_pages = len(request.awaited) > 0 and request.missing[1] > request.computed_end
        is_again = (request.has_failed or lacks_pages) and not request.was_retried and self._clock() < request.until_s
        if is_again or (request.lacks_host_pages and request.has_arrived and self._pages_left(request) > 0):
            request.was_retried |= is_again
            self.apply(request, Event.RETRY)
        else:
            self.apply(request, Event.LACKS_PAGES if request.lacks_host_pages else Event.EXHAUSTED)

    def _restart(self, request: PendingPrefetch) -> None:
        """Look up the pages of a request again."""
        self._release(request)
        self._look_up(request)

    def _defer(self, request: PendingPrefetch) -> None:
        """Let a request wait for host pages, which become free when other requests are admitted or cancelled. If there
        are no other requests, or if the mode sets no bound on the wait, the request may be admitted at once."""
        self._release(request)
        handle = request.handle
        if not request.was_deferred:
            self._counters.deferred.value += 1
            if not self._has_been_full and self._pages_left(request) <= 0 and (claimed := self._claimed()):
                self._has_been_full = True
                log.warning(
                    "prefetches wait for host pages: %d are claimed by requests that were not admitted, "
                    "prefetch_host_share=%g allows %d; raise it, or host_bytes",
                    claimed,
                    self._context.config.prefetch_host_share,
                    self._max_pages,
                )
        request.was_deferred = True
        has_others = len(self._active) or self._share.num_pages > self._share.of(handle.request_id)
        if handle.waits and (handle.mode == "wait_complete" or not has_others):
            self._stop_waiting(request)

    def _overlap(self, request: PendingPrefetch) -> None:
        """Continue to read from the end of the prompt while the GPU computes the prompt from its beginning."""
        assert request.lease is not None
        request.computed_end = request.lease.cached_len // self._context.tree.page_size
        self._counters.overlapped.value += 1

    def _join(self, request: PendingPrefetch) -> None:
        """Record that pages that arrived were loaded to the device. If the prompt lacks no other page of the read list,
        read the pages for which the host had no capacity before."""
        assert request.lease is not None
        page, cached_len = self._context.tree.page_size, request.lease.cached_len
        request.computed_end = cached_len // page
        if cached_len < request.end * page:
            return
        if request.lacks_host_pages:
            self._share.end(request.handle.request_id)
            self.apply(request, Event.RETRY)
        else:
            self.cancel(request.handle.request_id)

    def _stop_reading(self, request: PendingPrefetch) -> None:
        """End the reads of an overlapped request. Pages that arrived stay locked until `join` loads them."""
        request.handle.end()
        request.read_list.clear()
        request.lookup = None
        self._jobs.stop_waiting(request)
        self._note_planned(request)

    def _complete(self, request: PendingPrefetch) -> None:
        """End the prefetch, and record the estimated and the measured seconds of its wait."""
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
        self._has_changes = True
        self._jobs.stop_waiting(request)
        request.release()
        self._num_planned -= request.num_planned
        request.num_planned = 0

    # Turns

    def _may_begin(self, *, waits: bool) -> bool:
        """Return whether another request may become active. Lookups of cancelled requests count as active. Requests
        that do not wait for their prefetch are counted separately, so they never delay requests that wait."""
        if self._jobs.num_awaited_lookups >= _MAX_ACTIVE * len(self._context.stores):
            return False
        num_waiting: int = sum(map(_WAITS, self._active))
        return (num_waiting if waits else len(self._active) - num_waiting) < _MAX_ACTIVE

    def _begin_next(self) -> bool:
        """Start queued requests until enough requests are active, and sometimes a deferred request. Returns whether any
        request was started."""
        num_tokens = 0
        while num_tokens < _MAX_STARTED_TOKENS and (request := self._next_queued()) is not None:
            self._counters.retries.value += request.stage is Stage.DEFERRED
            num_tokens += len(request.tokens)
            self.apply(request, Event.BEGIN)
        return num_tokens > 0

    def _next_queued(self) -> PendingPrefetch | None:
        """Return the request to start next: the earliest request that waits for its prefetch, else the earliest request
        that does not wait. A deferred request is started if the host has pages for it, but at most one request per
        `_RETRY_S`."""
        for waits in (True, False):
            queued, deferred = self._queues[waits, Stage.QUEUED], self._queues[waits, Stage.DEFERRED]
            if not (queued or deferred) or not self._may_begin(waits=waits):
                continue
            first = queued[:1]
            if deferred and self._clock() >= self._retry_at_s:
                first += [request for request in self._retriable(deferred) if self._pages_left(request) > 0]
            if first:
                request = min(first, key=_ARRIVAL)
                if request.stage is Stage.DEFERRED:
                    self._retry_at_s = self._clock() + _RETRY_S
                return request
        return None

    def _retriable(self, deferred: list[PendingPrefetch]) -> list[PendingPrefetch]:
        """Return the deferred requests that may be retried, at most one: the first one. If prefetches claim all pages
        that they may claim, only a request that claims all of them alone may be retried."""
        if self._claimed() < self._max_pages:
            return deferred[:1]
        sole = self._requests.get(self._share.sole or "")
        is_queued = sole is not None and sole.stage is Stage.DEFERRED and self._queue_of(sole) is deferred
        return [sole] if sole is not None and is_queued else []

    def _queue_of(self, request: PendingPrefetch) -> list[PendingPrefetch]:
        return self._queues[request.handle.waits, request.stage]

    def _discard(self, request: PendingPrefetch) -> None:
        """Remove a request from its queue."""
        requests = self._queues[request.handle.waits, request.stage]
        at = bisect_left(requests, request.arrival, key=_ARRIVAL)
        if at < len(requests) and requests[at] is request:
            del requests[at]

    # Host pages

    def _claimed(self) -> int:
        """Return the number of full host pages that prefetches claim: pages that were read for requests before their
        admission, pages in flight, and pages in read lists."""
        return self._share.num_pages + self._jobs.num_pages + self._num_planned

    def _note_planned(self, request: PendingPrefetch) -> None:
        """Update the sum of planned pages after a change of a read list."""
        part, before = request.read_list.get(self._context.full), request.num_planned
        request.num_planned = 0 if part is None else int(np.count_nonzero(part.stores))
        self._num_planned += request.num_planned - before

    def _pages_left(self, request: PendingPrefetch) -> int:
        """Return the number of pages that may still be read for a request: the unclaimed pages of the prefetch share,
        or of the complete host pool if no other request claims pages."""
        claimed, full = self._claimed(), self._context.full
        if not claimed:
            return full.host.num_pages
        own = self._share.of(request.handle.request_id) + request.num_planned
        own += len(request.waited.get(full, NO_ROWS))
        return max(0, (self._max_pages if claimed > own else full.host.num_pages) - claimed)

    # Answers and jobs

    def _enter(self, answers: Sequence[FindDone | ReadDone | Stalled]) -> list[PendingPrefetch]:
        """Apply the answers of the stores. Returns the requests whose lookups have all been answered."""
        self.is_partly_applied, answered = True, list[PendingPrefetch]()
        for kind, ended in itertools.groupby(answers, type):
            if kind is ReadDone:
                self._apply_reads(cast("Iterable[ReadDone]", ended))
                continue
            for done in ended:
                if not isinstance(done, ReadDone) and done.ticket in self._jobs.lookups:
                    answered += self._note_answer(done)
                    continue
                for request in self._jobs.give_back(self._jobs.reads[done.ticket]):
                    self.apply(request, Event.EXHAUSTED)
        return answered

    def _note_answer(self, done: FindDone | Stalled) -> list[PendingPrefetch]:
        """Apply the answer or the stall of a lookup, and query the next store. Returns the request if all stores have
        answered. A late answer adds a store to the read list."""
        lookup = self._jobs.take_lookup(done)
        if lookup is None:
            return []
        request = lookup.request
        if request.lookup is not lookup:
            if request.lookup is None and isinstance(done, FindDone):
                for component, part in request.read_list.items():
                    request.find_stores(component, part.rows)
            return []
        request.lookup = None
        return [] if self._jobs.look_up(request) else [request]

    def _submit(self) -> bool:
        """Reserve host pages and queue a bounded number of jobs. Returns whether any job was queued. If a request gets
        no host page while it has pages in flight, this request blocks all later requests. A request without pages in
        flight is deferred instead."""
        num_jobs, num_pages, has_capacity = 0, 0, True
        now_s = self._clock()
        num_steps, self._submitted_s = (now_s - self._submitted_s) / _STEP_S, now_s
        with_list = [*filter(_READ_LIST, self._active)]
        for request in _in_turn(with_list) if len(with_list) > 1 else with_list:
            had_coalesced, more = request.has_coalesced, 1
            if request.handle.is_preemptible:
                more = min(_MOST_STEPS, max(4, int(num_steps)))
            num_times, max_jobs, max_pages = max(1, more // 4), more * _MAX_JOBS, more * _MAX_PAGES
            chosen = self._jobs.next_of(request, num_times)
            while chosen is not None and has_capacity and num_jobs < max_jobs and num_pages < max_pages:
                queued = self._jobs.read(request, chosen, max_jobs - num_jobs, max_pages - num_pages)
                num_jobs, num_pages, has_capacity = num_jobs + queued[0], num_pages + queued[1], queued[0] > 0
                if num_jobs < max_jobs and num_pages < max_pages:
                    chosen = self._jobs.next_of(request, num_times) if request.read_list else None
            self._counters.coalesced.value += request.has_coalesced and not had_coalesced
            self._note_planned(request)
            if not (has_capacity or request.jobs):
                self.apply(request, Event.LACKS_PAGES)
                has_capacity = True
            elif request.is_idle:
                self.apply(request, Event.ARRIVED)
        lost_reads, self._jobs.lost_reads = self._jobs.lost_reads, []
        for request in lost_reads:
            if request.stage in (Stage.READING, Stage.OVERLAPPING):
                self.apply(request, Event.ARRIVED)
        return num_jobs > 0

    def _apply_reads(self, answers: Iterable[ReadDone]) -> None:
        """Assign the pages that jobs have read to the requests that wait for these pages. If a job could not read a
        page, the page is read from the other store. If the other store lacks the page too, the request cannot use the
        pages after it."""
        full, ended, waiting = self._context.full, self._jobs.take(answers), dict[PendingPrefetch, None]()
        claims = Counter[Prefetch]()
        for job in ended:
            if (
                job.component is full and job.requests and len(job.read_rows)
            ):  # the earliest request of the job claims its pages
                claims[min(job.requests, key=_ARRIVAL).handle] += len(job.read_rows)
            waiting |= job.requests
            for request in job.requests:
                del request.jobs[job]
        for handle, num_pages in claims.items():
            self._share.add(handle, num_pages)
        now_s, lost = self._clock(), list[tuple[PendingPrefetch, CacheComponent, Rows]]()
        for request in waiting:
            for component, rows in request.waited.items():
                states = component.pages.state[rows]
                is_read, is_held = states & READ != 0, states & HELD != 0
                request.waited[component] = rows[is_read]
                if is_held.any():
                    request.lock(component, rows[is_held])
                    request.num_arrived += int(np.count_nonzero(is_held)) if component is full else 0
                    request.progress_s = now_s if request.handle.overlaps else request.progress_s
                if not (is_read | is_held).all():
                    lost.append((request, component, rows[~(is_read | is_held)]))
        for request, component, rows in lost:
            self._read_elsewhere(request, component, rows, [job for job in ended if job.component is component])
        for request in waiting:
            self.apply(request, Event.ARRIVED)

    def _read_elsewhere(
        self, request: PendingPrefetch, component: CacheComponent, rows: Rows, ended: Sequence[PageRead]
    ) -> None:
        """Read from the other store the pages that the `ended` jobs could not read."""
        for store in {job.store for job in ended}:
            of_store = np.concatenate([job.rows for job in ended if job.store is store])
            dropped = request.read_elsewhere(component, rows[np.isin(rows, of_store)], store)
            if len(dropped):
                self._cut(request, int(dropped.min()))
        self._note_planned(request)

    def _cut(self, request: PendingPrefetch, page: int) -> None:
        """Record that a page does not arrive. The pages after this page are of no use, unless the page is a full page
        that an overlapped request computes."""
        request.has_failed, located = True, request.located
        assert located is not None
        if not request.handle.overlaps:
            request.read_list.clear()
            self._jobs.stop_waiting(request, lambda _, pages: pages > page)
        elif located.usable_end(request.end) < request.end:
            request.read_list.clear()
            self._jobs.stop_waiting(request)

    # Overlapped prefills

    def is_next_on_host(self, lease: Lease, num_tokens: int) -> bool:
        """Return whether the host has the page after the first `num_tokens` tokens, which are computed."""
        page = num_tokens // self._context.tree.page_size
        if page >= len(lease.keys) or self._request_of(lease) is None:
            return False
        return lease.keys[page] in self._context.full.pages

    def next_stop(self, lease: Lease, start: int, end: int) -> int:
        """Return the position, at most `end`, at which a pass from token `start` should end. The pass ends at a page
        boundary before the next page that has arrived, and about where computing and reading will meet. Reads of pages
        that the pass computes are cancelled."""
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
        self._jobs.stop_waiting(request, lambda at, indices: (indices < computed) & (at.name == FULL))
        return end

    def _request_of(self, lease: Lease) -> PendingPrefetch | None:
        """Return the prefetch of a lease, if pages are still read for it."""
        request = self._requests.get(lease.request_id)
        return request if request is not None and request.lease is lease else None

    def _can_overlap(self, request: PendingPrefetch) -> bool:
        """Return whether a request lacks enough pages to be overlapped."""
        return request.handle.overlaps and request.end - request.missing[0] >= self.least_overlap_pages

    def _is_worth_computing(self, request: PendingPrefetch, wait_s: float | None) -> bool:
        """Return whether an overlapped prefill would compute enough pages before the other pages arrive. `wait_s`:
        estimated seconds until all missing pages have arrived; None if unknown."""
        start, end = request.missing
        page = self._context.tree.page_size
        compute_s = self._policy.cost.prefill_s(start * page, end * page)
        return wait_s is None or not compute_s or wait_s >= _LEAST_COMPUTED_SHARE * (wait_s + compute_s)

    def _meeting(self, request: PendingPrefetch, start: int, end: int) -> int:
        """Return the position, at most `end`, at which computing and reading meet if both continue at their rates. If
        the present reads of the request are slower than the measured rates, the speed of the present reads is used."""
        page = self._context.tree.page_size
        num_left = request.missing[1] * page - start
        compute_s = self._policy.cost.prefill_s(start, start + num_left) if num_left > 0 else None
        if not compute_s or not len(request.awaited):
            return end
        read_s = self._rest_s(request, num_left // page)
        if not (read_s or request.num_arrived):
            return end
        # The pages that arrived since the reads began, and the pages of the first job in flight, as if this job ended
        # now.
        num_pages = request.num_arrived + next((len(job.rows) for job in request.jobs), 0)
        if num_pages:
            read_s = max(read_s, (self._clock() - request.begun_s) * num_left / (num_pages * page))
        num_tokens = max(_LEAST_PASS_PAGES * page, int(num_left * read_s / (read_s + compute_s)))
        return (start + num_tokens) // page * page

    def _rest_s(self, request: PendingPrefetch, num_pages: int) -> float:
        """Return the seconds in which the stores of a request read `num_pages` in parallel, by their measured rates; 0
        if no rate is known."""
        stores = {job.store for job in request.jobs}
        bits = [int(np.bitwise_or.reduce(part.stores)) for part in request.read_list.values()]
        stores.update(store for store in self._context.stores if any(of & store.bit for of in bits))
        num_bytes = num_pages * self._context.full.host.page_bytes
        rates = [1 / read_s for store in stores if (read_s := self._read_s(store, num_bytes))]
        return 1 / sum(rates) if rates else 0.0

    # Load or recompute

    def _choose_again(self, *, is_new: bool) -> None:
        """End the waits whose deadline has passed. After a change, or if a wait may have become too long, compare
        waiting with computing again for the other requests, for a bounded number of requests at each poll."""
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
            self._undecided.update(
                {request: None for request in turn if request.is_urgent}
            )  # urgent requests are compared again later; the policy ends no wait of other requests
            self._choose(turn)

    def _choose(self, requests: Iterable[PendingPrefetch]) -> None:
        """In mode auto, end the waits that delay all requests more than computing the missing pages. A request that
        stops waiting no longer delays the reads of later requests. A preemptible request stops being preemptible if
        waiting for its pages would delay all requests more than computing them. Active requests are compared in the
        order in which they queue jobs, then queued requests."""
        waiting = {r: None for r in requests if r.handle.mode == "auto" and r.is_urgent and not r.handle.ended}
        if not waiting:
            return
        backlog = _Backlog(self._policy.cost, self._context.stores, self._jobs.reads.values())
        num_delayed, now_s = self._load.num_delayed(), self._clock()
        queued = [request for request in waiting if request not in self._active]
        for request in (*_in_turn(self._active), *queued):
            if request in waiting:
                num_delayed += self._compare(request, backlog, num_delayed, now_s)
            if request.read_list and request.is_urgent:
                backlog.add(request)

    def _compare(self, request: PendingPrefetch, backlog: _Backlog, num_delayed: int, now_s: float) -> bool:
        """Compare waiting with computing for one request. Returns whether the request stops waiting. `num_delayed`: the
        number of other requests that computing would delay now. If `num_delayed` is 0, an overlapped prefill waits only
        for lookups, unless the stores read much faster than the GPU computes.

        For a wait in progress, the number of delayed requests at the beginning of the wait is used. The present number
        of delayed requests is 0 when all requests wait, and would then end all waits together. A wait in progress may
        exceed its limit by the factor `_TOLERANCE`, because read rates vary with parallel writes. If no page arrives
        for the time that computing would take, the wait ends. So a stalled disk at most doubles the time of a request.
        """
        page, has_begun = self._context.tree.page_size, request.num_delayed is not None
        # Windows and states are read last, and full pages are of no use without them.
        start, end = request.missing if len(self._context.components) == 1 else (0, request.end)
        start, end = max(request.num_usable, request.computed_end, start) * page, end * page
        if start >= end:
            return False
        wait_s, no_progress_s, policy = self._wait_s(request, backlog), now_s - request.progress_s, self._policy
        if request.handle.is_preemptible:
            others = num_delayed - self._load.is_delayed(request.handle.request_id)
            estimate = policy.compare_wait(wait_s, start, end, others)
            if others and not estimate.is_worth_loading(no_progress_s):
                self._stop_waiting(request)
            elif others:
                self._note_limit(request, estimate.delay_s)
            return False
        if not num_delayed and self._can_overlap(request):
            compute_s = policy.cost.longest_wait_s(start, end)
            likely_s = None if wait_s is None else max(wait_s, no_progress_s)
            if request.stage is Stage.READING:
                overlaps = self._is_worth_computing(request, likely_s)
            else:
                overlaps = no_progress_s > _ANSWER_SHARE * compute_s
            if overlaps and math.isfinite(compute_s):
                self._stop_waiting(request, is_preemptible=True)
                return True
            self._note_limit(request, 0.0 if math.isfinite(compute_s) else math.inf)
        num_delayed = num_delayed if request.num_delayed is None else request.num_delayed
        estimate = policy.compare_wait(wait_s, start, end, num_delayed)
        if not estimate.is_worth_loading(no_progress_s, _TOLERANCE if has_begun else 1.0):
            self._log_first(estimate)
            is_first = request.stage is Stage.READING and not has_begun
            (self._counters.skipped if is_first else self._counters.abandoned).value += 1
            self._stop_waiting(request)
            return True
        self._note_limit(request, estimate.delay_s)
        if request.stage is Stage.READING and not has_begun:
            request.num_delayed, request.chosen_s, request.estimate_s = num_delayed, now_s, wait_s
            self._counters.waited.value += 1
        return False

    def _note_limit(self, request: PendingPrefetch, no_progress_s: float) -> None:
        """Schedule another comparison for a request when none of its pages has arrived for `no_progress_s`."""
        self._choose_at_s = min(self._choose_at_s, request.progress_s + no_progress_s)

    def _stop_waiting(self, request: PendingPrefetch, *, is_preemptible: bool = False) -> None:
        """End the wait of a request. From now on, the request counts as delayed by the computing of other requests."""
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
        """Return the estimated seconds until the last page of a request is on the device, including the jobs queued
        before its jobs. Stores read in parallel. For a queued request, the result is a lower bound; None if no estimate
        is possible."""
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
    (Stage.QUEUED, Event.BEGIN): (Stage.LOOKING_UP, Prefetcher._look_up),
    (Stage.DEFERRED, Event.BEGIN): (Stage.LOOKING_UP, Prefetcher._look_up),
    (Stage.LOOKING_UP, Event.ANSWERED): (Stage.READING, Prefetcher._plan),
    (Stage.OVERLAPPING, Event.ANSWERED): (Stage.OVERLAPPING, Prefetcher._plan),
    (Stage.READING, Event.ARRIVED): (Stage.READING, Prefetcher._advance),
    (Stage.OVERLAPPING, Event.ARRIVED): (Stage.OVERLAPPING, Prefetcher._advance),
    (Stage.READING, Event.RETRY): (Stage.LOOKING_UP, Prefetcher._restart),
    (Stage.OVERLAPPING, Event.RETRY): (Stage.OVERLAPPING, Prefetcher._restart),
    (Stage.LOOKING_UP, Event.LACKS_PAGES): (Stage.DEFERRED, Prefetcher._defer),
    (Stage.READING, Event.LACKS_PAGES): (Stage.DEFERRED, Prefetcher._defer),
    (Stage.OVERLAPPING, Event.LACKS_PAGES): (Stage.OVERLAPPING, Prefetcher._stop_reading),
    (Stage.LOOKING_UP, Event.EXHAUSTED): (Stage.ENDED, Prefetcher._complete),
    (Stage.READING, Event.EXHAUSTED): (Stage.ENDED, Prefetcher._complete),
    (Stage.OVERLAPPING, Event.EXHAUSTED): (Stage.OVERLAPPING, Prefetcher._stop_reading),
    (Stage.LOOKING_UP, Event.ADMIT): (Stage.OVERLAPPING, Prefetcher._overlap),
    (Stage.READING, Event.ADMIT): (Stage.OVERLAPPING, Prefetcher._overlap),
    (Stage.OVERLAPPING, Event.JOIN): (Stage.OVERLAPPING, Prefetcher._join),
    (Stage.QUEUED, Event.CANCEL): (Stage.ENDED, Prefetcher._forget),
    (Stage.LOOKING_UP, Event.CANCEL): (Stage.ENDED, Prefetcher._forget),
    (Stage.READING, Event.CANCEL): (Stage.ENDED, Prefetcher._forget),
    (Stage.DEFERRED, Event.CANCEL): (Stage.ENDED, Prefetcher._forget),
    (Stage.OVERLAPPING, Event.CANCEL): (Stage.ENDED, Prefetcher._forget),
}
