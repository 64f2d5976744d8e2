"""A device pool of multi-head attention in 8 bits. It stores int8 or fp8 keys and values, with a float32 scale for each
token and head.

The scales of a token are computed when this token is stored, so later stores never change the values of earlier tokens.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from hicache.device.rows import KVRows, Row, RowPool
from hicache.errors import ConfigError
from hicache.kernels.quant import dequantise_kv, quantise_kv
from hicache.kernels.store_kv import cast_rows

_STORED = {"int8": torch.int8, "fp8": torch.uint8}


class QuantizedLayer(NamedTuple):
    """A layer as stored. Keys and values: `[slots, heads, dim]`, int8, or float8_e4m3fn viewed as uint8. Scales:
    float32 `[slots, heads]`.

    The value of an element is the stored number times the scale of its token and head.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor


class QuantizedKVCache(RowPool):
    """Keys and values of `dtype`, kept in 8 bits: `kv_dtype` "int8" (scale max|x| / 127) or "fp8" (e4m3, max|x| / 448).

    `get_key_buffer`, `get_value_buffer` and `get_kv_buffer` dequantise a complete layer into new tensors; `load_kv`
    dequantises the given slots; `get_quantized_buffer` is for kernels that dequantise themselves.
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
        kv_dtype: Literal["int8", "fp8"] = "int8",
    ) -> None:
        """Raise ConfigError for sizes below 1, an unknown `kv_dtype`, or a `dtype` of 8 bits. Raise OutOfMemory, with a
        message that names `device_tokens`, if the pool does not fit."""
        super().__init__(size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer, end_layer)
        if kv_dtype not in _STORED:
            raise ConfigError(f"kv_dtype={kv_dtype!r}: choose 'int8' or 'fp8'")
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ConfigError(f"dtype={dtype} is the dtype of reads: set it to the model's; kv_dtype is what is stored")
        self.head_num = head_num
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self._positive(head_num=head_num, head_dim=head_dim, v_head_dim=self.v_head_dim)
        self.kv_dtype = kv_dtype
        self.store_dtype = _STORED[kv_dtype]
        self._build(
            [
                Row("k", self.store_dtype, (head_num, head_dim)),
                Row("v", self.store_dtype, (head_num, self.v_head_dim)),
                Row("k_scale", torch.float32, (head_num,)),
                Row("v_scale", torch.float32, (head_num,)),
            ]
        )

    def get_quantized_buffer(self, layer_id: int) -> QuantizedLayer:
        """Return a layer as stored, after waiting until the layer is loaded. The tensors are views, which stay valid as
        long as the pool exists."""
        return QuantizedLayer(*self._stored[self._wait_for(layer_id)])

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return all keys of a layer, dequantised into a new tensor `[slots, heads, dim]` of `dtype`."""
        layer = self.get_quantized_buffer(layer_id)
        return dequantise_kv([layer.k], [layer.k_scale], None, self.dtype, self._kernels)[0]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return all values of a layer, dequantised into a new tensor `[slots, heads, dim]` of `dtype`."""
        layer = self.get_quantized_buffer(layer_id)
        return dequantise_kv([layer.v], [layer.v_scale], None, self.dtype, self._kernels)[0]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read(layer_id, None)

    def load_kv(self, layer_id: int, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys and values at slots `indices [tokens]` and dequantise them to `dtype`, in one launch."""
        self._check_loc(indices)
        return self._read(layer_id, indices)

    def _store(self, index: int, loc: torch.Tensor, rows: KVRows) -> None:
        """Divide rows by their scales, quantise them and store them, in one launch."""
        stored, (k, v, k_scale, v_scale) = QuantizedLayer(*self._stored[index]), rows
        if k_scale is not None or v_scale is not None:
            k, v = cast_rows(k, torch.float32, k_scale), cast_rows(v, torch.float32, v_scale)
        quantise_kv(k, v, (stored.k, stored.v), (stored.k_scale, stored.v_scale), loc, self._kernels)

    def _read(self, layer_id: int, loc: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.get_quantized_buffer(layer_id)
        k, v = dequantise_kv((layer.k, layer.v), (layer.k_scale, layer.v_scale), loc, self.dtype, self._kernels)
        return k, v
