"""Full attention: every token from the root on is needed.

    match   anywhere, for the tree's own walk ends where a token is held by no tier
    lock    the whole path to the root
    evict   what has no child on the tier, so that what is held stays a prefix

May import hicache.tree.node and components.base.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hicache.tree.components.base import Rules, Walk
from hicache.tree.node import Component, Place, Tier, TreeNode, own


class _Anywhere(Walk):
    def ends_in(self, node: TreeNode, length: int, on_host: bool) -> bool:
        return True


class FullRules(Rules):
    """`page_size`: tokens of a tree page. A slot a token on the device, a page a tree page on the host."""

    component = Component.FULL
    places = (Place.FULL_DEVICE, Place.FULL_HOST)

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def walk(self) -> Walk:
        return _Anywhere()

    def reach(self, node: TreeNode) -> Iterator[TreeNode]:
        return node.path()

    def weight(self, node: TreeNode) -> int:
        return node.num_tokens

    def split(self, value: torch.Tensor, at_tokens: int, tier: Tier) -> tuple[torch.Tensor | None, torch.Tensor]:
        at = at_tokens if tier is Tier.DEVICE else at_tokens // self._page_size
        return own(value[:at]), own(value[at:])

    def may_go(self, node: TreeNode, tier: Tier) -> bool:
        return not node.children_held[tier]

    def to_move(self, old: TreeNode, new: TreeNode, tier: Tier) -> tuple[list[TreeNode], list[TreeNode]]:
        """Only what lies between the two, where `new` continues `old`: the cost of a chunk, not of its prompt."""
        between: list[TreeNode] = []
        for at in new.path():
            if at is old:
                return between, []
            between.append(at)
        return between, list(old.path())
