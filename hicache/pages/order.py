"""The order in which the pages of one tier are evicted.

    first out     pages that another tier has as well, if the tier is exclusive: the one used last leaves first
    ended         pages of sessions that have ended
    plain         all others
    kept          pages with a deadline
    expected      pages that queued requests will need

Within a class the page with the lowest rank leaves first, and of equal ranks the one with the youngest row. Of a prompt
the end leaves first: a page that requests use with what follows it never ranks below that.

Victims are chosen a batch at a time, with a few vector operations over all rows. A page of the batch whose place in the
order has changed since, or which was followed by a new page, is skipped; a page that comes to a place before the end of
the batch is put into it. A page that only locked ones kept from the batch waits for the next.
"""

from __future__ import annotations

import itertools
from typing import ClassVar, NamedTuple

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
_SMALL = 512  # pages of a tier that chooses each time
KEPT_SHARE = 0.9  # of a tier, for pages with a deadline; the rest is for prompts without a hint
_PATIENCE = 4.0  # factor on the announced time: without it a turn that comes later than announced would miss

# What a setting of an eviction policy may name; each tier has a policy of its own.
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
    """A new policy `name`, in any case. ConfigError for an unknown name, which `setting` gave."""
    policy = RANK_POLICIES.get(name.lower())
    if policy is None:
        raise ConfigError(f"{setting}={name!r} is unknown; use one of {', '.join(sorted(RANK_POLICIES))}")
    return policy()


def deadline_s(now_s: float, within_s: float) -> float:
    """Until when a prompt is kept whose next turn was announced at `now_s`, by a client whose times may be wrong."""
    return now_s + _PATIENCE * within_s


class _Batch(NamedTuple):
    """Rows in the order in which they leave, the class and the key that each has, and those of the last of it and of
    what follows it, after which it leaves."""

    rows: Rows
    classes: Classes
    keys: Keys
    last_classes: Classes
    last_keys: Keys

    def chosen(self, at: Rows | Mask | slice) -> _Batch:
        rows, classes, keys, last_classes, last_keys = self
        return _Batch(rows[at], classes[at], keys[at], last_classes[at], last_keys[at])

    def sorted(self, table: PageTable) -> _Batch:
        index, age = -table.index[self.rows], -table.age[self.rows]
        return self.chosen(np.lexsort((age, index, self.last_keys, self.last_classes)))


_NO_BATCH = _Batch(NO_ROWS, np.empty(0, np.int8), np.empty(0), np.empty(0, np.int8), np.empty(0))


class EvictionOrder(Columns):
    """The pages that one tier has, and which of them is evicted next. Owned by the scheduler thread.

    `is_held`     the tier has the page
    `locks`       holders that need it to stay; also of a page that a transfer brings
    `rank`        see `RankPolicy`
    `expected`    queued requests that will need it
    `has_ended`   its session has, and nobody used it since
    `keep`        the hint that gives it a deadline; 0: none
    `first_out`   a tick, if it leaves before all others: the highest first; else 0
    `class_`, `key`  its place in the order: the class, see the module, and what is lowest first within that
    `is_followed` since the batch was chosen a page that follows it has come, or ranks higher than before

    `is_linked`: whether a page leaves after the next pages of its prompt; False for windows and states.
    `num_evictable`, `num_kept`: pages that
    are held and not locked, and with a deadline; other threads may read them.
    """

    fields: ClassVar = {
        "is_held": (np.bool_, False),
        "locks": (np.int32, 0),
        "rank": (np.float64, 0.0),
        "expected": (np.int32, 0),
        "has_ended": (np.bool_, False),
        "keep": (np.int32, 0),
        "first_out": (np.int64, 0),
        "class_": (np.int8, _PLAIN),
        "key": (np.float64, 0.0),
        "is_followed": (np.bool_, False),
    }
    is_held: Mask
    locks: npt.NDArray[np.int32]
    rank: Ranks
    expected: npt.NDArray[np.int32]
    has_ended: Mask
    keep: npt.NDArray[np.int32]
    first_out: npt.NDArray[np.int64]
    class_: Classes
    key: Keys
    is_followed: Mask

    def __init__(self, table: PageTable, policy: RankPolicy, *, is_linked: bool = True) -> None:
        self.table, self.policy, self.at, self._is_linked = table, policy, Uses(table), is_linked
        table.add_columns(self)
        self._generation = policy.generation
        self._first_out_ticks = 0
        self.num_evictable = self.num_kept = 0
        self._hints = itertools.count(1)
        self._kept: dict[int, tuple[Rows, float]] = {}  # by hint, the oldest first: its rows, and its deadline
        self._batch, self._next, self._end_place = _NO_BATCH, 0, (_NO_CLASS, 0.0)
        self._late: list[Rows] = []  # rows that have come to a place before the end of the batch

    # What happens to pages

    def enter(self, rows: Rows, *, is_transferred: bool = False) -> None:
        """Record that the tier has these, which follow each other in a prompt. `is_transferred`: release the lock of
        their transfer. Of windows and states the first leave first: later prompts need the last."""
        rows = rows if self._is_linked else rows[::-1]
        self.is_held[rows] = True
        self.at.note_use(rows)
        if is_transferred:
            self.unlock(rows)
        else:
            self._enter(rows[self.locks[rows] == 0])

    def leave(self, rows: Rows) -> None:
        """The tier has these no more. Locks of a page whose transfer failed stay."""
        self._end_hints(rows)
        free = rows[self.locks[rows] == 0]
        self.policy.forget(self.at, free)
        self.num_evictable -= len(free)
        self.is_held[rows] = self.has_ended[rows] = False
        self.first_out[rows] = 0
        self.class_[rows] = np.where(self.expected[rows] > 0, _EXPECTED, _PLAIN)

    def lock(self, rows: Rows) -> None:
        """Somebody needs these to stay. A row occurs once."""
        locks = self.locks[rows]
        num_first = int(np.count_nonzero(self.is_held[rows] & (locks == 0)))
        self.locks[rows] = locks + 1
        self.num_evictable -= num_first
        self.policy.lock(num_first)

    def unlock(self, rows: Rows) -> None:
        """Undo one `lock`, which is no use."""
        locks = self.locks[rows]
        assert locks.all(), "unlocked more often than locked"
        self.locks[rows] = locks - 1
        self._enter(rows[self.is_held[rows] & (locks == 1)])

    def use(self, rows: Rows) -> None:
        """A request used these, which follow each other in a prompt and which the tier has. Their sessions go on, and
        the next turn of a prompt that was kept has come."""
        self.go_on(rows)
        self._end_hints(rows)
        self.at.note_use(rows)
        self.policy.use(self.at, rows[self.locks[rows] == 0])
        self._rank(rows)
        if self._first_out_ticks and len(again := rows[self.first_out[rows] > 0]):
            self._put_first_out(again)
            self._set_class(again)

    def follow(self, rows: Rows) -> None:
        """The tier gets pages that follow these in a prompt."""
        self.is_followed[rows] = True

    def go_on(self, rows: Rows) -> None:
        """A request has begun to use these: if their session has ended, it goes on."""
        if self.has_ended[rows].any():
            self.has_ended[rows] = False
            self._set_class(rows)

    def set_first_out(self, rows: Rows) -> None:
        """Another tier has these as well from now on, which follow each other in a prompt."""
        self._put_first_out(rows)
        self._set_class(rows)

    def end_first_out(self, rows: Rows) -> None:
        """No other tier has these."""
        self.first_out[rows] = 0
        self._set_class(rows)

    # What requests say of them

    def expect(self, rows: Rows, change: int) -> None:
        """`change` more queued requests will need these, or fewer. That is no use."""
        self.expected[rows] += change
        self._set_class(rows)

    def expect_uses(self, rows: Rows, num_uses: npt.NDArray[np.float64] | float) -> None:
        """These, which the tier has, will be used so often. Counts under the policy `auto` alone."""
        self.policy.expect_uses(self.at, rows, num_uses)
        self._rank(rows)

    def raise_priority(self, rows: Rows, priority: int) -> None:
        """A request of `priority` uses these: none has a lower one from now on."""
        lower = rows[self.table.priority[rows] < priority]
        if len(lower):
            self.table.priority[lower] = priority
            self.rank_again(lower)

    def rank_again(self, rows: Rows) -> None:
        """The hits or the priority of these, which the tier has, have changed without a use."""
        self._rank(rows)

    def end_session(self, rows: Rows) -> None:
        """Nobody will ask for these again: they leave before plain ones until somebody uses them."""
        self.has_ended[rows] = True
        self._end_hints(rows)
        self._set_class(rows)

    def keep_until(self, rows: Rows, until_s: float, limit: float) -> None:
        """Evict these, the pages of a prompt that the tier has or gets, after plain ones until `until_s`, or until they
        are used. Older hints end, the oldest first, until at most `limit` pages are kept. A prompt that exceeds the
        limit alone is not kept."""
        if not 0 < len(rows) <= limit:
            return
        self._end_hints(rows)
        while self.num_kept + len(rows) > limit:
            self._end_hint(next(iter(self._kept)))
        hint = next(self._hints)
        self._kept[hint] = rows.copy(), until_s
        self.keep[rows] = hint
        self.num_kept += len(rows)
        self._set_class(rows)

    def expire(self, now_s: float) -> None:
        """End the deadlines up to now."""
        for hint in [hint for hint, (_, until_s) in self._kept.items() if until_s <= now_s]:
            self._end_hint(hint)

    def end_keeps(self, rows: Rows) -> None:
        """A transfer did not bring these."""
        self._end_hints(rows)
        self.go_on(rows)

    # Victims

    def take(self, num_rows: int) -> Rows:
        """Some of the next `num_rows` pages to be evicted, none where none may be. The caller makes each `leave` before
        it asks again."""
        self._rank_again()
        if self.num_evictable <= _SMALL:
            self._end_batch()
        if self._late:
            self._merge_late()
        while self._next < len(self._batch.rows) or self._choose_batch(num_rows):
            at = slice(self._next, self._next + num_rows)
            rows = self._batch.rows[at]
            classes, keys = self._places(rows)
            may_leave = self._may_leave(rows)
            may_leave &= (classes == self._batch.classes[at]) & (keys == self._batch.keys[at])
            may_leave = self._without_followed(rows, may_leave)
            self._next += len(rows)
            if may_leave.any():
                return rows[may_leave]
        return NO_ROWS

    def put_back(self, rows: Rows) -> None:
        """The caller does not evict these, which `take` returned."""
        self._moved(rows)

    def _without_followed(self, rows: Rows, may_leave: Mask) -> Mask:
        """Which of these pages of the batch may leave, since those that follow them may."""
        while True:
            may_leave = may_leave & ~self.is_followed[rows]
            stays = rows[~may_leave]
            before = self._before(stays[self.is_held[stays]])
            before = before[before >= 0]
            if self.is_followed[before].all():
                return may_leave
            self.is_followed[before] = True

    def leaving(self) -> Rows:
        """All that may be evicted, in the order in which they would leave if nothing changed from now on."""
        self._rank_again()
        return self._in_order(np.flatnonzero(self.is_held & (self.locks == 0))).rows

    def num_shared(self, rows: Rows) -> int:
        """How many of the first pages of a prompt, all of which the tier has, others follow than the rest of it."""
        position = np.full(len(self.rank), NO_ROW)
        position[rows] = np.arange(len(rows))
        others = np.flatnonzero(self.is_held & (position < 0))
        before = self.table.previous[others]
        return int(position[before[before >= 0]].max(initial=NO_ROW)) + 1

    def violations(self) -> list[str]:
        """Where the sums are not those of the columns."""
        found = []
        evictable = int(np.count_nonzero(self.is_held & (self.locks == 0)))
        if self.num_evictable != evictable:
            found.append(f"{self.num_evictable} pages were counted as evictable, {evictable} are")
        kept = int(np.count_nonzero(self.keep))
        if self.num_kept != kept or kept != sum(
            int(np.count_nonzero(self.keep[rows] == hint)) for hint, (rows, _) in self._kept.items()
        ):
            found.append(f"{self.num_kept} pages were counted as kept, {kept} are")
        if (self.locks < 0).any() or (self.expected < 0).any():
            found.append("a page has fewer locks, or is expected by fewer requests, than none")
        return found

    # Inside

    def _enter(self, rows: Rows) -> None:
        if len(rows):
            self.num_evictable += len(rows)
            self.policy.enter(self.at, rows)
            self._rank(rows)

    def _rank(self, rows: Rows) -> None:
        ranks = self.policy.ranks(self.at, rows)
        if self._end_place[0] != _NO_CLASS:
            before = self._before(rows[ranks > self.rank[rows]])
            self.is_followed[before[before >= 0]] = True
        self.rank[rows] = ranks
        self.key[rows] = np.where(self.first_out[rows] > 0, self.key[rows], ranks) if self._first_out_ticks else ranks
        self._moved(rows)

    def _before(self, rows: Rows) -> Rows:
        """The rows of the pages after which these may not be evicted; `NO_ROW` for none."""
        return self.table.previous[rows] if self._is_linked else np.full(len(rows), NO_ROW)

    def _rank_again(self) -> None:
        """With another half-life all ranks are others."""
        if self._generation != self.policy.generation:
            self._generation = self.policy.generation
            held = np.flatnonzero(self.is_held)
            self._end_batch()
            self._rank(held)

    def _put_first_out(self, rows: Rows) -> None:
        self._first_out_ticks += len(rows)
        self.first_out[rows] = np.arange(self._first_out_ticks, self._first_out_ticks - len(rows), -1)

    def _end_hints(self, rows: Rows) -> None:
        if not self.num_kept:
            return
        kept = rows[self.keep[rows] > 0]
        if len(kept):
            self.num_kept -= len(kept)
            hints = {*self.keep[kept].tolist()}
            self.keep[kept] = 0
            for hint in hints:
                if not (self.keep[self._kept[hint][0]] == hint).any():
                    del self._kept[hint]
            self._set_class(kept)

    def _end_hint(self, hint: int) -> None:
        rows, _ = self._kept.pop(hint)
        rows = rows[self.keep[rows] == hint]
        self.num_kept -= len(rows)
        self.keep[rows] = 0
        self._set_class(rows)

    def _may_leave(self, rows: Rows) -> Mask:
        may: Mask = self.is_held[rows] & (self.locks[rows] == 0)
        return may

    def _places(self, rows: Rows) -> tuple[Classes, Keys]:
        """Where these are in the order: their classes, and what is lowest first within each."""
        return self.class_[rows], self.key[rows]

    def _set_class(self, rows: Rows) -> None:
        """What requests say of these, or the tier above, has changed."""
        classes = np.where(self.has_ended[rows], _ENDED, _PLAIN).astype(np.int8)
        classes[self.keep[rows] > 0] = _KEPT
        classes[self.expected[rows] > 0] = _EXPECTED
        first_out = self.first_out[rows]
        classes[first_out > 0] = _FIRST_OUT
        self.class_[rows] = classes
        self.key[rows] = np.where(first_out > 0, -first_out, self.rank[rows])
        self._moved(rows)

    def _moved(self, rows: Rows) -> None:
        """Their places in the order may be others: those that come before the end of the batch are put into it."""
        if self._end_place[0] != _NO_CLASS and len(late := rows[self._is_in_batch(rows)]):
            self._late.append(late)

    def _is_in_batch(self, rows: Rows) -> Mask:
        """Which of these may leave, and have a place before the end of the batch."""
        (classes, keys), (last_class, last_key) = self._places(rows), self._end_place
        is_before: Mask = (classes < last_class) | ((classes == last_class) & (keys <= last_key))
        return is_before & self._may_leave(rows)

    def _merge_late(self) -> None:
        """Put the rows into the batch that have come to a place before its end, each behind the pages that follow
        it."""
        late = np.unique(np.concatenate(self._late))
        self._late.clear()
        before = self._before(late)
        after, before = late[before >= 0], before[before >= 0]
        self.is_followed[before[~(self._is_in_batch(after) & self._leaves_first(after, before))]] = True
        left = self._batch.rows[self._next :]
        rows = np.concatenate((left[~np.isin(left, late)], late))
        self._batch, self._next = self._in_order(rows[self._is_in_batch(rows)]), 0

    def _choose_batch(self, num_rows: int) -> bool:
        """Choose the pages that leave first, at least `num_rows` of them if there are so many; whether there is any."""
        self._end_batch()
        rows = np.flatnonzero(self.is_held & (self.locks == 0))
        if not len(rows):
            return False
        most = max(_LEAST_BATCH, num_rows, len(rows) // _BATCH_SHARE)
        batch = self._in_order(rows, most)
        if len(batch.rows):
            self._batch, self._next = batch, 0
            self._end_place = int(batch.last_classes[-1]), float(batch.last_keys[-1])
        return len(batch.rows) > 0

    def _in_order(self, rows: Rows, most: int | None = None) -> _Batch:
        """Those of `rows` that may leave, in their order, at least `most` of the first. `rows`: unlocked pages that the
        tier has, and with each page all that leave before it."""
        classes, keys = self._places(rows)
        held = np.flatnonzero(self.is_held | (self.locks > 0))
        before = self._before(held)
        before = np.where((before >= 0) & self.is_held[before] & (self.first_out[before] == 0), before, NO_ROW)
        if self._leads_its_followers(held, before):
            if most is not None:
                is_first = classes == classes.min()
                rows, classes, keys = rows[is_first], classes[is_first], keys[is_first]
                if most < len(rows):
                    is_chosen = keys <= np.partition(keys, most - 1)[most - 1]
                    rows, classes, keys = rows[is_chosen], classes[is_chosen], keys[is_chosen]
            return _Batch(rows, classes, keys, classes, keys).sorted(self.table)
        return self._behind_followers(_Batch(rows, classes, keys, classes, keys).sorted(self.table), held, before, most)

    def _leads_its_followers(self, held: Rows, before: Rows) -> bool:
        """Whether each page leaves after those that follow it by its own place: `before` are the pages before
        `held`."""
        after, before = held[before >= 0], before[before >= 0]
        is_free = self.locks[before] == 0
        after, before = after[is_free], before[is_free]
        return bool((self._leaves_first(after, before) & (self.locks[after] == 0)).all())

    def _leaves_first(self, after: Rows, before: Rows) -> Mask:
        """Which of `after` leave before those of `before`, the pages before them, by their own places."""
        (classes, keys), (above, keys_above) = self._places(after), self._places(before)
        leaves_first: Mask = (classes < above) | ((classes == above) & (keys <= keys_above))
        return leaves_first

    def _behind_followers(self, batch: _Batch, held: Rows, before: Rows, most: int | None) -> _Batch:
        """`batch`, all that nobody has locked in the order of their own places, such that each leaves after those that
        follow it; without those that locked ones follow."""
        position = np.full(len(self.rank), NO_ROW)
        position[held] = np.arange(len(held))
        up = np.where(before >= 0, position[before], NO_ROW)
        last = np.full(len(held), len(batch.rows))  # of those that follow: the last place in the order, or none
        last[position[batch.rows]] = np.arange(len(batch.rows))
        while (is_below := up >= 0).any():  # each round reaches twice as far
            np.maximum.at(last, up[is_below], last[is_below])
            up = np.where(is_below, up[up], NO_ROW)
        last = last[position[batch.rows]]
        at = np.lexsort((-self.table.index[batch.rows], last))
        at = at[last[at] < len(batch.rows)][:most]
        last = last[at]
        chosen = batch.chosen(at)
        return chosen._replace(last_classes=batch.classes[last], last_keys=batch.keys[last])

    def _end_batch(self) -> None:
        self._batch, self._next, self._end_place = _NO_BATCH, 0, (_NO_CLASS, 0.0)
        self.is_followed[:] = False
        self._late.clear()
