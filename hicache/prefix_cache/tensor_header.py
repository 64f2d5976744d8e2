"""The header of a stored tensor. It has a fixed size, and the bytes of the tensor follow it.

    [ 0,  4)   magic b"HITC"
    [ 4,  8)   u8 format version, u8 dtype, u8 dimensions, a zero
    [ 8, 16)   u64 bytes of the tensor
    [16, 32)   nonce, a new random number for each value
    [32, 256)  u64 size of each dimension, then zeros

Integers are little-endian.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass

import torch

from hicache.errors import ShapeError

HEADER_BYTES = 256
_HEADER = struct.Struct("<4sBBBxQ16s")
_MAX_DIMS = (HEADER_BYTES - _HEADER.size) // 8
_MAGIC, TENSOR_FORMAT_VERSION = b"HITC", 1

# The header stores an index into this tuple, so new dtypes must be appended and the order must not change.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True)
class TensorHeader:
    """The dtype, shape and size of a tensor, which `unpack` needs to rebuild it from bytes, and the nonce in the keys
    of its blocks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int
    nonce: bytes

    @classmethod
    def of(cls, x: torch.Tensor) -> TensorHeader:
        """Return a header with a new nonce for `x`. Raises ShapeError for a tensor that the format cannot describe."""
        if x.dtype not in _DTYPES or x.dim() > _MAX_DIMS or x.layout != torch.strided:
            raise ShapeError(
                f"a tensor of {x.dtype}, {x.layout} and {x.dim()} dimensions is not supported; give a strided tensor "
                f"of at most {_MAX_DIMS} dimensions, of {', '.join(map(str, _DTYPES))}"
            )
        return cls(x.dtype, tuple(x.shape), x.numel() * x.element_size(), os.urandom(16))

    def pack(self) -> bytes:
        code = _DTYPES.index(self.dtype)
        fixed = _HEADER.pack(_MAGIC, TENSOR_FORMAT_VERSION, code, len(self.shape), self.num_bytes, self.nonce)
        return (fixed + struct.pack(f"<{len(self.shape)}Q", *self.shape)).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> TensorHeader | None:
        """Parse a header. Returns None if this version cannot read it."""
        magic, version, code, dims, num_bytes, nonce = _HEADER.unpack_from(data)
        if (magic, version) != (_MAGIC, TENSOR_FORMAT_VERSION) or code >= len(_DTYPES) or dims > _MAX_DIMS:
            return None
        shape = struct.unpack_from(f"<{dims}Q", data, _HEADER.size)
        header = cls(_DTYPES[code], shape, num_bytes, nonce)
        return header if math.prod(shape) * header.dtype.itemsize == num_bytes else None
