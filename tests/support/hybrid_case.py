"""Shared by the tests of hybrid and sliding-window models: tiny random models of each architecture, and pools that
serve them without an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from family_case import tiny_family
from hicache.alloc import PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from hicache.device import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    KVCache,
    Mamba2CacheParams,
    Mamba2StateShape,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
    SWAKVPool,
)
from hicache.engine import CacheRequest, Lease
from hicache.layout import ModelGeometry
from hicache.pages.node import TreeNode
from serving_case import DEVICE

_ROOMY = {"head_dim": 16, "max_position_embeddings": 4096}


def tiny_qwen3_next(**changes: Any) -> Any:
    """A Qwen3-Next of three recurrent layers and one with full attention, in float32. Every second layer has
    experts."""
    model = tiny_family("qwen3_next", **{**_ROOMY, "decoder_sparse_step": 2, **changes})
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            # With random rates most heads forget within two tokens, and a test would not notice a lost state. Here the
            # contribution of a token decays by 1 % to 50 % per token.
            rates = torch.linspace(0.01, 0.5, len(layer.linear_attn.A_log), device=layer.linear_attn.A_log.device)
            layer.linear_attn.A_log.data.copy_(rates.log())
    return model


def tiny_mistral(window: int, **changes: Any) -> Any:
    """A Mistral of three window layers."""
    return tiny_family("mistral", **{**_ROOMY, "num_hidden_layers": 3, "sliding_window": window, **changes})


def tiny_gemma(window: int, version: int = 3, **changes: Any) -> Any:
    """A Gemma 2 or 3 of four layers. The third layer of Gemma 3, and the second and fourth of Gemma 2, have full
    attention."""
    if version == 2:
        return tiny_family("gemma2", **{**_ROOMY, "sliding_window": window, **changes})
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return tiny_family("gemma3_text", **{**_ROOMY, "sliding_window": window, "layer_types": types, **changes})


def tiny_qwen3_window(window: int, **changes: Any) -> Any:
    """A Qwen 3 of four layers, of which the first two have full attention."""
    windows = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": window, "max_window_layers": 2}
    return tiny_family("qwen3", **{**_ROOMY, **windows, **changes})


class Pools:
    """A `ForwardEngine` without a cache: the pools of `geometry`, and leases that share no slots.

    If every layer has a window, the first layer keeps all tokens, as in the engine's factory. `keep_windows`: all
    layers keep all tokens, in a pool with one slot space.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        *,
        num_tokens: int = 512,
        window_tokens: int = 128,
        page_size: int = 4,
        requests: int = 8,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype | None = None,
        keep_windows: bool = False,
    ) -> None:
        self.geometry, self.page_size, self.begun = geometry, page_size, 0
        heads, state, args = (geometry.head_num, geometry.head_dim), geometry.state, (num_tokens, page_size, dtype)
        self.req_to_token = ReqToTokenPool(requests, num_tokens, DEVICE, False)
        self.allocator: PagedTokenToKVPoolAllocator | SWATokenToKVPoolAllocator
        self.pool: KVCache
        if geometry.window_layers and not keep_windows:
            full = geometry.full_layers or geometry.window_layers[:1]
            swa = [layer for layer in geometry.window_layers if layer not in full]
            pool = SWAKVPool(num_tokens, window_tokens, page_size, dtype, *heads, swa, full, DEVICE)
            self.pool = pool
            self.allocator = SWATokenToKVPoolAllocator(
                num_tokens, window_tokens, page_size, dtype, DEVICE, pool, need_sort=True
            )
            return
        latent = geometry.latent
        if state is None and latent is not None:
            self.pool = MLATokenToKVPool(*args, latent.rank, latent.rope, geometry.layer_num, DEVICE, False)
        elif state is None:
            self.pool = MHATokenToKVPool(*args, *heads, geometry.layer_num, DEVICE, False)
        else:
            dtypes = (state_dtype or state.temporal_dtype, state_dtype or state.conv_dtype)
            shape = Mamba2StateShape(conv=state.conv, temporal=state.temporal)
            params = Mamba2CacheParams(shape, geometry.recurrent_layers, *dtypes)
            table = HybridReqToTokenPool(requests, 2 * requests, num_tokens, DEVICE, False, params)
            self.req_to_token = table
            self.pool = HybridLinearKVPool(
                num_tokens,
                dtype,
                page_size,
                *heads,
                geometry.full_layers,
                DEVICE,
                table.mamba_pool,
                use_mla=latent is not None,
                kv_lora_rank=latent.rank if latent else None,
                qk_rope_head_dim=latent.rope if latent else None,
            )
        self.allocator = PagedTokenToKVPoolAllocator(*args, DEVICE, self.pool, need_sort=True)

    @property
    def states(self) -> HybridReqToTokenPool:
        assert isinstance(self.req_to_token, HybridReqToTokenPool)
        return self.req_to_token

    @property
    def windows(self) -> SWATokenToKVPoolAllocator:
        assert isinstance(self.allocator, SWATokenToKVPoolAllocator)
        return self.allocator

    def begin_forward(self, leases: Sequence[Lease]) -> None:
        self.begun += len(leases)

    def lease(self, num_tokens: int = 0) -> Lease:
        """A lease of `num_tokens` slots, with a zeroed state if the model has states."""
        request = CacheRequest("r", np.zeros(num_tokens, dtype=np.int64))
        lease = Lease(request, TreeNode(), self.req_to_token.req_to_token, self.allocator.device)
        assert self.req_to_token.alloc([lease]) is not None
        self.extend(lease, num_tokens)
        return lease

    def extend(self, lease: Lease, num_tokens: int) -> None:
        """Append slots for `num_tokens` more tokens to the lease, in complete pages."""
        lease.length += num_tokens
        short = -(-max(0, lease.length - lease.held_len) // self.page_size) * self.page_size
        if short:
            slots = self.allocator.alloc(short)
            assert slots is not None
            lease.write(lease.held_len, slots)
            lease.held_len += short

    def free_windows(self, lease: Lease, end: int) -> None:
        """Overwrite the KV of the complete pages of [0, end) with NaN, and free their window slots. Does nothing
        without windows."""
        if not isinstance(self.pool, SWAKVPool):
            return
        slots = lease.slots_of(0, end // self.page_size * self.page_size)
        peers = self.windows.translate_loc_from_full_to_swa(slots)
        for layer_id, (_, in_window_space) in self.pool.layers_mapping.items():
            for buffer in self.pool.layer_buffers(layer_id) if in_window_space else ():
                buffer[peers[peers > 0]] = float("nan")
        self.windows.free_swa(slots)

    def release(self, lease: Lease) -> None:
        self.allocator.free(lease.slots_of(0, lease.held_len))
        if isinstance(self.req_to_token, HybridReqToTokenPool):
            self.req_to_token.free_mamba_cache(lease)
        self.req_to_token.free(lease)
