"""The life of a page on the host: the states of a page, and the methods that change these states.

                   +─ COPY ──+─ complete ──> HELD ── drop ──> (none)
    (none) ─ reserve         +─ abandon ───────────────────> (none)
                   +─ READ ──+─ complete ──> HELD ── drop ──> (none)
                             +─ abandon, disown ───────────> (none)

    COPY      a copy from the device writes the page; a prefetch does not read such a page from a store
    READ      a read from a store writes the page; requests cannot use the page until the read has been verified
    HELD      the host has the bytes of the page
    RAW       the packed page exceeds one page of the pool, so it is kept unpacked in two; with COPY or HELD
    ABOVE     the device has the page as well. An exclusive host sets this bit on pages that it has or gets, and evicts
              these pages first. If the host loses the page, the bit stays until the device loses the page too

A row of the page table names a page from the first state to the last, and `table` counts one reference for all states
of a row. From a commit to the disk and back, a page goes through these steps:

    commit      the device has the page; on the host it has no state
    backup      after the commit, or when the device evicts the page, as the write policy says: `reserve(rows, COPY)`
                reserves a page of the pool and locks the row. When the copy has ended, `complete` releases the lock
    write       soon after the backup, within a budget: `begin_write` locks the page and sets the bit of the disk in
                `writing`. When the disk has answered, `written` sets the bit in `stored` and releases the lock
    eviction    `ensure_free` takes the page from the eviction order, and `drop` frees the pool page. The host also
                forgets that the disk has the page. A page that no store has is computed again
    lookup      a prefetch asks the disk for the key of the page, because memory has no record of it
    read        `reserve(rows, READ)`, and the prefetch sets the bit of the disk in `source`. The read ends and its
                bytes are verified: `complete` and `mark_stored`, so that the page is not written to the disk again
    load        at the request's admission: `take_sources` counts the page as a hit of the disk, `lock` protects it from
                eviction, and `unlock` follows the copy to the device

`TierPages` is the only writer of `state`, and allocates all pages of the pool. docs/invariants.md has all transitions.
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
    """Return the number of pages that an exclusive host of `num_pages` pages loads in one step. During a step, both the
    host and the device have the pages of the step, so a small step saves host pages."""
    return max(1, min(_STEP_PAGES, num_pages // _STEP_SHARE))


class Pool(Protocol):
    """The memory of a tier: a `HostPagePool`, or a pool that only counts pages."""

    num_pages: int

    def available(self) -> int: ...

    def alloc(self, num_pages: int) -> Sequence[int] | Rows | None: ...

    def free(self, pages: Sequence[int]) -> None: ...

    def check(self) -> None: ...


class TierPages(Columns):
    """The pages of one component (full attention, sliding windows or recurrent states) on the host, by rows of `table`.
    Owned by the scheduler thread. The replay uses this class for a device as well.

    `state`           see the module.
    `pool_page`       index of the page in the pool, which never allocates page 0.
    `second_pool_page` index in the pool of the second pool page of a RAW page, else 0.
    `stored`          bits of the stores that have the page. Eviction clears these bits. A RAW page gets the bit of a
                      store when the page would be written, because no store takes RAW pages.
    `writing`         bits of the stores to which a write is in flight.
    `source`          bit of the store from which the page was read, until the first load counts it as a hit.
    `expected_uses`   of a page in flight: uses that the eviction policy counts at the end of the transfer. At least 1

    `policy`, `is_linked`: arguments of the eviction order. `on_evict`: called with rows before these are evicted.

    Sums in pages of the pool: `num_in_flight`, `num_disowned` (pages of disowned reads). Sums in rows: `num_held`, and
    among the held rows `num_raw`, `num_raw_evictable` (raw and unlocked) and `num_first_out` (with ABOVE).
    `num_returned`: rows that lost ABOVE after the host had lost the page: no tier in memory has the page now.
    """

    fields: ClassVar = {
        "state": (np.uint8, 0),
        "pool_page": (np.int64, 0),
        "second_pool_page": (np.int64, 0),
        "stored": (np.uint8, 0),
        "writing": (np.uint8, 0),
        "source": (np.uint8, 0),
        "expected_uses": (np.float64, 1.0),
    }
    unclean: ClassVar = frozenset({"state", "pool_page", "second_pool_page", "writing", "expected_uses"})
    state: npt.NDArray[np.uint8]
    pool_page: npt.NDArray[np.int64]
    second_pool_page: npt.NDArray[np.int64]
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

    # Questions

    def __len__(self) -> int:
        """The number of pages that the tier has."""
        return self.num_held

    def __iter__(self) -> Iterator[bytes]:
        """The keys of pages that the tier has, in no order."""
        return iter(self.table.keys_of(self.rows_held()))

    def __contains__(self, key: bytes) -> bool:
        """Return whether the tier has the page of `key`."""
        row = self.table.row(key)
        return row >= 0 and bool(self.state[row] & HELD)

    def has(self, rows: Rows, states: int = HELD) -> Mask:
        """Return which pages are in one of `states`. `NO_ROW` is in no state."""
        found: Mask = _HAS[states][self.state[rows]]
        return found

    def held(self, keys: Sequence[bytes]) -> Rows:
        """Return the rows of the pages in `keys` that the tier has."""
        rows = self.table.find(keys)
        return rows[self.has(rows)]

    def rows_held(self) -> Rows:
        """Return the rows of all pages that the tier has, in no order."""
        return np.flatnonzero(self.state & HELD)

    def num_pool_pages(self, rows: Rows) -> int:
        """Return the number of pages of the pool that the pages `rows` take."""
        return len(rows) + int(np.count_nonzero(self.second_pool_page[rows]))

    def pool_pages(self, rows: Rows) -> list[int]:
        """Return all pages of the pool that the pages `rows` take: the first page of each row, then the second
        pages."""
        second = self.second_pool_page[rows]
        found: list[int] = self.pool_page[rows].tolist() + second[second > 0].tolist()
        return found

    @property
    def num_evictable(self) -> int:
        """The number of pages of the pool that an eviction of all unlocked pages would free."""
        return self.order.num_evictable + self.num_raw_evictable

    @property
    def capacity(self) -> int:
        """The number of pages of the pool that are free or evictable."""
        return self.pool.available() + self.num_evictable

    # Transfers

    def reserve(self, rows: Rows, state: int, *, hits: Counts | int = 1, priority: Counts | int = 0) -> Rows:
        """Begin a transfer: reserve pool pages for pages that the host lacks. If necessary, other pages are evicted.

        `rows`: in no state, or only ABOVE. `state`: COPY or READ. `hits`, `priority`: the uses and the priority of each
        page, for the eviction policies. Returns the rows that got a pool page: the first ones of `rows`, each with one
        lock, which `complete` or `abandon` releases. The other rows get no state, and the table frees rows without
        other references. The page before each row in its prompt is not evicted for this transfer, unless the device has
        that page.
        """
        if not len(rows):
            return rows
        states, num_free, taken = self.state[rows], self.pool.available(), rows[:0]
        assert not np.count_nonzero(states & (IN_FLIGHT | HELD)), "the page has a pool page already"
        before = self.table.previous[rows]
        before = before[self.state[before] & (HELD | ABOVE) == HELD]
        self.table.hold(rows)  # keeps the rows if an eviction below removes their last reference
        try:
            if len(rows) > num_free:
                before = np.unique(before)
                self.order.lock(before)
                try:
                    num_free = self.ensure_free(len(rows))
                finally:
                    self.order.unlock(before)
            if num_free and len(rows):
                taken = rows[:num_free]
                if len(before):
                    self.order.follow(before)
                self.state[taken] |= state
                self.pool_page[taken] = self._alloc(len(taken))
                if self.order.policy.reads_created:
                    self.order.at.note_created(taken)
                self.order.lock(taken)
                self.table.hits[taken] = hits if isinstance(hits, int) else hits[: len(taken)]
                self.table.priority[taken] = priority if isinstance(priority, int) else priority[: len(taken)]
        finally:
            has_reference = states != 0  # the state ABOVE has a reference already
            has_reference[len(taken) :] = True  # rows that get no state
            if np.count_nonzero(has_reference):
                self.table.drop(rows[has_reference])
        return taken

    def reserve_second(self, rows: Rows) -> Rows:
        """Reserve a second pool page for each page in flight that exceeds one, and evict other pages if necessary.
        Returns the rows that got a second page, the first ones of `rows`; the caller abandons the other rows."""
        taken = rows[: self.ensure_free(len(rows))]
        self.state[taken] |= RAW
        self.second_pool_page[taken] = self._alloc(len(taken))
        return taken

    def complete(self, rows: Rows, ok: Mask | None = None, *, keeps_locks: bool = False) -> Rows:
        """End the transfer of the pages `rows`, and release its locks. `ok`: which pages arrived, by default all. Pages
        that did not arrive are abandoned. `keeps_locks`: the caller releases the locks of the pages that arrived.
        Returns the rows of the pages that arrived."""
        came = rows if ok is None else rows[ok]
        if ok is not None and len(came) < len(rows):
            self.abandon(rows[~ok])
        if not len(came):
            return came
        states = self.state[came]
        assert np.count_nonzero(states & IN_FLIGHT) == len(came), "no transfer of the page is in flight"
        raw = came[states & RAW != 0]
        self.num_in_flight -= len(came) + len(raw)
        self.num_held += len(came)
        self.num_raw += len(raw)
        self.state[came] = states & ~np.uint8(IN_FLIGHT) | HELD
        self.order.enter(came, is_transferred=not keeps_locks)
        if len(raw):
            self.num_raw_evictable += self._num_raw_unlocked(raw)
        if np.count_nonzero(self.expected_uses[came] != 1.0):
            self._apply_expected_uses(came)
        if self.is_exclusive and (above := came[self.has(came, ABOVE)]).size:
            self.num_first_out += len(above)
            self.order.set_first_out(above)
        return came

    def abandon(self, rows: Rows) -> None:
        """End the transfer of pages that did not arrive, and free their pages of the pool."""
        assert self.has(rows, IN_FLIGHT).all(), "the page is not in flight"
        self.num_in_flight -= self.num_pool_pages(rows)
        self.pool.free(self.pool_pages(rows))
        self._end_flight(rows)

    def disown(self, rows: Rows) -> list[int]:
        """End a read for which no request waits, although the reader may still write. The rows lose READ. Returns the
        pool pages of the rows; these pages stay allocated until `free_disowned`."""
        assert self.has(rows, READ).all(), "no read of the page is in flight"
        pool_pages: list[int] = self.pool_page[rows].tolist()
        self.num_in_flight -= len(rows)
        self.num_disowned += len(rows)
        self._end_flight(rows)
        return pool_pages

    def free_disowned(self, pool_pages: Sequence[int]) -> None:
        """Free the pages of a disowned read that has ended."""
        self.num_disowned -= len(pool_pages)
        self.pool.free(pool_pages)

    # Eviction

    def drop(self, rows: Rows) -> None:
        """Evict the pages `rows`, which the tier has and which are not locked."""
        if self._on_evict is not None:
            self._on_evict(rows)
        self.pool.free(self._drop(rows))
        self._end(rows)

    def discard(self, rows: Rows) -> None:
        """Evict the pages of `rows` that the tier has, that are not locked, and that no queued request needs."""
        rows = rows[self.has(rows)]
        rows = rows[(self.order.locks[rows] == 0) & (self.order.expected[rows] == 0)]
        if len(rows):
            self.drop(rows)

    def evict_all(self) -> None:
        """Evict all unlocked pages."""
        while len(rows := self.order.take(max(1, self.order.num_evictable))):
            self.drop(rows)

    # Locks and uses

    def lock(self, rows: Rows) -> None:
        """Protect pages that are held or in flight from eviction until `unlock`. Locks are counted."""
        if self.num_raw:
            self.num_raw_evictable -= self._num_raw_unlocked(rows)
        self.order.lock(rows)

    def unlock(self, rows: Rows) -> None:
        """Release one lock of each page in `rows`. This does not count as a use."""
        self.order.unlock(rows)
        if self.num_raw:
            self.num_raw_evictable += self._num_raw_unlocked(rows)

    def use(self, rows: Rows) -> None:
        """Record that a request which used the pages `rows` has ended. The tier has these pages, and they are
        consecutive in the prompt."""
        self.order.use(rows)

    def expect(self, rows: Rows, change: int) -> None:
        """Add `change` to the number of queued requests that will need the pages `rows`."""
        if change > 0:
            self.table.hold(rows)
        self.order.expect(rows, change)
        if change < 0:
            self.table.drop(rows)

    def expect_uses(self, rows: Rows, num_uses: npt.NDArray[np.float64] | float) -> None:
        """Announce `num_uses` uses of the pages `rows`. Pages that are neither held nor in flight are ignored. Only the
        policy `auto` counts announced uses."""
        rows = rows[self.has(rows, HELD | IN_FLIGHT)]
        self.expected_uses[rows] = np.maximum(self.expected_uses[rows], num_uses)
        self._apply_expected_uses(rows[self.has(rows)])

    def end_session(self, rows: Rows) -> None:
        """Record that the session of the pages `rows` has ended: the pages are evicted before all other pages, and no
        store gets them. Pages that are neither held nor in flight are ignored."""
        self.order.end_session(rows[self.has(rows, HELD | IN_FLIGHT)])

    def keep_until(self, rows: Rows, until_s: float, limit: float) -> None:
        """Evict other pages before the pages `rows` until the time `until_s`, see `EvictionOrder.keep_until`. Pages
        that are neither held nor in flight are ignored. `limit`: the maximum number of kept pages."""
        self.order.keep_until(rows[self.has(rows, HELD | IN_FLIGHT)], until_s, limit)

    # Pages of the tier above

    def came_above(self, rows: Rows) -> None:
        """Record that the device got the pages `rows`, consecutive pages of a prompt, by a load or by computing them.
        The host evicts its copies of these pages first."""
        rows = rows[self.has(rows, HELD | IN_FLIGHT)]
        if not len(rows):
            return
        new = rows[~self.has(rows, ABOVE)]
        self.state[rows] |= ABOVE
        self.num_first_out += int(np.count_nonzero(self.has(new)))
        self.order.set_first_out(rows[self.has(rows)])

    def left_above(self, rows: Rows) -> None:
        """Record that the device has lost the pages `rows`."""
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
        """Return the end of the next step of a load of the pages [start, end) of a prompt, from an exclusive host.

        The device evicts pages for the load, and copies them to the host. `num_needed`: pages that the request needs on
        the device; `num_free`: free pages of the device. One step loads all pages if the host can take all evicted
        pages, in free pages or in place of pages that the device has as well. Otherwise a step fills the free pages of
        the device, and has at least `step_pages` pages.
        """
        if num_free + self.pool.available() + self.num_first_out >= num_needed:
            return end
        return min(end, start + max(num_free, step_pages(self.pool.num_pages)))

    # Stores

    def lacking(self, rows: Rows, store_bit: int) -> Mask:
        """Return which pages should be written to a store: the tier has the page, the store neither has nor is getting
        it, and the session of the page has not ended."""
        known = (self.stored[rows] | self.writing[rows]) & store_bit
        is_held = self.state[rows] & HELD != 0
        lacking: Mask = is_held & (known == 0) & ~self.order.has_ended[rows]
        return lacking

    def begin_write(self, rows: Rows, store_bit: int) -> None:
        """Begin to write the held pages `rows` to a store, and lock these pages until `written`."""
        assert np.count_nonzero(self.state[rows] & HELD) == len(rows)
        assert not np.count_nonzero(self.writing[rows] & store_bit)
        self.writing[rows] |= store_bit
        self.lock(rows)

    def written(self, rows: Rows, ok: Mask, store_bit: int) -> None:
        """Record the answer of a store to a write, and release the locks. `ok`: which pages the store has stored."""
        assert np.count_nonzero(self.writing[rows] & store_bit) == len(rows), "no write of the page is in flight"
        self.writing[rows] &= ~np.uint8(store_bit)
        self.stored[rows[ok]] |= store_bit
        self.unlock(rows)

    def take_sources(self, rows: Rows, stores: Iterable[Store]) -> Counter[Store]:
        """Return the number of pages of a load that were read from each store. A page is counted for its first load
        only."""
        sources = self.source[rows]
        if not sources.any():
            return Counter()
        self.source[rows] = 0
        num_pages = Counter[Store]()
        for store in stores:
            num_pages[store] = int(np.count_nonzero(sources == store.bit))
        return num_pages

    def mark_stored(self, rows: Rows, store_bit: int | npt.NDArray[np.uint8]) -> None:
        """Record that the pages `rows` need not be written to a store, because the store has them, or because they are
        RAW and no store takes RAW pages."""
        self.stored[rows] |= store_bit

    # Proof

    def check(self, locks: npt.NDArray[np.int32] | None = None) -> None:
        """Raise `InvariantError` unless pages, sums, states and locks agree. `locks`: the expected number of locks of
        each row, if known."""
        found = self.table.violations() + self.order.violations()
        state, in_use = self.state, np.flatnonzero(self.state & (IN_FLIGHT | HELD))
        pool_pages = np.concatenate((self.pool_page[in_use], self.second_pool_page[in_use]))
        pool_pages = pool_pages[pool_pages > 0]
        if len(np.unique(pool_pages)) < len(pool_pages):
            found.append("two rows share a page of the pool")
        if len(pool_pages) + self.num_disowned + self.pool.available() != self.pool.num_pages:
            taken = f"{len(pool_pages)} pages are taken, {self.num_disowned} of disowned reads"
            found.append(f"{taken}, {self.pool.available()} free of {self.pool.num_pages}")
        held, flying = np.flatnonzero(state & HELD), np.flatnonzero(state & IN_FLIGHT)
        raw = held[state[held] & RAW != 0]
        sums = {
            "held": (self.num_held, len(held)),
            "in flight": (self.num_in_flight, self.num_pool_pages(flying)),
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
        if not np.array_equal(self.second_pool_page > 0, state & RAW != 0):
            found.append("a page that is not raw has a second pool page")
        if not np.array_equal(self.order.is_first_out, state & (HELD | ABOVE) == HELD | ABOVE):
            found.append("the eviction order and the states disagree about the pages that the device has")
        if self.order.locks[state & (HELD | IN_FLIGHT) == 0].any():
            found.append("a page is locked that the tier lacks")
        if self.writing[state & HELD == 0].any():
            found.append("a page is written that the tier lacks")
        is_absent = state & (HELD | IN_FLIGHT) == 0
        if (self.pool_page | self.second_pool_page)[is_absent].any() or (self.expected_uses[is_absent] != 1.0).any():
            found.append("a row that the tier lacks has a pool page or uses")
        if locks is not None and (wrong := np.flatnonzero(self.order.locks != locks)).size:
            row = int(wrong[0])
            found.append(f"{len(wrong)} pages have other locks: one has {self.order.locks[row]}, {locks[row]} are held")
        if found:
            raise InvariantError("host pages", found)
        self.pool.check()

    # Inside

    def _alloc(self, num_pages: int) -> Sequence[int] | Rows:
        pool_pages = self.pool.alloc(num_pages)
        assert pool_pages is not None, "made available before"
        self.num_in_flight += num_pages
        return pool_pages

    def ensure_free(self, num_pages: int) -> int:
        """Evict until `num_pages` pages of the pool are free or no page is evictable. Returns the number of free
        pages."""
        while (short := num_pages - self.pool.available()) > 0 and len(rows := self.order.take(short)):
            self.drop(rows)
        return self.pool.available()

    def _drop(self, rows: Rows) -> list[int]:
        is_free = self.has(rows) & (self.order.locks[rows] == 0)
        assert np.count_nonzero(is_free) == len(rows), "the page is locked, or the tier lacks it"
        pool_pages = self.pool_pages(rows)
        num_raw = int(np.count_nonzero(self.second_pool_page[rows]))
        self.num_held -= len(rows)
        self.num_raw -= num_raw
        self.num_raw_evictable -= num_raw
        self.num_first_out -= int(np.count_nonzero(self.has(rows, ABOVE)))
        self.order.leave(rows)
        self.state[rows] &= ABOVE
        self.pool_page[rows] = self.second_pool_page[rows] = 0
        self.stored[rows] = self.source[rows] = 0
        return pool_pages

    def _end_flight(self, rows: Rows) -> None:
        """Reset the columns of pages that did not arrive. The pool pages of these pages stay allocated."""
        self.order.end_transfer(rows)
        self.state[rows] &= ABOVE
        self.pool_page[rows] = self.second_pool_page[rows] = self.source[rows] = 0
        self.expected_uses[rows] = 1.0
        self._end(rows)

    def _end(self, rows: Rows) -> None:
        """Drop the reference that a row has while it is in a state, for the rows that are in no state now."""
        self.table.drop(rows[self.state[rows] == 0])

    def _num_raw_unlocked(self, rows: Rows) -> int:
        return int(np.count_nonzero(self.has(rows, RAW) & self.has(rows) & (self.order.locks[rows] == 0)))

    def _apply_expected_uses(self, rows: Rows) -> None:
        """Count the expected uses of pages that have arrived."""
        announced = rows[self.expected_uses[rows] != 1.0]
        if len(announced):
            self.order.expect_uses(announced, self.expected_uses[announced])
            self.expected_uses[announced] = 1.0
