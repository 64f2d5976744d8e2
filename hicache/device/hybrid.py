"""The pool of hybrid models: attention in some layers, a recurrent state in the others.

    attention layer   a row a token in a pool of dense layers, `full_kv_pool`; layer map: global id -> dense id
    Mamba layer       a state a request in `mamba_pool`, which brings slots of its own

Owns the attention pool; borrows the state pool, which the request table hands out. May import what the base may.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from hicache.device.base import HasLayerId, KVCache, SlotSpace
from hicache.device.mamba import MambaPool
from hicache.device.mapped import MappedKVPool, ascending, with_layer_ids
from hicache.device.mha import MHATokenToKVPool
from hicache.device.mla import MLATokenToKVPool
from hicache.errors import ConfigError, ShapeError
from hicache.layout import PoolLayout


class HybridLinearKVPool(MappedKVPool):
    """Keys and values of `full_attention_layer_ids`, under their global ids, beside the states of `mamba_pool`.

    `layout` and the copies are of the attention layers; `slot_spaces` adds the state pool's.
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
    ) -> None:
        """With `use_mla` rows are latent, of `kv_lora_rank` and `qk_rope_head_dim`, and heads are not looked at.

        ConfigError on transposing, on layers that are missing, named twice or Mamba's, and on a missing MLA size.
        """
        if enable_kvcache_transpose:
            raise ConfigError("enable_kvcache_transpose=True: keys and values are stored by token; set it to False")
        layer_ids = ascending(full_attention_layer_ids, "full_attention_layer_ids")
        both = sorted(set(layer_ids) & set(mamba_pool.layers if mamba_pool else ()))
        if both:
            raise ConfigError(f"layers {both} are given as attention layers and are Mamba layers of mamba_pool")
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
                size, page_size, dtype, head_num, head_dim, len(layer_ids), device, enable_memory_saver
            )
        places: dict[int, tuple[KVCache, int]] = {i: (self.full_kv_pool, dense) for dense, i in enumerate(layer_ids)}
        super().__init__(size, page_size, dtype, places, device, enable_memory_saver)
        self.mamba_pool = mamba_pool

    @cached_property
    def layout(self) -> PoolLayout:
        return with_layer_ids(self.full_kv_pool.layout, self.layer_ids)

    @cached_property
    def slot_spaces(self) -> tuple[SlotSpace, ...]:
        """The space of token slots, and that of states where there is a state pool."""
        slots = self.size + self.page_size
        attention = SlotSpace("full", self.layout, slots, self.device, self.layer_buffers)
        return (attention, *(self.mamba_pool.slot_spaces if self.mamba_pool else ()))

    def set_kv_buffer(
        self,
        layer: HasLayerId | int,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        dense_id = self._transfer_full_attention_id(layer)
        self.full_kv_pool.set_kv_buffer(dense_id, loc, cache_k, cache_v, k_scale, v_scale)

    def set_mla_kv_buffer(
        self, layer: HasLayerId | int, loc: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor
    ) -> None:
        """As `MLATokenToKVPool`'s. ConfigError where the pool was built with use_mla=False."""
        self._latent().set_mla_kv_buffer(self._transfer_full_attention_id(layer), loc, k_nope, k_rope)

    def get_mla_kv_buffer(
        self, layer: HasLayerId | int, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `MLATokenToKVPool`'s, after waiting for the layer."""
        dense_id = self._transfer_full_attention_id(layer)
        self._wait(self.layer_ids[dense_id])
        return self._latent().get_mla_kv_buffer(dense_id, loc, dst_dtype)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        self._wait_all()
        self.full_kv_pool.move_kv_cache(tgt_loc, src_loc)

    def _transfer_full_attention_id(self, layer: HasLayerId | int) -> int:
        """The dense id of a global one; ShapeError, a ValueError, names the layers there are."""
        return self._place(layer if isinstance(layer, int) else layer.layer_id)[1]

    def _unknown(self, layer_id: int) -> ShapeError:
        return ShapeError(f"layer_id={layer_id} not in full attention layers: {list(self._places)}")

    def _latent(self) -> MLATokenToKVPool:
        if not isinstance(self.full_kv_pool, MLATokenToKVPool):
            raise ConfigError("the pool stores keys and values by head; build it with use_mla=True for latent rows")
        return self.full_kv_pool
