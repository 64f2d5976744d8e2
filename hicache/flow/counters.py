"""The metrics of prefetches: decisions, outcomes and pages read. Only the scheduler thread updates these metrics."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hicache.flow.context import EngineContext
from hicache.metrics import Counter, Histogram
from hicache.tiers import Store

log = logging.getLogger(__name__)


class PrefetchCounters:
    """Counters of the decisions and outcomes of prefetches, and of the pages that prefetches read."""

    def __init__(self, context: EngineContext) -> None:
        count, histogram = context.metrics.counter, context.metrics.histogram
        self._share, self._has_been_full = context.config.prefetch_host_share, False

        def outcome(name: str, help: str) -> Counter:
            return count(f"prefetch.{name}_requests", help, "prefetch_outcome_requests", outcome=name)

        self.requests = count("prefetch.requests", "prefetches that were requested")
        self.waited = outcome(
            "waited", "requests that waited because waiting was estimated to cost less than computing"
        )
        self.skipped = outcome("skipped", "requests that did not wait because computing was estimated to cost less")
        self.abandoned = outcome(
            "abandoned",
            "requests that stopped waiting because computing the remaining pages would take less time, or because no "
            "page was read",
        )
        self.overlapped = outcome(
            "overlapped", "requests whose first tokens were computed while their last pages were read"
        )
        self._computed = count(
            "prefetch.overlap_computed_tokens",
            "tokens that requests computed while pages of their later tokens were read",
        )
        self._loaded = count(
            "prefetch.overlap_loaded_tokens",
            "tokens that requests loaded from pages that were read while their first tokens were computed",
        )
        context.metrics.gauge(
            "prefetch.overlap_loaded_ratio",
            "overlap_loaded_tokens divided by the sum of overlap_loaded_tokens and overlap_computed_tokens",
            self._loaded_ratio,
        )
        self.coalesced = outcome("coalesced", "prefetches that waited for a read that another request had started")
        self.deferred = outcome(
            "deferred", "prefetches that waited because no host page was free or the queue of reads was full"
        )
        self.retries = count("prefetch.retries", "repeated attempts to start deferred prefetches")
        self.estimated_s = count("prefetch.estimated_seconds", "estimated duration of completed waits for stores")
        self.waited_s = histogram("prefetch.waited_seconds", "measured duration of completed waits for stores")
        self.lost = count("prefetch.lost_pages", "pages that a store had announced but could not return intact")
        self.read_tokens = count("prefetch.read_tokens", "tokens that prefetches added to the host tier")
        self.refused = count("prefetch.refused_jobs", "read jobs that were not queued because the queue was full")
        moved, took = (
            "bytes of verified pages that a job read from the store to the host",
            "time for which a read job occupied a reader thread",
        )
        self._moved: dict[Store, tuple[Histogram, Histogram]] = {}
        for store in context.stores:
            labels = {"movement": "read", "direction": f"{store.name}_to_host"}
            self._moved[store] = context.metrics.movement(f"{store.prefix}prefetch", moved, took, **labels)

    def count_joined(self, num_computed: int, num_loaded: int) -> None:
        """Count an overlapped request that loaded `num_loaded` tokens after computing `num_computed`."""
        self._computed.value += num_computed
        self._loaded.value += num_loaded

    def _loaded_ratio(self) -> float:
        return self._loaded.value / max(1, self._loaded.value + self._computed.value)

    def count_deferred(self, num_claimed: int, max_pages: int) -> None:
        """Count a request whose prefetch waits for host pages. `num_claimed`: pages that prefetches claim, of the
        `max_pages` that they may claim; 0 if the request waits for another reason."""
        self.deferred.value += 1
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
        """Count read jobs, each as (verified bytes, seconds)."""
        for histogram, values in zip(self._moved[store], zip(*moved, strict=True), strict=False):
            histogram.observe(*values)
