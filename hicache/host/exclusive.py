"""The index of a host that keeps what the device lacks: a host that needs room drops first what the device has as well.

The caller says what comes to the device and what leaves it. The device holds prefixes, so of a run it has the first
pages: `HostRun.on_device` of them. Of these duplicates the one that was used last leaves first, for it will stay on the
device longest, and heads leave though others follow them: who needs those finds the head on the device. What the device
is loading right now is locked, and no duplicate before its copy has ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import attrgetter

from hicache.host.index import PageIndex
from hicache.host.run import RUN_PAGES, HostRun, Pages, RunPart

_STEP_PAGES, _STEP_SHARE = 64, 32


def step_pages(num_pages: int) -> int:
    """How many pages a host of `num_pages` exchanges with the device at a time, while they are in both places."""
    return max(1, min(_STEP_PAGES, num_pages // _STEP_SHARE))


class ExclusiveIndex(PageIndex):
    """See the module. `num_duplicates`: published pages that the device has as well. `num_returned`: pages that were
    dropped as such and have left the device since, so that they have to be copied again."""

    def __init__(
        self,
        pool: Pages,
        policy: str,
        on_come: Callable[[HostRun], None] | None = None,
        on_leave: Callable[[HostRun, Sequence[bytes]], None] | None = None,
        run_pages: int = RUN_PAGES,
    ) -> None:
        super().__init__(pool, policy, on_come, on_leave, run_pages)
        self._duplicates: OrderedDict[HostRun, None] = OrderedDict()  # the last is the next to leave
        self._dropped: set[bytes] = set()  # duplicates that left, while the device has them
        self.num_duplicates = self.num_returned = 0

    def came_to_device(self, parts: Sequence[RunPart]) -> None:
        """The device has these pages of a prompt and all before them; what was copied there is there."""
        for run, skipped, start, end in reversed(parts):
            self._set_on_device(run, max(run.on_device, skipped + end - start))
            self._duplicates.move_to_end(run)

    def left_device(self, keys: Sequence[bytes]) -> None:
        """The device has these no more, which follow each other in a prompt, nor what follows them."""
        if self._dropped:
            returned = self._dropped.intersection(keys)
            self._dropped -= returned
            self.num_returned += len(returned)
        for part in self.parts(keys):
            self._set_on_device(part.run, min(part.run.on_device, part.skipped))

    def duplicates(self) -> list[bytes]:
        """The keys of pages that the device is said to have as well."""
        return [key for run in self._duplicates for key in run.keys[: run.on_device]]

    def touch(self, runs: Sequence[HostRun]) -> None:
        super().touch(runs)
        for run in reversed(runs):
            if run in self._duplicates:
                self._duplicates.move_to_end(run)

    def step_end(self, start: int, end: int, num_needed: int, num_free: int) -> int:
        """Where the next step of a load of pages [start, end) ends, of a request that needs places for `num_needed` on
        the device, which has `num_free`: all, where host and device have room for all who leave; else what is free, or
        a step."""
        if num_free + self.pool.available() + self.num_duplicates >= num_needed:
            return end
        return min(end, start + max(num_free, step_pages(self.pool.num_pages)))

    def divided(self, parts: list[RunPart], end: int) -> list[RunPart]:
        """`parts` of a prompt, whose runs the caller has locked once, with one that ends with page `end`, so that what
        is before that may leave alone: for that a run is divided, unless others have locked it too."""
        at = bisect_left(parts, end, key=attrgetter("end"))
        run, skipped, start, last = parts[at]
        num_followers = sum(child.needs is run for child in run.after if child.locks)
        if not start < end < last or run.locks > 1 + num_followers:
            return parts
        first = self._divide(run, skipped + end - start)
        return [*parts[:at], RunPart(first, skipped, start, end), RunPart(run, 0, end, last), *parts[at + 1 :]]

    # Inside

    def _set_on_device(self, run: HostRun, num_pages: int) -> None:
        followers = [child for child in run.after if child.locks]
        before = sum(child.needs is run for child in followers)
        self.num_duplicates += num_pages - run.on_device
        run.on_device = num_pages
        if num_pages:
            self._duplicates.setdefault(run)
        else:
            self._duplicates.pop(run, None)
        needed = sum(child.needs is run for child in followers)
        self.lock([run] * (needed - before))
        self.unlock([run] * (before - needed))
        if run.is_duplicate and not run.locks:
            self._order.update(run)  # others may follow it, and it may leave

    def _evict(self, num_pages: int) -> list[int]:
        freed = list[int]()
        while len(freed) < num_pages and (run := self._next_duplicate()) is not None:
            num_dropped = min(num_pages - len(freed), run.on_device)
            first = run if num_dropped == len(run.keys) else self._divide(run, num_dropped)
            self._dropped.update(first.keys)
            freed += self._shrink(first, num_dropped)
        return freed + super()._evict(num_pages - len(freed))

    def _next_duplicate(self) -> HostRun | None:
        return next((run for run in reversed(self._duplicates) if not run.locks), None)

    def _divide(self, run: HostRun, num_pages: int) -> HostRun:
        first = super()._divide(run, num_pages)
        if first.on_device:
            self._duplicates[first] = None
            if not run.on_device:
                del self._duplicates[run]
        return first

    def _shrink(self, run: HostRun, num_pages: int) -> list[int]:
        for child in run.after:  # nothing, or the run is a duplicate
            child.parent_run = None
        run.after.clear()
        if num_pages < len(run.keys):
            self._set_on_device(run, min(run.on_device, len(run.keys) - num_pages))
        elif run.on_device:  # `on_leave` may see whether it was a duplicate
            del self._duplicates[run]
            self.num_duplicates -= run.on_device
        return super()._shrink(run, num_pages)
