"""Making room: which pages leave a tier so that others can enter.

A victim gives up only as many pages as are asked for, tail first: the front of a long prefix outlives its end. On the
device a victim that the host holds too is demoted; one that it does not is saved first where the write policy says so,
else it is gone from memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hicache.flow.base import Parts
from hicache.tree.node import PageState, Tier, TreeNode


class Evictor:
    """Called by the other flows, on the scheduler thread. `save`: copies a node to the host and returns when it is
    there."""

    def __init__(self, parts: Parts, save: Callable[[TreeNode], None] | None) -> None:
        self._parts, self._save = parts, save
        count = parts.metrics.counter
        self._demoted = count("evict.device_demoted_tokens", "tokens that left the device and stayed on the host")
        self._evicted = count("evict.device_lost_tokens", "tokens that left the device without a copy on the host")
        self._host_evicted = count("evict.host_tokens", "tokens that left the host")
        self._never_stored = count("evict.unstored_tokens", "tokens that left the host before the disk had them")

    def device_slots(self, num_tokens: int) -> torch.Tensor | None:
        """`num_tokens` slots in whole device pages, after evicting what it takes; `None` when that is not enough."""
        allocator = self._parts.allocator
        freed: list[torch.Tensor] = []
        short = num_tokens - allocator.available_size()
        while short > 0:
            node = self._tail(Tier.DEVICE, short)
            if node is None:
                break
            if node.state is PageState.DEVICE and self._save is not None:
                self._save(node)
            counter = self._demoted if node.state is PageState.BOTH else self._evicted
            freed.append(self._parts.tree.drop(node, Tier.DEVICE))
            short -= len(freed[-1])
            counter.value += len(freed[-1])
        if freed:
            allocator.free_run(torch.cat(freed))
        return None if short > 0 else allocator.alloc(num_tokens)

    def host_pages(self, num_pages: int) -> torch.Tensor | None:
        """`num_pages` host pages, after evicting what it takes; `None` when that is not enough."""
        host, tree = self._parts.host, self._parts.tree
        assert host is not None
        if num_pages > host.available() + tree.evictable(Tier.HOST) // tree.page_size:
            return None
        while (short := num_pages - host.available()) > 0:
            node = self._tail(Tier.HOST, short * tree.page_size)
            if node is None:
                return None
            pages = tree.drop(node, Tier.HOST)
            host.free(pages)
            self._host_evicted.value += len(pages) * tree.page_size
            if self._parts.disk is not None and not node.stored:
                self._never_stored.value += len(pages) * tree.page_size
        return host.alloc(num_pages)

    def _tail(self, tier: Tier, num_tokens: int) -> TreeNode | None:
        """The next victim, cut down to its last pages when fewer than all of them are needed."""
        tree = self._parts.tree
        node = tree.victim(tier)
        if node is None:
            return None
        whole = -(-num_tokens // tree.page_size) * tree.page_size
        return node if len(node.key) <= whole else tree.cut_tail(node, len(node.key) - whole)
