"""Stores and reads keys and values in 8 bits. Each token and head has a float32 scale, which is computed when the token
is stored.

    quantise     a = max(|x[t, h]|) / L,  scale[s, h] = a,  data[s, h] = round(x[t, h] / a)       for s = loc[t]
    dequantise   out[t, h] = data[s, h] * scale[s, h]                      for s = loc[t], or s = t without loc

L is 127 for int8 and 448 for fp8 e4m3, which is stored as uint8. Rounding is to nearest, ties to even, and each step is
computed in float32. So the results of the kernels and of their torch twins are bitwise equal. One launch handles keys
and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hicache.kernels._floats import (
    E4M3_MAX,
    MIN_MAGNITUDE,
    from_e4m3,
    native_floats,
    over_scale,
    round_to_bfloat16,
    row_scales,
    scale_of,
    to_e4m3,
)
from hicache.kernels._triton import Kernels, cdiv, check_kernels, jit, power_of_two, tl

_ELEMENTS_PER_PROGRAM = 2048
INT8_MAX = 127.0


@jit
def _quantise_rows(  # noqa: PLR0917 - Triton binds constants by position
    x,
    token_stride,
    head_stride,
    data,
    scales,
    slot,
    t,
    h,
    mask,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LIMIT: tl.constexpr,
    MIN: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
):
    column = tl.arange(0, COLS)
    inside = mask[:, None] & (column < DIM)[None, :]
    source = x + (t * token_stride + h * head_stride)[:, None] + column[None, :]
    value = tl.load(source, mask=inside, other=0).to(tl.float32)
    scale = scale_of(value, LIMIT, MIN, ROWS)
    value = over_scale(value, scale, ROWS, COLS, NATIVE)
    row = slot * HEADS + h
    target = data + row[:, None] * DIM + column[None, :]
    if FP8:
        tl.store(target, to_e4m3(value, NATIVE), mask=inside)
    else:
        # At 1.5 * 2**23, the last bit of a float32 has the value 1. So adding this number rounds to an integer, which
        # is in the last byte.
        tl.store(target, (value + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8), mask=inside)
    tl.store(scales + row, scale, mask=mask)


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["loc"])
def _quantise_kernel(  # noqa: PLR0917 - Triton binds constants by position
    k,
    v,
    k_data,
    v_data,
    k_scales,
    v_scales,
    loc,
    num_rows,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    K_COLS: tl.constexpr,
    V_COLS: tl.constexpr,
    LIMIT: tl.constexpr,
    MIN: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # Program (b, 0) stores the keys of rows [b*ROWS, (b+1)*ROWS), program (b, 1) their values. A row is a token's head.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    t, h = row // HEADS, row % HEADS
    slot = tl.load(loc + t, mask=mask, other=0).to(tl.int64)
    if tl.program_id(1) == 0:
        _quantise_rows(
            k, k_token_stride, k_head_stride, k_data, k_scales, slot, t, h, mask,
            HEADS, K_DIM, ROWS, K_COLS, LIMIT, MIN, FP8, NATIVE,
        )  # fmt: skip
    else:
        _quantise_rows(
            v, v_token_stride, v_head_stride, v_data, v_scales, slot, t, h, mask,
            HEADS, V_DIM, ROWS, V_COLS, LIMIT, MIN, FP8, NATIVE,
        )  # fmt: skip


@jit
def _dequantise_rows(
    data,
    scales,
    out,
    source,
    target,
    mask,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    ROUND: tl.constexpr,
):
    column = tl.arange(0, COLS)
    inside = mask[:, None] & (column < DIM)[None, :]
    value = tl.load(data + source[:, None] * DIM + column[None, :], mask=inside, other=0)
    scale = tl.load(scales + source, mask=mask, other=0)
    wide = (from_e4m3(value, NATIVE) if FP8 else value.to(tl.float32)) * scale[:, None]
    if ROUND:
        tl.store(out + target[:, None] * DIM + column[None, :], round_to_bfloat16(wide), mask=inside)
    else:
        tl.store(out + target[:, None] * DIM + column[None, :], wide.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["loc"])
def _dequantise_kernel(  # noqa: PLR0917 - Triton binds constants by position
    k_data,
    v_data,
    k_scales,
    v_scales,
    k,
    v,
    loc,
    num_rows,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    K_COLS: tl.constexpr,
    V_COLS: tl.constexpr,
    GATHER: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    ROUND: tl.constexpr,
):
    # Program (b, 0) reads the keys of rows [b*ROWS, (b+1)*ROWS), program (b, 1) their values. A row is a token's head.
    target = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = target < num_rows
    if GATHER:
        slot = tl.load(loc + target // HEADS, mask=mask, other=0).to(tl.int64)
        source = slot * HEADS + target % HEADS
    else:
        source = target
    if tl.program_id(1) == 0:
        _dequantise_rows(k_data, k_scales, k, source, target, mask, K_DIM, K_COLS, FP8, NATIVE, ROUND)
    else:
        _dequantise_rows(v_data, v_scales, v, source, target, mask, V_DIM, V_COLS, FP8, NATIVE, ROUND)


def _check(data: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> None:
    for values, scale in zip(data, scales, strict=True):
        fits = values.dim() == 3 and scale.shape == values.shape[:2] and values.shape[:2] == data[0].shape[:2]
        if not fits or not values.is_contiguous() or not scale.is_contiguous():
            raise ValueError(
                f"data {tuple(values.shape)} with scales {tuple(scale.shape)}: need contiguous [slots, heads, dim] and "
                f"[slots, heads]"
            )
        if values.dtype not in (torch.int8, torch.uint8) or values.dtype != data[0].dtype:
            raise ValueError(f"data of {values.dtype}: need int8, or uint8 for fp8, for keys and values alike")
        if scale.dtype != torch.float32:
            raise ValueError(f"scales of {scale.dtype}: need float32")


def _tiles(dims: Sequence[int]) -> tuple[list[int], int]:
    """Return the columns of each tile, powers of two, and the number of rows of a program."""
    cols = [power_of_two(dim) for dim in dims]
    return cols, max(1, min(32, _ELEMENTS_PER_PROGRAM // max(cols)))


def quantise_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    data: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor],
    loc: torch.Tensor,
    kernels: Kernels,
) -> None:
    """Quantise keys and values, and store them at the slots `loc`. `k`, `v`: finite floats `[tokens, heads, dim]`, rows
    contiguous, of one dtype; `data`: int8 or uint8 (fp8) `[slots, heads, dim]` of keys and of values, `scales`: float32
    `[slots, heads]` of each; `loc` int32 or int64 `[tokens]`. Keys and values may differ in dim. Raises ValueError with
    the argument that does not match."""
    check_kernels(kernels)
    _check(data, scales)
    for x, values, name in ((k, data[0], "k"), (v, data[1], "v")):
        if tuple(x.shape) != (loc.numel(), *values.shape[1:]) or x.dtype != k.dtype or x.stride(-1) != 1:
            raise ValueError(
                f"{name}: rows {tuple(x.shape)} of {x.dtype} for {loc.numel()} slots of {tuple(values.shape[1:])}"
            )
    if not loc.numel():
        return
    fp8 = data[0].dtype == torch.uint8
    limit = E4M3_MAX if fp8 else INT8_MAX
    if kernels == "torch":
        for x, values, scale in zip((k, v), data, scales, strict=True):
            a = row_scales(x, limit)
            y = x.float() / a
            values[loc] = y.to(torch.float8_e4m3fn).view(torch.uint8) if fp8 else y.round().to(torch.int8)
            scale[loc] = a[..., 0]
        return
    heads, dims = k.shape[1], (k.shape[2], v.shape[2])
    cols, rows = _tiles(dims)
    loc, num_rows = loc.contiguous(), loc.numel() * heads
    with torch.cuda.device_of(loc):
        _quantise_kernel[(cdiv(num_rows, rows), 2)](
            k, v, *data, *scales, loc, num_rows, *k.stride()[:2], *v.stride()[:2],
            HEADS=heads, K_DIM=dims[0], V_DIM=dims[1], ROWS=rows, K_COLS=cols[0], V_COLS=cols[1], LIMIT=limit,
            MIN=MIN_MAGNITUDE, FP8=fp8, NATIVE=native_floats(loc.device), num_warps=4,
        )  # fmt: skip


def dequantise_kv(
    data: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    loc: torch.Tensor | None,
    dtype: torch.dtype,
    kernels: Kernels,
) -> list[torch.Tensor]:
    """Dequantise one or two tensors that `quantise_kv` has stored into new tensors of `dtype`, `[tokens, heads, dim]`
    each.

    `loc` int32 or int64 `[tokens]`; None: all slots in order."""
    check_kernels(kernels)
    _check(data, scales)
    if len(data) not in (1, 2) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"{len(data)} tensors to {dtype}: need one or two, and a float of 16 bits or more")
    fp8 = data[0].dtype == torch.uint8
    if kernels == "torch":
        out = []
        for values, scale in zip(data, scales, strict=True):
            if loc is not None:
                values, scale = values[loc], scale[loc]  # noqa: PLW2901
            wide = values.view(torch.float8_e4m3fn).float() if fp8 else values.float()
            out.append((wide * scale[..., None]).to(dtype))
        return out
    heads, dims = data[0].shape[1], [values.shape[2] for values in data]
    tokens = data[0].shape[0] if loc is None else loc.numel()
    out = [torch.empty((tokens, heads, dim), dtype=dtype, device=data[0].device) for dim in dims]
    cols, rows = _tiles(dims)
    num_rows, native = tokens * heads, native_floats(data[0].device)
    if num_rows:
        at = scales[0] if loc is None else loc.contiguous()
        with torch.cuda.device_of(data[0]):
            _dequantise_kernel[(cdiv(num_rows, rows), len(data))](
                data[0], data[-1], scales[0], scales[-1], out[0], out[-1], at, num_rows,
                HEADS=heads, K_DIM=dims[0], V_DIM=dims[-1], ROWS=rows, K_COLS=cols[0], V_COLS=cols[-1],
                GATHER=loc is not None, FP8=fp8, NATIVE=native, ROUND=dtype == torch.bfloat16 and not native,
                num_warps=4,
            )  # fmt: skip
    return out
