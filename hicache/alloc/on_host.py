"""Operations on slot and page ids, which numpy runs on one thread if the ids are in host memory.

torch divides work on ten thousand ids among its threads; on a busy machine, waking these threads takes milliseconds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]


def ascending(ids: torch.Tensor) -> torch.Tensor:
    """Sort ids. In host memory, numpy's stable sort is used, because it only merges the few ascending runs of ids that
    were freed together."""
    if not ids.is_cpu:
        return ids.sort().values
    return torch.from_numpy(np.sort(ids.numpy(), kind="stable"))


def slots_of(pages: torch.Tensor, page_size: int, offsets: torch.Tensor) -> torch.Tensor:
    """Return all slots of pages, in page order. `offsets` is int64 [0, 1, ..., `page_size` - 1], on the device of the
    pages."""
    if not pages.is_cpu:
        return (pages[:, None] * page_size + offsets).reshape(-1)
    return torch.from_numpy((pages.numpy()[:, None] * page_size + offsets.numpy()).reshape(-1))


def are_runs(slots: torch.Tensor, page_size: int) -> bool:
    """Return whether `slots`, in host memory, consist of runs of `page_size` slots, each run on one page; the last run
    may be shorter."""
    pages: Ids = slots.numpy() // page_size
    return bool((pages == np.repeat(pages[::page_size], page_size)[: len(pages)]).all())


def distinct(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the distinct page ids, ascending. `pages`: the page id of each slot. In host memory, this function is fast
    if the slots are complete pages."""
    if not pages.is_cpu:
        found: torch.Tensor = pages.unique()
        return found
    ids: Ids = pages.numpy()
    firsts = ids[::page_size]
    if len(ids) == len(firsts) * page_size and (ids.reshape(-1, page_size) == firsts[:, None]).all():
        ids = firsts
    return torch.from_numpy(np.unique(ids))
