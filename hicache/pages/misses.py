"""The reasons for which pages of a prompt are computed, for example the eviction of a page.

If no tier has a page, the later pages of the prompt cannot be used, even if a tier has them. These later pages count
with the reason of the missing page:

    page     0    1    2        3       4       5
             hit  hit  evicted  on CPU  on CPU  new
    reason   -    -    evicted  evicted evicted never_stored
"""

from __future__ import annotations

import enum
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.metrics import AGE_BOUNDS, Histogram, Metrics
from hicache.pages.policy import Uses
from hicache.pages.table import Names, Rows

Reasons = npt.NDArray[np.int8]

USABLE: Final = -1  # value in `Reasons` of a page that a tier has
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


def miss_help(page: str) -> dict[MissReason, str]:
    """Return for each reason the words that describe the tokens in a help text, after "computed prompt tokens".
    `page`: the word for a page, "page" or "chunk"."""
    return {
        MissReason.NEVER_STORED: f"whose {page} no tier ever had, as far as the engine knows",
        MissReason.EVICTED: f"whose {page} a tier had evicted",
        MissReason.GATE: "that were estimated to cost less to compute than to load",
        MissReason.NO_ROWS: f"for which the host had no free {page}",
        MissReason.FAILED: f"whose {page} a store could not store or return",
    }


class MissReasons:
    """The reasons for which pages are missing, by name. Remembers about `num_pages` pages: if two pages have the same
    entry, the later page overwrites the earlier page. Owned by one thread."""

    def __init__(self, num_pages: int = _NUM_PAGES) -> None:
        self._names = np.zeros(num_pages, np.uint64)  # the operating system allocates this memory when it is written
        self._reasons = np.zeros(num_pages, np.int8)

    def note(self, names: Names, reason: MissReason) -> None:
        """Record the reason for which pages will be missing. NEVER_STORED clears the reason of pages that are stored
        now."""
        at = names % np.uint64(len(self._names))
        self._names[at] = names
        self._reasons[at] = reason

    def reasons(self, names: Names) -> Reasons:
        """Return the reason of each page; NEVER_STORED if none is remembered."""
        at = names % np.uint64(len(self._names))
        reasons: Reasons = np.where(self._names[at] == names, self._reasons[at], np.int8(MissReason.NEVER_STORED))
        return reasons


def count(reasons: Reasons) -> dict[MissReason, int]:
    """Count consecutive pages by reason. `USABLE` pages count with the reason of the last page before them that is not
    `USABLE`. Leading `USABLE` pages do not count."""
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
