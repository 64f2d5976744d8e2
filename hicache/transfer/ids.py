"""Ids of copies on their way to the device, through page-locked memory that is used again once it has been read.

May import torch, kernels, config and the rest of its package.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hicache.config import Kernels
from hicache.kernels.upload import upload
from hicache.transfer.plan import power_of_two


@dataclass
class _Envelope:
    """Page-locked room for ids; `read` is recorded behind the kernel that reads them."""

    room: torch.Tensor
    read: torch.cuda.Event


class IdUploader:
    """Brings lists of ids to one device. Never waits for it: as many envelopes as are unread at once, and no more.

    Owns the envelopes. Used by one thread.
    """

    def __init__(self, device: torch.device, kernels: Kernels) -> None:
        self._device, self._kernels = device, kernels
        self._envelopes: list[_Envelope] = []

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """`ids`, int64 `[n]`, on the device: queued on the current stream, for whose work the result is. Ids that are
        there are returned as they are. RuntimeError where no memory can be page-locked."""
        if ids.device.type != "cpu":
            return ids
        envelope = self._free(len(ids))
        sent, there = envelope.room[: len(ids)], torch.empty(len(ids), dtype=torch.int64, device=self._device)
        sent.numpy()[:] = ids.numpy()  # torch might share the copy among threads and wait for them
        upload(sent, there, self._kernels)
        envelope.read.record()
        return there

    def _free(self, num_ids: int) -> _Envelope:
        """One that has been read, made wider where it must be."""
        for envelope in self._envelopes:
            if envelope.read.query():
                if len(envelope.room) < num_ids:
                    envelope.room = _locked(num_ids)
                return envelope
        self._envelopes.append(_Envelope(_locked(num_ids), torch.cuda.Event()))
        return self._envelopes[-1]


def _locked(num_ids: int) -> torch.Tensor:
    return torch.empty(power_of_two(num_ids), dtype=torch.int64, pin_memory=True)
