"""What is evicted next: orders over records, and policies by name. Knows nothing of trees, pages or tiers."""

from hicache.eviction.orders import EvictionStrategy
from hicache.eviction.policy import (
    FIFOStrategy,
    FILOStrategy,
    LFUStrategy,
    LRUStrategy,
    MRUStrategy,
    PriorityStrategy,
    SLRUStrategy,
    get_eviction_strategy,
)

__all__ = [
    "EvictionStrategy",
    "FIFOStrategy",
    "FILOStrategy",
    "LFUStrategy",
    "LRUStrategy",
    "MRUStrategy",
    "PriorityStrategy",
    "SLRUStrategy",
    "get_eviction_strategy",
]
