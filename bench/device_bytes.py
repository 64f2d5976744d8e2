"""The part of the benchmark `device` that moves bytes in device memory. Kernels move rows and pages, and are compared
with a plain copy.

Times are measured on the device. First a sleep blocks the stream while the host fills the stream's queue, so that
launches cost as much as in a busy stream. The bytes of a case are the mean of the bytes that it reads and writes, so
that a copy within device memory is the ceiling of all cases. The timed part does not include checks of the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hicache import MHATokenToKVPool
from hicache.bench.common import Report, Timer, interleave, wall_timer
from hicache.config.environment import kernel_choice
from hicache.kernels.page_copy import PageMover
from hicache.kernels.store_kv import store_kv
from hicache.kernels.tiled_copy import TiledCopy

HEADS, DIM, LAYERS, PAGE = 8, 128, 32, 64
ROW_BYTES = HEADS * DIM * 2
TOKEN_BYTES = 2 * LAYERS * ROW_BYTES
SIZES = {"2mib": 2 << 20, "64mib": 64 << 20, "512mib": 512 << 20}
_SLEEP_CYCLES = 400_000  # cycles to sleep per run: at least 0.2 ms, longer than the host needs to queue the run

Run = Callable[[], object]


@dataclass(frozen=True)
class Variant:
    """An operation to time: `run` moves `num_bytes`; `verify` raises if the result is wrong. `target`: target of the
    case for sizes of 64 MiB and more."""

    run: Run
    num_bytes: int
    verify: Run
    target: float | None = 0.85


def queued_timer(device: torch.device, repeat: int) -> Timer:
    """Return a timer. On CUDA it measures the mean device seconds of `repeat` runs, which are all queued before the
    first run begins. On a CPU it uses the host's clock."""
    if device.type != "cuda":
        return wall_timer()

    def measure(run: Run) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        torch.cuda._sleep(_SLEEP_CYCLES * repeat)
        start.record()
        for _ in range(repeat):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeat

    return measure


def measure_bytes(report: Report, samples: int, device: torch.device) -> None:
    """Measure all sizes."""
    for size, num_bytes in SIZES.items():
        if device.type == "cuda" or size == "2mib":
            _measure(report, size, num_bytes, samples, device)


def _measure(report: Report, size: str, num_bytes: int, samples: int, device: torch.device) -> None:
    on_cuda = device.type == "cuda"
    variants = _store_variants(num_bytes, device) | _pool_variants(num_bytes, device)
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
        case_target = variant.target if size != "2mib" or variant.target is None else 0.6
        ceiling_seconds, case_target = seconds["copy"], case_target if on_cuda else None
        moved = variant.num_bytes
        report.rate(
            f"{name}.{size}",
            moved,
            seconds[name],
            ceiling_seconds=ceiling_seconds,
            ceiling_bytes=num_bytes,
            target=case_target,
        )


def _paged_slots(num_tokens: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the slots of `num_tokens` tokens in random pages of 64 tokens, without page 0. If `num_tokens` is not a
    multiple of 64, return random single slots."""
    if num_tokens % PAGE:
        return torch.randperm(size, device=device)[:num_tokens] + PAGE
    pages = torch.randperm(size // PAGE, device=device)[: num_tokens // PAGE] + 1
    return (pages[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()


def _expect(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
        raise AssertionError(f"{what}: the bytes are not those that were to be there")


def _store_variants(num_bytes: int, device: torch.device) -> dict[str, Variant]:
    """Return variants that store K and V of one layer, without conversion, and with conversion to fp8 with scales."""
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
        # A copy reads and writes all bytes. This kernel reads all bytes and writes half of them, on average 3/4.
        "store_fp8": Variant(
            lambda: store_kv(k, v, fp8[0], fp8[1], slots, kernels, scale, scale), num_bytes * 3 // 4, verify_fp8
        ),
    }


def _pool_variants(num_bytes: int, device: torch.device) -> dict[str, Variant]:
    """Return variants that move rows within a pool of all layers, and that copy pages between the pool and staging in
    the order of host pages."""
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

    mover = TiledCopy(buffers, kernels)
    variants = {"move": Variant(lambda: mover.move(target, source), num_bytes, verify_move, 0.85)}
    # Each slot of this ring gets the row half a ring further, so every source is also a target.
    ring = order[2 * tokens : 3 * tokens]
    shifted = ring.roll(tokens // 2)
    variants["move_overlapping"] = Variant(lambda: mover.move(shifted, ring), num_bytes, lambda: None, None)

    # If `num_bytes` is less than one page of all layers, copy one page of fewer layers.
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
