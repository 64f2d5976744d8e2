"""The CPU backend, which implements the contract of the CUDA backend with two threads instead of streams.

One thread loads, and one thread stores. The device tier is ordinary memory, so bytes that a forward pass has written
need no fence. The two threads overlap with each other and with the forward pass, as streams do.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from operator import attrgetter

import numpy as np
import torch

from hicache.errors import TransferError
from hicache.kernels.pack import PagePacker
from hicache.kernels.page_copy import PageMover
from hicache.transfer.counter import LayerSink
from hicache.transfer.plan import intervals
from hicache.transfer.segments import PageCopies, PageCopy, gather

log = logging.getLogger(__name__)

_JOIN_S = 30.0
_NUM_BYTES = attrgetter("num_bytes")
_GROUP_BYTES = 1 << 20  # bytes of one page that are gathered at a time


class _Abandoned(TransferError):
    """Raised for a copy whose engine was abandoned. This error is not logged as a warning."""


class CpuOp:
    """A copy on a worker thread."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.error: Exception | None = None
        self.is_undelayed = True  # `seconds` is measured from the start of the copy's work
        self.misfits: list[int] = []
        self._seconds = 0.0
        self._ended = threading.Event()

    def run(self, copy: Callable[[], None]) -> None:
        """Run the copy on the worker thread and store its error."""
        start = time.perf_counter()
        try:
            copy()
        except Exception as error:  # noqa: BLE001 - kept in `error`, which the flows count
            self.error = error
            if not isinstance(error, _Abandoned):
                log.warning("a copy between tiers failed: %s", error)
        self._seconds = time.perf_counter() - start
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()

    def wait_outcome(self) -> None:
        self.wait()

    def seconds(self) -> float:
        return self._seconds


class Worker:
    """A thread that runs copies in submission order."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[CpuOp, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, op: CpuOp, copy: Callable[[], None]) -> None:
        self._jobs.put((op, copy))

    def close(self, within_s: float = _JOIN_S) -> None:
        if self._thread.is_alive():
            self._jobs.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join(within_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            op, copy = job
            op.run(copy)


class CpuTransfer:
    """A `TransferBackend` on the CPU. `host` is uint8 [pages, page_bytes]; `mover` copies from and to the device
    buffers; `packer`, if given, packs the pages of these buffers."""

    def __init__(
        self, host: torch.Tensor, mover: PageMover, counter: LayerSink, packer: PagePacker | None = None
    ) -> None:
        self._page_copies = PageCopies(mover, packer)
        self.mover = self._page_copies.mover
        self.movers = self._page_copies.movers
        self._counter = counter
        # numpy copies complete rows at the speed of memcpy; torch's index operations copy element by element.
        self._host = host.numpy()
        self._groups = intervals(mover.num_layers, max(1, _GROUP_BYTES // self.mover.ends[1]))
        self.up = Worker("hicache-load")
        self.down = Worker("hicache-store")
        self._abandoned = threading.Event()

    def start(self) -> None:
        self.up.start()
        self.down.start()

    def close(self) -> None:
        self.up.close()
        self.down.close()

    def abandon(self, deadline_s: float) -> None:
        self._abandoned.set()
        for worker in (self.up, self.down):
            worker.close(max(0.0, deadline_s - time.monotonic()))

    def stats(self) -> dict[str, float]:
        return {}  # the CPU has no link to measure

    def load(self, pages: torch.Tensor, slots: torch.Tensor, load_id: int, rest: torch.Tensor | None = None) -> CpuOp:
        copies = self._page_copies.to_load(pages, slots, rest)
        op = CpuOp(sum(map(_NUM_BYTES, copies)))

        def copy() -> None:
            try:
                for layer in range(self.mover.num_layers):
                    for of_kind in copies:
                        self._require_engine()
                        of_kind.mover.scatter(self._staged(of_kind, layer), of_kind.slots, layer, 1)
                    self._counter.record(load_id, layer)
            except Exception as error:
                op.error = error  # set before `fail`, because consumers that raise may read the error
                self._counter.fail(load_id, TransferError(str(error)))
                raise

        self.up.put(op, copy)
        return op

    def store(self, slots: torch.Tensor, pages: torch.Tensor, rest: torch.Tensor | None = None) -> CpuOp:
        stored = self._page_copies.to_store(slots, pages, rest)
        op, mover = CpuOp(stored.num_bytes), stored.mover

        def copy() -> None:
            misfits = torch.zeros(len(pages), dtype=torch.int32)
            for first, end in self._groups:
                self._require_engine()
                begin, stop = mover.ends[first], mover.ends[end]
                staging = torch.empty(len(pages), stop - begin, dtype=torch.uint8)
                gather(mover, slots, staging, first, end - first, misfits)
                for segment in stored.segments:
                    start, until = segment.within(begin, stop)
                    self._host[segment.ids, start - segment.start : until - segment.start] = (
                        staging[:, start - begin : until - begin].numpy()
                    )  # fmt: skip
            op.misfits = misfits.nonzero().flatten().tolist()

        self.down.put(op, copy)
        return op

    def _staged(self, pages: PageCopy, layer: int) -> torch.Tensor:
        """Copy the host bytes of one layer of `pages` to a new array, uint8 [pages, bytes]."""
        found = []
        for segment in pages.segments:
            start, stop = segment.within(pages.mover.ends[layer], pages.mover.ends[layer + 1])
            found.append(self._host[segment.ids, start - segment.start : stop - segment.start])
        return torch.from_numpy(found[0] if len(found) == 1 else np.concatenate(found, axis=1))

    def _require_engine(self) -> None:
        if self._abandoned.is_set():
            raise _Abandoned("the engine of this copy was abandoned")
