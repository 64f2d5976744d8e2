"""Capacity on the host: the least recently used pages leave, the last of a prefix first."""

from __future__ import annotations

import logging

import torch

from hicache.flow.components import CacheComponent
from hicache.flow.context import EngineContext
from hicache.tiers import DEVICE, FULL, HOST

log = logging.getLogger(__name__)


class HostEviction:
    """Owned by the scheduler thread."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._demoted, self._lost = (
            context.metrics.counter(f"evict.host_{outcome}_tokens", help, "evict_tokens", tier="host", outcome=outcome)
            for outcome, help in (
                ("demoted", "tokens evicted from the host that device or disk still hold"),
                ("lost", "tokens evicted from the host that no other tier holds"),
            )
        )

    def capacity(self, component: CacheComponent) -> int:
        """Host pages of a component that are free or evictable."""
        tree = self._context.tree
        return component.host.available() + tree.evictable(component.name, HOST) // component.page_size

    def alloc(self, component: CacheComponent, num_pages: int) -> torch.Tensor | None:
        """`num_pages` pages of a component's host pool, after evictions; `None`, and nothing evicted, when short."""
        host, tree = component.host, self._context.tree
        if num_pages > self.capacity(component):
            return None
        while (short := num_pages - host.available()) > 0:
            node = component.host_victim(short)
            if node is None:
                return None
            is_held = node.is_stored(FULL) or node.holds(FULL, DEVICE)
            released = tree.drop(node, component.name, HOST)
            self._context.free(released)
            tokens = sum(item.size for item in released if item.component == FULL and item.tier is HOST)
            if not is_held and self._context.stores and not self._lost.value:
                log.warning("tokens leave the host before a store has them; raise host_bytes, or use a faster disk")
            (self._demoted if is_held else self._lost).value += tokens
        return host.alloc(num_pages)
