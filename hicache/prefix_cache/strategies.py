"""SGLang's eviction strategies. A strategy computes the rank of a node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from hicache.errors import ConfigError

Priority = float | tuple[float, ...]


class Usage(Protocol):
    """The uses of a node, from which strategies compute its rank. Times are ticks of a logical clock."""

    @property
    def hit_count(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def last_access_time(self) -> int: ...

    @property
    def creation_time(self) -> int: ...


class EvictionStrategy(ABC):
    """A ranking of nodes by their uses."""

    @abstractmethod
    def get_priority(self, node: Usage) -> Priority:
        """Return the rank of a node; the node with the lowest rank is evicted first."""


class LRUStrategy(EvictionStrategy):
    """Evicts the least recently used node first."""

    def get_priority(self, node: Usage) -> int:
        return node.last_access_time


class LFUStrategy(EvictionStrategy):
    """Evicts the least often used node first. Of nodes with equally many uses, the least recently used one is first."""

    def get_priority(self, node: Usage) -> tuple[int, int]:
        return node.hit_count, node.last_access_time


class FIFOStrategy(EvictionStrategy):
    """Evicts the oldest node first."""

    def get_priority(self, node: Usage) -> int:
        return node.creation_time


class MRUStrategy(EvictionStrategy):
    """Evicts the most recently used node first."""

    def get_priority(self, node: Usage) -> int:
        return -node.last_access_time


class FILOStrategy(EvictionStrategy):
    """Evicts the newest node first."""

    def get_priority(self, node: Usage) -> int:
        return -node.creation_time


class PriorityStrategy(EvictionStrategy):
    """Evicts the node with the lowest priority first. Of nodes with equal priority, the least recently used one is
    first."""

    def get_priority(self, node: Usage) -> tuple[int, int]:
        return node.priority, node.last_access_time


class SLRUStrategy(EvictionStrategy):
    """Evicts nodes with fewer than `protected_threshold` uses before nodes with more. Within each of these two
    segments, the least recently used node is first."""

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


def get_eviction_strategy(name: str) -> EvictionStrategy:
    """Return the strategy called `name`, ignoring case. Raises ConfigError for an unknown name."""
    strategy = _STRATEGIES.get(name.lower())
    if strategy is None:
        raise ConfigError(f"eviction_policy={name!r} is unknown; use one of {', '.join(sorted(_STRATEGIES))}")
    return strategy()
