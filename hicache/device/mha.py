"""The device pool of multi-head attention: a key row and a value row a token and layer. Grouped heads are fewer heads.

Owns one tensor of keys and one of values over all layers. May import what the base may.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from hicache.config import kernel_choice
from hicache.device.base import HasLayerId, KVCache
from hicache.device.memory import LazyLayers, allocate_zeros, allocation_region
from hicache.errors import ShapeError
from hicache.kernels.store_kv import store_kv
from hicache.kernels.tiled_copy import TiledCopy
from hicache.layout import BufferSpec, PoolLayout

Scale = float | torch.Tensor | None

_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


class MHATokenToKVPool(KVCache):
    """Keys `[layers, size + page_size, head_num, head_dim]` and values (`v_head_dim`), zero-filled, in `store_dtype`.

    `k_buffer[i]` and `v_buffer[i]` are views of layer `start_layer + i`. With `lazy`, a layer is allocated at its first
    use, that of a transfer included, and `mem_usage` counts the layers used so far. Keys and values of a call are
    stored in one launch; under CUDA graph capture, with `enable_alt_stream`, values go on a second stream beside the
    keys.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        v_head_dim: int | None = None,
        start_layer: int | None = None,
        end_layer: int | None = None,
        enable_alt_stream: bool = True,
        enable_kv_cache_copy: bool = False,
        lazy: bool = False,
    ) -> None:
        """ConfigError on sizes below 1 or a missing memory saver; OutOfMemory names `device_tokens`."""
        super().__init__(size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer, end_layer)
        self.head_num, self.head_dim = head_num, head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.enable_kv_cache_copy = enable_kv_cache_copy
        self._kernels = kernel_choice(self.device)
        self.mem_usage = 0.0
        slots = size + page_size
        rows: list[tuple[int, ...]] = [(slots, head_num, self.head_dim), (slots, head_num, self.v_head_dim)]
        self.k_buffer, self.v_buffer = self._allocate(rows, lazy)
        on_cuda = self.device.type == "cuda"
        self._alt_stream = torch.cuda.Stream(self.device) if on_cuda and enable_alt_stream else None
        if enable_kv_cache_copy and self._kernels == "triton" and not lazy:
            self._mover  # noqa: B018  (prepared now, not at the first move)

    def _allocate(
        self, rows: list[tuple[int, ...]], lazy: bool
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Keys and values by dense layer index: views of one tensor each, or layers that come at their first use."""
        if lazy:
            layers = LazyLayers(
                self.layer_num, rows, self.store_dtype, self.device, self.enable_memory_saver, self._count_bytes
            )
            return layers.column(0), layers.column(1)
        with allocation_region(self.enable_memory_saver):
            keys, values = allocate_zeros([(self.layer_num, *row) for row in rows], self.store_dtype, self.device)
        self._count_bytes(keys.nbytes + values.nbytes)
        return keys.unbind(0), values.unbind(0)

    def _count_bytes(self, num_bytes: int) -> None:
        self.mem_usage += num_bytes / (1 << 30)

    @cached_property
    def layout(self) -> PoolLayout:
        layers = tuple(range(self.start_layer, self.end_layer + 1))
        keys = BufferSpec("k", self.store_dtype, (self.head_num, self.head_dim), "token", layers)
        values = BufferSpec("v", self.store_dtype, (self.head_num, self.v_head_dim), "token", layers)
        return PoolLayout((keys, values), self.page_size)

    def layer_buffers(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        index = self._index(layer_id)
        return self.k_buffer[index], self.v_buffer[index]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        index = self._index(layer_id)
        self._wait(layer_id)
        return self._as_read(self.k_buffer[index])

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        index = self._index(layer_id)
        self._wait(layer_id)
        return self._as_read(self.v_buffer[index])

    def set_kv_buffer(
        self,
        layer: HasLayerId | int,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> None:
        """As the base's. fp8 is bounded to its range; rows are converted and divided by their scale in the launch."""
        index = self._index(layer)
        k_buffer, v_buffer = self.k_buffer[index], self.v_buffer[index]
        self._check_loc(loc)
        k, k_scale = self._storable(cache_k, k_buffer, loc, k_scale, "cache_k")
        v, v_scale = self._storable(cache_v, v_buffer, loc, v_scale, "cache_v")
        if k.dtype != v.dtype:
            k, v = k.float(), v.float()
        k_buffer, v_buffer = self._as_read(k_buffer), self._as_read(v_buffer)
        if self._alt_stream is None or not torch.cuda.is_current_stream_capturing():
            store_kv(k, v, k_buffer, v_buffer, loc, self._kernels, k_scale, v_scale)
            return
        current = torch.cuda.current_stream(self.device)
        self._alt_stream.wait_stream(current)
        store_kv(k, v, k_buffer, v_buffer, loc, self._kernels, k_scale, v_scale, only="k")
        with torch.cuda.stream(self._alt_stream):
            store_kv(k, v, k_buffer, v_buffer, loc, self._kernels, k_scale, v_scale, only="v")
        current.wait_stream(self._alt_stream)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """As the base's; with the Triton kernels in one launch over all layers, or a few for many tokens."""
        if self._kernels == "torch":
            super().move_kv_cache(tgt_loc, src_loc)
            return
        self._check_loc(tgt_loc)
        self._check_loc(src_loc)
        if tgt_loc.shape != src_loc.shape:
            raise ShapeError(f"{tuple(tgt_loc.shape)} target slots for {tuple(src_loc.shape)} source slots")
        for layer_id in self.layer_ids:
            self._wait(layer_id)
        self._mover.move(tgt_loc, src_loc)

    @cached_property
    def _mover(self) -> TiledCopy:
        buffers = [buffer for layer_id in self.layer_ids for buffer in self.layer_buffers(layer_id)]
        return TiledCopy(buffers, self._kernels)

    def _storable(
        self, rows: torch.Tensor, buffer: torch.Tensor, loc: torch.Tensor, scale: Scale, name: str
    ) -> tuple[torch.Tensor, Scale]:
        """Rows that the store kernel takes, and the scale that is left to it; `rows` itself stays as it was."""
        expected = (loc.numel(), *buffer.shape[1:])
        if tuple(rows.shape) != expected or not rows.is_floating_point() or rows.device != buffer.device:
            raise ShapeError(
                f"{name} is {tuple(rows.shape)} of {rows.dtype} on {rows.device}, the pool takes {expected} of "
                f"{self.dtype} on {buffer.device}"
            )
        if isinstance(scale, torch.Tensor):
            if scale.numel() != 1:  # one a head, say
                rows, scale = rows.float() / scale, None
            elif scale.device != rows.device:
                scale = float(scale)
        if (rows.dtype != self.dtype or scale is not None) and rows.dtype not in _CASTABLE:
            rows = rows.float()
        if rows.stride(-1) != 1 or (rows.shape[1] > 1 and rows.stride(1) != rows.shape[2]):
            rows = rows.contiguous()
        return rows, scale
