"""Sharing: what a request computed becomes the tree's, and the request goes on with the tree's slots.

insert      its slots go to the tree for tokens that it lacks
use theirs  where another request was first, the tree's slots are used instead
free ours   and the request's own are the caller's to free
donate      values that belong to the end of the tokens, like a recurrent state, become the tree's
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from hicache.tiers import Component, joined
from hicache.tree.base import Inserted
from hicache.tree.core import RadixTree
from hicache.tree.key import Tokens
from hicache.tree.node import TreeNode

_NO_SLOTS = torch.empty(0, dtype=torch.int64)


class Shared(NamedTuple):
    """What became of tokens [0, accepted_len) that were offered with `slots`. `node` ends there.

    `theirs`: the tree's slots of tokens [0, len(theirs)), which it held before, to be used from now on; `ours`: the
    offered slots of the same tokens, to be freed. `adopted`: pairs (offered slots, the tree's): the window slots mapped
    to the first are to be mapped to the second, before `ours` is freed. `refused`: donated values that the tree had, or
    did not reach.
    """

    node: TreeNode
    inserted: Inserted
    accepted_len: int
    theirs: torch.Tensor
    ours: torch.Tensor
    adopted: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    refused: tuple[Component, ...]


def share(
    tree: RadixTree,
    node: TreeNode,
    tokens: Tokens,
    slots: torch.Tensor,
    namespace: str = "",
    window_from: int | None = None,
    donated: Mapping[Component, torch.Tensor] | None = None,
) -> Shared:
    """Give whole pages `tokens`, which follow `node`, to the tree as `slots`, int64 `[tokens]`, which it copies.

    `window_from`: tokens from there on have window slots, see `RadixTree.insert`. `donated`: values of components at
    the end of `tokens`; the tree owns them from now on, but for `Shared.refused`. Locks are the caller's.
    """
    inserted = tree.insert(node, tokens, slots, namespace, window_from)
    duplicates = inserted.duplicates
    # What is new lies below what was held: duplicates are [0, held_len) of the tokens.
    ours = theirs = _NO_SLOTS
    adopted: list[tuple[torch.Tensor, torch.Tensor]] = []
    if duplicates:
        ours, theirs = slots[: duplicates[-1].end], joined([duplicate.value for duplicate in duplicates])
        adopted = [(slots[at.start : at.end], at.value) for at in duplicates if at.adopts_window]
    refused = [
        component
        for component, value in (donated or {}).items()
        if inserted.accepted_len < len(tokens) or not tree.attach(inserted.node, component, value)
    ]
    return Shared(inserted.node, inserted, inserted.accepted_len, theirs, ours, tuple(adopted), tuple(refused))
