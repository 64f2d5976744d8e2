"""The contract of a tree component, what a prefix needs of it, what a lock covers, what may be evicted, and the three
that hicache knows.

One rule says what a prefix needs, `first_required`, and one loop how far a prefix can be used, `last_end`: the tree
asks by tokens what is on the device, the movements by pages what is on any tier.

            a match ends                                       a lock covers           may be evicted
    full    anywhere: the tree's walk ends where none is held  the path to the root    nodes without a child
    window  behind a whole window, or tokens from the root on  the last window         any node
    state   at the end of a node with a state, never before    the node alone          any state

What an inner node has lost of the last two, later matches pass, and do not end there. A component gets nodes, never the
tree. A component of one's own is a subclass in a file of its own, and its counterpart in `hicache.flow.components`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from hicache.tiers import FULL, MAMBA, SWA, Component, own
from hicache.tree.node import TreeNode, last_nodes


class Required(Protocol):
    """What prefixes need, in tokens or pages, see `TreeComponent.first_required`."""

    def first_required(self, end: int) -> int: ...


C = TypeVar("C", bound=Required)


def last_end(components: Sequence[C], limit: int, floor: int, gap: Callable[[C, int, int], int | None]) -> int:
    """The longest prefix of at most `limit` that all `components` can use; `floor` where none longer is.

    `gap(component, start, end)`: where the last piece of [start, end) that cannot be had begins; None where all can be.
    Linear in what it skips: whatever lacks a piece of [first_required(end), end) lacks it up to where that begins.
    """
    end = limit
    while end > floor:
        gaps = (gap(component, component.first_required(end), end) for component in components)
        start = next((start for start in gaps if start is not None), None)
        if start is None:
            break
        end = start
    return max(end, floor)


class TreeComponent:
    """One component of one tree. Scheduler thread only."""

    name: Component
    # Its value on the device is FULL's slots, and leaves when they leave.
    shares_full_slots = False
    # A value, and a lock on it, belongs to the end of its node: a split leaves both with the lower half.
    at_node_end = False
    # A match ends nowhere but at the end of a node that has a value. Else a match may go without one.
    ends_matches = False

    def first_required(self, end: int) -> int:
        """Of a prefix of `end` tokens, tokens [first_required(end), end) are needed: none, where the component is
        optional. It does not fall as `end` grows."""
        return end

    def required_nodes(self, node: TreeNode, ahead: int = 0) -> list[TreeNode]:
        """The nodes up to `node`, deepest first, whose values a prefix needs that ends `ahead` tokens behind it."""
        return last_nodes(node, node.depth_tokens - self.first_required(node.depth_tokens + ahead))

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
        return not leaf.has(self.name) and self.first_required(leaf.depth_tokens) < leaf.depth_tokens

    def nodes_to_lock(self, node: TreeNode, ahead: int) -> list[TreeNode]:
        """The nodes that a lock at `node` is counted on. `ahead`: tokens that are to come behind `node` before the end
        of the prefix that it is for."""
        return self.required_nodes(node, ahead)

    def nodes_to_unlock(self, node: TreeNode, ahead: int) -> list[TreeNode]:
        """The nodes that a lock at `node` was counted on, with the parts that were split off them since."""
        return self.nodes_to_lock(node, ahead)

    def nodes_to_move(
        self, old: TreeNode, new: TreeNode, ahead: int, left: int
    ) -> tuple[list[TreeNode], list[TreeNode]]:
        """Nodes to lock and nodes to unlock where a lock at `old`, with `ahead`, becomes one at `new`, with `left`."""
        return self.nodes_to_lock(new, left), self.nodes_to_unlock(old, ahead)


class FullComponent(TreeComponent):
    """Full attention: every token from the root on is needed, so that what is held stays a prefix."""

    name = FULL

    def first_required(self, end: int) -> int:
        return 0

    def required_nodes(self, node: TreeNode, ahead: int = 0) -> list[TreeNode]:
        return node.path()

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


class MambaComponent(TreeComponent):
    """Recurrent states: a state `[1]` has consumed exactly the tokens up to the end of its node."""

    name = MAMBA
    at_node_end = ends_matches = True

    def first_required(self, end: int) -> int:
        return max(0, end - 1)


class SwaComponent(TreeComponent):
    """Sliding windows. `window`: tokens that a match must have window state of before its end; `page_size`: tokens of a
    tree page."""

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
