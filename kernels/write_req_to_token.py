"""Writes the prefix slots and the new slots of a batch of extends to the rows of the request table, in one launch.

Request r has row `rows[r]` of `req_to_token`, int32 `[rows, columns]`. With p = `pre_lens[r]` and s = `seq_lens[r]`,
the columns of this row become

    [0, p)   the slots of the request's prefix, prefix_tensors[r][0 .. p)
    [p, s)   the request's new slots, out_cache_loc[first .. first + s - p), where `first` sums extend_lens over [0, r)

and columns from s on are unchanged. Each prefix is a separate tensor, so the kernel gets the addresses of the prefixes.

Only callers with SGLang's interface use it, because a lease of hicache's engine writes its own row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hicache.kernels._triton import Kernels, cdiv, check_kernels, jit, tl

_TOKENS_PER_STEP = 512
_MAX_PROGRAMS_PER_REQUEST = 64


@jit(do_not_specialize_on_alignment=["req_to_token", "prefix_tensors", "out_cache_loc"])
def write_req_to_token_pool_triton(
    req_to_token,
    req_pool_indices,
    prefix_tensors,
    pre_lens,
    seq_lens,
    extend_lens,
    out_cache_loc,
    req_to_token_stride: tl.constexpr,
    BLOCK: tl.constexpr = 512,
    STEP: tl.constexpr = 128,
):
    # Program (r, b) of B writes blocks b, b + B, ... of row r. `prefix_tensors` holds addresses of int64 slots.
    request = tl.program_id(0)
    prefix = tl.load(pre_lens + request).to(tl.int64)
    seq = tl.load(seq_lens + request).to(tl.int64)
    row = tl.load(req_pool_indices + request).to(tl.int64)
    first_out = tl.zeros([], dtype=tl.int64)
    for start in range(0, request, STEP):
        earlier = start + tl.arange(0, STEP)
        first_out += tl.sum(tl.load(extend_lens + earlier, mask=earlier < request, other=0).to(tl.int64), axis=0)

    source = tl.load(prefix_tensors + request).to(tl.pointer_type(tl.int64))
    target = req_to_token + row * req_to_token_stride
    for start in range(tl.program_id(1) * BLOCK, seq, tl.num_programs(1) * BLOCK):
        t = start + tl.arange(0, BLOCK)
        old = tl.load(source + t, mask=t < prefix, other=0)
        new = tl.load(out_cache_loc + first_out + t - prefix, mask=(t >= prefix) & (t < seq), other=0)
        slot = tl.where(t < prefix, old, new.to(tl.int64))
        tl.store(target + t, slot.to(req_to_token.dtype.element_ty), mask=t < seq)


def write_req_to_token_pool_torch(
    req_to_token: torch.Tensor,
    rows: Sequence[int],
    prefix_tensors: Sequence[torch.Tensor],
    pre_lens: Sequence[int],
    seq_lens: Sequence[int],
    out_cache_loc: torch.Tensor,
) -> None:
    """Write the rows in torch, from lengths and rows on the host, with the result of the kernel."""
    first = 0
    for row, prefix, pre, seq in zip(rows, prefix_tensors, pre_lens, seq_lens, strict=True):
        req_to_token[row, :pre] = prefix[:pre]
        req_to_token[row, pre:seq] = out_cache_loc[first : first + seq - pre]
        first += seq - pre


def addresses(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the addresses of `tensors`, int64 `[len(tensors)]` on `device`. The host does not wait for the copy."""
    pinned = device.type == "cuda"
    return torch.tensor([x.data_ptr() for x in tensors], dtype=torch.int64, pin_memory=pinned).to(
        device, non_blocking=True
    )


def write_req_to_token_pool(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    rows: Sequence[int],
    prefix_tensors: Sequence[torch.Tensor],
    pre_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    lens_cpu: tuple[Sequence[int], Sequence[int]],
    out_cache_loc: torch.Tensor,
    kernels: Kernels,
) -> None:
    """Write the rows of a batch, by the formula of the module.

    `req_pool_indices` (rows), `pre_lens`, `seq_lens` and `extend_lens` are integer `[requests]` on the table's device;
    `rows` and `lens_cpu` (prefix and sequence lengths) have the same values on the host. `prefix_tensors[r]` has at
    least `pre_lens[r]` slots. The number of slots in `out_cache_loc`, int64, is the sum of `extend_lens`. Raises
    ValueError if these numbers do not match.
    """
    check_kernels(kernels)
    pre, seq = lens_cpu
    counts = {len(prefix_tensors), len(pre), len(seq), len(rows), *(x.numel() for x in (req_pool_indices, pre_lens))}
    new = sum(seq) - sum(pre)
    if len(counts) != 1 or out_cache_loc.numel() != new:
        raise ValueError(
            f"{len(rows)} rows, {len(prefix_tensors)} prefixes, {len(pre)} and {len(seq)} lengths, and "
            f"{out_cache_loc.numel()} new slots for {new} new tokens: need one of each per request, one slot per token"
        )
    short = [(x.numel(), p) for x, p in zip(prefix_tensors, pre, strict=True) if x.numel() < p]
    if short or max(seq, default=0) > req_to_token.shape[1]:
        raise ValueError(
            f"rows have {req_to_token.shape[1]} columns for sequences of {max(seq, default=0)} tokens, and prefixes "
            f"(slots, tokens) {short[:8]} are too short"
        )
    if not len(rows):
        return
    if kernels == "torch":
        write_req_to_token_pool_torch(req_to_token, rows, prefix_tensors, pre, seq, out_cache_loc)
        return
    device = req_to_token.device
    prefixes = [x.to(device=device, dtype=torch.int64).contiguous() for x in prefix_tensors]
    programs = min(_MAX_PROGRAMS_PER_REQUEST, max(1, cdiv(max(seq), _TOKENS_PER_STEP)))
    with torch.cuda.device_of(req_to_token):
        write_req_to_token_pool_triton[(len(rows), programs)](
            req_to_token,
            req_pool_indices,
            addresses(prefixes, device),
            pre_lens,
            seq_lens,
            extend_lens,
            out_cache_loc,
            req_to_token.stride(0),
            BLOCK=_TOKENS_PER_STEP,
        )
