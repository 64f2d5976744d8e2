"""The free list of host pages.

A host page is one row of the arena, `[layer][buffer][token][row]` (see `hicache.layout`). Page 0 is for padding and is
never allocated. Allocation prefers one contiguous run, because the copy engine moves a run in one strided copy. The
cost of all methods except `check` does not depend on the size of the pool.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hicache.console import rounded, sized
from hicache.errors import ConfigError, DoubleFree, InvariantError
from hicache.host.arena import PinnedArena
from hicache.layout import PoolLayout
from hicache.storage.process.jobs import PageBytes

Pages = npt.NDArray[np.int64]
Marks = npt.NDArray[np.int32]
Run = tuple[int, int]
"""(start, length): the pages [start, start + length)."""


class HostPagePool:
    """Allocates host pages of `page_tokens` tokens from `host_bytes` of memory.

        marks[page] == 0   allocated
        marks[page] < 0    free; the marks of the first and the last page of a free run are minus the run's length

    The first mark (page 0) and the last mark (after the last page) are never free. Free runs are indexed by length.
    Runs of n different lengths need n * (n + 1) / 2 free pages, so a million pages have at most 1413 lengths.

    Owned by the scheduler thread; the transfer that allocated a page owns its bytes. `device`: the GPU near which the
    memory should lie (None: the current GPU). `setting`: name of the setting in errors about the size. `shared`: a
    store process may map the pages too. `page_bytes`: size of a page if pages are packed; None: the size by `layout`.
    Raises ConfigError if not a single page fits in `host_bytes`, OutOfMemory if the machine has too little memory.
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
                f"{setting}={rounded(host_bytes)} is less than a page of {page_tokens} tokens of "
                f"{rounded(self.page_bytes)} and a page for padding; "
                f"raise {setting} to at least {sized(2 * self.page_bytes)}"
            )
        rows = self.num_pages + 1
        self.arena = PinnedArena(rows, self.page_bytes, pin=pin, setting=setting, device=device, shared=shared)
        self._marks: Marks = np.full(self.num_pages + 2, -1, np.int32)
        self._marks[[0, -1]] = 0
        self._starts: dict[int, dict[int, None]] = {}  # by length; a dict is a set whose last entry is cheap to find
        self._lengths: list[int] = []  # the keys of `_starts`, ascending
        self._num_free = self.num_pages
        self._add(1, self.num_pages)

    @property
    def bytes_of(self) -> torch.Tensor:
        """Return all pages as uint8 [num_pages + 1, page_bytes]."""
        return self.arena.data

    @property
    def memory(self) -> PageBytes:
        """All pages as a numpy array, uint8 [num_pages + 1, page_bytes], that shares the memory of the arena."""
        return self.arena.data.numpy()

    def available(self) -> int:
        return self._num_free

    def alloc(self, num_pages: int) -> list[int] | None:
        """Allocate `num_pages` pages in the fewest possible runs. Returns ascending page ids, or None if fewer pages
        are free.

        Best fit: take the shortest run with enough pages, so that long runs are not divided. If no run has enough, take
        the longest run, and repeat for the remaining pages.
        """
        if num_pages > self._num_free:
            return None
        runs, num_left = list[Run](), num_pages
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
        pages = list[int]()
        for start, length in sorted(runs):
            self._marks[start : start + length] = 0
            pages += range(start, start + length)
        self._num_free -= num_pages
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Free pages, and merge their runs with adjacent free runs. Raises DoubleFree, without freeing any page, if a
        page is free, foreign or named twice."""
        if not len(pages):
            return
        ids: Pages = np.sort(np.asarray(pages, dtype=np.int64))
        foreign = ids[0] < 1 or ids[-1] > self.num_pages
        if foreign or (self._marks[ids] < 0).any() or not np.diff(ids).all():
            raise DoubleFree(f"host pages {ids.tolist()[:8]}… hold a page that is free, foreign or named twice")
        self._marks[ids] = -1
        self._num_free += len(ids)
        first = np.flatnonzero(np.diff(ids, prepend=-1) != 1)
        for start, length in zip(ids[first].tolist(), np.diff(first, append=len(ids)).tolist(), strict=True):
            before, behind = -int(self._marks[start - 1]), -int(self._marks[start + length])
            if before:
                self._remove(start - before, before)
            if behind:
                self._remove(start + length, behind)
            self._add(start - before, before + length + behind)

    def check(self) -> None:
        """Raise `InvariantError` unless the free pages, their runs and their number agree."""
        found = []
        free = self._marks < 0
        edges = np.flatnonzero(np.diff(free.astype(np.int8), prepend=0, append=0))
        runs = list(zip(edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist(), strict=True))
        if sorted((start, length) for length in self._lengths for start in self._starts[length]) != runs:
            found.append("the free runs by length are not those of the free pages")
        if any({self._marks[start], self._marks[start + length - 1]} != {-length} for start, length in runs):
            found.append("a run of free pages does not hold its length at both ends")
        if free[0] or free[-1] or int(free.sum()) != self._num_free:
            found.append(f"{int(free.sum())} pages are free, {self._num_free} were counted, sink free: {free[0]}")
        if found:
            raise InvariantError("host pool", found)

    def close(self) -> None:
        self.arena.close()

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
