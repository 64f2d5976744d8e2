"""The life of a page on one tier: which states it has, and the verbs that change them.

    (none) ── reserve ──> COPY or READ ── landed(ok) ──> HELD ── drop ──> (none)
                               ├───────── landed(not ok) ───────────────> (none)
                               └───────── disown, of READ ──────────────> (none)

    COPY      a copy from the tier above writes the page; it is as good as there for who asks
    READ      a read from a store writes it; a store may bring nothing
    HELD      the tier has its bytes
    RAW       it did not fit one page of the pool when it was packed, and has two; of COPY and HELD
    ABOVE     of an exclusive tier: the tier above has the page as well, whether this one has it or not

`TierPages` is the only writer of `state`, and of the places in the pool. Each verb takes rows, requires the states that
it starts from of all of them, and moves the sums. docs/invariants.md draws the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from hicache.errors import InvariantError
from hicache.pages.order import EvictionOrder, rank_policy
from hicache.pages.table import Columns, Mask, PageTable, Rows
from hicache.tiers import Store

COPY, READ, HELD, RAW, ABOVE = (1 << bit for bit in range(5))
IN_FLIGHT = COPY | READ
_HAS = [(np.arange(1 << 5) & states) != 0 for states in range(1 << 5)]  # [states asked for][state]
Counts = npt.NDArray[np.int32]
_STEP_PAGES, _STEP_SHARE = 64, 32


def step_pages(num_pages: int) -> int:
    """How many pages a host of `num_pages` exchanges with the device at a time, while they are in both places."""
    return max(1, min(_STEP_PAGES, num_pages // _STEP_SHARE))


class Pool(Protocol):
    """The memory of a tier: a `HostPagePool`, or what counts like one."""

    num_pages: int

    def available(self) -> int: ...

    def alloc(self, num_pages: int) -> Sequence[int] | None: ...

    def free(self, pages: Sequence[int]) -> None: ...

    def check(self) -> None: ...


class TierPages(Columns):
    """The pages of one component on one tier, by rows of `table`. Owned by the scheduler thread.

    `state`           see the module
    `place`           the page of the pool that holds it, or gets it; `second_place`: the second of a raw page, else 0
    `stored`          bits of the stores that have it
    `writing`         bits of the stores to which it is on its way
    `source`          bit of the store that a read brought it from, until a request uses it
    `expected_uses`   of a page in flight: how often it will be used, or was where it comes from; 1: its coming alone

    `policy`, `is_linked`: of the eviction order. `on_evict`: called with rows before they are dropped.

    Sums, in pages of the pool: `num_in_flight`, `num_disowned`. In rows: `num_held`, `num_raw` of these,
    `num_first_out` of these, that the tier above has as well. `num_returned`: pages that left while the tier above had
    them, and left that since, so that they have to be copied again.
    """

    fields: ClassVar = {
        "state": (np.uint8, 0),
        "place": (np.int64, 0),
        "second_place": (np.int64, 0),
        "stored": (np.uint8, 0),
        "writing": (np.uint8, 0),
        "source": (np.uint8, 0),
        "expected_uses": (np.float64, 1.0),
    }
    state: npt.NDArray[np.uint8]
    place: npt.NDArray[np.int64]
    second_place: npt.NDArray[np.int64]
    stored: npt.NDArray[np.uint8]
    writing: npt.NDArray[np.uint8]
    source: npt.NDArray[np.uint8]
    expected_uses: npt.NDArray[np.float64]

    def __init__(
        self,
        pool: Pool,
        policy: str,
        table: PageTable | None = None,
        *,
        is_exclusive: bool = False,
        is_linked: bool = True,
        on_evict: Callable[[Rows], None] | None = None,
    ) -> None:
        self.pool, self.is_exclusive = pool, is_exclusive
        self.table = PageTable() if table is None else table
        self.table.add_columns(self)
        self.order = EvictionOrder(self.table, rank_policy(policy, "host_eviction_policy"), is_linked=is_linked)
        self._on_evict = on_evict
        self.num_in_flight = self.num_disowned = self.num_held = self.num_raw = self.num_raw_evictable = 0
        self.num_first_out = self.num_returned = 0

    # Looking

    def __len__(self) -> int:
        """Pages that the tier has."""
        return self.num_held

    def __iter__(self) -> Iterator[bytes]:
        """The keys of pages that the tier has, in no order."""
        return iter(self.table.keys_of(self.rows_held()))

    def __contains__(self, key: bytes) -> bool:
        """Whether the tier has the page of `key`."""
        row = self.table.row(key)
        return row >= 0 and bool(self.state[row] & HELD)

    def has(self, rows: Rows, states: int = HELD) -> Mask:
        """Which of these are in one of `states`; `NO_ROW` is in none."""
        found: Mask = _HAS[states][self.state[rows]]
        return found

    def held(self, keys: Sequence[bytes]) -> Rows:
        """The rows of those pages that the tier has."""
        rows = self.table.find(keys)
        return rows[self.has(rows)]

    def rows_held(self) -> Rows:
        """All that the tier has, in no order."""
        return np.flatnonzero(self.state & HELD)

    def num_places(self, rows: Rows) -> int:
        """Pages of the pool that these take."""
        return len(rows) + int(np.count_nonzero(self.second_place[rows]))

    def places(self, rows: Rows) -> list[int]:
        """All pages of the pool that these take: of each row its place, then the second places."""
        second = self.second_place[rows]
        found: list[int] = self.place[rows].tolist() + second[second > 0].tolist()
        return found

    @property
    def num_evictable(self) -> int:
        """Pages of the pool whose pages nobody has locked."""
        return self.order.num_evictable + self.num_raw_evictable

    @property
    def capacity(self) -> int:
        """Pages of the pool that are free or evictable."""
        return self.pool.available() + self.num_evictable

    # Coming

    def reserve(self, rows: Rows, state: int, *, hits: Counts | int = 1, priority: Counts | int = 0) -> Rows:
        """Give places to these, which are in no state but ABOVE, so far as others leave for them: returns the first
        ones, each locked once. The page before each of them stays, unless the tier above has it. Rows that get no place
        and that nothing needs are given back."""
        assert not self.has(rows, IN_FLIGHT | HELD).any(), "it has a place already"
        before = self.table.previous[rows]
        before = before[self.state[before] & (HELD | ABOVE) == HELD]
        self.table.hold(rows)  # what follows one of them may leave now
        try:
            if len(rows) > self.pool.available():
                before = np.unique(before)
                self.order.lock(before)
                try:
                    self.make_room(len(rows))
                finally:
                    self.order.unlock(before)
            num_rows = min(len(rows), self.pool.available())
            taken = rows[:num_rows]
            if num_rows:
                self._begin(taken)
                self.order.follow(before)
                self.state[taken] |= state
                self.place[taken] = self._alloc(num_rows)
                self.order.at.note_created(taken)
                self.order.lock(taken)
                self.table.hits[taken] = hits if isinstance(hits, int) else hits[:num_rows]
                self.table.priority[taken] = priority if isinstance(priority, int) else priority[:num_rows]
        finally:
            self.table.drop(rows)
        return taken

    def reserve_second(self, rows: Rows) -> Rows:
        """Give second places to these, which are in flight and do not fit one, so far as others leave for them: returns
        the first ones."""
        taken = rows[: self.make_room(len(rows))]
        self.state[taken] |= RAW
        self.second_place[taken] = self._alloc(len(taken))
        return taken

    def landed(self, rows: Rows, ok: Mask | None = None) -> Rows:
        """The transfer of these has ended, of which it brought those that are `ok`, all by default. Returns what came;
        the others lose their places."""
        came = rows if ok is None else rows[ok]
        if ok is not None and len(came) < len(rows):
            self.abandon(rows[~ok])
        if not len(came):
            return came
        assert self.has(came, IN_FLIGHT).all(), "nothing brings it"
        raw = came[self.has(came, RAW)]
        self.num_in_flight -= len(came) + len(raw)
        self.num_held += len(came)
        self.num_raw += len(raw)
        self.state[came] = self.state[came] & ~np.uint8(IN_FLIGHT) | HELD
        self.order.enter(came, is_transferred=True)
        self.num_raw_evictable += self._num_raw_unlocked(raw)
        self._tell_uses(came)
        if self.is_exclusive and (above := came[self.has(came, ABOVE)]).size:
            self._count_first_out(above)
        return came

    def abandon(self, rows: Rows) -> None:
        """Give back the places of these, which are in flight."""
        assert self.has(rows, IN_FLIGHT).all(), "it is not in flight"
        self.num_in_flight -= self.num_places(rows)
        self.pool.free(self.places(rows))
        self._end_flight(rows)

    def disown(self, rows: Rows) -> list[int]:
        """Abandon a read of these rows that may end late or never. The rows lose their state; returns their places,
        which stay taken until `free_disowned`."""
        assert self.has(rows, READ).all(), "nothing reads it"
        places: list[int] = self.place[rows].tolist()
        self.num_in_flight -= len(rows)
        self.num_disowned += len(rows)
        self._end_flight(rows)
        return places

    def free_disowned(self, places: Sequence[int]) -> None:
        """The read to these places has ended."""
        self.num_disowned -= len(places)
        self.pool.free(places)

    # Leaving

    def drop(self, rows: Rows) -> None:
        """Evict these, which the tier has and nobody has locked."""
        if self._on_evict is not None:
            self._on_evict(rows)
        self.pool.free(self._drop(rows))
        self._end(rows)

    def discard(self, rows: Rows) -> None:
        """Evict those of these that the tier has and nobody needs."""
        rows = rows[self.has(rows)]
        rows = rows[(self.order.locks[rows] == 0) & (self.order.expected[rows] == 0)]
        if len(rows):
            self.drop(rows)

    def evict_all(self) -> None:
        """Evict what nobody has locked."""
        while len(rows := self.order.take(max(1, self.order.num_evictable))):
            self.drop(rows)

    # Locks and uses

    def lock(self, rows: Rows) -> None:
        """Somebody needs these, which are held or in flight, to stay."""
        self.num_raw_evictable -= self._num_raw_unlocked(rows)
        self.order.lock(rows)

    def unlock(self, rows: Rows) -> None:
        """Undo one `lock`, which is no use."""
        self.order.unlock(rows)
        self.num_raw_evictable += self._num_raw_unlocked(rows)

    def count_hit(self, rows: Rows) -> None:
        """One more request uses these pages of its prompt, from wherever: it counts when that ends, see `use`."""
        self.table.hits[rows] += 1

    def use(self, rows: Rows) -> None:
        """A request that used these has ended: pages of its prompt that the tier has, the first one first."""
        self.order.use(rows)

    def expect(self, rows: Rows, change: int) -> None:
        """`change` more queued requests will need these, or fewer (-1)."""
        if change > 0:
            self.table.hold(rows)
        self.order.expect(rows, change)
        if change < 0:
            self.table.drop(rows)

    def expect_uses(self, rows: Rows, num_uses: npt.NDArray[np.float64] | float) -> None:
        """Those of these that are held or in flight will be asked for so often. Counts under the policy `auto`
        alone."""
        rows = rows[self.has(rows, HELD | IN_FLIGHT)]
        self.expected_uses[rows] = np.maximum(self.expected_uses[rows], num_uses)
        self._tell_uses(rows[self.has(rows)])

    def end_session(self, rows: Rows) -> None:
        """Those of these that are held or in flight will not be asked for again: they leave first, and no store gets
        them."""
        self.order.end_session(rows[self.has(rows, HELD | IN_FLIGHT)])

    def keep_until(self, rows: Rows, until_s: float, limit: float) -> None:
        """See `EvictionOrder.keep_until`; of these those that are held or in flight."""
        self.order.keep_until(rows[self.has(rows, HELD | IN_FLIGHT)], until_s, limit)

    # What the tier above has as well

    def came_above(self, rows: Rows) -> None:
        """The tier above has these from now on, which follow each other in a prompt: those of them that are held here
        leave before others."""
        rows = rows[self.has(rows, HELD | IN_FLIGHT)]
        if not len(rows):
            return
        new = rows[~self.has(rows, ABOVE)]
        self.state[rows] |= ABOVE
        self.num_first_out += int(np.count_nonzero(self.has(new)))
        self.order.set_first_out(rows[self.has(rows)])

    def left_above(self, rows: Rows) -> None:
        """The tier above has these no more."""
        rows = rows[self.has(rows, ABOVE)]
        if not len(rows):
            return
        held = self.has(rows)
        self.num_first_out -= int(np.count_nonzero(held))
        self.num_returned += int(np.count_nonzero(~self.has(rows, HELD | IN_FLIGHT)))
        self.state[rows] &= ~np.uint8(ABOVE)
        self.order.end_first_out(rows[held])
        self._end(rows)

    def step_end(self, start: int, end: int, num_needed: int, num_free: int) -> int:
        """Where the next step of a load of pages [start, end) ends, of a request that needs places for `num_needed` on
        the device, which has `num_free`: all, where host and device have room for all who leave; else what is free, or
        a step."""
        if num_free + self.pool.available() + self.num_first_out >= num_needed:
            return end
        return min(end, start + max(num_free, step_pages(self.pool.num_pages)))

    # Stores

    def lacking(self, rows: Rows, store_bit: int) -> Mask:
        """Which of these, that the tier has, a store lacks and is not getting; not those of ended sessions."""
        known = (self.stored[rows] | self.writing[rows]) & store_bit
        lacking: Mask = self.has(rows) & (known == 0) & ~self.order.has_ended[rows]
        return lacking

    def begin_write(self, rows: Rows, store_bit: int) -> None:
        """These, which the tier has, are on their way to a store, and stay until `written`."""
        assert self.has(rows).all() and not (self.writing[rows] & store_bit).any()
        self.writing[rows] |= store_bit
        self.lock(rows)

    def written(self, rows: Rows, ok: Mask, store_bit: int) -> None:
        """A store has answered, and took those that are `ok`."""
        assert (self.writing[rows] & store_bit).all(), "it was not on its way"
        self.writing[rows] &= ~np.uint8(store_bit)
        self.stored[rows[ok]] |= store_bit
        self.unlock(rows)

    def take_sources(self, rows: Rows, stores: Iterable[Store]) -> Counter[Store]:
        """How many of these, which a request loads, a read had brought, by its store. A page counts as read for the
        first request alone."""
        sources = self.source[rows]
        if not sources.any():
            return Counter()
        self.source[rows] = 0
        return Counter({store: int(np.count_nonzero(sources == store.bit)) for store in stores})

    def mark_stored(self, rows: Rows, store_bit: int | npt.NDArray[np.uint8]) -> None:
        """A store is known to have these; of raw pages, which no store gets, all that is to be there."""
        self.stored[rows] |= store_bit

    # Proof

    def check(self, locks: npt.NDArray[np.int32] | None = None) -> None:
        """Raise `InvariantError` unless places, sums, states and locks agree. `locks`: those of each row that somebody
        has, if they are known."""
        found = self.table.violations() + self.order.violations()
        state, in_use = self.state, np.flatnonzero(self.state & (IN_FLIGHT | HELD))
        places = np.concatenate((self.place[in_use], self.second_place[in_use]))
        places = places[places > 0]
        if len(np.unique(places)) < len(places):
            found.append("two pages share a place")
        if len(places) + self.num_disowned + self.pool.available() != self.pool.num_pages:
            taken = f"{len(places)} places are taken, {self.num_disowned} of reads that were given up"
            found.append(f"{taken}, {self.pool.available()} free of {self.pool.num_pages}")
        held, flying = np.flatnonzero(state & HELD), np.flatnonzero(state & IN_FLIGHT)
        raw = held[state[held] & RAW != 0]
        sums = {
            "held": (self.num_held, len(held)),
            "in flight": (self.num_in_flight, self.num_places(flying)),
            "raw": (self.num_raw, len(raw)),
            "evictable and raw": (self.num_raw_evictable, int(np.count_nonzero(self.order.locks[raw] == 0))),
            "first out": (self.num_first_out, int(np.count_nonzero(state[held] & ABOVE))),
        }
        found += [
            f"{counted} pages were counted as {what}, {are} are"
            for what, (counted, are) in sums.items()
            if counted != are
        ]
        if (state[held] & IN_FLIGHT).any() or (state & IN_FLIGHT == IN_FLIGHT).any():
            found.append("a page is held or read, and in flight")
        if not np.array_equal(self.order.is_held, state & HELD != 0):
            found.append("the eviction order has other pages than the tier")
        if not np.array_equal(self.second_place > 0, state & RAW != 0):
            found.append("a second place is kept for a page that is not raw")
        if not np.array_equal(self.order.first_out > 0, state & (HELD | ABOVE) == HELD | ABOVE):
            found.append("the order knows of other pages that the tier above has")
        if self.order.locks[state & (HELD | IN_FLIGHT) == 0].any():
            found.append("a page is locked that the tier lacks")
        if self.writing[state & HELD == 0].any():
            found.append("a page is written that the tier lacks")
        if locks is not None and (wrong := np.flatnonzero(self.order.locks != locks)).size:
            row = int(wrong[0])
            found.append(f"{len(wrong)} pages have other locks: one has {self.order.locks[row]}, {locks[row]} are held")
        if found:
            raise InvariantError("host pages", found)
        self.pool.check()

    # Inside

    def _alloc(self, num_pages: int) -> Sequence[int]:
        places = self.pool.alloc(num_pages)
        assert places is not None, "made available before"
        self.num_in_flight += num_pages
        return places

    def make_room(self, num_pages: int) -> int:
        """Evict until so many pages of the pool are free, or nobody is left who may; returns how many are."""
        while (short := num_pages - self.pool.available()) > 0 and len(rows := self.order.take(short)):
            self.drop(rows)
        return self.pool.available()

    def _drop(self, rows: Rows) -> list[int]:
        assert self.has(rows).all() and not self.order.locks[rows].any(), "somebody needs it"
        places = self.places(rows)
        num_raw = int(np.count_nonzero(self.second_place[rows]))
        self.num_held -= len(rows)
        self.num_raw -= num_raw
        self.num_raw_evictable -= num_raw
        self.num_first_out -= int(np.count_nonzero(self.has(rows, ABOVE)))
        self.order.leave(rows)
        self.state[rows] &= ABOVE
        self.place[rows] = self.second_place[rows] = 0
        self.stored[rows] = self.source[rows] = 0
        return places

    def _end_flight(self, rows: Rows) -> None:
        """Nothing brings these any more."""
        self.order.end_keeps(rows)
        self.order.locks[rows] -= 1
        self.state[rows] &= ABOVE
        self.place[rows] = self.second_place[rows] = self.source[rows] = 0
        self.expected_uses[rows] = 1.0
        self._end(rows)

    def _begin(self, rows: Rows) -> None:
        """These get a state: those without one are needed from now on."""
        self.table.hold(rows[self.state[rows] == 0])

    def _end(self, rows: Rows) -> None:
        """These lost a state: those without any are needed no more."""
        self.table.drop(rows[self.state[rows] == 0])

    def _num_raw_unlocked(self, rows: Rows) -> int:
        if not (self.num_raw and len(rows)):
            return 0
        return int(np.count_nonzero(self.has(rows, RAW) & self.has(rows) & (self.order.locks[rows] == 0)))

    def _count_first_out(self, rows: Rows) -> None:
        self.num_first_out += len(rows)
        self.order.set_first_out(rows)

    def _tell_uses(self, rows: Rows) -> None:
        """What was said of the uses of pages counts once the tier has them."""
        told = rows[self.expected_uses[rows] != 1.0]
        if len(told):
            self.order.expect_uses(told, self.expected_uses[told])
            self.expected_uses[told] = 1.0
