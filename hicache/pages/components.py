"""The contract of a tree component, and the three components of hicache. A component determines which values a prefix
needs, which values a lock covers, and which values may be evicted.

`first_required` is the rule for the values that a prefix needs, and `last_end` finds the longest usable prefix. The
tree applies both functions to tokens on the device; the transfers apply them to pages on any tier.

            a match ends                                         a lock covers           evictable
    full    anywhere on the device                               the path to the root    pages without a next page
    window  behind a complete window, or tokens from the root on the last window         any page
    state   at the end of a page with a state                    the last page           any state

A match may pass a page whose window or state is missing, but does not end there. A custom component is a subclass in
its own file, with a counterpart in `hicache.flow.components`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from hicache.pages.node import TreeNode
from hicache.tiers import FULL, MAMBA, SWA, Component


class Required(Protocol):
    """A component that computes the first token or page that a prefix needs, see `TreeComponent.first_required`."""

    def first_required(self, end: int) -> int: ...


C = TypeVar("C", bound=Required)


def last_end(components: Sequence[C], limit: int, floor: int, gap: Callable[[C, int, int], int | None]) -> int:
    """Return the longest prefix of at most `limit` that all `components` can use; `floor` if none is longer.

    `gap(component, start, end)`: the start of the last missing piece of [start, end); None if no piece is missing. The
    time is linear in the number of missing pieces, because all prefixes that need a missing piece are skipped together.
    """
    end = limit
    while end > floor:
        for component in components:
            start = gap(component, component.first_required(end), end)
            if start is not None:
                end = start
                break
        else:
            break
    return max(end, floor)


class TreeComponent:
    """One component of one tree. Scheduler thread only."""

    name: Component
    # The values of the component on the device are the slots of FULL, and are evicted with these slots.
    shares_full_slots = False
    # A value belongs to the last token of a page only.
    at_node_end = False
    # True: a match ends only at the end of a page with a value. False: a match may also end at a page without a value.
    ends_matches = False

    def first_required(self, end: int) -> int:
        """Return the first token whose value a prefix of `end` tokens needs; `end` if the component is optional. Never
        decreases as `end` grows."""
        return end

    def required_from(self, node: TreeNode, ahead: int = 0) -> int:
        """Return the first token, at most the end of `node`, whose value a prefix needs that ends `ahead` tokens after
        the node."""
        return self.first_required(node.depth_tokens + ahead)

    def lock_from(self, node: TreeNode, ahead: int) -> int:
        """Return the first token that a lock at `node` covers. `ahead`: tokens between `node` and the end of the locked
        prefix."""
        return self.required_from(node, ahead)

    def unlock_from(self, node: TreeNode, ahead: int) -> int:
        """Return the first token that an existing lock at `node` covers."""
        return self.lock_from(node, ahead)


class FullComponent(TreeComponent):
    """Full attention: a prefix needs all its tokens, so the device always has complete prefixes."""

    name = FULL

    def first_required(self, end: int) -> int:
        return 0


class MambaComponent(TreeComponent):
    """Recurrent states: a state `[1]` has consumed exactly the tokens up to the end of its page."""

    name = MAMBA
    at_node_end = ends_matches = True

    def first_required(self, end: int) -> int:
        return max(0, end - 1)


class SwaComponent(TreeComponent):
    """Sliding windows. `window`: the number of tokens at the end of a match whose window slots the match needs."""

    name = SWA
    shares_full_slots = True

    def __init__(self, window: int) -> None:
        self.window = window

    def first_required(self, end: int) -> int:
        return max(0, end - self.window)
