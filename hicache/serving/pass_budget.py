"""Limits the prompt tokens of one forward pass: by number, and by time, so that requests that decode are not delayed.

    budget of a pass    [prompt by rank | next prompt | ...], each a chunk that begins where its KV ends

One device computes a chunk in milliseconds and another in minutes, so a number of tokens alone does not limit the time.
"""

from __future__ import annotations

import math

from hicache.flow.cost import PrefillCost
from hicache.serving.request_queue import ScheduledRequest

_AIM = 0.8  # of the maximum time of a pass: if passes aimed at the maximum, half of them would exceed it
_KEEP = 0.25  # weight of earlier passes after another full pass
_ALONE = 4  # times the maximum time, for a pass that delays no decoding request
_STEP_TOKENS = 16  # chunks are multiples of this; the first chunk has at least this many, so that prompts make progress
_MAX_SCORED_TOKENS = 512  # prompt tokens of a pass whose logits are kept: each has 150 000 logits of 4 bytes
_MAX_GROWTH = 1 / 64  # at 1 / growth preceding tokens, attention costs as much as all other operations


class PassBudget:
    """The budget of one pass. `num_tokens`: maximum prompt tokens. `work`: maximum work, where a token at position p
    counts `1 + growth * p`, because attention costs more at later positions."""

    def __init__(self, num_tokens: int, work: float = math.inf, growth: float = 0.0) -> None:
        self._tokens = num_tokens
        self._scored = _MAX_SCORED_TOKENS
        self._work = work
        self._growth = growth
        self._is_whole = True

    def share_of(self, req: ScheduledRequest) -> int:
        """Tokens of a prompt that the pass may compute; for the first prompt at least one."""
        share = min(self._tokens, self._within_work(req.kv_len))
        return min(share, self._scored) if req.is_scoring else share

    def take(self, req: ScheduledRequest) -> None:
        """Subtract tokens [kv_len, end) of a request, which are in the pass, from the budget."""
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
    """Estimates how many prompt tokens this machine computes in `max_pass_s` seconds, by recent passes. 0: no limit.

    The time of a pass includes its decoding requests. `first_tokens`: prompt tokens of a pass before one was measured.
    """

    def __init__(self, max_pass_s: float, first_tokens: float) -> None:
        self._aim_s = _AIM * max_pass_s
        self._first_tokens = first_tokens
        self._cost = PrefillCost()
        self._work = self._seconds = 0.0  # of passes, weighted by `_KEEP` for each full pass that ended later

    def observe(self, num_tokens: int, seconds: float, mean_position: float) -> None:
        """Note that a pass over `num_tokens` prompt tokens took `seconds`."""
        if not self._aim_s or seconds <= 0:
            return
        self._cost.observe(num_tokens, seconds, mean_position)
        work = num_tokens * (1 + self._growth * mean_position)
        keep = _KEEP ** min(1.0, work / self._within_aim) if self._work else 0.0
        self._work = keep * self._work + work
        self._seconds = keep * self._seconds + seconds

    def budget(self, num_tokens: int, beside_streams: bool) -> PassBudget:
        """The budget of the next pass, at most `num_tokens` prompt tokens. The pass may take four times as long if no
        request decodes in it: then it delays only arriving and aborted requests, and longer passes compute more tokens
        per second."""
        if not self._aim_s:
            return PassBudget(num_tokens)
        return PassBudget(num_tokens, self._within_aim * (1 if beside_streams else _ALONE), self._growth)

    @property
    def _within_aim(self) -> float:
        return self._aim_s * self._work / self._seconds if self._work else self._first_tokens

    @property
    def _growth(self) -> float:
        token_s, pair_s = self._cost.terms
        is_most = pair_s > _MAX_GROWTH * token_s  # also if token_s is 0 and there is no ratio
        return _MAX_GROWTH if is_most else pair_s / token_s if token_s else 0.0
