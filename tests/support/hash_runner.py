"""A stand-in for the model runner: it runs the toy model of component_case. The logits are hashes of the complete
prefix too.

Before a pass over a chunk the runner reads, by slot, all rows that attention would read, and compares them with the
true values. The runner computes chunks one after the other. So if a load fails, some requests of the pass have been
computed and some have not. `answer` returns the tokens that a request alone, without any cache, would generate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from component_case import compute
from hicache import CacheEngine, ModelGeometry
from hicache.serving import Chunk, Request
from hicache.serving.sampling import choose_tokens
from toy_model import prefix_hashes, values_of

VOCAB = 24


def _logits(tokens: np.ndarray, namespace: str) -> torch.Tensor:
    """Logits of the next token: float32 [VOCAB]."""
    return values_of(prefix_hashes(tokens, namespace)[-1:], 400, (VOCAB,))[0] / 2**20


def answer(request: Request) -> tuple[int, ...]:
    """The tokens that a model generates for the request alone, without a cache."""
    tokens = request.tokens.tolist()
    while True:
        step = len(tokens) - len(request.tokens)
        logits = _logits(np.array(tokens), request.namespace)
        tokens += choose_tokens(logits[None], [request.sampling_params], [step])
        if step + 1 == request.max_new_tokens or tokens[-1] in request.eos_ids:
            return tuple(tokens[len(request.tokens) :])


class HashRunner:
    """A model runner over hashes; the module docstring describes it."""

    def __init__(self, engine: CacheEngine, geometry: ModelGeometry) -> None:
        self._engine, self._geometry = engine, geometry

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        return torch.stack([self._compute(chunk) for chunk in chunks])

    def _compute(self, chunk: Chunk) -> torch.Tensor:
        tokens = chunk.tokens[: chunk.end]
        compute(self._engine, chunk.lease, tokens, chunk.start, chunk.end, self._geometry)
        return _logits(tokens, chunk.lease.namespace)
