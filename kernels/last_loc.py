"""Looks up the slot of the last token of each request's prefix.

    out[r] = req_to_token[req_pool_indices[r], prefix_lens[r] - 1]   where prefix_lens[r] > 0
    out[r] = -1                                                      else

`req_to_token` is int32 `[rows, columns]`. `req_pool_indices` and `prefix_lens` are integer `[requests]` on the same
device. `out` is int64 `[requests]`.

Only callers with SGLang's interface use it, because a lease of hicache's engine stores its last slot.
"""

from __future__ import annotations

import torch

from hicache.kernels._triton import Kernels, cdiv, check_kernels, jit, tl

_REQUESTS_PER_PROGRAM = 256


@jit(do_not_specialize=["num_requests", "stride"], do_not_specialize_on_alignment=["req_to_token"])
def _last_loc_kernel(req_to_token, req_pool_indices, prefix_lens, out, num_requests, stride, BLOCK: tl.constexpr):
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = request < num_requests
    prefix = tl.load(prefix_lens + request, mask=mask, other=0).to(tl.int64)
    row = tl.load(req_pool_indices + request, mask=mask, other=0).to(tl.int64)
    slot = tl.load(req_to_token + row * stride + prefix - 1, mask=mask & (prefix > 0), other=-1)
    tl.store(out + request, slot.to(tl.int64), mask=mask)


def get_last_loc_torch(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor
) -> torch.Tensor:
    """Look up the slots in torch, by the formula of the module, with the result of the kernel."""
    last = (prefix_lens.to(torch.int64) - 1).clamp(min=0)
    slots = req_to_token[req_pool_indices.to(torch.int64), last].to(torch.int64)
    return slots.masked_fill(prefix_lens <= 0, -1)


def get_last_loc_triton(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor
) -> torch.Tensor:
    """Look up the slots in one launch, without waiting for the device, by the formula of the module."""
    num_requests = prefix_lens.numel()
    out = torch.empty(num_requests, dtype=torch.int64, device=req_to_token.device)
    if num_requests:
        with torch.cuda.device_of(req_to_token):
            _last_loc_kernel[(cdiv(num_requests, _REQUESTS_PER_PROGRAM),)](
                req_to_token,
                req_pool_indices.contiguous(),
                prefix_lens.contiguous(),
                out,
                num_requests,
                req_to_token.stride(0),
                BLOCK=_REQUESTS_PER_PROGRAM,
            )
    return out


def last_loc(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor, kernels: Kernels
) -> torch.Tensor:
    """Return the slots, int64 `[requests]`, by the formula of the module. Raises ValueError if the numbers of rows and
    lengths differ."""
    check_kernels(kernels)
    if req_pool_indices.numel() != prefix_lens.numel():
        raise ValueError(
            f"{req_pool_indices.numel()} rows for {prefix_lens.numel()} prefix_lens: each request needs one of each"
        )
    get = get_last_loc_triton if kernels == "triton" else get_last_loc_torch
    return get(req_to_token, req_pool_indices, prefix_lens)
