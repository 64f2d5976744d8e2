"""Chooses one slot for each request of a decode batch from paged slots, in one launch.

Request r has s = `seq_lens[r]` tokens, including its new token. With page size P, the slot of the new token is

    last_loc[r] + 1           where (s - 1) % P > 0: the last page of the request is not full
    free_pages[rank]*P        where (s - 1) % P == 0: a new page; `rank` counts the earlier requests with a new page

Only callers with SGLang's interface use it, because hicache's engine allocates slots request by request.
"""

from __future__ import annotations

import torch

from hicache.kernels._triton import Kernels, cdiv, check_kernels, jit, tl

_REQUESTS_PER_PROGRAM = 128


@jit(do_not_specialize=["num_requests"], do_not_specialize_on_alignment=["free_pages"])
def alloc_decode_kernel(
    seq_lens,
    last_loc,
    free_pages,
    out_indices,
    num_requests,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK
    # Count the new pages of the requests in [0, first).
    taken = tl.zeros([], dtype=tl.int64)
    for start in range(0, first, BLOCK):
        earlier = tl.load(seq_lens + start + tl.arange(0, BLOCK)).to(tl.int64)
        taken += tl.sum(((earlier - 1) % PAGE == 0).to(tl.int64), axis=0)

    request = first + tl.arange(0, BLOCK)
    mask = request < num_requests
    seq = tl.load(seq_lens + request, mask=mask, other=0).to(tl.int64)
    last = tl.load(last_loc + request, mask=mask, other=0).to(tl.int64)
    needs_page = mask & ((seq - 1) % PAGE == 0)
    count = needs_page.to(tl.int64)
    rank = taken + tl.cumsum(count, axis=0) - count
    page = tl.load(free_pages + rank, mask=needs_page, other=0)
    tl.store(out_indices + request, tl.where(needs_page, page * PAGE, last + 1), mask=mask)


def alloc_decode_naive(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    page_size: int,
    device: str | torch.device,
) -> None:
    """Write one int64 slot per request into `out_indices` on `device`, in torch, with the result of the kernel."""
    seq, last = (x.to(device=device, dtype=torch.int64) for x in (seq_lens, last_loc))
    needs_page = (seq - 1) % page_size == 0
    slots = last + 1
    if free_pages.numel():
        rank = needs_page.to(torch.int64).cumsum(0) - 1
        page = free_pages[rank.clamp(0, free_pages.numel() - 1)]
        slots = torch.where(needs_page, page * page_size, slots)
    out_indices.copy_(slots)


def alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    page_size: int,
    kernels: Kernels,
) -> None:
    """Write one slot per request into `out_indices`, by the formula of the module.

    The caller must check that `free_pages` has enough pages. All tensors must be integer and on one device;
    `free_pages` and `out_indices` must be contiguous.
    """
    check_kernels(kernels)
    num_requests = seq_lens.numel()
    if last_loc.numel() != num_requests or out_indices.numel() != num_requests:
        raise ValueError(
            f"{num_requests} seq_lens, {last_loc.numel()} last_loc and {out_indices.numel()} out_indices: "
            f"each request needs one of each"
        )
    if not num_requests:
        return
    if kernels == "torch":
        alloc_decode_naive(seq_lens, last_loc, free_pages, out_indices, page_size, out_indices.device)
        return
    with torch.cuda.device_of(out_indices):
        alloc_decode_kernel[(cdiv(num_requests, _REQUESTS_PER_PROGRAM),)](
            seq_lens.contiguous(),
            last_loc.contiguous(),
            free_pages,
            out_indices,
            num_requests,
            PAGE=page_size,
            BLOCK=_REQUESTS_PER_PROGRAM,
        )
