"""Full attention: every token from the root on is needed.

match   anywhere: the tree's own walk ends where no token is held
lock    the whole path to the root
evict   nodes without a child, so that what is held stays a prefix
"""

from __future__ import annotations

from hicache.tiers import FULL
from hicache.tree.components.base import TreeComponent
from hicache.tree.node import TreeNode


class FullComponent(TreeComponent):
    name = FULL

    def first_required(self, end: int) -> int:
        return 0

    def is_evictable(self, node: TreeNode) -> bool:
        return not node.children

    def nodes_to_move(
        self, old: TreeNode, new: TreeNode, ahead: int, left: int
    ) -> tuple[list[TreeNode], list[TreeNode]]:
        """The nodes between the two where `new` continues `old`: the cost of a chunk, not of its prompt."""
        between: list[TreeNode] = []
        node = new
        while node.parent is not None and node is not old:
            between.append(node)
            node = node.parent
        return between, [] if node is old else old.path()
