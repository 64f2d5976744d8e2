"""What events tell of pages on the host and below."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hicache.host import HostRun
from hicache.metrics import Metrics
from hicache.tree.events import EventLog
from hicache.tree.names import PromptPages

log = logging.getLogger(__name__)


def told_of(run: HostRun) -> PromptPages:
    """The pages of a run of full pages."""
    about: PromptPages = run.about
    return about.part(run.place, run.place + len(run.keys))


class HostWatch:
    """Counts full pages that leave the host, and tells events of those that come and leave."""

    def __init__(self, metrics: Metrics, page_tokens: int, *, has_stores: bool, events: EventLog | None) -> None:
        self._page_tokens, self._has_stores, self._events = page_tokens, has_stores, events
        self._demoted, self._lost = (
            metrics.counter(f"evict.host_{outcome}_tokens", help, "evict_tokens", tier="host", outcome=outcome)
            for outcome, help in (
                ("demoted", "tokens evicted from the host that a store holds"),
                ("lost", "tokens evicted from the host that no store is known to hold"),
            )
        )

    def came(self, run: HostRun) -> None:
        if self._events is not None:
            self._events.stored(told_of(run), "CPU")

    def left(self, run: HostRun, keys: Sequence[bytes]) -> None:
        if self._has_stores and not run.stored and not self._lost.value:
            log.warning("tokens leave the host before a store has them; raise host_bytes, or use a faster disk")
        (self._demoted if run.stored else self._lost).value += len(keys) * self._page_tokens
        if self._events is not None:
            self._events.removed(keys, "CPU")
