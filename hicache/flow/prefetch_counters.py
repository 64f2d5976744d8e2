"""What prefetches count."""

from __future__ import annotations

from hicache.flow.context import EngineContext
from hicache.metrics import Counter


class PrefetchCounters:
    """Decisions and outcomes."""

    def __init__(self, context: EngineContext) -> None:
        count, histogram = context.metrics.counter, context.metrics.histogram

        def outcome(name: str, help: str) -> Counter:
            return count(f"prefetch.{name}_requests", help, "prefetch_outcome_requests", outcome=name)

        self.requests = count("prefetch.requests", "prefetches asked for")
        self.waited = outcome("waited", "requests for which waiting was estimated to be faster than computing")
        self.skipped = outcome("skipped", "requests that did not wait because computing was estimated faster")
        self.gave_up = outcome("gave_up", "requests that stopped waiting because computing the rest was faster")
        self.shared = outcome("shared", "prefetches that joined a read in flight")
        self.postponed = outcome("postponed", "prefetches refused or cut short by host pages or the read queue")
        self.retries = count("prefetch.retries", "attempts to start what was postponed")
        self.estimated_s = count(
            "prefetch.estimated_seconds", "what the waits that came to their end were estimated to take"
        )
        self.waited_s = histogram("prefetch.waited_seconds", "time that a wait took which came to its end")
