"""Who waits for a prefetch, and the jobs that bring what is waited for: `HostRun.wanted` and `HostRun.job`."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hicache.flow.components.base import CacheComponent
from hicache.flow.lease import Lease, Prefetch
from hicache.flow.located import Question, StoreAnswers, ToRead
from hicache.host.run import HostRun, spans
from hicache.tiers import FULL, Store
from hicache.tree.key import Tokens


@dataclass(eq=False, slots=True)
class Asked:
    """A request that waits for pages, or is computed while they come.

    `has`: where its pages are, as far as the stores have answered; None: not asked yet, or no more. `find`: the job
    that asks a store, until it is answered; `num_stores_asked`: in the order of `Readers`. `to_read`: what nobody
    brings yet, full pages first. `runs`: in flight, whoever asked first.
    `to_come`: full pages [start, end) that have not come, of those that are to. `locked`: runs of the host that it
    continues; `tail`: the last of full pages that came, so that those stay where all in flight has come.

    [num_usable, coming[0])   of its prompt, have come without a gap
    [coming)                  are to come
    [coming[1], end)          have come, where they are read from the end

    `lease`: it is computed meanwhile; `computed_end`: pages that are, or will be by the pass that comes. `begun_s`:
    when its reads began; `num_came`: full pages that these brought.

    `num_planned`: full pages that it is to read itself. `is_short`: stores have more, for which there was no room.
    `has_failed`: something did not come; `was_asked_again`: for that. `has_landed`: something came since the stores
    were asked. `is_postponed`: it waits for room.

    `progress_s`: when something last landed. `decided_s`: when it chose to wait; `estimate_s`: for how long, where that
    is known; `num_delayed`: the others that computing would have delayed then.
    """

    arrival: int
    handle: Prefetch
    tokens: Tokens
    namespace: str
    progress_s: float
    end: int
    has: StoreAnswers | None = None
    find: Find | None = None
    num_stores_asked: int = 0
    is_found: bool = False
    to_read: deque[ToRead] = field(default_factory=deque)
    to_come: deque[tuple[int, int]] = field(default_factory=deque)
    runs: dict[HostRun, None] = field(default_factory=dict)
    locked: list[tuple[CacheComponent, list[HostRun]]] = field(default_factory=list)
    tail: HostRun | None = None
    num_usable: int = 0
    coming: tuple[int, int] = (0, 0)
    lease: Lease | None = None
    computed_end: int = 0
    begun_s: float = 0.0
    num_came: int = 0
    num_planned: int = 0
    is_short: bool = False
    has_failed: bool = False
    was_asked_again: bool = False
    has_landed: bool = False
    has_shared: bool = False
    is_postponed: bool = False
    estimate_s: float | None = None
    decided_s: float | None = None
    num_delayed: int | None = None

    @property
    def is_urgent(self) -> bool:
        """Whether it waits for what comes, or would."""
        return self.handle.waits or self.handle.is_preemptible

    @property
    def turn(self) -> tuple[bool, int]:
        """What is urgent comes before what is not, then who came first."""
        return not self.is_urgent, self.arrival

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is in flight, or to be read."""
        return self.find is None and not (self.to_read or self.runs)

    @property
    def until_s(self) -> float:
        """When nothing more is read for it."""
        return self.handle.deadline_s if self.handle.mode == "timeout" else math.inf

    def begin(self, has: StoreAnswers) -> None:
        """It is known which of its pages are here, or come for others."""
        self.has, self.num_usable, self.end, self.num_stores_asked = has, has.num_usable, has.located.num_pages, 0
        self.coming = (has.first_gap, self.end)
        self.is_found = self.is_short = self.has_failed = self.has_landed = False

    def plan(self, end: int, now_s: float) -> None:
        """It is known where its other pages are: what a prefix of `end` pages needs is to be read. What should have
        come before, behind a gap, may be here already."""
        assert self.has is not None
        self.is_found, self.end, self.begun_s, self.num_came = True, end, now_s, 0
        self.to_read.extend(self.has.to_read(end))
        self._sort()
        coming = sorted([(piece.start, piece.end) for piece in self.to_read if piece.component.name == FULL])
        if self.to_come:
            before = [(start, min(stop, end)) for start, stop in self.to_come]
            coming = spans(sorted({index for interval in (*before, *coming) for index in range(*interval)}))
        self.to_come = deque(coming)
        self.coming = (self.coming[0], end)

    def _sort(self) -> None:
        """What is to be read first comes first: windows and states, for they are at the end, then full pages from there
        on; or full pages from the start on, then the others."""
        from_end = self.handle.overlaps
        self.to_read = deque(
            sorted(
                self.to_read,
                key=lambda piece: (
                    (piece.component.name == FULL) == from_end,
                    -piece.start if from_end else piece.start,
                ),
            )
        )

    @property
    def lacks_end(self) -> bool:
        """Whether windows or states at the end of a prompt, without which the request cannot join full pages, have not
        come. Full pages are not read before."""
        if not self.handle.overlaps:
            return False
        to_read = any(piece.component.name != FULL for piece in self.to_read)
        return to_read or any(run.job.component.name != FULL for run in self.runs)

    def num_to_read(self, component: CacheComponent) -> int:
        """Pages of a component that it is to read itself."""
        num_pages = 0
        for piece in self.to_read:
            if piece.component is component and piece.stores:
                num_pages += piece.end - piece.start
        return num_pages

    def add_store(self) -> None:
        """The other store has some of the pages that are to be read, too."""
        assert self.has is not None
        pieces = [*self.to_read]
        self.to_read.clear()
        for piece in pieces:
            if piece.stores:
                self.to_read.extend(self.has.pieces(piece.component, range(piece.start, piece.end)))
            else:
                self.to_read.append(piece)
        self._sort()

    def own_pages(self, component: CacheComponent, first: int, keys: Sequence[bytes]) -> range:
        """Of pages with these keys, from the `first` of a prompt on, those that its own prompt has: both may part."""
        assert self.has is not None
        key, most = self.has.located.prompt.key, self.has.located.num_pages - first
        parts = range(max(0, min(len(keys), most)))
        end = bisect_left(parts, True, key=lambda i: key(component.name, first + i) != keys[i])
        return range(first, first + end)

    def read_elsewhere(self, component: CacheComponent, indices: Sequence[int], store: Store) -> list[int]:
        """These pages, ascending, do not come from `store`, and are to be read from the other store. Returns those that
        it lacks."""
        assert self.has is not None
        gone = self.has.lose(component, indices, store)
        left = [index for index in indices if index not in gone] if gone else indices
        if left and not self.handle.ended:
            self.to_read.extend(self.has.pieces(component, left))
            self._sort()
        return gone

    def lock(self, component: CacheComponent, runs: list[HostRun]) -> None:
        """These stay as long as something comes that continues them."""
        if runs:
            component.index.lock(runs)
            self.locked.append((component, runs))

    def follow(self, component: CacheComponent, came: Sequence[HostRun], now_s: float) -> None:
        """What comes next follows these runs, of a job, which have come: the last stays, and what it follows. Where
        they come in another order, from the end or from two stores, all stay until they are joined."""
        if not came:
            return
        is_ordered = not self.handle.overlaps and (self.has is None or self.has.num_stores == 1)
        if not is_ordered:
            self.lock(component, [*came])
        if self.handle.overlaps:
            self.progress_s = now_s
        if component.name != FULL:
            return
        self.num_came += sum([len(run.keys) for run in came])
        if not is_ordered and self.has is not None:
            keys = self.has.located.prompt.keys
            component.index.link(keys[max(0, came[0].first - 1) : came[-1].first + len(came[-1].keys) + 1])
        elif self.tail is None or came[-1].first > self.tail.first:
            component.index.lock([came[-1]])
            if self.tail is not None:
                component.index.unlock([self.tail])
            self.tail = came[-1]

    def may_share(self, run: HostRun | None) -> bool:
        """Whether it may wait for a run that a read brings."""
        return run is not None and run.job is not None and run.job.is_for(self)

    def must_read(self, run: HostRun | None) -> bool:
        """Whether a page, of `run` or of none, is neither here nor comes for others."""
        return run is None or not (run.is_coming or self.may_share(run))

    def share(self, at: int = 0) -> bool:
        """Of what is to be read, leave out of the piece `at` what is here by now and join what others bring; whether
        any of it is nobody's. A piece of which nothing is left is none."""
        assert self.has is not None
        prompt, from_end = self.has.located.prompt, self.handle.overlaps
        component, stores, start, end = piece = self.to_read[at]
        is_full = component.name == FULL
        start = min(end, max(start, self.computed_end)) if is_full else start
        while start < end:
            run = component.index.find(prompt.key(component.name, end - 1 if from_end else start))
            if self.must_read(run):
                break
            assert run is not None
            if not run.is_coming:
                run.wanted[self] = self.runs[run] = None
                self.has_shared = True
            if from_end:
                end = run.common_start(prompt.keys, start, end) if is_full else end - 1
            else:
                start = run.common_end(prompt.keys, start, end) if is_full else start + 1
        self.to_read[at] = piece._replace(start=start, end=end)
        if start == end:
            del self.to_read[at]
        elif not stores:  # who was to bring it did not
            self.has_failed = True
            self.to_read.clear()
        return start < end and bool(stores)

    def next_pages(self, at: int, max_pages: int) -> range:
        """Of the piece `at`, pages that nobody brings: from the end on where its request is computed from the
        beginning."""
        assert self.has is not None
        component, _, start, end = self.to_read[at]
        find, key = component.index.find, self.has.located.prompt.key
        if self.handle.overlaps:
            first = end
            while first > max(start, end - max_pages) and self.must_read(find(key(component.name, first - 1))):
                first -= 1
            return range(first, end)
        stop = start
        while stop < min(end, start + max_pages) and self.must_read(find(key(component.name, stop))):
            stop += 1
        return range(start, stop)

    def advance(self, full: CacheComponent) -> int:
        """How far its full pages have come without a gap: how many more than before."""
        assert self.has is not None
        num_pages = self._advance_from_end(full) if self.handle.overlaps else self._advance_from_start(full)
        self.coming = (self.to_come[0][0], self.to_come[-1][1]) if self.to_come else (self.end, self.end)
        self.has_landed |= num_pages > 0
        return num_pages

    def _advance_from_start(self, full: CacheComponent) -> int:
        assert self.has is not None
        find, keys, num_pages = full.index.find, self.has.located.prompt.keys, 0
        while self.to_come:
            start, end = self.to_come.popleft()
            num_pages -= start
            while start < end and (run := find(keys[start])) is not None and run.is_coming:
                start = run.common_end(keys, start, end)
            num_pages += start
            if start < end:
                self.to_come.appendleft((start, end))
                break
        return num_pages

    def _advance_from_end(self, full: CacheComponent) -> int:
        assert self.has is not None
        find, keys, num_pages = full.index.find, self.has.located.prompt.keys, 0
        while self.to_come:
            start, end = self.to_come.pop()
            num_pages += end
            while start < end and (run := find(keys[end - 1])) is not None and run.is_coming:
                end = run.common_start(keys, start, end)
            num_pages -= end
            if start < end:
                self.to_come.append((start, end))
                break
        return num_pages

    @property
    def lacks(self) -> bool:
        """Whether pages that were to come, and were not computed meanwhile, have not."""
        return bool(self.to_come) and self.to_come[-1][1] > self.computed_end

    def have_no_room(self) -> None:
        """Nothing is read for it now."""
        self.to_read.clear()
        self.to_come.clear()
        self.is_short = True

    def stop_reading(self) -> list[ReadOfRuns]:
        """Nothing more is to come for it; what has stays. Returns jobs that nobody waits for now."""
        self.handle.end()
        self.to_read.clear()
        self.find = None
        return self.leave([*self.runs])

    def cut(self, index: int) -> list[ReadOfRuns]:
        """Page `index` does not come. Pages behind it are of no use, unless the request computes the page: a full page,
        but no state or window at the end. Returns jobs without waiting requests."""
        assert self.has is not None
        self.has_failed = True
        overlaps = self.handle.overlaps
        if overlaps and self.has.usable_end(self.end) == self.end:
            return []
        self.to_read.clear()
        return self.leave([run for run in self.runs if overlaps or run.first > index])

    def leave(self, runs: Iterable[HostRun]) -> list[ReadOfRuns]:
        """Wait for these runs no more. Returns jobs that nobody waits for now."""
        jobs = dict[ReadOfRuns, None]()
        for run in runs:
            del run.wanted[self], self.runs[run]
            jobs[run.job] = None
        return [job for job in jobs if not job.wanted]

    def release(self) -> list[ReadOfRuns]:
        """It waits for nothing that is in flight, and what it continues may leave. Returns jobs that nobody waits for
        now."""
        for component, runs in self.locked:
            component.index.unlock(runs)
        if self.has is not None:
            located = self.has.located
            located.context.full.index.unlock([self.tail] if self.tail is not None else [])
            self.is_found, self.end = False, located.num_pages
            self.coming = (self.coming[0], self.end)
        self.locked, self.tail, self.has = [], None, None
        self.find = None
        self.to_read.clear()
        return self.leave([*self.runs])


@dataclass(eq=False, slots=True)
class Find:
    """A job that asks a store for the pages of a request. `has`: what is known of these. `is_also`: the disk has
    them, so that no request waits for the answer."""

    asked: Asked
    store: Store
    has: StoreAnswers
    question: Question
    is_also: bool = False
    is_stalled: bool = False


@dataclass(eq=False, slots=True)
class ReadOfRuns:
    """A job that reads neighbouring runs of a component from a store. `is_urgent`: for a request that is."""

    component: CacheComponent
    store: Store
    runs: list[HostRun]
    is_urgent: bool
    cancelled: threading.Event = field(default_factory=threading.Event)
    is_stalled: bool = False
    num_pages: int = 0

    def __post_init__(self) -> None:
        self.num_pages = sum([len(run.keys) for run in self.runs])

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.component.host.page_bytes

    @property
    def wanted(self) -> dict[Asked, None]:
        """Who waits for any of it that has not come."""
        return {asked: None for run in self.runs for asked in run.wanted or ()}

    def is_for(self, asked: Asked) -> bool:
        """Whether a request may wait for it: nobody waits for what comes after all others, or may never come."""
        is_late = asked.is_urgent and not self.is_urgent
        return not (is_late or self.is_stalled or self.cancelled.is_set())
