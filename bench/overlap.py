"""Measures how much of a load overlaps with the forward pass that needs it, and how much a load slows other work of the
GPU.

A prefix is on the host. A forward of the 8B geometry (bench.forward8b) computes S new tokens after this prefix, while a
transfer loads the prefix layer by layer. The variants are timed in turns by the host's clock, from the submission of
the load until the device is idle. Two variants are the load alone and the forward alone. `together` runs both, and each
layer of the forward waits for an event of the load. `control` runs both, but the forward waits for all layers first, so
nothing overlaps. `without_waits` runs a forward over a prefix that is already on the device, concurrently with the same
load but without waiting, which shows the cost of sharing the machine. Before a load, the prefix on the device is
overwritten. Every output is compared bitwise with a forward over a prefix on the device. Both happen outside of the
timed part. Forwards run on a separate stream, as in servers.

    overlap = max(load, compute) / measured       hidden = (load + compute - measured) / min(load, compute)
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F

from hicache.bench.common import (
    BenchUnavailable,
    Report,
    Timer,
    cuda_timer,
    interleave,
    percentile,
    raw_copies,
    wall_timer,
)
from hicache.bench.forward8b import FULL, TINY, Forward, ForwardShape, Suffix
from hicache.bench.transfer import Layout, TransferSetup
from hicache.build.factory import build_transfer
from hicache.config import EngineConfig
from hicache.transfer import LayerTransferCounter, TransferBackend, TransferOp

NAME = "overlap"
DESCRIPTION = "loads behind a forward of the 8B geometry: time hidden, time added, time to submit"

PAGE = 64
CONTIGUOUS = Layout("page64.contiguous", PAGE, PAGE, False)
RANDOM = Layout("page64.random", PAGE, PAGE, True)
# resembles the order of pages after 9000 requests of a chat service
AGED = Layout("page64.aged", PAGE, PAGE, True, host_run=4, device_run=8)
SUFFIXES = (64, 256, 1024, 2048, 4096, 8192)
RANDOM_SUFFIXES = (1024,)

# Targets on CUDA.
SUBMIT_MS = 3.0
MATMUL_TARGET = 1.02
HOST_PREFIX_TARGET = 1.02
OVERLAP_TARGET = 0.965
AGED_TARGET = 0.95
LONG_COMPUTE = 1.2  # ratio of compute time to load time from which a load should add no time

_POISON = -7.0
_WARM_TOKENS = 1024  # maximum tokens of the warm-up forward before a variant, which takes 75 ms for an 8B model
_BUSY_CYCLES = 60_000_000  # at least 30 ms of device time, which is ten times the limit for a submission
_SHARE_OF_LOAD = 0.9  # duration of concurrent matmuls as a share of the load's duration, so that matmuls end first


Sync = Callable[[], object]


@dataclass(frozen=True)
class Step:
    """A variant to time, and functions that run before and after it without being timed."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None

    def __call__(self) -> object:
        return self.run()


def step_timer(sync: Sync | None) -> Timer:
    """Return a timer that measures the run of a `Step` by the host's clock, with a call of `sync` before and after."""
    clock = wall_timer(sync)

    def measure(run: Callable[[], object]) -> float:
        step = run if isinstance(run, Step) else Step(run)
        step.before()
        seconds = clock(step.run)
        step.after()
        return seconds

    return measure


class Stage:
    """A prefix on the host, the slots for this prefix on the device, and a forward over these slots.

    Owns the pools and the backend of a `TransferSetup`. `output`: result of the last forward. `new_slots`: slots that
    the prefix does not use. Only one thread may use a stage.
    """

    def __init__(
        self,
        shape: ForwardShape,
        layout: Layout,
        prefix_tokens: int,
        device: torch.device,
    ) -> None:
        self.setup = TransferSetup(shape.geometry, layout, prefix_tokens, device)
        self.device = device
        self.shape = shape
        self.sync: Sync | None = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
        pool = self.setup.pool
        pool.register_layer_transfer_counter(self.setup.counter)
        unused = torch.ones(pool.size + pool.page_size, dtype=torch.bool, device=device)
        unused[: pool.page_size] = False
        unused[self.setup.slots] = False
        self.new_slots = unused.nonzero().flatten()
        self.forward = Forward(shape, pool, self.setup.slots, self.new_slots)
        self.output = torch.empty(0, device=device)
        self.setup.verify()

    def load(self) -> None:
        self.setup.counter.set_consumer(-1)
        self.setup.load_all()

    def resident(self, suffix: Suffix) -> None:
        self.setup.counter.set_consumer(-1)
        self.output = self.forward(suffix)

    def together(self, suffix: Suffix) -> None:
        """Run load and forward concurrently. Each layer of the forward waits until this layer is loaded."""
        self._behind_load(suffix, wait_all=False)

    def control(self, suffix: Suffix) -> None:
        """Run the load and then the forward, which begins only when the last layer is loaded."""
        self._behind_load(suffix, wait_all=True)

    def without_waits(self, suffix: Suffix) -> None:
        """Run a forward over the prefix on the device without waiting for layers, while a load writes the bytes of this
        prefix again."""
        _, op = self.submit()
        self.resident(suffix)
        op.wait()

    def submit(self) -> tuple[int, TransferOp]:
        counter = self.setup.counter
        assert counter.can_begin()
        load_id = counter.begin()
        return load_id, self.setup.backend.load(self.setup.pages, self.setup.chosen, load_id)

    def poison(self) -> None:
        """Overwrite the prefix on the device."""
        for layer in self.setup.pool.layer_ids:
            for buffer in self.setup.pool.layer_buffers(layer):
                buffer.index_fill_(0, self.setup.slots, _POISON)

    def steps(self, suffix: Suffix) -> dict[str, Step]:
        """Return the variants for one suffix. The output of each forward is compared with a forward over a prefix that
        was already on the device.

        Before each variant an untimed forward runs, because an idle device would begin with higher clocks.
        """
        before = suffix if len(suffix.x) <= _WARM_TOKENS else self.forward.suffix(_WARM_TOKENS)
        self.resident(suffix)
        expected = self.output

        def check() -> None:
            if not torch.equal(self.output, expected):
                raise AssertionError(f"{len(suffix.x)} new tokens: the output is not that over a resident prefix")

        def warm() -> None:
            self.resident(before)
            self.output = torch.zeros_like(expected)

        def poisoned() -> None:
            warm()
            self.poison()

        return {
            "load": Step(self.load, warm),
            "compute": Step(lambda: self.resident(suffix), warm, check),
            "together": Step(lambda: self.together(suffix), poisoned, check),
            "control": Step(lambda: self.control(suffix), poisoned, check),
            "beside": Step(lambda: self.without_waits(suffix), warm, check),
        }

    def close(self) -> None:
        self.setup.close()

    def _behind_load(self, suffix: Suffix, *, wait_all: bool) -> None:
        counter = self.setup.counter
        load_id, op = self.submit()
        counter.set_consumer(load_id)
        if wait_all:
            counter.wait_all()
            counter.set_consumer(-1)
        self.output = self.forward(suffix)
        counter.set_consumer(-1)
        op.wait()  # all layers are loaded by now; this waits for the end of the operation
        if op.error is not None:
            raise op.error


@dataclass(frozen=True)
class Order:
    """An order of pages, and the names of its cases."""

    layout: Layout
    prefix: str = "overlap."
    ending: str = ""
    target: float = OVERLAP_TARGET

    def submit(self, num_tokens: int) -> str:
        tokens = f"{num_tokens >> 10}k" if num_tokens % 1024 == 0 else str(num_tokens)
        return "overlap.aged.submit" if self.layout is AGED else f"submit.{tokens}{self.ending}"

    @property
    def host_prefix(self) -> str:
        return "forward.host_prefix.aged" if self.layout is AGED else f"forward.host_prefix{self.ending}"


ORDERS = (Order(CONTIGUOUS), Order(RANDOM, ending=".random"), Order(AGED, "overlap.aged.", target=AGED_TARGET))


@dataclass(frozen=True)
class Overlap:
    """Seconds for one suffix. `load`, `compute`: medians of the load alone and the forward alone. Other fields have the
    seconds of every run of a variant."""

    num_tokens: int
    load: float
    compute: float
    together: tuple[float, ...]
    control: tuple[float, ...]
    without_waits: tuple[float, ...]

    @property
    def measured(self) -> float:
        return percentile(self.together, 50)

    def hidden(self, runs: Sequence[float]) -> list[float]:
        """Return, for each run, the share of the shorter half (load or forward) that was hidden behind the other half.
        It is negative if the run took longer than both halves in sequence."""
        return [(self.load + self.compute - run) / min(self.load, self.compute) for run in runs]

    def report(self, report: Report, order: Order, *, target: bool) -> None:
        longer = max(self.load, self.compute)
        parts = (("load", self.load), ("compute", self.compute), ("both", self.measured))
        note = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in parts)
        prefix, name = order.prefix, f"suffix{self.num_tokens}{order.ending}"
        together, without_waits = ([longer / run for run in runs] for runs in (self.together, self.without_waits))
        case_target = order.target if target else None
        report.case(f"{prefix}{name}", together, "share", ceiling=1.0, target=case_target, note=note)
        report.case(f"{prefix}hidden.{name}", self.hidden(self.together), "share")
        note = f"one wait for all layers: {percentile(self.control, 50) * 1e3:.2f} ms"
        report.case(f"{prefix}control.{name}", self.hidden(self.control), "share", better="lower", note=note)
        note = f"waiting for no layer: {percentile(self.without_waits, 50) * 1e3:.2f} ms"
        report.case(f"{prefix}beside.{name}", without_waits, "share", ceiling=1.0, note=note)


def report_host_prefix(report: Report, overlaps: Sequence[Overlap], order: Order, *, target: bool) -> None:
    """Report the time that a prefix on the host adds to the shortest forward that takes clearly longer than its
    load."""
    o = min((o for o in overlaps if o.compute >= LONG_COMPUTE * o.load), key=lambda o: o.num_tokens, default=None)
    if o is None:
        return
    times = f"{o.num_tokens} new tokens, compute {o.compute / o.load:.2f} x transfer"
    case_target, note = HOST_PREFIX_TARGET if target else None, f"{times}; the ceiling is the resident forward"
    report.time(order.host_prefix, o.together, "ms", ceiling_seconds=[o.compute], target=case_target, note=note)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, help="timed rounds (default: 20 on CUDA, 3 else)")
    parser.add_argument("--prefix-tokens", type=int, help="tokens on the host (default: 32768 on CUDA, 512 else)")
    parser.add_argument(
        "--orders", nargs="+", choices=[order.layout.name for order in ORDERS], help="of pages (default: all)"
    )
    parser.add_argument(
        "--suffixes", type=int, nargs="+", help="new tokens (default: 64 to 8192 on CUDA, 8 and 32 else)"
    )


def run(args: argparse.Namespace, report: Report) -> None:
    """Run with the full geometry on CUDA. On other devices use a tiny geometry, which only tests the benchmark."""
    device: torch.device = args.device
    on_cuda = device.type == "cuda"
    samples = args.samples or (20 if on_cuda else 3)
    prefix_tokens = args.prefix_tokens or (32768 if on_cuda else 512)
    suffixes = sorted(set(args.suffixes or (SUFFIXES if on_cuda else (8, 32))))
    if prefix_tokens < PAGE or prefix_tokens % PAGE:
        raise BenchUnavailable(f"--prefix-tokens {prefix_tokens}: give whole pages of {PAGE}")
    if suffixes[0] < 1 or suffixes[-1] > prefix_tokens // 4 // PAGE * PAGE:
        raise BenchUnavailable(f"--suffixes {suffixes}: give 1 to {prefix_tokens // 4 // PAGE * PAGE}")
    if args.orders and not args.resume:
        # The results of some orders must not replace the results of all orders.
        report.bench = "-".join([NAME, *(name.rpartition(".")[2] for name in args.orders)])
    shape, orders = FULL if on_cuda else TINY, [o for o in ORDERS if o.layout.name in (args.orders or o.layout.name)]
    with torch.cuda.stream(torch.cuda.Stream(device)) if on_cuda else nullcontext():
        for order in orders:
            # Random orders are measured with fewer suffixes.
            lengths = [s for s in suffixes if s in RANDOM_SUFFIXES] or suffixes[:1]
            with closing(Stage(shape, order.layout, prefix_tokens, device)) as stage:
                _stage(report, stage, samples, order, lengths if order.layout.scattered else suffixes)


def _stage(report: Report, stage: Stage, samples: int, order: Order, lengths: Sequence[int]) -> None:
    """Measure all cases of one order of pages."""
    _submit(report, stage, samples, order)
    if not order.layout.scattered:
        _during_load(report, stage, samples)
    _overlap(report, stage, samples, order, lengths)
    stage.setup.verify()


def measure_overlap(report: Report, stage: Stage, samples: int, order: Order, num_tokens: int) -> Overlap:
    """Measure and report the overlap of a load and a forward of `num_tokens` new tokens."""
    steps = stage.steps(stage.forward.suffix(num_tokens))
    seconds = interleave(steps, samples=samples, warmup=1, timer=step_timer(stage.sync))
    load, compute = (percentile(seconds[name], 50) for name in ("load", "compute"))
    runs = (tuple(seconds[name]) for name in ("together", "control", "beside"))
    overlap = Overlap(num_tokens, load, compute, *runs)
    overlap.report(report, order, target=stage.device.type == "cuda")
    return overlap


def _overlap(report: Report, stage: Stage, samples: int, order: Order, lengths: Sequence[int]) -> None:
    target = stage.device.type == "cuda"
    overlaps = [measure_overlap(report, stage, samples, order, num_tokens) for num_tokens in lengths]
    report_host_prefix(report, overlaps, order, target=target)


def _submit(report: Report, stage: Stage, samples: int, order: Order) -> None:
    """Measure the host time of `backend.load` while the device is busy, for the stage's backend and for a backend with
    default staging."""
    setup, name = stage.setup, order.submit(stage.setup.tokens)
    _time_submit(report, stage, setup.backend, setup.counter, samples, name, strict=stage.device.type == "cuda")
    if order.layout.scattered:
        return
    default = EngineConfig(device_tokens=setup.pool.size, host_page_size=PAGE, device=str(stage.device))
    backend, counter = build_transfer(default, setup.pool, setup.host)
    assert backend is not None
    backend.start()
    try:
        name += f".staging{default.advanced.staging_bytes >> 20}"
        _time_submit(report, stage, backend, counter, samples, name, strict=False)
    finally:
        backend.close()


def _time_submit(
    report: Report,
    stage: Stage,
    backend: TransferBackend,
    counter: LayerTransferCounter,
    samples: int,
    name: str,
    *,
    strict: bool,
) -> None:
    """Measure the time of submissions, and the host time until all layers are queued. A part of the latter time
    overlaps with launching the forward.

    `strict`: the case has a target, and a submission that waits for the device raises AssertionError.
    """
    setup, on_cuda = stage.setup, stage.device.type == "cuda"
    submitted: list[float] = []
    queued: list[float] = []
    waited = 0
    for turn in range(-2, samples):
        end = _occupy(stage.device) if on_cuda else None
        load_id = counter.begin()
        start = time.perf_counter()
        op = backend.load(setup.pages, setup.chosen, load_id)
        elapsed = time.perf_counter() - start
        idle = end is not None and end.query()
        if on_cuda:  # on a CPU, this call would wait for the end of the copy
            op.wait_outcome()
        whole = time.perf_counter() - start
        op.wait()
        if turn >= 0:
            submitted.append(elapsed)
            queued.append(whole)
            waited += idle
    if strict and waited:
        raise AssertionError(
            f"{name}: {waited} of {samples} submissions returned after the device's own work had ended"
        )
    note = f"returned with the device still busy: {samples - waited} of {samples}" if on_cuda else ""
    ceiling, target = SUBMIT_MS if on_cuda else None, 1.0 if strict else None
    report.time(name, submitted, "ms", ceiling=ceiling, target=target, note=note)
    report.time(f"{name}.all_layers", queued, "ms", note="until the last layer is queued")


def _occupy(device: torch.device) -> torch.cuda.Event:
    """Wait until the device is idle, then queue work on the current stream that takes longer than submitting a load.
    Returns an event at the end of this work."""
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_BUSY_CYCLES)
    end = torch.cuda.Event()
    end.record()
    return end


def _during_load(report: Report, stage: Stage, samples: int) -> None:
    """Measure how much a load at full speed slows matmuls, and attention over a long prefix."""
    on_cuda = stage.device.type == "cuda"
    side, heads, tokens = (8192, 32, 2048) if on_cuda else (128, 4, 16)
    make = partial(torch.randn, device=stage.device, dtype=torch.bfloat16)
    a, b, c = (make(side, side) for _ in range(3))
    q, k, v = make(1, heads, tokens, 128), *(make(1, heads // 4, 16 * tokens, 128) for _ in range(2))
    what = f"{heads} heads of 128, {tokens} tokens over {16 * tokens}"
    measure_during_load(
        report, stage, samples, "matmul.during_load", f"{side}^3", lambda: torch.mm(a, b, out=c), MATMUL_TARGET
    )
    attend = partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True)
    measure_during_load(report, stage, samples, "attention.during_load", what, attend, None)


def measure_during_load(
    report: Report, stage: Stage, samples: int, name: str, what: str, work: Callable[[], object], target: float | None
) -> None:
    """Time `work`, repeated on a separate stream, alone and during a load at full speed; on CUDA also during plain
    copies of the same duration."""
    on_cuda = stage.device.type == "cuda"
    clock = cuda_timer(stage.device, torch.cuda.Stream(stage.device)) if on_cuda else wall_timer()

    def seconds_of(count: int) -> float:
        return clock(lambda: [work() for _ in range(count)])

    alone = interleave({"load": stage.load}, samples=3, warmup=1, sync=stage.sync)["load"]
    seconds_of(8)
    count = max(1, int(_SHARE_OF_LOAD * percentile(alone, 50) / (seconds_of(8) / 8)))
    outlasted: list[bool] = []
    loads: list[float] = []

    def measure_during_load() -> float:
        _, op = stage.submit()
        if on_cuda:  # on a CPU, this call would wait for the end of the copy
            op.wait_outcome()
        seconds = seconds_of(count)
        outlasted.append(not op.done())
        op.wait()
        loads.append(op.seconds())
        return seconds

    variants = {"alone": lambda: seconds_of(count), "load": measure_during_load}
    if on_cuda:
        copies = _Copies(stage.device, percentile(alone, 50))
        variants["copy"] = lambda: copies.run_during(lambda: seconds_of(count))
    seconds = interleave(variants, samples=samples, timer=lambda run: cast(float, run()))
    each = {name: [s / count for s in values] for name, values in seconds.items()}
    note = (
        f"{count} of {what} a run; the load took {percentile(loads, 50) * 1e3:.1f} ms beside them, "
        f"{percentile(alone, 50) * 1e3:.1f} alone, and outlasted them in {sum(outlasted)} of {len(outlasted)} runs"
    )
    if on_cuda:
        note += f"; beside plain copies {percentile(each['copy'], 50) / percentile(each['alone'], 50):.3f}"
    target = target if on_cuda else None
    report.time(name, each["load"], "ms", ceiling_seconds=each["alone"], target=target, note=note)


class _Copies:
    """Plain copies to the device, repeated on a separate stream for about `seconds`."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._copy = raw_copies(device)["up"]
        self._stream = torch.cuda.Stream(device)
        self._count = math.ceil(seconds / wall_timer(partial(torch.cuda.synchronize, device))(self._copy.run))

    def run_during(self, run: Callable[[], float]) -> float:
        with torch.cuda.stream(self._stream):
            for _ in range(self._count):
                self._copy.run()
        seconds = run()
        self._stream.synchronize()
        return seconds
