"""Who is served first: the request with the least left to compute, and the one that has waited.

    rank_s = submitted_s - lead_s + min(max_overtake_s, 4 * left_s)        lower ranks go first

A second of computing less is worth four of waiting. A rank is fixed while a request waits, unless tiers come to hold
more of its prompt, so it goes before all that is submitted more than `max_overtake_s` later, at one priority.
"""

from __future__ import annotations

from collections.abc import Callable

from hicache.serving.request_queue import ScheduledRequest

_WAIT_PER_COMPUTE = 4.0


class ServingOrder:
    """`max_overtake_s`: a request may go before those submitted so much earlier; 0: first come, first served.
    `prefill_s`: seconds to compute positions [start, end) of a prompt."""

    def __init__(self, max_overtake_s: float, prefill_s: Callable[[int, int], float]) -> None:
        self._max_overtake_s, self._prefill_s = max_overtake_s, prefill_s

    def rank_s(self, req: ScheduledRequest) -> float:
        """Of a request that runs, by what is left of its prompt; of one that waits, by what no tier is known to hold.
        What its priority is worth, `lead_s`, is as if it had been submitted earlier."""
        start = req.expected_len if req.lease is None else req.kv_len
        left_s = self._prefill_s(start, req.length)
        return req.submitted_s - req.lead_s + min(self._max_overtake_s, _WAIT_PER_COMPUTE * left_s)
