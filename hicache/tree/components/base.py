"""The contract of a component: its match rule, its lock rule and its eviction rule. It gets nodes, never the tree.

May import torch and hicache.tree.node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from hicache.tree.node import Component, Place, Tier, TreeNode


class Walk(ABC):
    """One walk down a path, from the root: where may a match end, as far as this component is concerned?"""

    @abstractmethod
    def ends_in(self, node: TreeNode, length: int, on_host: bool) -> bool:
        """Whether a match may end after the first `length` tokens of `node`, the next on the path.

        `on_host`: what only the host holds counts, for it would be loaded.
        """


class Rules(ABC):
    """One component of one tree. Scheduler thread only."""

    component: Component
    places: tuple[Place, Place]  # of the component on the device and on the host
    # Whether what it holds on the device is found through the full slots, and so goes when they go.
    follows_full_slots = False
    # Whether a value, and a lock on it, belongs to the end of its node alone: a split leaves it with the lower half.
    at_node_end = False

    @abstractmethod
    def walk(self) -> Walk:
        """A new walk, at the root."""

    @abstractmethod
    def reach(self, node: TreeNode) -> Iterator[TreeNode]:
        """The nodes whose values a prefix that ends with `node` needs, deepest first."""

    @abstractmethod
    def weight(self, node: TreeNode) -> int:
        """What the account counts for a node that holds a value: tokens, or states."""

    @abstractmethod
    def split(self, value: torch.Tensor, at_tokens: int, tier: Tier) -> tuple[torch.Tensor | None, torch.Tensor]:
        """A value as those of the two halves when its node is cut after `at_tokens`; fresh tensors."""

    def upper_locks(self, locks: int) -> int:
        """How many of the locks of a node are also of the front half that is split off it."""
        return 0 if self.at_node_end else locks

    def may_go(self, node: TreeNode, tier: Tier) -> bool:
        """Whether an unlocked node may lose its value on `tier`: any may, but of FULL (see there)."""
        return True

    def to_lock(self, node: TreeNode, tier: Tier) -> Iterator[TreeNode]:
        """The nodes that a lock at `node` is counted on."""
        return self.reach(node)

    def to_unlock(self, node: TreeNode, tier: Tier) -> Iterator[TreeNode]:
        """The nodes that a lock at `node` was counted on, with the parts that were split off them since."""
        return self.reach(node)

    def to_move(self, old: TreeNode, new: TreeNode, tier: Tier) -> tuple[list[TreeNode], list[TreeNode]]:
        """Nodes to lock and nodes to unlock where a lock at `old` becomes one at `new`."""
        return list(self.to_lock(new, tier)), list(self.to_unlock(old, tier))
