"""A model whose KV is a known function of the whole prefix, so that any wrong reuse shows in the values.

The KV of a position is drawn from a generator seeded with a digest of (namespace, all tokens up to it). A request that
is given another request's bytes, a stale slot or a page in the wrong place reads values that nothing else has.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from hicache import AdvancedConfig, CacheEngine, CacheRequest, EngineConfig, Lease, ModelGeometry

GEOMETRY = ModelGeometry(layer_num=3, head_num=2, head_dim=4)


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
        "eviction_policy": "lru",  # what is evicted follows from the order of uses alone
        "advanced": AdvancedConfig(transfer_chunk_tokens=16),
    }
    return EngineConfig(**{**values, **changes})  # type: ignore[arg-type]


def expected_kv(tokens: np.ndarray, namespace: str = "") -> torch.Tensor:
    """True KV of every position: float32 [len, layers, 2, heads, dim]."""
    digest, rows = hashlib.sha256(namespace.encode()), []
    shape = (GEOMETRY.layer_num, 2, GEOMETRY.head_num, GEOMETRY.head_dim)
    for token in tokens.tolist():
        digest.update(int(token).to_bytes(8, "little"))
        seed = int.from_bytes(digest.digest()[:8], "little")
        rows.append(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty((0, *shape))


def compute(engine: CacheEngine, lease: Lease, tokens: np.ndarray, start: int, end: int) -> None:
    """The forward pass: wait as a model would, then store the KV of positions [start, end)."""
    truth = expected_kv(tokens[:end], lease.namespace)[start:end].to(engine.pool.device)
    engine.begin_forward([lease])
    for layer in range(GEOMETRY.layer_num):
        engine.pool.get_kv_buffer(layer)
        engine.pool.set_kv_buffer(layer, lease.slots_of(start, end), truth[:, layer, 0], truth[:, layer, 1])


def read(engine: CacheEngine, lease: Lease, length: int) -> torch.Tensor:
    """KV of positions [0, length) as attention would see it: float32 [length, layers, 2, heads, dim], on the CPU."""
    engine.begin_forward([lease])
    slots = lease.slots_of(0, length)
    layers = [torch.stack([b[slots] for b in engine.pool.get_kv_buffer(i)], 1) for i in range(GEOMETRY.layer_num)]
    return torch.stack(layers, 1).cpu()


def serve(engine: CacheEngine, request_id: str, tokens: np.ndarray, namespace: str = "", extra: int = 0) -> Lease:
    """One whole request: admit, compare what was reused, compute the rest, decode `extra` tokens, commit, release."""
    with engine.acquire(CacheRequest(request_id, tokens, namespace)) as lease:
        truth = expected_kv(tokens, namespace)
        assert torch.equal(read(engine, lease, lease.cached_len), truth[: lease.cached_len])
        compute(engine, lease, tokens, lease.cached_len, len(tokens))
        engine.commit(lease, tokens)
        if extra:
            longer = np.concatenate([tokens, np.arange(extra) + 1000])
            engine.extend(lease, extra)
            compute(engine, lease, longer, len(tokens), len(longer))
            engine.commit(lease, longer)
    return lease
