"""Positions of tokens and channels within a block of vLLM's cache, in the form that `PagePacker` needs.

Each row of a tile contains channels of one head's keys or values for one token. If a tile has the channels of one head,
the exponents of a channel are close to each other:

    HND (LBHNC)   [head][token][keys, values]     row h * tokens + n has token n of head h
    NHD (LBNHC)   [token][head][keys, values]     row n has token n of all heads

Tiles have 128 channels. The remaining channels of a head are in tiles of 64, 32 and 16; each width has its own packer.
If a shape differs from the real shape of the cache, fewer chunks fit the packed size, but unpacking still restores the
same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import ConfigError
from hicache.integrations.vllm.row_packing import TILE_CHANNELS
from hicache.kernels.pack import PackFormat

_ELEMENT_BYTES = 2
_WIDTHS = (128, 64, 32, 16)


@dataclass(frozen=True)
class HeadLayout:
    """The layout of heads in a block. `channels`: number of elements of keys and values that a token has in one head;
    None if it is unknown."""

    channels: int | None = None
    is_token_first: bool = False


@dataclass(frozen=True)
class BlockShape:
    """The tiles of blocks of `tokens` tokens, in rows of `row_bytes` bytes. Tile j of token n begins at byte `firsts[j]
    + n * row_bytes` and has `width` elements. Blocks begin `block_rows` rows apart."""

    tokens: int
    width: int
    row_bytes: int
    block_rows: int
    firsts: tuple[int, ...]

    @property
    def kind(self) -> tuple[int, ...]:
        """The values on which the packed bytes depend."""
        return (self.tokens, self.width, self.row_bytes, *self.firsts)

    def within(self, page_bytes: int) -> BlockShape:
        """Return the same shape for contiguous blocks of `page_bytes`."""
        return BlockShape(self.tokens, self.width, self.row_bytes, page_bytes // self.row_bytes, self.firsts)

    def buffers(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tiles of all blocks of `tensor`, uint8 `[blocks, page_bytes]`, as one bfloat16 `[rows, width]`
        view for each tile."""
        num_rows = (len(tensor) - 1) * self.block_rows + self.tokens
        flat = torch.as_strided(tensor, ((len(tensor) - 1) * tensor.stride(0) + tensor.shape[1],), (1,))
        elements = flat.view(torch.bfloat16)
        return [
            torch.as_strided(
                elements,
                (num_rows, self.width),
                (self.row_bytes // _ELEMENT_BYTES, 1),
                elements.storage_offset() + first // _ELEMENT_BYTES,
            )
            for first in self.firsts
        ]

    def slots(self, blocks: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the row of each token in `blocks`, int64 `[blocks * tokens]`."""
        return torch.from_numpy((blocks[:, None] * self.block_rows + np.arange(self.tokens)).reshape(-1))


def digest_of(shapes: Sequence[tuple[BlockShape, Sequence[int]]]) -> bytes:
    """Return a digest of 7 bytes. Two digests differ if packed chunks must be unpacked differently. `shapes`: each
    shape with the indices of its tensors."""
    description = repr([(shape.kind, tuple(tensors)) for shape, tensors in shapes])
    return hashlib.sha256(description.encode()).digest()[:7]


def shapes_of(
    page_bytes: int, block_bytes: int, tokens: int, heads: HeadLayout, format: PackFormat, blocks_per_chunk: int
) -> list[BlockShape]:
    """Return the tiles of blocks that have `page_bytes` and begin `block_bytes` apart, one shape for each tile width.
    Raises ConfigError if no combination of tiles covers all bytes of a block."""
    all_channels, rest = divmod(page_bytes, tokens * _ELEMENT_BYTES)
    channels, is_token_first = heads.channels or 0, heads.is_token_first
    widths = _widths_of(channels)
    tile_bytes = partial(format.tile_bytes, 0, tokens * blocks_per_chunk)
    packed_bytes = sum(map(tile_bytes, widths))
    if not widths or all_channels % channels or packed_bytes * TILE_CHANNELS > channels * tile_bytes(TILE_CHANNELS):
        # The heads are too small or unknown, so the bytes are divided into tiles in their order.
        channels, is_token_first = TILE_CHANNELS * (1 if all_channels % _WIDTHS[0] else 2), False
        widths = [channels]
    row_bytes = (all_channels if is_token_first else channels) * _ELEMENT_BYTES
    if rest or all_channels % channels or block_bytes % row_bytes:
        raise ConfigError(
            f"kv_packing cannot pack blocks of {page_bytes} bytes for {tokens} tokens; set kv_packing to off"
        )
    head_bytes = channels * _ELEMENT_BYTES
    stride = head_bytes if is_token_first else tokens * head_bytes
    firsts = dict[int, list[int]]()
    for head in range(all_channels // channels):
        first = head * stride
        for width in widths:
            firsts.setdefault(width, []).append(first)
            first += width * _ELEMENT_BYTES
    return [
        BlockShape(tokens, width, row_bytes, block_bytes // row_bytes, tuple(of_width))
        for width, of_width in firsts.items()
    ]


def _widths_of(channels: int) -> list[int]:
    """Return the widths of the tiles that cover the channels of a head; [] if `channels` is not a multiple of 16."""
    if channels % _WIDTHS[-1]:
        return []
    return [_WIDTHS[0]] * (channels // _WIDTHS[0]) + [width for width in _WIDTHS[1:] if channels & width]
