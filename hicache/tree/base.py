"""What the tree returns: records of a match, of an insertion and of what left it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hicache.pages.table import Rows
from hicache.tiers import Component
from hicache.tree.node import TreeNode


class Match(NamedTuple):
    """The longest prefix whose full pages the device has: `rows` of its pages, which lie in `nodes` from the root on.

    How much of it every component can use says `RadixTree.usable_len`.
    """

    namespace: str
    nodes: tuple[TreeNode, ...]
    rows: Rows
    full_len: int


class Inserted(NamedTuple):
    """What became of tokens that were offered to the tree with slots of their own; `node` ends where it took the last.

    [0, len(existing))              it had them as slots `existing`, to be used from now on; the offered ones are free
    [len(existing), accepted_len)   it took them, as the pages `gained`
    [accepted_len, offered)         it took none of them: a load is in flight

    `adopted`: intervals of what it had without windows, which it takes: the window slots mapped to the offered slots
    are to be mapped to those of `existing` instead, before these are freed. `attached`: of donated values those it
    took.
    """

    node: TreeNode
    gained: Rows
    existing: torch.Tensor
    adopted: tuple[tuple[int, int], ...]
    accepted_len: int
    attached: frozenset[Component] = frozenset()


class Released(NamedTuple):
    """What left the tree and is now the caller's to free. `size`: in tokens, or in states."""

    component: Component
    value: torch.Tensor
    size: int
