"""Which prefix is where: the radix tree over token pages, its page keys and its eviction order."""

from hicache.tree.base import Duplicate, Inserted, Match
from hicache.tree.core import RadixTree
from hicache.tree.key import PageHasher
from hicache.tree.node import PageState, Span, Tier, TreeNode

__all__ = ["Duplicate", "Inserted", "Match", "PageHasher", "PageState", "RadixTree", "Span", "Tier", "TreeNode"]
