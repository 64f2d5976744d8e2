"""Measures the device tier's kernels and allocators. The ceilings, measured in the same rounds, are a plain copy within
device memory and an empty launch.

    bytes   fused store, moves, gathers and scatters in the pool of an 8B model (bench.device_bytes)
    slots   allocations and frees, compared with an empty kernel and a fill of the result; `host_us`: time of the
            calling thread

The timed part does not include checks of the results. Calls that must not wait for the device also run once in a mode
in which torch raises if a call waits.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator

import torch

from hicache import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from hicache.bench.common import Report, add_parts, chosen_parts, interleave
from hicache.bench.device_bytes import PAGE, Run, measure_bytes, queued_timer
from hicache.config.environment import kernel_choice
from hicache.kernels._triton import jit
from hicache.kernels.alloc_decode import alloc_decode
from hicache.kernels.alloc_extend import alloc_extend

NAME = "device"
DESCRIPTION = "device tier: pages moved, against a device copy; allocators against an empty launch"

PARTS = ("bytes", "slots")
TOKEN_ALLOC_US, LAUNCH_TARGET = 5.0, 1.5


@jit
def _empty_kernel(x):  # type: ignore[no-untyped-def]
    pass


@contextlib.contextmanager
def no_wait(device: torch.device) -> Iterator[None]:
    """Within the block, make torch raise if an operation would make the host wait for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, help="timed rounds (default: 30 on CUDA, 5 else)")
    add_parts(parser, PARTS)


def run(args: argparse.Namespace, report: Report) -> None:
    device: torch.device = args.device
    samples = args.samples or (30 if device.type == "cuda" else 5)
    torch.manual_seed(0)
    for part in chosen_parts(args, report, PARTS):
        if part == "slots":
            _measure_launches(report, samples, device)
            _measure_host(report, samples, device)
            _measure_frees(report, samples, device)
        else:
            measure_bytes(report, samples, device)


def _baseline(out: torch.Tensor) -> Run:
    """Return a run that fills the result, after an empty launch if the device has kernels."""
    on_cuda = out.device.type == "cuda"

    def run() -> None:
        if on_cuda:
            _empty_kernel[(1,)](out)
        out.fill_(1)

    return run


def _measure_launches(report: Report, samples: int, device: torch.device) -> None:
    """Measure the device time of kernels that write slots, compared with an empty kernel and a fill of the result."""
    kernels, on_cuda = kernel_choice(device), device.type == "cuda"
    free = torch.randperm(1 << 16, device=device) + 1
    # The extend case has 64 requests that grow from 0 to 4096 tokens. The decode case has 256 requests at all offsets
    # within a page, each in a separate page.
    no_prefix, none, lengths = (torch.full((64,), n, device=device) for n in (0, -1, 4096))
    before = torch.arange(256, device=device) + 1000
    after, last = before + 1, (torch.arange(256, device=device) + 100_000) * PAGE + (before - 1) % PAGE
    slots, one_each = (torch.empty(n, dtype=torch.int64, device=device) for n in (64 * 4096, 256))
    cases: dict[str, tuple[Run, torch.Tensor]] = {
        "alloc_extend.64x4096": (
            lambda: alloc_extend(no_prefix, lengths, none, free, slots, PAGE, 4096, kernels), slots,
        ),
        "alloc_decode.256": (lambda: alloc_decode(after, last, free, one_each, PAGE, kernels), one_each),
    }  # fmt: skip
    for name, (launch, result) in cases.items():
        launch()
        with no_wait(device):
            launch()
        variants = {"case": launch, "base": _baseline(torch.empty_like(result))}
        seconds = interleave(variants, samples=samples, timer=queued_timer(device, 20))
        ceiling_seconds, target = seconds["base"], LAUNCH_TARGET if on_cuda else None
        report.time(f"{name}.device_us", seconds["case"], "us", ceiling_seconds=ceiling_seconds, target=target)


def _measure_host(report: Report, samples: int, device: torch.device) -> None:
    """Measure the time that a call of an allocator takes in the calling thread, as the mean of 100 calls in a row."""
    token, seconds = TokenToKVPoolAllocator(1 << 20, torch.bfloat16, device, None, True), []
    with no_wait(device):
        token.alloc(128)
    for _ in range(samples):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(100):
            token.alloc(128)
        seconds.append((time.perf_counter() - start) / 100)
    ceiling_seconds, note = [TOKEN_ALLOC_US / 1e6], f"the ceiling is the bound of {TOKEN_ALLOC_US:g} us"
    target = 1.0 if device.type == "cuda" else None
    report.time("token_alloc.128.host_us", seconds, "us", ceiling_seconds=ceiling_seconds, target=target, note=note)


def _measure_frees(report: Report, samples: int, device: torch.device) -> None:
    """Measure the time that one group of frees takes in the calling thread. A group frees 64 or 256 requests of 4096
    tokens, given as runs or as tokens."""
    for requests in (64, 256):
        allocator = PagedTokenToKVPoolAllocator(2 * requests * 4096, PAGE, torch.bfloat16, device, None, True)
        slots = allocator.alloc(requests * 4096)
        assert slots is not None
        parts, held = slots.split(4096), allocator.backup_state()
        for verb, free in (("runs", allocator.free_run), ("tokens", allocator.free)):
            seconds = []
            for sample in range(samples + 2):
                allocator.restore_state(held)
                with no_wait(device):
                    start = time.perf_counter()
                    allocator.free_group_begin()
                    for part in parts:
                        free(part)
                    allocator.free_group_end()
                    elapsed = time.perf_counter() - start
                if sample > 1:
                    seconds.append(elapsed)
                if allocator.available_size() != allocator.size:
                    raise AssertionError(f"{allocator.available_size()} of {allocator.size} tokens came back")
            allocator.check()
            report.time(f"free_group.{requests}.{verb}.host_us", seconds, "us")
