"""Stores rows in a layer's key and value buffers in one launch. Rows may be divided by a scale and converted to another
dtype.

    k_buffer[loc[t]] = cast(k[t] / k_scale)    v_buffer[loc[t]] = cast(v[t] / v_scale)    for t in [0, tokens)

Without scales and with equal dtypes, rows are copied in the widest word that divides their sizes and addresses.
Otherwise each element is converted to float32 and divided with correct rounding. For an fp8 buffer it is then clamped
to the range of fp8 (448 for e4m3fn, 57344 for e5m2; NaN stays NaN). At the end it is rounded once, ties to even. Inputs
are not modified. If `loc` contains a slot more than once (padding at slot 0), this slot gets one of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from hicache.kernels._floats import native_floats, quick_division, round_to_bfloat16, to_e4m3
from hicache.kernels._triton import WORDS, Kernels, cdiv, check_kernels, jit, power_of_two, tl, widest_word

Scale = float | torch.Tensor | None

_WORDS_PER_PROGRAM = 1024
_VALUES_PER_PROGRAM = 4096
_LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@jit
def _to_e5m2(x, NATIVE: tl.constexpr):
    """Convert float32 `x`, at most 57344 in magnitude, to the bytes of fp8 e5m2 (5 bits of exponent with bias 15)."""
    if NATIVE:
        out = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Below 2**-14, values are multiples of 2**-16: after adding 2**7, the last bits contain this multiple, rounded.
        small = (size.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
        # Otherwise the exponent's bias changes from 127 to 15, and 21 bits of the mantissa are dropped after half of
        # the last bit was added.
        large = (size - 0x38000000 + 0xFFFFF + ((size >> 21) & 1)) >> 21
        out = (tl.where(size < 0x38800000, small, large) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return out


@jit
def _bounded(x, LIMIT: tl.constexpr):
    """Clamp `x` to [-LIMIT, LIMIT]; NaN becomes 0."""
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, tl.where(x == x, x, 0.0)))  # noqa: PLR0124


@jit
def _or_nan(x, narrow):
    """Return the fp8 bytes `narrow`, with NaN where `x` is NaN. Conversion in hardware does not need this function,
    because it keeps NaN."""
    return tl.where(x == x, narrow, 0x7F).to(tl.uint8)  # noqa: PLR0124


@jit
def _divided(x, scale, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Return `x / scale` in float32 with enough precision for correct rounding to the buffer's format."""
    divisor = tl.full(x.shape, scale, tl.float32)
    if NATIVE and FORMAT != "":
        if (scale > 2.0**-100) & (scale < 2.0**100):  # noqa: SIM108 - all threads take the same branch
            out = quick_division(x, divisor)
        else:
            out = tl.div_rn(x, divisor)
    else:
        out = tl.div_rn(x, divisor)
    return out


@jit
def _store_rows(
    source,
    source_stride,
    target,
    target_stride,
    scale,
    slot,
    t,
    mask,
    ROW: tl.constexpr,
    COLS: tl.constexpr,
    SCALE: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Store `target[slot] = cast(source[t] / scale)`. If FORMAT is an fp8 format, `target` is a pointer to bytes. If
    FORMAT is "words", source and target are pointers to words, which are copied."""
    for start in tl.static_range(0, ROW, COLS):
        column = start + tl.arange(0, COLS)
        inside = mask[:, None] & (column < ROW)[None, :]
        x = tl.load(source + t[:, None] * source_stride + column[None, :], mask=inside, other=0)
        if FORMAT != "words":
            x = x.to(tl.float32)
        if SCALE == "number":
            x = _divided(x, scale, FORMAT, NATIVE)
        elif SCALE == "tensor":
            x = _divided(x, tl.load(scale).to(tl.float32), FORMAT, NATIVE)
        to = target + slot[:, None] * target_stride + column[None, :]
        if FORMAT == "words":
            tl.store(to, x, mask=inside)
        elif FORMAT == "e4m3":
            tl.store(to, to_e4m3(x, NATIVE) if NATIVE else _or_nan(x, to_e4m3(_bounded(x, 448.0), False)), mask=inside)
        elif FORMAT == "e5m2":
            tl.store(
                to, _to_e5m2(x, NATIVE) if NATIVE else _or_nan(x, _to_e5m2(_bounded(x, 57344.0), False)), mask=inside
            )
        elif NATIVE or target.dtype.element_ty != tl.bfloat16:
            tl.store(to, x.to(target.dtype.element_ty), mask=inside)
        else:
            tl.store(to, round_to_bfloat16(x), mask=inside)


@jit(do_not_specialize=["num_tokens", "first"], do_not_specialize_on_alignment=["loc"])
def _store_kv_kernel(  # noqa: PLR0917 - Triton binds constants by position
    k,
    v,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    loc,
    num_tokens,
    first,
    k_stride,
    v_stride,
    k_buffer_stride,
    v_buffer_stride,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
):
    # Program (b, i) stores the keys (first + i = 0) or values (1) of tokens [b*TOKENS, (b+1)*TOKENS).
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask = t < num_tokens
    slot = tl.load(loc + t, mask=mask, other=0).to(tl.int64)
    if first + tl.program_id(1) == 0:
        _store_rows(
            k, k_stride, k_buffer, k_buffer_stride, k_scale, slot, t, mask, K_ROW, COLS, K_SCALE, FORMAT, NATIVE
        )
    else:
        _store_rows(
            v, v_stride, v_buffer, v_buffer_stride, v_scale, slot, t, mask, V_ROW, COLS, V_SCALE, FORMAT, NATIVE
        )


def _rows(x: torch.Tensor, name: str) -> torch.Tensor:
    """View `[n, ...]` as `[n, row]` with contiguous rows and the same row stride."""
    inner = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != inner:
            raise ValueError(f"{name}: rows must be contiguous, strides are {x.stride()} for {x.shape}")
        inner *= size
    return x.as_strided((x.shape[0], inner), (x.stride(0), 1))


def _launch(
    rows: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    scales: Sequence[Scale],
    loc: torch.Tensor,
    parts: range,
    form: str,
) -> None:
    """Launch the kernel for `parts`, which are indices of `rows`, each `[n, row]`, and of their `buffers`. `form`:
    FORMAT of `_store_rows`."""
    per_program = _WORDS_PER_PROGRAM if form == "words" else _VALUES_PER_PROGRAM
    cols = min(power_of_two(max(x.shape[1] for x in rows)), per_program)
    tokens = max(1, min(16, per_program // cols))
    kinds = ["none" if scale is None else "tensor" if isinstance(scale, torch.Tensor) else "number" for scale in scales]
    numbers = [1.0 if scale is None else scale for scale in scales]
    loc = loc.contiguous()
    with torch.cuda.device_of(loc):
        _store_kv_kernel[(cdiv(loc.numel(), tokens), len(parts))](
            rows[0],
            rows[-1],
            buffers[0],
            buffers[-1],
            numbers[0],
            numbers[-1],
            loc,
            loc.numel(),
            parts.start,
            rows[0].stride(0),
            rows[-1].stride(0),
            buffers[0].stride(0),
            buffers[-1].stride(0),
            K_ROW=rows[0].shape[1],
            V_ROW=rows[-1].shape[1],
            K_SCALE=kinds[0],
            V_SCALE=kinds[-1],
            FORMAT=form,
            NATIVE=native_floats(loc.device),
            TOKENS=tokens,
            COLS=cols,
            num_warps=4,
        )


def _as_words(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """View each of the tensors, `[n, row]`, in the widest word that divides all their rows, strides and addresses."""
    raw = [x.view(torch.uint8) for x in tensors]
    width = widest_word(*(n for x in raw for n in (x.data_ptr(), x.stride(0), x.shape[1], int(x.storage_offset()))))
    return [x.view(WORDS[width]) for x in raw]


def _check(x: torch.Tensor, buffer: torch.Tensor, scale: Scale, loc: torch.Tensor, name: str) -> None:
    castable = x.is_floating_point() and x.element_size() in (2, 4) and buffer.is_floating_point()
    if (
        x.shape[0] != loc.numel()
        or x.shape[1:] != buffer.shape[1:]
        or ((x.dtype != buffer.dtype or scale is not None) and not castable)
    ):
        raise ValueError(
            f"{name}: rows {tuple(x.shape)} of {x.dtype} for {loc.numel()} slots of a buffer of "
            f"{tuple(buffer.shape[1:])} of {buffer.dtype}"
        )
    if isinstance(scale, torch.Tensor) and (scale.numel() != 1 or scale.device != buffer.device):
        raise ValueError(
            f"{name}: a scale of {tuple(scale.shape)} on {scale.device}: need one number, or one on {buffer.device}"
        )


def cast_rows(x: torch.Tensor, dtype: torch.dtype, scale: Scale) -> torch.Tensor:
    """Return `cast(x / scale)` in `dtype` as a new tensor: the torch twin of the conversion."""
    y = x.to(torch.float32)
    if scale is not None:
        # The divisor is a tensor of one dimension. With a number, torch would multiply by the inverse, which rounds
        # differently.
        one = scale.view(1) if isinstance(scale, torch.Tensor) else torch.full((1,), scale, device=x.device)
        y = y / one.to(torch.float32)
    if dtype in _LIMITS:
        y = y.clamp(-_LIMITS[dtype], _LIMITS[dtype])
    return y.to(dtype)


def _store(
    rows: list[torch.Tensor],
    buffers: list[torch.Tensor],
    scales: list[Scale],
    loc: torch.Tensor,
    kernels: Kernels,
    parts: range,
) -> None:
    """Store the rows of `parts`, which are indices of `rows` and of their `buffers`."""
    if not loc.numel():
        return
    same = all(x.dtype == buffer.dtype for x, buffer in zip(rows, buffers, strict=True))
    plain = same and all(scale is None for scale in scales)
    if kernels == "torch":
        for part in parts:
            x, buffer, scale = rows[part], buffers[part], scales[part]
            stored = x if plain else cast_rows(x, buffer.dtype, scale)
            if buffer.element_size() == 1:  # torch cannot assign fp8 by index
                stored, buffer = stored.view(torch.uint8), buffer.view(torch.uint8)
            buffer[loc] = stored
        return
    rows, buffers, form = [_rows(x, "rows") for x in rows], [_rows(x, "buffer") for x in buffers], ""
    if plain:
        words, form = _as_words([*rows, *buffers]), "words"
        rows, buffers = words[: len(rows)], words[len(rows) :]
    elif buffers[0].dtype in _FORMATS:
        form, buffers = _FORMATS[buffers[0].dtype], [x.view(torch.uint8) for x in buffers]
    _launch(rows, buffers, scales, loc, parts, form)


def store_rows(x: torch.Tensor, buffer: torch.Tensor, loc: torch.Tensor, kernels: Kernels, scale: Scale = None) -> None:
    """Store `buffer[loc[t]] = cast(x[t] / scale)`. `store_kv` describes the arguments."""
    check_kernels(kernels)
    _check(x, buffer, scale, loc, "x")
    _store([x], [buffer], [scale], loc, kernels, range(1))


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    loc: torch.Tensor,
    kernels: Kernels,
    k_scale: Scale = None,
    v_scale: Scale = None,
    only: Literal["k", "v"] | None = None,
) -> None:
    """Store keys and values of `tokens` slots. `k`, `v`: `[tokens, ...row]`; buffers: `[slots, ...row]`, both of one
    dtype; `loc` int32 or int64 `[tokens]`. Rows of k and v may differ in size. A scale is a number, or a tensor of one
    element on the device. With a scale, or if rows and buffers differ in dtype, rows must be float32, bfloat16 or
    float16, and buffers one of these or fp8. `only`: store only the keys or only the values, with the same compiled
    kernel. So after a step that stored both, a CUDA graph can be captured that stores keys and values on two streams.
    Raises ValueError with the shapes, dtypes or devices that do not match."""
    check_kernels(kernels)
    _check(k, k_buffer, k_scale, loc, "k")
    _check(v, v_buffer, v_scale, loc, "v")
    if k_buffer.dtype != v_buffer.dtype or k.dtype != v.dtype:
        raise ValueError(
            f"k of {k.dtype} into {k_buffer.dtype}, v of {v.dtype} into {v_buffer.dtype}: both need one dtype"
        )
    parts = {"k": range(1), "v": range(1, 2), None: range(2)}[only]
    _store([k, v], [k_buffer, v_buffer], [k_scale, v_scale], loc, kernels, parts)
