"""What prefetches count."""

from __future__ import annotations

from hicache.flow.context import EngineContext


class PrefetchCounters:
    """Decisions and outcomes."""

    def __init__(self, context: EngineContext) -> None:
        count, histogram = context.metrics.counter, context.metrics.histogram
        self.requests = count("prefetch.requests", "prefetches asked for")
        self.waited = count(
            "prefetch.waited_requests", "requests for which waiting was estimated to be faster than computing"
        )
        self.skipped = count(
            "prefetch.skipped_requests", "requests that did not wait because computing was estimated faster"
        )
        self.gave_up = count(
            "prefetch.gave_up_requests", "requests that stopped waiting because computing the rest was faster"
        )
        self.shared = count("prefetch.shared_requests", "prefetches that joined a read in flight")
        self.postponed = count(
            "prefetch.postponed_requests", "prefetches refused or cut short by host pages or the read queue"
        )
        self.retries = count("prefetch.retries", "attempts to start what was postponed")
        self.estimated_s = count(
            "prefetch.estimated_seconds", "what the waits that came to their end were estimated to take"
        )
        self.waited_s = histogram("prefetch.waited_seconds", "time that a wait took which came to its end")
