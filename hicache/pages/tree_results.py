"""The records that the tree returns: a match, an insertion, and removed values."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hicache.pages.node import TreeNode
from hicache.pages.table import Rows
from hicache.tiers import Component


class Match(NamedTuple):
    """The longest prefix whose full pages are on the device. `rows`: the rows of its pages; `nodes`: the nodes of these
    pages, from the root on.

    `RadixTree.usable_len` returns the length of the part of a match that all components can use.
    """

    namespace: str
    nodes: tuple[TreeNode, ...]
    rows: Rows
    full_len: int


class Inserted(NamedTuple):
    """The result of an insertion of tokens with slots; `node` ends after the last token that the tree has.

    [0, len(existing))              the tree had these tokens in slots `existing`, which replace the offered slots
    [len(existing), accepted_len)   the tree added these tokens, as the pages `gained`
    [accepted_len, offered)         refused, because a load in flight writes the first of these pages

    `adopted`: intervals of existing pages that got windows by the insertion. The caller maps the window slots of the
    offered slots to `existing` before it frees the offered slots. `attached`: components whose donated values the tree
    accepted.
    """

    node: TreeNode
    gained: Rows
    existing: torch.Tensor
    adopted: tuple[tuple[int, int], ...]
    accepted_len: int
    attached: frozenset[Component] = frozenset()


class Released(NamedTuple):
    """Values that the tree removed and that the caller frees. `size`: tokens or states."""

    component: Component
    value: torch.Tensor
    size: int
