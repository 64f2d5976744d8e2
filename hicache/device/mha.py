"""The device pool of multi-head attention: a key row and a value row a token and layer. Grouped heads are fewer heads.

Owns one tensor of keys and one of values over all layers. May import what the base may.
"""

from __future__ import annotations

from functools import cached_property

import torch

from hicache.config import kernel_choice
from hicache.device.base import HasLayerId, KVCache
from hicache.device.memory import allocate_zeros, allocation_region
from hicache.errors import ShapeError
from hicache.kernels.store_kv import store_kv, store_rows
from hicache.layout import BufferSpec, PoolLayout


class MHATokenToKVPool(KVCache):
    """Keys `[layers, size + page_size, head_num, head_dim]` and values (`v_head_dim`), zero-filled, in `store_dtype`.

    `k_buffer[i]` and `v_buffer[i]` are views of layer `start_layer + i`. Keys and values of a call are stored in one
    launch; under CUDA graph capture, with `enable_alt_stream`, values go on a second stream beside the keys.
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
    ) -> None:
        """ConfigError on sizes below 1 or a missing memory saver; OutOfMemory names `device_tokens`."""
        super().__init__(size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer, end_layer)
        self.head_num, self.head_dim = head_num, head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.enable_kv_cache_copy = enable_kv_cache_copy
        self._kernels = kernel_choice(self.device)
        slots = size + page_size
        shapes: list[tuple[int, ...]] = [
            (layer_num, slots, head_num, self.head_dim),
            (layer_num, slots, head_num, self.v_head_dim),
        ]
        with allocation_region(enable_memory_saver):
            keys, values = allocate_zeros(shapes, self.store_dtype, self.device)
        self.k_buffer: tuple[torch.Tensor, ...] = keys.unbind(0)
        self.v_buffer: tuple[torch.Tensor, ...] = values.unbind(0)
        self.mem_usage = (keys.nbytes + values.nbytes) / (1 << 30)
        on_cuda = self.device.type == "cuda"
        self._alt_stream = torch.cuda.Stream(self.device) if on_cuda and enable_alt_stream else None

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
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        index = self._index(layer)
        k_buffer, v_buffer = self.k_buffer[index], self.v_buffer[index]
        self._check_loc(loc)
        k = self._as_stored(cache_k, k_buffer, loc, k_scale, "cache_k")
        v = self._as_stored(cache_v, v_buffer, loc, v_scale, "cache_v")
        if self._alt_stream is None or not torch.cuda.is_current_stream_capturing():
            store_kv(k, v, k_buffer, v_buffer, loc, self._kernels)
            return
        current = torch.cuda.current_stream(self.device)
        self._alt_stream.wait_stream(current)
        store_rows(k, k_buffer, loc, self._kernels)
        with torch.cuda.stream(self._alt_stream):
            store_rows(v, v_buffer, loc, self._kernels)
        current.wait_stream(self._alt_stream)

    def _as_read(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if self.store_dtype == self.dtype else buffer.view(self.dtype)

    def _check_loc(self, loc: torch.Tensor) -> None:
        if loc.dim() != 1 or loc.dtype not in (torch.int64, torch.int32) or loc.device != self.k_buffer[0].device:
            raise ShapeError(
                f"loc {tuple(loc.shape)} of {loc.dtype} on {loc.device}: need int64 or int32 slots in one dimension "
                f"on {self.k_buffer[0].device}"
            )
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._debug and loc.numel() and not capturing:
            low, high = int(loc.min()), int(loc.max())
            if low < 0 or high >= self.size + self.page_size:
                raise ShapeError(f"slots {low}..{high} are outside the pool's 0..{self.size + self.page_size - 1}")

    def _as_stored(
        self,
        rows: torch.Tensor,
        buffer: torch.Tensor,
        loc: torch.Tensor,
        scale: float | torch.Tensor | None,
        name: str,
    ) -> torch.Tensor:
        """`rows / scale` in the pool's dtype as it is stored; `rows` itself stays as it was."""
        expected = (loc.numel(), *buffer.shape[1:])
        if tuple(rows.shape) != expected or not rows.is_floating_point() or rows.device != buffer.device:
            raise ShapeError(
                f"{name} is {tuple(rows.shape)} of {rows.dtype} on {rows.device}, the pool takes {expected} of "
                f"{self.dtype} on {buffer.device}"
            )
        if scale is not None:
            rows = rows / scale
        if rows.dtype != self.dtype:
            rows = rows.to(self.dtype)
        if rows.stride(-1) != 1 or (rows.shape[1] > 1 and rows.stride(1) != rows.shape[2]):
            rows = rows.contiguous()
        return rows if self.store_dtype == self.dtype else rows.view(self.store_dtype)
