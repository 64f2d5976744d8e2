"""The free list of host pages.

A host page is one row of the arena, `[layer][buffer][token][row]` (see `hicache.layout`); page 0 is for padding and
never allocated. Allocation prefers one contiguous run, because the copy engine moves a run in one strided copy. The
cost of all methods except `check` does not depend on the size of the pool.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import ConfigError, DoubleFree, InvariantError
from hicache.host.arena import PinnedArena
from hicache.layout import PoolLayout
from hicache.storage.process.jobs import PageRows

Pages = npt.NDArray[np.int64]
Marks = npt.NDArray[np.int32]
Run = tuple[int, int]
"""(start, length): the pages [start, start + length)."""


class FreeRuns:
    """Tracks the free pages of `marks`, int32 with one entry per page, and their runs by length for best fit.

        marks[page] == 0   allocated
        marks[page] < 0    free; the first and the last page of a run of free pages hold minus its length

    The first entry (page 0) and the last one are never free; all other pages are free at first. Only the pool uses it.
    There are few different lengths: n lengths need n * (n + 1) / 2 free pages, so a million pages have at most 1413.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        # starts of runs by length; a dict serves as a set whose last entry is found quickly
        self._starts: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []  # the keys of `_starts`, ascending
        self.num_free = len(marks) - 2
        marks[[0, -1]], marks[1:-1] = 0, -1
        self._add(1, self.num_free)

    def take(self, num_pages: int) -> Pages:
        """Allocate `num_pages` pages, which must be free, in the fewest possible runs. Returns their ids, ascending.

        Best fit: take the shortest run with enough pages, so that long runs are not divided. If no run has enough, take
        the longest run, and repeat for the remaining pages.
        """
        assert 0 <= num_pages <= self.num_free, num_pages
        runs: list[Run] = []
        num_left = num_pages
        while num_left:
            fitting = bisect_left(self._lengths, num_left)
            length = self._lengths[min(fitting, len(self._lengths) - 1)]
            start = next(reversed(self._starts[length]))
            self._remove(start, length)
            used = min(length, num_left)
            if used < length:
                self._add(start + used, length - used)
            runs.append((start, used))
            num_left -= used
        pages = _pages_of(sorted(runs))
        self._marks[pages] = 0
        self.num_free -= num_pages
        return pages

    def give(self, pages: Pages) -> None:
        """Free allocated pages, given in ascending order without duplicates. Their runs are merged with adjacent free
        runs."""
        self._marks[pages] = -1
        self.num_free += len(pages)
        first = np.flatnonzero(np.diff(pages, prepend=-1) != 1)
        for start, length in zip(pages[first].tolist(), np.diff(first, append=len(pages)).tolist(), strict=True):
            before, behind = (max(0, -int(self._marks[page])) for page in (start - 1, start + length))
            if before:
                self._remove(start - before, before)
            if behind:
                self._remove(start + length, behind)
            self._add(start - before, before + length + behind)

    def check(self) -> list[str]:
        """Return the violations: disagreements between the marks, the runs by length and the number of free pages."""
        found = []
        free = self._marks < 0
        edges = np.flatnonzero(np.diff(free.astype(np.int8), prepend=0, append=0))
        runs = list(zip(edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist(), strict=True))
        if sorted((start, length) for length in self._lengths for start in self._starts[length]) != runs:
            found.append("the free runs by length are not those of the free pages")
        if any({self._marks[start], self._marks[start + length - 1]} != {-length} for start, length in runs):
            found.append("a run of free pages does not hold its length at both ends")
        if free[0] or free[-1] or int(free.sum()) != self.num_free:
            found.append(f"{int(free.sum())} pages are free, {self.num_free} were counted, sink free: {free[0]}")
        return found

    def _add(self, start: int, length: int) -> None:
        self._marks[start] = self._marks[start + length - 1] = -length
        starts = self._starts.get(length)
        if starts is None:
            self._starts[length] = {start: None}
            insort(self._lengths, length)
        else:
            starts[start] = None

    def _remove(self, start: int, length: int) -> None:
        starts = self._starts[length]
        del starts[start]
        if not starts:
            del self._starts[length]
            del self._lengths[bisect_left(self._lengths, length)]


class HostPagePool:
    """Allocates host pages of `page_tokens` tokens from `host_bytes` of memory.

    Owned by the scheduler thread; the flow that allocated a page owns its bytes. `device`: the GPU near which the
    memory should lie (None: the current one). `setting`: the setting that errors about the size name. `shared`: a store
    process may map the pages too. `page_bytes`: size of a page if pages are packed; None: the size by `layout`. Raises
    ConfigError if not a single page fits, OutOfMemory if the machine has less memory.
    """

    def __init__(
        self,
        layout: PoolLayout,
        page_tokens: int,
        host_bytes: int,
        *,
        pin: bool,
        device: torch.device | None = None,
        setting: str = "host_bytes",
        shared: bool = False,
        page_bytes: int | None = None,
    ) -> None:
        self.layout = layout
        self.page_tokens = page_tokens
        self.page_bytes = layout.page_bytes(page_tokens) if page_bytes is None else page_bytes
        self.num_pages = host_bytes // self.page_bytes - 1
        if self.num_pages < 1:
            raise ConfigError(
                f"{setting}={host_bytes} holds no page of {page_tokens} tokens of "
                f"{self.page_bytes} bytes and the sink beside it; "
                f"raise {setting} to at least {2 * self.page_bytes}"
            )
        rows = self.num_pages + 1
        self.arena = PinnedArena(rows, self.page_bytes, pin=pin, setting=setting, device=device, shared=shared)
        # One entry for each page and one after the last, as `FreeRuns` requires.
        self._marks: Marks = np.empty(self.num_pages + 2, dtype=np.int32)
        self._free = FreeRuns(self._marks)

    @property
    def bytes_of(self) -> torch.Tensor:
        """Return all pages as uint8 [num_pages + 1, page_bytes]."""
        return self.arena.data

    def available(self) -> int:
        return self._free.num_free

    def alloc(self, num_pages: int) -> list[int] | None:
        """Allocate `num_pages` pages in the fewest possible runs. Returns ascending ids, or None if fewer are free."""
        if num_pages > self._free.num_free:
            return None
        ids: list[int] = self._free.take(num_pages).tolist()
        return ids

    def free(self, pages: Sequence[int]) -> None:
        """Free pages. Raises DoubleFree, before any is freed, if a page is free, foreign or passed twice."""
        if not len(pages):
            return
        ids: Pages = np.sort(np.asarray(pages, dtype=np.int64))
        foreign = ids[0] < 1 or ids[-1] > self.num_pages
        if foreign or (self._marks[ids] < 0).any() or not np.diff(ids).all():
            raise DoubleFree(f"host pages {ids.tolist()[:8]}… hold a page that is free, foreign or named twice")
        self._free.give(ids)

    def views(self, pages: Sequence[int]) -> PageRows:
        """Return the bytes of each page, uint8 [page_bytes], as views that share memory."""
        return PageRows(self.arena.data.numpy(), [*pages])

    def check(self) -> None:
        """Raise `InvariantError` unless the free pages, their runs and their number agree."""
        found = self._free.check()
        if found:
            raise InvariantError("host pool", found)

    def close(self) -> None:
        self.arena.close()


def _pages_of(runs: list[Run]) -> Pages:
    """Return the pages of runs, in order."""
    if len(runs) == 1:
        return np.arange(runs[0][0], runs[0][0] + runs[0][1], dtype=np.int64)
    starts, lengths = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum(), dtype=np.int64)
