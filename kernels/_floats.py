"""Rounding to narrow floats within kernels, in hardware where this is supported, else by integer arithmetic with the
same result.

Triton converts to fp8 e4m3 only for devices with compute capability 8.9 or later. Triton's interpreter rounds wrongly:
it does not carry out of the mantissa, and does not round to bfloat16. So every kernel that converts takes `NATIVE`,
which `native_floats` chooses for a device. Both variants round to nearest, ties to even, as torch does.
"""

from __future__ import annotations

import torch

from hicache.kernels._triton import jit, tl

E4M3_MAX = 448.0
# A smaller maximum of a row counts as this magnitude, so that no scale is zero or denormal.
MIN_MAGNITUDE = 2.0**-100


def native_floats(device: torch.device) -> bool:
    """Return whether kernels on `device` convert to fp8 e4m3 and bfloat16 in hardware."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def row_scales(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Return float32 `max(|x|) / limit` over the last dimension, which is kept; the torch twin of `scale_of`."""
    top = x.abs().amax(-1, keepdim=True).float().clamp(min=MIN_MAGNITUDE)
    # Divide by a tensor: if the divisor is a number, CUDA multiplies by its inverse, which rounds differently.
    return top / torch.full_like(top, limit)


@jit
def scale_of(x, LIMIT: tl.constexpr, MIN: tl.constexpr, ROWS: tl.constexpr):
    """Return float32 `[ROWS]`: `max(max(|x|), MIN) / LIMIT` over the columns of `x`, float32 `[ROWS, COLS]`, correctly
    rounded."""
    top = tl.maximum(tl.max(tl.abs(x), axis=1), MIN)
    return tl.div_rn(top, tl.full([ROWS], LIMIT, tl.float32))


@jit
def quick_division(x, divisor):
    """Return `x / divisor`, float32. If many elements share a divisor, this takes a third of the instructions of a
    division.

    Multiplies by the reciprocal and corrects the quotient once. The residual for the correction is exact, because a
    fused multiply-add computes it (Markstein, "Computation of elementary functions on the IBM RISC System/6000
    processor", 1990). The result is correctly rounded for divisors in (2**-100, 2**100) and |x| above 2**-100. For
    smaller x it may be off by one ulp, which no 8-bit format represents. NaN stays NaN.
    """
    inverse = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), divisor)
    quotient = x * inverse
    closer = tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)
    # The correction is omitted where it would turn infinity into NaN or lose the sign of zero.
    return tl.where((closer == closer) & (closer != 0), closer, quotient)  # noqa: PLR0124


@jit
def over_scale(x, scale, ROWS: tl.constexpr, COLS: tl.constexpr, NATIVE: tl.constexpr):
    """Return `x / scale[:, None]` with enough precision for correct rounding to 8 bits. `scale`: a result of
    `scale_of`."""
    divisor = tl.broadcast_to(scale[:, None], [ROWS, COLS])
    return quick_division(x, divisor) if NATIVE else tl.div_rn(x, divisor)


@jit
def to_e4m3(x, NATIVE: tl.constexpr):
    """Convert float32 `x`, at most 448 in magnitude, to the bytes of fp8 e4m3 (4 bits of exponent with bias 7, no
    infinity)."""
    if NATIVE:
        out = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Below 2**-6, values are multiples of 2**-9: after adding 2**14, the last bits contain this multiple, rounded.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        # Otherwise the exponent's bias changes from 127 to 7 and 20 bits of the mantissa are dropped; the addends
        # round.
        large = (size - 0x3C000000 + 0x7FFFF + ((size >> 20) & 1)) >> 20
        out = (tl.where(size < 0x3C800000, small, large) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return out


@jit
def from_e4m3(x, NATIVE: tl.constexpr):
    """Convert fp8 e4m3 bytes other than NaN to float32, exactly."""
    if NATIVE:
        out = x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = x.to(tl.int32)
        # the factor 2**120 changes the bias from 7 to 127
        size = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        out = tl.where(bits >= 0x80, -size, size)
    return out


@jit
def round_to_bfloat16(x):
    """Round finite float32 `x` to bfloat16."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
