"""Tools with which tests control transfers: hooks at each move of rows, delayed copies, a held stream, and chosen copy
methods."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from hicache.kernels.pack import PagePacker
from hicache.kernels.page_copy import PageMover
from hicache.kernels.zero_copy import ZeroCopyMover
from hicache.transfer import cpu, cuda
from hicache.transfer.copies import can_batch
from hicache.transfer.counter import CpuLayerEvents
from hicache.transfer.plan import CopyCost, LinkDirection, Method, Plan, Shape, choose


@dataclass(frozen=True)
class Move:
    """A call that moves rows of a pool: its direction, the size of the pool's rows, and the first layer that it
    moves."""

    up: bool
    num_layers: int
    layer_bytes: int
    first_layer: int

    @property
    def lane(self) -> str:
        """The direction and the pool. Moves of one lane run in the order in which their copies were submitted."""
        return f"{self.up} {self.num_layers} {self.layer_bytes}"


def at_each_move(monkeypatch: pytest.MonkeyPatch, hook: Callable[[Move], object]) -> None:
    """Call `hook` before each call that moves rows of a pool for a backend, on the thread of that call."""
    moves = (
        (PageMover, "gather"), (PageMover, "scatter"), (PagePacker, "gather"), (PagePacker, "scatter"),
        (ZeroCopyMover, "load"), (ZeroCopyMover, "store"),
    )  # fmt: skip
    for owner, name in moves:
        original = getattr(owner, name)

        def hooked(
            self: PageMover | PagePacker | ZeroCopyMover,
            a: torch.Tensor,
            b: torch.Tensor,
            first: int,
            count: int,
            *misfits: torch.Tensor,
            _original: Callable[..., None] = original,
            _up: bool = name in ("scatter", "load"),
        ) -> None:
            mover = self._mover if isinstance(self, ZeroCopyMover) else self
            hook(Move(_up, mover.num_layers, mover.group_bytes(0, 1), first))
            _original(self, a, b, first, count, *misfits)

        monkeypatch.setattr(owner, name, hooked)


def before_each_move(monkeypatch: pytest.MonkeyPatch, hook: Callable[[], object]) -> None:
    """Call `hook` before each call that moves rows of a pool, without telling it which one."""
    at_each_move(monkeypatch, lambda move: hook())


class Lanes:
    """Random numbers for each lane, so that the numbers of one lane do not depend on the progress of another lane."""

    def __init__(self, seed: int) -> None:
        self._seed, self._lock = seed, threading.Lock()
        self._lanes: dict[str, random.Random] = {}

    def of(self, lane: str) -> random.Random:
        with self._lock:
            return self._lanes.setdefault(lane, random.Random(f"{self._seed} {lane}"))


class CopiesWhenNeeded:
    """Delay the copies of layers on the CPU. A layer is copied only when a consumer waits for it, or when a caller
    waits for the end of its copy or of a later copy of the same thread. So a consumer that does not wait always reads
    too early."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed, self._running = threading.Condition(), threading.local()
        self._of_worker: dict[cpu.Worker, list[cpu.CpuOp]] = {}
        self._begun: CpuLayerEvents | None = None  # events of the load that is about to be submitted
        self._loads: dict[CpuLayerEvents, cpu.CpuOp] = {}
        self._ended: set[cpu.CpuOp] = set()  # copies whose end a caller waits for
        self._layer: dict[cpu.CpuOp, int] = {}  # the last layer for which a consumer waits
        at_each_move(monkeypatch, self._hold)
        run, put, close = cpu.CpuOp.run, cpu.Worker.put, cpu.Worker.close
        end, wait, load = cpu.CpuOp.wait, CpuLayerEvents.wait, cpu.CpuTransfer.load
        begin = CpuLayerEvents.begin

        def running(op: cpu.CpuOp, copy: Callable[[], None]) -> None:
            self._running.op = op
            run(op, copy)

        def queued(worker: cpu.Worker, op: cpu.CpuOp, copy: Callable[[], None]) -> None:
            with self._changed:
                self._of_worker.setdefault(worker, []).append(op)
            put(worker, op, copy)

        def ending(op: cpu.CpuOp) -> None:
            self._end_all_to(op)
            end(op)

        def closing(worker: cpu.Worker) -> None:
            for op in self._of_worker.get(worker, [])[-1:]:
                self._end_all_to(op)
            close(worker)

        def beginning(events: CpuLayerEvents) -> None:
            self._begun = events
            begin(events)

        def loaded(
            backend: cpu.CpuTransfer,
            pages: torch.Tensor,
            slots: torch.Tensor,
            load_id: int,
            rest: torch.Tensor | None = None,
        ) -> cpu.CpuOp:
            op = load(backend, pages, slots, load_id, rest)
            assert self._begun is not None
            self._loads[self._begun] = op
            return op

        def waiting(events: CpuLayerEvents, layer: int) -> None:
            op = self._loads.get(events)
            if op is not None:
                self._need(op, layer)
            wait(events, layer)

        monkeypatch.setattr(cpu.CpuOp, "run", running)
        monkeypatch.setattr(cpu.Worker, "put", queued)
        monkeypatch.setattr(cpu.CpuOp, "wait", ending)
        monkeypatch.setattr(cpu.Worker, "close", closing)
        monkeypatch.setattr(cpu.CpuTransfer, "load", loaded)
        monkeypatch.setattr(CpuLayerEvents, "begin", beginning)
        monkeypatch.setattr(CpuLayerEvents, "wait", waiting)

    def _hold(self, move: Move) -> None:
        op = self._running.op
        with self._changed:
            self._changed.wait_for(lambda: op in self._ended or self._layer.get(op, -1) >= move.first_layer)

    def _need(self, op: cpu.CpuOp, layer: int) -> None:
        with self._changed:
            self._ended.update(self._before(op))
            self._layer[op] = max(layer, self._layer.get(op, -1))
            self._changed.notify_all()

    def _end_all_to(self, op: cpu.CpuOp) -> None:
        with self._changed:
            self._ended.update((*self._before(op), op))
            self._changed.notify_all()

    def _before(self, op: cpu.CpuOp) -> list[cpu.CpuOp]:
        ops = next(ops for ops in self._of_worker.values() if op in ops)
        return ops[: ops.index(op)]


class StreamGate:
    """A gate that holds CUDA streams until `open`, or until `timeout_s` has passed, so that wrong waits end too. The
    stream waits for a flag in memory. No kernel sleeps, so the speed of the host does not matter."""

    # All flags of a process. Each flag is used once, because a stream may read it long after the gate was opened. The
    # flags are allocated before any gate is held, because page-locking memory may wait for the device.
    _flags: ClassVar[torch.Tensor | None] = None
    _next: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, timeout_s: float = 60.0) -> None:
        if StreamGate._flags is None:
            StreamGate._flags = torch.zeros(1 << 16, dtype=torch.int32).pin_memory()
        at = next(self._next)
        self._flag = StreamGate._flags[at : at + 1]
        self._timer = threading.Timer(timeout_s, self._let_go)
        self._timer.daemon = True
        self._timer.start()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Make all work that is queued on `stream` from now on wait for the gate."""
        wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        wait.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        assert wait(stream.cuda_stream, self._flag.data_ptr(), 1, 0) == 0, "the driver has no waits on memory"

    def open(self) -> None:
        self._timer.cancel()
        self._let_go()

    def _let_go(self) -> None:
        self._flag[0] = 1


def force_methods(monkeypatch: pytest.MonkeyPatch, methods: Sequence[Method]) -> None:
    """Make copies on CUDA use a random one of these methods, whatever it costs. If slots are not contiguous, or for
    copies to the host, "strided" replaces "unstaged". "strided" also replaces methods that packed pages cannot use."""
    lanes, never = Lanes(2), CopyCost(bytes_per_s=1.0, piece_s=1e3, issue_s=1e3)
    if torch.cuda.is_available():
        methods = [method for method in methods if method != "batched" or can_batch()]
        if not methods:
            pytest.skip("this driver has no batched copies")

    def chosen(direction: LinkDirection, shape: Shape, buffer_bytes: int, *, up: bool) -> Plan:
        method = lanes.of(f"{up} {shape.num_layers} {shape.layer_bytes}").choice(methods)
        if method == "unstaged" and shape.slot_runs and not shape.is_packed:
            return Plan("unstaged", tuple((layer, layer + 1) for layer in range(shape.num_layers)))
        method = "strided" if method == "unstaged" or (shape.is_packed and method == "zero_copy") else method
        only = {name: cost if name == method else never for name, cost in vars(direction).items()}
        plan = choose(LinkDirection(**only), replace(shape, slot_runs=0), buffer_bytes, up=up)
        assert plan.method == method
        return plan

    monkeypatch.setattr(cuda, "choose", chosen)
