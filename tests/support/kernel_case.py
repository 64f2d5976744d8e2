"""Helpers of tests of kernels: bits and values to store, and comparison of stored bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Make each wait of the host for the device raise."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random_bits(*shape: int, dtype: torch.dtype = torch.uint8, seed: int) -> torch.Tensor:
    """Random bit patterns of a dtype (NaNs and denormals too), so that only a copy of bytes comes through."""
    generator = torch.Generator().manual_seed(seed)
    row_bytes = shape[-1] * dtype.itemsize
    return torch.randint(0, 256, (*shape[:-1], row_bytes), dtype=torch.uint8, generator=generator).view(dtype)


def spread(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values over many binades."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    return x.to(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)
