"""A runner that sleeps as long as a GPU would compute, to measure a scheduler on a CPU.

A helper of benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from hicache.engine import CacheEngine
from hicache.serving import Chunk

# Times of an 8B model on an H100: per pass, per token, and per token and position. 98 304 tokens take 7.3 s.
_PASS_S, _TOKEN_S, _PAIR_S = 0.012, 54e-6, 4.1e-10


class SleepingRunner:
    """Implements the scheduler's `Runner`. `speed`: its speed as a multiple of that GPU's."""

    def __init__(self, engine: CacheEngine, vocab: int, speed: float) -> None:
        self._engine = engine
        self._vocab = vocab
        self._speed = speed

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Wait for the loads of the leases, as a model does, then sleep; returns logits of zeros."""
        self._engine.begin_forward([chunk.lease for chunk in chunks])
        for layer in self._engine.pool.layer_ids:
            self._engine.pool.get_key_buffer(layer)
        time.sleep((_PASS_S + sum(map(_seconds, chunks))) / self._speed)
        return torch.zeros(sum(chunk.num_logits for chunk in chunks), self._vocab)


def _seconds(chunk: Chunk) -> float:
    num_tokens, position = chunk.end - chunk.start, (chunk.start + chunk.end) / 2
    return 0.0 if chunk.is_decode else num_tokens * (_TOKEN_S + _PAIR_S * position)
