"""The names that all parts of an engine share: its stores, its components, and how slots or pages of them are joined.

A leaf: it imports nothing of the package, so that tree, pools, allocators and transfers, which never import one
another, and the eviction orders below them name one thing by one word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import torch

_SERIAL_IDS = 8192  # fewer than these torch copies on one thread too, and faster

Component: TypeAlias = str
"""The name of a component: what a prefix needs to have to be used."""
FULL: Final = "full"  # attention state of every token
SWA: Final = "swa"  # attention state of the last window
MAMBA: Final = "mamba"  # a recurrent state at the end


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """A tier below memory: `DISK` or `REMOTE`, and no other object.

    `bit`: of the store, in a set of stores as one number, for both may have a page. `prefix`: how the names of its
    metrics begin where those of the disk name no tier.
    """

    name: str
    bit: int
    prefix: str


REMOTE: Final = Store("remote", 1, "remote_")
DISK: Final = Store("disk", 2, "")


def own(value: torch.Tensor) -> torch.Tensor:
    """A copy of slots or pages. Many of them on the CPU by one thread: torch would wake others and wait for them."""
    if not value.is_cpu or value.numel() < _SERIAL_IDS:
        return value.clone()
    return torch.from_numpy(value.numpy().copy())


def joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Slots or pages, at least one tensor of them, as one; by one thread as `own`. One alone comes back as it is."""
    if len(values) == 1:
        return values[0]
    if not values[0].is_cpu or sum(value.numel() for value in values) < _SERIAL_IDS:
        return torch.cat(tuple(values))
    return torch.from_numpy(np.concatenate([value.numpy() for value in values]))
