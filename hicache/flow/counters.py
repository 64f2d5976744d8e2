"""The counters of admissions and prefetches: prompts and refusals, the tiers of their tokens, decisions and outcomes.
The scheduler thread writes them."""

from __future__ import annotations

import logging

from hicache.errors import (
    ExchangePending,
    OutOfRows,
    OutOfSlots,
    OutOfStates,
    PrefetchPending,
    ResourceExhausted,
    TransferBusy,
)
from hicache.flow.context import EngineContext
from hicache.flow.lease import Hit, Lease
from hicache.metrics import Counter, Histogram, Metrics
from hicache.tiers import Store

log = logging.getLogger(__name__)

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

    def admitted(self, lease: Lease) -> None:
        """Count an admitted prompt."""
        if lease.request.is_counted:
            self._requests.value += 1
            self._prompt.value += lease.prompt_len
            self._computed.value += lease.prompt_len - lease.cached_len
        else:
            self._uncounted.value += 1
        self.hit(lease, lease.hit)

    def hit(self, lease: Lease, hit: Hit) -> None:
        """Count tokens that an admitted request need not compute."""
        if not lease.request.is_counted:
            self._uncounted_hits.value += hit.tokens
            return
        for counter, tokens in zip(self._hits, (hit.device, hit.host, hit.disk, hit.remote), strict=True):
            counter.value += tokens

    def _hit_ratio(self) -> float:
        return sum(hits.value for hits in self._hits) / max(1, self._prompt.value)


class PrefetchCounters:
    """The decisions and outcomes of prefetches, and the pages that they read."""

    def __init__(self, context: EngineContext) -> None:
        count, histogram = context.metrics.counter, context.metrics.histogram
        self._share, self._has_been_full = context.config.prefetch_host_share, False

        def outcome(name: str, help: str) -> Counter:
            return count(f"prefetch.{name}_requests", help, "prefetch_outcome_requests", outcome=name)

        self.requests = count("prefetch.requests", "prefetches asked for")
        self.waited = outcome("waited", "requests for which waiting was estimated to cost less than computing")
        self.skipped = outcome("skipped", "requests that did not wait because computing was estimated to cost less")
        self.abandoned = outcome(
            "gave_up", "requests that stopped waiting: computing the rest cost less, or nothing came"
        )
        self.overlapped = outcome("beside", "requests computed from their beginning while a store brought their end")
        self._computed = count(
            "prefetch.beside_computed_tokens", "tokens that such requests computed until they met what had come"
        )
        self._loaded = count("prefetch.beside_loaded_tokens", "tokens that they found there, and did not compute")
        context.metrics.gauge(
            "prefetch.beside_loaded_ratio", "share of both that was found there: where they met", self._loaded_ratio
        )
        self.shared = outcome("shared", "prefetches that joined a read in flight")
        self.postponed = outcome("postponed", "prefetches refused or cut short by host pages or the read queue")
        self.retries = count("prefetch.retries", "attempts to start what was postponed")
        self.estimated_s = count(
            "prefetch.estimated_seconds", "what the waits that came to their end were estimated to take"
        )
        self.waited_s = histogram("prefetch.waited_seconds", "time that a wait took which came to its end")
        self.lost = count("prefetch.lost_pages", "pages a store announced and could not give back verified")
        self.landed = count("prefetch.landed_tokens", "tokens that prefetches added to the host tier")
        self.refused = count("prefetch.refused_jobs", "jobs not started because the readers' queue was full")
        moved, took = (
            "bytes of verified pages that a job read from the store to the host",
            "time that job took a reader",
        )
        self._moved: dict[Store, tuple[Histogram, Histogram]] = {}
        for store in context.stores:
            labels = {"movement": "read", "direction": f"{store.name}_to_host"}
            self._moved[store] = context.metrics.movement(f"{store.prefix}prefetch", moved, took, **labels)

    def count_joined(self, num_computed: int, num_loaded: int) -> None:
        """An overlapped request loaded `num_loaded` tokens behind `num_computed` computed ones."""
        self._computed.value += num_computed
        self._loaded.value += num_loaded

    def _loaded_ratio(self) -> float:
        return self._loaded.value / max(1, self._loaded.value + self._computed.value)

    def count_postponed(self, num_claimed: int, max_pages: int) -> None:
        """A request waits for host pages, because requests claim `num_claimed` of `max_pages`; 0: for another
        reason."""
        self.postponed.value += 1
        if num_claimed and not self._has_been_full:
            self._has_been_full = True
            log.warning(
                "prefetches wait for host pages: %d are claimed by requests that were not admitted, "
                "prefetch_host_share=%g allows %d; raise it, or host_bytes",
                num_claimed,
                self._share,
                max_pages,
            )

    def count_read(self, store: Store, num_bytes: int, seconds: float) -> None:
        """A job brought `num_bytes` verified bytes."""
        for histogram, value in zip(self._moved[store], (num_bytes, seconds), strict=True):
            histogram.observe(value)
