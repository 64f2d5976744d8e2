"""Operations on ids in host memory by numpy, on one thread.

torch splits work on ten thousand ids over its threads, and waits milliseconds for them to wake on a busy machine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]


def ascending(ids: torch.Tensor) -> torch.Tensor:
    """The ids in ascending order. On the host by merging runs, of which there are few: parts were freed in order."""
    if not ids.is_cpu:
        return ids.sort().values
    return torch.from_numpy(np.sort(ids.numpy(), kind="stable"))


def slots_of(pages: torch.Tensor, page_size: int, offsets: torch.Tensor) -> torch.Tensor:
    """All slots of pages, in page order. `offsets`: 0 to `page_size`, on the pages' device."""
    if not pages.is_cpu:
        return (pages[:, None] * page_size + offsets).reshape(-1)
    return torch.from_numpy((pages.numpy()[:, None] * page_size + offsets.numpy()).reshape(-1))


def are_runs(slots: torch.Tensor, page_size: int) -> bool:
    """Whether `slots`, on the host, are runs of `page_size` slots of one page each; the last may be shorter."""
    pages: Ids = slots.numpy() // page_size
    return bool((pages == np.repeat(pages[::page_size], page_size)[: len(pages)]).all())


def distinct(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """The distinct ids among the pages of slots, ascending. On the host, slots of whole pages are not sorted."""
    if not pages.is_cpu:
        found: torch.Tensor = pages.unique()
        return found
    ids: Ids = pages.numpy()
    firsts = ids[::page_size]
    if len(ids) == len(firsts) * page_size and (ids.reshape(-1, page_size) == firsts[:, None]).all():
        ids = firsts
    return torch.from_numpy(np.unique(ids))
