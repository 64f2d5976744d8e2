"""What the tree returns: records of a match, of an insertion and of what left it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hicache.tiers import Component
from hicache.tree.node import TreeNode


class Match(NamedTuple):
    """The longest prefix whose full pages are held: `nodes` from the root on; of the last the first `last_len` tokens.

    How much of it every component can use says `RadixTree.usable_len`.
    """

    namespace: str
    nodes: tuple[TreeNode, ...]
    last_len: int
    full_len: int


class Inserted(NamedTuple):
    """What became of tokens that were offered to the tree with slots of their own; `node` ends where it took the last.

    [0, len(held))              it had them as slots `held`, to be used from now on: the offered ones are to be freed
    [len(held), accepted_len)   it took them, in the nodes `gained`
    [accepted_len, offered)     it took none of them: a load is in flight

    `adopted`: intervals of what it had without windows, which it takes: the window slots mapped to the offered slots
    are to be mapped to those of `held` instead, before these are freed. `attached`: of donated values those it took.
    """

    node: TreeNode
    gained: tuple[TreeNode, ...]
    held: torch.Tensor
    adopted: tuple[tuple[int, int], ...]
    accepted_len: int
    attached: frozenset[Component] = frozenset()


class Released(NamedTuple):
    """What left the tree and is now the caller's to free. `size`: in tokens, or in states."""

    component: Component
    value: torch.Tensor
    size: int
