"""Stores and reads index keys of sparse attention. One byte buffer, with a row for each page, has the fp8 keys and
their scales.

    row of a page, uint8, P tokens   [0, 128*P)           key of token i at [128*i, 128*(i + 1)), fp8 e4m3
                                     [128*P, 132*P)       scale of token i, float32

    store      key(s) = k[t], scale(s) = a[t]                     for s = loc[t], page s // P, token s % P
    quantise   a[t] = max(|x[t]|) / 448,  k[t] = e4m3(x[t] / a[t])  then store; a key has 128 elements and one scale
    gather     out[t] = key (or scale) of token t % P of page pages[t // P]     for t in [0, tokens)

Rounding is to nearest, ties to even. The format is that of DeepSeek's sparse attention with blocks of 128.
"""

from __future__ import annotations

import torch

from hicache.kernels._floats import (
    E4M3_MAX,
    MIN_MAGNITUDE,
    native_floats,
    over_scale,
    row_scales,
    scale_of,
    to_e4m3,
)
from hicache.kernels._triton import WORDS, Kernels, cdiv, check_kernels, jit, tl, widest_word

KEY_BYTES = 128
SCALE_BYTES = 4
_TOKENS_PER_PROGRAM = 8


def index_row_bytes(page_size: int) -> int:
    """Return the bytes of the index keys and scales of one page of `page_size` tokens."""
    return page_size * (KEY_BYTES + SCALE_BYTES)


@jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["loc"])
def _store_kernel(  # noqa: PLR0917 - Triton binds constants by position
    x,
    given_scales,
    keys,
    scales,
    loc,
    num_tokens,
    x_stride,
    scale_stride,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY: tl.constexpr,
    LIMIT: tl.constexpr,
    MIN: tl.constexpr,
    QUANTISE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # Program b: tokens [b*TOKENS, (b+1)*TOKENS). `keys` and `scales` are the same buffer, viewed as bytes and as
    # floats.
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask = t < num_tokens
    column = tl.arange(0, KEY)
    slot = tl.load(loc + t, mask=mask, other=0).to(tl.int64)
    page, token = slot // PAGE, slot % PAGE
    row = tl.load(x + t[:, None] * x_stride + column[None, :], mask=mask[:, None], other=0)
    if QUANTISE:
        value = row.to(tl.float32)
        scale = scale_of(value, LIMIT, MIN, TOKENS)
        row = to_e4m3(over_scale(value, scale, TOKENS, KEY, NATIVE), NATIVE)
    else:
        scale = tl.load(given_scales + t * scale_stride, mask=mask, other=0)
    tl.store(keys + (page * PAGE * (KEY + 4) + token * KEY)[:, None] + column[None, :], row, mask=mask[:, None])
    tl.store(scales + page * PAGE * (KEY // 4 + 1) + PAGE * (KEY // 4) + token, scale, mask=mask)


@jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["pages"])
def _gather_kernel(
    buffer,
    out,
    pages,
    num_tokens,
    page_stride,
    start,
    PAGE: tl.constexpr,
    ITEM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    # Program b: tokens [b*TOKENS, (b+1)*TOKENS). A token has ITEM words; the words of a page's tokens begin at word
    # `start`.
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask = t < num_tokens
    column = tl.arange(0, ITEM)
    page = tl.load(pages + t // PAGE, mask=mask, other=0).to(tl.int64)
    item = buffer + (page * page_stride + start + t % PAGE * ITEM)[:, None] + column[None, :]
    words = tl.load(item, mask=mask[:, None])
    tl.store(out + t[:, None] * ITEM + column[None, :], words, mask=mask[:, None])


def _parts(buffer: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the buffer: keys uint8 `[pages, page_size, 128]` and scales float32 `[pages, page_size]`."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 2 or not buffer.is_contiguous():
        raise ValueError(f"buffer {tuple(buffer.shape)} of {buffer.dtype}: need contiguous uint8 [pages, bytes]")
    if buffer.shape[1] != index_row_bytes(page_size):
        raise ValueError(
            f"pages of {buffer.shape[1]} bytes: {page_size} tokens a page take {index_row_bytes(page_size)}"
        )
    end = page_size * KEY_BYTES
    keys = buffer[:, :end].unflatten(1, (page_size, KEY_BYTES))
    return keys, buffer.view(torch.float32)[:, end // SCALE_BYTES :]


def _check_keys(x: torch.Tensor, loc: torch.Tensor) -> None:
    if tuple(x.shape) != (loc.numel(), KEY_BYTES) or x.stride(-1) != 1:
        raise ValueError(
            f"keys {tuple(x.shape)} of strides {x.stride()} for {loc.numel()} slots: need ({loc.numel()}, {KEY_BYTES}) "
            f"with contiguous rows"
        )


def _launch_store(
    x: torch.Tensor, scales: torch.Tensor, buffer: torch.Tensor, loc: torch.Tensor, page_size: int, *, quantise: bool
) -> None:
    loc = loc.contiguous()
    with torch.cuda.device_of(loc):
        _store_kernel[(cdiv(loc.numel(), _TOKENS_PER_PROGRAM),)](
            x,
            scales,
            buffer,
            buffer.view(torch.float32),
            loc,
            loc.numel(),
            x.stride(0),
            scales.stride(0),
            PAGE=page_size,
            TOKENS=_TOKENS_PER_PROGRAM,
            KEY=KEY_BYTES,
            LIMIT=E4M3_MAX,
            MIN=MIN_MAGNITUDE,
            QUANTISE=quantise,
            NATIVE=native_floats(loc.device),
            num_warps=4,
        )


def store_index_keys(
    keys: torch.Tensor,
    scales: torch.Tensor,
    buffer: torch.Tensor,
    loc: torch.Tensor,
    page_size: int,
    kernels: Kernels,
) -> None:
    """Store quantised keys. `keys` uint8 or float8_e4m3fn `[tokens, 128]`, `scales` float32 `[tokens]` or `[tokens,
    1]`, `buffer` uint8 `[pages, 132 * page_size]`, `loc` int32 or int64 `[tokens]`. Raises ValueError for other shapes
    or dtypes."""
    check_kernels(kernels)
    page_keys, page_scales = _parts(buffer, page_size)
    _check_keys(keys, loc)
    if keys.dtype not in (torch.uint8, torch.float8_e4m3fn) or scales.dtype != torch.float32:
        raise ValueError(f"keys of {keys.dtype}, scales of {scales.dtype}: need float8_e4m3fn and float32")
    if tuple(scales.shape) not in ((loc.numel(),), (loc.numel(), 1)):
        raise ValueError(f"scales {tuple(scales.shape)} for {loc.numel()} slots: need one per slot")
    if not loc.numel():
        return
    keys, scales = keys.view(torch.uint8), scales.reshape(-1)
    if kernels == "triton":
        _launch_store(keys, scales, buffer, loc, page_size, quantise=False)
        return
    page, token = loc.long() // page_size, loc.long() % page_size
    page_keys[page, token] = keys
    page_scales[page, token] = scales


def quantise_index_keys(
    x: torch.Tensor, buffer: torch.Tensor, loc: torch.Tensor, page_size: int, kernels: Kernels
) -> None:
    """Quantise keys `x`, finite float `[tokens, 128]`, and store them in one launch. `store_index_keys` describes the
    other arguments."""
    check_kernels(kernels)
    _parts(buffer, page_size)
    _check_keys(x, loc)
    if not x.is_floating_point() or x.element_size() < 2:
        raise ValueError(f"keys of {x.dtype} cannot be quantised: need float32, float16 or bfloat16")
    if not loc.numel():
        return
    if kernels == "triton":
        _launch_store(x, buffer.view(torch.float32)[:, 0], buffer, loc, page_size, quantise=True)
        return
    scales = row_scales(x, E4M3_MAX)
    keys = (x.float() / scales).to(torch.float8_e4m3fn)
    store_index_keys(keys, scales, buffer, loc, page_size, "torch")


def _gather(
    buffer: torch.Tensor, pages: torch.Tensor, num_tokens: int, page_size: int, start: int, item: int, kernels: Kernels
) -> torch.Tensor:
    """Gather `item` bytes of each token, uint8 `[num_tokens, item]`. In a page, the bytes of its tokens begin at byte
    `start`."""
    if pages.dim() != 1 or num_tokens > pages.numel() * page_size:
        raise ValueError(f"pages {tuple(pages.shape)} of {page_size} tokens hold no {num_tokens} tokens")
    if kernels == "torch":
        used = pages[: cdiv(num_tokens, page_size)].long()
        part = buffer[:, start : start + page_size * item]
        return part[used].view(-1, item)[:num_tokens]
    out = buffer.new_empty(num_tokens, item)
    if not num_tokens:
        return out
    width = widest_word(buffer.data_ptr(), buffer.shape[1], start, item)
    pages = pages.contiguous()
    with torch.cuda.device_of(buffer):
        _gather_kernel[(cdiv(num_tokens, 64),)](
            buffer.view(WORDS[width]),
            out.view(WORDS[width]),
            pages,
            num_tokens,
            buffer.shape[1] // width,
            start // width,
            PAGE=page_size,
            ITEM=item // width,
            TOKENS=64,
            num_warps=4,
        )
    return out


def gather_index_keys(
    buffer: torch.Tensor, pages: torch.Tensor, num_tokens: int, page_size: int, kernels: Kernels
) -> torch.Tensor:
    """Return the keys of the first `num_tokens` tokens of `pages` (int32 or int64, in sequence order): uint8
    `[num_tokens, 128]`."""
    check_kernels(kernels)
    _parts(buffer, page_size)
    return _gather(buffer, pages, num_tokens, page_size, 0, KEY_BYTES, kernels)


def gather_index_scales(
    buffer: torch.Tensor, pages: torch.Tensor, num_tokens: int, page_size: int, kernels: Kernels
) -> torch.Tensor:
    """Return the scales of the first `num_tokens` tokens of `pages`, as the bytes of float32: uint8 `[num_tokens,
    4]`."""
    check_kernels(kernels)
    _parts(buffer, page_size)
    return _gather(buffer, pages, num_tokens, page_size, page_size * KEY_BYTES, SCALE_BYTES, kernels)
