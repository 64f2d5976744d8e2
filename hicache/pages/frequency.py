"""The policy `auto`: ranks pages by their uses, which decay, and remembers the uses of evicted pages.

Uses decay: the weight of a use halves in a half-life, measured in pages that requests have used. A rank is the
logarithm of the sum of these weights, as in LRFU (Lee et al., IEEE Transactions on Computers 50(12), 2001):

    rank = log2(sum over uses of 2^(t / half_life)),  t: time of the use, in pages used

so the order of ranks does not change as uses decay. The uses of an evicted page count again when the page returns to
the tier, like the uses of ghost entries in ARC and LIRS. If requests use many more pages between two uses of a prefix
than the tier has, only these remembered uses distinguish a prefix that returns from a prefix that does not.

The half-life follows from the requests:

    3 * median age of uses * share of uses older than the content of the tier * trust

If recency suffices, the share is small and the order is nearly the order of `lru`. `trust` falls while `lru` would hit
more. A sample of the pages, chosen by their names, measures the hits of `lru` (SHARDS, Waldspurger et al., FAST 2015).
docs/decisions/035-the-default-policy.md has the comparison.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hicache.pages.policy import RankPolicy, Ranks, Uses
from hicache.pages.table import Columns, Mask, Rows

_HALF_LIVES = 3.0
_UNKNOWN_HALF_LIFE = float(1 << 40)  # before the first repeated use: uses do not decay
# Two uses count as one if they are closer together than this share of the half-life, because a waiting request is
# matched several times.
_ONE_USE = 1 / 64
_BUCKETS_PER_OCTAVE, _NUM_BUCKETS = 2, 128
_ADAPT_AFTER = 512  # number of repeated uses after which the half-life is adapted
_FADE_AFTER = 1 << 17  # number of uses after which the weights of older uses are halved
_TOLERANCE = 0.5  # octaves of error of the half-life; a change of the half-life ranks all pages again
# A use is forgotten after this number of half-lives, or after this number of times the pages of the tier, whichever is
# longer. Both are counted in used pages.
_REMEMBERED = 8.0
_LEAST_REMEMBERED, _MOST_REMEMBERED = 1 << 12, 1 << 18  # number of remembered pages; 24 bytes each
_BEHIND = 1.1  # `trust` falls if `lru` would hit this many times as much
_MIN_TRUST = 1 / 64
_MAX_LEVELS = 32  # maximum levels of priority; more levels would keep unused pages forever
_SAMPLED_PAGES = 2048  # maximum number of pages of the shadow cache


class _Remembered(Columns):
    """Uses of evicted pages by name. If two pages have the same entry, the later page replaces the earlier page."""

    fields: ClassVar = {"name": (np.uint64, 0), "uses": (np.float64, 0.0), "used_at": (np.int64, 0)}
    name: npt.NDArray[np.uint64]
    uses: npt.NDArray[np.float64]
    used_at: npt.NDArray[np.int64]

    def __init__(self) -> None:
        self.size, self.is_empty = _LEAST_REMEMBERED, True
        self.grow(self.size)

    def ensure_free(self, num_pages: int) -> None:
        """Grow the table to `num_pages` entries, within a limit."""
        size = min(_MOST_REMEMBERED, 1 << max(1, num_pages - 1).bit_length())
        if size > self.size:
            old = np.flatnonzero(self.uses)
            names, uses, used_at = self.name[old], self.uses[old], self.used_at[old]
            self.size = size
            self.grow(size)
            self.uses[:] = 0.0
            self.put(names, uses, used_at)

    def put(self, names: npt.NDArray[np.uint64], uses: Ranks, used_at: npt.NDArray[np.int64]) -> None:
        at = names % np.uint64(self.size)
        self.name[at], self.uses[at], self.used_at[at] = names, uses, used_at
        self.is_empty = False

    def take(self, names: npt.NDArray[np.uint64], since: float) -> tuple[Mask, Ranks, npt.NDArray[np.int64]]:
        """Return which pages are remembered and were used after `since`, with their uses and the times of the last
        uses."""
        at = names % np.uint64(self.size)
        known = (self.uses[at] > 0) & (self.name[at] == names) & (self.used_at[at] >= since)
        uses, used_at = self.uses[at], self.used_at[at]
        self.uses[at[known]] = 0.0
        return known, uses, used_at


class _ShadowLru:
    """A shadow cache: the sampled pages that `lru` would keep in a tier of `capacity` pages, and the number of uses
    that would hit."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        self._every = 1  # the sample has one page of this number of pages
        self.num_hits = 0

    def use(self, names: npt.NDArray[np.uint64], capacity: int) -> Mask:
        """Record uses of pages, the latest use first. Returns which of the pages are in the sample."""
        every = 1 << max(0, math.ceil(math.log2(capacity / _SAMPLED_PAGES)))
        if every > self._every:
            self._every = every
            self._held = OrderedDict.fromkeys(name for name in self._held if not name % every)
        sampled: Mask = names % np.uint64(self._every) == 0
        held, most = self._held, max(1, capacity // self._every)
        uses = names[sampled][::-1].tolist()
        num_misses, use_again, forget = 0, held.move_to_end, held.popitem
        for name in uses:
            if name in held:
                use_again(name)
            else:
                held[name] = None
                num_misses += 1
                if len(held) > most:
                    forget(False)
        self.num_hits += len(uses) - num_misses
        while len(held) > most:
            forget(False)
        return sampled


class FadingFrequency(RankPolicy):
    """The policy `auto`, see the module's docstring. `half_life`: the half-life of uses, in pages that requests have
    used."""

    reads_names = True
    reads_created = False
    counts_announced = True

    def __init__(self) -> None:
        self.half_life = _UNKNOWN_HALF_LIFE
        self._seen, self._capacity = 0, 1  # pages used so far; unlocked pages of the tier at the last eviction
        self._evicted = _Remembered()
        self._ages = np.zeros(_NUM_BUCKETS)  # histogram of uses, by the age of the previous use of the page
        self._num_ages = self._num_new_ages = 0
        self._shadow, self._trust = _ShadowLru(), 1.0
        self._num_hits = self._judged_at = 0

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        """Return the rank of each page. A level of priority doubles the uses of a page."""
        levels = np.minimum(at.table.priority[rows], _MAX_LEVELS)
        ranks: Ranks = np.log2(np.maximum(at.uses[rows], 1e-300)) + at.used_at[rows] / self.half_life + levels
        return ranks

    def enter(self, at: Uses, rows: Rows) -> None:
        """Restore the remembered uses of pages that return to the tier, and count the uses of pages that were only
        locked."""
        is_new = at.uses[rows] == 0
        num_new = np.count_nonzero(is_new)
        if num_new < len(rows):
            self.use(at, rows[~is_new] if num_new else rows)
        if not num_new:
            return
        new = rows[is_new] if num_new < len(rows) else rows
        now = self._see(at, new)
        at.counted[new] = at.table.hits[new]
        if self._evicted.is_empty:
            at.uses[new], at.used_at[new] = 1.0, now
            return
        since = self._seen - _REMEMBERED * max(self.half_life, self._capacity)
        known, uses, used_at = self._evicted.take(at.table.name[new], since)
        at.uses[new], at.used_at[new] = np.where(known, uses, 1.0), np.where(known, used_at, now)
        if np.count_nonzero(known):
            self._count(at, new[known], now[known])

    def use(self, at: Uses, rows: Rows) -> None:
        """Count a use of each page with hits since its last counted use."""
        used = rows[at.counted[rows] != at.table.hits[rows]]
        if len(used):
            at.counted[used] = at.table.hits[used]
            now = self._see(at, used, are_held=True)
            self._count(at, used, now)

    def forget(self, at: Uses, rows: Rows, num_evictable: int) -> None:
        self._capacity = max(1, num_evictable)
        self._evicted.ensure_free(int(_REMEMBERED * max(self._capacity, min(self.half_life, _MOST_REMEMBERED))))
        self._evicted.put(at.table.name[rows], at.uses[rows], at.used_at[rows])
        at.uses[rows] = 0.0

    def expect_uses(self, at: Uses, rows: Rows, num_uses: npt.NDArray[np.float64] | float) -> None:
        self.enter(at, rows)
        at.uses[rows] = np.maximum(at.uses[rows], num_uses)
        at.used_at[rows] = self._seen

    def uses_of(self, at: Uses, rows: Rows) -> Ranks:
        faded: Ranks = at.uses[rows] * np.exp2((at.used_at[rows] - self._seen) / self.half_life)
        return np.maximum(1.0, faded)

    def _see(self, at: Uses, rows: Rows, *, are_held: bool = False) -> npt.NDArray[np.int64]:
        """Record uses of pages; the first page counts as used last. Returns the time of each use, in pages that
        requests have used."""
        self._seen += len(rows)
        if self._capacity > 1:  # only if the tier has evicted pages
            sampled = self._shadow.use(at.table.name[rows], self._capacity)
            if are_held:
                self._num_hits += int(np.count_nonzero(sampled))
        return np.arange(self._seen, self._seen - len(rows), -1)

    def _count(self, at: Uses, rows: Rows, now: npt.NDArray[np.int64]) -> None:
        ages = now - at.used_at[rows]
        counts = ages > _ONE_USE * min(self.half_life, self._capacity)
        rows, now, ages = rows[counts], now[counts], ages[counts]
        if not len(rows):
            return
        at.uses[rows] = 1.0 + at.uses[rows] * np.exp2(-ages / self.half_life)
        at.used_at[rows] = now
        buckets = np.minimum((np.log2(ages) * _BUCKETS_PER_OCTAVE).astype(np.int64), _NUM_BUCKETS - 1)
        self._ages += np.bincount(buckets, minlength=_NUM_BUCKETS)
        self._num_new_ages += len(rows)
        if self._num_new_ages >= _ADAPT_AFTER and self._capacity > 1:  # only if the tier has evicted pages
            self._num_ages, self._num_new_ages = self._num_ages + self._num_new_ages, 0
            self._adapt()

    def _adapt(self) -> None:
        if self._seen - self._judged_at > 2 * self._capacity:
            is_behind = self._shadow.num_hits > _BEHIND * self._num_hits
            self._trust = max(_MIN_TRUST, self._trust / 4) if is_behind else min(1.0, self._trust * 2**0.25)
            self._shadow.num_hits = self._num_hits = 0
            self._judged_at = self._seen
        half_life = max(1.0, _HALF_LIVES * self._median() * self._late_share() * self._trust)
        if abs(math.log2(half_life / self.half_life)) > _TOLERANCE:
            self.half_life = half_life
            self.generation += 1
        if self._num_ages >= _FADE_AFTER:
            self._ages /= 2
            self._num_ages = 0

    def _median(self) -> float:
        """Return the median age of uses."""
        bucket = int(np.searchsorted(np.cumsum(self._ages), self._ages.sum() / 2))
        return math.pow(2.0, (bucket + 0.5) / _BUCKETS_PER_OCTAVE)

    def _late_share(self) -> float:
        """Return the share of uses whose age exceeds the capacity of the tier."""
        bucket = min(int(math.log2(self._capacity) * _BUCKETS_PER_OCTAVE), _NUM_BUCKETS - 1)
        return float(self._ages[bucket + 1 :].sum() / self._ages.sum())
