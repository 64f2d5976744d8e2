"""A new attention family takes one file: the pool in this file works in all tiers without any other change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hicache import CacheEngine, CacheRequest, DiskConfig, EngineConfig, Lease, build_engine
from hicache.device import Row, RowPool
from hicache.device.base import HasLayerId
from hicache.kernels.store_kv import Scale, store_kv
from waiting import eventually

SIZE, PAGE, LAYERS = 512, 16, 2
KEY_HEADS, KEY_DIM, VALUE_HEADS, VALUE_DIM = 4, 8, 2, 12
PROMPT_LEN, CACHED_LEN = 200, 192  # three host pages of 64 tokens, and an incomplete page


class AsymmetricKVPool(RowPool):
    """Keys and values with different numbers of heads, and a float32 importance for each token."""

    def __init__(self, device: str) -> None:
        super().__init__(SIZE, PAGE, torch.bfloat16, LAYERS, device, enable_memory_saver=False)
        self._build(
            [
                Row("k", self.store_dtype, (KEY_HEADS, KEY_DIM)),
                Row("v", self.store_dtype, (VALUE_HEADS, VALUE_DIM)),
                Row("importance", torch.float32, (1,)),
            ]
        )

    def set_kv_buffer(
        self,
        layer: HasLayerId | int,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> None:
        """Store rows like the base class. The importance of a token is the largest magnitude of its keys."""
        self._check_loc(loc)
        k, v, k_scale, v_scale = self._storable_kv(cache_k, cache_v, loc.numel(), k_scale, v_scale)
        k_buffer, v_buffer, importance = self._stored[self._index(layer)]
        store_kv(k, v, k_buffer, v_buffer, loc, self._kernels, k_scale, v_scale)
        importance[loc] = cache_k.abs().amax((1, 2)).float()[:, None]

    def get_importance(self, layer_id: int) -> torch.Tensor:
        """Importance `[slots, 1]` of a layer, after waiting for that layer."""
        return self._stored[self._wait_for(layer_id)][2]


def config(pool: AsymmetricKVPool, path: Path) -> EngineConfig:
    return EngineConfig(
        device_tokens=SIZE,
        page_size=PAGE,
        host_bytes=20 * pool.layout.page_bytes(64),
        device=str(pool.device),
        model_id="asymmetric",
        prefetch_mode="wait_complete",
        disk=DiskConfig(path=str(path), budget_bytes=16 << 20),
    )


def prompt(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, PROMPT_LEN)


def keys_and_values(seed: int, layer: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that the model computes for a layer of a prompt."""
    generator = torch.Generator().manual_seed(100 * seed + layer)
    k = torch.randn(PROMPT_LEN, KEY_HEADS, KEY_DIM, generator=generator).bfloat16()
    v = torch.randn(PROMPT_LEN, VALUE_HEADS, VALUE_DIM, generator=generator).bfloat16()
    return k.to(device), v.to(device)


def serve(engine: CacheEngine, pool: AsymmetricKVPool, seed: int) -> None:
    with engine.acquire(CacheRequest(f"r{seed}", prompt(seed))) as lease:
        assert lease.cached_len == 0
        for layer in range(LAYERS):
            pool.set_kv_buffer(layer, lease.slots, *keys_and_values(seed, layer, pool.device))
        engine.commit(lease, prompt(seed))
    engine.flush()


def check_cached(engine: CacheEngine, pool: AsymmetricKVPool, lease: Lease, seed: int) -> None:
    """Check that the cached part of the prompt has the rows that `serve` stored, in every buffer of every layer."""
    assert lease.cached_len == CACHED_LEN
    engine.begin_forward([lease])
    slots = lease.slots_of(0, CACHED_LEN)
    for layer in range(LAYERS):
        k, v = (x[:CACHED_LEN] for x in keys_and_values(seed, layer, pool.device))
        keys, values = pool.get_kv_buffer(layer)
        assert torch.equal(keys[slots], k) and torch.equal(values[slots], v)
        assert torch.equal(pool.get_importance(layer)[slots, 0], k.abs().amax((1, 2)).float())


def test_its_rows_come_back_from_host_and_disk(device: str, tmp_path: Path) -> None:
    """Rows in a custom pool are restored from the host after their eviction from the device. A second engine restores
    them from disk."""
    pool = AsymmetricKVPool(device)
    token_bytes = (KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM) * 2 + 4
    assert pool.layout.page_bytes(64) == 64 * LAYERS * token_bytes
    with build_engine(config(pool, tmp_path), pool) as engine:
        for seed in range(4):  # the device holds two and a half of these prompts
            serve(engine, pool, seed)
        with engine.acquire(CacheRequest("again", prompt(0))) as lease:
            assert lease.hit.host == CACHED_LEN
            check_cached(engine, pool, lease, 0)
        engine.flush()
        engine.check()
    pool = AsymmetricKVPool(device)
    with build_engine(config(pool, tmp_path), pool) as engine:
        handle = engine.prefetch("again", prompt(1))
        eventually(lambda: engine.poll() or handle.ready)
        with engine.acquire(CacheRequest("again", prompt(1))) as lease:
            assert lease.hit.disk == CACHED_LEN
            check_cached(engine, pool, lease, 1)
        engine.flush()
        engine.check()
