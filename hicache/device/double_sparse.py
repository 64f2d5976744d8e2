"""The device pool of double sparse attention. It stores keys, values, and for each key a label, which consists of the
key's heavy channels."""

from __future__ import annotations

import torch

from hicache.device.base import LayerRef
from hicache.device.rows import Row, RowPool
from hicache.errors import ShapeError
from hicache.kernels.store_kv import Scale, store_rows


class DoubleSparseTokenToKVPool(RowPool):
    """A pool of keys, values and labels. Layer `start_layer + i` has `k_buffer[i]` and `v_buffer[i]`, both `[size +
    page_size, head_num, head_dim]`, and `label_buffer[i]` `[size + page_size, head_num, heavy_channel_num]`,
    zero-filled, in `store_dtype`."""

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
        """Raise ConfigError for sizes below 1 or if the memory saver is not installed. Raise OutOfMemory, with a
        message that names `device_tokens`, if the pool does not fit."""
        super().__init__(size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer, end_layer)
        self._positive(head_num=head_num, head_dim=head_dim, heavy_channel_num=heavy_channel_num)
        self.head_num = head_num
        self.head_dim = head_dim
        self.heavy_channel_num = heavy_channel_num
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

    def get_label_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the labels `[slots, head_num, heavy_channel_num]` of a layer, after waiting until the layer is
        loaded."""
        return self._as_read(self.label_buffer[self._wait_for(layer_id)])

    def set_kv_buffer(  # type: ignore[override]  # SGLang's callers pass the label fifth, where other pools have a scale
        self,
        layer: LayerRef,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        cache_label: torch.Tensor | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> None:
        """Store keys, values and labels of the keys, `[tokens, head_num, heavy_channel_num]`. Labels are stored without
        a scale: attention selects tokens by the order of labels, and a scale would not change this order. Raises
        ShapeError without labels."""
        expected = (loc.numel(), self.head_num, self.heavy_channel_num)
        if not isinstance(cache_label, torch.Tensor):
            raise ShapeError(
                f"cache_label is {cache_label}, the pool takes {expected}; pass the heavy channels of the keys"
            )
        label, _ = self._storable(cache_label, expected, None, "cache_label")
        super().set_kv_buffer(layer, loc, cache_k, cache_v, k_scale, v_scale)
        store_rows(label, self._as_read(self.label_buffer[self._index(layer)]), loc, self._kernels)
