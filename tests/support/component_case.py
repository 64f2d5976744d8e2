"""The toy model with windows or recurrent layers, whose true KV and states are functions of the prefix alone.

`compute` first reads the rows and the state that a forward pass would read, and compares them with the true values:
full rows of the complete prefix, window rows of the last window, and the state after exactly the tokens before the
pass.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hicache import CacheEngine, CacheRequest, EngineConfig, HybridReqToTokenPool, Lease, ModelGeometry, SWAKVPool
from hicache.layout import LatentGeometry, StateGeometry
from toy_model import config as plain_config
from toy_model import prefix_hashes, values_of

WINDOW = 12
FULL = ModelGeometry(3, 2, 4)
WINDOWS = ModelGeometry(3, 2, 4, layer_kinds=("full", "window", "window"), window=WINDOW)
STATE = StateGeometry(((5, 3),), (2, 3, 4), torch.float32, torch.float32)
STATES = ModelGeometry(4, 2, 4, layer_kinds=("recurrent", "full", "recurrent", "full"), state=STATE)
LATENT = ModelGeometry(3, 1, 16, latent=LatentGeometry(12, 4))
MODELS = {"full": FULL, "window": WINDOWS, "hybrid": STATES}
EACH_MODEL = [pytest.param(model, id=kind) for kind, model in MODELS.items()]
WITH_COMPONENTS = EACH_MODEL[1:]
# The same models with rows of 16 channels in bfloat16. All rows have the same number of bytes, and the settings allow
# packing.
WIDER = {kind: replace(model, head_dim=8) for kind, model in MODELS.items()}
PACKABLE = {"dtype": "bfloat16", "host_page_size": 16}
POLICIES = ("write_through", "write_back", "exclusive")


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


def state(layer: int, tokens: np.ndarray, namespace: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Conv window and temporal state after `tokens`; the window and the state are zero before the first token."""
    if not len(tokens):
        return torch.zeros(STATE.conv[0]), torch.zeros(STATE.temporal)
    last = prefix_hashes(tokens, namespace)[-1:]
    return values_of(last, 100 + layer, STATE.conv[0])[0], values_of(last, 200 + layer, STATE.temporal)[0]


def attention_of(hashes: np.ndarray, layer: int, geometry: ModelGeometry, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values of a layer at positions of these hashes: [len, 2, heads, dim], or [len, 1, 1, dim] for latent
    rows. In bfloat16 one position in twenty has numbers of any size; a page with two such positions does not fit when
    it is packed."""
    shape = (1 if geometry.latent else 2, geometry.head_num, geometry.head_dim)
    values = values_of(hashes, layer, shape)
    if dtype == torch.bfloat16:
        random_bits = torch.from_numpy((hashes >> np.uint64(7)) % np.uint64(20) == 0)
        odd = np.arange(1, math.prod(shape) + 1, dtype=np.uint64)
        exponents = torch.from_numpy(((hashes[:, None] * odd) >> np.uint64(40)) % 90)
        shrunk = torch.ldexp(values, -exponents.view(values.shape).to(torch.int32))
        values = torch.where(random_bits[:, None, None, None], shrunk, values)
    return values.to(dtype)


def verify(engine: CacheEngine, lease: Lease, tokens: np.ndarray, length: int, geometry: ModelGeometry) -> None:
    """Assert that a pass that starts at `length` would read the true rows and states."""
    engine.begin_forward([lease])
    pool, device = engine.pool, engine.pool.device
    hashes = prefix_hashes(tokens[:length], lease.namespace)
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
        keys, values = pool.get_kv_buffer(layer)  # waits for the layer, and raises if its load failed
        slots = lease.slots_of(start, length).to(device)
        if isinstance(pool, SWAKVPool) and pool.layers_mapping[layer][1]:
            slots = pool.translate_loc_from_full_to_swa(slots)
            assert bool((slots > 0).all()), "a window slot that is needed is gone"
        truth = attention_of(hashes[start:], layer, geometry, pool.dtype)
        held = [keys[slots]] if geometry.latent else [keys[slots], values[slots]]
        assert torch.equal(torch.stack(held, 1).cpu(), truth)


def compute(
    engine: CacheEngine, lease: Lease, tokens: np.ndarray, start: int, end: int, geometry: ModelGeometry
) -> None:
    """Run a forward pass over [start, end): read and compare the prefix, then store the new rows."""
    verify(engine, lease, tokens, start, geometry)
    pool, hashes = engine.pool, prefix_hashes(tokens[:end], lease.namespace)[start:]
    for layer, kind in enumerate(geometry.kinds):
        if kind == "recurrent":
            assert isinstance(engine.req_to_token, HybridReqToTokenPool)
            index = engine.req_to_token.get_mamba_indices(lease.row)
            held = engine.req_to_token.mamba2_layer_cache(layer)
            conv, temporal = state(layer, tokens[:end], lease.namespace)
            held.conv[0][index], held.temporal[index] = conv.to(pool.device), temporal.to(pool.device)
            continue
        truth = attention_of(hashes, layer, geometry, pool.dtype).to(pool.device)
        pool.set_kv_buffer(layer, lease.slots_of(start, end), truth[:, 0], truth[:, -1])


def prefill(
    engine: CacheEngine,
    lease: Lease,
    tokens: np.ndarray,
    geometry: ModelGeometry,
    end: int | None = None,
    chunk: int = 1 << 30,
) -> None:
    """Compute and commit the tokens up to `end` that are not cached, in chunks that end where `next_stop` says."""
    start, end = lease.cached_len, len(tokens) if end is None else end
    while start < end:
        stop = engine.next_stop(lease, start, min(end, start + chunk))
        if stop > lease.length:
            engine.flush()  # the copy of a backup locks its source until it ends
            engine.extend(lease, stop - lease.length)
        compute(engine, lease, tokens, start, stop, geometry)
        engine.commit(lease, tokens[:stop])
        start = stop


def serve(engine: CacheEngine, name: str, tokens: np.ndarray, geometry: ModelGeometry, chunk: int = 1 << 30) -> Lease:
    """Serve one complete request, and wait for the end of everything that it began."""
    with engine.acquire(CacheRequest(name, tokens, reserve_tokens=chunk)) as lease:
        prefill(engine, lease, tokens, geometry, chunk=chunk)
    engine.flush()
    engine.check()
    return lease
