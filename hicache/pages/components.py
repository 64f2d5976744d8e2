"""The contract of a tree component (the values that a prefix needs, a lock covers or an eviction takes), and the three
components of hicache.

`first_required` is the rule for the values that a prefix needs, and `last_end` finds the longest usable prefix. The
tree applies them to tokens on the device, the movements to pages on any tier.

            a match ends                                         a lock covers           evictable
    full    anywhere on the device                               the path to the root    pages without a next page
    window  behind a complete window, or tokens from the root on the last window         any page
    state   at the end of a page with a state                    the last page           any state

A match may pass a page without its window or state, and does not end there. A custom component is a subclass in its own
file, with a counterpart in `hicache.flow.components`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from hicache.pages.node import TreeNode
from hicache.tiers import FULL, MAMBA, SWA, Component


class Required(Protocol):
    """The needs of prefixes, in tokens or pages, see `TreeComponent.first_required`."""

    def first_required(self, end: int) -> int: ...


C = TypeVar("C", bound=Required)


def last_end(components: Sequence[C], limit: int, floor: int, gap: Callable[[C, int, int], int | None]) -> int:
    """The longest prefix of at most `limit` that all `components` can use; `floor` where none longer is.

    `gap(component, start, end)`: where the last piece of [start, end) that cannot be had begins; None where all can be.
    Linear in what it skips: whatever lacks a piece of [first_required(end), end) lacks it up to where that begins.
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
    # Its value on the device is FULL's slots, and leaves when they leave.
    shares_full_slots = False
    # A value belongs to the end of a page, and to no other token of it.
    at_node_end = False
    # A match ends nowhere but at the end of a page that has a value. Else a match may go without one.
    ends_matches = False

    def first_required(self, end: int) -> int:
        """Of a prefix of `end` tokens, tokens [first_required(end), end) are needed: none, where the component is
        optional. It does not fall as `end` grows."""
        return end

    def required_from(self, node: TreeNode, ahead: int = 0) -> int:
        """Where the tokens up to `node` begin whose values a prefix uses that ends `ahead` tokens behind it."""
        return self.first_required(node.depth_tokens + ahead)

    def lock_from(self, node: TreeNode, ahead: int) -> int:
        """Where the tokens begin that a lock at `node` covers. `ahead`: tokens between `node` and the end of the prefix
        that the lock is for."""
        return self.required_from(node, ahead)

    def unlock_from(self, node: TreeNode, ahead: int) -> int:
        """Where the tokens begin that a lock at `node` has covered."""
        return self.lock_from(node, ahead)


class FullComponent(TreeComponent):
    """Full attention: every token from the root on is needed, so that what is held stays a prefix."""

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
    """Sliding windows. `window`: tokens that a match must have window state of before its end."""

    name = SWA
    shares_full_slots = True

    def __init__(self, window: int) -> None:
        self.window = window

    def first_required(self, end: int) -> int:
        return max(0, end - self.window)
