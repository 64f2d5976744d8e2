"""A component of one's own in the tree: the last hidden state at the end of a node.

match   anywhere: a prefix may end without one
lock    the node alone
evict   any node
"""

from __future__ import annotations

from collections.abc import Iterable

from hicache.tree.components.base import MatchWalk, TreeComponent
from hicache.tree.node import TreeNode


class _Anywhere(MatchWalk):
    def ends_in(self, node: TreeNode, length: int) -> bool:
        return True


class LastHiddenComponent(TreeComponent):
    """A row `[1]`."""

    name = "last_hidden"
    at_node_end = True

    def new_walk(self) -> MatchWalk:
        return _Anywhere()

    def required_nodes(self, node: TreeNode) -> Iterable[TreeNode]:
        return () if node.is_root else (node,)

    def is_dead(self, leaf: TreeNode) -> bool:
        return False
