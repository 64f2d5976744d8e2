"""Device-memory traffic of the bench `device`: rows, pages and states moved by kernels, beside a plain copy.

A kernel's time is the device's: the queue is held by a sleep while the host fills it, so that launches cost what they
cost in a busy stream. Bytes are the mean of what is read and written, so that a copy within device memory is the
ceiling of all. What was computed is compared outside the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from hicache import MHATokenToKVPool
from hicache.bench.common import Report, Timer, interleave, wall_timer
from hicache.config.environment import kernel_choice
from hicache.device import Mamba2CacheParams, Mamba2StateShape, MambaPool
from hicache.kernels.mamba import clear_states, copy_states
from hicache.kernels.mla import get_latent, set_latent
from hicache.kernels.nsa import gather_index_keys, index_row_bytes, quantise_index_keys
from hicache.kernels.page_copy import PageMover
from hicache.kernels.quant import dequantise_kv, quantise_kv
from hicache.kernels.store_kv import store_kv
from hicache.kernels.swa import translate_slots
from hicache.kernels.tiled_copy import TiledCopy

HEADS, DIM, LAYERS, PAGE = 8, 128, 32, 64
RANK, ROPE, KEY = 512, 64, 128  # of MLA rows and of NSA index keys
ROW_BYTES = HEADS * DIM * 2
TOKEN_BYTES = 2 * LAYERS * ROW_BYTES
SIZES = {"2mib": 2 << 20, "64mib": 64 << 20, "512mib": 512 << 20}
TILES = (128, 256, 512)
_SLEEP_CYCLES = 400_000  # per run: at least 0.2 ms, longer than the host takes to queue it

Run = Callable[[], object]
_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """One thing to time: `run` moves `num_bytes`; `verify` raises where the result is wrong. `target`: from 64 MiB."""

    run: Run
    num_bytes: int
    verify: Run
    target: float | None = 0.85


def queued_timer(device: torch.device, repeat: int) -> Timer:
    """Device seconds of one of `repeat` runs in a row, all queued before the first begins; else the host's clock."""
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


def measure_bytes(report: Report, part: str, samples: int, device: torch.device, tiles: bool) -> None:
    """`part`: bytes, the pool of an 8B model; rows, those of other families; states, and slots of windows."""
    on_cuda = device.type == "cuda"
    for size, num_bytes in SIZES.items():
        if not on_cuda and size != "2mib":
            continue
        if part == "bytes":
            variants = _store_variants(num_bytes, device) | _pool_variants(num_bytes, device, tiles)
        elif part == "rows":
            variants = _latent(num_bytes, device) | _index(num_bytes, device) | _quantised(num_bytes, device)
        else:
            variants = _states(num_bytes, device) | _translation(num_bytes, device)
        _measure(report, size, num_bytes, variants, samples, device)


def _measure(
    report: Report, size: str, num_bytes: int, variants: Mapping[str, Variant], samples: int, device: torch.device
) -> None:
    on_cuda = device.type == "cuda"
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for variant in variants.values():
        variant.run()
        variant.verify()
    runs: dict[str, Run] = {"copy": lambda: target.copy_(source), **{n: v.run for n, v in variants.items()}}
    repeat = max(1, min(20, (256 << 20) // num_bytes)) if on_cuda else 1
    seconds = interleave(runs, samples=samples, timer=queued_timer(device, repeat))
    if "store" in variants:
        report.rate(f"copy.{size}", num_bytes, seconds["copy"])
    for name, variant in variants.items():
        variant.verify()
        goal = variant.target if size != "2mib" or variant.target is None else 0.6
        beside, goal = seconds["copy"], goal if on_cuda else None
        moved = variant.num_bytes
        report.rate(f"{name}.{size}", moved, seconds[name], beside=beside, beside_bytes=num_bytes, target=goal)


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


def _slots(count: int, total: int, device: torch.device) -> torch.Tensor:
    return torch.randperm(total, device=device)[:count] + 1


def _expect_alike(got: torch.Tensor, twin: torch.Tensor, what: str) -> None:
    """Equal bytes but for rare last-digit differences of a division."""
    if float((got.view(torch.uint8) != twin.view(torch.uint8)).float().mean()) >= 1e-3:
        raise AssertionError(f"{what}: the kernel and its twin disagree")


def _latent(num_bytes: int, device: torch.device) -> dict[str, Variant]:
    count, kernels = num_bytes // ((RANK + ROPE) * 2), kernel_choice(device)
    loc = _slots(count, 2 * count, device)
    buffer = torch.zeros(2 * count + 1, 1, RANK + ROPE, device=device, dtype=torch.bfloat16)
    nope, rope = (torch.randn(count, 1, width, device=device, dtype=torch.bfloat16) for width in (RANK, ROPE))

    def verify() -> None:
        for got, kept in zip(get_latent(buffer, loc, RANK, ROPE, kernels), (nope, rope), strict=True):
            _expect(got, kept, "MLA rows")

    return {
        "mla_set": Variant(lambda: set_latent(nope, rope, buffer, loc, kernels), num_bytes, verify),
        "mla_get": Variant(lambda: get_latent(buffer, loc, RANK, ROPE, kernels), num_bytes, verify),
    }


def _index(num_bytes: int, device: torch.device) -> dict[str, Variant]:
    pages, kernels = num_bytes // (PAGE * KEY * 2), kernel_choice(device)
    count = pages * PAGE
    loc, order = _paged_slots(count, (2 * pages - 1) * PAGE, device), torch.randperm(2 * pages, device=device)[:pages]
    keys = torch.randn(count, KEY, device=device, dtype=torch.bfloat16)
    buffer, twin = (torch.zeros(2 * pages, index_row_bytes(PAGE), dtype=torch.uint8, device=device) for _ in range(2))
    quantise_index_keys(keys, twin, loc, PAGE, "torch")

    def verify_gather() -> None:
        got, wanted = (gather_index_keys(buffer, order, count, PAGE, each) for each in (kernels, "torch"))
        _expect(got, wanted, "NSA gathered keys")

    return {
        "nsa_store": Variant(
            lambda: quantise_index_keys(keys, buffer, loc, PAGE, kernels),
            count * (KEY * 3 + 4) // 2,
            lambda: _expect_alike(buffer, twin, "NSA index keys"),
        ),
        "nsa_gather": Variant(
            lambda: gather_index_keys(buffer, order, count, PAGE, kernels), count * KEY, verify_gather
        ),
    }


def _quantised(num_bytes: int, device: torch.device) -> dict[str, Variant]:
    count, kernels = num_bytes // (2 * HEADS * DIM * 2), kernel_choice(device)
    loc, moved = _slots(count, 2 * count, device), count * HEADS * (DIM * 3 + 4)
    k, v = (torch.randn(count, HEADS, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    variants: dict[str, Variant] = {}
    for name, stored in (("int8", torch.int8), ("fp8", torch.uint8)):
        (data, scales), (twin, twin_scales) = (_empty(2 * count + 1, stored, device) for _ in range(2))
        quantise_kv(k, v, twin, twin_scales, loc, "torch")
        store, read = partial(quantise_kv, k, v, data, scales, loc), partial(dequantise_kv, data, scales, loc, k.dtype)

        def verify_store(data: _Pair = data, twin: _Pair = twin, what: str = f"{name} rows") -> None:
            for got, wanted in zip(data, twin, strict=True):
                _expect_alike(got, wanted, what)

        def verify_read(read: Callable[..., list[torch.Tensor]] = read, what: str = f"{name} rows read") -> None:
            for got, wanted in zip(read(kernels), read("torch"), strict=True):
                _expect_alike(got, wanted, what)

        variants[f"quant_{name}_store"] = Variant(partial(store, kernels), moved, verify_store)
        variants[f"quant_{name}_read"] = Variant(partial(read, kernels), moved, verify_read)
    return variants


def _empty(slots: int, stored: torch.dtype, device: torch.device) -> tuple[_Pair, _Pair]:
    """Data and scales of keys and of values, all zero."""
    data = [torch.zeros(slots, HEADS, DIM, dtype=stored, device=device) for _ in range(2)]
    scales = [torch.zeros(slots, HEADS, device=device) for _ in range(2)]
    return (data[0], data[1]), (scales[0], scales[1])


def _states(num_bytes: int, device: torch.device) -> dict[str, Variant]:
    # About 1 MiB a state: 8 layers of (8, 64, 64) float32 and of 640 x 3 bfloat16.
    params = Mamba2CacheParams(Mamba2StateShape.create(1, 512, 1, 8, 64, 64, 4), range(8), torch.float32)
    count = max(1, num_bytes // params.layout.page_bytes(1))
    pool, kernels = MambaPool(3 * count, params, device), kernel_choice(device)
    tensors = (*pool.mamba_cache.conv, pool.mamba_cache.temporal)
    src, dst, cleared = _slots(3 * count, 3 * count, device).chunk(3)
    for x in tensors:
        x.normal_()
    moved = count * params.layout.page_bytes(1)

    def verify_copy() -> None:
        for x in tensors:
            _expect(x[:, dst], x[:, src], "copied states")

    def verify_clear() -> None:
        if any(x[:, cleared].any() for x in tensors):
            raise AssertionError("cleared states are not zero")

    return {
        "state_copy": Variant(lambda: copy_states(tensors, src, dst, kernels), moved, verify_copy),
        "state_clear": Variant(lambda: clear_states(tensors, cleared, kernels), moved // 2, verify_clear),
    }


def _translation(num_bytes: int, device: torch.device) -> dict[str, Variant]:
    """Random slots through a mapping; the ceiling copies as many bytes without a gather."""
    tokens, kernels = num_bytes // torch.int64.itemsize, kernel_choice(device)
    mapping, loc = (torch.randint(0, tokens, (tokens,), device=device) for _ in range(2))

    def translate() -> torch.Tensor:
        return translate_slots(mapping, loc, kernels)

    return {
        "swa_translate": Variant(translate, num_bytes, lambda: _expect(translate(), mapping[loc], "window slots"), None)
    }
