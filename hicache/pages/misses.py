"""The reasons for which pages of a prompt are computed: what happened to pages that no tier has.

A page in a tier cannot be used if no tier has the page before it. It counts with the reason of that page:

    page     0    1    2        3       4       5
             hit  hit  evicted  on CPU  on CPU  new
    reason   -    -    evicted  evicted evicted never_stored
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.metrics import AGE_BOUNDS, Histogram, Metrics
from hicache.pages.policy import Uses
from hicache.pages.table import Names, Rows

Reasons = npt.NDArray[np.int8]

USABLE: Final = -1  # in `Reasons`: a tier has the page
_NUM_PAGES = 1 << 20
_MAX_SAMPLES = 1024


class MissReason(enum.IntEnum):
    """The reason for which no tier served a page of a prompt."""

    NEVER_STORED = 0
    EVICTED = 1
    GATE = 2
    NO_ROWS = 3
    FAILED = 4

    @property
    def label(self) -> str:
        return self.name.lower()


MISS_HELP: Final[Mapping[MissReason, str]] = {
    MissReason.NEVER_STORED: "that no tier ever had, as far as is known: new text, or the end of a prompt",
    MissReason.EVICTED: "that a tier had evicted",
    MissReason.GATE: "that were estimated to cost less than loading: a tier has them, or had not looked them up yet",
    MissReason.NO_ROWS: "for which no host page was free when they were to be stored or loaded",
    MissReason.FAILED: "that could not be stored or read",
}


class MissReasons:
    """The reasons for which pages are missing, by name. Remembers about `num_pages` pages; a page overwrites another
    one in the same entry. Owned by one thread."""

    def __init__(self, num_pages: int = _NUM_PAGES) -> None:
        self._names = np.zeros(num_pages, np.uint64)  # virtual memory, allocated when it is written
        self._reasons = np.zeros(num_pages, np.int8)

    def note(self, names: Names, reason: MissReason) -> None:
        """Record the reason of pages. NEVER_STORED clears it, because the pages are stored."""
        at = names % np.uint64(len(self._names))
        self._names[at] = names
        self._reasons[at] = reason

    def reasons(self, names: Names) -> Reasons:
        """Return the reason of each page; NEVER_STORED if none is remembered."""
        at = names % np.uint64(len(self._names))
        reasons: Reasons = np.where(self._names[at] == names, self._reasons[at], np.int8(MissReason.NEVER_STORED))
        return reasons


def count(reasons: Reasons) -> dict[MissReason, int]:
    """Count consecutive pages by reason. `USABLE` pages count with the reason of the page before them; leading ones do
    not count."""
    last = np.maximum.accumulate(np.where(reasons == USABLE, -1, np.arange(len(reasons))))
    numbers = np.bincount(reasons[last[last >= 0]], minlength=len(MissReason)).tolist()
    return {reason: numbers[reason] for reason in MissReason if numbers[reason]}


class EvictedAges:
    """The time from the last use of pages to their eviction from one tier. Uses have ticks; the time of a tick is
    interpolated between evictions. Owned by the scheduler thread."""

    def __init__(self, metrics: Metrics, tier: str) -> None:
        what = "seconds from the last use of a page to its eviction"
        name, family = f"evict.{tier}_age_seconds", "evict_age_seconds"
        self._histogram: Histogram = metrics.histogram(name, what, family, tier=tier)
        self._ticks, self._times_s = [0], [time.monotonic()]

    def observe(self, at: Uses, rows: Rows) -> None:
        """Record that the pages `rows` are evicted now. `at`: the uses of the tier."""
        if not len(rows):
            return
        if len(self._ticks) == _MAX_SAMPLES:
            del self._ticks[1::2], self._times_s[1::2]
        now_s = time.monotonic()
        self._ticks.append(at.now)
        self._times_s.append(now_s)
        ages_s = now_s - np.interp(at.last_use[rows], self._ticks, self._times_s)
        counts = np.bincount(np.searchsorted(AGE_BOUNDS, ages_s), minlength=len(AGE_BOUNDS) + 1)
        self._histogram.add(counts.tolist(), float(ages_s.sum()))
