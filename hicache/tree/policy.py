"""Eviction policies by name: how each ranks nodes, and the order that a tree keeps them in.

Owns the table of policies. A new one is a file that imports `hicache.tree.orders` and a line in `ORDERS`.

May import errors and, of its package, node and orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hicache.errors import ConfigError
from hicache.tree.node import TreeNode
from hicache.tree.orders import EvictionOrder, EvictionStrategy, MayGo, PriorityHeap, RecencyList

__all__ = [
    "ORDERS",
    "EvictionOrder",
    "EvictionStrategy",
    "FIFOStrategy",
    "FILOStrategy",
    "LFUStrategy",
    "LRUStrategy",
    "MRUStrategy",
    "OrderFactory",
    "PriorityHeap",
    "PriorityStrategy",
    "RecencyList",
    "SLRUStrategy",
    "get_eviction_strategy",
    "make_order",
]

OrderFactory = Callable[[int, MayGo], EvictionOrder]


class LRUStrategy(EvictionStrategy):
    """The least recently used goes first."""

    def get_priority(self, node: TreeNode) -> int:
        return node.last_access_time


class LFUStrategy(EvictionStrategy):
    """The least often used goes first; of equals, the least recently used."""

    def get_priority(self, node: TreeNode) -> tuple[int, int]:
        return node.hit_count, node.last_access_time


class FIFOStrategy(EvictionStrategy):
    """The oldest goes first."""

    def get_priority(self, node: TreeNode) -> int:
        return node.creation_time


class MRUStrategy(EvictionStrategy):
    """The most recently used goes first."""

    def get_priority(self, node: TreeNode) -> int:
        return -node.last_access_time


class FILOStrategy(EvictionStrategy):
    """The youngest goes first."""

    def get_priority(self, node: TreeNode) -> int:
        return -node.creation_time


class PriorityStrategy(EvictionStrategy):
    """The lowest `priority` that requests gave goes first; of equals, the least recently used."""

    def get_priority(self, node: TreeNode) -> tuple[int, int]:
        return node.priority, node.last_access_time


class SLRUStrategy(EvictionStrategy):
    """What was used fewer than `protected_threshold` times goes first; of both segments, the least recently used."""

    def __init__(self, protected_threshold: int = 2) -> None:
        self.protected_threshold = protected_threshold

    def get_priority(self, node: TreeNode) -> tuple[bool, int]:
        return node.hit_count >= self.protected_threshold, node.last_access_time


_STRATEGIES: dict[str, type[EvictionStrategy]] = {
    "lru": LRUStrategy,
    "lfu": LFUStrategy,
    "fifo": FIFOStrategy,
    "mru": MRUStrategy,
    "filo": FILOStrategy,
    "priority": PriorityStrategy,
    "slru": SLRUStrategy,
}


def _recency(place: int, may_go: MayGo) -> EvictionOrder:
    return RecencyList(place)


def _ranked(name: str) -> OrderFactory:
    return lambda place, may_go: PriorityHeap(_STRATEGIES[name](), may_go)


# What a tree's `policy` may name.
ORDERS: dict[str, OrderFactory] = {
    "lru": _recency,
    "lfu": _ranked("lfu"),
    "fifo": _ranked("fifo"),
    "mru": _ranked("mru"),
    "filo": _ranked("filo"),
    "priority": _ranked("priority"),
    "slru": _ranked("slru"),
}


def make_order(name: str, place: int, may_go: MayGo) -> EvictionOrder:
    """An empty order of the policy `name`, in any case, for one place. `may_go`: whether a node may be a victim now.

    ConfigError for an unknown name.
    """
    factory = ORDERS.get(name.lower())
    if factory is None:
        raise _unknown(name, ORDERS)
    return factory(place, may_go)


def get_eviction_strategy(name: str) -> EvictionStrategy:
    """The strategy `name`, in any case. ConfigError for an unknown name."""
    strategy = _STRATEGIES.get(name.lower())
    if strategy is None:
        raise _unknown(name, _STRATEGIES)
    return strategy()


def _unknown(name: str, names: Iterable[str]) -> ConfigError:
    return ConfigError(f"eviction_policy={name!r} is unknown; use one of {', '.join(sorted(names))}")
