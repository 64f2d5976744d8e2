"""An eviction strategy of one's own, in one file: the largest node first.

It is a policy where a name has an entry for it in `hicache.tree.policy.ORDERS`: `{"largest": ranked(LargestFirst)}`.
"""

from __future__ import annotations

from hicache.tree.node import TreeNode
from hicache.tree.orders import EvictionStrategy


class LargestFirst(EvictionStrategy):
    """The node of the most tokens goes first; of equals, the least recently used."""

    def get_priority(self, node: TreeNode) -> tuple[int, int]:
        return -node.num_tokens, node.last_access_time
