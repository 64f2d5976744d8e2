"""What of the host a store gets next, within a budget, before memory evicts it. Engine and replay choose by this code.

early       everything that comes, in the order in which it came
budgeted    the colder half of the host: what leaves first before the rest, heads before what follows them, and nothing
            that the device has as well. While the bucket is less than half full, what one request has used stays out.

Pages are chosen in rounds: the next one when the last is written, so that what the store had already has cost nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hicache.eviction.write_budget import PageUses, WriteBudget, names_of
from hicache.host.index import PageIndex
from hicache.host.run import HostRun, path_of
from hicache.tiers import Store

_MAX_LOOKED_AT = 128  # runs of one order in one round
ROUND_SHARE = 0.5  # of a host pool, at most, on its way to the disk
_ANEW_SHARE = 16  # of a host: so many of its pages are used before its order is walked anew


def num_sent(run: HostRun) -> int:
    """Pages of it that go to a store: those that are not raw."""
    return len(run.keys) - len(run.second_pages)


@dataclass(eq=False)
class WrittenIndex:
    """An index whose pages a store gets, each of `page_bytes`. `max_pages`: of a round, beside the first run.

    Of `WriteAhead`: `num_chosen` pages of this round; `next_cold` and `walk`, what is left of the colder half;
    `num_used` pages since that began; `has_refused`, whether it left out what one request has used."""

    index: PageIndex
    page_bytes: int
    max_pages: float
    num_chosen: int = 0
    next_cold: HostRun | None = None
    walk: Iterator[HostRun] | None = None
    num_used: int = 0
    has_refused: bool = False

    def begin_walk(self) -> None:
        self.next_cold, self.walk, self.num_used, self.has_refused = None, self._colder_half(), 0, False

    @property
    def has_changed(self) -> bool:
        return self.num_used * _ANEW_SHARE >= self.index.pool.num_pages

    def _colder_half(self) -> Iterator[HostRun]:
        """What leaves until half of the pool is free, before each run those that it follows, from the first on."""
        seen, pool = set[HostRun](), self.index.pool
        num_left = pool.num_pages // 2 - pool.available()
        for leaving in self.index.leaving() if num_left > 0 else ():
            yield from path_of(leaving, seen)
            num_left -= len(leaving.keys)
            if num_left <= 0:
                return


class WriteAhead:
    """Owned by the scheduler thread. `indexes`: those whose pages are of no use without others come first.

    `uses`: what requests used, as far as that is told.
    `is_done`: nothing is written before something comes, is used or is written, or the bucket has got more; `is_idle`:
    nor when it has got more."""

    def __init__(
        self,
        indexes: Sequence[WrittenIndex],
        store: Store,
        budget: WriteBudget,
        uses: PageUses | None = None,
    ) -> None:
        self._indexes, self._store, self._budget, self._uses = tuple(indexes), store, budget, uses
        self._come = deque[tuple[WrittenIndex, list[bytes]]]()  # of each run its keys: it may be divided meanwhile
        self._round = dict[HostRun, WrittenIndex]()
        self._under_way = set[HostRun]()  # those of a stalled writer too
        self._is_behind = self._drains = False  # something that came was not written; everything is to be
        self.is_done = self.is_idle = True

    def come(self, at: WrittenIndex, runs: Iterable[HostRun]) -> None:
        """What the store lacks of these is to be written."""
        lacking = [(at, [*run.keys]) for run in runs if self.lacks(run)]
        if not self._is_behind:  # else they are found in their index
            self._come.extend(lacking)
        self.is_done &= not lacking
        self.is_idle &= self.is_done

    def use(self, at: WrittenIndex, keys: Sequence[bytes]) -> None:
        """A request used these pages, wherever they are. `uses` was told."""
        at.num_used += len(keys)
        self.is_done &= not self._is_behind

    def drain(self, *, anew: bool) -> None:
        """Everything is to be written, whatever the budget. `anew`: what the store did not take before, too."""
        self._is_behind |= anew
        self._drains, self.is_done, self.is_idle = True, False, False

    def is_wanted(self, run: HostRun) -> bool:
        """Whether the store lacks it, and it is worth it, for its session has not ended."""
        return run.is_published and not run.stored & self._store.bit and not run.has_ended

    def lacks(self, run: HostRun) -> bool:
        """Whether it is wanted, and the store does not get it now."""
        return self.is_wanted(run) and run not in self._under_way

    def next_round(self) -> list[tuple[WrittenIndex, HostRun]]:
        """The runs to be written now; none while some of the last round are not written."""
        if self._round or self.is_idle:
            return []
        self._budget.look()
        self.is_done = True
        for at in self._indexes:
            at.num_chosen = 0
        if self._drains or self._budget.is_early:
            self._choose_come()
        else:
            self._fall_behind()
            for at in self._indexes if self._is_behind else ():
                self._choose_cold(at)
        self._drains &= not self.is_done or bool(self._round)
        self.is_idle = self.is_done and not self._is_behind
        return [(at, run) for run, at in self._round.items()]

    def note_answer(self, run: HostRun) -> None:
        """The writer has answered for `run`."""
        self._under_way.discard(run)
        self._round.pop(run, None)

    def note_stall(self, run: HostRun) -> None:
        """The writer does not answer for `run` for now: others go on without it."""
        self._round.pop(run, None)

    @property
    def num_waiting(self) -> int:
        """Runs that came and wait for their round."""
        return len(self._come)

    # Inside

    def _fall_behind(self) -> None:
        if self._come and not self._is_behind:
            self._is_behind = True
            for at in self._indexes:
                at.begin_walk()
        self._come.clear()

    def _choose_come(self) -> None:
        if self._is_behind:
            self._come.extend((at, [*at.index]) for at in self._indexes)
            self._is_behind = False
        while self._come:
            at, keys = self._come[0]
            for run in at.index.runs_of(keys):
                if self.lacks(run) and not self._choose(at, run):
                    self._come[0] = at, keys[next(n for n, key in enumerate(keys) if key in run.keys) :]
                    self._budget.is_early &= bool(self._round)  # else a run is more than is left of the bucket
                    self.is_done = False
                    return
            self._come.popleft()

    def _choose_cold(self, at: WrittenIndex) -> None:
        if at.has_changed or (at.walk is None and at.has_refused and self._budget.takes_all_cold):
            at.begin_walk()
        if at.walk is None:
            return
        for _ in range(_MAX_LOOKED_AT):
            run = at.next_cold or next(at.walk, None)
            at.next_cold = None
            if run is None:
                at.walk = None
                return
            if not self.lacks(run) or run.is_duplicate:
                continue
            if not self._budget.takes_all_cold and not (
                self._uses and self._uses.used_twice(names_of(run.keys[-1:])).all()
            ):
                at.has_refused = True
            elif not self._choose(at, run):
                at.next_cold = run
                return
        self.is_done = False

    def _choose(self, at: WrittenIndex, run: HostRun) -> bool:
        """Take it into the round; False where that, or the bucket, has no room for it."""
        if not num_sent(run):
            run.stored |= self._store.bit  # all of it that goes there
            return True
        if at.num_chosen and at.num_chosen + run.num_held > at.max_pages:
            return False
        num_bytes = num_sent(run) * at.page_bytes
        if not (self._drains or self._budget.has_room(num_bytes)):
            return False
        self._budget.reserve(num_bytes)
        at.num_chosen += run.num_held
        self._round[run] = at
        self._under_way.add(run)
        return True
