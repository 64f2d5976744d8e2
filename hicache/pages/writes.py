"""Writes to a store: the choice of the pages that the store gets next, within a write budget. Used by engine and
replay.

A store gets the rows that are HELD and have neither the store's bit of `writing` nor its bit of `stored`. A store gets
no pages of ended sessions and no raw pages. The mode of the store determines which of these rows are written next:

    EARLY     pages that arrived, in order of arrival
    COLD      the colder half of the tier: pages in the order of eviction, each after the pages before it in its prompt,
              but none that the tier above has. While less than half of the bucket is left, only pages that several
              requests used
    DRAIN     all pages of the tier, first pages of prompts first, regardless of the budget

An event takes the store to the next mode:

    | event    | from  | to    | action    |
    |----------|-------|-------|-----------|
    | SPENT    | EARLY | COLD  | walk      |
    | REFILLED | COLD  | EARLY | queue_all |
    | DRAIN    | EARLY | DRAIN | queue_all |
    | DRAIN    | COLD  | DRAIN | queue_all |
    | DRAIN    | DRAIN | DRAIN | queue_all |
    | RESUME   | DRAIN | EARLY |           |

All other events do not change the mode. SPENT: pages wait, and a quarter of the bucket is spent or the next page
exceeds the rest of the bucket. REFILLED: the bucket is full. Pages are chosen in rounds. A round begins when the store
has answered for the previous round, because pages that the store already had cost no budget.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from hicache.pages.states import ABOVE, RAW, TierPages
from hicache.pages.table import NO_ROWS, Mask, Names, Rows, Seen
from hicache.tiers import Store

BUCKET_S = 30.0  # capacity of the bucket, in seconds of the budget
ROUND_SHARE = 0.5  # share of a host pool that may be locked by writes to the disk
# Shares of the bucket: below the first, EARLY ends; below the second, COLD skips pages that only one request used.
_EARLY_LEVEL, _ALL_COLD_LEVEL = 0.75, 0.5
_MAX_EXAMINED = 2048  # maximum pages of one eviction order that are examined in one round
_BLOCK = 512  # pages of an eviction order that are examined at once, with the pages of their prefixes
_WALK_SHARE = 1 / 16  # share of a tier whose use starts another walk of its eviction order
_REMEMBERED = 1 << 20  # number of remembered pages; 8 MiB

_NUM_FLAGS = np.uint64(3)
_USED, _USED_TWICE, _UNREAD, _FLAGS = (np.uint64(flags) for flags in (1, 3, 4, 7))

Clock = Callable[[], float]


class WriteBudget:
    """A token bucket of bytes that may be written. `bytes_per_s`: the rate at which the bucket fills; 0 if the rate is
    unknown, and then no write is refused.

    In any interval of t seconds at most `bytes_per_s * (t + BUCKET_S)` bytes are spent. A page larger than the bucket
    may exceed this limit once. The bucket starts empty, so that a process that crashes repeatedly spends no more than a
    process that keeps running. The bytes of a page are reserved when the page is sent, and spent when the store has
    written the page.
    """

    def __init__(self, bytes_per_s: float = 0.0, clock: Clock = time.monotonic) -> None:
        self._rate = bytes_per_s
        self._clock = clock
        self._at_s = clock()
        self._debt_bytes = bytes_per_s * BUCKET_S  # bytes that the bucket lacked at `_at_s`
        self._reserved = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0: unknown."""
        return self._rate

    @bytes_per_s.setter
    def bytes_per_s(self, rate: float) -> None:
        self._owe(0)
        self._rate = rate

    @property
    def level(self) -> float:
        """Share of the bucket, in [0, 1], that is left when all reserved bytes are written. Any thread may read this
        property."""
        return max(0.0, 1 - self._taken / (self._rate * BUCKET_S)) if self._rate else 1.0

    def num_fitting(self, num_pages: int, page_bytes: int) -> int:
        """Return the number of pages, at most `num_pages`, that fit the bucket; at least one if the bucket is full."""
        if not self._rate:
            return num_pages
        taken = self._taken
        left = int((self._rate * BUCKET_S - taken) // page_bytes)
        return max(0 if taken else 1, min(num_pages, left))

    def reserve(self, num_bytes: int) -> None:
        """Reserve bytes for pages that are sent."""
        self._reserved += num_bytes

    def spend(self, num_bytes: int, num_reserved: int) -> None:
        """End the reservation of `num_reserved` bytes, of which `num_bytes` were written."""
        self._reserved -= num_reserved
        self._owe(num_bytes)

    @property
    def _taken(self) -> float:
        """Return the bytes that the bucket lacks now, including reserved ones."""
        return self._reserved + max(0.0, self._debt_bytes - self._rate * (self._clock() - self._at_s))

    def _owe(self, num_bytes: int) -> None:
        now_s = self._clock()
        self._debt_bytes = num_bytes + max(0.0, self._debt_bytes - self._rate * (now_s - self._at_s))
        self._at_s = now_s


class PageUses:
    """Remembers which pages one or several requests used, even after the eviction of these pages, and which pages were
    written and not read since.

    `num_written`: new pages that a store accepted; `num_read`: the number of these pages that were read later. Pages
    are named by `names_of`. The table has `size` entries. The name of a page determines its entry, which another page
    may overwrite.
    """

    def __init__(self, size: int = _REMEMBERED) -> None:
        self._table = np.zeros(size, np.uint64)  # each entry: name of a page << 3 | its three flags
        self.num_written = self.num_read = 0

    def use(self, names: Names) -> None:
        """Record that a request used these pages."""
        entries, known, flags = self._look_up(names)
        self._table[entries] = known | flags | np.where(flags & _USED, _USED_TWICE, _USED)

    def used_twice(self, names: Names) -> Mask:
        """Return which pages several requests have used, bool `[names]`."""
        _, _, flags = self._look_up(names)
        is_twice: Mask = (flags & _USED_TWICE) == _USED_TWICE
        return is_twice

    def write(self, names: Names, num_new: int) -> None:
        """Record that the drive has these pages. It lacked `num_new` of them before."""
        entries, known, flags = self._look_up(names)
        self._table[entries] = known | flags | _UNREAD
        self.num_written += num_new

    def read(self, names: Names) -> None:
        """Record that these pages were read from the drive."""
        entries, known, flags = self._look_up(names)
        is_first = (flags & _UNREAD) != 0
        self._table[entries[is_first]] = (known | (flags & ~_UNREAD))[is_first]
        self.num_read += int(is_first.sum())

    def _look_up(self, names: Names) -> tuple[Names, Names, Names]:
        """Return the entry of each page, its shifted name, and its flags; the flags are 0 if the entry belongs to
        another page."""
        entries, known = names % np.uint64(len(self._table)), names << _NUM_FLAGS
        found = self._table[entries]
        return entries, known, np.where(found & ~_FLAGS == known, found & _FLAGS, np.uint64(0))


@dataclass(eq=False)
class WriteSource:
    """The pages of one component, each of `page_bytes`, that a store gets. `max_pages`: the maximum pages of one round,
    at least one.

    `num_left`: pages that the current round may still take. A walk examines the colder half of the tier. `cold`: the
    rows that the walk has not examined, in the order of eviction, with `cold_ages`; None if there is no walk. `found`:
    examined rows for which the last round had no capacity. `num_used`: uses of pages since the walk began.
    `has_skipped`: pages were skipped because only one request had used them. `seen`: rows that the walk has examined.
    """

    pages: TierPages
    page_bytes: int
    max_pages: int
    num_left: int = 0
    cold: Rows | None = None
    cold_ages: Rows = field(default_factory=NO_ROWS.copy)
    found: Rows = field(default_factory=NO_ROWS.copy)
    num_used: int = 0
    has_skipped: bool = False
    seen: Seen = field(default_factory=Seen)

    def __post_init__(self) -> None:
        self.pages.table.add_columns(self.seen)

    def walk(self) -> None:
        """Begin a walk through the pages that the tier would evict until half of its pool is free."""
        num_cold = self.pages.pool.num_pages // 2 - self.pages.pool.available()
        self.cold = self.pages.order.eviction_order()[:num_cold] if num_cold > 0 else NO_ROWS
        self.cold_ages = self.pages.table.age[self.cold]
        self.found = NO_ROWS
        self.num_used = 0
        self.has_skipped = False
        self.seen.age[:] = 0

    def next_cold(self) -> Rows:
        """Return the next rows of the walk. Each row comes after the rows before it in its prompt. An empty result ends
        the walk."""
        if len(self.found) or self.cold is None:
            rows, self.found = self.found, NO_ROWS
            return rows
        table, rows, ages = self.pages.table, self.cold[:_BLOCK], self.cold_ages[:_BLOCK]
        self.cold, self.cold_ages = self.cold[_BLOCK:], self.cold_ages[_BLOCK:]
        rows = table.with_paths(rows[table.age[rows] == ages], self.seen)  # a row may belong to another page now
        if not len(rows):
            self.cold = None
        return rows


class WriteMode(Enum):
    """The rule for the pages that a store gets next, see the module's docstring."""

    EARLY = auto()
    COLD = auto()
    DRAIN = auto()


Round = list[tuple[WriteSource, Rows]]


class WriteScheduler:
    """Chooses the rows that one store gets next. Owned by the scheduler thread.

    `sources` are ordered: if component A needs pages of component B, A comes before B. `uses`: pages that requests
    used; None if no uses are recorded, and then no page counts as used by several requests.

    `is_done`: no page has to be written until pages arrive, are used or are written, or, in mode COLD, until the bucket
    fills further. `num_unanswered`: pages of the current round for which the store has not answered.
    """

    def __init__(
        self, sources: Sequence[WriteSource], store: Store, budget: WriteBudget, uses: PageUses | None = None
    ) -> None:
        self._sources = tuple(sources)
        self._bit = store.bit
        self._budget = budget
        self._uses = uses
        self._waiting = deque[tuple[WriteSource, Rows]]()
        self.mode = WriteMode.EARLY
        self.is_done = True
        self.num_unanswered = 0

    @property
    def num_waiting(self) -> int:
        """The number of pages that wait for a round."""
        return sum([len(rows) for _, rows in self._waiting])

    def arrived(self, source: WriteSource, rows: Rows) -> None:
        """Queue the rows that the store lacks. Mode COLD queues no rows, because it takes pages in the order of
        eviction."""
        lacking = rows[source.pages.lacking(rows, self._bit)]
        if len(lacking):
            self.is_done = False
            if self.mode is not WriteMode.COLD:
                self._waiting.append((source, lacking))

    def used(self, source: WriteSource, num_pages: int) -> None:
        """Count uses of pages in any tier, after `uses` has recorded them."""
        source.num_used += num_pages
        self.is_done &= self.mode is not WriteMode.COLD

    def answered(self, num_pages: int) -> None:
        """Record that the store has answered for pages of the round, or that its answer is late and the next round does
        not wait for it."""
        self.num_unanswered -= num_pages
        self.is_done &= self.mode is not WriteMode.COLD

    def drain(self) -> None:
        """Write all pages of the tier, even pages that the store refused, regardless of the budget, until `resume`."""
        self._queue_all()
        self.mode = WriteMode.DRAIN
        self.is_done = False

    def resume(self) -> None:
        """End a drain. The budget applies again."""
        if self.mode is WriteMode.DRAIN:
            self.mode = WriteMode.EARLY

    def next_round(self) -> Round:
        """Choose the rows to be written now. The chosen rows are locked, and have the bit of the store in `writing`.
        Returns no rows before the store has answered for the previous round."""
        if self.num_unanswered or (self.is_done and self.mode is not WriteMode.COLD):
            return []
        level = self._budget.level
        if self.mode is WriteMode.EARLY and level < _EARLY_LEVEL and self._waiting:
            self._walk()
        elif self.mode is WriteMode.COLD and level >= 1:
            self._queue_all()
            self.mode = WriteMode.EARLY
        chosen = self._choose_round()
        if not chosen and self.mode is WriteMode.EARLY and self._waiting:  # a page exceeds the rest of the bucket
            self._walk()
            chosen = self._choose_round()
        return chosen

    def _walk(self) -> None:
        self._waiting.clear()
        for source in self._sources:
            source.walk()
        self.mode = WriteMode.COLD

    def _queue_all(self) -> None:
        self._waiting.clear()
        for source in self._sources:
            rows = source.pages.rows_held()
            last_use, index = source.pages.order.at.last_use[rows], source.pages.table.index[rows]
            if len(rows):
                self._waiting.append((source, rows[np.lexsort((last_use, index))]))

    def _choose_round(self) -> Round:
        chosen: Round = []
        for source in self._sources:
            source.num_left = source.max_pages
        if self.mode is WriteMode.COLD:
            self.is_done = True
            for source in self._sources:
                self.is_done &= self._choose_cold(source, chosen)
        else:
            self._choose_waiting(chosen)
            self.is_done = not self._waiting
        return chosen

    def _choose_waiting(self, chosen: Round) -> None:
        while self._waiting:
            source, rows = self._waiting.popleft()
            rows = rows[source.pages.lacking(rows, self._bit)]
            if len(left := self._choose(source, rows, chosen)):
                self._waiting.appendleft((source, left))
                return

    def _choose_cold(self, source: WriteSource, chosen: Round) -> bool:
        """Choose pages from the colder half of a tier. Returns False if more pages of this half have to be examined."""
        has_changed = source.num_used >= _WALK_SHARE * source.pages.pool.num_pages
        if has_changed or (source.cold is None and source.has_skipped and self._budget.level >= _ALL_COLD_LEVEL):
            source.walk()
        num_examined = 0
        while num_examined < _MAX_EXAMINED:
            rows = source.next_cold()
            if not len(rows):
                return True
            num_examined += len(rows)
            rows = rows[source.pages.lacking(rows, self._bit) & ~source.pages.has(rows, ABOVE)]
            if self._budget.level < _ALL_COLD_LEVEL:
                is_worth_writing = self._used_twice(source, rows)
                source.has_skipped |= not is_worth_writing.all()
                rows = rows[is_worth_writing]
            source.found = self._choose(source, rows, chosen)
            if len(source.found):
                return True
        return False

    def _used_twice(self, source: WriteSource, rows: Rows) -> Mask:
        if self._uses is None:
            return np.zeros(len(rows), np.bool_)
        return self._uses.used_twice(source.pages.table.name[rows])

    def _choose(self, source: WriteSource, rows: Rows, chosen: Round) -> Rows:
        """Add rows that the store lacks to the round. Returns the rows that exceed the round or the bucket."""
        pages = source.pages
        raw = pages.has(rows, RAW)
        if raw.any():
            pages.mark_stored(rows[raw], self._bit)  # a store gets no bytes of a raw page
            rows = rows[~raw]
        num_rows = min(len(rows), source.num_left)
        if self.mode is not WriteMode.DRAIN:
            num_rows = min(num_rows, self._budget.num_fitting(num_rows, source.page_bytes))
        if num_rows:
            self._budget.reserve(num_rows * source.page_bytes)
            pages.begin_write(rows[:num_rows], self._bit)
            source.num_left -= num_rows
            self.num_unanswered += num_rows
            chosen.append((source, rows[:num_rows]))
        return rows[num_rows:]
