"""The allocator of single slots: every token's slot is free or handed out on its own.

On CUDA small allocations are cut from a block of ids that was copied out of the free list: a copy of its own for each
would be a launch each. What is returned then shares a storage of 8 KiB with its neighbours, and never the free list's.

Owns nothing beyond the base. May import what the base may.
"""

from __future__ import annotations

import torch

from hicache.alloc.base import BaseTokenToKVPoolAllocator, SlotStore

_BLOCK_IDS = 1024
_SMALL_IDS = 256  # larger allocations get a copy of their own


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Slots 1..size, one at a time: the base with pages of one token. Scheduler thread only."""

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: SlotStore | None,
        need_sort: bool,
    ) -> None:
        super().__init__(size, 1, dtype, device, kvcache, need_sort)
        self._blocks = self.device.type == "cuda" and not self._debug
        # The free list that the rest of the block is the front of; another one, and the block is stale.
        self._block_of: torch.Tensor | None = None
        self._block, self._used = self.free_pages[:0], 0

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if not (self._blocks and 0 < need_size <= _SMALL_IDS):
            return self._take(need_size)
        free = self.free_pages
        if free is not self._block_of or self._used + need_size > self._block.numel():
            if not self._reserve(need_size):
                return None
            free = self.free_pages
            self._block, self._used = free[:_BLOCK_IDS].clone(), 0
        slots = self._block.narrow(0, self._used, need_size)
        self._used += need_size
        self.free_pages = self._block_of = free.narrow(0, need_size, free.numel() - need_size)
        return slots

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.to(torch.int64, copy=True)
