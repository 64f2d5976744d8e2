"""CUDA graphs of decode passes: one graph per batch size bucket, captured at the first batch of that size.

A batch is padded to the size of its bucket with requests that have row 0, slot 0 and length 1. The results for this
padding are not used. The replay of a graph cannot wait layer by layer, because it does not call the pool's getters. So
the stream waits, before the replay, for the last layer of each load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hicache.device.base import KVCache
from hicache.serving.passes import Chunk, PassContext

log = logging.getLogger(__name__)
_WARM_UPS = 2  # forward passes before a capture, in which kernels are compiled and libraries allocate workspaces


@dataclass(frozen=True)
class DecodeBatch:
    """The inputs of one bucket, as views of `words`, int64 [3, B]. A replay reads them in place.

    input_ids, positions, rows   int64 [B]   rows of the request table, not of the batch
    query_starts                 int32 [B + 1]
    last                         int64 [B]   index of each sequence's last token: every sequence has one token
    """

    words: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    query_starts: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, size: int, device: torch.device) -> DecodeBatch:
        words = torch.zeros(3, size, dtype=torch.int64, device=device)
        starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        return cls(words, words[0], words[1], words[2], starts, starts[:-1].long())


@dataclass(frozen=True)
class _Captured:
    batch: DecodeBatch
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class DecodeGraphs:
    """Owns the CUDA graphs of a runner. Only the scheduler thread uses it. `decode`: computes a batch; it must neither
    wait for the device nor read values of tensors on the host."""

    def __init__(self, context: PassContext, decode: Callable[[DecodeBatch], torch.Tensor]) -> None:
        self._context = context
        self._decode = decode
        self._last_layers = last_layers(context.pool)
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = None  # memory shared by all graphs
        self._failure: RuntimeError | None = None

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """Decode chunks of one token each, after the loads of the leases that were given to `begin_forward`. Returns
        float32 logits [requests, vocab]; None if the model's passes cannot be captured."""
        size = bucket(len(chunks))
        if size not in self._captured and not self._capture(size, chunks):
            return None
        captured = self._captured[size]
        self._wait_for_loads()
        words = np.zeros((3, size), dtype=np.int64)
        for i, chunk in enumerate(chunks):
            words[:, i] = chunk.tokens[chunk.start], chunk.start, chunk.lease.row
        captured.batch.words.copy_(torch.from_numpy(words).pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.logits[: len(chunks)].clone()

    def _capture(self, size: int, chunks: Sequence[Chunk]) -> bool:
        """Capture the graph of a bucket. Returns whether the capture succeeded. The first failure is logged, and later
        batches run without graphs."""
        if self._failure is not None:
            return False
        context, batch = self._context, DecodeBatch.of(size, self._context.device)
        context.engine.begin_forward([])  # the warm-up passes and the capture wait for no load
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(context.device)
        stream.wait_stream(torch.cuda.current_stream(context.device))
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self._decode(batch)
            torch.cuda.current_stream(context.device).wait_stream(stream)
            # With the mode "thread_local", other threads may allocate memory and query events during the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = self._decode(batch)
        except RuntimeError as error:
            self._failure = error
            log.warning("decode passes of this model cannot be captured in CUDA graphs, and run without: %s", error)
            # In torch 2.11, a capture that fails at its end leaves the random number generator in capture mode. Drawing
            # random numbers then raises, until another capture succeeds.
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                batch.words.zero_()
            return False
        finally:
            context.engine.begin_forward([chunk.lease for chunk in chunks])
        self._pool = self._pool or graph.pool()
        self._captured[size] = _Captured(batch, graph, logits)
        return True

    def _wait_for_loads(self) -> None:
        """Make the current stream wait for the last layer of each load before the replay."""
        for layer in self._last_layers:
            self._context.pool.get_key_buffer(layer)


def last_layers(pool: KVCache) -> tuple[int, ...]:
    """Return the last layer of each slot space. When this layer is loaded, the complete load of the slot space is. The
    layers are read from the pool and not from the kinds of layers, because a pool may store a window layer in the space
    of full slots."""
    return tuple(space.layout.layers[-1] for space in pool.slot_spaces)


def bucket(num_requests: int) -> int:
    """Return the smallest of 1, 2, 4, 8, 16, 24, 32, 40, ... that is at least `num_requests`."""
    if num_requests <= 8:
        return 1 << (num_requests - 1).bit_length()
    return -(-num_requests // 8) * 8
