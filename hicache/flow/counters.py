"""The counters of prefetches: their decisions and outcomes, and the pages that they read. The scheduler thread writes
them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hicache.flow.context import EngineContext
from hicache.metrics import Counter, Histogram
from hicache.tiers import Store

log = logging.getLogger(__name__)


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

    def count_reads(self, store: Store, moved: Sequence[tuple[int, float]]) -> None:
        """Jobs read a number of verified bytes each, in seconds."""
        for histogram, values in zip(self._moved[store], zip(*moved, strict=True), strict=False):
            histogram.observe(*values)
