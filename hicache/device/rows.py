"""What pools share whose layers are alike: one tensor for each kind of row, allocated together, described by a layout.

Owns nothing of its own; the pools own their tensors. May import what the base may.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hicache.device.base import HasLayerId, KVCache
from hicache.device.memory import allocate_zeros, allocation_region
from hicache.errors import ConfigError, ShapeError
from hicache.kernels.store_kv import cast_rows
from hicache.layout import BufferSpec, Per, PoolLayout


@dataclass(frozen=True)
class Row:
    """One kind of row: what a token, or a device page, stores in every layer under `name`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    per: Per = "token"


class RowPool(KVCache):
    """A pool whose layers all store the rows that its constructor passed to `_build`.

    Also holds the checks that its kind of pool makes of what comes in: shapes, dtypes and devices always, slots where
    HICACHE_DEBUG=1, outside CUDA graph capture.
    """

    _layout: PoolLayout
    _stored: tuple[tuple[torch.Tensor, ...], ...]

    @property
    def layout(self) -> PoolLayout:
        return self._layout

    def layer_buffers(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        return self._stored[self._index(layer_id)]

    def _build(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Allocate `[layers, slots, ...row]`, or `[layers, pages, ...row]`, for each kind of row, all or none.

        OutOfMemory names `device_tokens`. Returns the tensors in the order of `rows`.
        """
        counts = {"token": self.num_slots, "page": self.num_pages}
        shapes = [(self.layer_num, counts[row.per], *row.shape) for row in rows]
        flat: list[tuple[int, ...]] = [
            (math.prod(shape) * row.dtype.itemsize,) for row, shape in zip(rows, shapes, strict=True)
        ]
        with allocation_region(self.enable_memory_saver):
            blocks = allocate_zeros(flat, torch.uint8, self.device)
        tensors = [block.view(row.dtype).view(shape) for block, row, shape in zip(blocks, rows, shapes, strict=True)]
        self._declare(rows, tensors)
        return tensors

    def _declare(self, rows: Sequence[Row], tensors: Sequence[torch.Tensor]) -> None:
        """Describe `tensors`, each `[layers, slots or pages, ...row]`, as what this pool stores."""
        layers = tuple(range(self.start_layer, self.end_layer + 1))
        specs = [BufferSpec(row.name, row.dtype, row.shape, row.per, layers) for row in rows]
        self._layout = PoolLayout(tuple(specs), self.page_size)
        self._stored = tuple(zip(*(tensor.unbind(0) for tensor in tensors), strict=True))
        self.mem_usage = sum(tensor.nbytes for tensor in tensors) / (1 << 30)

    @property
    def num_slots(self) -> int:
        """Slots of each layer, those of page 0 included."""
        return self.size + self.page_size

    @property
    def num_pages(self) -> int:
        """Device pages that hold `size` tokens, and page 0."""
        return -(-self.size // self.page_size) + 1

    def _positive(self, **sizes: int) -> None:
        """ConfigError unless every size is at least 1."""
        if min(sizes.values()) < 1:
            listed = ", ".join(f"{name}={value}" for name, value in sizes.items())
            raise ConfigError(f"{listed} must all be at least 1")

    def _wait_for(self, layer: HasLayerId | int) -> int:
        """The dense index of a layer, once it has arrived."""
        index = self._index(layer)
        self._wait(index + self.start_layer)
        return index

    def _check_rows(self, rows: torch.Tensor, expected: tuple[int, ...], name: str) -> None:
        """ShapeError unless `rows` are floats of that shape on the pool's device."""
        if tuple(rows.shape) != expected or not rows.is_floating_point() or rows.device != self._placed_on:
            raise ShapeError(
                f"{name} is {tuple(rows.shape)} of {rows.dtype} on {rows.device}, the pool takes {expected} of "
                f"{self.dtype} on {self._placed_on}"
            )

    def _as_given(
        self, rows: torch.Tensor, expected: tuple[int, ...], scale: float | torch.Tensor | None, name: str
    ) -> torch.Tensor:
        """`rows` as the store kernels take them, which divide and convert: each row in one piece, and in float32 where
        its dtype is not one that they convert."""
        self._check_rows(rows, expected, name)
        if (scale is not None or rows.dtype != self.dtype) and rows.element_size() not in (2, 4):
            rows = rows.float()
        return rows.contiguous() if rows.numel() and not rows[:1].is_contiguous() else rows

    def _pair(
        self,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_expected: tuple[int, ...],
        v_expected: tuple[int, ...],
        k_scale: float | torch.Tensor | None,
        v_scale: float | torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as `_as_given`, of one dtype."""
        k = self._as_given(cache_k, k_expected, k_scale, "cache_k")
        v = self._as_given(cache_v, v_expected, v_scale, "cache_v")
        return (k, v) if k.dtype == v.dtype else (k.float(), v.float())

    def _as_stored(
        self, rows: torch.Tensor, expected: tuple[int, ...], scale: float | torch.Tensor | None, name: str
    ) -> torch.Tensor:
        """`rows / scale` in the pool's dtype as it is stored, for operations that only copy; `rows` stays as it was."""
        rows = self._as_given(rows, expected, scale, name)
        if scale is not None or rows.dtype != self.dtype:
            rows = cast_rows(rows, self.dtype, scale)
        return rows if self.store_dtype == self.dtype else rows.view(self.store_dtype)
