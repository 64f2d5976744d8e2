"""The device pool of multi-head attention: a key row and a value row for each token and layer.

Grouped-query and multi-query attention store fewer heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from hicache.device.memory import LazyColumn
from hicache.device.rows import KVRows, Row, RowPool
from hicache.errors import ShapeError
from hicache.kernels.store_kv import store_kv
from hicache.kernels.tiled_copy import TiledCopy


class MHATokenToKVPool(RowPool):
    """Keys `[layers, size + page_size, head_num, head_dim]` and values (`v_head_dim`), zero-filled, in `store_dtype`.

    `k_buffer[i]` and `v_buffer[i]` are views of layer `start_layer + i`. With `lazy`, a layer is allocated when the
    model or a transfer uses it for the first time, and `mem_usage` counts only allocated layers. A call stores keys and
    values with one kernel launch. In a CUDA graph capture with `enable_alt_stream`, it stores values on a second stream
    in parallel.
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
        """Raise ConfigError for sizes below 1 or if the memory saver is not installed. Raise OutOfMemory, with a
        message that names `device_tokens`, if the pool does not fit."""
        super().__init__(size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer, end_layer)
        self.head_num = head_num
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self._positive(head_num=head_num, head_dim=head_dim, v_head_dim=self.v_head_dim)
        self.enable_kv_cache_copy = enable_kv_cache_copy
        rows = [Row(name, self.store_dtype, (head_num, dim)) for name, dim in (("k", head_dim), ("v", self.v_head_dim))]
        self.k_buffer: Sequence[torch.Tensor]
        self.v_buffer: Sequence[torch.Tensor]
        if lazy:
            layers = self._build_lazily(rows)
            self.k_buffer = LazyColumn(layers, 0)
            self.v_buffer = LazyColumn(layers, 1)
        else:
            self.k_buffer, self.v_buffer = (tensor.unbind(0) for tensor in self._build(rows))
        on_cuda = self.device.type == "cuda"
        self._alt_stream = torch.cuda.Stream(self.device) if on_cuda and enable_alt_stream else None
        if enable_kv_cache_copy and self._kernels == "triton" and not lazy:
            self._mover  # noqa: B018  (builds the mover now)

    def _store(self, index: int, loc: torch.Tensor, rows: KVRows) -> None:
        if self._alt_stream is None or not torch.cuda.is_current_stream_capturing():
            super()._store(index, loc, rows)
            return
        k, v, k_scale, v_scale = rows
        k_buffer, v_buffer = (self._as_read(buffer) for buffer in self._stored[index])
        current = torch.cuda.current_stream(self.device)
        self._alt_stream.wait_stream(current)
        store_kv(k, v, k_buffer, v_buffer, loc, self._kernels, k_scale, v_scale, only="k")
        with torch.cuda.stream(self._alt_stream):
            store_kv(k, v, k_buffer, v_buffer, loc, self._kernels, k_scale, v_scale, only="v")
        current.wait_stream(self._alt_stream)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots `src_loc` to `tgt_loc` in every layer; sources and targets may overlap. The Triton kernels need
        one launch for all layers, or a few launches for many tokens."""
        if self._kernels == "torch":
            super().move_kv_cache(tgt_loc, src_loc)
            return
        self._check_loc(tgt_loc)
        self._check_loc(src_loc)
        if tgt_loc.shape != src_loc.shape:
            raise ShapeError(f"{tuple(tgt_loc.shape)} target slots for {tuple(src_loc.shape)} source slots")
        self._wait_all()
        self._mover.move(tgt_loc, src_loc)

    @cached_property
    def _mover(self) -> TiledCopy:
        buffers = [buffer for layer_id in self.layer_ids for buffer in self.layer_buffers(layer_id)]
        return TiledCopy(buffers, self._kernels)
