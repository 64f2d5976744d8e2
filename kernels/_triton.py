"""The only module that imports Triton, and helpers that all kernels share.

If Triton is installed, `jit` and `tl` are those of Triton. Otherwise they are stand-ins: the modules of kernels can be
imported, but a launch raises.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch

__all__ = ["WORDS", "Kernels", "cdiv", "check_kernels", "jit", "on_device", "power_of_two", "tl", "widest_word"]

Kernels = Literal["triton", "torch"]

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class _NoTriton:
    """Replaces a kernel on a machine without Triton; a launch raises ImportError."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = function.__name__

    def __getitem__(self, grid: object) -> Callable[..., NoReturn]:
        return self._launch

    def _launch(self, *args: object, **kwargs: object) -> NoReturn:
        raise ImportError(
            f"the kernel {self._name} needs Triton, which is not installed; install triton, or choose the torch "
            f"implementation (HICACHE_KERNELS=torch)"
        )


def _no_jit(function: Callable[..., Any] | None = None, **options: object) -> Any:
    return _NoTriton if function is None else _NoTriton(function)


try:
    import triton.language as tl
    from triton import jit
except ImportError:
    tl = None
    jit = _no_jit


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n` and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def widest_word(*byte_counts: int) -> int:
    """Return the bytes (8, 4, 2 or 1) of the widest word that divides all given sizes, strides and addresses."""
    return math.gcd(8, *byte_counts)


def check_kernels(kernels: str) -> None:
    if kernels not in ("triton", "torch"):
        raise ValueError(f"kernels={kernels!r}: choose 'triton' or 'torch'")


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the current device for launches within the `with` block. Does nothing if it is already current,
    because checking this is cheaper than switching."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)
