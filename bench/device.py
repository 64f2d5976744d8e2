"""The device tier's kernels and allocators, as shares of a plain device copy or of an empty launch in the same rounds.

Bytes: fused store, moves, gathers and scatters against a copy of as many bytes within device memory. A kernel's time is
the device's: the queue is held by a sleep while the host fills it, so that launches cost what they cost in a busy
stream. Slots: allocations and frees against an empty kernel and a fill of the result, on the device and, as `host_us`,
in the caller's time. What was computed is compared outside the timing, and what must not wait is run once where torch
raises if it does.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hicache import MHATokenToKVPool, PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from hicache.bench.common import Report, interleave
from hicache.bench.queued import queued_timer
from hicache.config import kernel_choice
from hicache.kernels._triton import jit
from hicache.kernels.alloc_decode import alloc_decode
from hicache.kernels.alloc_extend import alloc_extend
from hicache.kernels.page_copy import PageMover
from hicache.kernels.store_kv import store_kv
from hicache.kernels.tiled_copy import TiledCopy

NAME = "device"
DESCRIPTION = "device tier: store, move, gather and scatter against a device copy; allocators against an empty launch"

HEADS, DIM, LAYERS, PAGE = 8, 128, 32, 64
ROW_BYTES = HEADS * DIM * 2
TOKEN_BYTES = 2 * LAYERS * ROW_BYTES
SIZES = {"2mib": 2 << 20, "64mib": 64 << 20, "512mib": 512 << 20}
TILES = (128, 256, 512)
TOKEN_ALLOC_US, LAUNCH_TARGET = 5.0, 1.5

Run = Callable[[], object]


@jit
def _empty_kernel(x):  # type: ignore[no-untyped-def]
    pass


@dataclass(frozen=True)
class Variant:
    """One thing to time: `run` moves `num_bytes`; `verify` raises where the result is wrong. `target`: from 64 MiB."""

    run: Run
    num_bytes: int
    verify: Run
    target: float | None = 0.85


@contextlib.contextmanager
def no_wait(device: torch.device) -> Iterator[None]:
    """Torch raises where it would make the host wait for the device."""
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
    parser.add_argument("--only", choices=["bytes", "slots"], help="one half of the cases")
    parser.add_argument("--tiles", action="store_true", help="moves also with tiles of 128, 256 and 512 bytes")


def run(args: argparse.Namespace, report: Report) -> None:
    device: torch.device = args.device
    on_cuda = device.type == "cuda"
    samples = args.samples or (30 if on_cuda else 5)
    torch.manual_seed(0)
    if args.only != "slots":
        for name, num_bytes in SIZES.items():
            if on_cuda or name == "2mib":
                _measure_bytes(report, name, num_bytes, samples, device, args.tiles)
    if args.only != "bytes":
        _measure_launches(report, samples, device)
        _measure_host(report, samples, device)
        _measure_frees(report, samples, device)


def _measure_bytes(report: Report, size: str, num_bytes: int, samples: int, device: torch.device, tiles: bool) -> None:
    on_cuda = device.type == "cuda"
    variants = _store_variants(num_bytes, device) | _pool_variants(num_bytes, device, tiles)
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for variant in variants.values():
        variant.run()
        variant.verify()
    runs: dict[str, Run] = {"copy": lambda: target.copy_(source), **{n: v.run for n, v in variants.items()}}
    repeat = max(1, min(20, (256 << 20) // num_bytes)) if on_cuda else 1
    seconds = interleave(runs, samples=samples, timer=queued_timer(device, repeat))
    report.rate(f"copy.{size}", num_bytes, seconds["copy"])
    for name, variant in variants.items():
        variant.verify()
        target_share = variant.target if size != "2mib" or variant.target is None else 0.6
        beside, target_share = seconds["copy"], target_share if on_cuda else None
        case, moved = f"{name}.{size}", variant.num_bytes
        report.rate(case, moved, seconds[name], beside=beside, beside_bytes=num_bytes, target=target_share)


def _paged_slots(num_tokens: int, size: int, device: torch.device) -> torch.Tensor:
    """Slots of `num_tokens` tokens in pages of 64 in random order, page 0 left out; fewer than a page are random."""
    if num_tokens % PAGE:
        return torch.randperm(size, device=device)[:num_tokens] + PAGE
    pages = torch.randperm(size // PAGE, device=device)[: num_tokens // PAGE] + 1
    return (pages[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()


def _expect(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
        raise AssertionError(f"{what}: the bytes are not those that were to be there")


def _store_variants(num_bytes: int, device: torch.device) -> dict[str, Variant]:
    """K and V of one layer, stored as they are, and converted to fp8 with scales."""
    kernels, tokens = kernel_choice(device), num_bytes // (2 * ROW_BYTES)
    slots = _paged_slots(tokens, 2 * tokens, device)
    k, v = (torch.randn(tokens, HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(2))
    plain, narrow = (
        [torch.zeros(2 * tokens + PAGE, HEADS, DIM, device=device, dtype=dtype) for _ in range(2)]
        for dtype in (torch.bfloat16, torch.uint8)
    )
    fp8 = [buffer.view(torch.float8_e4m3fn) for buffer in narrow]
    scale = torch.full((1,), 0.25, device=device)

    def verify_plain() -> None:
        for rows, buffer in zip((k, v), plain, strict=True):
            _expect(buffer[slots], rows, "store")

    def verify_fp8() -> None:
        for rows, buffer in zip((k, v), narrow, strict=True):
            _expect(buffer[slots], (rows.float() / scale).to(torch.float8_e4m3fn), "store_fp8")

    return {
        "store": Variant(lambda: store_kv(k, v, plain[0], plain[1], slots, kernels), num_bytes, verify_plain),
        # Half of the bytes that a copy would write: the mean of what is read and written.
        "store_fp8": Variant(
            lambda: store_kv(k, v, fp8[0], fp8[1], slots, kernels, scale, scale), num_bytes * 3 // 4, verify_fp8
        ),
    }


def _pool_variants(num_bytes: int, device: torch.device, tiles: bool) -> dict[str, Variant]:
    """Moves within a pool of all layers, and pages between it and staging in host-page order."""
    kernels, tokens = kernel_choice(device), num_bytes // TOKEN_BYTES
    size = max(4 * tokens, 8 * PAGE)
    pool = MHATokenToKVPool(size, PAGE, torch.bfloat16, HEADS, DIM, LAYERS, device, False)
    buffers = [buffer for layer in range(LAYERS) for buffer in pool.layer_buffers(layer)]
    for buffer in buffers:
        buffer.normal_()
    order = torch.randperm(size, device=device) + PAGE
    source, target = order[:tokens], order[tokens : 2 * tokens]

    def verify_move() -> None:
        for buffer in buffers:
            _expect(buffer[target], buffer[source], "move")

    def mover(tile: int | None) -> Run:
        copy = TiledCopy(buffers, kernels, tile)
        return lambda: copy.move(target, source)

    moves = {"move": mover(None)} | ({f"move_tile{n}": mover(n) for n in TILES} if tiles else {})
    variants = {
        name: Variant(run, num_bytes, verify_move, 0.85 if name == "move" else None) for name, run in moves.items()
    }
    # The front half of a ring takes the place of its back half and the other way round: every row is at risk.
    ring = order[2 * tokens : 3 * tokens]
    shifted = ring.roll(tokens // 2)
    swap = TiledCopy(buffers, kernels)
    variants["move_overlapping"] = Variant(lambda: swap.move(shifted, ring), num_bytes, lambda: None, None)

    # Below a whole page of all layers: one page, and as many layers as give the bytes.
    num_pages = max(1, tokens // PAGE)
    layers = num_bytes // (num_pages * PAGE * 2 * ROW_BYTES)
    slots = _paged_slots(num_pages * PAGE, size, device)
    pages = PageMover([pool.layer_buffers(layer) for layer in range(LAYERS)], PAGE, kernels)
    staging = torch.empty(num_pages, num_bytes // num_pages, dtype=torch.uint8, device=device)

    def verify_pages() -> None:
        pages.gather(slots, staging, 0, layers)
        staged = staging.view(num_pages, layers, 2, PAGE, ROW_BYTES)
        for layer in range(layers):
            for part, buffer in enumerate(pool.layer_buffers(layer)):
                rows = buffer[slots].view(torch.uint8).view(num_pages, PAGE, ROW_BYTES)
                _expect(staged[:, layer, part].contiguous(), rows, "gather")
        kept = [buffer[slots] for buffer in buffers]
        for buffer in buffers[: 2 * layers]:
            buffer[slots] = 0
        pages.scatter(staging, slots, 0, layers)
        for buffer, rows in zip(buffers, kept, strict=True):
            _expect(buffer[slots], rows, "scatter")

    variants["gather"] = Variant(lambda: pages.gather(slots, staging, 0, layers), num_bytes, verify_pages)
    variants["scatter"] = Variant(lambda: pages.scatter(staging, slots, 0, layers), num_bytes, lambda: None)
    return variants


def _baseline(out: torch.Tensor) -> Run:
    """An empty launch, where kernels are launched at all, and a fill of the result."""
    on_cuda = out.device.type == "cuda"

    def run() -> None:
        if on_cuda:
            _empty_kernel[(1,)](out)
        out.fill_(1)

    return run


def _measure_launches(report: Report, samples: int, device: torch.device) -> None:
    """Device time of the kernels that write slots, against an empty kernel and writing the result."""
    kernels, on_cuda = kernel_choice(device), device.type == "cuda"
    free = torch.randperm(1 << 16, device=device) + 1
    # 64 requests that grow from nothing by 4096 tokens, and 256 at all places of a page, each in a page of its own.
    no_prefix, none, whole = (torch.full((64,), n, device=device) for n in (0, -1, 4096))
    before = torch.arange(256, device=device) + 1000
    after, last = before + 1, (torch.arange(256, device=device) + 100_000) * PAGE + (before - 1) % PAGE
    slots, one_each = (torch.empty(n, dtype=torch.int64, device=device) for n in (64 * 4096, 256))
    cases: dict[str, tuple[Run, torch.Tensor]] = {
        "alloc_extend.64x4096": (
            lambda: alloc_extend(no_prefix, whole, none, free, slots, PAGE, 4096, kernels), slots,
        ),
        "alloc_decode.256": (lambda: alloc_decode(after, last, free, one_each, PAGE, kernels), one_each),
    }  # fmt: skip
    for name, (launch, result) in cases.items():
        launch()
        with no_wait(device):
            launch()
        variants = {"case": launch, "base": _baseline(torch.empty_like(result))}
        seconds = interleave(variants, samples=samples, timer=queued_timer(device, 20))
        beside, target = seconds["base"], LAUNCH_TARGET if on_cuda else None
        report.time(f"{name}.device_us", seconds["case"], "us", beside=beside, target=target)


def _measure_host(report: Report, samples: int, device: torch.device) -> None:
    """The caller's time of an allocator's call: the mean of 100 in a row."""
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
    beside, note = [TOKEN_ALLOC_US / 1e6], f"the ceiling is the bound of {TOKEN_ALLOC_US:g} us"
    target = 1.0 if device.type == "cuda" else None
    report.time("token_alloc.128.host_us", seconds, "us", beside=beside, target=target, note=note)


def _measure_frees(report: Report, samples: int, device: torch.device) -> None:
    """The caller's time of one group of frees: 256 and 64 requests of 4096 tokens, as runs and as tokens."""
    for requests in (64, 256):
        allocator = PagedTokenToKVPoolAllocator(2 * requests * 4096, PAGE, torch.bfloat16, device, None, True)
        slots = allocator.alloc(requests * 4096)
        assert slots is not None
        parts, held = slots.split(4096), allocator.backup_state()
        for way, free in (("runs", allocator.free_run), ("tokens", allocator.free)):
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
            report.time(f"free_group.{requests}.{way}.host_us", seconds, "us")
