"""What of a tier a store gets next, within a budget, before memory evicts it. Engine and replay choose by this code.

    early       everything that comes, in the order in which it came
    budgeted    the colder half of the tier: what leaves first before the rest, heads before what follows them, and
                nothing that the tier above has as well. While the bucket is less than half full, pages that one request
                has used stay out.

Pages are chosen in rounds: the next one when the last is written, so that what the store had already has cost nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache.eviction.write_budget import PageUses, WriteBudget
from hicache.pages.states import ABOVE, RAW, TierPages
from hicache.pages.table import NO_ROWS, Mask, Rows, Seen
from hicache.tiers import Store

_MAX_LOOKED_AT = 2048  # pages of one order in one round
ROUND_SHARE = 0.5  # of a host pool, at most, on its way to the disk
_ANEW_SHARE = 16  # of a host: so many of its pages are used before its order is walked anew
_BLOCK = 512  # pages whose place in the order of prompts is found at a time


@dataclass(eq=False)
class WrittenPages:
    """A tier whose pages a store gets, each of `page_bytes`. `max_pages`: of a round, beside the first page.

    Of `WriteAhead`: `num_chosen` pages of this round, `num_unanswered` of them; `cold` and `next_cold`, what is left of
    the colder half, and `seen` of that; `num_used` pages since that began; `has_refused`, whether it left out what one
    request has used."""

    pages: TierPages
    page_bytes: int
    max_pages: float
    num_chosen: int = 0
    num_unanswered: int = 0
    cold: Iterator[Rows] | None = None
    next_cold: Rows = field(default_factory=NO_ROWS.copy)
    num_used: int = 0
    has_refused: bool = False
    seen: Seen = field(default_factory=Seen)

    def __post_init__(self) -> None:
        self.pages.table.add_columns(self.seen)

    def begin_walk(self) -> None:
        self.cold, self.next_cold, self.num_used, self.has_refused = self._colder_half(), NO_ROWS, 0, False

    @property
    def has_changed(self) -> bool:
        return self.num_used * _ANEW_SHARE >= self.pages.pool.num_pages

    def _colder_half(self) -> Iterator[Rows]:
        """Pages that leave until half of the pool is free, before each those that it follows, from the first on."""
        pages, table = self.pages, self.pages.table
        num_left = pages.pool.num_pages // 2 - pages.pool.available()
        cold = pages.order.leaving()[:num_left] if num_left > 0 else NO_ROWS
        ages = table.age[cold]
        self.seen.age[:] = 0
        for start in range(0, len(cold), _BLOCK):
            rows = cold[start : start + _BLOCK]
            yield table.with_paths(rows[table.age[rows] == ages[start : start + _BLOCK]], self.seen)


class WriteAhead:
    """Owned by the scheduler thread. `tiers`: those whose pages are of no use without others come first.

    `uses`: what requests used, as far as that is told.
    `is_done`: nothing is written before something comes, is used or is written, or the bucket has got more; `is_idle`:
    nor when it has got more."""

    def __init__(
        self, tiers: Sequence[WrittenPages], store: Store, budget: WriteBudget, uses: PageUses | None = None
    ) -> None:
        self._tiers, self._bit, self._budget, self._uses = tuple(tiers), store.bit, budget, uses
        self._come = deque[tuple[WrittenPages, Rows, Rows]]()  # rows, and their ages: they may be others' meanwhile
        self._is_behind = False  # something that came was not written
        self._drains = False  # everything is to be written
        self.is_done = self.is_idle = True

    def come(self, at: WrittenPages, rows: Rows) -> None:
        """What the store lacks of these is to be written."""
        lacking = rows[at.pages.lacking(rows, self._bit)]
        if not self._is_behind and len(lacking):  # else they are found in their tier
            self._come.append((at, lacking, at.pages.table.age[lacking]))
        self.is_done &= not len(lacking)
        self.is_idle &= self.is_done

    def use(self, at: WrittenPages, num_pages: int) -> None:
        """A request used so many pages, wherever they are. `uses` was told."""
        at.num_used += num_pages
        self.is_done &= not self._is_behind

    def drain(self, *, anew: bool) -> None:
        """Everything is to be written, whatever the budget. `anew`: what the store did not take before, too."""
        self._is_behind |= anew
        self._drains, self.is_done, self.is_idle = True, False, False

    def wanted(self, at: WrittenPages, rows: Rows) -> Mask:
        """Which of these, that the tier has, the store lacks, though their sessions have not ended."""
        pages = at.pages
        wanted: Mask = pages.has(rows) & (pages.stored[rows] & self._bit == 0) & ~pages.order.has_ended[rows]
        return wanted

    def next_round(self) -> list[tuple[WrittenPages, Rows]]:
        """The pages to be written now, on their way from now on; none while some of the last round are not written."""
        if self.is_idle or any(at.num_unanswered for at in self._tiers):
            return []
        self._budget.look()
        self.is_done = True
        chosen: list[tuple[WrittenPages, Rows]] = []
        for at in self._tiers:
            at.num_chosen = 0
        if self._drains or self._budget.is_early:
            self._choose_come(chosen)
        else:
            self._fall_behind()
            for at in self._tiers if self._is_behind else ():
                self._choose_cold(at, chosen)
        self._drains &= not self.is_done or bool(chosen)
        self.is_idle = self.is_done and not self._is_behind
        return chosen

    def note_answer(self, at: WrittenPages, num_pages: int) -> None:
        """The writer has answered for so many pages of the round, or does not for now: others go on without them."""
        at.num_unanswered -= num_pages

    @property
    def num_waiting(self) -> int:
        """Pages that came and wait for their round."""
        return sum(len(rows) for _, rows, _ in self._come)

    # Inside

    def _fall_behind(self) -> None:
        if self._come and not self._is_behind:
            self._is_behind = True
            for at in self._tiers:
                at.begin_walk()
        self._come.clear()

    def _choose_come(self, chosen: list[tuple[WrittenPages, Rows]]) -> None:
        if self._is_behind:
            for at in self._tiers:
                rows = at.pages.rows_held()
                rows = rows[np.lexsort((at.pages.order.at.last_use[rows], at.pages.table.index[rows]))]
                self._come.append((at, rows, at.pages.table.age[rows]))
            self._is_behind = False
        while self._come:
            at, rows, ages = self._come.popleft()
            rows = rows[at.pages.table.age[rows] == ages]
            rows = rows[at.pages.lacking(rows, self._bit)]
            if len(left := self._choose(at, rows, chosen)):
                self._come.appendleft((at, left, at.pages.table.age[left]))
                self._budget.is_early &= bool(chosen)  # else a page is more than is left of the bucket
                self.is_done = False
                return

    def _choose_cold(self, at: WrittenPages, chosen: list[tuple[WrittenPages, Rows]]) -> None:
        if at.has_changed or (at.cold is None and at.has_refused and self._budget.takes_all_cold):
            at.begin_walk()
        num_looked_at = 0
        while num_looked_at < _MAX_LOOKED_AT:
            if at.cold is None:
                return
            rows = at.next_cold if len(at.next_cold) else next(at.cold, NO_ROWS)
            at.next_cold = NO_ROWS
            if not len(rows):
                at.cold = None
                return
            num_looked_at += len(rows)
            rows = rows[at.pages.lacking(rows, self._bit) & ~at.pages.has(rows, ABOVE)]
            if not self._budget.takes_all_cold:
                is_worth = self._used_twice(at, rows)
                at.has_refused |= not is_worth.all()
                rows = rows[is_worth]
            if len(left := self._choose(at, rows, chosen)):
                at.next_cold = left
                return
        self.is_done = False

    def _used_twice(self, at: WrittenPages, rows: Rows) -> Mask:
        if self._uses is None:
            return np.zeros(len(rows), np.bool_)
        return self._uses.used_twice(at.pages.table.name[rows])

    def _choose(self, at: WrittenPages, rows: Rows, chosen: list[tuple[WrittenPages, Rows]]) -> Rows:
        """Take these, which the store lacks, into the round; returns those for which that, or the bucket, has no
        room."""
        raw = at.pages.has(rows, RAW)
        at.pages.mark_stored(rows[raw], self._bit)  # all of them that goes there
        rows = rows[~raw]
        num_rows = min(len(rows), max(int(at.max_pages) - at.num_chosen, 0 if at.num_chosen else 1))
        if not self._drains:
            num_rows = min(num_rows, self._budget.num_fitting(num_rows, at.page_bytes))
        if num_rows:
            self._budget.reserve(num_rows * at.page_bytes)
            at.pages.begin_write(rows[:num_rows], self._bit)
            at.num_chosen += num_rows
            at.num_unanswered += num_rows
            chosen.append((at, rows[:num_rows]))
        return rows[num_rows:]
