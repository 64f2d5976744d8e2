"""A toy model with windows or recurrent layers whose true KV and states are functions of the prefix alone.

`compute` first reads what a forward pass would read and compares it with the truth: full rows of the whole prefix,
window rows of the last window, and the state, which must have consumed exactly the tokens before the pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from hicache import CacheEngine, EngineConfig, HybridReqToTokenPool, Lease, ModelGeometry, SWAKVPool
from hicache.layout import StateGeometry
from toy_model import config as plain_config

WINDOW = 12
WINDOWS = ModelGeometry(3, 2, 4, layer_kinds=("full", "window", "window"), window=WINDOW)
STATE = StateGeometry(((5, 3),), (2, 3, 4), torch.float32, torch.float32)
STATES = ModelGeometry(4, 2, 4, layer_kinds=("recurrent", "full", "recurrent", "full"), state=STATE)


def config(**changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "host_bytes": 60 * 8 * 256,
        "mamba_chunk_tokens": 8,
        "mamba_track_interval": 16,
        "mamba_size": 16,
        "host_states": 12,
        "window_tokens": 96,
    }
    return plain_config(**{**values, **changes})


def _numbers(what: str, tokens: np.ndarray, namespace: str, shape: Sequence[int]) -> torch.Tensor:
    digest = hashlib.sha256(what.encode() + namespace.encode() + b"|" + tokens.astype("<i8").tobytes())
    rng = np.random.default_rng(int.from_bytes(digest.digest()[:8], "little"))
    return torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32))


def rows(layer: int, tokens: np.ndarray, namespace: str, start: int, end: int) -> torch.Tensor:
    """Keys and values of positions [start, end): float32 [n, 2, heads, dim]."""
    made = [_numbers(f"kv{layer}", tokens[: at + 1], namespace, (2, 2, 4)) for at in range(start, end)]
    return torch.stack(made) if made else torch.empty(0, 2, 2, 4)


def state(layer: int, tokens: np.ndarray, namespace: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Conv window and temporal state after `tokens`; zero before the first."""
    shapes = (STATE.conv[0], STATE.temporal)
    if not len(tokens):
        return torch.zeros(shapes[0]), torch.zeros(shapes[1])
    conv, temporal = (_numbers(f"{n}{layer}", tokens, namespace, shape) for n, shape in enumerate(shapes))
    return conv, temporal


def verify(engine: CacheEngine, lease: Lease, tokens: np.ndarray, length: int, geometry: ModelGeometry) -> None:
    """What a pass that starts at `length` would read is the truth."""
    engine.begin_forward([lease])
    pool, device = engine.pool, engine.pool.device
    for layer, kind in enumerate(geometry.kinds):
        if kind == "recurrent":
            assert isinstance(engine.req_to_token, HybridReqToTokenPool)
            index = engine.req_to_token.get_mamba_indices(lease.row)
            held = engine.req_to_token.mamba2_layer_cache(layer)
            conv, temporal = state(layer, tokens[:length], lease.namespace)
            assert torch.equal(held.conv[0][index].cpu(), conv), f"state of layer {layer} has not consumed {length}"
            assert torch.equal(held.temporal[index].cpu(), temporal)
            continue
        start = max(0, length - geometry.window) if kind == "window" else 0
        keys, values = pool.get_kv_buffer(layer)  # waits for the layer, and says so where its load failed
        slots = lease.slots_of(start, length).to(device)
        if isinstance(pool, SWAKVPool) and pool.layers_mapping[layer][1]:
            slots = pool.translate_loc_from_full_to_swa(slots)
            assert bool((slots > 0).all()), "a window slot that is needed is gone"
        truth = rows(layer, tokens, lease.namespace, start, length)
        assert torch.equal(torch.stack([keys[slots], values[slots]], 1).cpu(), truth)


def compute(
    engine: CacheEngine, lease: Lease, tokens: np.ndarray, start: int, end: int, geometry: ModelGeometry
) -> None:
    """A forward pass over [start, end): read and compare, then store."""
    verify(engine, lease, tokens, start, geometry)
    pool = engine.pool
    for layer, kind in enumerate(geometry.kinds):
        if kind == "recurrent":
            assert isinstance(engine.req_to_token, HybridReqToTokenPool)
            index = engine.req_to_token.get_mamba_indices(lease.row)
            held = engine.req_to_token.mamba2_layer_cache(layer)
            conv, temporal = state(layer, tokens[:end], lease.namespace)
            held.conv[0][index], held.temporal[index] = conv.to(pool.device), temporal.to(pool.device)
            continue
        truth = rows(layer, tokens, lease.namespace, start, end).to(pool.device)
        pool.set_kv_buffer(layer, lease.slots_of(start, end), truth[:, 0], truth[:, 1])
