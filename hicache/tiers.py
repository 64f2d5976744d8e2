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


@dataclass(frozen=True, slots=True)
class Store:
    """A tier below memory: the remote tier, 0, or a disk, 1, 2, 3, …"""

    index: int

    @property
    def bit(self) -> int:
        """In a set of stores as one number: a page may be in several."""
        return 1 << self.index

    @property
    def alike(self) -> int:
        """The set of those of which one gets a page: all disks, or the remote tier."""
        return ~REMOTE.bit if self.is_disk else self.bit

    @property
    def is_disk(self) -> bool:
        return self.index > 0

    @property
    def name(self) -> str:
        """disk, disk2, disk3, …, remote."""
        return f"disk{self.index if self.index > 1 else ''}" if self.is_disk else "remote"

    @property
    def prefix(self) -> str:
        """What the names of metrics begin with that the first disk has without."""
        return "" if self == DISK else f"{self.name}_"

    @property
    def labels(self) -> dict[str, str]:
        """What tells its metrics from those of the first disk, with which they are one family."""
        return {"disk": str(self.index)} if self.index > 1 else {}


REMOTE, DISK = Store(0), Store(1)


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
