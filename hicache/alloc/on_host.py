"""Ids in host memory, handled by one thread: torch splits work on some ten thousand of them over its threads, and waits
for these to wake, milliseconds on a busy machine. May import torch and numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """All ids of `parts`, at least one, on their device."""
    if parts[0].device.type != "cpu":
        return torch.cat(list(parts))
    return torch.from_numpy(np.concatenate([part.numpy() for part in parts]))


def ascending(ids: torch.Tensor) -> torch.Tensor:
    """The ids in order. On the host runs are merged, and there are few: parts that were freed in order."""
    if ids.device.type != "cpu":
        return ids.sort().values
    return torch.from_numpy(np.sort(ids.numpy(), kind="stable"))


def flag(flags: torch.Tensor, ids: torch.Tensor, value: bool) -> None:
    """`flags[ids] = value`."""
    if flags.device.type != "cpu":
        flags[ids] = value
    else:
        flags.numpy()[ids.numpy()] = value


def all_once_and_flagged(flags: torch.Tensor, ids: torch.Tensor) -> bool:
    """Whether no id is named twice and each has its flag; on the host, ids within `flags` from 1 on."""
    at = ids.numpy()
    if not at.size:
        return True
    in_order = np.diff(at)
    if not (in_order > 0).all() and not (np.diff(np.sort(at)) > 0).all():
        return False
    return int(at.min()) > 0 and int(at.max()) < len(flags) and bool(flags.numpy()[at].all())


def slots_of(pages: torch.Tensor, page_size: int, offsets: torch.Tensor) -> torch.Tensor:
    """All slots of pages, in page order. `offsets`: 0 to `page_size`, on the pages' device."""
    if pages.device.type != "cpu":
        return (pages[:, None] * page_size + offsets).reshape(-1)
    return torch.from_numpy((pages.numpy()[:, None] * page_size + offsets.numpy()).reshape(-1))


def are_runs(slots: torch.Tensor, page_size: int) -> bool:
    """Whether the first slot of each `page_size` names the page of all of them; on the host."""
    pages: Ids = slots.numpy() // page_size
    return bool((pages == np.repeat(pages[::page_size], page_size)[: len(pages)]).all())
