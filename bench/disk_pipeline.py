"""Documents from disk to device through an engine, as a share of the rate of the slowest leg.

    disk leg    prefetch every document, until the host has all of them
    link leg    load every document from the host
    pipeline    both: a document is admitted and loaded when the host has it, while others are still read

Each round begins with a new engine over the same store and empty caches, in the engine and in the kernel. Legs and
pipeline alternate in order, because the bandwidth of a disk may drift. One layer of each loaded document is compared
with the computed one, outside the timing. A helper of the disk bench.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch

from hicache import CacheEngine, CacheRequest, EngineConfig, Lease, ModelGeometry, build_engine
from hicache.bench.common import Report, gb_per_s, percentile
from hicache.bench.raw_io import drop_caches
from hicache.config import AdvancedConfig, DiskConfig

TARGET = 0.95
DOCUMENTS = 16  # the load of the last one overlaps no read
GEOMETRY = ModelGeometry(layer_num=32, head_num=8, head_dim=128)
PAGE = 64
Kind: TypeAlias = Literal["legs", "pipeline"]
_ROUNDS_PER_SAMPLE = 2  # the bandwidth of a virtual disk varies by a tenth from round to round


def measure_pipeline(report: Report, folder: Path, device: torch.device, tokens: int, samples: int) -> None:
    """Measure `pipeline` over the slower of the two legs, in turns. `tokens` of a document: a multiple of the page."""
    documents = DOCUMENTS
    prompts = [np.random.default_rng(10 + d).integers(1, 1 << 20, tokens + 1) for d in range(documents)]
    config = EngineConfig(
        device_tokens=documents * (tokens + 2 * PAGE),
        host_bytes=(documents * tokens + 2 * PAGE) * 2 * GEOMETRY.layer_num * GEOMETRY.head_num * 128 * 2,
        page_size=PAGE,
        host_page_size=PAGE,
        max_context_len=tokens + 2 * PAGE,
        device=str(device),
        model_id="bench",
        kv_packing="off",
        prefetch_mode="wait_complete",
        prefetch_host_share=1.0,
        disk=DiskConfig(path=str(folder / "pipeline"), budget_bytes=max(256 << 20, documents * tokens * (160 << 10))),
        advanced=AdvancedConfig(disk_reader_threads=8),
    )
    truth = _fill(config, prompts)
    num_bytes = documents * tokens * 2 * GEOMETRY.layer_num * GEOMETRY.head_num * 128 * 2
    seconds: dict[str, list[float]] = {"disk": [], "link": [], "pipeline": []}
    for turn in range(-1, _ROUNDS_PER_SAMPLE * samples):
        order: tuple[Kind, ...] = ("legs", "pipeline")
        for kind in order if turn % 2 else reversed(order):
            for name, found in _round(config, prompts, truth, kind).items():
                if turn >= 0:
                    seconds[name].append(found)
    legs = {name: percentile(gb_per_s(num_bytes, seconds[name]), 50) for name in ("disk", "link")}
    note = f"{documents} documents of {tokens} tokens; legs: " + ", ".join(f"{n} {v:.2f} GB/s" for n, v in legs.items())
    report.rate("pipeline", num_bytes, seconds["pipeline"], ceiling=min(legs.values()), target=TARGET, note=note)


@contextmanager
def _engine(config: EngineConfig) -> Iterator[CacheEngine]:
    gc.collect()  # frees a closed engine, which is in reference cycles: memory may not suffice for two engines
    with build_engine(config, GEOMETRY) as engine:
        yield engine


def _fill(config: EngineConfig, prompts: list[np.ndarray]) -> list[torch.Tensor]:
    """Store every document; returns the keys of its last layer."""
    truth = []
    with _engine(config) as engine:
        for d, prompt in enumerate(prompts):
            with engine.acquire(CacheRequest(f"fill{d}", prompt)) as lease:
                for layer in range(GEOMETRY.layer_num):
                    shape = (len(prompt), GEOMETRY.head_num, GEOMETRY.head_dim)
                    k, v = (torch.randn(shape, device=engine.pool.device).bfloat16() for _ in range(2))
                    engine.pool.set_kv_buffer(layer, lease.slots, k, v)
                truth.append(k[: len(prompt) - 1].cpu())
                engine.commit(lease, prompt)
            engine.flush()
    return truth


def _round(config: EngineConfig, prompts: list[np.ndarray], truth: list[torch.Tensor], kind: Kind) -> dict[str, float]:
    """Measure seconds of both legs, in sequence, or of the pipeline."""
    assert config.disk is not None
    found: dict[str, float] = {}
    drop_caches(Path(config.disk.path))
    with _engine(config) as engine:
        _touch(engine)
        start = time.perf_counter()
        waiting = {d: engine.prefetch(f"r{d}", prompt) for d, prompt in enumerate(prompts)}
        leases = []
        if kind == "legs":
            while not all(handle.ready for handle in waiting.values()):
                engine.poll()
                time.sleep(0.0002)
            found["disk"] = time.perf_counter() - start
            start = time.perf_counter()
        while waiting:
            engine.poll()
            ready = [d for d, handle in waiting.items() if handle.ready and engine.counter.can_begin()]
            if not ready:
                time.sleep(0.0002)
                continue
            del waiting[ready[0]]
            leases.append((ready[0], engine.acquire(CacheRequest(f"r{ready[0]}", prompts[ready[0]]))))
        engine.begin_forward([lease for _, lease in leases])
        engine.counter.wait_all()
        if engine.pool.device.type == "cuda":
            torch.cuda.synchronize()
        found["link" if kind == "legs" else "pipeline"] = time.perf_counter() - start
        _compare(engine, leases, truth)
    return found


def _touch(engine: CacheEngine) -> None:
    """Touch all memory of host and device before the clock starts, as pinning would."""
    host = engine.inspect.context.full.host
    assert host is not None
    host.bytes_of.zero_()
    for layer in range(GEOMETRY.layer_num):
        for buffer in engine.pool.layer_buffers(layer):
            buffer.zero_()


def _compare(engine: CacheEngine, leases: list[tuple[int, Lease]], truth: list[torch.Tensor]) -> None:
    """Raise AssertionError unless every document was read completely from the disk and its last layer is as stored."""
    for d, lease in leases:
        if lease.hit.disk != len(truth[d]):
            raise AssertionError(f"document {d}: {lease.hit} of {len(truth[d])} tokens")
        keys = engine.pool.get_key_buffer(GEOMETRY.layer_num - 1)[lease.slots_of(0, len(truth[d]))]
        if not torch.equal(keys.cpu(), truth[d]):
            raise AssertionError(f"document {d} is not what was stored")
        engine.release(lease)
