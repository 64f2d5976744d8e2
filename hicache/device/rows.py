"""Base class of pools whose layers all store the same kinds of rows. The pool has one tensor for each kind of row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hicache.device.base import KVCache, LayerRef
from hicache.device.memory import LazyLayers, allocate_zeros, allocation_region
from hicache.errors import ConfigError, ShapeError
from hicache.kernels.store_kv import Scale, cast_rows, store_kv
from hicache.layout import BufferSpec, Per, PoolLayout


@dataclass(frozen=True)
class Row:
    """One kind of row. In every layer, each token, or each device page, has one such row under `name`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    per: Per = "token"


class KVRows(NamedTuple):
    """Keys and values `[tokens, heads, dim]`, both of the same dtype, and the scales by which the kernels divide
    them."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: Scale
    v_scale: Scale


class RowPool(KVCache):
    """A pool whose layers all store the rows that its constructor passed to `_build`.

    The first kind of row holds keys and the second kind holds values, unless a subclass overrides the getters. Stores
    always check shapes, dtypes and devices of their arguments. They check slots only with HICACHE_DEBUG=1 outside of a
    CUDA graph capture.
    """

    _layout: PoolLayout
    _rows: Sequence[Row]
    _stored: Sequence[tuple[torch.Tensor, ...]] | LazyLayers

    @property
    def layout(self) -> PoolLayout:
        return self._layout

    def layer_buffers(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        return self._stored[self._index(layer_id)]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._as_read(self._stored[self._wait_for(layer_id)][0])

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._as_read(self._stored[self._wait_for(layer_id)][1])

    def set_kv_buffer(
        self,
        layer: LayerRef,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> None:
        index = self._index(layer)
        self._check_loc(loc)
        self._store(index, loc, self._storable_kv(cache_k, cache_v, loc.numel(), k_scale, v_scale))

    def _store(self, index: int, loc: torch.Tensor, rows: KVRows) -> None:
        """Store rows, divided by their scales, in the layer with the dense index `index`. The kernel converts rows to
        the store dtype, and clamps them if that is fp8."""
        k_buffer, v_buffer = (self._as_read(buffer) for buffer in self._stored[index][:2])
        store_kv(rows.k, rows.v, k_buffer, v_buffer, loc, self._kernels, rows.k_scale, rows.v_scale)

    def _build(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Allocate `[layers, slots, ...row]`, or `[layers, pages, ...row]`, for each kind of row: either all tensors or
        none.

        Returns the tensors in the order of `rows`. Raises OutOfMemory with a message that names `device_tokens`.
        """
        tensors = self._allocate(rows, self.layer_num)
        self._declare(rows, tensors)
        return tensors

    def _build_lazily(self, rows: Sequence[Row]) -> LazyLayers:
        """Build tensors as `_build` does, but allocate each layer at its first use, and count it in `mem_usage` only
        then."""

        def allocate() -> tuple[torch.Tensor, ...]:
            buffers = tuple(tensor[0] for tensor in self._allocate(rows, 1))
            self.mem_usage += sum(buffer.nbytes for buffer in buffers) / (1 << 30)
            return buffers

        with allocation_region(self.enable_memory_saver):
            pass  # raises here, not at the first store, if the package is missing
        self._describe(rows)
        self.mem_usage = 0.0
        self._stored = layers = LazyLayers(self.layer_num, self.device, allocate)
        return layers

    def _allocate(self, rows: Sequence[Row], num_layers: int) -> list[torch.Tensor]:
        counts = {"token": self.num_slots, "page": self.num_pages}
        shapes = [(num_layers, counts[row.per], *row.shape) for row in rows]
        flat: list[tuple[int, ...]] = [
            (math.prod(shape) * row.dtype.itemsize,) for row, shape in zip(rows, shapes, strict=True)
        ]
        with allocation_region(self.enable_memory_saver):
            blocks = allocate_zeros(flat, torch.uint8, self.device)
        return [block.view(row.dtype).view(shape) for block, row, shape in zip(blocks, rows, shapes, strict=True)]

    def _declare(self, rows: Sequence[Row], tensors: Sequence[torch.Tensor]) -> None:
        """Use `tensors`, each `[layers, slots or pages, ...row]`, as the buffers of this pool."""
        self._describe(rows)
        self._stored = tuple(zip(*(tensor.unbind(0) for tensor in tensors), strict=True))
        self.mem_usage = sum(tensor.nbytes for tensor in tensors) / (1 << 30)

    def _describe(self, rows: Sequence[Row]) -> None:
        specs = [BufferSpec(row.name, row.dtype, row.shape, row.per, self.layer_ids) for row in rows]
        self._rows = rows
        self._layout = PoolLayout(tuple(specs), self.page_size)

    @property
    def num_slots(self) -> int:
        """Return the number of slots of each layer, including page 0."""
        return self.size + self.page_size

    @property
    def num_pages(self) -> int:
        """Return the number of device pages for `size` tokens, plus page 0."""
        return -(-self.size // self.page_size) + 1

    def _positive(self, **sizes: int) -> None:
        """Raise ConfigError unless every size is at least 1."""
        if min(sizes.values()) < 1:
            listed = ", ".join(f"{name}={value}" for name, value in sizes.items())
            raise ConfigError(f"{listed} must all be at least 1")

    def _wait_for(self, layer: LayerRef) -> int:
        """Wait for a layer and return its dense index."""
        index = self._index(layer)
        self._wait(index + self.start_layer)
        return index

    def _check_rows(self, rows: torch.Tensor, expected: tuple[int, ...], name: str) -> None:
        """Raise ShapeError unless `rows` are floats of shape `expected` on the pool's device."""
        if tuple(rows.shape) != expected or not rows.is_floating_point() or rows.device != self._tensor_device:
            raise ShapeError(
                f"{name} is {tuple(rows.shape)} of {rows.dtype} on {rows.device}, the pool takes {expected} of "
                f"{self.dtype} on {self._tensor_device}"
            )

    def _storable(
        self, rows: torch.Tensor, expected: tuple[int, ...], scale: Scale, name: str
    ) -> tuple[torch.Tensor, Scale]:
        """Convert rows `[tokens, heads, dim]` and a scale to a form that the store kernels accept. The tensor `rows` is
        not modified.

        The returned rows are contiguous, and float32 if the kernels cannot convert the dtype of `rows`. The returned
        scale is one number or None. If `scale` has more elements, for example one number per head, this method divides
        the rows itself.
        """
        self._check_rows(rows, expected, name)
        if isinstance(scale, torch.Tensor):
            if scale.numel() != 1:
                rows, scale = rows.float() / scale, None
            elif scale.device != rows.device:
                scale = float(scale)
        if (scale is not None or rows.dtype != self.dtype) and rows.element_size() not in (2, 4):
            rows = rows.float()
        if rows.stride(-1) != 1 or (rows.shape[1] > 1 and rows.stride(1) != rows.shape[2]):
            rows = rows.contiguous()
        return rows, scale

    def _storable_kv(
        self, cache_k: torch.Tensor, cache_v: torch.Tensor, num_tokens: int, k_scale: Scale, v_scale: Scale
    ) -> KVRows:
        """Convert keys and values of `num_tokens` tokens with `_storable`. Both returned tensors have the same
        dtype."""
        k, k_scale = self._storable(cache_k, (num_tokens, *self._rows[0].shape), k_scale, "cache_k")
        v, v_scale = self._storable(cache_v, (num_tokens, *self._rows[1].shape), v_scale, "cache_v")
        return KVRows(k, v, k_scale, v_scale) if k.dtype == v.dtype else KVRows(k.float(), v.float(), k_scale, v_scale)

    def _as_stored(self, rows: torch.Tensor, expected: tuple[int, ...], scale: Scale, name: str) -> torch.Tensor:
        """Return `rows / scale` in `store_dtype`, for operations that copy rows without converting them. The tensor
        `rows` is not modified."""
        return self._converted(*self._storable(rows, expected, scale, name))

    def _converted(self, rows: torch.Tensor, scale: Scale) -> torch.Tensor:
        if scale is not None or rows.dtype != self.dtype:
            rows = cast_rows(rows, self.dtype, scale)
        return rows if self.store_dtype == self.dtype else rows.view(self.store_dtype)
