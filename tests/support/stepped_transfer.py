"""Copies that start when a test says so: the CPU backend with its two threads replaced by queues.

A copy runs completely, on the test's thread, when it is stepped or waited for; until then it is in flight. So only the
test decides how long a copy takes, and which calls overlap it. On CUDA a test can only make the streams of copies
sleep, and no copy fails.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

import torch

from hicache import CacheEngine
from hicache.kernels.pack import PagePacker
from hicache.kernels.page_copy import PageMover
from hicache.transfer import CpuTransfer, CudaTransfer, TransferBackend
from hicache.transfer.cpu import CpuOp


class _Link:
    """The queue of one direction: copies in the order of their submission. `fails`: the error that copies raise from
    now on, or None."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[CpuOp, Callable[[], None]]] = deque()
        self.fails: Exception | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        """Do nothing: there is no thread."""

    def put(self, op: CpuOp, copy: Callable[[], None]) -> None:
        self._waiting.append((op, copy))
        op.wait = lambda: self.run_until(op)  # type: ignore[method-assign]

    def step(self) -> None:
        op, copy = self._waiting.popleft()
        # In an engine a worker thread runs the copy; no signal and no tracer of a call interrupts it.
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            op.run(copy)
        finally:
            sys.settrace(tracer)

    def run_until(self, op: CpuOp) -> None:
        while not op.done():
            self.step()

    def run_all(self) -> None:
        while self._waiting:
            self.step()

    def close(self, within_s: float = 0.0) -> None:
        self.run_all()


def _transfers(engine: CacheEngine) -> list[TransferBackend]:
    return [component.transfer for component in engine.inspect.context.components if component.has_host]


class SteppedTransfers:
    """Control of all copies of an engine, of every component. Create this object before the engine starts."""

    def __init__(self, engine: CacheEngine) -> None:
        self.up: list[_Link] = []
        self.down: list[_Link] = []
        for transfer in _transfers(engine):
            assert isinstance(transfer, CpuTransfer)
            up, down = _Link(), _Link()
            transfer.up, transfer.down = up, down  # type: ignore[assignment]
            for mover in transfer.movers:
                self._break(mover, up, down)
            self.up.append(up)
            self.down.append(down)

    @property
    def links(self) -> list[_Link]:
        """The links with copies in flight."""
        return [link for link in (*self.up, *self.down) if len(link)]

    def finish(self) -> None:
        for link in (*self.up, *self.down):
            link.run_all()

    @staticmethod
    def _break(mover: PageMover | PagePacker, up: _Link, down: _Link) -> None:
        """Make copies fail while they move bytes if their link has an error; a load fails half-way."""
        scatter, gather = mover.scatter, mover.gather

        def scattering(staging: object, slots: object, first_layer: int, num_layers: int) -> None:
            if up.fails is not None and first_layer + num_layers == mover.num_layers:
                raise up.fails
            scatter(staging, slots, first_layer, num_layers)  # type: ignore[arg-type]

        def gathering(*args: object) -> None:
            if down.fails is not None:
                raise down.fails
            gather(*args)  # type: ignore[arg-type]

        mover.scatter, mover.gather = scattering, gathering  # type: ignore[method-assign,assignment]


class SleepingTransfers:
    """The counterpart of `SteppedTransfers` for an engine on CUDA. This class can only delay copies, by the device's
    own clock."""

    up: tuple[_Link, ...] = ()
    down: tuple[_Link, ...] = ()

    def __init__(self, engine: CacheEngine) -> None:
        transfers = [transfer for transfer in _transfers(engine) if isinstance(transfer, CudaTransfer)]
        self._streams = [s for t in transfers for pair in (t.up, t.down) for s in (pair.copy, pair.kernel)]

    @property
    def links(self) -> list[SleepingTransfers]:
        return [self]

    def step(self) -> None:
        """Make the next stream, in turn, sleep for some milliseconds."""
        self._streams.append(self._streams.pop(0))
        with torch.cuda.stream(self._streams[0]):
            torch.cuda._sleep(20_000_000)

    def finish(self) -> None:
        torch.cuda.synchronize()
