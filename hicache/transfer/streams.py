"""Parts of the CUDA backend: operations on streams, and the streams and staging buffers of one direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hicache.kernels.pack import PagePacker
from hicache.kernels.page_copy import PageMover
from hicache.kernels.upload import IdUploader
from hicache.transfer.copies import SlotRuns
from hicache.transfer.plan import PageRuns, Plan
from hicache.transfer.segments import PageCopy

_RING = 3


@dataclass
class QueuedCopy:
    """A copy that is being queued on the streams. Kernels need `slots` on the device. Depending on `plan.method`, the
    copy uses `runs` (one entry for each segment of a page), `slot_runs`, or neither of them. `misfits`, for a store of
    packed pages, is int32 `[pages]` on the device."""

    plan: Plan
    pages: PageCopy
    slots: torch.Tensor
    runs: Sequence[PageRuns] = ()
    slot_runs: SlotRuns | None = None
    misfits: torch.Tensor | None = None

    def staged(self, buffer: Buffer, first: int, end: int, start: int, stop: int) -> torch.Tensor:
        """Return a view of layers [first, end) of the pages [start, stop) in `buffer`: uint8 `[pages, bytes]`."""
        ends = self.pages.mover.ends
        num_pages, width = stop - start, ends[end] - ends[first]
        return buffer.bytes[: num_pages * width].view(num_pages, width)

    def slots_of(self, start: int, stop: int) -> torch.Tensor:
        """Return the slots of the pages [start, stop)."""
        page_tokens = self.pages.mover.page_tokens
        return self.slots[start * page_tokens : stop * page_tokens]


class Chunk(NamedTuple):
    """Layers [first, end) of the pages [start, stop) of a copy. `is_last` marks the last chunk of these layers in a
    load."""

    copy: QueuedCopy
    first: int
    end: int
    start: int
    stop: int
    is_last: bool


class CudaOp:
    """A copy on the streams, which is done when its last event has been reached. The object keeps the tensors `slots`
    alive, because streams may still read them.

    `issue(force)` queues some steps of copies; with `force`, it queues all steps of this copy. The methods that return
    the state of the copy call `issue`.
    """

    def __init__(self, num_bytes: int, slots: Sequence[torch.Tensor], issue: Callable[[bool], None]) -> None:
        self.num_bytes = num_bytes
        self.error: Exception | None = None
        self.is_undelayed = False
        self._slots = slots
        self._issue = issue
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end: torch.cuda.Event | None = None  # None until all steps of the copy are queued
        # number of misfits of each page, on the host and on the device
        self._counts: tuple[torch.Tensor, torch.Tensor] | None = None

    def began(self, stream: torch.cuda.Stream) -> None:
        self._begin.record(stream)

    def bring_misfits(self, counts: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Queue the copy of misfit counts, int32 `[pages]` on the device, to the host on `stream`."""
        on_host = torch.empty(len(counts), dtype=counts.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            on_host.copy_(counts, non_blocking=True)
        self._counts = on_host, counts

    @property
    def misfits(self) -> list[int]:
        """Return the indices of the pages that do not fit packed, once the copy is done."""
        found: list[int] = [] if self._counts is None else self._counts[0].nonzero().flatten().tolist()
        return found

    def ended(self, stream: torch.cuda.Stream) -> None:
        self._end = torch.cuda.Event(enable_timing=True)
        self._end.record(stream)

    @property
    def is_queued(self) -> bool:
        """Return whether all steps of the copy are queued on the streams."""
        return self._end is not None

    def done(self) -> bool:
        self._issue(False)
        return self._end is not None and bool(self._end.query())

    def wait(self) -> None:
        self.wait_outcome()
        assert self._end is not None
        self._end.synchronize()

    def wait_outcome(self) -> None:
        """Queue all steps of the copy: a copy can fail only while its steps are queued."""
        if self._end is None:
            self._issue(True)

    def seconds(self) -> float:
        assert self._end is not None
        return float(self._begin.elapsed_time(self._end)) / 1e3


class Buffer:
    """One staging buffer of a ring, and the events of the two streams that use the buffer."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.address = self.bytes.data_ptr()
        self.filled = torch.cuda.Event()
        self.free = torch.cuda.Event()  # recorded when the buffer is free; an unrecorded event also means free


class StreamPair:
    """The streams of one direction: a copy stream, a kernel stream and a ring of staging buffers between them.

    One thread at a time uses a pair; another thread may use the pair of the other direction concurrently.
    """

    def __init__(
        self, ring_bytes: int, device: torch.device, priority: int, page_bytes: int, mover: PageMover | PagePacker
    ) -> None:
        self.copy = torch.cuda.Stream(device, priority=priority)
        self.kernel = torch.cuda.Stream(device, priority=priority)
        self.buffer_bytes = max(ring_bytes // _RING, page_bytes)
        self.ring = [Buffer(self.buffer_bytes, device) for _ in range(_RING)]
        self.upload = IdUploader(device, mover.table.kernels)
        self._next = 0

    def next(self) -> Buffer:
        self._next += 1
        return self.ring[self._next % _RING]
