"""Flags of the allocated pages, which detect a double free before any state changes."""

from __future__ import annotations

import numpy as np
import torch

from hicache.alloc.on_host import Ids
from hicache.errors import DoubleFree


class OwnedPages:
    """Flags of pages 1..num_pages of one allocator. Allocators on the CPU always use the flags. Allocators on other
    devices use them only in debug mode, because the host would wait for the device to read the flags."""

    def __init__(self, num_pages: int, page_size: int, free: torch.Tensor) -> None:
        """Mark all pages except `free` as allocated."""
        self._page_size = page_size
        self.flags = torch.ones(num_pages + 1, dtype=torch.bool, device=free.device)
        self.flags[0] = False
        self.flags[free] = False
        self._on_host = self.flags.numpy() if free.device.type == "cpu" else None

    def take(self, pages: torch.Tensor) -> None:
        """Mark pages as allocated."""
        if self._on_host is None:
            self.flags[pages] = True
        else:
            self._on_host[pages.numpy()] = True

    def give(self, pages: torch.Tensor) -> None:
        """Mark pages as free. Raises DoubleFree, before any change, if a page is not allocated or is passed twice."""
        if self._on_host is None:
            self._check(pages)
            self.flags[pages] = False
            return
        ids: Ids = pages.numpy()
        if not self._all_owned_once(ids):
            self._check(pages)
        self._on_host[ids] = False

    def _all_owned_once(self, ids: Ids) -> bool:
        assert self._on_host is not None
        # `count_nonzero` is several times faster than `all` on the few ids of most frees.
        if np.count_nonzero(ids[1:] > ids[:-1]) < len(ids) - 1:
            ids = np.sort(ids)
            if np.count_nonzero(ids[1:] == ids[:-1]):
                return False
        inside = not len(ids) or (ids[0] > 0 and ids[-1] < len(self._on_host))
        return bool(inside and np.count_nonzero(self._on_host[ids]) == len(ids))

    def _check(self, pages: torch.Tensor) -> None:
        last = len(self.flags) - 1
        outside = pages[(pages < 1) | (pages > last)]
        if outside.numel():
            raise DoubleFree(f"pages {outside[:8].tolist()} were freed, but pages are 1..{last}")
        twice = pages[~self.flags[pages]]
        if twice.numel():
            raise DoubleFree(f"pages {twice[:8].tolist()} of {self._page_size} tokens were freed and are not allocated")
        ids, counts = pages.unique(return_counts=True)
        if ids.numel() != pages.numel():
            raise DoubleFree(f"slots {ids[counts > 1][:8].tolist()} are freed twice in one call")
