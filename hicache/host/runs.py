"""Which runs of pages are free: best fit by size, coalesced at both ends, at a cost that does not know the pool's size.

Owns the index and nothing else; the pool keeps the bitmap that the index must agree with. May import nothing of ours.

A run is `[start, start + length)`, and no two free runs touch: what would touch is one run. Each is kept by its start,
by its end (to find the neighbours of a page that comes back) and by its length (to find one that fits). The lengths
that occur are few: n of them need n * (n + 1) / 2 free pages, so a million pages have at most 1413.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise

Run = tuple[int, int]
"""The first page and the number of pages."""


class FreeRuns:
    """The free runs of one pool. Called by the pool alone, from its owner's thread."""

    def __init__(self, start: int, length: int) -> None:
        self._length_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}  # by the end, which is the first page behind the run
        self._starts: dict[int, dict[int, None]] = {}  # by length; a dict is a set whose last entry is cheap to take
        self._lengths: list[int] = []  # the keys of `_starts`, ascending
        self._insert(start, length)

    def take(self, num_pages: int) -> list[Run]:
        """Remove `num_pages` pages and return them as the fewest runs, ascending. That many must be free.

        Best fit: the smallest run that holds all, so that long runs stay for those who need them. Where none does, the
        longest runs, and for what then remains the smallest that holds it.
        """
        assert num_pages >= 0, num_pages
        taken: list[Run] = []
        missing = num_pages
        while missing:
            fitting = bisect_left(self._lengths, missing)
            length = self._lengths[min(fitting, len(self._lengths) - 1)]
            start = next(reversed(self._starts[length]))
            self._remove(start, length)
            used = min(length, missing)
            if used < length:  # what is behind it is taken, for runs do not touch: nothing to coalesce
                self._insert(start + used, length - used)
            taken.append((start, used))
            missing -= used
        taken.sort()
        return taken

    def give(self, start: int, length: int) -> None:
        """Add a run of taken pages, joined with the free runs it touches."""
        before = self._start_of.get(start)
        if before is not None:
            self._remove(before, start - before)
            start, length = before, start - before + length
        behind = self._length_of.get(start + length)
        if behind is not None:
            self._remove(start + length, behind)
            length += behind
        self._insert(start, length)

    def runs(self) -> list[Run]:
        """All free runs, ascending."""
        return sorted(self._length_of.items())

    def check(self) -> list[str]:
        """Where the three ways of finding a run disagree, or where two runs touch."""
        runs = self.runs()
        found = []
        if {start + length: start for start, length in runs} != self._start_of:
            found.append("the index of free runs by their end disagrees with that by their start")
        if sorted((start, length) for length, starts in self._starts.items() for start in starts) != runs:
            found.append("the index of free runs by their length disagrees with that by their start")
        if self._lengths != sorted(self._starts):
            found.append("the ordered lengths of free runs are not those that occur")
        if any(a + n >= b for (a, n), (b, _) in pairwise(runs)):
            found.append("two free runs touch or overlap")
        return found

    def _insert(self, start: int, length: int) -> None:
        self._length_of[start] = length
        self._start_of[start + length] = start
        starts = self._starts.get(length)
        if starts is None:
            self._starts[length] = {start: None}
            insort(self._lengths, length)
        else:
            starts[start] = None

    def _remove(self, start: int, length: int) -> None:
        del self._length_of[start]
        del self._start_of[start + length]
        starts = self._starts[length]
        del starts[start]
        if not starts:
            del self._starts[length]
            del self._lengths[bisect_left(self._lengths, length)]
