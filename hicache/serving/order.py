"""The order in which requests are served: requests with less left to compute are first, but a longer wait also improves
the rank.

    rank_s = submitted_s - lead_s + min(max_overtake_s, 4 * left_s)        lower ranks go first
    rank_s = submitted_s - lead_s + max_overtake_s                         of a preemptible request

`left_s` is the time to compute the rest of a prompt, and `lead_s` is the priority, as seconds. One second less to
compute improves the rank as much as a submission four seconds earlier. The rank of a waiting request changes only if
more of its prompt gets cached. Because the last term is at most `max_overtake_s`, a request is served before all
requests of equal priority that are submitted more than `max_overtake_s` later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from hicache.flow.cost import PrefillCost
from hicache.serving.request_queue import ScheduledRequest

_WAIT_PER_COMPUTE = 4.0
_SPEED_CHANGE = 0.1  # relative change of a prefill time after which ranks are computed again
_SHORT_TOKENS, _LONG_TOKENS = 1 << 10, 1 << 16
_PASSES_AHEAD = 2


class ServingOrder:
    """Computes the ranks by which requests are served. `max_overtake_s`: a request may overtake requests submitted up
    to this many seconds earlier; 0: first come, first served. `measured`: the prefill speed measured so far. Ranks use
    a changed speed only after `follow_speed`."""

    def __init__(self, max_overtake_s: float, measured: PrefillCost) -> None:
        self._max_overtake_s = max_overtake_s
        self._measured = measured
        self._followed = PrefillCost()
        self._followed.assume(*measured.terms)

    def follow_speed(self) -> bool:
        """Return whether the prefill speed has changed by a tenth or more. After a change, ranks use the new speed, and
        the caller must compute all ranks again."""
        for num_tokens in (_SHORT_TOKENS, _LONG_TOKENS):
            before_s, now_s = (cost.seconds(0, num_tokens) for cost in (self._followed, self._measured))
            if abs(now_s - before_s) > _SPEED_CHANGE * before_s:
                self._followed.assume(*self._measured.terms)
                return True
        return False

    def rank_s(self, req: ScheduledRequest) -> float:
        """Return the rank of a request. For a running request, the rest of its prompt is left to compute. For a waiting
        request, the tokens that no tier is known to have are left to compute. The priority counts as a submission
        `lead_s` earlier. A preemptible request gets the highest, which means last, rank that its submission time
        allows."""
        start = req.expected_len if req.lease is None else req.kv_len
        left_s = math.inf if req.is_preemptible else self._followed.seconds(start, req.length)
        return req.submitted_s - req.lead_s + min(self._max_overtake_s, _WAIT_PER_COMPUTE * left_s)


def is_computed_soon(req: ScheduledRequest, running: Iterable[ScheduledRequest], pass_tokens: int) -> bool:
    """Return whether a waiting request would be computed in one of the next passes. The scheduler does not admit a
    request that would not be computed soon. While this request waits, more of its tokens may be cached, and shorter
    requests may arrive and be served first."""
    prompts = (other for other in running if not other.is_decoding and other.rank < req.rank)
    return sum(prompt.length - prompt.kv_len for prompt in prompts) < _PASSES_AHEAD * pass_tokens


def is_computed_for_another(req: ScheduledRequest, running: Iterable[ScheduledRequest], page_size: int) -> bool:
    """Return whether a running request of the same or higher priority is about to compute complete pages with which the
    waiting request `req` also begins. If `req` is admitted some passes later, it hits these pages. If it were admitted
    now, it would compute them a second time."""
    for other in running:
        if other.is_decoding or other.lead_s < req.lead_s or other.request.namespace != req.request.namespace:
            continue
        end = (other.kv_len // page_size + 1) * page_size  # end of the page that the running prompt computes next
        if end <= min(other.length, len(req.cacheable)) and np.array_equal(other.sequence[:end], req.sequence[:end]):
            return True
    return False
