"""Names that all parts of an engine share, of stores and components, and functions that copy and join slots or pages.

This module imports no other module of hicache. Tree, pools, allocators, transfers and eviction orders, which never
import each other, all import this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import torch

_SERIAL_IDS = 8192  # number of ids up to which torch copies on one thread and is faster than numpy

Component: TypeAlias = str
"""The name of a component: a kind of data that a cached prefix needs on a tier before a request can use it."""
FULL: Final = "full"  # attention state of every token
SWA: Final = "swa"  # attention state of the tokens in the last window
MAMBA: Final = "mamba"  # a recurrent state at the end of the prefix


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """A tier below memory: `DISK` or `REMOTE`. There are no other instances.

    `bit`: the bit of the store in a set of stores. A set is one integer, because both stores may have a page. `prefix`:
    prefix in the names of the store's metrics; the disk has no prefix.
    """

    name: str
    bit: int
    prefix: str


REMOTE: Final = Store("remote", 1, "remote_")
DISK: Final = Store("disk", 2, "")


def own(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of slots or pages. Large copies on the CPU use numpy on one thread: torch would wake other threads
    and wait for these threads."""
    if not value.is_cpu or value.numel() < _SERIAL_IDS:
        return value.clone()
    return torch.from_numpy(value.numpy().copy())


def joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate one or more tensors of slots or pages, on one thread like `own`. A single tensor is returned without
    a copy."""
    if len(values) == 1:
        return values[0]
    if not values[0].is_cpu or sum(value.numel() for value in values) < _SERIAL_IDS:
        return torch.cat(tuple(values))
    return torch.from_numpy(np.concatenate([value.numpy() for value in values]))
