"""Which prefix is where: the radix tree over token pages, its components, its page keys and its accounts."""

from hicache.tree.base import Inserted, Match, Released
from hicache.tree.components import FullComponent, MambaComponent, SwaComponent, TreeComponent
from hicache.tree.core import RadixTree
from hicache.tree.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog, KVCacheEvent, PageChange
from hicache.tree.key import PageHasher
from hicache.tree.node import NodeRun, TreeNode

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventLog",
    "FullComponent",
    "Inserted",
    "KVCacheEvent",
    "MambaComponent",
    "Match",
    "NodeRun",
    "PageChange",
    "PageHasher",
    "RadixTree",
    "Released",
    "SwaComponent",
    "TreeComponent",
    "TreeNode",
]
