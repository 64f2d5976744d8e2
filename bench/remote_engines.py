"""Engines in two processes over one remote store: what one computed, the other's prefetch brings to its host tier.

Beside it, in the same process and in turns, the store itself gets the pages of as many other prompts into registered
memory of the same size. Every page that a prefetch brought is compared with what the other process stored.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import torch

from hicache.bench.common import Report, interleave
from hicache.build.factory import build_engine
from hicache.config import EngineConfig, RemoteConfig
from hicache.engine import CacheEngine, CacheRequest
from hicache.host import ids_of
from hicache.layout import ModelGeometry
from hicache.storage import PageFormat, PageStore, open_store
from hicache.stores import identity_of
from hicache.tiers import FULL

TARGET = 0.85
# Pages of 64 tokens are 1 MiB.
GEOMETRY = ModelGeometry(layer_num=8, head_num=8, head_dim=64)
_PAGE_TOKENS = 64
PROMPT_PAGES = 256
NUM_PROMPTS = 12  # half of them through the engine, twice what its host tier holds


def measure_engines(report: Report, name: str, url: str, samples: int) -> None:
    """Prompts in turns through the engine and through the store: by one reader, the default, and by four, which take
    cores from one another, from the client and from the server."""
    num_pages, seeds = PROMPT_PAGES, list(range(NUM_PROMPTS))
    command = [sys.executable, "-m", "hicache.bench.remote_engines", json.dumps([url, num_pages, seeds])]
    subprocess.run(command, check=True, capture_output=True)
    for case, readers in ((f"{name}.engines", 1), (f"{name}.engines.readers", 4)):
        _measure(report, case, _config(url, num_pages, readers), seeds, samples)


def _measure(report: Report, case: str, config: EngineConfig, seeds: Sequence[int], samples: int) -> None:
    num_pages, remote = PROMPT_PAGES, config.remote
    assert remote is not None
    prompts = {seed: _prompt(seed, num_pages) for seed in seeds}
    with build_engine(config, GEOMETRY) as engine, closing(_Direct(engine, remote.url, num_pages)) as direct:
        turns, brought = itertools.cycle(seeds), list[int]()
        variants = {
            "engine": lambda: brought.append(_bring(engine, next(turns), prompts, num_pages)),
            "store": lambda: direct.get(prompts[next(turns)]),
        }
        seconds = interleave(variants, samples=samples)
        for seed in brought[-2:]:  # what the host still holds
            _compare(engine, seed, prompts[seed])
        engine.flush()
        engine.check()
        num_bytes = num_pages * engine.inspect.context.full.host.page_bytes
        readers = remote.reader_threads
        note = f"{readers} reader(s), {num_pages} pages of another process; the ceiling is the store's get"
        target = TARGET if readers == 1 else None
        report.rate(case, num_bytes, seconds["engine"], beside=seconds["store"], target=target, note=note)


class _Direct:
    """The store without an engine: pages into registered memory of its own, by the keys that the engine uses."""

    def __init__(self, engine: CacheEngine, url: str, num_pages: int) -> None:
        context = engine.inspect.context
        self._tree, page_bytes = context.tree, context.full.host.page_bytes
        identity = identity_of(context.config, {FULL: context.full.host.layout})
        self._store: PageStore = open_store(url, identity=identity, formats=[PageFormat(page_bytes)])
        memory = np.frombuffer(mmap.mmap(-1, num_pages * page_bytes), np.uint8)
        self._store.register_memory(memory)
        self._buffers = list(memory.reshape(-1, page_bytes))

    def get(self, prompt: np.ndarray) -> None:
        keys = self._tree.names.of_prompt(self._tree.match(prompt[:0]), prompt[:-1])
        if not all(self._store.get_into(keys, self._buffers[: len(keys)])):
            raise AssertionError("a page of the other process was not found")

    def close(self) -> None:
        self._store.close()


def _bring(engine: CacheEngine, seed: int, prompts: dict[int, np.ndarray], num_pages: int) -> int:
    """Prefetch one prompt until it is on the host; returns its seed."""
    handle = engine.prefetch(f"r{seed}", prompts[seed])
    while not handle.ended:
        engine.poll()
        time.sleep(0.001)  # a pass of a scheduler takes longer
    engine.cancel(f"r{seed}")
    if handle.landed_tokens != num_pages * _PAGE_TOKENS:
        raise AssertionError(f"{handle.landed_tokens} tokens of another process came")
    return seed


def _compare(engine: CacheEngine, seed: int, prompt: np.ndarray) -> None:
    """Every page of the prompt on the host holds what the other process stored."""
    tree, full = engine.inspect.context.tree, engine.inspect.context.full
    keys = tree.names.of_prompt(tree.match(prompt[:-1]), prompt[:-1])
    rows = np.stack(full.host.views(ids_of(full.index.parts(keys))))
    if not np.array_equal(rows, np.broadcast_to(_content(seed), rows.shape)):
        raise AssertionError("a page of the other process came back changed")


def _config(url: str, num_pages: int, readers: int = 0) -> EngineConfig:
    page_bytes = 2 * 2 * GEOMETRY.layer_num * GEOMETRY.head_num * GEOMETRY.head_dim * _PAGE_TOKENS
    return EngineConfig(
        device_tokens=(num_pages + 2) * _PAGE_TOKENS,
        host_bytes=(3 * num_pages + 2) * page_bytes,
        max_context_len=(num_pages + 2) * _PAGE_TOKENS,
        dtype="bfloat16",
        model_id="bench",
        kv_packing="off",
        eviction_policy="lru",
        prefetch_mode="wait_complete",
        remote=RemoteConfig(url=url, io_timeout_s=30.0, reader_threads=readers),
    )


def _prompt(seed: int, num_pages: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, num_pages * _PAGE_TOKENS + 1)


def _content(seed: int) -> np.uint8:
    return np.uint8(1 + seed % 255)


def fill(url: str, num_pages: int, seeds: Sequence[int]) -> None:
    """Compute every prompt, its KV a byte of its seed, and wait until the store has it."""
    config = _config(url, num_pages)
    remote = dataclasses.replace(config.remote or RemoteConfig(url=url), backup_share=1.0)
    with build_engine(dataclasses.replace(config, remote=remote), GEOMETRY) as engine:
        for seed in seeds:
            prompt = _prompt(seed, num_pages)
            with engine.acquire(CacheRequest(f"a{seed}", prompt)) as lease:
                value = torch.full((1,), int(_content(seed)) * 0x0101, dtype=torch.int32).to(torch.uint16)
                kv = value.view(torch.bfloat16).expand(len(prompt), GEOMETRY.head_num, GEOMETRY.head_dim).contiguous()
                for layer in range(GEOMETRY.layer_num):
                    engine.pool.set_kv_buffer(layer, lease.slots, kv, kv)
                engine.commit(lease, prompt)
            engine.flush()


if __name__ == "__main__":
    fill(*json.loads(sys.argv[1]))
