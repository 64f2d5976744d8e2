"""What events tell of pages on the host and below."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from hicache.host import HostRun
from hicache.metrics import Metrics
from hicache.tree.events import EventLog
from hicache.tree.names import PromptPages

log = logging.getLogger(__name__)


def told_of(run: HostRun, which: Sequence[bool] | None = None) -> Iterator[tuple[PromptPages, list[bool]]]:
    """The pages of a run of full pages, those for which `which` is true (None: all), in pieces that follow each
    other."""
    about: PromptPages = run.about
    start = 0
    for end in range(1, len(run.places) + 1):
        if end == len(run.places) or run.places[end] != run.places[end - 1] + 1:
            pages = about.part(run.places[start], run.places[end - 1] + 1)
            yield pages, [True] * (end - start) if which is None else list(which[start:end])
            start = end


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
            for pages, which in told_of(run):
                self._events.stored(pages, "CPU", which)

    def left(self, run: HostRun, keys: Sequence[bytes]) -> None:
        if self._has_stores and not run.stored and not self._lost.value:
            log.warning("tokens leave the host before a store has them; raise host_bytes, or use a faster disk")
        (self._demoted if run.stored else self._lost).value += len(keys) * self._page_tokens
        if self._events is not None:
            self._events.removed(keys, "CPU")
