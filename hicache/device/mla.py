"""The device pool of multi-head latent attention: one latent row for each token and layer.

row   [0, kv_lora_rank) latent, without position   [kv_lora_rank, + qk_rope_head_dim) rotary part of the key
"""

from __future__ import annotations

import torch

from hicache.device.base import LayerRef
from hicache.device.rows import Row, RowPool
from hicache.errors import ShapeError
from hicache.kernels.mla import get_latent, set_latent
from hicache.kernels.store_kv import Scale, store_rows


class MLATokenToKVPool(RowPool):
    """A pool of latent rows: `kv_buffer` `[layers, size + page_size, 1, kv_lora_rank + qk_rope_head_dim]`, zero-filled,
    in `store_dtype`.

    Layer 0 is `start_layer`. The value of a token is the first part of its key.
    """

    kv_buffer: torch.Tensor

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
        start_layer: int | None = None,
        end_layer: int | None = None,
    ) -> None:
        """Raise ConfigError for sizes below 1 or if the memory saver is not installed. Raise OutOfMemory, with a
        message that names `device_tokens`, if the pool does not fit."""
        super().__init__(size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer, end_layer)
        self._positive(kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self.kv_cache_dim = self._row_dim()
        latent, *rest = self._build([Row("kv", self.store_dtype, (1, self.kv_cache_dim)), *self._further_rows()])
        self.kv_buffer = self._arrange(latent)
        self._further = rest

    def _row_dim(self) -> int:
        """Return the number of elements of a latent row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def _arrange(self, latent: torch.Tensor) -> torch.Tensor:
        """Return `kv_buffer` as a view of the rows `[layers, slots, 1, elements]`."""
        return latent

    def _further_rows(self) -> list[Row]:
        """Return the kinds of rows that a layer stores in addition to the latent rows."""
        return []

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the first `kv_lora_rank` columns of the latent rows as a view `[slots, 1, rank]`."""
        return self.get_key_buffer(layer_id)[..., : self.kv_lora_rank]

    def set_kv_buffer(
        self,
        layer: LayerRef,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> None:
        """Store complete rows `cache_k [tokens, 1, rank + rope]`, divided by `k_scale`. `cache_v` and `v_scale` are
        ignored, because these rows already contain the values."""
        index = self._index(layer)
        self._check_loc(loc)
        rows, scale = self._storable(cache_k, (loc.numel(), 1, self.kv_cache_dim), k_scale, "cache_k")
        self._store_rows(index, loc, rows, scale)

    def set_mla_kv_buffer(self, layer: LayerRef, loc: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
        """Store rows given in two parts, `[tokens, 1, rank]` (or `[tokens, rank]`) and `[tokens, 1, rope]`, in one
        launch. Raises ShapeError with the given and the expected shapes."""
        index = self._index(layer)
        self._check_loc(loc)
        nope = self._part(k_nope, loc, self.kv_lora_rank, "k_nope")
        rope = self._part(k_rope, loc, self.qk_rope_head_dim, "k_rope")
        self._store_parts(index, loc, nope, rope)

    def get_mla_kv_buffer(
        self, layer: LayerRef, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latent rows at `loc` in two parts, `[tokens, 1, rank]` and `[tokens, 1, rope]`, as new tensors of
        `dst_dtype` (default: the pool's dtype), after waiting until the layer is loaded."""
        self._check_loc(loc)
        buffer = self._stored[self._wait_for(layer)][0]
        parts = get_latent(buffer, loc, self.kv_lora_rank, self.qk_rope_head_dim, self._kernels)
        nope, rope = (self._as_read(part).to(dst_dtype or self.dtype) for part in parts)
        return nope, rope

    def _store_rows(self, index: int, loc: torch.Tensor, rows: torch.Tensor, scale: Scale) -> None:
        store_rows(rows, self._as_read(self._stored[index][0]), loc, self._kernels, scale)

    def _store_parts(self, index: int, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor) -> None:
        """Store the two parts of rows, each `[tokens, 1, ...]` in `store_dtype`."""
        set_latent(nope, rope, self._stored[index][0], loc, self._kernels)

    def _part(self, rows: torch.Tensor, loc: torch.Tensor, dim: int, name: str) -> torch.Tensor:
        if rows.dim() not in (2, 3):
            raise ShapeError(f"{name} is {tuple(rows.shape)}, the pool takes ({loc.numel()}, 1, {dim})")
        rows = rows if rows.dim() == 3 else rows[:, None]
        return self._as_stored(rows, (loc.numel(), 1, dim), None, name)
