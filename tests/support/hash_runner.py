"""A stand-in for the model runner: KV and states are hashes of the whole prefix, and so are the logits.

Before a pass over a chunk it reads, by slot, everything that attention would read, and compares it with the truth: full
rows of the whole prefix, window rows of the last window, and the state, which must have consumed exactly the tokens
before the chunk. Chunks are computed one after the other, so when a load fails, some requests of the pass were computed
and some were not. `answer` says what a request alone, without any cache, would generate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from component_case import STATE
from hicache import CacheEngine, HybridReqToTokenPool, ModelGeometry, SWAKVPool
from hicache.serving import Chunk, Request
from hicache.serving.sampling import choose_tokens

VOCAB = 24
_PRIME = (1 << 61) - 1
_FACTORS = np.random.default_rng(7).integers(1 << 30, 1 << 62, 128, dtype=np.uint64) | np.uint64(1)
_ROW, _SHAPE = 16, (2, 2, 4)


def hashes(tokens: Sequence[int], namespace: str) -> np.ndarray:
    """One hash of every prefix, the empty one included: uint64 [len + 1]."""
    first = int.from_bytes(hashlib.sha256(namespace.encode()).digest()[:7], "little")
    return np.fromiter(
        accumulate(tokens, lambda value, token: (value * 1_000_003 + token + 1) % _PRIME, initial=first), np.uint64
    )


def _numbers(prefixes: np.ndarray, first: int, count: int) -> np.ndarray:
    """Exact float32 numbers [prefixes, count]; different `first`s give unrelated ones."""
    factors = np.roll(_FACTORS, -first * 7)[:count] * np.uint64(2 * first + 1)
    return ((prefixes[:, None] * factors) >> np.uint64(41)).astype(np.float32)


def _rows(layer: int, prefixes: np.ndarray) -> torch.Tensor:
    """Keys and values of the tokens that end `prefixes`: [n, 2, heads, dim]."""
    return torch.from_numpy(_numbers(prefixes, layer + 1, _ROW).reshape(-1, *_SHAPE))


def _state(layer: int, prefix: np.ndarray, is_empty: bool) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = int(np.prod(STATE.conv[0])), int(np.prod(STATE.temporal))
    numbers = _numbers(prefix, 40 + layer, sum(sizes))[0] * (not is_empty)
    conv, temporal = torch.from_numpy(numbers).split(sizes)
    return conv.reshape(STATE.conv[0]), temporal.reshape(STATE.temporal)


def _logits(prefix: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(_numbers(prefix, 20, VOCAB)[0] / 2**20)


def answer(request: Request) -> tuple[int, ...]:
    """The tokens that the request gets alone, without a cache."""
    tokens = request.tokens.tolist()
    while True:
        step = len(tokens) - len(request.tokens)
        logits = _logits(hashes(tokens, request.namespace)[-1:])
        tokens += choose_tokens(logits[None], [request.sampling_params], [step])
        if step + 1 == request.max_new_tokens or tokens[-1] in request.eos_ids:
            return tuple(tokens[len(request.tokens) :])


class HashRunner:
    """See the module."""

    def __init__(self, engine: CacheEngine, geometry: ModelGeometry) -> None:
        self._engine, self._geometry = engine, geometry

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        return torch.stack([self._compute(chunk) for chunk in chunks])

    def _compute(self, chunk: Chunk) -> torch.Tensor:
        self._engine.begin_forward([chunk.lease])
        prefixes = hashes(chunk.tokens[: chunk.end].tolist(), chunk.lease.namespace)
        kinds = self._geometry.kinds
        for layer, kind in enumerate(kinds):
            if kind != "recurrent":
                self._verify_rows(layer, kind == "window", chunk, prefixes)
        for layer, kind in enumerate(kinds):
            if kind == "recurrent":
                self._advance_state(layer, chunk, prefixes)
            else:
                rows = _rows(layer, prefixes[chunk.start + 1 :])
                slots = chunk.lease.slots_of(chunk.start, chunk.end)
                self._engine.pool.set_kv_buffer(layer, slots, rows[:, 0], rows[:, 1])
        return _logits(prefixes[-1:])

    def _verify_rows(self, layer: int, is_window: bool, chunk: Chunk, prefixes: np.ndarray) -> None:
        pool, end = self._engine.pool, chunk.start
        start = max(0, end - self._geometry.window) if is_window else 0
        keys, values = pool.get_kv_buffer(layer)  # waits for the layer, and says so where its load failed
        slots = chunk.lease.slots_of(start, end)
        if isinstance(pool, SWAKVPool) and pool.layers_mapping[layer][1]:
            slots = pool.translate_loc_from_full_to_swa(slots)
            assert bool((slots > 0).all()), "a window slot that is needed is gone"
        held, truth = torch.stack([keys[slots], values[slots]], 1), _rows(layer, prefixes[start + 1 : end + 1])
        assert torch.equal(held, truth), f"{chunk.lease.request_id}: layer {layer} reads other KV than its own"

    def _advance_state(self, layer: int, chunk: Chunk, prefixes: np.ndarray) -> None:
        table = self._engine.req_to_token
        assert isinstance(table, HybridReqToTokenPool)
        index, held = table.get_mamba_indices(chunk.lease.row), table.mamba2_layer_cache(layer)
        if chunk.start:
            conv, temporal = _state(layer, prefixes[chunk.start : chunk.start + 1], False)
            where = f"{chunk.lease.request_id}: state of layer {layer} has not consumed {chunk.start} tokens"
            assert torch.equal(held.conv[0][index], conv) and torch.equal(held.temporal[index], temporal), where
        held.conv[0][index], held.temporal[index] = _state(layer, prefixes[-1:], False)
