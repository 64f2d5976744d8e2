"""Calls of the copy engine on plain addresses: a strided copy, a batch of copies, and loads into consecutive slots.

A batched copy calls the driver directly with numpy arrays, because the Python binding takes lists and converts their
elements one by one. If the slots of a run of pages are consecutive, the copy engine writes to these slots without
staging and scattering:

    run        k host pages with consecutive ids, k * page_tokens consecutive slots
    one call   a buffer of one layer of a run: k rows of the host, a page apart, to k * rows adjacent rows of the pool

The slots must be in host memory, because their values determine the number of runs.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import ConfigError, TransferError
from hicache.kernels.page_copy import PageMover
from hicache.transfer.plan import Ids, PageRuns, page_runs

try:
    from cuda.bindings import runtime as cudart
except ImportError:
    cudart = None

Addresses = npt.NDArray[np.int64]
_STREAM_ORDER, _ANY_ORDER = 1, 3  # CUmemcpySrcAccessOrder


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the order in which the source may be read, and hints to the locations of both sides."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_hint", ctypes.c_int * 2),
        ("dst_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def need_bindings() -> None:
    """Raise ConfigError if the bindings of the CUDA runtime are missing."""
    if cudart is None:
        raise ConfigError("the CUDA backend needs the package cuda-bindings: pip install cuda-bindings")


def copy_strided(
    dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, up: bool, stream: int
) -> None:
    """Queue a 2-D copy of `rows` rows of `width` bytes. Raises TransferError if CUDA refuses the copy."""
    kind = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice if up else cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
    _raise_on(int(cudart.cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, width, rows, kind, stream)[0]))


def can_batch() -> bool:
    """Return whether the driver has batched copies (CUDA 13)."""
    return batch_call() is not None


def copy_batched(dst: Addresses, src: Addresses, width: int, any_order: bool, stream: int) -> None:
    """Queue a copy of `width` bytes from each address of `src` to the address in `dst` at the same index. Raises
    TransferError if the driver refuses the copy.

    With `any_order`, the copy engine may read sources in any order, even before work that was queued earlier. Set
    `any_order` only if no queued work writes the sources.
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
    """Return the driver's cuMemcpyBatchAsync_v2, or None if the driver lacks it."""
    try:
        call = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
    except (OSError, AttributeError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    call.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer)
    call.restype = ctypes.c_int
    found: Callable[..., int] = call
    return found


@dataclass(frozen=True)
class SlotRuns:
    """Runs of pages with consecutive slots, and the first slot of each run."""

    pages: PageRuns
    first_slot: Ids

    def __len__(self) -> int:
        return len(self.first_slot)

    @cached_property
    def copies(self) -> list[tuple[int, int, int]]:
        """Return the first page, the number of pages and the first slot of each run."""
        return list(zip(self.pages.first_pages, self.pages.lengths, self.first_slot.tolist(), strict=True))


class UnstagedCopier:
    """Copies runs of host pages `[pages, page_bytes]` to the buffers of a mover's pool. A copier keeps no state between
    copies."""

    def __init__(self, mover: PageMover, host: torch.Tensor, rows_per_chunk: int, device_page_tokens: int) -> None:
        """`device_page_tokens`: tokens of an allocator page, within which slots are consecutive."""
        self._page_tokens = mover.page_tokens
        self._rows_per_chunk = rows_per_chunk
        self._block = math.gcd(device_page_tokens, mover.page_tokens)
        self._host_address = host.data_ptr()
        self._pitch = host.stride(0)
        self._table = mover.table
        segments = [segment for layer in self._table.segments for segment in layer]
        # `num_buffers`: number of copy calls that transfer one run of pages, one call per buffer of each layer.
        # `piece_bytes`: bytes of one page in the smallest of these buffers.
        self.num_buffers = len(segments)
        self.piece_bytes = min(s.page_bytes for s in segments)
        self._span = max(s.span for s in segments)
        # A strided copy needs the token rows of each page to be adjacent in the pool.
        self._can_copy = all(s.rows.stride(0) == s.row_bytes and self._span % s.span == 0 for s in segments)

    def runs(self, pages: Ids, slots: Ids) -> SlotRuns | None:
        """Divide `pages` with `slots` [p * page_tokens] into runs. Returns None unless the slots of each page are
        consecutive."""
        if not self._can_copy or not len(pages):
            return None
        block, page = self._block, self._page_tokens
        first = slots[::block]
        if block > 1 and (slots[block - 1 :: block] - first != block - 1).any():
            return None
        if block < page:
            by_page = first.reshape(len(pages), page // block)
            if (by_page[:, 1:] - by_page[:, :-1] != block).any():
                return None
            first = by_page[:, 0]
        if self._span > 1 and (first % self._span).any():
            return None
        found = page_runs(pages, self._rows_per_chunk, first[1:] - first[:-1] != page)
        return SlotRuns(found, first[found.position])

    def load(self, runs: SlotRuns, layer: int, stream: int) -> None:
        """Queue the copies of one layer (dense index) for all runs. Raises TransferError if CUDA refuses a copy."""
        for buffer in self._table.segments[layer]:
            address, host_address = buffer.rows.data_ptr(), self._host_address + self._table.ends[layer] + buffer.offset
            for page, num_pages, slot in runs.copies:
                dst = address + slot // buffer.span * buffer.row_bytes
                src = host_address + page * self._pitch
                copy_strided(dst, buffer.page_bytes, src, self._pitch, buffer.page_bytes, num_pages, True, stream)


def _raise_on(status: int) -> None:
    if status != 0:
        raise TransferError(f"the copy engine refused a copy: CUDA error {status}")
