"""New rows into a layer's key and value buffers, both in one launch.

    k_buffer[loc[t]] = k[t]    v_buffer[loc[t]] = v[t]    for t in [0, tokens)

Rows are copied as the widest word that divides their sizes and addresses, so no dtype is special. Where `loc` names a
slot more than once (padding at slot 0), one of its rows is kept.
"""

from __future__ import annotations

import torch

from hicache.kernels._triton import WORDS, Kernels, cdiv, check_kernels, jit, power_of_two, tl, widest_word

_WORDS_PER_PROGRAM = 1024


@jit
def _store_rows(source, source_stride, target, target_stride, slot, t, mask, ROW: tl.constexpr, COLS: tl.constexpr):
    for start in tl.static_range(0, ROW, COLS):
        column = start + tl.arange(0, COLS)
        inside = mask[:, None] & (column < ROW)[None, :]
        row = tl.load(source + t[:, None] * source_stride + column[None, :], mask=inside)
        tl.store(target + slot[:, None] * target_stride + column[None, :], row, mask=inside)


@jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["loc"])
def _store_kv_kernel(
    k,
    v,
    k_buffer,
    v_buffer,
    loc,
    num_tokens,
    k_stride,
    v_stride,
    k_buffer_stride,
    v_buffer_stride,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
):
    # Program (b, 0) stores the keys of tokens [b*TOKENS, (b+1)*TOKENS), program (b, 1) their values.
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask = t < num_tokens
    slot = tl.load(loc + t, mask=mask, other=0).to(tl.int64)
    if tl.program_id(1) == 0:
        _store_rows(k, k_stride, k_buffer, k_buffer_stride, slot, t, mask, K_ROW, COLS)
    else:
        _store_rows(v, v_stride, v_buffer, v_buffer_stride, slot, t, mask, V_ROW, COLS)


def _rows(x: torch.Tensor, name: str) -> torch.Tensor:
    """`[n, ...]` as `[n, row]` with adjacent elements within a row; the distance of rows stays."""
    inner = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != inner:
            raise ValueError(f"{name}: elements of a row must be adjacent, strides are {x.stride()} for {x.shape}")
        inner *= size
    return x.as_strided((x.shape[0], inner), (x.stride(0), 1))


def _launch(rows: list[torch.Tensor], buffers: list[torch.Tensor], loc: torch.Tensor) -> None:
    """Launch over one pair of rows and buffer or two; each `[n, row elements]`, one dtype."""
    itemsize = rows[0].element_size()
    facts = [n for x in (*rows, *buffers) for n in (x.data_ptr(), x.stride(0) * itemsize, x.shape[1] * itemsize)]
    width = widest_word(*facts)
    words = [x.shape[1] * itemsize // width for x in rows]
    strides = [x.stride(0) * itemsize // width for x in (*rows, *buffers)]
    views = [_as_words(x, width) for x in (*rows, *buffers)]
    cols = min(power_of_two(max(words)), _WORDS_PER_PROGRAM)
    tokens = max(1, min(16, _WORDS_PER_PROGRAM // cols))
    loc = loc.contiguous()
    num_tokens, pairs = loc.numel(), len(rows)
    with torch.cuda.device_of(loc):
        _store_kv_kernel[(cdiv(num_tokens, tokens), pairs)](
            views[0],
            views[pairs - 1],
            views[pairs],
            views[-1],
            loc,
            num_tokens,
            strides[0],
            strides[pairs - 1],
            strides[pairs],
            strides[-1],
            K_ROW=words[0],
            V_ROW=words[-1],
            TOKENS=tokens,
            COLS=cols,
            num_warps=4,
        )


def _as_words(x: torch.Tensor, width: int) -> torch.Tensor:
    """A view that starts where `x` starts and whose element is a word; only its address and dtype are used."""
    return x[:1].view(torch.uint8).view(WORDS[width])


def _check(x: torch.Tensor, buffer: torch.Tensor, loc: torch.Tensor, name: str) -> None:
    if x.shape[0] != loc.numel() or x.shape[1:] != buffer.shape[1:] or x.dtype != buffer.dtype:
        raise ValueError(
            f"{name}: rows {tuple(x.shape)} of {x.dtype} for {loc.numel()} slots of a buffer of "
            f"{tuple(buffer.shape[1:])} of {buffer.dtype}"
        )


def store_rows(x: torch.Tensor, buffer: torch.Tensor, loc: torch.Tensor, kernels: Kernels) -> None:
    """`buffer[loc[t]] = x[t]`: `x` `[tokens, ...row]`, `buffer` `[slots, ...row]`, `loc` int32 or int64 `[tokens]`."""
    check_kernels(kernels)
    _check(x, buffer, loc, "x")
    if not loc.numel():
        return
    if kernels == "torch":
        buffer[loc] = x
        return
    _launch([_rows(x, "x")], [_rows(buffer, "buffer")], loc)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    loc: torch.Tensor,
    kernels: Kernels,
) -> None:
    """Store keys and values of `tokens` slots. `k`, `v`: `[tokens, ...row]`; buffers: `[slots, ...row]`; `loc`
    int32 or int64 `[tokens]`, contiguous. Rows of k and v may differ in size, not in dtype. ValueError names both
    sides where shapes or dtypes differ."""
    check_kernels(kernels)
    _check(k, k_buffer, loc, "k")
    _check(v, v_buffer, loc, "v")
    if not loc.numel():
        return
    if kernels == "torch":
        k_buffer[loc] = k
        v_buffer[loc] = v
        return
    _launch([_rows(k, "k"), _rows(v, "v")], [_rows(k_buffer, "k_buffer"), _rows(v_buffer, "v_buffer")], loc)
