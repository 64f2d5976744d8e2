"""What one forward pass computes of prompts: so many tokens, and so long that streams beside them do not stand still.

    budget of a pass    [prompt by rank | next prompt | ...], each a chunk that begins where its KV ends

A device computes a chunk in milliseconds or in minutes, so a number of tokens alone bounds no time.
"""

from __future__ import annotations

import math

from hicache.flow.cost import PrefillCost
from hicache.serving.request_queue import ScheduledRequest

_AIM = 0.8  # of the longest pass: half of those that aim at it would exceed it
_KEEP = 0.25
_ALONE = 4  # times as long a pass may take that delays no token
_STEP_TOKENS = 16  # chunks are multiples, and one at least, or a prompt would never end
_MAX_SCORED_TOKENS = 512  # of a pass that has logits of all tokens of a prompt: 150 000 each, in 4 bytes
_MAX_GROWTH = 1 / 64  # attention costs what everything else does where so many tokens precede


class PassBudget:
    """Of one pass. `num_tokens`: of prompts. `work`: in tokens at the beginning of a prompt; one at position p is
    `1 + growth * p` of them, for attention grows with the position."""

    def __init__(self, num_tokens: int, work: float = math.inf, growth: float = 0.0) -> None:
        self._tokens = num_tokens
        self._scored = _MAX_SCORED_TOKENS
        self._work = work
        self._growth = growth
        self._is_whole = True

    def share_of(self, req: ScheduledRequest) -> int:
        """How many tokens of a prompt the pass may compute; of the first one at least one."""
        share = min(self._tokens, self._within_work(req.kv_len))
        return min(share, self._scored) if req.is_scoring else share

    def take(self, req: ScheduledRequest) -> None:
        """Tokens [kv_len, end) are in the pass."""
        num_tokens, self._is_whole = req.end - req.kv_len, False
        self._tokens -= num_tokens
        self._work -= num_tokens * (1 + self._growth * (req.kv_len + req.end) / 2)
        self._scored -= req.num_logits if req.is_scoring else 0

    def _within_work(self, start: int) -> int:
        if math.isinf(self._work):
            return self._tokens
        cost, work = 1 + self._growth * start, max(0.0, self._work)
        # num * (cost + growth * num / 2) = work
        num = 2 * work / (cost + math.sqrt(cost * cost + 2 * self._growth * work))
        return max(int(num) // _STEP_TOKENS, int(self._is_whole)) * _STEP_TOKENS


class PrefillPace:
    """How much of prompts this machine computes in `max_pass_s` seconds, 0: without a bound, by the passes of late.

    The time of a pass is that of its decoding requests too. `first_tokens`: a pass of prompts before one was measured.
    """

    def __init__(self, max_pass_s: float, first_tokens: float) -> None:
        self._aim_s = _AIM * max_pass_s
        self._first_tokens = first_tokens
        self._cost = PrefillCost()
        self._work = self._seconds = 0.0  # of passes, which count `_KEEP` when another full one has ended

    def observe(self, num_tokens: int, seconds: float, mean_position: float) -> None:
        """A pass over so many tokens of prompts took that long."""
        if not self._aim_s or seconds <= 0:
            return
        self._cost.observe(num_tokens, seconds, mean_position)
        work = num_tokens * (1 + self._growth * mean_position)
        keep = _KEEP ** min(1.0, work / self._within_aim) if self._work else 0.0
        self._work = keep * self._work + work
        self._seconds = keep * self._seconds + seconds

    def budget(self, num_tokens: int, beside_streams: bool) -> PassBudget:
        """Of the next pass, `num_tokens` of prompts at most. It may take four times as long where none decodes in it:
        then only those who come and go wait for it, and short passes compute less in the same time."""
        if not self._aim_s:
            return PassBudget(num_tokens)
        return PassBudget(num_tokens, self._within_aim * (1 if beside_streams else _ALONE), self._growth)

    @property
    def _within_aim(self) -> float:
        return self._aim_s * self._work / self._seconds if self._work else self._first_tokens

    @property
    def _growth(self) -> float:
        token_s, pair_s = self._cost.terms
        is_most = pair_s > _MAX_GROWTH * token_s  # or all: then there is no ratio
        return _MAX_GROWTH if is_most else pair_s / token_s if token_s else 0.0
