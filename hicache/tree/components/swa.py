"""Sliding windows: only the last `window` tokens before the end of a match are needed.

match   where the last `window` tokens have their window state, or all tokens from the root on
lock    the nodes that the last `window` tokens lie in
evict   any node: an inner one becomes a tombstone, which later matches may pass and not end in
"""

from __future__ import annotations

from hicache.tiers import SWA
from hicache.tree.components.base import TreeComponent
from hicache.tree.node import TreeNode, last_nodes


class SwaComponent(TreeComponent):
    """`window`: tokens that a match must have window state of before its end; `page_size`: tokens of a tree page."""

    name = SWA
    shares_full_slots = True

    def __init__(self, window: int, page_size: int) -> None:
        self.window, self._page_size = window, page_size
        # Tokens that each lock at a node, and its `ahead`, was counted over. They are the same however the nodes were
        # split since.
        self._locked_tokens: dict[tuple[TreeNode, int], list[int]] = {}

    def first_required(self, end: int) -> int:
        return max(0, end - self.window)

    def nodes_to_lock(self, node: TreeNode, ahead: int) -> list[TreeNode]:
        nodes = self.required_nodes(node, ahead)
        self._locked_tokens.setdefault((node, ahead), []).append(sum(required.num_tokens for required in nodes))
        return nodes

    def nodes_to_unlock(self, node: TreeNode, ahead: int) -> list[TreeNode]:
        locks = self._locked_tokens[node, ahead]
        num_tokens = locks.pop()
        if not locks:
            del self._locked_tokens[node, ahead]
        return last_nodes(node, num_tokens)

    def surplus_tokens(self, node: TreeNode) -> int:
        """Tokens at the front of `node` whose window state no match at its end needs, in whole pages."""
        surplus = max(0, node.num_tokens - self.window)
        return surplus // self._page_size * self._page_size
