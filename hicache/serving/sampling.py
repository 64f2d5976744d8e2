"""Sampling parameters, and the choice of the next token from logits.

A sampled token depends on the request's logits, its seed and the number of tokens it has generated, and on nothing
else: a counter-based generator yields one uniform number per step, and the inverse of the cumulative distribution maps
it to a token. So a request gets the same tokens alone and in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token.

    `seed` fixes the choices of a request, whatever else is in the batch. Raises ConfigError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature={self.temperature}: 0 is greedy, above 0 samples")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k}: 0 keeps all tokens, n keeps the n most likely")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}: must be above 0 and at most 1")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be negative")


def choose_tokens(logits: torch.Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> list[int]:
    """One token per row of float32 `logits` [B, vocab]; `steps[i]`: tokens that request i has generated so far."""
    chosen: list[int] = logits.argmax(-1).tolist()
    sampled = [i for i, p in enumerate(params) if p.temperature > 0]
    if sampled:
        rows = logits[sampled].cpu().double().numpy()
        for i, row in zip(sampled, rows, strict=True):
            chosen[i] = sample(row, params[i], steps[i])
    return chosen


def sample(logits: npt.NDArray[np.float64], params: SamplingParams, step: int) -> int:
    """A token of softmax(logits / temperature), restricted to the `top_k` most likely tokens and then to the smallest
    set of tokens whose probabilities sum to `top_p`. `logits`: float64 [vocab]."""
    order = np.argsort(-logits, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp((logits[order] - logits[order[0]]) / params.temperature)
    cumulative = np.cumsum(weights / weights.sum())
    if params.top_p < 1:
        # Keep [0, last]: the first index where the sum reaches top_p is the last one kept.
        last = int(np.searchsorted(cumulative, params.top_p))
        order, cumulative = order[: last + 1], cumulative[: last + 1]
    generator = np.random.Generator(np.random.Philox(key=params.seed, counter=step))
    index = int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))
    return int(order[min(index, len(order) - 1)])
