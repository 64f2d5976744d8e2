"""Packs bfloat16 rows of a pool into tiles of 12.1 or about 11.4 bits per value, and unpacks them, without loss.

The 8 bits of an exponent of keys and values have 2.4 to 2.7 bits of information. A tile has all tokens of a page and
`w` channels of one buffer of one layer; `w` is the largest power of two up to 128 that divides the channels. Token 16 t
+ i is row t of part i; R = tokens / 16 is the number of rows. A tile has these bytes; 16-bit numbers are little-endian:

    top       [w]           the largest exponent of each channel
    escapes   [E]           exponents too far below the top of their channel, in the order of row, channel, part;
                            unused bytes are undefined
    fraction  [8][R][w][2]  sign (bit 7) and mantissa (bits 6 to 0) of a value; byte j of [k] is of part 2k + j
    distance  [bits][R][w]  16 bits: bits 4n to 4n + 3 of [k] are the code of part 4k + n. With 3 bits a code, bit
                            4n + 3 of [k] is bit k of the code of part 12 + n

The code of a value is the distance of its exponent to the top of its channel, or 2^bits - 1 for an escape, whose
exponent is in `escapes`. So every pattern of 16 bits is restored: zeros, denormals, infinities, and NaNs with their
payload. A tile has a fixed size: E is a fixed share of the tile's values, rounded up to 16 bytes. If a tile has more
than E escapes, its bytes are undefined. The kernel counts such tiles in `misfits`, and the caller keeps their pages
unpacked.

A packed page is `[layer][buffer][tile]`, so a layer of a page is contiguous. docs/disk_format.md also describes the
format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hicache.kernels._pack import pack_kernel, unpack_kernel
from hicache.kernels._pages import PageTable
from hicache.kernels._triton import Kernels, cdiv, on_device

_WORD_BYTES = 4  # bytes of a word, which has two channels
_TILE_CHANNELS, _LEAST_CHANNELS = 128, 4  # with 4 or more channels, each section of a tile starts at a word
_PARTS = 16  # number of parts into which a tile's tokens are divided
_ROUND_BYTES = 16
_WARPS = 4  # number of warps per program


@dataclass(frozen=True)
class PackFormat:
    """The format of packed pages. `bits`: bits of a code, 3 or 4. `escapes`: maximum share of escapes among the values
    of a tile, for each buffer of a layer; the last share also applies to all later buffers."""

    bits: int
    escapes: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.bits not in (3, 4):
            raise ValueError(f"bits={self.bits}: choose 3 or 4")
        if not self.escapes or not all(0 <= share <= 1 for share in self.escapes):
            raise ValueError(f"escapes={self.escapes}: need at least one share of values, each 0 to 1")

    def max_escapes(self, buffer: int, page_tokens: int, width: int) -> int:
        """Return the maximum number of escapes of a tile of `width` channels."""
        share = self.escapes[min(buffer, len(self.escapes) - 1)]
        return cdiv(math.ceil(share * page_tokens * width), _ROUND_BYTES) * _ROUND_BYTES

    def tile_bytes(self, buffer: int, page_tokens: int, width: int) -> int:
        """Return the bytes of a tile of `width` channels."""
        values = page_tokens * width
        return width + self.max_escapes(buffer, page_tokens, width) + values + self.bits * values // 8

    def buffer_bytes(self, buffer: int, page_tokens: int, channels: int) -> int:
        """Return the bytes of one buffer of one layer of a page; rows have `channels` channels, a multiple of 4."""
        width = tile_channels(channels)
        return channels // width * self.tile_bytes(buffer, page_tokens, width)


FOUR_BITS = PackFormat(4, (0.001,))
"""Pages are 1.318 times smaller. In real keys and values, 1e-4 to 4e-4 of all values are escapes, and at most 1.4e-3 in
a tile. A tile of 8192 values has capacity for 16 escapes."""
THREE_BITS = PackFormat(3, (0.03, 0.05))
"""Pages are 1.397 times smaller. The shares of escapes are for keys, then for values. In real tiles, at most 0.026 of
the keys and 0.045 of the values are escapes."""


def tile_channels(channels: int) -> int:
    """Return the channels of a tile: the largest power of two up to 128 that divides the channels of a row."""
    return min(_TILE_CHANNELS, channels & -channels)


class PagePacker:
    """A `PageMover` whose staging rows, and therefore host pages, are packed.

    All buffers of the pool must have bfloat16 rows of equal size and stride, one row per token, with a multiple of 4
    channels. A page must have 16 tokens or a higher power of two. The constructor raises ValueError otherwise. A packer
    has no state between calls, so threads may share it.
    """

    LEAST_TOKENS, LEAST_CHANNELS = _PARTS, _LEAST_CHANNELS

    def __init__(
        self, layer_buffers: Sequence[Sequence[torch.Tensor]], page_tokens: int, kernels: Kernels, format: PackFormat
    ) -> None:
        """Build the tables of a pool's buffers. `layer_buffers`, `page_tokens`, `kernels`: see `PageMover`. `format`:
        format of the packed pages."""
        self.table = PageTable(layer_buffers, page_tokens, kernels)
        self.page_tokens = page_tokens
        self.format = format
        self.uniform = self.table.uniform
        self.num_layers = len(self.table.segments)
        first = self.table.segments[0][0]
        if any(buffer.dtype != torch.bfloat16 for buffers in layer_buffers for buffer in buffers):
            raise ValueError("only pools of bfloat16 are packed")
        if page_tokens < _PARTS or page_tokens & (page_tokens - 1):
            raise ValueError(f"pages of {page_tokens} tokens: packed ones have a power of two, at least {_PARTS}")
        kinds = {(segment.kind, len(segments)) for segments in self.table.segments for segment in segments}
        if len(kinds) != 1:
            raise ValueError(f"buffers of {len(kinds)} row sizes, strides or spans: packed pages have one")
        self._channels = first.row_bytes // 2
        self._row_stride = first.rows.stride(0) // 2
        addresses = [segment.rows.data_ptr() for segments in self.table.segments for segment in segments]
        if (
            self._channels % _LEAST_CHANNELS
            or self._row_stride % 2
            or any(address % _WORD_BYTES for address in addresses)
        ):
            raise ValueError(f"rows of {self._channels} channels, {self._row_stride} apart: need multiples of 4 and 2")
        self._num_buffers = len(self.table.segments[0])
        self._width = tile_channels(self._channels)
        sizes = [format.buffer_bytes(buffer, page_tokens, self._channels) for buffer in range(self._num_buffers)]
        self._offsets = [sum(sizes[:buffer]) for buffer in range(self._num_buffers)]
        self.layer_bytes = sum(sizes)
        self.page_bytes = self.layer_bytes * self.num_layers
        self.ends = [self.layer_bytes * layer for layer in range(self.num_layers + 1)]
        self._rows = self._table(addresses)
        self._is_aligned = not any(size % _ROUND_BYTES for size in (self._width, self._row_stride * 2, *addresses))

    def _table(self, addresses: list[int]) -> torch.Tensor:
        """Build the int64 table of `_locate` (kernels/_pack.py) on the device."""
        buffers, tile = range(self._num_buffers), (self.page_tokens, self._width)
        head = [
            *self._offsets,
            *(self.format.tile_bytes(buffer, *tile) for buffer in buffers),
            *(self.format.max_escapes(buffer, *tile) for buffer in buffers),
        ]
        return torch.tensor(head + addresses, dtype=torch.int64, device=self.table.device)

    def group_bytes(self, first_layer: int, num_layers: int) -> int:
        """Return the bytes of layers [first_layer, first_layer + num_layers) of one page. Raises ValueError if the pool
        has fewer layers."""
        if first_layer < 0 or num_layers < 0 or first_layer + num_layers > self.num_layers:
            raise ValueError(
                f"layers [{first_layer}, {first_layer + num_layers}) are not within the pool's {self.num_layers}"
            )
        return self.layer_bytes * num_layers

    def compile(self) -> None:
        """Compile the kernels for any number of pages and layers, like `PageMover.compile`."""
        device = self.table.device
        slots = torch.zeros(self.page_tokens, dtype=torch.int64, device=device)
        staging = torch.empty(1, self.layer_bytes, dtype=torch.uint8, device=device)
        self.gather(slots, staging, 0, 1, torch.zeros(1, dtype=torch.int32, device=device))
        self.scatter(staging, slots, 0, 1)

    def gather(
        self, slots: torch.Tensor, staging: torch.Tensor, first_layer: int, num_layers: int, misfits: torch.Tensor
    ) -> None:
        """Fill staging `[pages, group_bytes]` uint8 from the rows at `slots`, int64 `[pages * page_tokens]`, and add to
        `misfits`, int32 `[pages]`, the number of tiles of each page that do not fit."""
        if misfits.dtype != torch.int32 or misfits.shape != staging.shape[:1] or misfits.device != staging.device:
            raise ValueError(f"misfits {tuple(misfits.shape)} of {misfits.dtype}: need int32, one a page, beside them")
        self._move(slots, staging, first_layer, num_layers, misfits)

    def scatter(self, staging: torch.Tensor, slots: torch.Tensor, first_layer: int, num_layers: int) -> None:
        """Unpack pages from staging, which must have no misfits, to the rows at `slots`. A slot that occurs twice gets
        one of its rows."""
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
        alignment = staging.data_ptr() | staging.stride(0)
        if alignment % _WORD_BYTES:
            raise ValueError("staging rows do not begin at multiples of 4 bytes")
        num_tiles = self._channels // self._width
        grid = num_pages * num_tiles, num_layers * self._num_buffers
        strides = staging.stride(0), self.layer_bytes, self._row_stride // 2, first_layer
        constants = {
            "BUFFERS": self._num_buffers,
            "PAGE": self.page_tokens,
            "TILES": num_tiles,
            "WIDTH": self._width,
            "BITS": self.format.bits,
            "ALIGNED": _ROUND_BYTES if self._is_aligned and not alignment % _ROUND_BYTES else _WORD_BYTES,
        }
        with on_device(slots.device):
            if misfits is None:
                unpack_kernel[grid](staging, self._rows, slots, *strides, **constants, num_warps=_WARPS)
            else:
                pack_kernel[grid](staging, self._rows, slots, misfits, *strides, **constants, num_warps=_WARPS)

    def _move_naive(
        self,
        slots: torch.Tensor,
        staging: torch.Tensor,
        first_layer: int,
        num_layers: int,
        misfits: torch.Tensor | None,
    ) -> None:
        """Pack or unpack pages in torch, with the result of the kernel."""
        pages, width = slots.view(-1, self.page_tokens), self._width
        for layer in range(num_layers):
            for buffer, segment in enumerate(self.table.segments[first_layer + layer]):
                rows = segment.rows.view(torch.int16)
                end = layer * self.layer_bytes + self._offsets[buffer]
                num_escapes = self.format.max_escapes(buffer, self.page_tokens, width)
                for first in range(0, self._channels, width):
                    start, end = end, end + self.format.tile_bytes(buffer, self.page_tokens, width)
                    tile, channels = staging[:, start:end], slice(first, first + width)
                    if misfits is None:
                        rows[pages, channels] = unpack_tiles(
                            tile, self.page_tokens, width, self.format.bits, num_escapes
                        )
                    else:
                        misfits += pack_tiles(rows[pages, channels], tile, self.format.bits, num_escapes)


def pack_tiles(values: torch.Tensor, tiles: torch.Tensor, bits: int, num_escapes: int) -> torch.Tensor:
    """Pack `values`, int16 `[tiles, tokens, channels]`, the bits of bfloat16, into `tiles`, uint8 `[tiles, bytes]`.
    Returns int32 `[tiles]`, 1 for each tile that does not fit."""
    num_tiles, tokens, channels = values.shape
    wide = values.to(torch.int32) & 0xFFFF
    exponents = (wide >> 7) & 0xFF
    tops = exponents.amax(1)
    codes = (tops[:, None] - exponents).clamp_(max=(1 << bits) - 1)
    escaped = _listed(codes == (1 << bits) - 1)
    place = escaped.cumsum(1) - 1
    tile, at = (escaped & (place < num_escapes)).nonzero(as_tuple=True)
    ends = _ends(tokens, channels, num_escapes)
    tiles[:, : ends[0]] = tops.to(torch.uint8)
    tiles[tile, ends[0] + place[tile, at]] = _listed(exponents)[tile, at].to(torch.uint8)
    fractions = _by_part(((wide >> 8) & 0x80) | (wide & 0x7F)).view(num_tiles, _PARTS // 2, 2, -1)
    tiles[:, ends[1] : ends[2]] = fractions.transpose(2, 3).reshape(num_tiles, -1).to(torch.uint8)
    nibbles = _by_part(codes).view(num_tiles, 4, 4, -1) << _shifts(values.device)[:, None]
    distances = nibbles.sum(2, dtype=torch.int32)  # the shape is [tiles, 4, tokens / 16 x channels]
    if bits == 3:
        last = torch.stack([(distances[:, 3] >> k) & 0x1111 for k in range(3)], 1)
        distances = distances[:, :3] | (last << 3)
    tiles[:, ends[2] :] = torch.stack([distances & 0xFF, distances >> 8], -1).view(num_tiles, -1).to(torch.uint8)
    return (escaped.sum(1) > num_escapes).to(torch.int32)


def unpack_tiles(tiles: torch.Tensor, tokens: int, channels: int, bits: int, num_escapes: int) -> torch.Tensor:
    """Return the values of packed tiles, int16 `[tiles, tokens, channels]`: the inverse of `pack_tiles`."""
    num_tiles, escape = tiles.shape[0], (1 << bits) - 1
    ends, wide = _ends(tokens, channels, num_escapes), tiles.to(torch.int32)
    tops, fractions = wide[:, : ends[0]], wide[:, ends[1] : ends[2]].view(num_tiles, _PARTS // 2, -1, 2)
    low, high = wide[:, ends[2] :].view(num_tiles, bits, -1, 2).unbind(-1)
    distances = low | (high << 8)
    if bits == 3:
        last = sum(((distances[:, k] >> 3) & 0x1111) << k for k in range(3))
        assert isinstance(last, torch.Tensor)
        distances = torch.cat([distances & 0x7777, last[:, None]], 1)
    codes = _by_token((distances[:, :, None] >> _shifts(tiles.device)[:, None]) & 0xF, channels)
    escaped = _listed(codes == escape)
    place = escaped.cumsum(1) - 1
    tile, at = (escaped & (place < num_escapes)).nonzero(as_tuple=True)
    listed = _listed(tops[:, None] - codes)
    listed[tile, at] = wide[tile, ends[0] + place[tile, at]]
    exponents = listed.view(num_tiles, -1, channels, _PARTS).transpose(2, 3).reshape(codes.shape)
    fraction = _by_token(fractions.transpose(2, 3), channels)
    bits16 = ((fraction & 0x80) << 8) | ((exponents & 0xFF) << 7) | (fraction & 0x7F)
    return torch.where(bits16 >= 1 << 15, bits16 - (1 << 16), bits16).to(torch.int16)


def _listed(values: torch.Tensor) -> torch.Tensor:
    """Reorder `[tiles, tokens, channels]` to the order of escapes: `[tiles, row x channel x part]`."""
    num_tiles, _, channels = values.shape
    return values.view(num_tiles, -1, _PARTS, channels).transpose(2, 3).reshape(num_tiles, -1)


def _by_part(values: torch.Tensor) -> torch.Tensor:
    """Reorder `[tiles, tokens, channels]` to `[tiles, part, row x channel]`."""
    num_tiles, _, channels = values.shape
    return values.view(num_tiles, -1, _PARTS, channels).transpose(1, 2).reshape(num_tiles, _PARTS, -1)


def _by_token(parts: torch.Tensor, channels: int) -> torch.Tensor:
    """Undo `_by_part`. The dimension of parts may be split into several dimensions."""
    by_row = parts.reshape(parts.shape[0], _PARTS, -1, channels).transpose(1, 2)
    return by_row.reshape(parts.shape[0], -1, channels)


def _shifts(device: torch.device) -> torch.Tensor:
    """Return the bit positions of the four codes in 16 bits."""
    return torch.arange(0, 16, 4, dtype=torch.int32, device=device)


def _ends(tokens: int, channels: int, num_escapes: int) -> tuple[int, int, int]:
    """Return the byte offsets at which the tops, escapes and fractions of a tile end. The distances follow the
    fractions."""
    return channels, channels + num_escapes, channels + num_escapes + tokens * channels
