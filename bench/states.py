"""Recurrent states and window slots on the device, as shares of a plain copy or fill of the same bytes.

Copies and clears use the kernels chosen for the device; ceiling and case are timed in the same rounds. Values are
compared outside the timing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from hicache.bench.common import Report
from hicache.bench.queued import seconds_each
from hicache.bench.rows import MIB, TARGETS, add_arguments, samples_of, sizes
from hicache.config import kernel_choice
from hicache.device import Mamba2CacheParams, Mamba2StateShape, MambaPool
from hicache.kernels.mamba import clear_states, copy_states
from hicache.kernels.swa import translate_slots

__all__ = ["DESCRIPTION", "NAME", "add_arguments", "run"]

NAME = "states"
DESCRIPTION = "recurrent states copied and cleared, window slots translated, against plain copies on the device"


def run(args: argparse.Namespace, report: Report) -> None:
    device, samples = args.device, samples_of(args)
    for mib in sizes(device):
        _states(report, mib, samples, device)
    _translation(report, 1 << (20 if device.type == "cuda" else 16), samples, device)


def _states(report: Report, mib: int, samples: int, device: torch.device) -> None:
    # About 1 MiB a state: 8 layers of (8, 64, 64) float32 and of 640 x 3 bfloat16.
    params = Mamba2CacheParams(Mamba2StateShape.create(1, 512, 1, 8, 64, 64, 4), range(8), torch.float32)
    count = max(1, mib * MIB // params.layout.page_bytes(1))
    pool, kernels = MambaPool(2 * count, params, device), kernel_choice(device)
    tensors = (*pool.mamba_cache.conv, pool.mamba_cache.temporal)
    order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0)).to(device) + 1
    src, dst = order[:count], order[count:]
    num_bytes = count * params.layout.page_bytes(1)
    plain_src, plain_dst = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    for x in tensors:
        x.normal_()
    copy_states(tensors, src, dst, kernels)
    if not all(torch.equal(x[:, src], x[:, dst]) for x in tensors):
        raise AssertionError("copied states differ from their source")
    variants: dict[str, Callable[[], object]] = {
        "copy": lambda: copy_states(tensors, src, dst, kernels),
        "clear": lambda: clear_states(tensors, src, kernels),
        "raw.copy": lambda: plain_dst.copy_(plain_src),
        "raw.clear": plain_dst.zero_,
    }
    seconds = seconds_each(variants, samples=samples, device=device)
    if any(x[:, src].any() for x in tensors):
        raise AssertionError("cleared states are not zero")
    target = TARGETS[mib] if device.type == "cuda" else None
    for name in ("copy", "clear"):
        report.rate(f"state_{name}.{mib}mib", num_bytes, seconds[name], beside=seconds[f"raw.{name}"], target=target)


def _translation(report: Report, tokens: int, samples: int, device: torch.device) -> None:
    """Random slots through a mapping; the ceiling copies as many slots without a gather."""
    kernels = kernel_choice(device)
    generator = torch.Generator().manual_seed(0)
    mapping = torch.randint(0, tokens, (tokens,), generator=generator).to(device)
    loc = torch.randint(0, tokens, (tokens,), generator=generator).to(device)
    out = torch.empty_like(loc)
    if not torch.equal(translate_slots(mapping, loc, kernels), mapping[loc]):
        raise AssertionError("window slots are not those of the mapping")
    variants: dict[str, Callable[[], object]] = {
        "translate": lambda: translate_slots(mapping, loc, kernels),
        "raw": lambda: out.copy_(loc),
    }
    seconds = seconds_each(variants, samples=samples, device=device)
    report.rate(f"swa_translate.{tokens}", loc.nbytes, seconds["translate"], beside=seconds["raw"])
