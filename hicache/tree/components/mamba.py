"""Recurrent states: one at the end of a node, which has consumed exactly the tokens up to there.

match   at the end of a node that has a state; never before it, for the state has consumed the node to its end
lock    the node alone
evict   any state: an inner node becomes a tombstone, which later matches may pass and not end at
"""

from __future__ import annotations

from hicache.tiers import MAMBA
from hicache.tree.components.base import TreeComponent


class MambaComponent(TreeComponent):
    """A state `[1]`."""

    name = MAMBA
    at_node_end = ends_matches = True

    def first_required(self, end: int) -> int:
        return max(0, end - 1)
