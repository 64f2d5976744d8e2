"""SGLang's eviction strategies: what each evicts first, as a function of a node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from hicache.errors import ConfigError

Priority = float | tuple[float, ...]


class Usage(Protocol):
    """How a node was used, which strategies rank by. Times are ticks."""

    @property
    def hit_count(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def last_access_time(self) -> int: ...

    @property
    def creation_time(self) -> int: ...


class EvictionStrategy(ABC):
    """Ranks nodes by how they were used."""

    @abstractmethod
    def get_priority(self, node: Usage) -> Priority:
        """The one with the lowest goes first. All of one strategy are of one length."""


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


def get_eviction_strategy(name: str) -> EvictionStrategy:
    """The strategy `name`, in any case. ConfigError for an unknown name."""
    strategy = _STRATEGIES.get(name.lower())
    if strategy is None:
        raise ConfigError(f"eviction_policy={name!r} is unknown; use one of {', '.join(sorted(_STRATEGIES))}")
    return strategy()
