"""Helpers of tests of kernels: they make bits and values to store, and compare stored bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Make the host raise if it waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random_bits(*shape: int, dtype: torch.dtype = torch.uint8, seed: int) -> torch.Tensor:
    """Random bit patterns of a dtype, NaNs and denormals included; only a copy of bytes preserves them."""
    generator = torch.Generator().manual_seed(seed)
    row_bytes = shape[-1] * dtype.itemsize
    return torch.randint(0, 256, (*shape[:-1], row_bytes), dtype=torch.uint8, generator=generator).view(dtype)


def spread(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random values whose exponents span many binades."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    return x.to(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)
