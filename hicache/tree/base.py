"""What the tree answers: frozen records of a match and of an insertion.

May import torch and hicache.tree.node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hicache.tree.node import TreeNode


@dataclass(frozen=True)
class Match:
    """The longest held prefix: `nodes` from the root on; of the last one the first `last_len` tokens match.

    [0, device_len) is on the device (or on its way), [device_len, device_len + host_len) on the host.
    """

    namespace: str
    nodes: tuple[TreeNode, ...]
    last_len: int
    device_len: int
    host_len: int


@dataclass(frozen=True)
class Duplicate:
    """Tokens [start, end) of an insertion that the tree already held, as `value`."""

    start: int
    end: int
    value: torch.Tensor


@dataclass(frozen=True)
class Inserted:
    """`node` ends where the insertion did; `gained` took the new value, `duplicates` kept theirs.

    `accepted_len`: tokens placed; less than offered when host pages had no host parent to stand on.
    """

    node: TreeNode
    gained: tuple[TreeNode, ...]
    duplicates: tuple[Duplicate, ...]
    accepted_len: int
