"""Decode attention that reads latent rows in the pool, for queries and results in latent space (multi-head latent
attention).

    row[b, t]     = buffer[req_to_token[rows[b], t], 0]      for t in [0, seq_lens[b]), split as  latent | rope
    score[b, h, t] = scaling * (q_latent[b, h] . latent[b, t] + q_rope[b, h] . rope[b, t])
    out[b, h]     = sum over t of softmax(score[b, h])[t] * latent[b, t];  0 where seq_lens[b] = 0

    buffer element   [0, rank) latent   [rank, rank + rope) rope
    split s of request b    tokens [s * share, min((s + 1) * share, seq_lens[b])), share a multiple of the token block

Sums are float32. There are two launches: the first computes attention within each split, and the second merges the
splits by the logarithms of their softmax sums. Slots after the end of a sequence are not read.
"""

from __future__ import annotations

import math

import torch

from hicache.kernels._triton import Kernels, cdiv, check_kernels, jit, power_of_two, tl

_HEADS = 16  # heads per program, the minimum rows of a matrix product in hardware
_MAX_SPLITS = 64
_MIN_SPLIT_TOKENS = 128
_PROGRAMS_PER_SM = 2


@jit
def _rows(start, inside, DIM: tl.constexpr, COLS: tl.constexpr, FACTOR: tl.constexpr):
    """Load one row of DIM elements from each pointer in `start` [rows]. Return `[rows, COLS]` with COLS >= DIM; columns
    from DIM on, and rows for which `inside` is false, are 0."""
    column = tl.arange(0, COLS)
    mask = inside[:, None] & (column < DIM)[None, :]
    return tl.load(start[:, None] + column[None, :], mask=mask, other=0.0).to(FACTOR)


@jit
def _attend(score, latent, top, total, acc, PRECISION: tl.constexpr):
    """Add one block of tokens to an online softmax. `top`, `total`, `acc`: highest score, sum of weights, and sum of
    weighted rows of all blocks so far."""
    higher = tl.maximum(top, tl.max(score, 1))
    weight, decay = tl.exp2(score - higher[:, None]), tl.exp2(top - higher)
    acc = acc * decay[:, None] + tl.dot(weight.to(latent.dtype), latent, input_precision=PRECISION)
    return higher, total * decay + tl.sum(weight, 1), acc


@jit(do_not_specialize=["heads", "row_len"], do_not_specialize_on_alignment=["rows", "seq_lens"])
def _split_kernel(  # noqa: PLR0917 - Triton binds constants by position
    q_latent,
    q_rope,
    buffer,
    req_to_token,
    rows,
    seq_lens,
    partial,
    log_sums,
    scale_log2,
    heads,
    row_len,
    slot_stride,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_COLS: tl.constexpr,
    ROPE_COLS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Program (b, g, s): heads [g*HEADS, (g+1)*HEADS) of request b over the tokens of split s. FACTOR: dtype of the
    # factors of matrix products. It is float32 in Triton's interpreter, which would multiply 16-bit floats as integers.
    FACTOR: tl.constexpr = tl.float32 if WIDE else q_latent.dtype.element_ty
    b, s, num_splits = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    in_heads, at = head < heads, b * heads + head
    ql = _rows(q_latent + at * RANK, in_heads, RANK, RANK_COLS, FACTOR)
    qr = _rows(q_rope + at * ROPE, in_heads, ROPE, ROPE_COLS, FACTOR)
    seq_len = tl.load(seq_lens + b).to(tl.int32)
    share = tl.cdiv(tl.cdiv(seq_len, num_splits), TOKENS) * TOKENS
    start, end = s * share, tl.minimum((s + 1) * share, seq_len)
    slots = req_to_token + tl.load(rows + b).to(tl.int64) * row_len
    top, total = tl.full([HEADS], -float("inf"), tl.float32), tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, RANK_COLS], tl.float32)
    for first in tl.range(start, end, TOKENS):
        t = first + tl.arange(0, TOKENS)
        row = buffer + tl.load(slots + t, mask=t < end, other=0).to(tl.int64) * slot_stride
        latent = _rows(row, t < end, RANK, RANK_COLS, FACTOR)
        rope = _rows(row + RANK, t < end, ROPE, ROPE_COLS, FACTOR)
        score = tl.dot(ql, tl.trans(latent), input_precision=PRECISION)
        score += tl.dot(qr, tl.trans(rope), input_precision=PRECISION)
        score = tl.where((t < end)[None, :], score * scale_log2, -float("inf"))
        top, total, acc = _attend(score, latent, top, total, acc, PRECISION)
    safe = tl.where(total > 0, total, 1.0)  # the sum is 0 if the split has no tokens
    at, column = at * num_splits + s, tl.arange(0, RANK_COLS)
    tl.store(log_sums + at, tl.where(total > 0, top + tl.log2(safe), -float("inf")), mask=in_heads)
    mask = in_heads[:, None] & (column < RANK)[None, :]
    tl.store(partial + at[:, None] * RANK + column[None, :], acc / safe[:, None], mask=mask)


@jit(do_not_specialize=["num_splits"])
def _reduce_kernel(partial, log_sums, out, num_splits, RANK: tl.constexpr, RANK_COLS: tl.constexpr):
    # Program i: one request and head. A split without tokens has the log of 0 and a partial result of 0.
    i = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, RANK_COLS)
    in_rank = column < RANK
    top = -float("inf")
    for s in tl.range(0, num_splits):
        top = tl.maximum(top, tl.load(log_sums + i * num_splits + s))
    top = tl.maximum(top, -1e30)  # -1e30 instead of -infinity, whose difference with itself is NaN
    total = 0.0
    acc = tl.zeros([RANK_COLS], tl.float32)
    for s in tl.range(0, num_splits):
        weight = tl.exp2(tl.load(log_sums + i * num_splits + s) - top)
        total += weight
        acc += weight * tl.load(partial + (i * num_splits + s) * RANK + column, mask=in_rank, other=0.0)
    acc = acc / tl.maximum(total, 1e-30)
    tl.store(out + i * RANK + column, acc.to(out.dtype.element_ty), mask=in_rank)


def latent_attention_naive(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Compute the attention in torch, with the result of the kernels. Gathers the latent rows of all requests of the
    batch."""
    rank, max_len = q_latent.shape[2], max(seq_lens.tolist(), default=0)
    inside = torch.arange(max_len, device=buffer.device) < seq_lens[:, None]
    slots = req_to_token[rows.long(), :max_len].long().masked_fill(~inside, 0)
    # Rows outside of the sequence are masked, because their slots may contain NaN, and NaN times a weight of 0 is NaN.
    stored = buffer[slots, 0].float().masked_fill(~inside[:, :, None], 0.0)
    query = torch.cat([q_latent, q_rope], dim=-1).float()
    scores = (query @ stored.transpose(1, 2) * scaling).masked_fill(~inside[:, None], -math.inf)
    weights = scores.softmax(-1).masked_fill(~inside[:, None], 0.0)
    return (weights @ stored[..., :rank]).to(q_latent.dtype)


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
    kernels: Kernels,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Return the attention of one token per request in latent space, `[batch, heads, rank]` in the dtype of `q_latent`.

    `q_latent` `[batch, heads, rank]` and `q_rope` `[batch, heads, rope]` of one dtype; `buffer` `[slots, 1, rank +
    rope]`, a layer of a pool; `req_to_token` int32 `[requests, max_len]`; `rows` and `seq_lens` integers `[batch]`,
    lengths at most max_len. `num_splits`: number of splits of each sequence. None: it depends only on the batch size
    and max_len, so that a CUDA graph can be replayed for any lengths. Raises ValueError with the shapes that do not
    match.
    """
    check_kernels(kernels)
    _check(q_latent, q_rope, buffer, req_to_token, rows, seq_lens)
    if kernels == "torch" or not q_latent.numel():
        return latent_attention_naive(q_latent, q_rope, buffer, req_to_token, rows, seq_lens, scaling)
    batch, heads, rank = q_latent.shape
    q_latent, q_rope, narrow = q_latent.contiguous(), q_rope.contiguous(), q_latent.element_size() < 4
    groups, columns = cdiv(heads, _HEADS), max(16, power_of_two(rank))
    splits = num_splits or _num_splits(batch * groups, req_to_token.shape[1], q_latent.device)
    partial = torch.empty(batch, heads, splits, rank, dtype=torch.float32, device=q_latent.device)
    log_sums = torch.empty(batch, heads, splits, dtype=torch.float32, device=q_latent.device)
    out = torch.empty_like(q_latent)
    sources = (q_latent, q_rope, buffer, req_to_token, rows, seq_lens)
    with torch.cuda.device_of(buffer):
        _split_kernel[(batch, groups, splits)](
            *sources,
            partial,
            log_sums,
            scaling * math.log2(math.e),
            heads,
            req_to_token.stride(0),
            buffer.stride(0),
            RANK=rank,
            ROPE=q_rope.shape[2],
            RANK_COLS=columns,
            ROPE_COLS=max(16, power_of_two(q_rope.shape[2])),
            HEADS=_HEADS,
            TOKENS=32 if narrow else 16,
            WIDE=not q_latent.is_cuda,
            PRECISION="tf32" if narrow else "ieee",
            num_warps=4,
            num_stages=2 if narrow else 1,
        )
        _reduce_kernel[(batch * heads,)](partial, log_sums, out, splits, RANK=rank, RANK_COLS=columns, num_warps=4)
    return out


def _num_splits(programs: int, max_len: int, device: torch.device) -> int:
    """Return the number of splits of a sequence: enough to fill the device, but at most one for every 128 tokens."""
    on_cuda = device.type == "cuda"
    target_programs = (
        torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_SM if on_cuda else 1
    )
    return max(1, min(cdiv(target_programs, programs), cdiv(max_len, _MIN_SPLIT_TOKENS), _MAX_SPLITS))


def _check(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    batch, heads, rank = q_latent.shape
    if q_rope.shape[:2] != (batch, heads) or buffer.shape[1:] != (1, rank + q_rope.shape[2]):
        raise ValueError(
            f"q_latent {tuple(q_latent.shape)}, q_rope {tuple(q_rope.shape)}, buffer {tuple(buffer.shape)}: need equal "
            "batch and heads, and rows of rank + rope elements"
        )
    if q_latent.dtype != q_rope.dtype or buffer.stride(2) != 1:
        raise ValueError(
            f"q_latent of {q_latent.dtype}, q_rope of {q_rope.dtype}, buffer with strides {buffer.stride()}: need one "
            "dtype and contiguous rows"
        )
    if rows.shape != (batch,) or seq_lens.shape != (batch,) or req_to_token.dim() != 2:
        raise ValueError(
            f"rows {tuple(rows.shape)}, seq_lens {tuple(seq_lens.shape)}, req_to_token {tuple(req_to_token.shape)}: "
            f"need a row and a length for each of {batch} requests, and [requests, max_len]"
        )
    if req_to_token.stride(1) != 1:
        raise ValueError(f"req_to_token has strides {req_to_token.stride()}: its rows must be contiguous")
