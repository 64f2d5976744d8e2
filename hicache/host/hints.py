"""What requests say of pages on the host: that they will need them, how often, or no more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from hicache.eviction.orders import EvictionOrder, Keep
from hicache.host.run import HostRun, path_of


class PageHints:
    """The part of an index that hints change: the order of its runs, and no more."""

    def __init__(self, order: EvictionOrder[HostRun]) -> None:
        self._order = order
        self._runs: dict[bytes, HostRun] = {}  # of a key that several bring the published one

    def expect(self, runs: Iterable[HostRun], change: int) -> None:
        """`change` more (1) or fewer (-1) queued requests will need these."""
        for run in runs:
            if run.is_published:
                self._order.expect(run, change)

    def expect_uses(self, keys: Sequence[bytes], num_uses: int) -> None:
        """These pages, those on their way too, will be asked for `num_uses` times; counts under the policy auto
        alone."""
        for run in dict.fromkeys(self._runs[key] for key in keys if key in self._runs):
            run.expected_uses = max(run.expected_uses, num_uses)
            self._tell_uses(run)

    def end_session(self, keys: Sequence[bytes]) -> None:
        """These pages, those on their way too, will not be asked for again: they leave first, until somebody uses them,
        and are not worth storing. A run that has others as well is left alone."""
        ended = {*keys}
        for run in dict.fromkeys(self._runs[key] for key in keys if key in self._runs):
            if ended.issuperset(run.keys):
                self._order.end(run)

    def keep(self, keys: Sequence[bytes]) -> list[Keep]:
        """The pages of this prompt leave after all others of its namespace, until they are used or the keep ends."""
        last = next((self._runs[key] for key in reversed(keys) if key in self._runs), None)
        if last is None or last.after:
            return []
        alone = list(takewhile(lambda run: run is last or len(run.after) == 1, reversed(path_of(last))))
        return [self._order.keep(last, sum(len(run.keys) for run in alone))]

    def raise_priority(self, runs: Iterable[HostRun], priority: int) -> None:
        """A request of `priority` uses these: none has a lower one from now on."""
        for run in runs:
            if run.priority < priority:
                run.priority = priority
                self._order.update(run)

    def _tell_uses(self, run: HostRun) -> None:
        """What was said of its uses counts once it is there."""
        if run.is_published and run.expected_uses != 1.0:
            self._order.expect_uses(run, run.expected_uses)
            run.expected_uses = 1.0
