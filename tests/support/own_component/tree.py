"""A component of one's own in the tree: the last hidden state at the end of a node.

match   anywhere: a prefix may end without one
lock    the node alone
evict   any node
"""

from __future__ import annotations

from hicache.tree.components import TreeComponent
from hicache.tree.node import TreeNode


class LastHiddenComponent(TreeComponent):
    """A row `[1]`."""

    name = "last_hidden"
    at_node_end = True

    def required_nodes(self, node: TreeNode, ahead: int = 0) -> list[TreeNode]:
        return [] if ahead or node.is_root else [node]
