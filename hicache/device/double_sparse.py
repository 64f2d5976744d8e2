"""The device pool of double sparse attention: keys, values, and of each key the few channels that decide its weight.

Owns one tensor of each over all layers. May import what the base may.
"""

from __future__ import annotations

import torch

from hicache.config import kernel_choice
from hicache.device.base import HasLayerId
from hicache.device.rows import Row, RowPool
from hicache.errors import ShapeError
from hicache.kernels.store_kv import store_kv, store_rows


class DoubleSparseTokenToKVPool(RowPool):
    """Of layer `start_layer + i`: `k_buffer[i]`, `v_buffer[i]` `[size + page_size, head_num, head_dim]` and
    `label_buffer[i]` `[size + page_size, head_num, heavy_channel_num]`, zero-filled, in `store_dtype`."""

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str | torch.device,
        heavy_channel_num: int,
        enable_memory_saver: bool,
        start_layer: int | None = None,
        end_layer: int | None = None,
    ) -> None:
        """ConfigError on sizes below 1 or a missing memory saver; OutOfMemory names `device_tokens`."""
        super().__init__(size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer, end_layer)
        self._positive(head_num=head_num, head_dim=head_dim, heavy_channel_num=heavy_channel_num)
        self.head_num, self.head_dim, self.heavy_channel_num = head_num, head_dim, heavy_channel_num
        self._kernels = kernel_choice(self.device)
        k, v, label = self._build(
            [
                Row("k", self.store_dtype, (head_num, head_dim)),
                Row("v", self.store_dtype, (head_num, head_dim)),
                Row("label", self.store_dtype, (head_num, heavy_channel_num)),
            ]
        )
        self.k_buffer: tuple[torch.Tensor, ...] = k.unbind(0)
        self.v_buffer: tuple[torch.Tensor, ...] = v.unbind(0)
        self.label_buffer: tuple[torch.Tensor, ...] = label.unbind(0)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._as_read(self.k_buffer[self._wait_for(layer_id)])

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._as_read(self.v_buffer[self._wait_for(layer_id)])

    def get_label_buffer(self, layer_id: int) -> torch.Tensor:
        """Labels `[slots, head_num, heavy_channel_num]` of a layer, after waiting for it."""
        return self._as_read(self.label_buffer[self._wait_for(layer_id)])

    def set_kv_buffer(  # type: ignore[override]  # the field's callers pass the label fifth, where others have a scale
        self,
        layer: HasLayerId | int,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        cache_label: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """As the base's, with the labels of the keys, `[tokens, head_num, heavy_channel_num]`, which are stored as they
        are: they choose tokens by their order, and a scale does not change that. ShapeError without them."""
        index, count = self._index(layer), loc.numel()
        self._check_loc(loc)
        row = (count, self.head_num, self.head_dim)
        k, v = self._pair(cache_k, cache_v, row, row, k_scale, v_scale)
        expected = (count, self.head_num, self.heavy_channel_num)
        if not isinstance(cache_label, torch.Tensor):
            raise ShapeError(
                f"cache_label is {cache_label}, the pool takes {expected}; pass the heavy channels of the keys"
            )
        label = self._as_given(cache_label, expected, None, "cache_label")
        buffers = [self._as_read(buffer) for buffer in self._stored[index]]
        store_kv(k, v, buffers[0], buffers[1], loc, self._kernels, k_scale, v_scale)
        store_rows(label, buffers[2], loc, self._kernels)
