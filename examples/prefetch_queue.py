"""Prefetching for a queue: while the first request of the queue computes, the prefixes of the next requests are read
from disk.

    python examples/prefetch_queue.py

The first engine fills a store and ends. The second engine serves the same prompts, and reads the prefixes of waiting
requests in advance. So the pages of these requests are in host memory when the scheduler admits them. The example runs
no model: a comment shows where the forward pass would be.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from hicache import CacheEngine, CacheRequest, DiskConfig, EngineConfig, ModelGeometry, ResourceExhausted, build_engine

Tokens = npt.NDArray[np.int64]
MODEL = ModelGeometry(layer_num=2, head_num=2, head_dim=32)
AHEAD = 2  # number of requests whose prefixes are read in advance


def serve(engine: CacheEngine, prompts: Mapping[str, Tokens]) -> dict[str, int]:
    """Serve the prompts in order. Returns, for each prompt, the number of tokens that needed no computing."""
    waiting, started, cached = deque(prompts), set[str](), dict[str, int]()
    while waiting:
        for name in list(waiting)[:AHEAD]:
            if name not in started:
                engine.prefetch(name, prompts[name], mode="wait_complete")
                started.add(name)
        engine.poll()  # once a step: completes finished reads and copies
        name = waiting[0]
        try:
            lease = engine.acquire(CacheRequest(name, prompts[name]))
        except ResourceExhausted:  # the prefetch has not ended; the next step tries again
            continue
        waiting.popleft()
        with lease:
            cached[name] = lease.cached_len
            engine.begin_forward([lease])
            # ... forward over tokens[lease.cached_len:], storing K and V at lease.slots ...
            engine.commit(lease, prompts[name])
    return cached


def main() -> None:
    prompts = {f"request {number}": np.arange(number * 1000, number * 1000 + 640) for number in range(6)}
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            device_tokens=2048, host_bytes=64 << 20, model_id="example", disk=DiskConfig(path=f"{folder}/pages")
        )
        for engine_number in (1, 2):
            with build_engine(config, MODEL) as engine:
                for name, cached_len in serve(engine, prompts).items():
                    print(f"engine {engine_number}, {name}: {cached_len} of 640 tokens need no computing")


if __name__ == "__main__":
    main()
