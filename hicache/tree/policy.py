"""Eviction policies by name: how each ranks nodes, and the order that a tree keeps them in.

A policy of one's own is a file that imports `hicache.tree.orders` and an entry in `ORDERS`.
"""

from __future__ import annotations

from collections.abc import Iterable

from hicache.errors import ConfigError
from hicache.tiers import Component, Tier
from hicache.tree.frequency import FadingFrequency, UsageLog
from hicache.tree.orders import (
    EvictionOrder,
    EvictionStrategy,
    IsEvictable,
    OrderFactory,
    RecencyList,
    Usage,
    ranked,
)


class LRUStrategy(EvictionStrategy):
    """The least recently used goes first."""

    def get_priority(self, node: Usage) -> int:
        return node.last_access_time


class LFUStrategy(EvictionStrategy):
    """The least often used goes first; of equals, the least recently used."""

    def get_priority(self, node: Usage) -> tuple[int, int]:
        return node.hit_count, node.last_access_time


class FIFOStrategy(EvictionStrategy):
    """The oldest goes first."""

    def get_priority(self, node: Usage) -> int:
        return node.creation_time


class MRUStrategy(EvictionStrategy):
    """The most recently used goes first."""

    def get_priority(self, node: Usage) -> int:
        return -node.last_access_time


class FILOStrategy(EvictionStrategy):
    """The youngest goes first."""

    def get_priority(self, node: Usage) -> int:
        return -node.creation_time


class PriorityStrategy(EvictionStrategy):
    """The lowest `priority` that requests gave goes first; of equals, the least recently used."""

    def get_priority(self, node: Usage) -> tuple[int, int]:
        return node.priority, node.last_access_time


class SLRUStrategy(EvictionStrategy):
    """What was used fewer than `protected_threshold` times goes first; of both segments, the least recently used."""

    def __init__(self, protected_threshold: int = 2) -> None:
        self.protected_threshold = protected_threshold

    def get_priority(self, node: Usage) -> tuple[bool, int]:
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


def _recency(component: Component, tier: Tier, is_evictable: IsEvictable) -> EvictionOrder:
    return RecencyList(component, tier, is_evictable)


def _auto(component: Component, tier: Tier, is_evictable: IsEvictable) -> EvictionOrder:
    return FadingFrequency(UsageLog(component, tier), is_evictable)


# What a tree's `policy` may name. A list keeps lru in order at O(1) an event, where a heap takes O(log n).
ORDERS: dict[str, OrderFactory] = {
    "auto": _auto,
    **{name: ranked(strategy) for name, strategy in _STRATEGIES.items()},
    "lru": _recency,
}


def make_orders(
    name: str, component: Component, tier: Tier, is_evictable: IsEvictable
) -> tuple[EvictionOrder, EvictionOrder]:
    """Two empty orders of the policy `name` for one account, which may share what they know. As `make_order`."""
    first = make_order(name, component, tier, is_evictable)
    second = first.sibling() if isinstance(first, FadingFrequency) else make_order(name, component, tier, is_evictable)
    return first, second


def make_order(name: str, component: Component, tier: Tier, is_evictable: IsEvictable) -> EvictionOrder:
    """An empty order of the policy `name`, in any case. `is_evictable`: whether a node may be a victim now.

    ConfigError for an unknown name.
    """
    factory = ORDERS.get(name.lower())
    if factory is None:
        raise _unknown(name, ORDERS)
    return factory(component, tier, is_evictable)


def get_eviction_strategy(name: str) -> EvictionStrategy:
    """The strategy `name`, in any case. ConfigError for an unknown name."""
    strategy = _STRATEGIES.get(name.lower())
    if strategy is None:
        raise _unknown(name, _STRATEGIES)
    return strategy()


def _unknown(name: str, names: Iterable[str]) -> ConfigError:
    return ConfigError(f"eviction_policy={name!r} is unknown; use one of {', '.join(sorted(names))}")
