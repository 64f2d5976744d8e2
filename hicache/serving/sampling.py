"""Sampling parameters, and the choice of the next token from logits.

A sampled token depends only on the logits, the request's seed and the number of tokens that the request has generated.
A counter-based generator computes one uniform number per step. The inverse of the cumulative distribution maps this
number to a token. So a request gets the same tokens alone and in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hicache.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for choosing the next token. A `temperature` of 0 chooses the most likely token; `top_k` 0, `top_p` 1
    and `min_p` 0 keep every token. Before `top_p` is applied, tokens are dropped if they are less likely than `min_p`
    times the probability of the most likely token.

    Before that, logits are changed. `logit_bias`: pairs of a token and the number that is added to its logit.
    `repetition_penalty` divides positive logits, and multiplies negative logits, of tokens in the prompt or the answer.
    `presence_penalty` is subtracted once from the logit of each token in the answer, and `frequency_penalty` once for
    each occurrence. The first `min_tokens` tokens are never stop tokens.

    `seed` determines the random numbers of a request, independent of its batch. Raises ConfigError for values out of
    range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature={self.temperature}: 0 is greedy, above 0 samples")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k}: 0 keeps all tokens, n keeps the n most likely")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}: must be above 0 and at most 1")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be negative")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p={self.min_p}: must be at least 0 and at most 1")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ConfigError(f"repetition_penalty={self.repetition_penalty}: must be above 0; 1 penalises nothing")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)}: must be a number; 0 penalises nothing")
        if not all(token >= 0 and math.isfinite(bias) for token, bias in self.logit_bias):
            raise ConfigError("logit_bias: give pairs of a token id and a number")
        if self.min_tokens < 0:
            raise ConfigError(f"min_tokens={self.min_tokens} must not be negative")

    @property
    def changes_logits(self) -> bool:
        """Return whether logits are changed before a token is chosen."""
        penalises = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalises or self.logit_bias or self.min_tokens)


PLAIN = SamplingParams(temperature=1.0)
"""Samples tokens by the model's probabilities."""


def choose_tokens(logits: torch.Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> list[int]:
    """Choose one token for each row of float32 `logits` [B, vocab]. `steps[i]`: number of tokens that request i has
    generated so far.

    All computation is on the device of the logits. The host waits once, for the tokens.
    """
    tokens = logits.argmax(-1)
    numbers = [
        (row, p.temperature, p.top_k, p.top_p, p.min_p, uniform(p.seed, steps[row]))
        for row, p in enumerate(params)
        if p.temperature > 0
    ]
    if numbers:  # one copy to the device
        rows, *columns = torch.tensor(numbers, dtype=torch.float64).to(logits.device, non_blocking=True).unbind(1)
        tokens[rows.long()] = _sample(logits[rows.long()].double(), *columns)
    chosen: list[int] = tokens.tolist()
    return chosen


def uniform(seed: int, step: int) -> float:
    """Return the number in [0, 1) that determines the token of a request at a step."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=step)).random())


def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Sample tokens by softmax(logits / temperature), restricted in three steps: to the `top_k` most likely tokens; to
    tokens whose probability is at least `min_p` times that of the most likely token; to the smallest set of tokens
    whose probabilities sum to `top_p`. `logits`: float64 [n, vocab]. All other arguments: float64 [n]. Returns int64
    [n].
    """
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[1], device=logits.device)
    weights = ((values - values[:, :1]) / temperature[:, None]).exp()
    is_cut = (top_k[:, None] > 0) & (ranks >= top_k[:, None]) | (weights < min_p[:, None])
    weights = weights.masked_fill(is_cut, 0)
    cumulative = (weights / weights.sum(-1, keepdim=True)).cumsum(-1)
    # Keep ranks [0, last]. `last` is the first rank at which the cumulative sum reaches top_p.
    last = torch.where(top_p < 1, (cumulative < top_p[:, None]).sum(-1), (weights > 0).sum(-1) - 1)
    # Rows that consist of NaN or -inf have no rank.
    last = last.clamp(0, logits.shape[1] - 1)[:, None]
    drawn = (cumulative <= uniforms[:, None] * cumulative.gather(-1, last)).sum(-1, keepdim=True)
    return order.gather(-1, drawn.minimum(last))[:, 0]
