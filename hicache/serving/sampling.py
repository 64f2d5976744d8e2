"""The next token from logits: greedy for the batch at once, sampled for each request by its own seed.

A sampled choice depends on the request's logits, its seed and how many tokens it has generated, on nothing else: a
counter-based generator gives the one uniform number of step t, and the choice inverts the cumulative distribution
there.

May import numpy, torch and serving.request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hicache.serving.request import Sampling


def choose_tokens(logits: torch.Tensor, sampling: Sequence[Sampling], steps: Sequence[int]) -> list[int]:
    """One token a row of float32 `logits` [B, vocab]; `steps[i]`: tokens that request i has generated so far."""
    chosen: list[int] = logits.argmax(-1).tolist()
    sampled = [i for i, how in enumerate(sampling) if how.temperature > 0]
    if sampled:
        rows = logits[sampled].cpu().double().numpy()
        for i, row in zip(sampled, rows, strict=True):
            chosen[i] = sample(row, sampling[i], steps[i])
    return chosen


def sample(logits: npt.NDArray[np.float64], how: Sampling, step: int) -> int:
    """A token of softmax(logits / temperature), cut to the `top_k` likeliest and to the fewest that make up `top_p`."""
    order = np.argsort(-logits, kind="stable")
    if how.top_k:
        order = order[: how.top_k]
    weights = np.exp((logits[order] - logits[order[0]]) / how.temperature)
    cumulative = np.cumsum(weights / weights.sum())
    if how.top_p < 1:
        # Keep [0, last]: the first position where the sum reaches top_p is the last one kept.
        last = int(np.searchsorted(cumulative, how.top_p))
        order, cumulative = order[: last + 1], cumulative[: last + 1]
    generator = np.random.Generator(np.random.Philox(key=how.seed, counter=step))
    at = np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")
    return int(order[min(int(at), len(order) - 1)])
