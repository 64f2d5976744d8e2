"""Translates full slots to window slots in one launch.

    out[t] = loc[t]            where loc[t] < 0, which is no slot, such as -1 for an empty prefix
    out[t] = mapping[loc[t]]   where 0 <= loc[t] < slots
    out[t] = 0                 where loc[t] >= slots; slot 0 is for padding

for t in [0, tokens). `mapping` is int64 `[slots]`, with 0 for unmapped slots.
"""

from __future__ import annotations

import torch

from hicache.kernels._triton import Kernels, cdiv, check_kernels, jit, tl

_BLOCK = 1024


@jit(do_not_specialize=["num_tokens", "num_slots"], do_not_specialize_on_alignment=["loc", "out"])
def _translate_kernel(mapping, loc, out, num_tokens, num_slots, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = t < num_tokens
    slot = tl.load(loc + t, mask=mask, other=0).to(tl.int64)
    known = mask & (slot >= 0) & (slot < num_slots)
    window_slot = tl.load(mapping + slot, mask=known, other=0)
    tl.store(out + t, tl.where(slot < 0, slot, window_slot), mask=mask)


def translate_slots_naive(mapping: torch.Tensor, loc: torch.Tensor) -> torch.Tensor:
    """Translate slots in torch, with the result of the kernel."""
    slot = loc.to(torch.int64)
    window_slot = mapping[slot.clamp(0, mapping.numel() - 1)].masked_fill(slot >= mapping.numel(), 0)
    return torch.where(slot < 0, slot, window_slot)


def translate_slots(mapping: torch.Tensor, loc: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Return the window slots of `loc`, int64 in the shape of `loc` (int32 or int64, any shape), by the formula of the
    module."""
    check_kernels(kernels)
    if mapping.dim() != 1 or mapping.dtype != torch.int64 or not mapping.is_contiguous() or not mapping.numel():
        raise ValueError(
            f"mapping {tuple(mapping.shape)} of {mapping.dtype}: need int64 [slots], contiguous, not empty"
        )
    if loc.dtype not in (torch.int32, torch.int64) or loc.device != mapping.device:
        raise ValueError(
            f"loc of {loc.dtype} on {loc.device}: need int32 or int64 on the device of the mapping, {mapping.device}"
        )
    if kernels == "torch" or not loc.numel():
        return translate_slots_naive(mapping, loc)
    loc = loc.contiguous()
    out = torch.empty_like(loc, dtype=torch.int64)
    with torch.cuda.device_of(loc):
        _translate_kernel[(cdiv(loc.numel(), _BLOCK),)](
            mapping, loc, out, loc.numel(), mapping.numel(), BLOCK=_BLOCK, num_warps=4
        )
    return out
