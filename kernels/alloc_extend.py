"""Chooses slots for a batch of extends from paged slots, in one launch and without waiting for the device.

Request r grows from p = `prefix_lens[r]` to s = `seq_lens[r]` tokens. With page size P, new slots are needed for the
positions

    [p, min(s, ceil(p/P)*P))   the rest of the page that the prefix ends in: last_loc[r] + 1, + 2, ...
    [ceil(p/P)*P, s)           new pages, of which the last may be partial: free_pages[first + n]*P + offset

where n is the index of a new page within the request, and `first` is the number of new pages of all earlier requests.
`out_indices` is the concatenation of the new slots of all requests. Callers guarantee (last_loc + 1) % P == p % P, and
last_loc = -1 for a request without a prefix.

Only callers with SGLang's interface use it, because hicache's engine allocates slots request by request.
"""

from __future__ import annotations

import torch

from hicache.kernels._triton import Kernels, cdiv, check_kernels, jit, tl

_TOKENS_PER_PROGRAM = 512
_REQUESTS_PER_STEP = 128


@jit(do_not_specialize_on_alignment=["free_pages", "out_indices"])
def alloc_extend_kernel(
    prefix_lens,
    seq_lens,
    last_loc,
    free_pages,
    out_indices,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    # Program (r, b) fills elements [b*TOKENS, (b+1)*TOKENS) of request r's part of `out_indices`.
    request = tl.program_id(0)
    prefix = tl.load(prefix_lens + request).to(tl.int64)
    seq = tl.load(seq_lens + request).to(tl.int64)
    position = prefix + tl.program_id(1) * TOKENS
    if position < seq:
        # Sums over requests [0, request): slots written and pages allocated before this request.
        first_out = tl.zeros([], dtype=tl.int64)
        first_page = tl.zeros([], dtype=tl.int64)
        for start in range(0, request, STEP):
            earlier = start + tl.arange(0, STEP)
            mask = earlier < request
            p = tl.load(prefix_lens + earlier, mask=mask, other=0).to(tl.int64)
            s = tl.load(seq_lens + earlier, mask=mask, other=0).to(tl.int64)
            first_out += tl.sum(s - p, axis=0)
            first_page += tl.sum((s + PAGE - 1) // PAGE - (p + PAGE - 1) // PAGE, axis=0)

        t = position + tl.arange(0, TOKENS)
        pages_of_prefix = (prefix + PAGE - 1) // PAGE
        in_old_page = t < pages_of_prefix * PAGE
        last = tl.load(last_loc + request).to(tl.int64)
        new_page = first_page + t // PAGE - pages_of_prefix
        page = tl.load(free_pages + new_page, mask=(t < seq) & (t >= pages_of_prefix * PAGE), other=0)
        slot = tl.where(in_old_page, last + 1 + t - prefix, page * PAGE + t % PAGE)
        tl.store(out_indices + first_out + t - prefix, slot, mask=t < seq)


def alloc_extend_naive(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    page_size: int,
    device: str | torch.device,
) -> None:
    """Write the int64 slots of a batch of extends into `out_indices` on `device`, in torch, with the result of the
    kernel.

    `prefix_lens`, `seq_lens` and `last_loc` are integer tensors `[requests]`, `free_pages` int64 page ids.
    """
    prefix, seq, last = (x.to(device=device, dtype=torch.int64) for x in (prefix_lens, seq_lens, last_loc))
    num_tokens = out_indices.numel()
    new_tokens = seq - prefix
    pages_of_prefix = (prefix + page_size - 1) // page_size
    new_pages = (seq + page_size - 1) // page_size - pages_of_prefix

    def per_token(per_request: torch.Tensor) -> torch.Tensor:
        return per_request.repeat_interleave(new_tokens, output_size=num_tokens)

    first_out = new_tokens.cumsum(0) - new_tokens
    # The position of each slot within its request, counted from the start of the sequence.
    t = torch.arange(num_tokens, device=device) + per_token(prefix - first_out)
    in_old_page = t < per_token(pages_of_prefix * page_size)
    page_index = t // page_size + per_token(new_pages.cumsum(0) - new_pages - pages_of_prefix)
    slots = per_token(last + 1 - prefix) + t
    if free_pages.numel():
        page = free_pages[page_index.clamp(0, free_pages.numel() - 1)]
        slots = torch.where(in_old_page, slots, page * page_size + t % page_size)
    out_indices.copy_(slots)


def alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    page_size: int,
    max_new_tokens: int,
    kernels: Kernels,
) -> None:
    """Write the slots of a batch of extends into `out_indices`, by the formula of the module.

    `max_new_tokens`: upper bound of `seq_lens - prefix_lens`, which the caller computes from lengths on the CPU. The
    caller must check that `free_pages` has enough pages. All tensors must be integer and on one device; `free_pages`
    and `out_indices` must be contiguous.
    """
    check_kernels(kernels)
    num_requests = prefix_lens.numel()
    if seq_lens.numel() != num_requests or last_loc.numel() != num_requests:
        raise ValueError(
            f"{num_requests} prefix_lens, {seq_lens.numel()} seq_lens and {last_loc.numel()} last_loc: "
            f"each request needs one of each"
        )
    if not num_requests or not max_new_tokens:
        return
    if kernels == "torch":
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, out_indices.device)
        return
    grid = (num_requests, cdiv(max_new_tokens, _TOKENS_PER_PROGRAM))
    with torch.cuda.device_of(out_indices):
        alloc_extend_kernel[grid](
            prefix_lens.contiguous(),
            seq_lens.contiguous(),
            last_loc.contiguous(),
            free_pages,
            out_indices,
            PAGE=page_size,
            TOKENS=_TOKENS_PER_PROGRAM,
            STEP=_REQUESTS_PER_STEP,
        )
