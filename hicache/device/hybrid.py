"""The pool of hybrid models, whose layers have attention, a recurrent state, or both.

    attention layer   a row per token in `full_kv_pool`; global layer ids are mapped to its dense ids
    Mamba layer       a state per request in `mamba_pool`, which numbers its states separately

`HybridLinearKVPool` owns the attention pool; the request table owns the state pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from hicache.device.base import KVCache, LayerRef, SlotSpace
from hicache.device.mamba import MambaPool
from hicache.device.mapped import MappedKVPool, ascending, with_layer_ids
from hicache.device.mha import MHATokenToKVPool
from hicache.device.mla import MLATokenToKVPool
from hicache.errors import ConfigError, ShapeError
from hicache.layout import PoolLayout


class HybridLinearKVPool(MappedKVPool):
    """A pool with the keys and values of `full_attention_layer_ids`, under global layer ids, and the states of
    `mamba_pool`.

    `layout` and CPU copies cover the attention layers; `slot_spaces` includes the slot spaces of the state pool.
    """

    full_kv_pool: MHATokenToKVPool | MLATokenToKVPool

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        page_size: int,
        head_num: int,
        head_dim: int,
        full_attention_layer_ids: Sequence[int],
        device: str | torch.device,
        mamba_pool: MambaPool | None = None,
        enable_memory_saver: bool = False,
        enable_kvcache_transpose: bool = False,
        use_mla: bool = False,
        kv_lora_rank: int | None = None,
        qk_rope_head_dim: int | None = None,
        v_head_dim: int | None = None,
    ) -> None:
        """Allocate the attention pool. With `use_mla`, the pool stores latent rows of `kv_lora_rank + qk_rope_head_dim`
        elements, and `head_num`, `head_dim` and `v_head_dim` are ignored.

        Raises ConfigError for `enable_kvcache_transpose`, for missing or duplicate layers, and for a missing MLA size.
        """
        if enable_kvcache_transpose:
            raise ConfigError("enable_kvcache_transpose=True: keys and values are stored by token; set it to False")
        layer_ids = ascending(full_attention_layer_ids, "full_attention_layer_ids")
        if use_mla:
            if kv_lora_rank is None or qk_rope_head_dim is None:
                raise ConfigError(
                    f"use_mla=True with kv_lora_rank={kv_lora_rank}, qk_rope_head_dim={qk_rope_head_dim}: give both"
                )
            self.full_kv_pool = MLATokenToKVPool(
                size, page_size, dtype, kv_lora_rank, qk_rope_head_dim, len(layer_ids), device, enable_memory_saver
            )
        else:
            self.full_kv_pool = MHATokenToKVPool(
                size, page_size, dtype, head_num, head_dim, len(layer_ids), device, enable_memory_saver, v_head_dim
            )
        layers: dict[int, tuple[KVCache, int]] = {i: (self.full_kv_pool, dense) for dense, i in enumerate(layer_ids)}
        super().__init__(size, page_size, dtype, layers, device, enable_memory_saver)
        self.mamba_pool = mamba_pool

    @cached_property
    def layout(self) -> PoolLayout:
        return with_layer_ids(self.full_kv_pool.layout, self.layer_ids)

    @cached_property
    def slot_spaces(self) -> tuple[SlotSpace, ...]:
        """One slot space for tokens, and one for states if there is a state pool."""
        return (*super().slot_spaces, *(self.mamba_pool.slot_spaces if self.mamba_pool else ()))

    def set_mla_kv_buffer(self, layer: LayerRef, loc: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor) -> None:
        """Store latent rows as `MLATokenToKVPool.set_mla_kv_buffer` does. Raises ConfigError if the pool was built with
        use_mla=False."""
        self._latent().set_mla_kv_buffer(self._transfer_full_attention_id(layer), loc, k_nope, k_rope)

    def get_mla_kv_buffer(
        self, layer: LayerRef, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latent rows as `MLATokenToKVPool.get_mla_kv_buffer` does, after waiting until the layer is loaded."""
        dense_id = self._transfer_full_attention_id(layer)
        self._wait(self.layer_ids[dense_id])
        return self._latent().get_mla_kv_buffer(dense_id, loc, dst_dtype)

    def _transfer_full_attention_id(self, layer: LayerRef) -> int:
        """Return the dense id of a layer, given its global id. Raises ShapeError (a ValueError) with a list of the
        attention layers."""
        return self._inner(layer if isinstance(layer, int) else layer.layer_id)[1]

    def _unknown(self, layer_id: int) -> ShapeError:
        return ShapeError(f"layer_id={layer_id} not in full attention layers: {list(self._layers)}")

    def _latent(self) -> MLATokenToKVPool:
        if not isinstance(self.full_kv_pool, MLATokenToKVPool):
            raise ConfigError("the pool stores keys and values by head; build it with use_mla=True for latent rows")
        return self.full_kv_pool
