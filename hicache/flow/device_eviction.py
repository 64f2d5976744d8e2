"""Capacity on the device: what is least worth keeping leaves.

A node that the host holds too is demoted; one that it does not is copied there first where the write policy says so,
and is lost otherwise.
"""

from __future__ import annotations

from hicache.flow.backup import Backup
from hicache.flow.components import CacheComponent
from hicache.flow.context import EngineContext
from hicache.tiers import DEVICE, HOST
from hicache.tree.base import Released
from hicache.tree.node import TreeNode


class DeviceEviction:
    """Owned by the scheduler thread. `backup`: None without a host tier."""

    def __init__(self, context: EngineContext, backup: Backup | None) -> None:
        self._context = context
        self._backup = backup if context.write_policy.at_eviction else None

    def make_available(self, component: CacheComponent, size: int) -> bool:
        """Evict until `size` tokens or states of a component are free; False when that cannot be."""
        tree, name = self._context.tree, component.name
        released: list[Released] = []
        short = size - component.available()
        if short <= 0:
            return True
        try:
            while short > 0 and (node := component.device_victim(short)) is not None:
                self._save(node, component)
                component.count_eviction(node)
                left = tree.drop(node, name, DEVICE)
                released += left
                short -= sum(item.size for item in left if item.component == name and item.tier is DEVICE)
        finally:
            self._context.free(released)
        return size <= component.available()

    def _save(self, node: TreeNode, component: CacheComponent) -> None:
        if self._backup is not None and not node.holds(component.name, HOST):
            self._backup.backup_now(node)
