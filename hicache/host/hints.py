"""What requests say of pages on the host: that they will need them, how often, or no more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hicache.eviction.orders import EvictionOrder
from hicache.host.run import HostRun


class PageHints:
    """The part of an index that hints change: the order of its runs, and no more."""

    def __init__(self, order: EvictionOrder[HostRun]) -> None:
        self._order = order
        self._runs: dict[bytes, HostRun] = {}  # of a key that several bring the published one

    @property
    def num_kept(self) -> int:
        """Pages with a deadline, see `keep`."""
        return self._order.num_kept

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

    def keep(self, keys: Sequence[bytes], until_s: float, limit: float) -> None:
        """Evict the pages of this prompt, also those in flight, after plain ones until a deadline, see
        `EvictionOrder.keep`."""
        runs = dict.fromkeys(self._runs[key] for key in reversed(keys) if key in self._runs)
        self._order.keep({run: len(run.keys) for run in runs}, until_s, limit)

    def expire(self, now_s: float) -> None:
        """End the deadlines up to now."""
        self._order.expire(now_s)

    def raise_priority(self, runs: Iterable[HostRun], priority: int) -> None:
        """A request of `priority` uses these: none has a lower one from now on."""
        for run in runs:
            if run.priority < priority:
                run.priority = priority
                self._order.update(run)

    def _kept_violations(self, in_flight: Iterable[HostRun]) -> list[str]:
        """Where the order counts other deadlines than those of the runs that are held or `in_flight`."""
        kept = {run: len(run.keys) for run in {*self._runs.values(), *in_flight} if run.keep is not None}
        if self._order.kept == kept and self.num_kept == sum(kept.values()):
            return []
        return [f"{self.num_kept} pages were counted as kept, {sum(kept.values())} are"]

    def _tell_uses(self, run: HostRun) -> None:
        """What was said of its uses counts once it is there."""
        if run.is_published and run.expected_uses != 1.0:
            self._order.expect_uses(run, run.expected_uses)
            run.expected_uses = 1.0
