"""Stores and reads latent rows of multi-head latent attention. A token's row has two parts: `nope` without and `rope`
with position.

    set   buffer[loc[t]] = nope[t] | rope[t]
    get   nope[t] | rope[t] = buffer[loc[t]]          for t in [0, tokens)

    row, in elements   [0, rank) nope   [rank, rank + rope) rope   [rank + rope, ...) untouched

Rows of any dtype are copied in the widest word that divides the sizes and addresses of both parts. If `loc` contains a
slot more than once (padding at slot 0), this slot gets one of its rows.
"""

from __future__ import annotations

import torch

from hicache.kernels._triton import WORDS, Kernels, cdiv, check_kernels, jit, power_of_two, tl, widest_word

_WORDS_PER_PROGRAM = 1024


@jit
def _move(
    nope,
    rope,
    buffer,
    loc,
    num_tokens,
    nope_stride,
    rope_stride,
    buffer_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
    GET: tl.constexpr,
):
    # Program b: tokens [b*TOKENS, (b+1)*TOKENS), words [0, NOPE) from or to nope, [NOPE, NOPE + ROPE) rope.
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask = t < num_tokens
    slot = tl.load(loc + t, mask=mask, other=0).to(tl.int64)
    for start in tl.static_range(0, NOPE + ROPE, COLS):
        column = start + tl.arange(0, COLS)
        in_nope = mask[:, None] & (column < NOPE)[None, :]
        in_rope = mask[:, None] & ((column >= NOPE) & (column < NOPE + ROPE))[None, :]
        row = buffer + slot[:, None] * buffer_stride + column[None, :]
        first = nope + t[:, None] * nope_stride + column[None, :]
        second = rope + t[:, None] * rope_stride + (column - NOPE)[None, :]
        if GET:
            words = tl.load(row, mask=in_nope | in_rope)
            tl.store(first, words, mask=in_nope)
            tl.store(second, words, mask=in_rope)
        else:
            tl.store(row, tl.load(first, mask=in_nope), mask=in_nope)
            tl.store(row, tl.load(second, mask=in_rope), mask=in_rope)


@jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["loc"])
def set_mla_kv_buffer_kernel(
    nope,
    rope,
    buffer,
    loc,
    num_tokens,
    nope_stride,
    rope_stride,
    buffer_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
):
    _move(nope, rope, buffer, loc, num_tokens, nope_stride, rope_stride, buffer_stride, NOPE, ROPE, TOKENS, COLS, False)


@jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["loc"])
def get_mla_kv_buffer_kernel(
    nope,
    rope,
    buffer,
    loc,
    num_tokens,
    nope_stride,
    rope_stride,
    buffer_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
):
    _move(nope, rope, buffer, loc, num_tokens, nope_stride, rope_stride, buffer_stride, NOPE, ROPE, TOKENS, COLS, True)


def _rows(x: torch.Tensor, name: str) -> torch.Tensor:
    """View `[n, row]` or `[n, 1, row]` as `[n, row]` with contiguous rows."""
    if x.dim() not in (2, 3) or (x.dim() == 3 and x.shape[1] != 1):
        raise ValueError(f"{name} of shape {tuple(x.shape)}: need [rows, row] or [rows, 1, row]")
    rows = x if x.dim() == 2 else x[:, 0]
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        raise ValueError(f"{name}: rows must be contiguous, strides are {x.stride()} for {tuple(x.shape)}")
    return rows


def _check(nope: torch.Tensor, rope: torch.Tensor, buffer: torch.Tensor, loc: torch.Tensor) -> None:
    counts = {nope.shape[0], rope.shape[0], loc.numel()}
    if len(counts) > 1 or nope.shape[1] + rope.shape[1] > buffer.shape[1]:
        raise ValueError(
            f"nope {tuple(nope.shape)} and rope {tuple(rope.shape)} for {loc.numel()} slots of rows of "
            f"{buffer.shape[1]} elements"
        )
    if not nope.dtype == rope.dtype == buffer.dtype:
        raise ValueError(f"nope of {nope.dtype}, rope of {rope.dtype}, buffer of {buffer.dtype}: need one dtype")


def _launch(nope: torch.Tensor, rope: torch.Tensor, buffer: torch.Tensor, loc: torch.Tensor, *, get: bool) -> None:
    itemsize = nope.element_size()
    parts = (nope, rope, buffer)
    facts = [n * itemsize for x in parts for n in (x.stride(0), int(x.storage_offset()))]
    width = widest_word(*(x.data_ptr() for x in parts), nope.shape[1] * itemsize, rope.shape[1] * itemsize, *facts)
    words = [x.shape[1] * itemsize // width for x in (nope, rope)]
    cols = min(power_of_two(sum(words)), _WORDS_PER_PROGRAM)
    tokens = max(1, min(16, _WORDS_PER_PROGRAM // cols))
    loc = loc.contiguous()
    kernel = get_mla_kv_buffer_kernel if get else set_mla_kv_buffer_kernel
    with torch.cuda.device_of(loc):
        kernel[(cdiv(loc.numel(), tokens),)](
            # The kernel uses only the address and the dtype of each view.
            *(x[:1, : max(1, width // itemsize)].view(torch.uint8)[:, :width].view(WORDS[width]) for x in parts),
            loc,
            loc.numel(),
            *(x.stride(0) * itemsize // width for x in parts),
            NOPE=words[0],
            ROPE=words[1],
            TOKENS=tokens,
            COLS=cols,
            num_warps=4,
        )


def set_latent(
    nope: torch.Tensor, rope: torch.Tensor, buffer: torch.Tensor, loc: torch.Tensor, kernels: Kernels
) -> None:
    """Store rows. `nope` `[tokens, (1,) rank]`, `rope` `[tokens, (1,) rope]`, `buffer` `[slots, (1,) >= rank + rope]`,
    one dtype; `loc` int32 or int64 `[tokens]`. Raises ValueError with the shapes or dtypes that do not match."""
    check_kernels(kernels)
    nope, rope, buffer = _rows(nope, "nope"), _rows(rope, "rope"), _rows(buffer, "buffer")
    _check(nope, rope, buffer, loc)
    if not loc.numel():
        return
    if kernels == "torch":
        rank, end = nope.shape[1], nope.shape[1] + rope.shape[1]
        buffer[:, :rank][loc] = nope
        buffer[:, rank:end][loc] = rope
        return
    _launch(nope, rope, buffer, loc, get=False)


def get_latent(
    buffer: torch.Tensor, loc: torch.Tensor, rank: int, rope_dim: int, kernels: Kernels
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two parts of the rows at `loc`: nope `[tokens, 1, rank]` and rope `[tokens, 1, rope_dim]`, as new
    tensors."""
    check_kernels(kernels)
    buffer = _rows(buffer, "buffer")
    nope = buffer.new_empty(loc.numel(), 1, rank)
    rope = buffer.new_empty(loc.numel(), 1, rope_dim)
    _check(nope[:, 0], rope[:, 0], buffer, loc)
    if not loc.numel():
        return nope, rope
    if kernels == "torch":
        return buffer[:, None, :rank][loc], buffer[:, None, rank : rank + rope_dim][loc]
    _launch(nope[:, 0], rope[:, 0], buffer, loc, get=True)
    return nope, rope
