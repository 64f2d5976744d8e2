"""Calls of the copy engine on plain addresses: a strided copy, and a batch of copies.

The batch is the driver's own call on numpy arrays; the Python binding takes lists and converts them page by page.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError, TransferError

try:
    from cuda.bindings import runtime as cudart
except ImportError:
    cudart = None

Addresses = npt.NDArray[np.int64]
_STREAM_ORDER, _ANY_ORDER = 1, 3  # CUmemcpySrcAccessOrder


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the order in which the source may be read, and hints of where both sides are."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_hint", ctypes.c_int * 2),
        ("dst_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def need_bindings() -> None:
    """ConfigError when the bindings of the CUDA runtime are missing."""
    if cudart is None:
        raise ConfigError("the CUDA backend needs the package cuda-bindings: pip install cuda-bindings")


def copy_strided(
    dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, up: bool, stream: int
) -> None:
    """Queue a 2-D copy of `rows` rows of `width` bytes. TransferError when it is refused."""
    kind = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice if up else cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
    _raise_on(int(cudart.cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, rows, kind, stream)[0]))


def can_batch() -> bool:
    """Whether the driver has batched copies (CUDA 13)."""
    return batch_call() is not None


def copy_batched(dst: Addresses, src: Addresses, width: int, any_order: bool, stream: int) -> None:
    """Queue a copy of `width` bytes from each address of `src` to the same index of `dst`. TransferError when refused.

    `any_order`: sources may be read in any order, and before work queued earlier; only for sources that nobody writes.
    """
    call = batch_call()
    assert call is not None
    sizes, first = np.full(len(dst), width, np.uint64), np.zeros(1, np.uint64)
    attributes = _Attributes(src_access_order=_ANY_ORDER if any_order else _STREAM_ORDER)
    _raise_on(
        call(
            dst.ctypes.data, src.ctypes.data, sizes.ctypes.data, len(dst), ctypes.addressof(attributes),
            first.ctypes.data, 1, stream,
        )
    )  # fmt: skip


@lru_cache(maxsize=1)
def batch_call() -> Callable[..., int] | None:
    """The driver's cuMemcpyBatchAsync_v2, where it has one."""
    try:
        call = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
    except (OSError, AttributeError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    call.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer)
    call.restype = ctypes.c_int
    found: Callable[..., int] = call
    return found


def _raise_on(status: int) -> None:
    if status != 0:
        raise TransferError(f"the copy engine refused a copy: CUDA error {status}")
