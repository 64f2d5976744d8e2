"""Packed pages: bf16 rows of a pool to and from tiles of 12.1 or about 11.4 bits a value, bit for bit.

The exponents of keys and values carry 2.4 to 2.7 of their 8 bits. A tile is the tokens of a page x up to 128 channels
of one buffer of one layer. Of a tile with `w` channels, as bytes:

    top       [w]                  the largest exponent of each channel
    escapes   [E]                  exponents of the values that are too far below it, in the order of tokens, then
                                   channels; what is left of them means nothing
    fraction  [tokens][w]          sign (bit 7) and mantissa (bits 6 to 0) of each value
    distance  [bits][tokens/8][w]  bit j of byte [k][t][c] is bit k of the code of token j * tokens/8 + t, channel c

A code is the distance of the value's exponent to the top of its channel, or 2^bits - 1 for an escape. So every pattern
of 16 bits comes back: zeros, denormals, infinities, and NaNs with what they carry. A tile has a fixed size: E is a
share of its values, rounded up to 16 bytes. Where more values escape the tile does not fit, and its bytes mean nothing;
the page is counted, and its owner keeps it as it is.

A packed page is `[layer][buffer][tile]`, so one layer of it is contiguous. docs/disk_format.md describes it for others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hicache.kernels._pack import pack_kernel, unpack_kernel
from hicache.kernels._pages import PageTable
from hicache.kernels._triton import Kernels, cdiv, on_device, power_of_two

_TILE_CHANNELS = 128
_PARTS = 8  # of the tokens of a tile, whose codes share bytes
_ROUND_BYTES = 16
_LEAST_BITS, _MOST_BITS = 2, 4


@dataclass(frozen=True)
class PackFormat:
    """`bits` of a code, 2 to 4. `escapes`: the share of the values of a tile that may escape, for each buffer of a
    layer in turn, the last one for those behind it."""

    bits: int
    escapes: tuple[float, ...]

    def __post_init__(self) -> None:
        if not _LEAST_BITS <= self.bits <= _MOST_BITS:
            raise ValueError(f"bits={self.bits}: choose {_LEAST_BITS} to {_MOST_BITS}")
        if not self.escapes or not all(0 <= share <= 1 for share in self.escapes):
            raise ValueError(f"escapes={self.escapes}: need at least one share of values, each 0 to 1")

    def max_escapes(self, buffer: int, page_tokens: int, channels: int) -> int:
        """Of a tile of so many channels."""
        share = self.escapes[min(buffer, len(self.escapes) - 1)]
        return cdiv(math.ceil(share * page_tokens * channels), _ROUND_BYTES) * _ROUND_BYTES

    def tile_bytes(self, buffer: int, page_tokens: int, channels: int) -> int:
        """Of a tile of at most 128 channels."""
        codes = self.bits * page_tokens // _PARTS * channels
        return channels + self.max_escapes(buffer, page_tokens, channels) + page_tokens * channels + codes

    def buffer_bytes(self, buffer: int, page_tokens: int, channels: int) -> int:
        """Of one layer of one buffer of a page, whose rows have so many channels."""
        whole, rest = divmod(channels, _TILE_CHANNELS)
        last = self.tile_bytes(buffer, page_tokens, rest) if rest else 0
        return whole * self.tile_bytes(buffer, page_tokens, _TILE_CHANNELS) + last


FOUR_BITS = PackFormat(4, (0.001,))
"""1.318 times smaller. Of real keys and values 1e-4 to 4e-4 escape, at most 1.4e-3 of a tile, where 16 of 8192 fit."""
THREE_BITS = PackFormat(3, (0.03, 0.05))
"""1.397 times smaller, for keys and values in this order, of which at most 0.026 and 0.045 of a tile escape."""


class PagePacker:
    """A `PageMover` whose staging rows, and so host pages, are packed.

    For pools whose buffers all are bfloat16 rows of equal size and stride, one a token, and whose pages have a power of
    two of tokens, at least 8; others raise ValueError. It has no state between calls, so threads may share it.
    """

    LEAST_TOKENS = _PARTS

    def __init__(
        self, layer_buffers: Sequence[Sequence[torch.Tensor]], page_tokens: int, kernels: Kernels, format: PackFormat
    ) -> None:
        """As `PageMover`."""
        self.table = PageTable(layer_buffers, page_tokens, kernels)
        self.page_tokens, self.format, self.uniform = page_tokens, format, self.table.uniform
        self.num_layers = len(self.table.segments)
        first = self.table.segments[0][0]
        if any(buffer.dtype != torch.bfloat16 for buffers in layer_buffers for buffer in buffers):
            raise ValueError("only pools of bfloat16 are packed")
        if page_tokens < _PARTS or page_tokens & (page_tokens - 1):
            raise ValueError(f"pages of {page_tokens} tokens: packed ones have a power of two, at least {_PARTS}")
        kinds = {(segment.kind, len(segments)) for segments in self.table.segments for segment in segments}
        if len(kinds) != 1:
            raise ValueError(f"buffers of {len(kinds)} row sizes, strides or spans: packed pages have one")
        self._channels, self._row_stride = first.row_bytes // 2, first.rows.stride(0) // 2
        self._num_buffers = len(self.table.segments[0])
        sizes = [format.buffer_bytes(buffer, page_tokens, self._channels) for buffer in range(self._num_buffers)]
        self._offsets = [sum(sizes[:buffer]) for buffer in range(self._num_buffers)]
        self.layer_bytes = sum(sizes)
        self.page_bytes = self.layer_bytes * self.num_layers
        self.ends = [self.layer_bytes * layer for layer in range(self.num_layers + 1)]
        self._rows = self._table()
        addresses = [segment.rows.data_ptr() for segments in self.table.segments for segment in segments]
        sizes = [*addresses, *self._offsets, self.layer_bytes, self._row_stride * 2]
        self._cols = min(_TILE_CHANNELS, power_of_two(self._channels))
        # Tiles of one width that is a multiple of 16 are of whole words of 16 bytes, with all their parts.
        self._is_aligned = (
            not any(size % 16 for size in sizes) and not self._cols % 16 and not self._channels % self._cols
        )

    def _table(self) -> torch.Tensor:
        """See the kernel."""
        buffers, last = range(self._num_buffers), self._channels % _TILE_CHANNELS or _TILE_CHANNELS
        rows = [
            self._offsets,
            [self.format.tile_bytes(buffer, self.page_tokens, _TILE_CHANNELS) for buffer in buffers],
            [self.format.max_escapes(buffer, self.page_tokens, _TILE_CHANNELS) for buffer in buffers],
            [self.format.max_escapes(buffer, self.page_tokens, last) for buffer in buffers],
            *([segment.rows.data_ptr() for segment in segments] for segments in self.table.segments),
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self.table.device)

    def group_bytes(self, first_layer: int, num_layers: int) -> int:
        """Bytes of layers [first_layer, first_layer + num_layers) of one page; ValueError if the pool has fewer."""
        if first_layer < 0 or num_layers < 0 or first_layer + num_layers > self.num_layers:
            raise ValueError(
                f"layers [{first_layer}, {first_layer + num_layers}) are not within the pool's {self.num_layers}"
            )
        return self.layer_bytes * num_layers

    def gather(
        self, slots: torch.Tensor, staging: torch.Tensor, first_layer: int, num_layers: int, misfits: torch.Tensor
    ) -> None:
        """Fill staging `[pages, group_bytes]` uint8 from the rows at `slots`, int64 `[pages * page_tokens]`, and add to
        `misfits`, int32 `[pages]`, how many tiles of each page do not fit."""
        if misfits.dtype != torch.int32 or misfits.shape != staging.shape[:1] or misfits.device != staging.device:
            raise ValueError(f"misfits {tuple(misfits.shape)} of {misfits.dtype}: need int32, one a page, beside them")
        self._move(slots, staging, first_layer, num_layers, misfits)

    def scatter(self, staging: torch.Tensor, slots: torch.Tensor, first_layer: int, num_layers: int) -> None:
        """Write the rows at `slots` from staging, whose pages fitted. A slot named twice gets one of its rows."""
        self._move(slots, staging, first_layer, num_layers, None)

    def _move(
        self,
        slots: torch.Tensor,
        staging: torch.Tensor,
        first_layer: int,
        num_layers: int,
        misfits: torch.Tensor | None,
    ) -> None:
        num_pages, group_bytes = self.table.num_pages_of(slots), self.group_bytes(first_layer, num_layers)
        if staging.dtype != torch.uint8 or tuple(staging.shape) != (num_pages, group_bytes):
            raise ValueError(
                f"staging {tuple(staging.shape)} of {staging.dtype}: need uint8 ({num_pages}, {group_bytes})"
            )
        if staging.numel() and (staging.stride(1) != 1 or staging.device != self.table.device):
            raise ValueError("the bytes of a staging row must be contiguous, and on the pool's device")
        if not num_pages or not num_layers:
            return
        if self.table.kernels == "torch":
            self._move_naive(slots, staging, first_layer, num_layers, misfits)
            return
        grid = num_pages, num_layers * self._num_buffers, cdiv(self._channels, _TILE_CHANNELS)
        strides = staging.stride(0), self.layer_bytes, self._row_stride, first_layer
        constants = {
            "BUFFERS": self._num_buffers,
            "PAGE": self.page_tokens,
            "PARTS": _PARTS,
            "CHANNELS": self._channels,
            "COLS": self._cols,
            "BITS": self.format.bits,
            "ALIGNED_16": self._is_aligned and not (staging.data_ptr() | staging.stride(0)) % 16,
        }
        with on_device(slots.device):
            if misfits is None:
                unpack_kernel[grid](staging, self._rows, slots, *strides, **constants, num_warps=8)
            else:
                pack_kernel[grid](staging, self._rows, slots, misfits, *strides, **constants, num_warps=4)

    def _move_naive(
        self,
        slots: torch.Tensor,
        staging: torch.Tensor,
        first_layer: int,
        num_layers: int,
        misfits: torch.Tensor | None,
    ) -> None:
        """The torch twin of the kernel."""
        pages = slots.view(-1, self.page_tokens)
        for layer in range(num_layers):
            for buffer, segment in enumerate(self.table.segments[first_layer + layer]):
                rows = segment.rows.view(torch.int16)
                start = layer * self.layer_bytes + self._offsets[buffer]
                for first in range(0, self._channels, _TILE_CHANNELS):
                    width = min(_TILE_CHANNELS, self._channels - first)
                    end = start + self.format.tile_bytes(buffer, self.page_tokens, width)
                    num_escapes = self.format.max_escapes(buffer, self.page_tokens, width)
                    tile, start = staging[:, start:end], end
                    if misfits is None:
                        rows[pages, first : first + width] = unpack_tiles(
                            tile, self.page_tokens, width, self.format.bits, num_escapes
                        )
                    else:
                        values = rows[pages, first : first + width]
                        misfits += pack_tiles(values, tile, self.format.bits, num_escapes)


def pack_tiles(values: torch.Tensor, tiles: torch.Tensor, bits: int, num_escapes: int) -> torch.Tensor:
    """Pack `values`, int16 `[tiles, tokens, channels]`, the bits of bfloat16, into `tiles`, uint8 `[tiles, bytes]`.
    Returns int32 `[tiles]`, 1 for those that do not fit."""
    num_tiles, tokens, channels = values.shape
    exponents = (values >> 7) & 0xFF
    tops = exponents.amax(1)
    codes = (tops[:, None] - exponents).clamp_(max=(1 << bits) - 1)
    escaped = (codes == (1 << bits) - 1).view(num_tiles, -1)
    place = escaped.cumsum(1) - 1
    tile, at = (escaped & (place < num_escapes)).nonzero(as_tuple=True)
    fractions = ((values >> 8) & 0x80) | (values & 0x7F)
    # [part][token of it][channel] of a code's bit k become bits of one byte.
    parts = codes.view(num_tiles, _PARTS, tokens // _PARTS, channels)
    weights = (1 << torch.arange(_PARTS, device=values.device))[:, None, None]
    planes = torch.stack([(((parts >> k) & 1) * weights).sum(1) for k in range(bits)], 1)
    ends = _ends(tokens, channels, bits, num_escapes)
    tiles[:, : ends[0]] = tops.to(torch.uint8)
    tiles[tile, ends[0] + place[tile, at]] = exponents.reshape(num_tiles, -1)[tile, at].to(torch.uint8)
    tiles[:, ends[1] : ends[2]] = fractions.reshape(num_tiles, -1).to(torch.uint8)
    tiles[:, ends[2] :] = planes.view(num_tiles, -1).to(torch.uint8)
    return (escaped.sum(1) > num_escapes).to(torch.int32)


def unpack_tiles(tiles: torch.Tensor, tokens: int, channels: int, bits: int, num_escapes: int) -> torch.Tensor:
    """The inverse of `pack_tiles`: int16 `[tiles, tokens, channels]`."""
    num_tiles, escape = tiles.shape[0], (1 << bits) - 1
    ends = _ends(tokens, channels, bits, num_escapes)
    tops = tiles[:, : ends[0]].to(torch.int32)
    planes = tiles[:, ends[2] :].to(torch.int32).view(num_tiles, bits, 1, tokens // _PARTS, channels)
    parts = torch.arange(_PARTS, dtype=torch.int32, device=tiles.device)[:, None, None]
    codes = sum(((planes[:, k] >> parts) & 1) << k for k in range(bits))
    assert isinstance(codes, torch.Tensor)
    codes = codes.view(num_tiles, tokens, channels)
    exponents = tops[:, None] - codes
    escaped = (codes == escape).view(num_tiles, -1)
    place = escaped.cumsum(1) - 1
    tile, at = (escaped & (place < num_escapes)).nonzero(as_tuple=True)
    exponents.view(num_tiles, -1)[tile, at] = tiles[tile, ends[0] + place[tile, at]].to(torch.int32)
    fractions = tiles[:, ends[1] : ends[2]].to(torch.int32).view(num_tiles, tokens, channels)
    bits16 = ((fractions & 0x80) << 8) | ((exponents & 0xFF) << 7) | (fractions & 0x7F)
    return torch.where(bits16 >= 1 << 15, bits16 - (1 << 16), bits16).to(torch.int16)


def _ends(tokens: int, channels: int, bits: int, num_escapes: int) -> tuple[int, int, int]:
    """Of tops, escapes and fractions in a tile, whose codes follow."""
    fractions = channels + num_escapes + tokens * channels
    return channels, channels + num_escapes, fractions
