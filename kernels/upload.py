"""Uploads lists of ids from pinned CPU memory to the device, with a kernel that reads the ids over the link.

A copy would wait for the copy engine, possibly for milliseconds if a load uses it. A kernel reads the ids while the
load continues. `IdUploader` owns the pinned memory that the kernel reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hicache.kernels._triton import Kernels, cdiv, check_kernels, jit, power_of_two, tl

_IDS_PER_PROGRAM = 1024


@jit(do_not_specialize=["num_ids"])
def _upload_kernel(source, target, num_ids, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < num_ids), mask=i < num_ids)


def upload(source: torch.Tensor, target: torch.Tensor, kernels: Kernels) -> None:
    """Copy `source`, int64 `[n]` on the CPU, to `target` `[n]`, on the current stream. `source` must stay unchanged
    until this copy is complete.

    `source` must be pinned if `target` is on a GPU. Raises ValueError if `source` and `target` do not match.
    """
    check_kernels(kernels)
    if source.shape != target.shape or {source.dtype, target.dtype} != {torch.int64} or source.device.type != "cpu":
        raise ValueError(
            f"ids {tuple(source.shape)} of {source.dtype} on {source.device} to {tuple(target.shape)} of "
            f"{target.dtype}: need int64 of one shape, from the CPU"
        )
    if kernels == "torch":
        target.copy_(source, non_blocking=True)
    elif len(source):
        _upload_kernel[(cdiv(len(source), _IDS_PER_PROGRAM),)](source, target, len(source), BLOCK=_IDS_PER_PROGRAM)


@dataclass
class _PinnedSlot:
    """Pinned memory for ids. The event `read` is recorded after the kernel that reads the ids."""

    ids: torch.Tensor
    read: torch.cuda.Event


class IdUploader:
    """Uploads lists of ids to one device without waiting for the device. Only one thread may use it.

    Owns pinned memory in slots. Allocates a new slot only if the kernels have not yet read the ids of all existing
    slots.
    """

    def __init__(self, device: torch.device, kernels: Kernels) -> None:
        self._device = device
        self._kernels = kernels
        self._pinned: list[_PinnedSlot] = []

    def compile(self) -> None:
        """Compile the kernel for lists of any length."""
        self(torch.zeros(1, dtype=torch.int64))

    @property
    def num_pinned(self) -> int:
        """Number of pinned slots."""
        return len(self._pinned)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Upload `ids`, int64 `[n]`. Later work on the current stream may use the result. Ids that are already on the
        device are returned unchanged. Raises RuntimeError if no memory can be pinned."""
        if ids.device.type != "cpu":
            return ids
        slot = self._free_slot(len(ids))
        source, uploaded = slot.ids[: len(ids)], torch.empty(len(ids), dtype=torch.int64, device=self._device)
        source.numpy()[:] = ids.numpy()  # numpy, because torch might use several threads and wait for them
        upload(source, uploaded, self._kernels)
        slot.read.record()
        return uploaded

    def _free_slot(self, num_ids: int) -> _PinnedSlot:
        """Return a pinned slot whose ids were read, after enlarging it if it is too small. If there is none, return a
        new slot."""
        for slot in self._pinned:
            if slot.read.query():
                if len(slot.ids) < num_ids:
                    slot.ids = _pinned_ids(num_ids)
                return slot
        self._pinned.append(_PinnedSlot(_pinned_ids(num_ids), torch.cuda.Event()))
        return self._pinned[-1]


def _pinned_ids(num_ids: int) -> torch.Tensor:
    return torch.empty(power_of_two(num_ids), dtype=torch.int64, pin_memory=True)
