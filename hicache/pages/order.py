"""The order in which the pages of one tier are evicted.

    first out     pages that another tier has as well, if the tier is exclusive: the page used last is evicted first
    ended         pages of sessions that have ended
    plain         all pages of no other class
    kept          pages with a deadline
    expected      pages that queued requests will need

Within a class, the page with the lowest rank is evicted first. Of pages with equal ranks, the page with the youngest
row is evicted first. The end of a prompt is evicted first: a page never ranks below the next page that the same
requests use.

The pages to evict are chosen a batch at a time, with a few vector operations over all rows. If the position of a page
changes after the batch was chosen, or if a new page follows the page, the batch skips it. A page that moves to a
position before the end of the batch is inserted into the batch. A page that was left out only because locked pages
follow it waits for the next batch.
"""

from __future__ import annotations

import itertools
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError
from hicache.pages.frequency import FadingFrequency
from hicache.pages.policy import Fifo, Filo, Lfu, Lru, Mru, Priority, RankPolicy, Ranks, Slru, Uses
from hicache.pages.table import NO_ROW, NO_ROWS, Columns, Mask, PageTable, Rows

Keys = npt.NDArray[np.float64]
Classes = npt.NDArray[np.int8]

_FIRST_OUT, _ENDED, _PLAIN, _KEPT, _EXPECTED, _NO_CLASS = range(6)
_LEAST_BATCH, _BATCH_SHARE = 64, 16
_SAMPLE = 16  # one of this number of pages is in a sample of ranks
_SMALL = 512  # up to this number of evictable pages, each call chooses a new batch
KEPT_SHARE = 0.9  # share of a tier for pages with a deadline; the rest is for prompts without a hint
_PATIENCE = 4.0  # factor on the announced time, so that a next turn that is a little late still hits

# Policies by the names in settings; each tier has its own policy.
RANK_POLICIES: dict[str, type[RankPolicy]] = {
    "auto": FadingFrequency,
    "fifo": Fifo,
    "filo": Filo,
    "lfu": Lfu,
    "lru": Lru,
    "mru": Mru,
    "priority": Priority,
    "slru": Slru,
}


def rank_policy(name: str, setting: str = "eviction_policy") -> RankPolicy:
    """Return a new policy by its name, in upper or lower case. Raises ConfigError if the `name` in `setting` is
    unknown."""
    policy = RANK_POLICIES.get(name.lower())
    if policy is None:
        raise ConfigError(f"{setting}={name!r} is unknown; use one of {', '.join(sorted(RANK_POLICIES))}")
    return policy()


def deadline_s(now_s: float, within_s: float) -> float:
    """Return the deadline of a prompt whose client announces at `now_s` that its next turn follows in `within_s`."""
    return now_s + _PATIENCE * within_s


class _Batch(NamedTuple):
    """Rows in the order of eviction, with the class and the key of each row. `last_classes`, `last_keys`: for each
    page, the class and key of the page that is evicted last among this page and all pages after it in prompts."""

    rows: Rows
    classes: Classes
    keys: Keys
    last_classes: Classes
    last_keys: Keys


_NO_BATCH = _Batch(NO_ROWS, np.empty(0, np.int8), np.empty(0), np.empty(0, np.int8), np.empty(0))


def _with_following(values: npt.NDArray[Any], up: Rows) -> npt.NDArray[Any]:
    """Return for each page the maximum of the values of the page and of all pages after it. `up`: the index of the
    previous page of each page; `NO_ROW` if there is no such page. Overwrites `values`."""
    while True:  # each round doubles the number of following pages; a round without a change is the last
        is_below = up >= 0
        above, below = up[is_below], values[is_below]
        is_higher = below > values[above]
        if not np.count_nonzero(is_higher):
            return values
        np.maximum.at(values, above[is_higher], below[is_higher])
        up = np.where(is_below, up[up], NO_ROW)


class _Hint(NamedTuple):
    """A hint that the pages `rows` will be used before the deadline `until_s`."""

    rows: Rows
    until_s: float
    priority: int


class _Ranks(Columns):
    """The rank of each page in an exclusive tier, where the key of a first-out page is not its rank."""

    fields: ClassVar = {"rank": (np.float64, 0.0)}
    rank: Ranks


class EvictionOrder(Columns):
    """The pages of one tier in the order of eviction. Owned by the scheduler thread.

    `is_held`       whether the tier has the page
    `locks`         locks of the page, held or in flight.
    `expected`      number of queued requests that will need the page.
    `has_ended`     whether the session of the page has ended, without a use of the page since then.
    `keep`          the hint that gives the page a deadline; 0: no hint.
    `class_`, `key` its position in the order: the class, see the module, then the key, the lowest key first. The
                    key is the rank, see `RankPolicy`; for pages that are first out it is a negative tick.
    `is_followed`   whether, since the batch was chosen, the rank of the page rose or a page after it was added.
    `num_after`     number of pages directly after the page, in any prompt, that are held or locked.
    `position`      index of the page in the rows that were sorted last, if it was among these rows.

    `is_linked`: whether a page is evicted after the next pages of its prompt; it is False for windows and states.
    `num_evictable`: held pages without a lock; `num_kept`: pages with a deadline. Other threads may read these two
    numbers.
    """

    fields: ClassVar = {
        "is_held": (np.bool_, False),
        "locks": (np.int32, 0),
        "expected": (np.int32, 0),
        "has_ended": (np.bool_, False),
        "keep": (np.int32, 0),
        "class_": (np.int8, _PLAIN),
        "key": (np.float64, 0.0),
        "is_followed": (np.bool_, False),
        "num_after": (np.int32, 0),
        "position": (np.int64, 0),
    }
    unclean: ClassVar = frozenset(fields) - {"key", "is_followed"}
    is_held: Mask
    locks: npt.NDArray[np.int32]
    expected: npt.NDArray[np.int32]
    has_ended: Mask
    keep: npt.NDArray[np.int32]
    class_: Classes
    key: Keys
    is_followed: Mask
    num_after: npt.NDArray[np.int32]
    position: Rows

    def __init__(self, table: PageTable, policy: RankPolicy, *, is_linked: bool = True) -> None:
        self.table, self.policy, self.at, self._is_linked = table, policy, Uses(table), is_linked
        table.add_columns(self)
        self._generation = policy.generation
        self._ranks: _Ranks | None = None  # None until a page is first out
        self._first_out_ticks = 0
        self.num_evictable = self.num_kept = 0
        self._hints = itertools.count(1)
        self._kept: dict[int, _Hint] = {}  # the oldest first
        self._batch, self._next, self._end_place = _NO_BATCH, 0, (_NO_CLASS, 0.0)
        self._late: list[Rows] = []  # rows that moved to a position before the end of the batch
        self._taken = NO_ROWS  # the pages that `take` returned last

    # Events

    def enter(self, rows: Rows, *, is_transferred: bool = False) -> None:
        """Record that the tier has the pages `rows`, consecutive pages of a prompt. `is_transferred`: release the lock
        of their transfer. The first windows and states of a prompt are evicted first, because later prompts need the
        last windows and states."""
        rows = rows if self._is_linked else rows[::-1]
        at = self.table.span(rows) if len(rows) >= self.table.many else rows
        self.is_held[at] = True
        self.at.note_use(at, len(rows))
        locks = self.locks[at]
        if is_transferred:
            assert np.count_nonzero(locks) == len(locks), "unlocked more often than locked"
            is_free = locks == 1
            self.locks[at] = locks - 1
        else:
            is_free = locks == 0
        if num_free := np.count_nonzero(is_free):
            free = rows[is_free] if num_free < len(rows) else rows
            if not is_transferred:  # a page with a lock is counted already
                self._count_after(free, 1)
            self._enter(free)

    def leave(self, rows: Rows) -> None:
        """Record that the tier has lost the pages `rows`. The locks of a page whose transfer failed stay."""
        if self.num_kept:
            self._end_hints(rows)
        at = self.table.span(rows) if len(rows) >= self.table.many else rows
        locks = self.locks[at]
        free = rows[locks == 0] if np.count_nonzero(locks) else rows
        self.policy.forget(self.at, free, self.num_evictable)
        self._count_after(free, -1)
        self.num_evictable -= len(free)
        self.is_held[at] = False
        self.has_ended[at] = False
        self.class_[at] = np.where(self.expected[at] > 0, _EXPECTED, _PLAIN)

    def lock(self, rows: Rows) -> None:
        """Protect the pages `rows` from eviction until `unlock`. Each row occurs once."""
        if not len(rows):
            return
        at = self.table.span(rows) if len(rows) >= self.table.many else rows
        locks = self.locks[at]
        is_free = locks == 0
        self.locks[at] = locks + 1
        if num_free := np.count_nonzero(is_free):
            num_held = int(np.count_nonzero(self.is_held[at] & is_free))
            self.num_evictable -= num_held
            if num_held < num_free:
                self._count_after(rows[is_free & ~self.is_held[at]], 1)

    def unlock(self, rows: Rows) -> None:
        """Release one lock of each page in `rows`. This does not count as a use."""
        if not len(rows):
            return
        at = self.table.span(rows) if len(rows) >= self.table.many else rows
        locks = self.locks[at]
        assert np.count_nonzero(locks) == len(locks), "unlocked more often than locked"
        is_free = locks == 1
        self.locks[at] = locks - 1
        if num_free := np.count_nonzero(is_free):
            num_held = np.count_nonzero(is_held := self.is_held[at] & is_free)
            if num_held < num_free:
                self._count_after(rows[is_free & ~is_held], -1)
            if num_held:
                self._enter(rows if num_held == len(rows) else rows[is_held])

    def use(self, rows: Rows) -> None:
        """Record that a request used the pages `rows`, consecutive pages of a prompt, which the tier has. Sessions of
        these pages that had ended are open again, and hints of their next turn end."""
        if not len(rows):
            return
        at = self.table.span(rows) if len(rows) >= self.table.many else rows
        if np.count_nonzero(self.has_ended[at]):
            self.go_on(rows)
        if self.num_kept:
            self._end_hints(rows)
        self.at.note_use(at, len(rows))
        locks = self.locks[at]
        free = rows[locks == 0] if np.count_nonzero(locks) else rows
        if len(free):  # the other pages are counted and ranked when they are unlocked
            self.policy.use(self.at, free)
            self.rank_again(free)
        if self._ranks is not None and len(again := rows[self.class_[at] == _FIRST_OUT]):
            self.set_first_out(again)

    def follow(self, rows: Rows) -> None:
        """Record that the tier gets new pages that follow the pages `rows` in prompts."""
        self.is_followed[rows] = True
        self.is_followed[NO_ROW] = False

    def go_on(self, rows: Rows) -> None:
        """Record that a request has begun to use the pages `rows`. Sessions of these pages that had ended are open
        again."""
        if not len(rows):
            return
        if np.count_nonzero(self.has_ended[rows]):
            self.has_ended[rows] = False
            self._set_class(rows)

    @property
    def is_first_out(self) -> Mask:
        """Return which rows are first out: evicted before plain pages, because another tier has these pages too."""
        found: Mask = self.class_ == _FIRST_OUT
        return found

    def set_first_out(self, rows: Rows) -> None:
        """Record that another tier has the pages `rows`, consecutive pages of a prompt, as well."""
        if self._ranks is None:
            self._ranks = _Ranks()
            self.table.add_columns(self._ranks)
            self._ranks.rank[:] = self.key
        self._first_out_ticks += len(rows)
        self.class_[rows] = _FIRST_OUT
        self.key[rows] = np.arange(len(rows)) - self._first_out_ticks
        self._moved(rows)

    def end_first_out(self, rows: Rows) -> None:
        """Record that no other tier has the pages `rows`."""
        if self._ranks is not None:
            self.class_[rows] = _PLAIN
            self.key[rows] = self._ranks.rank[rows]
        self._set_class(rows)

    # Hints of requests

    def expect(self, rows: Rows, change: int) -> None:
        """Add `change` to the number of queued requests that will need the pages `rows`. This does not count as a
        use."""
        self.expected[rows] += change
        self._set_class(rows)

    def expect_uses(self, rows: Rows, num_uses: npt.NDArray[np.float64] | float) -> None:
        """Announce `num_uses` uses of pages that the tier has. Only the policy `auto` counts announced uses."""
        if self.policy.counts_announced:
            self.policy.expect_uses(self.at, rows, num_uses)
            self.rank_again(rows)

    def raise_priority(self, rows: Rows, priority: int) -> None:
        """Raise the priority of the pages `rows` to `priority`, the priority of a request that uses them."""
        lower = rows[self.table.priority[rows] < priority]
        if len(lower):
            self.table.priority[lower] = priority
            self.rank_again(lower)

    def end_session(self, rows: Rows) -> None:
        """Evict the pages `rows` before plain pages until a request uses them."""
        self.has_ended[rows] = True
        self._end_hints(rows)
        self._set_class(rows)

    def keep_until(self, rows: Rows, until_s: float, limit: float, priority: int = 0) -> None:
        """Evict the pages `rows` of a prompt, which the tier has or gets, after plain pages until `until_s` or the next
        use of the pages. If more than `limit` pages would be kept, hints of the lowest priority end, the oldest hint
        first. No hint above `priority` ends. A prompt longer than `limit` is not kept."""
        if not 0 < len(rows) <= limit:
            return
        self._end_hints(rows)
        while self.num_kept + len(rows) > limit:
            lowest = min(self._kept, key=lambda hint: self._kept[hint].priority)
            if self._kept[lowest].priority > priority:
                return
            self._end_hint(lowest)
        hint = next(self._hints)
        self._kept[hint] = _Hint(rows.copy(), until_s, priority)
        self.keep[rows] = hint
        self.num_kept += len(rows)
        self._set_class(rows)

    def expire(self, now_s: float) -> None:
        """End the hints whose deadline has passed."""
        for hint in [hint for hint, kept in self._kept.items() if kept.until_s <= now_s]:
            self._end_hint(hint)

    def end_transfer(self, rows: Rows) -> None:
        """Release one lock of pages whose transfer failed, and end their hints."""
        if self.num_kept:
            self._end_hints(rows)
        self.go_on(rows)
        self.unlock(rows)

    # Pages to evict

    def take(self, num_rows: int) -> Rows:
        """Return the next pages to evict, at most `num_rows` and at least one; none if no page may be evicted.

        The caller calls `leave` or `lock` for each of these pages before the next call. If the caller left a page
        evictable, because an eviction raised or evicted other pages, a later call may return the page again.
        """
        if self._generation != self.policy.generation:
            self._rank_all()
        if self.num_evictable <= _SMALL:
            self._end_batch()
        self._moved(self._taken[self.is_held[self._taken]])
        self._taken = NO_ROWS
        if self._late:
            self._merge_late()
        while self._next < len(self._batch.rows) or self._choose_batch(num_rows):
            rows, is_next = self._next_in_batch(num_rows)
            self._next += len(rows)
            if np.count_nonzero(is_next) < len(rows):
                rows = rows[self._without_followed(rows, is_next)]
            if len(rows):
                self._taken = rows
                return rows
            if self._next == len(self._batch.rows):
                continue
            rows, is_next = self._next_in_batch(len(self._batch.rows))  # skip pages that moved, `num_rows` at a time
            num_moved = int(is_next.argmax()) if np.count_nonzero(is_next) else len(rows)
            num_moved -= num_moved % num_rows
            self._without_followed(rows[:num_moved], is_next[:num_moved])
            self._next += num_moved
        return NO_ROWS

    def _next_in_batch(self, num_rows: int) -> tuple[Rows, Mask]:
        """Return the next `num_rows` pages of the batch, and which of these pages may be evicted and have not moved
        since the batch was chosen."""
        at = slice(self._next, self._next + num_rows)
        rows = self._batch.rows[at]
        is_next = self._is_evictable(rows) & ~self.is_followed[rows]
        is_next &= (self.class_[rows] == self._batch.classes[at]) & (self.key[rows] == self._batch.keys[at])
        return rows, is_next

    def _without_followed(self, rows: Rows, is_evictable: Mask) -> Mask:
        """Return which pages of the batch may be evicted, because all pages after them may be evicted."""
        is_held = self.is_held[rows]
        before = self._before(rows[is_held & ~is_evictable])
        if not np.count_nonzero((before >= 0) & ~self.is_followed[before]):
            return is_evictable
        up = np.where(is_held, self._up(rows), NO_ROW)
        is_blocked = _with_following((~is_evictable).view(np.int8), up) > 0
        self.follow(self._before(rows[is_blocked & is_held]))
        return ~is_blocked

    def eviction_order(self) -> Rows:
        """Return all evictable pages in the present order of eviction."""
        if self._generation != self.policy.generation:
            self._rank_all()
        return self._in_order(np.flatnonzero(self.is_held & (self.locks == 0))).rows

    def num_shared(self, rows: Rows) -> int:
        """Return the number of leading pages of a prompt that other prompts share. The tier must have all pages
        `rows`."""
        position = np.full(len(self.key), NO_ROW)
        position[rows] = np.arange(len(rows))
        others = np.flatnonzero(self.is_held & (position < 0))
        before = self.table.previous[others]
        return int(position[before[before >= 0]].max(initial=NO_ROW)) + 1

    def violations(self) -> list[str]:
        """Return the contradictions between the sums and the columns."""
        found = []
        evictable = int(np.count_nonzero(self.is_held & (self.locks == 0)))
        if self.num_evictable != evictable:
            found.append(f"{self.num_evictable} pages were counted as evictable, {evictable} are")
        kept = int(np.count_nonzero(self.keep))
        if self.num_kept != kept or kept != sum(
            int(np.count_nonzero(self.keep[of_hint.rows] == hint)) for hint, of_hint in self._kept.items()
        ):
            found.append(f"{self.num_kept} pages were counted as kept, {kept} are")
        if (self.locks < 0).any() or (self.expected < 0).any():
            found.append("a page has fewer locks, or is expected by fewer requests, than none")
        is_present = self.is_held | (self.locks > 0)
        before = self._before(np.flatnonzero(is_present))
        if (self.num_after[:-1] != np.bincount(before[before >= 0], minlength=len(self.num_after) - 1)).any():
            found.append("a page has another number of pages after it than was counted")
        is_absent = ~is_present & (self.expected == 0)
        if (self.has_ended | (self.keep > 0) | (self.class_ != _PLAIN))[is_absent].any():
            found.append("a page has a class that the tier lacks")
        if self._ranks is not None and (self.key != self._ranks.rank)[self.is_held & ~self.is_first_out].any():
            found.append("a page has a key that is not its rank")
        return found

    # Inside

    def _count_after(self, rows: Rows, change: int) -> None:
        """Count pages that have become held or locked (1), or neither (-1), for the pages before them."""
        if self._is_linked and len(rows):
            np.add.at(self.num_after, self.table.previous[rows], np.int32(change))  # several times as fast as an int
            self.num_after[NO_ROW] = 0

    def linked(self, rows: Rows) -> None:
        """Count pages that are held or locked already when they are linked."""
        self._count_after(rows[self.is_held[rows] | (self.locks[rows] > 0)], 1)

    def _enter(self, rows: Rows) -> None:
        """Count and rank pages that have become evictable."""
        self.num_evictable += len(rows)
        self.policy.enter(self.at, rows)
        self.rank_again(rows)

    def rank_again(self, rows: Rows) -> None:
        """Rank pages again after a change of their uses, hits or priorities. The tier has each page, or the page is
        locked."""
        ranks = self.policy.ranks(self.at, rows)
        at = self.table.span(rows) if len(rows) >= self.table.many else rows
        column = self.key if self._ranks is None else self._ranks.rank
        has_batch = self._end_place[0] != _NO_CLASS
        if has_batch and np.count_nonzero(has_risen := ranks > column[at]):
            self.follow(self._before(rows[has_risen]))
        column[at] = ranks
        if self._ranks is not None:
            self.key[at] = np.where(self.class_[at] == _FIRST_OUT, self.key[at], ranks)
        if has_batch:
            self._moved(rows)

    def _before(self, rows: Rows) -> Rows:
        """Return for each page the previous page of its prompt, which may be evicted only later; `NO_ROW` if there is
        no such page."""
        return self.table.previous[rows] if self._is_linked else np.full(len(rows), NO_ROW)

    def _rank_all(self) -> None:
        """Rank all pages: the policy has changed all ranks."""
        self._generation = self.policy.generation
        held = np.flatnonzero(self.is_held)
        self._end_batch()
        self.rank_again(held)

    def _end_hints(self, rows: Rows) -> None:
        kept = rows[self.keep[rows] > 0]
        if len(kept):
            self.num_kept -= len(kept)
            hints = {*self.keep[kept].tolist()}
            self.keep[kept] = 0
            for hint in hints:
                if not (self.keep[self._kept[hint].rows] == hint).any():
                    del self._kept[hint]
            self._set_class(kept)

    def _end_hint(self, hint: int) -> None:
        rows = self._kept.pop(hint).rows
        rows = rows[self.keep[rows] == hint]
        self.num_kept -= len(rows)
        self.keep[rows] = 0
        self._set_class(rows)

    def _is_evictable(self, rows: Rows) -> Mask:
        may: Mask = self.is_held[rows] & (self.locks[rows] == 0)
        return may

    def _set_class(self, rows: Rows) -> None:
        """Classify pages again after a change of their hints."""
        classes = np.where(self.has_ended[rows], _ENDED, _PLAIN).astype(np.int8)
        classes[self.keep[rows] > 0] = _KEPT
        classes[self.expected[rows] > 0] = _EXPECTED
        classes[self.class_[rows] == _FIRST_OUT] = _FIRST_OUT
        self.class_[rows] = classes
        self._moved(rows)

    def _moved(self, rows: Rows) -> None:
        """Record pages that may have moved to a position before the end of the batch."""
        if len(rows) and self._end_place[0] != _NO_CLASS and len(late := rows[self._is_in_batch(rows)]):
            self._late.append(late)

    def _is_in_batch(self, rows: Rows) -> Mask:
        """Return which pages may be evicted and have a position before the end of the batch."""
        (classes, keys), (last_class, last_key) = (self.class_[rows], self.key[rows]), self._end_place
        is_before: Mask = (classes < last_class) | ((classes == last_class) & (keys <= last_key))
        return is_before & self._is_evictable(rows) if np.count_nonzero(is_before) else is_before

    def _merge_late(self) -> None:
        """Merge into the batch the rows that moved to a position before its end. Each row is placed after the pages
        that follow it in prompts."""
        late = np.concatenate(self._late)
        self._late.clear()
        before = self._before(late)
        leaves_first = self._is_in_batch(late) & self._leaves_first(late, before)
        self.is_followed[before[~leaves_first & (before >= 0)]] = True
        rows = np.concatenate((self._batch.rows[self._next :], late))
        rows = rows[self._is_in_batch(rows)]
        number = np.arange(len(rows))
        self.position[rows] = number
        self._batch, self._next = self._in_order(rows[self.position[rows] == number]), 0  # without duplicates

    def _leaves_first(self, after: Rows, before: Rows) -> Mask:
        """Return which of the pages `after` have a position before the position of their previous pages `before`."""
        classes, keys = self.class_[after], self.key[after]
        above, keys_above = self.class_[before], self.key[before]
        leaves_first: Mask = (classes < above) | ((classes == above) & (keys <= keys_above))
        return leaves_first

    def _choose_batch(self, num_rows: int) -> bool:
        """Choose a batch of the pages that are evicted first, at least `num_rows` pages if possible. Returns whether
        the batch has a page."""
        self._end_batch()
        rows = np.flatnonzero(self.is_held & (self.locks == 0))
        if not len(rows):
            return False
        most = num_sorted = max(_LEAST_BATCH, num_rows, len(rows) // _BATCH_SHARE)
        classes = self.class_[rows]
        first = rows[classes == classes.min()]
        if len(first) < min(most, len(rows)) and self._leads_its_followers(rows):
            rows = first
        batch = self._in_order(self._lowest(rows if len(first) < most else first, num_sorted), most)
        while len(batch.rows) < most and num_sorted < len(rows):
            num_sorted *= 4
            batch = self._in_order(self._lowest(rows, num_sorted), most)
        if len(batch.rows):
            self._batch, self._next = batch, 0
            self._end_place = int(batch.last_classes[-1]), float(batch.last_keys[-1])
        return len(batch.rows) > 0

    def _leads_its_followers(self, rows: Rows) -> bool:
        """Return whether each page is evicted after the pages that follow it in its prompt. `rows`: all evictable
        pages."""
        linked = rows[self.class_[rows] != _FIRST_OUT]
        before = self._before(rows)
        is_below = self._is_evictable(before) & (self.class_[before] != _FIRST_OUT)
        after, before = rows[is_below], before[is_below]
        leads = len(after) == self.num_after[linked].sum() and self._leaves_first(after, before).all()
        return bool(leads)

    def _lowest(self, rows: Rows, num_rows: int) -> Rows:
        """Return at least `num_rows` of `rows`, in no order: the pages with the first positions."""
        if num_rows >= len(rows):
            return rows
        classes = self.class_[rows]
        last_class = np.partition(classes, num_rows - 1)[num_rows - 1]
        first, rows = rows[classes < last_class], rows[classes == last_class]
        keys, num_left = self.key[rows], num_rows - len(first)
        if 4 * num_left < len(rows):  # a bound for about twice the pages, from a sample, leaves few pages to partition
            bound = np.partition(keys[::_SAMPLE], 2 * num_left // _SAMPLE)[2 * num_left // _SAMPLE]
            if np.count_nonzero(is_low := keys <= bound) >= num_left:
                rows, keys = rows[is_low], keys[is_low]
        return np.concatenate((first, rows[keys <= np.partition(keys, num_left - 1)[num_left - 1]]))

    def _in_order(self, rows: Rows, most: int | None = None) -> _Batch:
        """Return the rows that may be evicted, in the order of eviction, at most `most` rows. `rows`: different
        unlocked pages of the tier; if a page is in `rows`, all pages with earlier positions are too.

        Each page is placed after the pages that follow it in prompts. A page is left out if a page that is not in
        `rows` follows it."""
        rows = rows[np.lexsort((-self.table.age[rows], -self.table.index[rows], self.key[rows], self.class_[rows]))]
        classes, keys = self.class_[rows], self.key[rows]
        is_linked = (classes != _FIRST_OUT) & self._is_linked
        number, up = np.arange(len(rows)), self._up(rows)
        is_below = (up >= 0) & is_linked[up]
        is_blocked = (self.num_after[rows] > np.bincount(up[is_below], minlength=len(rows))) & is_linked
        if not np.count_nonzero(is_blocked | (is_below & (number > up))):
            return _Batch(rows[:most], classes[:most], keys[:most], classes[:most], keys[:most])
        # The last position among the page and the pages after it.
        last = _with_following(np.where(is_blocked, len(rows), number), np.where(is_below, up, NO_ROW))
        at = np.lexsort((-self.table.index[rows], last))
        at = at[last[at] < len(rows)][:most]
        last = last[at]
        return _Batch(rows[at], classes[at], keys[at], classes[last], keys[last])

    def _up(self, rows: Rows) -> Rows:
        """Return for each page the index in `rows` of the previous page of its prompt; `NO_ROW` if `rows` lacks it."""
        self.position[rows] = np.arange(len(rows))
        before = self._before(rows)
        up = np.minimum(self.position[before], len(rows) - 1)
        return np.where(rows[up] == before, up, NO_ROW)

    def _end_batch(self) -> None:
        self._batch, self._next, self._end_place = _NO_BATCH, 0, (_NO_CLASS, 0.0)
        self.is_followed[:] = False
        self._late.clear()
