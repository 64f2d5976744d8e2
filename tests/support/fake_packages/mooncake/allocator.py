"""A stand-in for Mooncake's allocators. The stand-ins are None, which makes `torch.cuda.MemPool` use its own
allocator."""

from __future__ import annotations

import torch


class NVLinkAllocator:
    @classmethod
    def get_allocator(cls, device: torch.device) -> NVLinkAllocator:
        return cls()

    def allocator(self) -> None:
        return None
