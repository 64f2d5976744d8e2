"""Sizes that the configuration leaves open: how they are computed, and that the built pools have them."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

import hicache.build.factory
from hicache import CacheRequest, DiskConfig, EngineConfig, MLATokenToKVPool, ModelGeometry, build_engine
from hicache.build.sizing import (
    RowBytes,
    device_bytes,
    host_bytes,
    host_shares,
    host_states,
    mamba_size,
    resolve,
    row_bytes,
    window_tokens,
)
from hicache.errors import ConfigError, OutOfMemory
from hicache.layout import LatentGeometry, StateGeometry

GIB = 1 << 30
PLENTY = 1000 * GIB
STATE = StateGeometry(((5, 3),), (2, 3, 4), torch.float32, torch.bfloat16)
MODELS = {
    "full": ModelGeometry(3, 2, 4),
    "uneven": ModelGeometry(3, 2, 4, v_head_dim=6),
    "window": ModelGeometry(4, 2, 4, layer_kinds=("full", "window", "window", "full"), window=24),
    "windows alone": ModelGeometry(3, 2, 4, layer_kinds=("window",) * 3, window=24),
    "other windows": ModelGeometry(
        5,
        2,
        4,
        6,
        ("window", "full", "window", "full", "window"),
        window=24,
        swa_head_num=1,
        swa_head_dim=10,
        swa_v_head_dim=8,
        kv_sources=(0, 1, 2, 1, 2),
    ),
    "shared": ModelGeometry(3, 2, 4, v_head_dim=6, kv_sources=(0, 0, 2)),
    "uneven hybrid": ModelGeometry(4, 2, 4, v_head_dim=6, layer_kinds=("recurrent", "full") * 2, state=STATE),
    "states in attention layers": ModelGeometry(
        4, 2, 4, layer_kinds=("hybrid", "stateless", "recurrent", "full"), state=STATE
    ),
    "latent": ModelGeometry(3, 1, 20, latent=LatentGeometry(16, 4)),
    "latent hybrid": ModelGeometry(
        4, 1, 20, layer_kinds=("recurrent", "full") * 2, state=STATE, latent=LatentGeometry(16, 4)
    ),
    "hybrid": ModelGeometry(4, 2, 4, layer_kinds=("recurrent", "full", "recurrent", "full"), state=STATE),
}


def config(**changes: object) -> EngineConfig:
    """A device tier of 1024 tokens in pages of 4, with host pages of 16."""
    values: dict[str, object] = {"device_tokens": 1024, "page_size": 4, "host_page_size": 16, "max_context_len": 512}
    return EngineConfig(**{**values, "max_requests": 3, "dtype": "float32", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
def test_computed_sizes_are_those_of_built_pools(name: str) -> None:
    """The bytes of the device tier are those of the pools' buffers. A host tier of computed size has pages in each of
    its pools, and works. Resolving a resolved configuration again does not change its sizes."""
    model = MODELS[name]
    resolved = resolve(config(), model, PLENTY)
    rows = row_bytes(model, torch.float32)
    with build_engine(config(), model) as engine:
        spaces = engine.pool.slot_spaces
        built = sum(b.nbytes for s in spaces for layer in s.layout.layers for b in s.layer_buffers(layer))
        assert device_bytes(resolved, rows) == built
        page_bytes = {s.name: s.layout.page_bytes(1 if s.name == "mamba" else 16) for s in spaces}
        assert list(page_bytes.values()) == [n for n in (16 * rows.full, 16 * rows.window, rows.state) if n]
        shares = host_shares(resolved, page_bytes, resolved.host_states if rows.state else None)
        assert min(shares[name] // page_bytes[name] for name in page_bytes) >= 2
        assert sum(shares.values()) <= resolved.host_bytes == 2 * built  # type: ignore[operator]
        assert engine.stats()["host.free_pages"] == shares["full"] // page_bytes["full"] - 1
    assert resolve(resolved, model, PLENTY) == resolved


def test_the_dtype_is_that_of_the_model() -> None:
    """dtype=auto is the dtype of the model, or of a pool that is passed in, and bfloat16 if neither has one. A
    configured dtype stays."""
    model = dataclasses.replace(MODELS["full"], dtype=torch.float16)
    auto = config(dtype="auto")
    assert resolve(auto, model, PLENTY).torch_dtype is torch.float16
    assert resolve(auto, MODELS["full"], PLENTY).torch_dtype is torch.bfloat16
    assert resolve(config(dtype="float8_e5m2"), model, PLENTY).dtype == "float8_e5m2"
    pool = MLATokenToKVPool(
        size=1024, page_size=4, dtype=torch.float32, kv_lora_rank=8, qk_rope_head_dim=4, layer_num=2, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    assert resolve(auto, pool, PLENTY).torch_dtype is torch.float32
    with build_engine(auto, model) as engine:
        assert engine.pool.dtype is torch.float16
    with build_engine(auto, pool) as engine:
        assert engine.pool is pool
    with pytest.raises(ConfigError, match="dtype='float64'"):
        resolve(auto, dataclasses.replace(model, dtype=torch.float64), PLENTY)


@pytest.mark.parametrize(
    ("device", "device_gib", "available_gib", "expected_gib"),
    [
        ("cpu", 4, 1000, 8),  # twice the device tier
        ("cpu", 40, 1000, 80),
        ("cpu", 4, 11, 3),  # half of the memory without the reserve and the device tier, which is in the same memory
        ("cuda", 4, 11, 5),  # the device tier has its own memory
        ("cuda:1", 40, 1000, 32),  # the limit of pinned memory
        ("cuda", 4, 2, 0.5),  # an eighth of the device tier
        ("cuda", 4, 1.9, 0),  # less than an eighth of the device tier would be left
        ("cpu", 4, 5, 0),
        ("cuda", 4, 0, 0),
    ],
)
def test_the_host_tier_follows_device_and_memory(
    device: str, device_gib: float, available_gib: float, expected_gib: float
) -> None:
    """A host tier of computed size is twice the device tier, at most half of the free memory, and at most 32 GiB if it
    is pinned. Below an eighth of the device tier, there is no host tier."""
    found = host_bytes(config(device=device), int(device_gib * GIB), 1 << 20, int(available_gib * GIB))
    assert found == int(expected_gib * GIB)


def test_a_small_device_tier_gets_the_smallest_host_tier() -> None:
    """If twice the device tier is less than one page of each pool and their sinks, the host tier has exactly these."""
    assert host_bytes(config(), 1 << 10, 1 << 20, PLENTY) == 1 << 20
    assert host_bytes(config(), 1 << 10, GIB, 2 * GIB) == 0


def test_sizes_that_are_given_are_kept() -> None:
    """A given host_bytes, including 0, is kept, whatever memory there is. If host_bytes does not fit, the error names
    the setting that requested the host tier."""
    assert host_bytes(config(host_bytes=5 << 20), GIB, 1 << 20, PLENTY) == 5 << 20
    with pytest.raises(OutOfMemory, match="host_bytes"):
        host_bytes(config(host_bytes=5 << 30), GIB, 1 << 20, 4 * GIB)
    free = config(host_bytes="free")
    assert host_bytes(free, GIB, 1 << 20, 65 * GIB) == 56 * GIB  # the device tier is in the same memory
    assert host_bytes(dataclasses.replace(free, device="cuda"), GIB, 1 << 20, 64 * GIB) == 56 * GIB
    assert host_bytes(free, GIB, 1 << 20, 4 * GIB) == 2 * GIB
    with pytest.raises(OutOfMemory, match=r"host_bytes=free .* set host_bytes"):
        host_bytes(free, GIB, 1 << 20, 2 * GIB)
    none = resolve(config(host_bytes=0), MODELS["hybrid"], 0)
    assert none.host_bytes == 0 and none.host_states == 0 and none.cache_page_size == 4


def test_no_memory_is_no_host_tier(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If memory is short, an engine is built without a host tier, logs that once, and caches in device pages. An engine
    with a disk, which needs a host tier, is refused with an error that names host_bytes."""
    monkeypatch.setattr(hicache.build.factory, "available_bytes", lambda: GIB)
    tokens = np.arange(21)
    with caplog.at_level(logging.WARNING, "hicache"), build_engine(config(), MODELS["full"]) as engine:
        with engine.acquire(CacheRequest("a", tokens)) as lease:
            engine.commit(lease, tokens)
        assert engine.lookup(tokens).device == 20 and "host.free_pages" not in engine.stats()
    message = [record.getMessage() for record in caplog.records]
    assert len(message) == 1 and "there is no host tier" in message[0] and "host_bytes" in message[0]
    with pytest.raises(OutOfMemory, match=r"1\.0 GiB are available, .* set host_bytes to at least"):
        build_engine(config(model_id="m", disk=DiskConfig(path=str(tmp_path / "store"))), MODELS["full"])
    assert not (tmp_path / "store").exists()


def test_window_slots_follow_requests_and_chunk() -> None:
    """Window slots hold a window for each request, a prefill chunk, and cached windows of half the bytes of full KV.
    The number of window slots is at most device_tokens, and enough for two requests."""
    rows = RowBytes(full=10, window=50)
    big = config(device_tokens=1 << 20, prefill_chunk_tokens=100)
    # 24 tokens need 2 pages of 16, or 3 if they begin within a page; 100 tokens need 7.
    assert window_tokens(big, 24, rows) == 3 * 48 + 112 + (1 << 20) // 10 // 4 * 4
    assert window_tokens(dataclasses.replace(big, max_requests=4), 24, rows) - window_tokens(big, 24, rows) == 48
    chunk = dataclasses.replace(big, prefill_chunk_tokens=200)
    assert window_tokens(chunk, 24, rows) - window_tokens(big, 24, rows) == 96
    assert window_tokens(config(), 24, rows) == window_tokens(config(), 4000, rows) == 1024
    one = config(max_requests=1, prefill_chunk_tokens=1, device_tokens=1024)
    assert window_tokens(one, 200, RowBytes(full=1, window=1000)) == 2 * (200 + 16)
    assert window_tokens(config(device_tokens=1030, prefill_chunk_tokens=5000), 24, rows) == 1028
    assert window_tokens(config(window_tokens=83), 24, rows) == 80
    with pytest.raises(ConfigError, match="window_tokens"):
        window_tokens(config(window_tokens=79), 24, rows)


def test_states_follow_requests_and_kv() -> None:
    """There are two states for each request, and cached states of at most half the bytes of KV, at most one a page, and
    at least two."""
    assert mamba_size(config(), RowBytes(full=10, state=100)) == 2 * 3 + 1024 * 10 // 2 // 100
    assert mamba_size(config(max_requests=5), RowBytes(full=10, state=100)) == 2 * 5 + 51
    assert mamba_size(config(), RowBytes(full=10, state=1)) == 2 * 3 + 1024 // 16
    assert mamba_size(config(), RowBytes(full=10, state=1 << 20)) == 2 * 3 + 2
    assert mamba_size(config(mamba_size=7), RowBytes(full=10, state=100)) == 7


def test_states_on_the_host_follow_its_pages() -> None:
    """States are a third of the host tier, which is half as much as its pages. There is at most one state a page, and
    at least one state."""
    assert host_states(config(), 9000, 160, 100) == 9000 // 3 // 100 - 1
    assert host_states(config(), 9000, 160, 10) == 9000 // 170 - 1
    assert host_states(config(), 9000, 160, 5000) == 1
    assert host_states(config(host_states=4), 9000, 160, 100) == 4
    shares = host_shares(config(host_bytes=9000), {"full": 160, "mamba": 100}, 4)
    assert shares == {"full": 53 * 160, "mamba": 500}
    windows = {"full": 160, "swa": 320}
    assert host_shares(config(host_bytes=9000), windows, None) == {"full": 18 * 160, "swa": 18 * 320}
