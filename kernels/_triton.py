"""The one place that imports Triton, and what all kernels share: the choice of implementation and the widest word.

Owns `jit` and `tl` as the kernels see them: real where Triton is installed, else stand-ins that let modules
import and that raise at the first launch. May import torch and triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch

__all__ = ["WORDS", "Kernels", "cdiv", "check_kernels", "jit", "power_of_two", "tl", "widest_word"]

Kernels = Literal["triton", "torch"]

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class _NoTriton:
    """Stands for a kernel on a machine without Triton."""

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
    """The least power of two that is not below `n`, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def widest_word(*byte_counts: int) -> int:
    """Bytes (8, 4, 2 or 1) of the widest word that divides every size, stride and address given."""
    return math.gcd(8, *byte_counts)


def check_kernels(kernels: str) -> None:
    if kernels not in ("triton", "torch"):
        raise ValueError(f"kernels={kernels!r}: choose 'triton' or 'torch'")
