"""Rows of MLA, NSA and quantised pools stored and read, as shares of a plain copy with the same traffic.

The ceiling copies within device memory half of the bytes that the case reads and writes together, in the same rounds.
Results are compared with those of the torch twin outside the timing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hicache.bench.common import Report
from hicache.bench.queued import seconds_each
from hicache.config import kernel_choice
from hicache.kernels.mla import get_latent, set_latent
from hicache.kernels.nsa import gather_index_keys, index_row_bytes, quantise_index_keys
from hicache.kernels.quant import dequantise_kv, quantise_kv

NAME = "rows"
DESCRIPTION = "MLA, NSA and quantised rows stored and read, against plain copies of the same traffic on the device"

RANK, ROPE, PAGE, KEY, HEADS, DIM = 512, 64, 64, 128, 8, 128
MIB = 1 << 20
# Target shares of a plain copy by traffic in MiB, on CUDA.
TARGETS = {2: 0.6, 64: 0.85, 512: 0.85}

Run = Callable[[], object]
_Pair = tuple[torch.Tensor, torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, help="timed rounds (default: 30 on CUDA, 7 else)")


def samples_of(args: argparse.Namespace) -> int:
    return int(args.samples or (30 if args.device.type == "cuda" else 7))


def sizes(device: torch.device) -> Sequence[int]:
    """In MiB."""
    return list(TARGETS) if device.type == "cuda" else [2]


def run(args: argparse.Namespace, report: Report) -> None:
    for mib in sizes(args.device):
        for cases in (_latent, _index, _quantised):
            _measure(report, cases(mib * MIB, args.device), mib, samples_of(args), args.device)


def _measure(report: Report, cases: dict[str, tuple[Run, int]], mib: int, samples: int, device: torch.device) -> None:
    """`cases`: name -> (run, bytes read and written)."""
    variants: dict[str, Run] = {name: run for name, (run, _) in cases.items()}
    for name, (_, traffic) in cases.items():
        source, target = (torch.ones(traffic // 2, dtype=torch.uint8, device=device) for _ in range(2))
        variants[f"raw.{name}"] = partial(target.copy_, source)
    seconds = seconds_each(variants, samples=samples, device=device)
    goal = TARGETS[mib] if device.type == "cuda" else None
    for name, (_, traffic) in cases.items():
        report.rate(f"{name}.{mib}mib", traffic, seconds[name], beside=seconds[f"raw.{name}"], target=goal)


def _slots(count: int, total: int, device: torch.device) -> torch.Tensor:
    return (torch.randperm(total, generator=torch.Generator().manual_seed(0))[:count] + 1).to(device)


def _require(same: bool, what: str) -> None:
    if not same:
        raise AssertionError(f"{what}: the kernel and its twin disagree")


def _alike(got: torch.Tensor, twin: torch.Tensor) -> bool:
    """Equal bytes but for rare last-digit differences of a division."""
    return float((got.view(torch.uint8) != twin.view(torch.uint8)).float().mean()) < 1e-3


def _latent(num_bytes: int, device: torch.device) -> dict[str, tuple[Run, int]]:
    row = (RANK + ROPE) * 2
    count, kernels = num_bytes // row, kernel_choice(device)
    loc = _slots(count, 2 * count, device)
    buffer = torch.randn(2 * count + 1, 1, RANK + ROPE, device=device, dtype=torch.bfloat16)
    nope = torch.randn(count, 1, RANK, device=device, dtype=torch.bfloat16)
    rope = torch.randn(count, 1, ROPE, device=device, dtype=torch.bfloat16)
    set_latent(nope, rope, buffer, loc, kernels)
    for got, kept in zip(get_latent(buffer, loc, RANK, ROPE, kernels), (nope, rope), strict=True):
        _require(torch.equal(got, kept), "MLA rows")
    return {
        "mla_set": (lambda: set_latent(nope, rope, buffer, loc, kernels), 2 * count * row),
        "mla_get": (lambda: get_latent(buffer, loc, RANK, ROPE, kernels), 2 * count * row),
    }


def _index(num_bytes: int, device: torch.device) -> dict[str, tuple[Run, int]]:
    pages, kernels = num_bytes // (PAGE * KEY * 2), kernel_choice(device)
    count = pages * PAGE
    # As an allocator returns them: pages in any order, tokens in order within a page.
    loc = (((_slots(pages, 2 * pages - 1, device))[:, None] * PAGE) + torch.arange(PAGE, device=device)).reshape(-1)
    keys = torch.randn(count, KEY, device=device, dtype=torch.bfloat16)
    buffer, twin = (torch.zeros(2 * pages, index_row_bytes(PAGE), dtype=torch.uint8, device=device) for _ in range(2))
    quantise_index_keys(keys, buffer, loc, PAGE, kernels)
    quantise_index_keys(keys, twin, loc, PAGE, "torch")
    _require(_alike(buffer, twin), "NSA index keys")
    order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(1))[:pages].to(device)
    got = gather_index_keys(buffer, order, count, PAGE, kernels)
    _require(torch.equal(got, gather_index_keys(buffer, order, count, PAGE, "torch")), "NSA gathered keys")
    return {
        "nsa_store": (lambda: quantise_index_keys(keys, buffer, loc, PAGE, kernels), count * (KEY * 3 + 4)),
        "nsa_gather": (lambda: gather_index_keys(buffer, order, count, PAGE, kernels), count * KEY * 2),
    }


def _quantised(num_bytes: int, device: torch.device) -> dict[str, tuple[Run, int]]:
    count, kernels = num_bytes // (2 * HEADS * DIM * 2), kernel_choice(device)
    loc = _slots(count, 2 * count, device)
    k, v = (torch.randn(count, HEADS, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    traffic = 2 * count * HEADS * (DIM * 3 + 4)
    cases: dict[str, tuple[Run, int]] = {}
    for name, stored in (("int8", torch.int8), ("fp8", torch.uint8)):
        data, scales = _empty(2 * count + 1, stored, device)
        twin, twin_scales = _empty(2 * count + 1, stored, device)
        quantise_kv(k, v, data, scales, loc, kernels)
        quantise_kv(k, v, twin, twin_scales, loc, "torch")
        _require(all(_alike(a, b) for a, b in zip(data, twin, strict=True)), f"{name} rows")
        read = partial(dequantise_kv, data, scales, loc, torch.bfloat16)
        _require(all(_alike(a, b) for a, b in zip(read(kernels), read("torch"), strict=True)), f"{name} rows read")
        cases[f"quant_{name}_store"] = (partial(quantise_kv, k, v, data, scales, loc, kernels), traffic)
        cases[f"quant_{name}_read"] = (partial(read, kernels), traffic)
    return cases


def _empty(slots: int, stored: torch.dtype, device: torch.device) -> tuple[_Pair, _Pair]:
    """Data and scales of keys and of values, all zero."""
    data = [torch.zeros(slots, HEADS, DIM, dtype=stored, device=device) for _ in range(2)]
    scales = [torch.zeros(slots, HEADS, device=device) for _ in range(2)]
    return (data[0], data[1]), (scales[0], scales[1])
