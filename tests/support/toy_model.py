"""A model whose KV is a known function of the complete prefix, so that any wrong reuse shows in the values.

The KV of a position is a hash of the namespace and all tokens up to the position. If a request reads bytes of another
request, a stale slot or a page at the wrong position, these values match no expected ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hicache import AdvancedConfig, CacheEngine, CacheRequest, EngineConfig, Lease, ModelGeometry, Prefetch
from hicache.errors import NotStored
from waiting import eventually

GEOMETRY = ModelGeometry(layer_num=3, head_num=2, head_dim=4)
_ODD, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


def config(**changes: object) -> EngineConfig:
    """A tiny engine: 4-token device pages, 8-token host pages, 192 bytes of KV a token."""
    values: dict[str, object] = {
        "device_tokens": 128,
        "host_bytes": 40 * 8 * 192,
        "page_size": 4,
        "host_page_size": 8,
        "max_requests": 6,
        "max_context_len": 256,
        "dtype": "float32",
        "model_id": "toy",
        "eviction_policy": "lru",  # the order of uses alone decides which page is evicted
        "advanced": AdvancedConfig(transfer_chunk_tokens=16),
    }
    return EngineConfig(**{**values, **changes})  # type: ignore[arg-type]


def prompt(seed: int, length: int = 60) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, length)


def prefix_hashes(tokens: np.ndarray, namespace: str = "") -> np.ndarray:
    """A number for each position: uint64 [len]. The number depends on all tokens up to its position."""
    powers = np.cumprod(np.full(len(tokens), _ODD))
    space = int.from_bytes(hashlib.sha256(namespace.encode()).digest()[:8], "little")
    return _mixed(np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers) ^ np.uint64(space) ^ powers)


def values_of(hashes: np.ndarray, what: int, shape: Sequence[int]) -> torch.Tensor:
    """A model's values of kind `what` at positions with these hashes: float32 [len, *shape]."""
    elements = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64((what + 1) << 32)
    bits = _mixed(hashes[:, None] ^ _mixed(elements))
    return torch.from_numpy((bits >> np.uint64(40)).astype(np.float32)).view(len(hashes), *shape)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    mixed = (numbers ^ (numbers >> np.uint64(30))) * _MIX
    return mixed ^ (mixed >> np.uint64(29))


def expected_kv(tokens: np.ndarray, namespace: str = "") -> torch.Tensor:
    """The true KV of every position: float32 [len, layers, 2, heads, dim]."""
    shape = (GEOMETRY.layer_num, 2, GEOMETRY.head_num, GEOMETRY.head_dim)
    return values_of(prefix_hashes(tokens, namespace), 0, shape)


def compute(engine: CacheEngine, lease: Lease, tokens: np.ndarray, start: int, end: int) -> None:
    """Run a forward pass: wait for loads as a model would, then store the KV of positions [start, end)."""
    truth = expected_kv(tokens[:end], lease.namespace)[start:end].to(engine.pool.device)
    engine.begin_forward([lease])
    for layer in range(GEOMETRY.layer_num):
        engine.pool.get_kv_buffer(layer)
        engine.pool.set_kv_buffer(layer, lease.slots_of(start, end), truth[:, layer, 0], truth[:, layer, 1])


def read(engine: CacheEngine, lease: Lease, length: int) -> torch.Tensor:
    """The KV of positions [0, length) as attention would read it: float32 [length, layers, 2, heads, dim], on the
    CPU."""
    engine.begin_forward([lease])
    slots = lease.slots_of(0, length)
    layers = [torch.stack([b[slots] for b in engine.pool.get_kv_buffer(i)], 1) for i in range(GEOMETRY.layer_num)]
    return torch.stack(layers, 1).cpu()


def serve(engine: CacheEngine, request_id: str, tokens: np.ndarray, namespace: str = "", **hints: Any) -> Lease:
    """Serve one complete request: admit it, compare the reused KV, compute the other tokens, commit and release."""
    with engine.acquire(CacheRequest(request_id, tokens, namespace, **hints)) as lease:
        truth = expected_kv(tokens[: lease.cached_len], namespace)
        assert torch.equal(read(engine, lease, lease.cached_len), truth)
        compute(engine, lease, tokens, lease.cached_len, len(tokens))
        engine.commit(lease, tokens)
    return lease


def until_ready(engine: CacheEngine, *handles: Prefetch) -> None:
    """Poll until these prefetches are ready. Check all accounts after each poll."""

    def ready() -> bool:
        engine.poll()
        engine.check()
        return all(handle.ready for handle in handles)

    eventually(ready, engine.stats)


def flush_error(engine: CacheEngine) -> NotStored | None:
    """Flush the engine. Returns the error if a store refuses pages, else None."""
    try:
        engine.flush()
    except NotStored as error:
        return error
    return None


def settled(engine: CacheEngine) -> None:
    """Wait for everything in flight. Check that every account holds, and that no request holds anything."""
    engine.flush()
    engine.check()
    stats = engine.stats()
    assert stats["device.protected_tokens"] == stats["engine.leases"] == 0
