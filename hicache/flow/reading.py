"""One read in flight: what it brings of a prompt's prefix, and how far it has come. See `hicache.flow.prefix_read`."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hicache.flow.components import CacheComponent
from hicache.flow.located import Found, StorePrefix
from hicache.host import HostRun
from hicache.tiers import Component, Store


class PlannedJob(NamedTuple):
    """Pages of a component to be read from a store: `indices` in the prompt."""

    component: CacheComponent
    store: Store
    indices: list[int]


@dataclass
class Batch:
    """Pages of a component that one job reads from a store: `indices` in the prompt, and the host pages that were
    reserved for them, `pages` and their `runs`. `ok`: which came; None: not known."""

    store: Store
    component: CacheComponent
    indices: list[int]
    runs: list[HostRun]
    pages: torch.Tensor
    ok: tuple[bool, ...] | None = None


@dataclass(eq=False)
class PrefixRead:
    """One read in flight.

    [prefix.start, landed_end)   full pages of the prompt that have landed, or were there
    [landed_end, end)            full pages that are read
    [end, found_end)             pages of use that the stores hold, and for which no host page was free

    `locked`: runs of the host that it continues, by component. `found`: the stores' answers, from which `end` and
    `found_end` follow; before, they are all pages of the prompt. `partial`: the answers so far; `asked`: how many
    stores were asked. `planned`: jobs for which no host page was reserved yet; `batches`: those that read, full pages
    first; `next_batch`: the first of full pages that has not ended. `outstanding`: jobs that were not answered;
    `stalled`: the batches of those whose thread is stalled. `failed`: nothing more is of use. `other_bytes`: of windows
    and states that are to land, by store. `is_short`: another read could bring more.
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
    planned: deque[PlannedJob] = field(default_factory=deque)
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
        """Whether nothing is planned, and all its readers are done, but for stalled ones."""
        return not self.planned and self.outstanding == len(self.stalled)

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
