"""Which host page is free, and who is reading it.

A page is one row of the arena, `[layer][buffer][token][row]` (see `hicache.layout`); page 0 is a sink and never handed
out. Allocation prefers one contiguous run, for the copy engine moves a run in one strided copy. No operation but
`check` costs more for a larger pool: the free runs are indexed, and the bitmaps are read where the ids say. Owned by
the scheduler thread; the bytes of a page belong to whoever the flows handed it to. May import numpy, torch,
host.arena, host.runs, layout and errors.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import ConfigError, DoubleFree, InvariantError
from hicache.host.arena import PinnedArena
from hicache.host.runs import FreeRuns, Run
from hicache.layout import PoolLayout

Pages = npt.NDArray[np.int64]


class HostPagePool:
    """`host_bytes` of pages of `page_tokens` tokens. Page ids are int64 CPU tensors.

    `device` is the GPU near which the memory should lie (None: the current one), `knob` the setting that an error about
    the size names. ConfigError when not one page fits, OutOfMemory when the machine has not that much.
    """

    def __init__(
        self,
        layout: PoolLayout,
        page_tokens: int,
        host_bytes: int,
        *,
        pin: bool,
        device: torch.device | None = None,
        knob: str = "host_bytes",
    ) -> None:
        self.layout, self.page_tokens = layout, page_tokens
        self.page_bytes = layout.page_bytes(page_tokens)
        self.num_pages = host_bytes // self.page_bytes - 1
        if self.num_pages < 1:
            raise ConfigError(
                f"{knob}={host_bytes} holds no page of {page_tokens} tokens of "
                f"{self.page_bytes} bytes and the sink beside it; "
                f"raise {knob} to at least {2 * self.page_bytes}"
            )
        self.arena = PinnedArena(self.num_pages + 1, self.page_bytes, pin=pin, knob=knob, device=device)
        self._free = np.ones(self.num_pages + 1, dtype=bool)
        self._free[0] = False
        self._readers = np.zeros(self.num_pages + 1, dtype=np.int32)
        self._runs = FreeRuns(1, self.num_pages)
        self._available = self.num_pages

    @property
    def bytes_of(self) -> torch.Tensor:
        """All pages, uint8 [num_pages + 1, page_bytes]."""
        return self.arena.data

    def available(self) -> int:
        return self._available

    def alloc(self, num_pages: int) -> torch.Tensor | None:
        """`num_pages` page ids, ascending, in the fewest runs there are; `None` when fewer are free."""
        if num_pages > self._available:
            return None
        pages = _pages_of(self._runs.take(num_pages))
        self._free[pages] = False
        self._available -= num_pages
        return torch.from_numpy(pages)

    def free(self, pages: torch.Tensor) -> None:
        """Give pages back. A page that is free, foreign or still being read raises, and nothing is freed."""
        if not len(pages):
            return
        ids: Pages = np.sort(pages.numpy())
        steps = np.diff(ids)
        if ids[0] < 1 or ids[-1] > self.num_pages or self._free[ids].any() or not steps.all():
            raise DoubleFree(f"host pages {ids.tolist()[:8]}… hold a page that is free, foreign or named twice")
        if self._readers[ids].any():
            raise DoubleFree(f"host pages {ids.tolist()[:8]}… hold a page that is still being read")
        first = np.flatnonzero(np.concatenate([[True], steps != 1]))
        for start, length in zip(ids[first].tolist(), np.diff(first, append=len(ids)).tolist(), strict=True):
            self._runs.give(start, length)
        self._free[ids] = True
        self._available += len(ids)

    def begin_read(self, pages: torch.Tensor) -> None:
        """Someone outside this thread reads or writes these pages until `end_read`."""
        np.add.at(self._readers, pages.numpy(), 1)

    def end_read(self, pages: torch.Tensor) -> None:
        np.subtract.at(self._readers, pages.numpy(), 1)

    def views(self, pages: torch.Tensor) -> list[npt.NDArray[np.uint8]]:
        """The bytes of each page, uint8 [page_bytes], sharing memory."""
        rows = self.arena.data.numpy()
        return [rows[page] for page in pages.tolist()]

    def check(self) -> None:
        """Raise `InvariantError` unless the free runs, the bitmap, the account and the readers agree."""
        found = self._runs.check()
        if self._runs.runs() != _runs_of(self._free):
            found.append("the index of free runs disagrees with the bitmap of free pages")
        if self._free[0] or int(self._free.sum()) != self._available:
            found.append(
                f"{int(self._free.sum())} pages are free, {self._available} were counted, sink free: {self._free[0]}"
            )
        if (self._readers < 0).any():
            found.append("a page has fewer than no readers")
        if self._readers[self._free].any():
            found.append(f"free pages are being read: {np.flatnonzero(self._free & (self._readers > 0)).tolist()[:8]}")
        if found:
            raise InvariantError("host pool", found)

    def close(self) -> None:
        self.arena.close()


def _pages_of(runs: list[Run]) -> Pages:
    """The pages of some runs, in their order."""
    if len(runs) == 1:
        return np.arange(runs[0][0], runs[0][0] + runs[0][1], dtype=np.int64)
    starts, lengths = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum(), dtype=np.int64)


def _runs_of(free: npt.NDArray[np.bool_]) -> list[Run]:
    """Every run of free pages, ascending."""
    edges = np.flatnonzero(np.diff(free.astype(np.int8), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist(), strict=True))
