"""The pool as a transformers `Cache`: how a model that knows nothing of slots reads and writes them.

A forward pass gets a `PoolCache` made for it. Each attention layer hands its new keys and values to `update`, which
stores them at the slots of the new tokens and returns those of the whole sequence. The pool's getters wait for the
layer, so a prefix that is still on its way up is read only where it has arrived.

Owns nothing but views. May import transformers, torch and the device tier's contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from hicache.device.base import KVCache


@dataclass(frozen=True)
class BatchSlots:
    """Where the tokens of one forward pass live: `B` sequences, `n` new tokens each, `kv_len` tokens the longest.

    new_slots     int64 [B * n]       slots of the new tokens, sequence after sequence
    all_slots     int64 [B, kv_len]   slots of every token, the new ones included; slot 0 pads behind a shorter sequence
    past_len      kv_len - n          tokens of the longest sequence that stand before its new ones
    """

    new_slots: torch.Tensor
    all_slots: torch.Tensor
    past_len: int


class PoolLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer of one forward pass. Called by the model, on the scheduler thread."""

    is_sliding = False

    def __init__(self, pool: KVCache, layer_id: int, batch: BatchSlots) -> None:
        super().__init__()
        self._pool, self._layer_id, self._batch = pool, layer_id, batch
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The pool was allocated long before."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `[B, heads, n, dim]` and return keys and values `[B, heads, kv_len, dim]` of the whole sequences."""
        pool, batch = self._pool, self._batch
        pool.set_kv_buffer(self._layer_id, batch.new_slots, _rows(key_states), _rows(value_states))
        if not batch.past_len and pool.dtype == key_states.dtype:
            return key_states, value_states  # what a read would return, without the read
        return (
            _gather(pool.get_key_buffer(self._layer_id), batch.all_slots, key_states.dtype),
            _gather(pool.get_value_buffer(self._layer_id), batch.all_slots, value_states.dtype),
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv_len, offset of its first token), for a forward without a mask of its own."""
        return self._batch.past_len + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens before the new ones."""
        return self._batch.past_len

    def get_max_length(self) -> int:
        """-1: the pool's size is the engine's business."""
        return -1


class PoolCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """`model(..., past_key_values=PoolCache(...))` over the slots of `batch`. One forward pass each."""

    def __init__(self, pool: KVCache, layer_ids: Sequence[int], batch: BatchSlots) -> None:
        super().__init__(layers=[PoolLayer(pool, layer_id, batch) for layer_id in layer_ids])


def _rows(states: torch.Tensor) -> torch.Tensor:
    """[B, heads, n, dim] -> [B * n, heads, dim]."""
    return states.transpose(1, 2).flatten(0, 1)


def _gather(buffer: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[slots, heads, dim] at [B, kv_len] -> [B, heads, kv_len, dim], in the model's dtype."""
    rows = buffer.index_select(0, slots.flatten()).unflatten(0, slots.shape)
    gathered: torch.Tensor = rows.transpose(1, 2).to(dtype)
    return gathered
