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


class Duplicate(NamedTuple):
    """Tokens [start, end) of an insertion that the tree already held, as `value`.

    `adopts_window`: the tree had no window state of them and takes that of the insertion: the window slots mapped to
    the offered slots are to be mapped to `value` instead.
    """

    start: int
    end: int
    value: torch.Tensor
    adopts_window: bool = False


class Inserted(NamedTuple):
    """`node` ends where the insertion did; `gained` took the new value, `duplicates` kept theirs.

    `accepted_len`: tokens inserted; less than offered where a load is in flight.
    """

    node: TreeNode
    gained: tuple[TreeNode, ...]
    duplicates: tuple[Duplicate, ...]
    accepted_len: int


class Released(NamedTuple):
    """What left the tree and is now the caller's to free. `size`: in tokens, or in states."""

    component: Component
    value: torch.Tensor
    size: int
