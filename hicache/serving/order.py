"""Who is served first: the request with the least left to compute, and the one that has waited.

    rank_s = submitted_s - lead_s + min(max_overtake_s, 4 * left_s)        lower ranks go first
    rank_s = submitted_s - lead_s + max_overtake_s                         of a preemptible request

A second of computing less is worth four of waiting. A rank is fixed while a request waits, unless tiers come to hold
more of its prompt, so it goes before all that is submitted more than `max_overtake_s` later, at one priority.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from hicache.flow.cost import PrefillCost
from hicache.serving.request_queue import ScheduledRequest

_WAIT_PER_COMPUTE = 4.0
_SPEED_CHANGE = 0.1  # of the measured time of a short or of a long prompt, before ranks follow it
_SHORT_TOKENS, _LONG_TOKENS = 1 << 10, 1 << 16
_PASSES_AHEAD = 2


class ServingOrder:
    """`max_overtake_s`: a request may go before those submitted so much earlier; 0: first come, first served.
    `measured`: the speed of prefill, by which ranks are computed after `follow_speed`."""

    def __init__(self, max_overtake_s: float, measured: PrefillCost) -> None:
        self._max_overtake_s = max_overtake_s
        self._measured = measured
        self._followed = PrefillCost()
        self._followed.assume(*measured.terms)

    def follow_speed(self) -> bool:
        """Whether the speed of prefill has changed by a tenth, after which all ranks are to be computed again."""
        for num_tokens in (_SHORT_TOKENS, _LONG_TOKENS):
            before_s, now_s = (cost.seconds(0, num_tokens) for cost in (self._followed, self._measured))
            if abs(now_s - before_s) > _SPEED_CHANGE * before_s:
                self._followed.assume(*self._measured.terms)
                return True
        return False

    def rank_s(self, req: ScheduledRequest) -> float:
        """Of a request that runs, by what is left of its prompt; of one that waits, by what no tier is known to hold.
        Its priority counts as an earlier submission, by `lead_s`. A preemptible request has the highest rank that its
        submission allows."""
        start = req.expected_len if req.lease is None else req.kv_len
        left_s = math.inf if req.is_preemptible else self._followed.seconds(start, req.length)
        return req.submitted_s - req.lead_s + min(self._max_overtake_s, _WAIT_PER_COMPUTE * left_s)


def comes_soon(req: ScheduledRequest, running: Iterable[ScheduledRequest], pass_tokens: int) -> bool:
    """Whether a waiting request gets something of the next passes. Until then it holds no slots: it finds more in the
    cache, and shorter ones that come meanwhile go before it."""
    prompts = (other for other in running if not other.is_decoding and other.rank < req.rank)
    return sum(prompt.length - prompt.kv_len for prompt in prompts) < _PASSES_AHEAD * pass_tokens


def is_computed_for_another(req: ScheduledRequest, running: Iterable[ScheduledRequest], page_size: int) -> bool:
    """Whether a prompt that runs, of no lower priority, has whole pages left to compute which begin a waiting one: it
    finds them in the cache a few passes later, and would compute them a second time now."""
    for other in running:
        if other.is_decoding or other.lead_s < req.lead_s or other.request.namespace != req.request.namespace:
            continue
        end = (other.kv_len // page_size + 1) * page_size  # of the page that it computes next
        if end <= min(other.length, len(req.cacheable)) and np.array_equal(other.sequence[:end], req.sequence[:end]):
            return True
    return False
