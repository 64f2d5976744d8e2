"""Raw pages of a pool whose pages are packed: those that did not fit their packed size, in two places each.

    first place   the bytes [0, place_bytes) of the raw page
    rest          the others

They are few, so they are moved one after the other and whole, through memory for one of them. A load moves them before
its packed pages, and reports its first layer behind them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import ConfigError
from hicache.kernels.pack import PagePacker
from hicache.kernels.page_copy import PageMover
from hicache.transfer.copies import copy_strided

Ids = npt.NDArray[np.int64]


class RawPart(NamedTuple):
    """The raw pages of a copy: two places, int64 `[pages]` each, and slots, int64 `[pages * page_tokens]`."""

    first: Ids
    rest: Ids
    slots: torch.Tensor


def divided(
    pages: torch.Tensor, slots: torch.Tensor, rest: torch.Tensor | None
) -> tuple[RawPart | None, torch.Tensor, torch.Tensor]:
    """The raw pages of a load, None for none, then the packed ones and their slots. `rest`: see `TransferBackend`."""
    if rest is None or not rest.any():
        return None, pages, slots
    by_page = slots.view(len(pages), -1)
    raw, packed = (rest > 0).nonzero().flatten(), (rest == 0).nonzero().flatten()
    raw_slots, packed_slots = (by_page[at.to(slots.device)].flatten() for at in (raw, packed))
    return RawPart(pages[raw].numpy(), rest[raw].numpy(), raw_slots), pages[packed], packed_slots


def gather(
    mover: PageMover | PagePacker,
    slots: torch.Tensor,
    staging: torch.Tensor,
    first_layer: int,
    num_layers: int,
    misfits: torch.Tensor | None,
) -> None:
    """Fill staging from the rows at `slots`; pages that do not fit count in `misfits` where they are packed."""
    if isinstance(mover, PageMover):
        mover.gather(slots, staging, first_layer, num_layers)
    else:
        assert misfits is not None, "packed pages may not fit"
        mover.gather(slots, staging, first_layer, num_layers, misfits)


class _TwoPlaces:
    """Which bytes of a raw page each of its places holds. ConfigError where two do not hold one."""

    def __init__(self, mover: PageMover, place_bytes: int) -> None:
        self.mover, self.page_bytes, self._place_bytes = mover, mover.ends[-1], place_bytes
        if not place_bytes <= self.page_bytes <= 2 * place_bytes:
            raise ConfigError(
                f"two packed pages of {place_bytes} bytes are no place for a raw one of {self.page_bytes}; "
                "set kv_packing=off"
            )

    def _places(self, part: RawPart, at: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Of page `at`: (place, start, end) twice, the place and the bytes of the page that are there."""
        ends = self._place_bytes, self.page_bytes
        return (int(part.first[at]), 0, ends[0]), (int(part.rest[at]), *ends)

    def _slots(self, part: RawPart, at: int) -> torch.Tensor:
        size = self.mover.page_tokens
        return part.slots[at * size : (at + 1) * size]


class CpuRawPages(_TwoPlaces):
    """Of the CPU backend. `host`: uint8 [places, bytes]."""

    def __init__(self, host: npt.NDArray[np.uint8], mover: PageMover, place_bytes: int) -> None:
        super().__init__(mover, place_bytes)
        self._host = host

    def load(self, part: RawPart, at: int) -> None:
        staging = np.concatenate([self._host[place, : end - start] for place, start, end in self._places(part, at)])
        self.mover.scatter(torch.from_numpy(staging)[None], self._slots(part, at), 0, self.mover.num_layers)

    def store(self, part: RawPart, at: int) -> None:
        staging = torch.empty(1, self.page_bytes, dtype=torch.uint8)
        self.mover.gather(self._slots(part, at), staging, 0, self.mover.num_layers)
        for place, start, end in self._places(part, at):
            self._host[place, : end - start] = staging[0, start:end].numpy()


class CudaRawPages(_TwoPlaces):
    """Of the CUDA backend, for one direction: `copy` and `kernel` are its streams. `host`: pinned uint8 [places, b].

    Each call is queued behind what is on the streams, and what is queued next on either comes behind it.
    """

    def __init__(
        self,
        host: torch.Tensor,
        mover: PageMover,
        place_bytes: int,
        copy: torch.cuda.Stream,
        kernel: torch.cuda.Stream,
    ) -> None:
        super().__init__(mover, place_bytes)
        self._address, self._pitch = host.data_ptr(), host.stride(0)
        self._copy, self._kernel = copy, kernel
        self._staging: torch.Tensor | None = None  # made for the first raw page

    def load(self, part: RawPart, at: int) -> None:
        staging = self._buffer()
        self._copy.wait_stream(self._kernel)
        for place, start, end in self._places(part, at):
            address, width = staging.data_ptr() + start, end - start
            host = self._address + place * self._pitch
            copy_strided(address, width, host, self._pitch, width, 1, True, self._copy.cuda_stream)
        self._kernel.wait_stream(self._copy)
        with torch.cuda.stream(self._kernel):
            self.mover.scatter(staging, self._slots(part, at), 0, self.mover.num_layers)

    def store(self, part: RawPart, at: int) -> None:
        staging = self._buffer()
        self._kernel.wait_stream(self._copy)
        with torch.cuda.stream(self._kernel):
            self.mover.gather(self._slots(part, at), staging, 0, self.mover.num_layers)
        self._copy.wait_stream(self._kernel)
        for place, start, end in self._places(part, at):
            address, width = staging.data_ptr() + start, end - start
            host = self._address + place * self._pitch
            copy_strided(host, self._pitch, address, width, width, 1, False, self._copy.cuda_stream)

    def _buffer(self) -> torch.Tensor:
        if self._staging is None:
            with torch.cuda.stream(self._kernel):
                device = self.mover.table.device
                self._staging = torch.empty(1, self.page_bytes, dtype=torch.uint8, device=device)
        return self._staging
