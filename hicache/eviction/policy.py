"""Eviction policies by name: how each ranks what is held.

A policy of one's own is a file that imports `hicache.eviction.orders` and an entry in `EVICTION_POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hicache.errors import ConfigError
from hicache.eviction.frequency import FadingFrequency
from hicache.eviction.orders import EvictionOrder, EvictionPolicy, EvictionStrategy, R, Usage


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

# What `eviction_policy` may name; each order has a policy of its own.
EVICTION_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"auto": FadingFrequency, **_STRATEGIES}


def make_order(name: str, is_evictable: Callable[[R], bool]) -> EvictionOrder[R]:
    """An empty order of the policy `name`, in any case. `is_evictable`: whether a record may be a victim now.

    ConfigError for an unknown name.
    """
    return EvictionOrder(policy_named(name), is_evictable)


def policy_named(name: str, setting: str = "eviction_policy") -> EvictionPolicy:
    """A new policy `name`, in any case. ConfigError for an unknown name, which `setting` gave."""
    policy = EVICTION_POLICIES.get(name.lower())
    if policy is None:
        raise _unknown(name, EVICTION_POLICIES, setting)
    return policy()


def get_eviction_strategy(name: str) -> EvictionStrategy:
    """The strategy `name`, in any case. ConfigError for an unknown name."""
    strategy = _STRATEGIES.get(name.lower())
    if strategy is None:
        raise _unknown(name, _STRATEGIES)
    return strategy()


def _unknown(name: str, names: Iterable[str], setting: str = "eviction_policy") -> ConfigError:
    return ConfigError(f"{setting}={name!r} is unknown; use one of {', '.join(sorted(names))}")
