"""Which host page is free, and who is reading it.

A page is one row of the arena, `[layer][buffer][token][row]` (see `hicache.layout`); page 0 is a sink and never handed
out. Allocation prefers one contiguous run, for the copy engine moves a run in one strided copy. Owned by the scheduler
thread; the bytes of a page belong to whoever the flows handed it to. May import numpy, torch, layout and errors.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import ConfigError, DoubleFree, InvariantError
from hicache.host.arena import PinnedArena
from hicache.layout import PoolLayout

Pages = npt.NDArray[np.int64]


class HostPagePool:
    """`host_bytes` of pages of `page_tokens` tokens. Page ids are int64 CPU tensors."""

    def __init__(self, layout: PoolLayout, page_tokens: int, host_bytes: int, *, pin: bool) -> None:
        self.layout, self.page_tokens = layout, page_tokens
        self.page_bytes = layout.page_bytes(page_tokens)
        self.num_pages = host_bytes // self.page_bytes - 1
        if self.num_pages < 1:
            raise ConfigError(
                f"host_bytes={host_bytes} holds no page of {page_tokens} tokens of "
                f"{self.page_bytes} bytes and the sink beside it; "
                f"raise host_bytes to at least {2 * self.page_bytes}"
            )
        self.arena = PinnedArena(self.num_pages + 1, self.page_bytes, pin=pin)
        self._free = np.ones(self.num_pages + 1, dtype=bool)
        self._free[0] = False
        self._readers = np.zeros(self.num_pages + 1, dtype=np.int32)
        self._available = self.num_pages

    @property
    def bytes_of(self) -> torch.Tensor:
        """All pages, uint8 [num_pages + 1, page_bytes]."""
        return self.arena.data

    def available(self) -> int:
        return self._available

    def alloc(self, num_pages: int) -> torch.Tensor | None:
        """`num_pages` page ids, ascending within each run, or `None` when fewer are free."""
        if num_pages > self._available:
            return None
        if not num_pages:
            return torch.empty(0, dtype=torch.int64)
        starts, lengths = self._runs()
        fitting = np.flatnonzero(lengths >= num_pages)
        if fitting.size:  # the smallest run that holds it all
            best = fitting[lengths[fitting].argmin()]
            pages = np.arange(starts[best], starts[best] + num_pages)
        else:  # the fewest runs: largest first
            order = np.argsort(-lengths, kind="stable")
            used = order[: int(np.searchsorted(np.cumsum(lengths[order]), num_pages)) + 1]
            pages = np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in used])[:num_pages]
        self._free[pages] = False
        self._available -= num_pages
        return torch.from_numpy(pages.astype(np.int64))

    def free(self, pages: torch.Tensor) -> None:
        """Give pages back. A page that is free, foreign or still being read raises, and nothing is freed."""
        ids = pages.numpy()
        if not ids.size:
            return
        if ids.min() < 1 or ids.max() > self.num_pages or self._free[ids].any() or len(np.unique(ids)) != len(ids):
            raise DoubleFree(f"host pages {ids.tolist()[:8]}… hold a page that is free, foreign or named twice")
        if self._readers[ids].any():
            raise DoubleFree(f"host pages {ids.tolist()[:8]}… hold a page that is still being read")
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
        """Raise `InvariantError` unless the free list, the account and the readers agree."""
        found = []
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

    def _runs(self) -> tuple[Pages, Pages]:
        """Start and length of every run of free pages."""
        edges = np.flatnonzero(np.diff(self._free.astype(np.int8), prepend=0, append=0))
        starts = edges[::2].astype(np.int64)
        return starts, edges[1::2].astype(np.int64) - starts
