"""What must hold of the runs of one index, for `PageIndex.check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import NamedTuple

from hicache.host.run import HostRun, held_by


class Counts(NamedTuple):
    """Pages as an index and its pool have counted them. `raw`: published ones with a second place."""

    published: int
    raw: int
    in_flight: int
    evictable: int
    free: int
    total: int


def index_violations(runs: Set[HostRun], in_order: Set[HostRun], counts: Counts, locks: Counter[HostRun]) -> list[str]:
    """Where published `runs`, those `in_order` of eviction among them, share a page, have locks of nobody, or were
    counted wrongly. `locks`: by run, those of movements, also on what they write to, which is in flight."""
    found, held = [], held_by(runs)
    in_flight = held_by(run for run in locks if not run.is_published)
    if len({*held, *in_flight}) < len(held) + len(in_flight) or len(held) - counts.raw != counts.published:
        found.append("two keys share a host page, or a run and the index disagree")
    if any(not run.second_pages.keys() <= {*run.keys} for run in runs):
        found.append("a second page is kept for a page that left")
    if len(held) + counts.in_flight + counts.free != counts.total:
        found.append(
            f"{len(held)} pages are held, {counts.in_flight} in flight and {counts.free} free of {counts.total}"
        )
    if counts.in_flight != len(in_flight):
        found.append(f"{counts.in_flight} pages are in flight, {len(in_flight)} of copies and reads")
    for run in {**locks, **dict.fromkeys(runs)}:
        wanted = locks[run] + sum(child.locks > 0 and child.needs is run for child in run.after)
        if run.locks != wanted:
            found.append(f"a run of {len(run.keys)} pages has {run.locks} locks, {wanted} are somebody's")
    if in_order != {run for run in runs if not run.locks}:
        found.append("the eviction order is not exactly the runs that are not locked")
    if counts.evictable != sum(run.num_held for run in runs if not run.locks):
        found.append(f"{counts.evictable} pages were counted as evictable")
    return found
