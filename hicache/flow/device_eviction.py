"""Capacity on the device: what is least worth keeping leaves.

What the host has is loaded again when it is needed; what it has not is copied there first where the write policy says
so, all victims together, and is lost otherwise.
"""

from __future__ import annotations

from hicache.flow.backup import Backup, Unsaved
from hicache.flow.components import CacheComponent
from hicache.flow.context import EngineContext
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
        released, unsaved, victims = list[Released](), list[Unsaved](), list[TreeNode]()
        short = size - component.available()
        if short <= 0:
            return True
        try:
            while short > 0 and (node := component.device_victim(short)) is not None:
                if self._backup is not None:
                    unsaved += self._backup.unsaved(node)
                victims.append(node)
                left = tree.drop(node, name)
                released += left
                short -= sum(item.size for item in left if item.component == name)
            if self._backup is not None:
                self._backup.save(unsaved)
            for node in victims:
                component.count_eviction(node)
        finally:
            self._context.free(released)
        return size <= component.available()
