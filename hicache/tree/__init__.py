"""Which prefix is where: the radix tree over token pages, its components, its page keys and its eviction orders."""

from hicache.tree.base import Duplicate, Inserted, Match, Released
from hicache.tree.components import MambaRules, SwaRules
from hicache.tree.core import RadixTree
from hicache.tree.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from hicache.tree.key import PageHasher, RadixKey
from hicache.tree.mamba_radix_cache import MambaRadixCache, checkpoint_len
from hicache.tree.node import Component, PageState, Place, Span, Tier, TreeNode
from hicache.tree.params import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from hicache.tree.policy import (
    EvictionStrategy,
    FIFOStrategy,
    FILOStrategy,
    LFUStrategy,
    LRUStrategy,
    MRUStrategy,
    PriorityStrategy,
    SLRUStrategy,
    get_eviction_strategy,
)
from hicache.tree.radix_cache import RadixCache
from hicache.tree.swa_radix_cache import SWARadixCache

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheInitParams",
    "Component",
    "Duplicate",
    "EventLog",
    "EvictParams",
    "EvictResult",
    "EvictionStrategy",
    "FIFOStrategy",
    "FILOStrategy",
    "InsertParams",
    "InsertResult",
    "Inserted",
    "LFUStrategy",
    "LRUStrategy",
    "MRUStrategy",
    "MambaRadixCache",
    "MambaRules",
    "Match",
    "MatchPrefixParams",
    "MatchResult",
    "PageHasher",
    "PageState",
    "Place",
    "PriorityStrategy",
    "RadixCache",
    "RadixKey",
    "RadixTree",
    "Released",
    "SLRUStrategy",
    "SWARadixCache",
    "Span",
    "SwaRules",
    "Tier",
    "TreeNode",
    "checkpoint_len",
    "get_eviction_strategy",
]
