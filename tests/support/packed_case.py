"""Engines with packed host pages, over pools of every shape that can be packed, and the contents of their rows. The
contents are numbers that depend only on the prompt; tests write them to the pools by slot.

    fit     normal numbers, which all fit
    some    as `fit`, but pages that begin with a token below 10 have random bits, which do not
    none    random bits
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch

from hicache import CacheEngine, CacheRequest, EngineConfig, Lease, ModelGeometry, SWAKVPool
from hicache.layout import LatentGeometry
from hicache.tiers import SWA
from toy_model import prefix_hashes

Kind = Literal["fit", "some", "none"]
PAGE, WINDOW = 16, 24
MODELS = {
    "mha": ModelGeometry(3, 4, 16),
    "gqa": ModelGeometry(4, 2, 24),
    "mqa": ModelGeometry(1, 1, 64),
    "mla": ModelGeometry(3, 1, 48, latent=LatentGeometry(32, 16)),
    "windows": ModelGeometry(3, 2, 16, layer_kinds=("full", "window", "window"), window=WINDOW),
    "wide rows": ModelGeometry(2, 2, 80),  # a row has more channels than a tile
}


def config(**changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "device_tokens": 256,
        "host_bytes": 1 << 19,
        "page_size": 4,
        "host_page_size": PAGE,
        "max_requests": 4,
        "max_context_len": 256,
        "window_tokens": 160,
        "dtype": "bfloat16",
        "kv_packing": "4",
        "model_id": "packed",
        "prefetch_mode": "wait_complete",
    }
    return EngineConfig(**{**values, **changes})  # type: ignore[arg-type]


def prompt(seed: int, num_pages: int = 6) -> np.ndarray:
    """A prompt of complete pages and one more token. In `some`, every second page does not fit."""
    tokens = np.random.default_rng(seed).integers(10, 50, num_pages * PAGE + 1)
    tokens[: -1 : 2 * PAGE] = seed % 10
    return tokens


def bits_of(tokens: np.ndarray, layer: int, buffer: int, channels: int, kind: Kind) -> torch.Tensor:
    """Contents of a buffer of a layer for each token: the bits of bfloat16, int16 `[tokens, channels]`."""
    rng = np.random.default_rng([int(prefix_hashes(tokens[:1])[0]), layer, buffer])
    hashes = torch.from_numpy((prefix_hashes(tokens) >> np.uint64(48)).astype(np.float32))[:, None]
    numbers = torch.frac(hashes * torch.from_numpy(rng.random(channels).astype(np.float32))) + 0.01
    mixed = prefix_hashes(tokens)[:, None] * rng.integers(1 << 62, size=channels, dtype=np.uint64)
    random_bits = torch.from_numpy((mixed >> np.uint64(48)).astype(np.uint16).view(np.int16))
    starts = np.arange(len(tokens)) // PAGE * PAGE
    is_random = kind == "none" or torch.from_numpy((tokens[starts] < 10) & (kind == "some"))[:, None]
    return torch.where(torch.as_tensor(is_random), random_bits, numbers.bfloat16().view(torch.int16))


def rows_of(
    engine: CacheEngine, lease: Lease, end: int, kind: Kind, window: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each buffer: its rows as int16, the positions of its tokens, and the expected contents. The positions are [0,
    end), or the last `window` of them in window layers."""
    tokens = np.asarray(lease.tokens.tokens)[:end]
    for space in engine.pool.slot_spaces:
        start = max(0, end - window) if space.name == SWA else 0
        slots = lease.slots_of(start, end).to(space.device)
        if isinstance(engine.pool, SWAKVPool) and space.name == SWA:
            slots = engine.pool.translate_loc_from_full_to_swa(slots)
        for layer in space.layout.layers:
            buffers = zip(space.layer_buffers(layer), space.layout.spans_of(layer), strict=True)
            for at, (buffer, span) in enumerate(buffers):
                rows = buffer.flatten(1).view(torch.uint8).view(torch.int16)
                truth = bits_of(tokens, layer, at, rows.shape[1], kind)[start:]
                yield rows, slots[::span] // span, truth[::span]


def serve(engine: CacheEngine, name: str, tokens: np.ndarray, kind: Kind) -> Lease:
    """Serve a request: wait for the disk, compare the reused rows with the true values, compute the other tokens, and
    wait for all copies."""
    handle = engine.prefetch(name, tokens)
    while not handle.ready:
        engine.poll()
    with engine.acquire(CacheRequest(name, tokens)) as lease:
        engine.begin_forward([lease])
        for component in engine.inspect.context.components:
            component.counter.wait_all()
        if lease.cached_len:
            for rows, slots, truth in rows_of(engine, lease, lease.cached_len, kind, WINDOW):
                assert torch.equal(rows[slots].cpu(), truth)
        for rows, slots, truth in rows_of(engine, lease, len(tokens), kind, len(tokens)):
            rows[slots] = truth.to(rows.device)
        engine.commit(lease, tokens)
    engine.flush()
    engine.check()
    return lease
