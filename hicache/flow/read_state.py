"""What is known of one read of a prefix in flight."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from hicache.flow.components import CacheComponent
from hicache.flow.disk_prefix import DiskPrefix, Found
from hicache.tiers import FULL, Store
from hicache.tree.node import TreeNode


@dataclass
class Batch:
    """Pages of a component that one job reads from a store: `indices` in the prompt, `pages` of the host pool."""

    store: Store
    component: CacheComponent
    indices: list[int]
    pages: torch.Tensor
    ok: tuple[bool, ...] | None = None


@dataclass(eq=False)
class PrefixRead:
    """One read in flight. `anchor`: the node, locked on the host, behind which full pages are inserted.

    [prefix.num_host_pages, landed_end)   full pages of the prompt that have landed
    [landed_end, end)                     full pages that are read
    [end, found_end)                      pages of use that the stores hold, and for which no host page was free

    `found`: the stores' answers, from which `end` and `found_end` follow; before, they are all pages of the prompt.
    `partial`: the answers so far; `asked`: how many stores were asked. `batches`: jobs that read, full pages first;
    `next_batch`: the first that was not inserted. `outstanding`: jobs that were not answered; `stalled`: the batches of
    those whose thread is stalled. `failed`: nothing more can be inserted.
    `other_bytes`: of windows and states that are being read, by store. `is_short`: another read could bring more.
    `is_held_up`: what has arrived can be inserted once the copy of `anchor` to the host has ended.
    """

    number: int
    prefix: DiskPrefix
    anchor: TreeNode
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
    is_held_up: bool = False

    @property
    def is_live(self) -> bool:
        """Whether it may bring anything more."""
        return not (self.failed or self.cancelled.is_set())

    @property
    def is_done(self) -> bool:
        """Whether all its readers are done, but for stalled ones, and nothing that they brought waits."""
        return self.outstanding == len(self.stalled) and not (self.is_held_up and self.is_live)

    @property
    def can_go_on(self) -> bool:
        """Whether it was held up, and is no longer."""
        return self.is_held_up and (self.anchor.pending(FULL) is None or not self.is_live)

    @property
    def has_landed(self) -> bool:
        """Whether it has brought anything."""
        return self.landed_end > self.prefix.num_host_pages

    def bytes_left(self, end: int, store: Store) -> int:
        """Bytes that have not landed of the first `end` pages, and come from `store`."""
        if self.found is None:
            return 0
        start = self.prefix.num_host_pages
        num_pages = self.found.pages[self.landed_end - start : max(0, min(end, self.end) - start)].count(store)
        others = self.other_bytes.get(store, 0) if end >= self.end else 0
        return num_pages * self.prefix.context.full.host.page_bytes + others
