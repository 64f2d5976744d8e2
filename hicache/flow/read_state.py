"""What is known of one read of a prefix in flight."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from hicache.flow.components import CacheComponent
from hicache.flow.store_prefix import Found, StorePrefix
from hicache.host import HostRun, PageKind
from hicache.tiers import Component, Store


@dataclass
class Batch:
    """Pages of a component that one job reads from a store: `indices` in the prompt, and the `runs` of host pages that
    were reserved for them. `ok`: which came; None: not known. `first_ok`: which packed pages came, and which first
    parts of raw ones, whose second parts come next."""

    store: Store
    component: CacheComponent
    indices: list[int]
    runs: list[HostRun]
    ok: tuple[bool, ...] | None = None
    first_ok: dict[bytes, bool] | None = None

    def take_first(self, ok: Sequence[bool], kinds: Sequence[int]) -> dict[HostRun, list[bytes]]:
        """The first job has brought pages of these kinds. Returns, by run, keys of those that have a second part."""
        keys = [key for run in self.runs for key in run.keys]
        whole = (PageKind.PACKED, PageKind.RAW)
        self.first_ok = {key: at < len(ok) and ok[at] and kinds[at] in whole for at, key in enumerate(keys)}
        raw = {key for key, kind in zip(keys, kinds, strict=True) if kind == PageKind.RAW and self.first_ok[key]}
        return {run: found for run in self.runs if (found := [key for key in run.keys if key in raw])}

    def lack(self, keys: Sequence[bytes]) -> None:
        """The second parts of these cannot be had."""
        assert self.first_ok is not None
        self.first_ok.update(dict.fromkeys(keys, False))

    def whole(self, rest_ok: Sequence[bool]) -> tuple[bool, ...]:
        """Which pages came whole: with the second parts that came, in the order of the runs."""
        assert self.first_ok is not None
        raw = [key for run in self.runs for key in run.rest]
        self.lack([key for at, key in enumerate(raw) if not (at < len(rest_ok) and rest_ok[at])])
        return tuple(self.first_ok.values())


@dataclass(eq=False)
class PrefixRead:
    """One read in flight.

    [prefix.start, landed_end)   full pages of the prompt that have landed, or were there
    [landed_end, end)            full pages that are read
    [end, found_end)             pages of use that the stores hold, and for which no host page was free

    `locked`: runs of the host that it continues, by component. `found`: the stores' answers, from which `end` and
    `found_end` follow; before, they are all pages of the prompt. `partial`: the answers so far; `asked`: how many
    stores were asked. `batches`: jobs that read, full pages first; `next_batch`: the first of full pages that has not
    ended. `outstanding`: jobs that were not answered; `stalled`: the batches of those whose thread is stalled.
    `failed`: nothing more is of use. `other_bytes`: of windows and states that are being read, by store. `is_short`:
    another read could bring more.
    """

    number: int
    prefix: StorePrefix
    locked: dict[Component, list[HostRun]]
    is_urgent: bool
    until_s: float
    landed_end: int
    end: int
    found_end: int
    partial: Found
    asked: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    batches: list[Batch] = field(default_factory=list)
    stalled: set[int] = field(default_factory=set)
    found: Found | None = None
    next_batch: int = 0
    outstanding: int = 0
    other_bytes: dict[Store, int] = field(default_factory=dict)
    failed: bool = False
    is_short: bool = False

    @property
    def is_live(self) -> bool:
        """Whether it may bring anything more."""
        return not (self.failed or self.cancelled.is_set())

    @property
    def is_done(self) -> bool:
        """Whether all its readers are done, but for stalled ones."""
        return self.outstanding == len(self.stalled)

    @property
    def has_landed(self) -> bool:
        """Whether it has brought anything."""
        return self.landed_end > self.prefix.start

    def bytes_left(self, end: int, store: Store) -> int:
        """Bytes that have not landed of the first `end` pages, and come from `store`."""
        if self.found is None:
            return 0
        stores = self.prefix.stores_of(self.found, self.landed_end, min(end, self.end))
        others = self.other_bytes.get(store, 0) if end >= self.end else 0
        return list(stores).count(store) * self.prefix.located.context.full.host.page_bytes + others
