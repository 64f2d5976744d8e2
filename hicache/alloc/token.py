"""The allocator of single slots: each slot is allocated and freed separately.

On CUDA small allocations are views of a block of 1024 ids copied from the free list, which saves a launch for each
allocation. The returned tensors share 8 KiB of storage with neighbouring allocations, but share no storage with the
free list.
"""

from __future__ import annotations

import torch

from hicache.alloc.base import BaseTokenToKVPoolAllocator, SlotStore

_BLOCK_IDS = 1024
_SMALL_IDS = 256  # an allocation of at most this size is a slice of the block; a larger one is a copy of its own


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Allocates slots 1..size one by one, as pages of one token. Scheduler thread only."""

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
        # The free list whose first ids are the rest of the block. If `_free_pages` is another tensor, the block is out
        # of date.
        self._block_of: torch.Tensor | None = None
        self._block = self._free_pages[:0]
        self._used = 0

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if not (self._blocks and 0 < need_size <= _SMALL_IDS):
            return self._take(need_size)
        free = self._free_pages
        if free is not self._block_of or self._used + need_size > self._block.numel():
            if not self._reserve(need_size):
                return None
            free = self._free_pages
            self._block = free[:_BLOCK_IDS].clone()
            self._used = 0
        slots = self._block.narrow(0, self._used, need_size)
        self._used += need_size
        self._free_pages = self._block_of = free.narrow(0, need_size, free.numel() - need_size)
        return slots

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.clone() if slots.dtype == torch.int64 else slots.to(torch.int64)
