"""What goes into the scheduler and what comes out: frozen values.

May import numpy, the engine's hit record and errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from hicache.engine import Hit
from hicache.errors import ConfigError, HiCacheError

Finish = Literal["length", "eos", "aborted", "failed"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `temperature` 0: the most likely. `top_k` 0 and `top_p` 1: no cut.

    `seed` fixes the choices of a request whatever runs beside it.
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


@dataclass(frozen=True)
class Request:
    """A prompt to continue. `tokens`: int64 [prompt_len]; `namespace`: requests of other namespaces share no page.

    Generation ends after `max_new_tokens`, or after a token of `eos_ids`, which is part of the answer.
    """

    request_id: str
    tokens: npt.NDArray[np.int64]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    namespace: str = ""
    eos_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or not len(self.tokens):
            raise ConfigError(f"request {self.request_id}: a prompt is at least one token in one dimension")
        if self.max_new_tokens < 1:
            raise ConfigError(f"request {self.request_id}: max_new_tokens={self.max_new_tokens} must be at least 1")


@dataclass(frozen=True)
class Result:
    """What became of a request.

    `hit`: tokens found in each tier at its first admission, `cached_len` their sum. `computed_tokens`: prompt tokens
    that went through the model, those computed again after a preemption included. `ttft_s`: from submission to the
    first token, without the time the auditor took; 0 where none came. `error`: why it failed.
    """

    request_id: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    finish: Finish
    hit: Hit
    computed_tokens: int
    ttft_s: float
    preemptions: int = 0
    error: HiCacheError | None = None

    @property
    def cached_len(self) -> int:
        return self.hit.device + self.hit.host + self.hit.disk
