"""Which prefix is where: the radix tree over token pages, its components, its page keys and its eviction orders."""

from hicache.tree.base import Duplicate, Inserted, Match, Released
from hicache.tree.components import MambaRules, SwaRules
from hicache.tree.core import RadixTree
from hicache.tree.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from hicache.tree.key import PageHasher, RadixKey
from hicache.tree.node import Component, PageState, Place, Span, Tier, TreeNode

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Component",
    "Duplicate",
    "EventLog",
    "Inserted",
    "MambaRules",
    "Match",
    "PageHasher",
    "PageState",
    "Place",
    "RadixKey",
    "RadixTree",
    "Released",
    "Span",
    "SwaRules",
    "Tier",
    "TreeNode",
]
