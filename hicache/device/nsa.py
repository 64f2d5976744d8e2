"""The device pool of sparse latent attention. It stores MLA's rows, and fp8 index keys with scales, by which attention
selects tokens.

The index keys and scales of a device page share one row of bytes (see `hicache.kernels.nsa`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hicache.device.base import LayerRef, SlotRows
from hicache.device.mla import MLATokenToKVPool
from hicache.device.rows import Row
from hicache.errors import ConfigError, ShapeError
from hicache.kernels.nsa import (
    KEY_BYTES,
    SCALE_BYTES,
    gather_index_keys,
    gather_index_scales,
    index_row_bytes,
    quantise_index_keys,
    store_index_keys,
)


@dataclass(frozen=True)
class _SlotsInPages:
    """Indexes the view `part`, `[pages, page_size, ...item]`, by slot."""

    part: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.part.device

    def __getitem__(self, slots: torch.Tensor, /) -> torch.Tensor:
        return self.part[slots // self.part.shape[1], slots % self.part.shape[1]]

    def __setitem__(self, slots: torch.Tensor, rows: torch.Tensor, /) -> None:
        self.part[slots // self.part.shape[1], slots % self.part.shape[1]] = rows


class NSATokenToKVPool(MLATokenToKVPool):
    """A pool with MLA's `kv_buffer` and, for layer `start_layer + i`, `index_k_with_scale_buffer[i]`, uint8 `[pages,
    132 * page_size]`.

    Moves and CPU copies handle single tokens. Transfers to the host copy complete device pages.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        index_head_dim: int = KEY_BYTES,
        kv_cache_dim: int | None = None,
        start_layer: int | None = None,
        end_layer: int | None = None,
    ) -> None:
        """Allocate the pool. `kv_cache_dim`: number of elements of a latent row, if a row is wider than its two parts;
        only `set_kv_buffer` stores such complete rows. Raises ConfigError unless `index_head_dim` is 128, the number of
        elements that share a scale."""
        if index_head_dim != KEY_BYTES:
            raise ConfigError(f"index_head_dim={index_head_dim}: index keys are quantised in blocks of {KEY_BYTES}")
        parts = kv_lora_rank + qk_rope_head_dim
        if kv_cache_dim is not None and kv_cache_dim < parts:
            raise ConfigError(f"kv_cache_dim={kv_cache_dim} is below kv_lora_rank + qk_rope_head_dim = {parts}")
        self.index_head_dim = index_head_dim
        self._row_elements = kv_cache_dim or parts
        super().__init__(
            size, page_size, dtype, kv_lora_rank, qk_rope_head_dim, layer_num, device, enable_memory_saver,
            start_layer, end_layer,
        )  # fmt: skip
        self.index_k_with_scale_buffer: tuple[torch.Tensor, ...] = self._further[0].unbind(0)

    def _row_dim(self) -> int:
        return self._row_elements

    def _further_rows(self) -> list[Row]:
        return [Row("index_k", torch.uint8, (index_row_bytes(self.page_size),), "page")]

    def _slot_rows(self, layer_id: int) -> tuple[SlotRows, ...]:
        latent, index = self.layer_buffers(layer_id)
        end = self.page_size * KEY_BYTES
        keys, scales = index[:, :end], index[:, end:]
        by_token = [
            _SlotsInPages(part.unflatten(1, (self.page_size, item)))
            for part, item in ((keys, KEY_BYTES), (scales, SCALE_BYTES))
        ]
        return latent, *by_token

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the layer's index keys and scales as stored, uint8 `[pages, 132 * page_size]`, after waiting until the
        layer is loaded."""
        return self.index_k_with_scale_buffer[self._wait_for(layer_id)]

    def get_index_k_continuous(self, layer_id: int, seq_len: int, page_indices: torch.Tensor) -> torch.Tensor:
        """Return the index keys of a sequence's first `seq_len` tokens in one tensor, uint8 `[seq_len, 128]`, to be
        viewed as float8_e4m3fn. `page_indices`: int32 or int64, the pages of the sequence. Raises ShapeError if these
        pages have fewer than `seq_len` tokens."""
        buffer = self._pages_of(layer_id, seq_len, page_indices)
        return gather_index_keys(buffer, page_indices, seq_len, self.page_size, self._kernels)

    def get_index_k_scale_continuous(self, layer_id: int, seq_len: int, page_indices: torch.Tensor) -> torch.Tensor:
        """Return the scales of the index keys of a sequence's first `seq_len` tokens, uint8 `[seq_len, 4]`, to be
        viewed as float32. Raises ShapeError if the pages have fewer than `seq_len` tokens."""
        buffer = self._pages_of(layer_id, seq_len, page_indices)
        return gather_index_scales(buffer, page_indices, seq_len, self.page_size, self._kernels)

    def set_index_k_scale_buffer(
        self, layer_id: LayerRef, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
    ) -> None:
        """Store quantised index keys: `index_k` float8_e4m3fn (or its bytes) `[tokens, 128]`, `index_k_scale` float32
        `[tokens]` or `[tokens, 1]`. A ShapeError names the given and the expected shapes."""
        index, count = self._index(layer_id), loc.numel()
        self._check_loc(loc)
        if tuple(index_k.shape) != (count, KEY_BYTES) or index_k.dtype not in (torch.float8_e4m3fn, torch.uint8):
            raise ShapeError(
                f"index_k is {tuple(index_k.shape)} of {index_k.dtype}, the pool takes {(count, KEY_BYTES)} of "
                f"{torch.float8_e4m3fn}"
            )
        if tuple(index_k_scale.shape) not in ((count,), (count, 1)) or index_k_scale.dtype != torch.float32:
            raise ShapeError(
                f"index_k_scale is {tuple(index_k_scale.shape)} of {index_k_scale.dtype}, the pool takes {(count,)} of "
                f"{torch.float32}"
            )
        buffer = self.index_k_with_scale_buffer[index]
        store_index_keys(_with_contiguous_rows(index_k), index_k_scale, buffer, loc, self.page_size, self._kernels)

    def set_index_k_buffer(self, layer_id: LayerRef, loc: torch.Tensor, index_k: torch.Tensor) -> None:
        """Quantise index keys, float `[tokens, 128]`, and store them with their scales, max|x| / 448, in one launch."""
        index = self._index(layer_id)
        self._check_loc(loc)
        self._check_rows(index_k, (loc.numel(), KEY_BYTES), "index_k")
        if index_k.element_size() < 2:
            raise ShapeError(f"index_k of {index_k.dtype} is already quantised; store it with set_index_k_scale_buffer")
        buffer = self.index_k_with_scale_buffer[index]
        quantise_index_keys(_with_contiguous_rows(index_k), buffer, loc, self.page_size, self._kernels)

    def _pages_of(self, layer_id: int, seq_len: int, page_indices: torch.Tensor) -> torch.Tensor:
        held = page_indices.numel() * self.page_size
        if page_indices.dim() != 1 or not 0 <= seq_len <= held or page_indices.device != self._tensor_device:
            raise ShapeError(
                f"seq_len={seq_len} tokens of page_indices {tuple(page_indices.shape)} on {page_indices.device}: need "
                f"one dimension on {self._tensor_device}; these pages hold {held} tokens"
            )
        return self.get_index_k_with_scale_buffer(layer_id)


def _with_contiguous_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


DSATokenToKVPool = NSATokenToKVPool
