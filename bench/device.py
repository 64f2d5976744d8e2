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
from hicache.bench.common import Case, Report, gb_per_s, interleave, percentile
from hicache.bench.queued import queued_timer
from hicache.config import kernel_choice
from hicache.kernels._triton import jit
from hicache.kernels.alloc_decode import alloc_decode
from hicache.kernels.alloc_extend import alloc_extend
from hicache.kernels.last_loc import last_loc
from hicache.kernels.page_copy import PageMover
from hicache.kernels.store_kv import store_kv
from hicache.kernels.tiled_copy import TiledCopy
from hicache.kernels.write_req_to_token import write_req_to_token_pool

NAME = "device"
DESCRIPTION = "device tier: store, move, gather and scatter against a device copy; allocators against an empty launch"

HEADS, DIM, LAYERS, PAGE = 8, 128, 32, 64
ROW_BYTES = HEADS * DIM * 2
TOKEN_BYTES = 2 * LAYERS * ROW_BYTES
SIZES = {"2mib": 2 << 20, "64mib": 64 << 20, "512mib": 512 << 20}
TILES = (128, 256, 512)

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
    ceiling = percentile(gb_per_s(num_bytes, seconds["copy"]), 50)
    report.add(Case.of(f"copy.{size}", gb_per_s(num_bytes, seconds["copy"]), "GB/s"))
    for name, variant in variants.items():
        variant.verify()
        target_share = variant.target if size != "2mib" or variant.target is None else 0.6
        values = gb_per_s(variant.num_bytes, seconds[name])
        report.add(Case.of(f"{name}.{size}", values, "GB/s", ceiling=ceiling, target=target_share if on_cuda else None))


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


def _microseconds(seconds: list[float]) -> list[float]:
    return [s * 1e6 for s in seconds]


def _baseline(out: torch.Tensor) -> Run:
    """An empty launch, where kernels are launched at all, and a fill of the result."""
    on_cuda = out.device.type == "cuda"

    def run() -> None:
        if on_cuda:
            _empty_kernel[(1,)](out)
        out.fill_(1)

    return run


@dataclass(frozen=True)
class _Lens:
    """Lengths of a batch on the CPU and on the device, and the last slots of its prefixes."""

    before: torch.Tensor
    after: torch.Tensor
    device: torch.device

    @property
    def on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.before.to(self.device), self.after.to(self.device)


def _extend_lens(device: torch.device) -> _Lens:
    """64 requests that grow from nothing by 4096 tokens."""
    return _Lens(torch.zeros(64, dtype=torch.int64), torch.full((64,), 4096), device)


def _decode_lens(device: torch.device) -> _Lens:
    """256 requests at all places of a page."""
    before = torch.arange(256) + 1000
    return _Lens(before, before + 1, device)


def _last_of(lens: torch.Tensor) -> torch.Tensor:
    """Slots that end prefixes of these lengths, each in a page of its own; -1 without a prefix."""
    pages = torch.arange(lens.numel(), device=lens.device) + 100_000
    return torch.where(lens > 0, pages * PAGE + (lens - 1) % PAGE, -1)


def _measure_launches(report: Report, samples: int, device: torch.device) -> None:
    """Device time of the kernels that write slots, against an empty kernel and writing the result."""
    kernels, on_cuda = kernel_choice(device), device.type == "cuda"
    free = torch.randperm(1 << 16, device=device) + 1
    (no_prefix, seq), (before, after) = _extend_lens(device).on_device, _decode_lens(device).on_device
    none, last = _last_of(no_prefix), _last_of(before)
    slots, one_each = (torch.empty(n, dtype=torch.int64, device=device) for n in (64 * 4096, 256))
    table = torch.zeros(257, 8192, dtype=torch.int32, device=device)
    rows = torch.arange(1, 257, device=device)
    prefixes = [torch.arange(4096, device=device) for _ in range(64)]
    lens_cpu = ([4096] * 64, [8192] * 64)
    first, whole, second = (torch.full((64,), n, device=device) for n in (4096, 8192, 4096))
    alloc_extend(no_prefix, seq, none, free, slots, PAGE, 4096, kernels)
    cases: dict[str, tuple[Run, torch.Tensor, float | None]] = {
        "alloc_extend.64x4096": (
            lambda: alloc_extend(no_prefix, seq, none, free, slots, PAGE, 4096, kernels), slots, 1.5
        ),
        "alloc_decode.256": (lambda: alloc_decode(after, last, free, one_each, PAGE, kernels), one_each, 1.5),
        "write_req_to_token.64x8192": (
            lambda: write_req_to_token_pool(
                table, rows[:64], range(1, 65), prefixes, first, whole, second, lens_cpu, slots, kernels
            ),
            table[1:65],
            None,
        ),
        "last_loc.256": (lambda: last_loc(table, rows, before, kernels), one_each, None),
    }  # fmt: skip
    for name, (launch, result, target) in cases.items():
        launch()
        with no_wait(device):
            launch()
        filled = torch.empty_like(result, memory_format=torch.contiguous_format)
        seconds = interleave(
            {"case": launch, "base": _baseline(filled)},
            samples=samples,
            timer=queued_timer(device, 20),
        )
        base = percentile(_microseconds(seconds["base"]), 50)
        values = _microseconds(seconds["case"])
        report.add(
            Case.of(f"{name}.device_us", values, "us", better="lower", ceiling=base, target=target if on_cuda else None)
        )


def _measure_host(report: Report, samples: int, device: torch.device) -> None:
    """The caller's time of whole allocator calls."""
    on_cuda = device.type == "cuda"
    paged = PagedTokenToKVPoolAllocator(1 << 20, PAGE, torch.bfloat16, device, None, True)
    grow, step = _extend_lens(device), _decode_lens(device)
    (no_prefix, seq), (before, after) = grow.on_device, step.on_device
    none, last, state = _last_of(no_prefix), _last_of(before), paged.backup_state()

    def extend() -> None:
        paged.restore_state(state)
        paged.alloc_extend(no_prefix, grow.before, seq, grow.after, none, 64 * 4096)

    def decode() -> None:
        paged.restore_state(state)
        paged.alloc_decode(after, step.after, last)

    for name, call, length in (("alloc_extend.64x4096", extend, 64 * 4096), ("alloc_decode.256", decode, 256)):
        call()
        with no_wait(device):
            call()

        def empty(length: int = length) -> None:
            _baseline(torch.empty(length, dtype=torch.int64, device=device))()

        seconds = {"case": _host_seconds(call, samples, device), "base": _host_seconds(empty, samples, device)}
        base = percentile(_microseconds(seconds["base"]), 50)
        values = _microseconds(seconds["case"])
        report.add(Case.of(f"{name}.host_us", values, "us", better="lower", ceiling=base))
    token = TokenToKVPoolAllocator(1 << 20, torch.bfloat16, device, None, True)
    with no_wait(device):
        token.alloc(128)
    values = _microseconds(_host_seconds(lambda: token.alloc(128), samples, device))
    report.add(
        Case.of(
            "token_alloc.128.host_us", values, "us", better="lower", ceiling=5.0, target=1.0 if on_cuda else None,
            note="the ceiling is the bound of 5 us",
        )
    )  # fmt: skip


def _host_seconds(call: Run, samples: int, device: torch.device, calls: int = 100) -> list[float]:
    """Mean host seconds of a call, over `calls` of them in a row, per sample."""
    seconds = []
    for _ in range(samples + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - start) / calls)
    return seconds[1:]


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
            report.add(Case.of(f"free_group.{requests}.{way}.host_us", _microseconds(seconds), "us", better="lower"))
