"""Which prefix is where: the radix tree over token pages, its components, its page keys and its eviction orders."""

from hicache.tree.base import Duplicate, Inserted, Match, Released
from hicache.tree.components import FullComponent, MambaComponent, SwaComponent, TreeComponent
from hicache.tree.core import RadixTree
from hicache.tree.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog, KVCacheEvent, PageChange
from hicache.tree.key import PageHasher
from hicache.tree.node import NodeRun, PageState, TreeNode
from hicache.tree.orders import EvictionStrategy
from hicache.tree.policy import (
    FIFOStrategy,
    FILOStrategy,
    LFUStrategy,
    LRUStrategy,
    MRUStrategy,
    PriorityStrategy,
    SLRUStrategy,
    get_eviction_strategy,
)
from hicache.tree.share import Shared, share

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Duplicate",
    "EventLog",
    "EvictionStrategy",
    "FIFOStrategy",
    "FILOStrategy",
    "FullComponent",
    "Inserted",
    "KVCacheEvent",
    "LFUStrategy",
    "LRUStrategy",
    "MRUStrategy",
    "MambaComponent",
    "Match",
    "NodeRun",
    "PageChange",
    "PageHasher",
    "PageState",
    "PriorityStrategy",
    "RadixTree",
    "Released",
    "SLRUStrategy",
    "Shared",
    "SwaComponent",
    "TreeComponent",
    "TreeNode",
    "get_eviction_strategy",
    "share",
]
