"""Prepares a server on CUDA before its first request: compiles kernels, captures graphs and measures the prefill speed.

Without a warm-up, the first requests would wait for compilation, and `prefetch_mode=auto` would not know the cost of
computing. The cache keeps no pages of the prompts that a warm-up computes.
"""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import torch

from hicache.engine import CacheEngine, CacheRequest, Lease
from hicache.errors import ResourceExhausted
from hicache.flow.components.window import SlidingWindow
from hicache.serving.graphs import bucket
from hicache.serving.runner import Chunk, ModelRunner
from hicache.tiers import SWA


def warm_up(engine: CacheEngine, runner: ModelRunner, chunk_tokens: int, max_running: int) -> None:
    """Compile all kernels and capture all graphs, and measure the prefill speed. First compute prompts of 1, 2, 4, ...
    tokens, because attention has different kernels for different lengths. Then compute a prompt of two chunks twice,
    and measure the second time. At the end decode a batch of each size that has a graph.

    The prompts use at most half of the device tier's slots. The server calls this function before it admits any
    request.
    """
    num_slots, windows = engine.pool.size, engine.inspect.context.by_name.get(SWA)
    # The window pool may have fewer slots than the full pool, and a prompt frees window slots only when it is
    # committed.
    if isinstance(windows, SlidingWindow):
        num_slots = min(num_slots, windows.max_tokens)
    max_len = min(2 * chunk_tokens, engine.req_to_token.max_context_len, num_slots // 2)
    tokens = np.zeros(max_len, dtype=np.int64)
    for size in (1 << power for power in range(1, max_len.bit_length())):
        request = CacheRequest(f"warm up {size} tokens", tokens[:size], "warm up", is_counted=False)
        with engine.acquire(request) as lease:
            runner.prefill(lease, tokens[:size], 0, size)
    for number in range(2):
        with engine.acquire(CacheRequest(f"warm up {number}", tokens, "warm up", is_counted=False)) as lease:
            middle = max(1, max_len // 2)
            for start, end in ((0, middle), (middle, max_len)):
                begin_s = time.perf_counter()
                runner.prefill(lease, tokens, start, end)
                if engine.pool.device.type == "cuda":
                    torch.cuda.synchronize(engine.pool.device)
                if number:
                    engine.observe_prefill(end - start, time.perf_counter() - begin_s, (start + end) / 2)
    _decode_batches(engine, runner, max_running)


def _decode_batches(engine: CacheEngine, runner: ModelRunner, max_running: int) -> None:
    """Decode a batch of each size that has a graph, up to the number of requests for which the device tier has slots
    and states."""
    token, leases = np.zeros(1, dtype=np.int64), list[Lease]()
    try:
        with suppress(ResourceExhausted):
            for number in range(max_running):
                request = CacheRequest(f"warm up batch {number}", token, "warm up", is_counted=False)
                leases.append(engine.acquire(request))
        for num in sorted({min(bucket(num), len(leases)) for num in range(1, len(leases) + 1)}):
            runner.forward([Chunk(lease, token, 0, 1) for lease in leases[:num]])
    finally:
        for lease in leases:
            engine.release(lease)
