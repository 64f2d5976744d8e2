"""What admission counts: prompts, where their tokens came from, and refusals."""

from __future__ import annotations

from hicache.errors import (
    ExchangePending,
    OutOfRows,
    OutOfSlots,
    OutOfStates,
    PrefetchPending,
    ResourceExhausted,
    TransferBusy,
)
from hicache.flow.lease import Lease
from hicache.metrics import Metrics

_REFUSALS: dict[type[ResourceExhausted], tuple[str, str]] = {
    OutOfSlots: ("out_of_slots", "too few slots are free or evictable"),
    OutOfRows: ("out_of_rows", "no row of the request table is free"),
    OutOfStates: ("out_of_states", "too few recurrent states are free or evictable"),
    TransferBusy: ("transfer_busy", "as many loads are in flight as may be"),
    PrefetchPending: ("prefetch_pending", "its prefetch had not ended"),
    ExchangePending: ("exchange_pending", "what has to leave for it was on its way to the host"),
}
_REFUSED = "admissions refused for now"
_HITS = {
    "device": "were on the device",
    "host": "were loaded from the host",
    "disk": "a prefetch had brought from the disk",
    "remote": "a prefetch had brought from the remote tier",
}


class AdmitCounters:
    """Written by the scheduler thread."""

    def __init__(self, metrics: Metrics) -> None:
        count = metrics.counter
        self._requests = count("admit.requests", "prompts admitted, each once")
        self._uncounted = count(
            "admit.uncounted_requests",
            "admissions of no new prompt: again after a preemption, further answers, warm-up",
        )
        self._uncounted_hits = count("admit.uncounted_hit_tokens", "tokens that these found cached, which are no hits")
        self._prompt = count("admit.prompt_tokens", "tokens of admitted prompts: those hit and those to be computed")
        self._hits = [
            count(f"admit.{tier}_hit_tokens", f"tokens of admitted prompts that {how}", "admit_hit_tokens", tier=tier)
            for tier, how in _HITS.items()
        ]
        self._computed = count(
            "admit.computed_tokens", "tokens of admitted prompts that no tier provided when they were admitted"
        )
        self._refused = {
            error: count(f"admit.{reason}_attempts", f"{_REFUSED}: {why}", "admit_refused_attempts", reason=reason)
            for error, (reason, why) in _REFUSALS.items()
        }
        metrics.gauge("admit.hit_ratio", "share of prompt tokens that were hit, since the start", self._hit_ratio)

    def refused(self, error: ResourceExhausted) -> None:
        """An admission was refused with `error`."""
        for kind, counter in self._refused.items():
            counter.value += isinstance(error, kind)

    def admitted(self, lease: Lease, *, joins: bool) -> None:
        """Of one that joins what has come, what it loads was hit, though late; what it has on the device it computed,
        or that was counted."""
        hit = lease.hit.loaded if joins else lease.hit
        if not lease.request.is_counted:
            self._uncounted.value += not joins
            self._uncounted_hits.value += hit.tokens
            return
        if not joins:
            self._requests.value += 1
            self._prompt.value += lease.prompt_len
            self._computed.value += lease.prompt_len - lease.cached_len
        for counter, tokens in zip(self._hits, (hit.device, hit.host, hit.disk, hit.remote), strict=True):
            counter.value += tokens

    def _hit_ratio(self) -> float:
        return sum(hits.value for hits in self._hits) / max(1, self._prompt.value)
