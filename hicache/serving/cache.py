"""The device pools as a transformers `Cache`: attention layers read and write slots, recurrent layers read and write
states.

One `PoolCache` serves one forward pass. An attention layer passes its new keys and values to `update`, which stores
them at the slots of the new tokens and returns all keys and values that the layer attends to. A recurrent layer gets
copies of the requests' states and returns new states. The runner stores the new states after the pass, so a failed pass
leaves the states in the pool unchanged. The pools' getters wait for each layer, so a pass can read a prefix layer by
layer while it is being loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionLayer

from hicache.config.environment import debug_checks
from hicache.device.base import KVCache
from hicache.device.hybrid import HybridLinearKVPool
from hicache.device.hybrid_req import HybridReqToTokenPool
from hicache.device.mamba import MambaState
from hicache.device.mla import MLATokenToKVPool
from hicache.device.swa import SWAKVPool
from hicache.errors import InvariantError
from hicache.layout import ModelGeometry, StateGeometry

LatentPool: TypeAlias = MLATokenToKVPool | HybridLinearKVPool  # a `HybridLinearKVPool` must be built with use_mla


def cache_keyword(model: Any) -> str | None:
    """Return the name of the argument by which the forward of a transformers model takes a cache; None if it takes no
    cache.

    From release 5.24 of transformers on, the name is `cache`. The model XLM has an argument `cache` that is a
    dictionary and not a `Cache`.
    """
    takes = inspect.signature(model.forward).parameters
    if "past_key_values" in takes:
        return "past_key_values"
    return "cache" if "cache" in takes and "dict" not in str(takes["cache"].annotation).lower() else None


def cache_argument(model: Any, cache: Cache) -> dict[str, Cache]:
    """Return `cache` as a keyword argument for the forward of `model`. The model must take a cache."""
    name = cache_keyword(model)
    assert name is not None, "models that take no cache are refused"
    return {name: cache}


@dataclass(frozen=True)
class KeySlots:
    """The keys of `B` sequences that attention layers of one kind read.

    positions   int64 [B or 1, keys]   position of each key in its sequence; outside of the sequence, the key is padding
    slots       int64 [B, keys]        full-attention slots; 0 where a key is padding
    """

    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class BatchStates:
    """The state slots of `B` sequences, int64 [B]. `starting`, bool [B], marks sequences whose first token is in this
    pass; the pass does not read the state slots of these sequences. `starting` is None if no sequence starts."""

    table: HybridReqToTokenPool
    slots: torch.Tensor
    starting: torch.Tensor | None = None


@dataclass(frozen=True)
class BatchSlots:
    """The slots of a forward pass.

    The pass is over `B` sequences with `n` new tokens each:

        new_slots   int64 [B * n], full-attention slots of the new tokens, sequence after sequence
        past_len    number of tokens of the longest sequence before its new tokens
        full        keys of all tokens; None if no layer has full attention
        window      keys in the windows of each sequence's new tokens; None if no layer has a window
        states      state slots of the sequences; None if no layer is recurrent
    """

    new_slots: torch.Tensor
    past_len: int
    full: KeySlots | None
    window: KeySlots | None = None
    states: BatchStates | None = None


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """The object for an attention layer in the transformers `Cache` of one pass. This object stores nothing: in passes
    over slots, the attention function stores the new rows. The model calls its methods on the scheduler thread."""

    def __init__(self, is_sliding: bool = False) -> None:
        super().__init__()
        self.is_sliding = is_sliding
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool is allocated with the engine."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0, because the sequences of a pass have different lengths. The model does not need this length,
        because the runner passes positions to the model."""
        return 0

    def get_max_length(self) -> int:
        """Return -1, which means no maximum. The engine limits the length of requests."""
        return -1


class PoolLayer(SlotLayer):
    """An attention layer that stores new rows in the pool and gathers the rows that it reads.

    `slots`: int64 [B, keys], the rows to read, in the slot space of the layer.
    """

    def __init__(
        self, pool: KVCache, layer_id: int, batch: BatchSlots, slots: torch.Tensor, is_sliding: bool = False
    ) -> None:
        super().__init__(is_sliding)
        self._pool = pool
        self._layer_id = layer_id
        self._batch = batch
        self._slots = slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, both `[B, heads, n, dim]`. Return all keys and values that the layer reads, `[B,
        heads, keys, dim]`, with the new tokens last."""
        pool, batch = self._pool, self._batch
        pool.set_kv_buffer(self._layer_id, batch.new_slots, token_rows(key_states), token_rows(value_states))
        if not batch.past_len and pool.dtype == key_states.dtype:
            return key_states, value_states  # the pool would return the same values
        return (
            _gather(pool.get_key_buffer(self._layer_id), self._slots, key_states.dtype),
            _gather(pool.get_value_buffer(self._layer_id), self._slots, value_states.dtype),
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the position of the first key, for a forward that creates its own mask."""
        num_keys = self._slots.shape[1]
        return num_keys, self._batch.past_len + query_length - num_keys

    def get_seq_length(self) -> int:
        """Return the number of tokens of the longest sequence before its new tokens."""
        return self._batch.past_len


class LatentLayer(PoolLayer):
    """A layer of latent attention in one forward pass. transformers passes latents as keys and the rotary parts of keys
    as values; the model expands latents after `update`."""

    def __init__(self, pool: LatentPool, layer_id: int, batch: BatchSlots, slots: torch.Tensor) -> None:
        super().__init__(pool, layer_id, batch, slots)
        self._latent_pool = pool

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new latents `[B, 1, n, rank]` and rotary parts `[B, 1, n, rope]`. Return all latents and rotary parts
        that the layer reads, `[B, 1, keys, rank]` and `[B, 1, keys, rope]`, with the new tokens last."""
        pool, batch, slots = self._latent_pool, self._batch, self._slots
        pool.set_mla_kv_buffer(self._layer_id, batch.new_slots, token_rows(key_states), token_rows(value_states))
        if not batch.past_len and pool.dtype == key_states.dtype:
            return key_states, value_states
        latent, rope = pool.get_mla_kv_buffer(self._layer_id, slots.flatten(), key_states.dtype)
        return latent.view(len(slots), 1, -1, latent.shape[-1]), rope.view(len(slots), 1, -1, rope.shape[-1])


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]  # transformers is untyped here
    """A recurrent layer in one forward pass. The model calls its methods on the scheduler thread.

    `source`: returns a copy of the state after all tokens before the pass, with one convolution window; each tensor is
    `[B, ...]`. It is called once, when the model reaches the layer. `source` is None if all sequences start with this
    pass.
    """

    def __init__(self, source: Callable[[], MambaState] | None) -> None:
        super().__init__()
        self._source = source
        self.has_previous_state[0] = source is not None

    @property
    def state(self) -> MambaState | None:
        """Return the state after the pass; None if the model stored no convolution window. A layer that consists only
        of a convolution has a temporal state of one zero."""
        conv, temporal = self.conv_states[0], self.recurrent_states[0]
        if conv is None:
            return None
        return MambaState([conv], conv.new_zeros(len(conv), 1) if temporal is None else temporal)

    def fetch(self) -> None:
        """Call `source` unless it was called before."""
        if self._source is None:
            return
        state, self._source = self._source(), None
        (conv,) = state.conv
        self.conv_states[0], self.recurrent_states[0] = conv, state.temporal
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = True
        self.conv_kernel_size[0] = conv.shape[-1]
        self.dtype = conv.dtype
        self.device = conv.device

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the inputs of the convolution, beginning with its inputs before the pass, as transformers does."""
        self.fetch()
        inputs: torch.Tensor = super().update_conv_state(conv_states, *args, **kwargs)
        return inputs

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.fetch()
        updated: torch.Tensor = super().update_recurrent_state(recurrent_states, *args, **kwargs)
        return updated


class HybridLayer(StateLayer, CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """A layer that has a recurrent state and, in `attention`, keys and values."""

    def __init__(self, source: Callable[[], MambaState] | None, attention: CacheLayerMixin) -> None:
        CacheLayerMixin.__init__(self)
        StateLayer.__init__(self, source)
        self.attention = attention
        self.is_sliding = False
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Delegate to `attention`."""
        updated: tuple[torch.Tensor, torch.Tensor] = self.attention.update(key_states, value_states, *args, **kwargs)
        return updated

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Delegate to `attention`."""
        sizes: tuple[int, int] = self.attention.get_mask_sizes(query_length)
        return sizes

    def get_seq_length(self) -> int:
        """Delegate to `attention`."""
        return int(self.attention.get_seq_length())

    def get_max_length(self) -> int:
        """Delegate to `attention`."""
        return int(self.attention.get_max_length())


class StateCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """A `Cache` whose recurrent layers are `StateLayer`s. A layer's state is copied when the model first reads it."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        self._fetch(layer_idx)
        state: torch.Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        self._fetch(layer_idx)
        state: torch.Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        return state

    def _fetch(self, layer_idx: int) -> None:
        layer = self.layers[layer_idx]
        if isinstance(layer, StateLayer):
            layer.fetch()


class PoolCache(StateCache):
    """The cache of one forward pass over the slots of `batch`: `model(..., **{cache_keyword(model): PoolCache(...)})`.

    On the CPU, or with HICACHE_DEBUG=1, raises InvariantError if the pass reads a window slot that was freed.
    """

    def __init__(self, pool: KVCache, geometry: ModelGeometry, batch: BatchSlots) -> None:
        self._geometry = geometry
        self._batch = batch
        swa_layers = frozenset[int]()
        swa_slots = None
        if isinstance(pool, SWAKVPool):
            # The pool may keep all tokens of a window layer; such a layer is read by the slots of full attention.
            swa_layers = frozenset(layer_id for layer_id, (_, swa) in pool.layers_mapping.items() if swa)
            swa_slots = _window_slots(pool, batch.window) if batch.window is not None else None
        layers: list[PoolLayer | StateLayer | DummyLayer] = []
        for layer_id, kind in enumerate(geometry.kinds):
            if kind == "stateless":
                layers.append(DummyLayer())
                continue
            if kind == "recurrent":
                layers.append(self._state_layer(layer_id))
                continue
            keys = batch.window if kind == "window" else batch.full
            assert keys is not None, f"a pass without keys for {kind} layers"
            if geometry.latent is not None:
                assert isinstance(pool, MLATokenToKVPool | HybridLinearKVPool), "a pool without latent rows"
                layers.append(LatentLayer(pool, layer_id, batch, keys.slots))
                continue
            # The layer whose KV this layer reads. If it is another layer, this layer stores no KV.
            source = geometry.sources[layer_id]
            slots = swa_slots if swa_slots is not None and source in swa_layers else keys.slots
            layer = PoolLayer(pool, source, batch, slots, is_sliding=kind == "window")
            layers.append(self._state_layer(layer_id, layer) if kind == "hybrid" else layer)
        super().__init__(layers=layers)

    def store_states(self) -> None:
        """Write the new states of the recurrent layers to the state slots. The runner calls this method after the
        pass."""
        if self._batch.states is not None:
            store_states(self, self._geometry, self._batch.states)

    def _state_layer(self, layer_id: int, attention: PoolLayer | None = None) -> StateLayer:
        states, shapes = self._batch.states, self._geometry.state
        assert states is not None and shapes is not None, "a pass without states for recurrent layers"
        return new_state_layer(states, layer_id, shapes, not self._batch.past_len, attention)


def new_state_layer(
    states: BatchStates,
    layer_id: int,
    shapes: StateGeometry,
    is_start: bool,
    attention: CacheLayerMixin | None = None,
) -> StateLayer:
    """Create the recurrent layer of a cache for one forward pass; its states are in `states`. With `attention`, the
    layer is hybrid. `is_start`: whether all sequences start with this pass."""
    source = None if is_start else lambda: _copy_states(states, layer_id, shapes)
    return StateLayer(source) if attention is None else HybridLayer(source, attention)


def store_states(cache: StateCache, geometry: ModelGeometry, states: BatchStates) -> None:
    """Write the new states of the recurrent layers of `cache` to the state slots."""
    for layer_id in geometry.recurrent_layers:
        new = cache.layers[layer_id].state
        assert new is not None, f"the model left no state in layer {layer_id}"
        stored = states.table.mamba2_layer_cache(layer_id)
        for buffer, value in zip((*stored.conv, stored.temporal), (*new.conv, new.temporal), strict=True):
            buffer[states.slots] = value.to(buffer.dtype)


def _copy_states(states: BatchStates, layer_id: int, geometry: StateGeometry) -> MambaState:
    """Return copies of one layer's states in the model's dtypes; zeros for sequences that start with this pass."""
    stored = states.table.mamba2_layer_cache(layer_id)
    copies = [x.index_select(0, states.slots).to(geometry.conv_dtype) for x in stored.conv]
    copies.append(stored.temporal.index_select(0, states.slots).to(geometry.temporal_dtype))
    if states.starting is not None:
        for copy in copies:
            copy[states.starting] = 0
    return MambaState(copies[:-1], copies[-1])


def _window_slots(pool: SWAKVPool, keys: KeySlots) -> torch.Tensor:
    """Return the window slots of the full slots in `keys`, int64 [B, keys]."""
    slots = pool.translate_loc_from_full_to_swa(keys.slots)
    if pool.device.type == "cpu" or debug_checks():
        freed = (slots == 0) & (keys.slots != 0)
        if freed.any():
            raise InvariantError(
                "PoolCache",
                [f"the window slots of full slots {keys.slots[freed][:8].tolist()} were freed and are read"],
            )
    return slots


def token_rows(states: torch.Tensor) -> torch.Tensor:
    """Reshape [B, heads, n, dim] to [B * n, heads, dim]. The result is a view if B or n is 1."""
    return states.transpose(1, 2).reshape(-1, states.shape[1], states.shape[3])


def _gather(buffer: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gather rows of [slots, heads, dim] at `slots` [B, keys]. Returns [B, heads, keys, dim] in `dtype`."""
    rows = buffer.index_select(0, slots.flatten()).unflatten(0, slots.shape)
    gathered: torch.Tensor = rows.transpose(1, 2).to(dtype)
    return gathered
