"""The contract of a tree component: where a match may end, what a lock covers, what may be evicted.

A component gets nodes, never the tree. A component of one's own is a subclass in a file of its own, and its counterpart
in `hicache.flow.components`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from hicache.tiers import Component, own
from hicache.tree.node import TreeNode


class MatchWalk(ABC):
    """One walk down a path, from the root: where may a match end, as far as this component is concerned?"""

    @abstractmethod
    def ends_in(self, node: TreeNode, length: int) -> bool:
        """Whether a match may end after the first `length` tokens of `node`, the next on the path."""


class TreeComponent(ABC):
    """One component of one tree. Scheduler thread only."""

    name: Component
    # Its value on the device is FULL's slots, and leaves when they leave.
    shares_full_slots = False
    # A value, and a lock on it, belongs to the end of its node: a split leaves both with the lower half.
    at_node_end = False
    # A match ends nowhere but at the end of a node that has a value. Else a match may go without one.
    ends_matches = False

    @abstractmethod
    def new_walk(self) -> MatchWalk:
        """A new walk, at the root."""

    @abstractmethod
    def required_nodes(self, node: TreeNode) -> Iterable[TreeNode]:
        """The nodes whose values a prefix that ends with `node` needs, deepest first. Callers may stop half-way."""

    def split(self, value: torch.Tensor, at_tokens: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """A value as those of the two halves when its node is split after `at_tokens`; fresh tensors."""
        if self.at_node_end:
            return None, value
        return own(value[:at_tokens]), own(value[at_tokens:])

    def is_evictable(self, node: TreeNode) -> bool:
        """Whether an unlocked node may lose its value."""
        return True

    def is_dead(self, leaf: TreeNode) -> bool:
        """Whether no match can end in a leaf any more, since it lacks this component."""
        return not leaf.has(self.name)

    def nodes_to_lock(self, node: TreeNode, ahead: int) -> Iterable[TreeNode]:
        """The nodes that a lock at `node` is counted on. `ahead`: tokens that are to come behind `node` before the end
        of the prefix that it is for, whose value at `node` nobody needs then."""
        return () if ahead and self.at_node_end else self.required_nodes(node)

    def nodes_to_unlock(self, node: TreeNode, ahead: int) -> Iterable[TreeNode]:
        """The nodes that a lock at `node` was counted on, with the parts that were split off them since."""
        return self.nodes_to_lock(node, ahead)

    def nodes_to_move(self, old: TreeNode, new: TreeNode, ahead: int) -> tuple[list[TreeNode], list[TreeNode]]:
        """Nodes to lock and nodes to unlock where a lock at `old`, with `ahead`, becomes one at `new`."""
        return list(self.nodes_to_lock(new, 0)), list(self.nodes_to_unlock(old, ahead))
