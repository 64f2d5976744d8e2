"""Records that the tree returns: a match, an insertion, and values that the tree has lost."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hicache.pages.node import TreeNode
from hicache.pages.table import Rows
from hicache.tiers import Component


class Match(NamedTuple):
    """The longest prefix whose full pages the device has: `rows` of its pages, which lie in `nodes` from the root on.

    `RadixTree.usable_len` returns how much of it all components can use.
    """

    namespace: str
    nodes: tuple[TreeNode, ...]
    rows: Rows
    full_len: int


class Inserted(NamedTuple):
    """The result of offering tokens with slots to the tree; `node` ends behind the last token that the tree has.

    [0, len(existing))              the tree had them as slots `existing`, which replace the offered ones
    [len(existing), accepted_len)   the tree took them, as the pages `gained`
    [accepted_len, offered)         refused, because a load is in flight

    `adopted`: intervals that the tree had without windows and now has with them: the caller maps the window slots of
    the offered slots to those of `existing` before it frees the offered ones. `attached`: components whose donated
    values the tree took.
    """

    node: TreeNode
    gained: Rows
    existing: torch.Tensor
    adopted: tuple[tuple[int, int], ...]
    accepted_len: int
    attached: frozenset[Component] = frozenset()


class Released(NamedTuple):
    """Values that the tree has lost and the caller frees. `size`: in tokens, or in states."""

    component: Component
    value: torch.Tensor
    size: int
