"""The CPU backend: the same contract as the CUDA backend with two threads in place of its streams.

One thread loads, one stores. The device tier is ordinary memory here, so what a forward wrote before it returned is
already there; the threads only bring latency and overlap. May import torch, layout, kernels, config and errors.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import torch

from hicache.errors import TransferError
from hicache.kernels.page_copy import PageMover
from hicache.transfer.counter import LayerTransferCounter
from hicache.transfer.plan import spans

log = logging.getLogger(__name__)

_JOIN_S = 30.0
_GROUP_BYTES = 1 << 20  # of one page that is gathered at once


class _Abandoned(TransferError):
    """Nobody waits for this copy: no news."""


class CpuOp:
    """A copy on a worker thread."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.error: Exception | None = None
        self._seconds = 0.0
        self._ended = threading.Event()

    def run(self, copy: Callable[[], None]) -> None:
        """On the worker: copy, and keep the error for whoever asked."""
        start = time.perf_counter()
        try:
            copy()
        except Exception as error:  # noqa: BLE001 - kept in `error`, which every landing looks at and counts
            if not isinstance(error, _Abandoned):
                log.warning("a copy between tiers failed: %s", error)
            self.error = error
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


class _Lane:
    """One thread that runs copies in the order they were put."""

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
    """See `TransferBackend`. `host`: uint8 [pages, page_bytes]; `mover` knows the device buffers."""

    def __init__(self, host: torch.Tensor, mover: PageMover, num_layers: int, counter: LayerTransferCounter) -> None:
        self._mover, self._counter = mover, counter
        # numpy moves whole rows at memcpy's speed, where torch's index operations go element by element.
        self._host = host.numpy()
        self._num_layers = num_layers
        ends = [0]
        for layer in range(num_layers):
            ends.append(ends[-1] + mover.group_bytes(layer, 1))
        self._ends = ends  # layer l of a page: [ends[l], ends[l + 1])
        self._group = max(1, min(num_layers, _GROUP_BYTES // ends[1]))
        self._up, self._down = _Lane("hicache-load"), _Lane("hicache-store")
        self._abandoned = threading.Event()

    def start(self) -> None:
        self._up.start()
        self._down.start()

    def close(self) -> None:
        self._up.close()
        self._down.close()

    def abandon(self, deadline_s: float) -> None:
        self._abandoned.set()
        for lane in (self._up, self._down):
            lane.close(max(0.0, deadline_s - time.monotonic()))

    def figures(self) -> dict[str, float]:
        """Nothing: memory is as fast as it is."""
        return {}

    def load(self, pages: torch.Tensor, slots: torch.Tensor, load_id: int) -> CpuOp:
        op, ids = CpuOp(len(pages) * self._ends[-1]), pages.numpy()

        def copy() -> None:
            try:
                for layer in range(self._num_layers):
                    self._require_wanted()
                    staging = self._host[ids, self._ends[layer] : self._ends[layer + 1]]
                    self._mover.scatter(torch.from_numpy(staging), slots, layer, 1)
                    self._counter.record(load_id, layer)
            except Exception as error:
                self._counter.fail(load_id, TransferError(str(error)))
                raise

        self._up.put(op, copy)
        return op

    def store(self, slots: torch.Tensor, pages: torch.Tensor) -> CpuOp:
        op, ids = CpuOp(len(pages) * self._ends[-1]), pages.numpy()

        def copy() -> None:
            for first, end in spans(self._num_layers, self._group):
                self._require_wanted()
                begin, stop = self._ends[first], self._ends[end]
                staging = torch.empty(len(pages), stop - begin, dtype=torch.uint8)
                self._mover.gather(slots, staging, first, end - first)
                self._host[ids, begin:stop] = staging.numpy()

        self._down.put(op, copy)
        return op

    def _require_wanted(self) -> None:
        if self._abandoned.is_set():
            raise _Abandoned("the engine of this copy is gone")
