"""The engine over pools of other families: the same movements, with no knowledge of what a row means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hicache import (
    AscendTokenToKVPool,
    CacheEngine,
    CacheRequest,
    DiskConfig,
    DoubleSparseTokenToKVPool,
    EngineConfig,
    KVCache,
    Lease,
    MLATokenToKVPool,
    NSATokenToKVPool,
    QuantizedKVCache,
    SWAKVPool,
    build_engine,
)
from hicache.errors import ConfigError

SIZE, PAGE = 1024, 16
BASE = {"size": SIZE, "page_size": PAGE, "dtype": torch.bfloat16, "layer_num": 2, "enable_memory_saver": False}

POOLS: dict[str, Callable[..., KVCache]] = {
    "mla": lambda device: MLATokenToKVPool(**BASE, device=device, kv_lora_rank=32, qk_rope_head_dim=8),
    "nsa": lambda device: NSATokenToKVPool(
        **{**BASE, "page_size": 64}, device=device, kv_lora_rank=32, qk_rope_head_dim=8, kv_cache_dim=None
    ),
    "double_sparse": lambda device: DoubleSparseTokenToKVPool(
        **BASE, device=device, head_num=2, head_dim=16, heavy_channel_num=4
    ),
    "ascend": lambda device: AscendTokenToKVPool(**BASE, device=device, head_num=2, head_dim=16),
    "int8": lambda device: QuantizedKVCache(**BASE, device=device, head_num=2, head_dim=16, kv_dtype="int8"),
    "fp8": lambda device: QuantizedKVCache(**BASE, device=device, head_num=2, head_dim=16, kv_dtype="fp8"),
}


def rows(pool: KVCache, slots: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every buffer as bytes, and the ids of its rows that `slots`, whole pages, stand for."""
    found = []
    for layer in pool.layout.layers:
        specs = pool.layout.specs_of(layer)
        for spec, buffer in zip(specs, pool.layer_buffers(layer), strict=True):
            ids = slots if spec.per == "token" else (slots // pool.page_size).unique_consecutive()
            found.append((buffer, ids))
    return found


def fill(pool: KVCache, lease: Lease, seed: int) -> list[torch.Tensor]:
    """Random rows for all whole pages of the lease; returns them."""
    generator = torch.Generator().manual_seed(seed)
    whole = lease.length // 64 * 64
    kept = []
    for buffer, ids in rows(pool, lease.slots_of(0, whole)):
        shape = buffer[ids].shape
        fresh = torch.randint(-100, 100, shape, generator=generator).to(buffer.device, buffer.dtype)
        buffer[ids] = fresh
        kept.append(fresh.cpu())
    return kept


def serve(engine: CacheEngine, name: str, tokens: np.ndarray, seed: int) -> list[torch.Tensor]:
    with engine.acquire(CacheRequest(name, tokens)) as lease:
        kept = fill(engine.pool, lease, seed)
        engine.commit(lease, tokens)
    engine.flush()
    engine.check()
    return kept


@pytest.mark.parametrize("kind", list(POOLS))
def test_rows_come_back_from_host_and_disk(device: str, kind: str, tmp_path: Path) -> None:
    """What was committed is read back bit for bit from the host, and by a second engine from disk."""
    pool = POOLS[kind](device)
    page_bytes = pool.layout.page_bytes(64)
    config = EngineConfig(
        device_tokens=SIZE,
        page_size=pool.page_size,
        host_bytes=41 * page_bytes,
        device=device,
        model_id=kind,
        prefetch_mode="wait_complete",
        disk=DiskConfig(path=str(tmp_path / "store"), budget_bytes=16 << 20),
    )
    tokens = [np.random.default_rng(n).integers(0, 100, 460) for n in range(4)]
    with build_engine(config, pool) as engine:
        kept = [serve(engine, f"r{n}", tokens[n], n) for n in range(4)]
        _compare(engine, tokens[0], kept[0], "host")
    with build_engine(config, POOLS[kind](device)) as engine:
        ticket = engine.prefetch("back", tokens[1])
        while not ticket.ready:
            engine.poll()
        _compare(engine, tokens[1], kept[1], "disk")


def _compare(engine: CacheEngine, tokens: np.ndarray, kept: list[torch.Tensor], tier: str) -> None:
    with engine.acquire(CacheRequest("back", tokens)) as lease:
        assert lease.cached_len == 448 and getattr(lease.hit, tier) > 0
        engine.counter.set_consumer(lease.load_ids)
        engine.counter.wait_all()
        for (buffer, ids), fresh in zip(rows(engine.pool, lease.slots_of(0, 448)), kept, strict=True):
            assert torch.equal(buffer[ids].cpu(), fresh[: len(ids)])
    engine.flush()
    engine.check()


def test_a_pool_that_does_not_fit_the_settings() -> None:
    """Each setting that disagrees with the pool is named, and pools of several slot spaces are refused."""
    pool = POOLS["mla"]("cpu")
    good = {"device_tokens": SIZE, "host_bytes": 0, "page_size": PAGE}
    for setting, value in (("device_tokens", 512), ("page_size", 8), ("dtype", "float16")):
        with pytest.raises(ConfigError, match=f"the pool has {setting}"):
            build_engine(EngineConfig(**{**good, setting: value}), pool)  # type: ignore[arg-type]
    swa = SWAKVPool(
        SIZE, 512, PAGE, torch.bfloat16, 2, 16, swa_attention_layer_ids=[0], full_attention_layer_ids=[1], device="cpu"
    )
    with pytest.raises(ConfigError):
        build_engine(EngineConfig(**good), swa)  # type: ignore[arg-type]
