"""Which of several disks gets a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hicache.host.run import HostRun
from hicache.stores.tier import StoreTier
from hicache.tiers import Store

_REMEMBERED = 1 << 16  # pages
_KEEP = 0.99  # what the writes so far weigh when another one ends
_MEASURED_BYTES, _ALIKE = 64 << 20, 1.5  # what tells a rate, and by how much those of disks that are alike may differ


class Placement:
    """Each run is written to one disk: to the one that is known to have its pages, which then costs nothing; else they
    have their turns, by the rates at which they take pages, so that prompts lie on all. One that takes nothing now has
    no turn. Owned by the scheduler thread.
    """

    def __init__(self, stores: Mapping[Store, StoreTier]) -> None:
        self._tiers = {store: tier for store, tier in stores.items() if store.is_disk}
        self._written = dict.fromkeys(self._tiers, (0.0, 0.0))  # bytes and seconds of recent writes
        # Pages of each over its part of all rates; a disk that takes nothing does not make up for that later.
        self._turns = dict.fromkeys(self._tiers, 0.0)
        self._known = dict[bytes, Store]()  # by page key, what was told last at the end

    def takes(self, store: Store, run: HostRun) -> bool:
        """Whether a run goes to `store`, unless another has it."""
        if not store.is_disk or len(self._tiers) == 1:
            return True
        if run.disk is None or self._tiers[run.disk].writes.refuses():
            takes = [other for other, tier in self._tiers.items() if not tier.writes.refuses()]
            run.disk = self._choose(run, takes) if takes else run.disk
        return run.disk == store

    def note(self, store: Store, keys: Iterable[bytes]) -> None:
        """A disk has these pages."""
        if store.is_disk and len(self._tiers) > 1:
            for key in keys:
                self._known.pop(key, None)
                self._known[key] = store
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]

    def observe(self, store: Store, num_bytes: int, seconds: float) -> None:
        """So many bytes were written, all of them new."""
        if store.is_disk:
            before_bytes, before_s = self._written[store]
            self._written[store] = _KEEP * before_bytes + num_bytes, _KEEP * before_s + seconds

    def _choose(self, run: HostRun, takes: Sequence[Store]) -> Store:
        if (known := self._known.get(run.keys[0])) is not None and known in takes:
            return known
        parts = self._parts()
        floor = min(self._turns[store] for store in takes)
        ends = dict[Store, float]()
        for store, turn in self._turns.items():
            if store in takes:
                ends[store] = turn + len(run.keys) / parts[store]
            else:
                self._turns[store] = max(turn, floor)
        chosen = min(ends, key=lambda store: ends[store])
        self._turns[chosen] = ends[chosen]
        return chosen

    def _parts(self) -> dict[Store, float]:
        """Of all pages those of each disk."""
        rates = dict.fromkeys(self._tiers, 1.0)
        if all(num_bytes >= _MEASURED_BYTES and seconds for num_bytes, seconds in self._written.values()):
            measured = {store: num_bytes / seconds for store, (num_bytes, seconds) in self._written.items()}
            rates = rates if max(measured.values()) < _ALIKE * min(measured.values()) else measured
        return {store: rate / sum(rates.values()) for store, rate in rates.items()}
