"""What the tree answers: frozen records of a match, of an insertion and of what left it.

May import torch and hicache.tree.node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hicache.tree.node import Place, TreeNode


@dataclass(frozen=True)
class Match:
    """The longest prefix whose full pages are held: `nodes` from the root on; of the last the first `last_len` tokens.

    [0, device_len) is on the device (or on its way), [device_len, device_len + host_len) on the host. How much of it
    every component can use says `RadixTree.usable_len`.
    """

    namespace: str
    nodes: tuple[TreeNode, ...]
    last_len: int
    device_len: int
    host_len: int

    @property
    def full_len(self) -> int:
        return self.device_len + self.host_len


@dataclass(frozen=True)
class Duplicate:
    """Tokens [start, end) of an insertion that the tree already held, as `value`.

    `adopts_window`: the tree had no window state of them and now counts that of the insertion as its own: the window
    slots paired with the offered slots are to be paired with `value` instead.
    """

    start: int
    end: int
    value: torch.Tensor
    adopts_window: bool = False


@dataclass(frozen=True)
class Inserted:
    """`node` ends where the insertion did; `gained` took the new value, `duplicates` kept theirs.

    `accepted_len`: tokens placed; less than offered where host pages had no host parent to stand on, or where a copy to
    the tier was in flight.
    """

    node: TreeNode
    gained: tuple[TreeNode, ...]
    duplicates: tuple[Duplicate, ...]
    accepted_len: int


@dataclass(frozen=True)
class Released:
    """What left the tree and is now the caller's to free: slots, pages or a state."""

    place: Place
    value: torch.Tensor
    num_tokens: int
