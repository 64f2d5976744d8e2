"""Rounding to narrow floats within kernels: by the hardware where it can, else by integer arithmetic of equal result.

Triton converts to fp8 e4m3 only for devices that have it (compute capability 8.9 and later), and its interpreter
neither carries out of the mantissa nor rounds to bfloat16 at all. So every kernel that narrows takes `NATIVE`, which
`native_floats` decides for a device; both ways give the nearest value, ties to even, as torch does. May import torch
and _triton.
"""

from __future__ import annotations

import torch

from hicache.kernels._triton import jit, tl

E4M3_MAX = 448.0
# Rows whose largest magnitude is below this are scaled as if it were this, so that no scale is zero or denormal.
LEAST_MAGNITUDE = 2.0**-100


def native_floats(device: torch.device) -> bool:
    """Whether kernels on `device` convert to fp8 e4m3 and bfloat16 in hardware."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def row_scales(x: torch.Tensor, limit: float) -> torch.Tensor:
    """float32 `max(|x|) / limit` over the last dimension, kept; the torch twin of `scale_of`."""
    top = x.abs().amax(-1, keepdim=True).float().clamp(min=LEAST_MAGNITUDE)
    # Over a tensor: by a number, CUDA multiplies with the inverse, which rounds differently.
    return top / torch.full_like(top, limit)


@jit
def scale_of(x, LIMIT: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr):
    """float32 `[ROWS]`: `max(max(|x|), LEAST) / LIMIT` over the columns of `x`, float32 `[ROWS, COLS]`, correctly
    rounded."""
    top = tl.maximum(tl.max(tl.abs(x), axis=1), LEAST)
    return tl.div_rn(top, tl.full([ROWS], LIMIT, tl.float32))


@jit
def quick_division(x, divisor):
    """`x / divisor`, float32, in a third of a division's instructions where many elements share their divisor.

    By the reciprocal and one correction, whose residual the hardware's fused product makes exact (Markstein,
    "Computation of elementary functions on the IBM RISC System/6000 processor", 1990): correctly rounded for divisors
    in (2**-100, 2**100) and |x| above 2**-100; smaller x may be off by one place, which no 8-bit format keeps. NaN
    stays NaN.
    """
    inverse = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), divisor)
    quotient = x * inverse
    closer = tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)
    # An infinite quotient has no correction, and that of a zero would lose its sign.
    return tl.where((closer == closer) & (closer != 0), closer, quotient)  # noqa: PLR0124


@jit
def over_scale(x, scale, ROWS: tl.constexpr, COLS: tl.constexpr, NATIVE: tl.constexpr):
    """`x / scale[:, None]`, correctly rounded as far as 8 bits show it; scales as `scale_of` gives them."""
    divisor = tl.broadcast_to(scale[:, None], [ROWS, COLS])
    return quick_division(x, divisor) if NATIVE else tl.div_rn(x, divisor)


@jit
def to_e4m3(x, NATIVE: tl.constexpr):
    """The bytes of float32 `x`, at most 448 in magnitude, as fp8 e4m3 (4 bits of exponent with bias 7, no infinity)."""
    if NATIVE:
        out = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Below 2**-6 values are multiples of 2**-9: adding 2**14 leaves that multiple, rounded, in the last bits.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        # Else move the exponent's bias from 127 to 7 and drop 20 bits of the mantissa, rounding by what is added.
        large = (size - 0x3C000000 + 0x7FFFF + ((size >> 20) & 1)) >> 20
        out = (tl.where(size < 0x3C800000, small, large) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return out


@jit
def from_e4m3(x, NATIVE: tl.constexpr):
    """float32 of fp8 e4m3 bytes other than NaN; exact."""
    if NATIVE:
        out = x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = x.to(tl.int32)
        size = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120: bias 7 to 127
        out = tl.where(bits >= 0x80, -size, size)
    return out


@jit
def round_to_bfloat16(x):
    """Finite float32 `x` as bfloat16."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
