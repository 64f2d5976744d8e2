"""The allocator of single slots: every token's slot is free or handed out on its own.

Owns nothing beyond the base. May import what the base may.
"""

from __future__ import annotations

import torch

from hicache.alloc.base import BaseTokenToKVPoolAllocator, SlotStore


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

    def alloc(self, need_size: int) -> torch.Tensor | None:
        return self._take(need_size)

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.to(torch.int64)
