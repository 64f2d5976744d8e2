"""The interface of the scheduler: requests and outputs, both immutable, callbacks for tokens, and the runner that the
scheduler calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hicache.engine import Hit
from hicache.errors import ConfigError, HiCacheError
from hicache.serving.passes import Chunk
from hicache.serving.sampling import SamplingParams


@dataclass(frozen=True)
class TokenLogprobs:
    """The log probability of a token, and the most likely tokens at the token's position with their log probabilities,
    most likely first. All are computed from the model's unchanged logits. The first token of a prompt has no log
    probability."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


Logprobs = list[TokenLogprobs]
_MAX_PRIORITY = 1 << 31
FinishReason = Literal["length", "stop", "abort", "timeout", "error"]
OnToken = Callable[[int], None]
"""A function called on the scheduler's thread with each token of a request, in order, when it is chosen."""


class Constraint(Protocol):
    """Restricts the tokens of one answer. The state of a constraint depends on the tokens taken so far."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return whether each token id may be the next token. Ids beyond the end of the array are not allowed."""
        ...

    def take(self, token: int) -> None:
        """Update the state by the token that was chosen."""
        ...

    @property
    def outcome(self) -> FinishReason | None:
        """Return the reason why no more tokens may follow; None if more tokens may follow."""
        ...


@dataclass(frozen=True)
class Request:
    """A prompt to continue. `tokens`: int64 [prompt_len]. Requests of different `namespace`s share no page.
    `branch_points`, `expected_uses`, `session_end`, `next_turn_within_s`: see `CacheRequest`. `is_counted`: whether the
    hits of this request count in hit rates. It is False for a second or later answer to the same prompt.

    Generation ends after `max_new_tokens` tokens, or after a token of `eos_ids`, which is part of the output. It also
    ends `deadline_s` seconds after the submission, with the tokens generated so far. Requests are served in the order
    of `hicache.serving.order`; each level of `priority` is worth some seconds of waiting (`Scheduler`). Priority does
    not influence which pages stay in the cache.

    `constraint`: restricts the answer and may end it; no other request may use the same object. `num_logprobs`: for
    each generated token, also keep the log probabilities of this number of most likely tokens, in addition to that of
    the chosen token. `scores_prompt`: also keep log probabilities of the prompt's tokens; the model then computes the
    complete prompt.

    Raises ConfigError for an empty prompt, `max_new_tokens` below 1, a `priority` that is not an integer or too
    large, or a `deadline_s` not above 0.
    """

    request_id: str
    tokens: npt.NDArray[np.int64]
    max_new_tokens: int
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    namespace: str = ""
    eos_ids: frozenset[int] = frozenset()
    branch_points: tuple[int, ...] = ()
    expected_uses: int | None = None
    session_end: bool = False
    next_turn_within_s: float | None = None
    priority: int = 0
    deadline_s: float | None = None
    num_logprobs: int | None = None
    scores_prompt: bool = False
    is_counted: bool = True
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or not len(self.tokens):
            raise ConfigError(f"request {self.request_id}: a prompt is at least one token in one dimension")
        if self.max_new_tokens < 1:
            raise ConfigError(f"request {self.request_id}: max_new_tokens={self.max_new_tokens} must be at least 1")
        if not isinstance(self.priority, int) or abs(self.priority) > _MAX_PRIORITY:
            raise ConfigError(
                f"request {self.request_id}: priority={self.priority!r} must be an integer of at most "
                f"{_MAX_PRIORITY} on either side of 0"
            )
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ConfigError(f"request {self.request_id}: deadline_s={self.deadline_s} must be above 0")


@dataclass(frozen=True)
class RequestOutput:
    """The outcome of a request.

    `tokens`: the generated tokens. `hit`: number of cached tokens per tier at the first admission; `cached_len` is the
    sum of these numbers. `missed`: number of prompt tokens that were not cached at the first admission, by reason
    (`hicache.flow.misses`). `is_counted`: whether the request counts in hit rates, because its prompt was admitted and
    it is the first answer to this prompt. `computed_tokens`: prompt tokens that the model computed, including those
    computed again after a preemption. `ttft_s`: seconds from submission to the first token; 0 if there was none.
    `error`: the cause if `finish_reason` is "error".
    """

    request_id: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    hit: Hit
    computed_tokens: int
    ttft_s: float
    preemptions: int = 0
    error: HiCacheError | None = None
    is_counted: bool = False
    missed: Mapping[str, int] = field(default_factory=dict)

    @property
    def cached_len(self) -> int:
        return self.hit.tokens


class Runner(Protocol):
    """The methods of a model runner that the scheduler uses; `ModelRunner` implements them."""

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute and store KV of `chunks`, which belong to different requests.

        Returns float32 logits [rows, vocab] of the last `num_logits` tokens of each chunk, in order. Raises
        TransferError if a load of a request's prefix failed. After any exception, all `chunks` are computed again, with
        other leases.
        """
        ...
