"""The pool as a transformers `Cache`: how a model that knows nothing of slots reads and writes them.

A forward pass gets a `PoolCache` made for it. Each attention layer hands its new keys and values to `update`, which
stores them at the slots of the new tokens and returns those that the layer attends to. A recurrent layer gets its
requests' states and leaves new ones, which are stored when the pass has ended. The pools' getters wait for the layer,
so a prefix that is still on its way up is read only where it has arrived.

Owns nothing but views. May import transformers, torch, config, layout and the device tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from hicache.config import debug_checks
from hicache.device.base import KVCache
from hicache.device.hybrid_req import HybridReqToTokenPool
from hicache.device.mamba import MambaState
from hicache.device.swa import SWAKVPool
from hicache.errors import InvariantError
from hicache.layout import ModelGeometry, StateGeometry
from hicache.serving.states import StateCache, StateLayer


@dataclass(frozen=True)
class Keys:
    """What the attention layers of one kind read of `B` sequences.

    positions   int64 [B or 1, keys]   of each key in its sequence; outside of it is padding
    slots       int64 [B, keys]        full slots; 0 where a key is padding
    """

    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class BatchStates:
    """The state slots of `B` sequences: `slots` int64 [B]. `fresh` bool [B]: sequences that begin with this pass, whose
    slots are not read; None: none does."""

    table: HybridReqToTokenPool
    slots: torch.Tensor
    fresh: torch.Tensor | None = None


@dataclass(frozen=True)
class BatchSlots:
    """Where the tokens of one forward pass live: `B` sequences, `n` new tokens each.

    new_slots   int64 [B * n]   full slots of the new tokens, sequence after sequence
    past_len                    tokens of the longest sequence that stand before its new ones
    full                        keys of every token; None without layers that read them all
    window                      keys of the window of each sequence's new tokens; None without window layers
    states                      None without recurrent layers
    """

    new_slots: torch.Tensor
    past_len: int
    full: Keys | None
    window: Keys | None = None
    states: BatchStates | None = None


class PoolLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One attention layer of one forward pass. Called by the model, on the scheduler thread.

    `slots` int64 [B, keys]: where the layer reads, in its own slot space.
    """

    def __init__(
        self, pool: KVCache, layer_id: int, batch: BatchSlots, slots: torch.Tensor, is_sliding: bool = False
    ) -> None:
        super().__init__()
        self._pool, self._layer_id, self._batch, self._slots = pool, layer_id, batch, slots
        self.is_sliding = is_sliding
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The pool was allocated long before."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `[B, heads, n, dim]` and return what the layer reads, `[B, heads, keys, dim]`, the new ones last."""
        pool, batch = self._pool, self._batch
        pool.set_kv_buffer(self._layer_id, batch.new_slots, _rows(key_states), _rows(value_states))
        if not batch.past_len and pool.dtype == key_states.dtype:
            return key_states, value_states  # what a read would return, without the read
        return (
            _gather(pool.get_key_buffer(self._layer_id), self._slots, key_states.dtype),
            _gather(pool.get_value_buffer(self._layer_id), self._slots, value_states.dtype),
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, position of the first), for a forward without a mask of its own."""
        num_keys = self._slots.shape[1]
        return num_keys, self._batch.past_len + query_length - num_keys

    def get_seq_length(self) -> int:
        """Tokens before the new ones."""
        return self._batch.past_len

    def get_max_length(self) -> int:
        """-1: the pool's size is the engine's business."""
        return -1


class PoolCache(StateCache):
    """`model(..., past_key_values=PoolCache(...))` over the slots of `batch`. One forward pass each.

    On the CPU and in debug mode InvariantError where a window slot that the pass reads was given back.
    """

    def __init__(self, pool: KVCache, geometry: ModelGeometry, batch: BatchSlots) -> None:
        self._geometry, self._batch = geometry, batch
        in_window_space = frozenset[int]()
        if isinstance(pool, SWAKVPool):
            in_window_space = frozenset(layer_id for layer_id, (_, swa) in pool.layers_mapping.items() if swa)
        peers = _peers(pool, batch.window) if isinstance(pool, SWAKVPool) and batch.window is not None else None
        layers: list[PoolLayer | StateLayer] = []
        for layer_id, kind in enumerate(geometry.kinds):
            if kind == "recurrent":
                layers.append(self._state_layer(layer_id))
                continue
            keys = batch.full if kind == "full" else batch.window
            assert keys is not None, f"a pass without keys for {kind} layers"
            # A window layer may be kept whole: then it is read by full slots, like the others.
            slots = peers if peers is not None and layer_id in in_window_space else keys.slots
            layers.append(PoolLayer(pool, layer_id, batch, slots, is_sliding=kind == "window"))
        super().__init__(layers=layers)

    def store_states(self) -> None:
        """Write what the recurrent layers left to the state slots. Call it when the pass has ended."""
        states = self._batch.states
        if states is None:
            return
        for layer_id in self._geometry.recurrent_layers:
            left = self.layers[layer_id].state
            assert left is not None, f"the model left no state in layer {layer_id}"
            kept = states.table.mamba2_layer_cache(layer_id)
            for buffer, value in zip((*kept.conv, kept.temporal), (*left.conv, left.temporal), strict=True):
                buffer[states.slots] = value.to(buffer.dtype)

    def _state_layer(self, layer_id: int) -> StateLayer:
        states, shapes = self._batch.states, self._geometry.state
        assert states is not None and shapes is not None, "a pass without states for recurrent layers"
        if not self._batch.past_len:
            return StateLayer(None)
        return StateLayer(lambda: _fetch(states, layer_id, shapes))


def _fetch(states: BatchStates, layer_id: int, geometry: StateGeometry) -> MambaState:
    """Copies of one layer's states in the model's dtypes, zeroed where a sequence begins."""
    kept = states.table.mamba2_layer_cache(layer_id)
    copies = [x.index_select(0, states.slots).to(geometry.conv_dtype) for x in kept.conv]
    copies.append(kept.temporal.index_select(0, states.slots).to(geometry.temporal_dtype))
    if states.fresh is not None:
        for copy in copies:
            copy[states.fresh] = 0
    return MambaState(copies[:-1], copies[-1])


def _peers(pool: SWAKVPool, keys: Keys) -> torch.Tensor:
    """The window slots of `keys`."""
    peers = pool.translate_loc_from_full_to_swa(keys.slots)
    if pool.device.type == "cpu" or debug_checks():
        gone = (peers == 0) & (keys.slots != 0)
        if gone.any():
            raise InvariantError(
                "PoolCache", [f"the window slots of full slots {keys.slots[gone][:8].tolist()} were freed and are read"]
            )
    return peers


def _rows(states: torch.Tensor) -> torch.Tensor:
    """[B, heads, n, dim] -> [B * n, heads, dim]."""
    return states.transpose(1, 2).flatten(0, 1)


def _gather(buffer: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[slots, heads, dim] at [B, keys] -> [B, heads, keys, dim], in the model's dtype."""
    rows = buffer.index_select(0, slots.flatten()).unflatten(0, slots.shape)
    gathered: torch.Tensor = rows.transpose(1, 2).to(dtype)
    return gathered
