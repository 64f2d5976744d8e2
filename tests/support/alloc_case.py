"""Helpers of the tests of the slot allocators: they build an allocator, and call it for batches given as lists."""

from __future__ import annotations

import torch

from hicache.alloc import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)


def single(size: int, need_sort: bool = True, device: str = "cpu") -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(size, torch.bfloat16, device, None, need_sort)


def paged(size: int, page_size: int, need_sort: bool = True, device: str = "cpu") -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(size, page_size, torch.bfloat16, device, None, need_sort)


def windowed(
    size: int, size_swa: int, page: int = 1, device: str = "cpu", need_sort: bool = True
) -> SWATokenToKVPoolAllocator:
    return SWATokenToKVPoolAllocator(size, size_swa, page, torch.bfloat16, device, None, need_sort)


def must(slots: torch.Tensor | None) -> torch.Tensor:
    assert slots is not None
    return slots


def free_list(allocator: BaseTokenToKVPoolAllocator) -> tuple[list[int], list[int]]:
    return allocator.free_pages.tolist(), allocator.release_pages.tolist()


def extend(
    allocator: BaseTokenToKVPoolAllocator, prefixes: list[int], seqs: list[int], last: list[int]
) -> torch.Tensor | None:
    p, s, loc = (torch.tensor(x, dtype=torch.int64) for x in (prefixes, seqs, last))
    device = allocator.device
    return allocator.alloc_extend(p.to(device), p, s.to(device), s, loc.to(device), sum(seqs) - sum(prefixes))


def decode(allocator: BaseTokenToKVPoolAllocator, seqs: list[int], last: list[int]) -> torch.Tensor | None:
    s, loc = torch.tensor(seqs, dtype=torch.int64), torch.tensor(last, dtype=torch.int64)
    return allocator.alloc_decode(s.to(allocator.device), s, loc.to(allocator.device))
