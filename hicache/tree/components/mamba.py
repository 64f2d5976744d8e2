"""Recurrent states: one at the end of a node, which has consumed exactly the tokens up to there.

    match   at the end of a node that has a state; never before it, for the state has consumed the node to its end
    lock    the node alone
    evict   any state: an inner node becomes a tombstone, which later matches may pass and not end at

May import hicache.tree.node and components.base.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hicache.tree.components.base import Rules, Walk
from hicache.tree.node import Component, Place, Tier, TreeNode


class _States(Walk):
    def ends_in(self, node: TreeNode, length: int, on_host: bool) -> bool:
        held = node.holds(Place.MAMBA_DEVICE) or (on_host and node.holds(Place.MAMBA_HOST))
        return held and length == node.num_tokens


class MambaRules(Rules):
    """A state `[1]` on either tier."""

    component = Component.MAMBA
    places = (Place.MAMBA_DEVICE, Place.MAMBA_HOST)
    at_node_end = True

    def walk(self) -> Walk:
        return _States()

    def reach(self, node: TreeNode) -> Iterator[TreeNode]:
        if not node.is_root:
            yield node

    def weight(self, node: TreeNode) -> int:
        return 1

    def split(self, value: torch.Tensor, at_tokens: int, tier: Tier) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The state stays with the lower half, which ends where the node did."""
        return None, value
