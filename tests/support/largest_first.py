"""An eviction strategy of one's own, in one file: the largest node first.

It is a policy where a name has an entry for it in `EVICTION_POLICIES` of `hicache.eviction.policy`.
"""

from __future__ import annotations

from hicache.eviction.orders import EvictionStrategy
from hicache.tree.node import TreeNode


class LargestFirst(EvictionStrategy):
    """The node of the most tokens goes first; of equals, the least recently used."""

    def get_priority(self, node: TreeNode) -> tuple[int, int]:
        return -node.num_tokens, node.last_access_time
