"""A custom component of the tree: the hidden state of the last token of a page.

match   anywhere: a prefix may end without one
lock    the last page alone
evict   any page
"""

from __future__ import annotations

from hicache.pages.components import TreeComponent
from hicache.pages.node import TreeNode


class LastHiddenComponent(TreeComponent):
    """A row `[1]`."""

    name = "last_hidden"
    at_node_end = True

    def required_from(self, node: TreeNode, ahead: int = 0) -> int:
        return node.depth_tokens if ahead or node.is_root else node.depth_tokens - 1
