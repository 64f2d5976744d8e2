"""Transfers under stress: overlapping loads and stores over tiny tiers, with concurrent forwards.

`transfer_program` runs the operations and knows the expected bytes. By default copies on the CPU are as late as
possible (`CopiesWhenNeeded`), so that a reader that does not wait always reads too early. In long tests the threads run
freely.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from hicache.kernels.upload import IdUploader
from hicache.transfer import TransferOp, copies, cuda
from hicache.transfer.plan import Method
from transfer_case import LAYOUTS
from transfer_hooks import CopiesWhenNeeded, Lanes, at_each_move, force_methods
from transfer_program import Program

METHODS: list[Method] = ["unstaged", "strided", "batched", "zero_copy"]
# On CUDA: bytes of staging, and the copy methods, chosen at random. By the costs of the methods a plan would choose
# zero-copy for all small copies.
PLACES = [
    ("cpu", 1 << 16, ()),
    pytest.param("cuda", 1 << 16, (), marks=pytest.mark.gpu),
    pytest.param("cuda", 1 << 16, ("unstaged",), marks=pytest.mark.gpu),
    pytest.param("cuda", 1 << 16, ("strided", "batched"), marks=pytest.mark.gpu),
    pytest.param("cuda", 1 << 20, METHODS, marks=pytest.mark.gpu),
]
# Most work on the CPU is for copies of wide pages, and for packing.
SLOW = ("mha, wide", "packed")
SMALL = [name for name in LAYOUTS if name != "mha, wide"]  # layouts of the default run


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Let threads switch every few instructions, not every few milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def come_late(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Delay copies on the CPU. On CUDA the program itself delays the work of the device."""
    if device == "cpu":
        CopiesWhenNeeded(monkeypatch)


def stress(program: Program, steps: int) -> None:
    """Run the program. Unless copies may fail, require many copies, and many concurrent ones."""
    try:
        program.run(steps)
    finally:
        program.close()
    counts = program.counts
    if not program.tolerant:
        assert counts["load"] > steps // 5 and counts["store"] > steps // 5 and counts["forwards"] > steps // 5, counts
        assert counts["overlaps"] > steps // 20, "hardly a forward ran beside a load that it consumed"
        assert counts["most at once"] >= 3 * len(program.tiers), counts


@pytest.mark.parametrize(("device", "staging_bytes", "methods"), PLACES)
@pytest.mark.parametrize("name", SMALL)
def test_every_byte_is_where_it_should_be(
    monkeypatch: pytest.MonkeyPatch, device: str, staging_bytes: int, methods: Sequence[Method], name: str
) -> None:
    """For every layout, and for packed pages of which some do not fit, loads, stores and forwards overlap. Forwards
    read the right bytes layer by layer, and completed stores have written them to the host. In the end every row and
    page has the bytes of its last writer."""
    if methods:
        force_methods(monkeypatch, methods)
    come_late(monkeypatch, device)
    stress(Program(LAYOUTS[name], device, 1, staging_bytes=staging_bytes), 100 if device == "cpu" else 300)


@pytest.mark.gpu
@pytest.mark.parametrize("staging_bytes", [1 << 16, 1 << 20, 1 << 24])
@pytest.mark.parametrize(
    ("methods", "submit_s"),
    [(("strided",), 0.0), (("batched",), 1.0), (("zero_copy",), 0.0), (METHODS, 0.0), (METHODS, 1.0)],
)
def test_wide_pages_on_cuda(
    monkeypatch: pytest.MonkeyPatch, staging_bytes: int, submit_s: float, methods: Sequence[Method]
) -> None:
    """Pages with layers as wide as a large model's are right too, through a ring of one or more pages per buffer. Each
    copy method is used alone, and all in turn; loads are queued at once or step by step."""
    force_methods(monkeypatch, methods)
    monkeypatch.setattr(cuda, "_SUBMIT_S", submit_s)
    monkeypatch.setattr(cuda, "_AHEAD", 1)
    stress(Program(LAYOUTS["mha, wide"], "cuda", 2, staging_bytes=staging_bytes), 200)


@pytest.mark.long
@pytest.mark.usefixtures("many_switches")
@pytest.mark.parametrize(("device", "staging_bytes", "methods"), PLACES)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("seed", range(10, 13))
def test_every_byte_for_longer(
    monkeypatch: pytest.MonkeyPatch, device: str, staging_bytes: int, methods: Sequence[Method], name: str, seed: int
) -> None:
    """The overlap test runs longer, with thousands of transfers."""
    if methods:
        force_methods(monkeypatch, methods)
    on_cpu = 600 if name in SLOW else 5000
    steps = on_cpu if device == "cpu" else 2000  # eight workers share a device
    stress(Program(LAYOUTS[name], device, seed, staging_bytes=staging_bytes), steps)


def fail_now_and_then(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Let moves fail at fixed positions of their lane, which do not depend on timing. On CUDA an upload of slots may
    fail too, as if memory ran out, and CUDA may refuse a copy."""
    lanes = Lanes(4)

    def hook(lane: str, share: float = 0.06) -> None:
        if lanes.of(lane).random() < share:
            raise RuntimeError("the link is down")

    at_each_move(monkeypatch, lambda move: hook(move.lane))
    if device == "cpu":
        return
    upload, strided, batched = IdUploader.__call__, copies.cudart.cudaMemcpy2DAsync, copies.batch_call()
    unknown = copies.cudart.cudaError_t.cudaErrorUnknown

    def uploaded(self: IdUploader, ids: torch.Tensor) -> torch.Tensor:
        hook("upload", 0.03)
        return upload(self, ids)

    def copied(call: Callable[..., Any], refused: Any, *of: Any) -> Any:
        try:
            hook("copy", 0.005)
        except RuntimeError:
            return refused
        return call(*of)

    monkeypatch.setattr(IdUploader, "__call__", uploaded)
    monkeypatch.setattr(copies.cudart, "cudaMemcpy2DAsync", partial(copied, strided, (unknown,)))
    if batched is not None:
        monkeypatch.setattr(copies, "batch_call", lambda: partial(copied, batched, int(unknown)))


def amid_failures(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    name: str,
    steps: int,
    methods: Sequence[Method] = METHODS,
    staging_bytes: int = 1 << 16,
) -> None:
    """Run a program with failures. On CUDA a load is submitted with its first step queued; the other steps are queued
    as late as possible."""
    force_methods(monkeypatch, methods)
    monkeypatch.setattr(cuda, "_SUBMIT_S", 0.0)
    monkeypatch.setattr(cuda, "_AHEAD", 1)
    program = Program(LAYOUTS[name], device, 3, staging_bytes=staging_bytes, tolerant=True)
    fail_now_and_then(monkeypatch, device)  # after the start, so that no failing move compiles a kernel
    stress(program, steps)
    counts = program.counts
    assert counts["failed"] > 5 and counts["told"] > 0 and counts["forwards"] > steps // 8, counts


@pytest.mark.parametrize("name", ["mha", "nsa", "hybrid", "packed"])
def test_failures_stay_with_their_transfers(monkeypatch: pytest.MonkeyPatch, device: str, name: str) -> None:
    """Each random failure is reported by its operation and, for a load, to exactly the forwards that consume it. All
    other bytes are right, and loads never run out of producers."""
    come_late(monkeypatch, device)
    amid_failures(monkeypatch, device, name, 120 if device == "cpu" else 250)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_failures_of_each_method(monkeypatch: pytest.MonkeyPatch, method: Method) -> None:
    """Failures stay with their transfers for each method of copies, with layers that are wide enough for all
    methods."""
    amid_failures(monkeypatch, "cuda", "mha, wide", 250, (method,), staging_bytes=1 << 20)


@pytest.mark.long
@pytest.mark.usefixtures("many_switches")
@pytest.mark.parametrize("name", LAYOUTS)
def test_many_failures(monkeypatch: pytest.MonkeyPatch, device: str, name: str) -> None:
    """The failure test runs longer."""
    amid_failures(monkeypatch, device, name, 600 if name in SLOW else 4000)


@pytest.mark.parametrize("name", ["mha", "swa"])
def test_closing_finishes_what_is_in_flight(monkeypatch: pytest.MonkeyPatch, device: str, name: str) -> None:
    """After `close()` every submitted operation has ended without an error, and all its bytes have arrived."""
    force_methods(monkeypatch, METHODS)
    come_late(monkeypatch, device)
    program = Program(LAYOUTS[name], device, 5)
    try:
        program.run(40)
        pending: list[TransferOp] = []
        while len(pending) < 2:
            program.serve()
            pending = [op for ops in program.lanes.values() for op in ops]
        program.watch.settle()
        for tier in program.tiers:
            tier.backend.close()
        assert [op for op in pending if not op.done() or op.error is not None] == []
        program.audit()
    finally:
        program.close()
