"""Where tokens and channels lie within a block of vLLM's cache, as `PagePacker` needs it.

A tile has one token in each of its rows, with channels of one head's keys or values, so that a channel's exponents are
near one another:

    HND (LBHNC)   [head][token][keys, values]     row of token n, head h: number h * tokens + n
    NHD (LBNHC)   [token][head][keys, values]     number n, all heads in it

Tiles have 128 channels, and what a head has beyond a multiple of that is in tiles of 64, 32 and 16; each width has a
packer of its own. A shape that is not that of the cache makes chunks that do not fit more frequent. What is packed
comes back in any case.
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
    """`channels`: elements that a token has of one head, keys and values; None: not known."""

    channels: int | None = None
    is_token_first: bool = False


@dataclass(frozen=True)
class BlockShape:
    """Of blocks of `tokens` tokens, rows of `row_bytes`: tile j of token n begins at byte `firsts[j] + n * row_bytes`,
    and has `width` elements. Blocks are `block_rows` rows apart."""

    tokens: int
    width: int
    row_bytes: int
    block_rows: int
    firsts: tuple[int, ...]

    @property
    def kind(self) -> tuple[int, ...]:
        """What the packed bytes depend on."""
        return (self.tokens, self.width, self.row_bytes, *self.firsts)

    def within(self, page_bytes: int) -> BlockShape:
        """The same where blocks are side by side."""
        return BlockShape(self.tokens, self.width, self.row_bytes, page_bytes // self.row_bytes, self.firsts)

    def buffers(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tiles of all blocks of `tensor`, uint8 `[blocks, page_bytes]`: bfloat16 `[rows, width]` each."""
        num_rows = (len(tensor) - 1) * self.block_rows + self.tokens
        whole = torch.as_strided(tensor, ((len(tensor) - 1) * tensor.stride(0) + tensor.shape[1],), (1,))
        elements = whole.view(torch.bfloat16)
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
        """The rows of the blocks' tokens, int64 `[blocks * tokens]`."""
        return torch.from_numpy((blocks[:, None] * self.block_rows + np.arange(self.tokens)).reshape(-1))


def digest_of(shapes: Sequence[tuple[BlockShape, Sequence[int]]]) -> bytes:
    """7 bytes that differ where packed chunks would be read in another way. With each shape its tensors, by index."""
    told = repr([(shape.kind, tuple(tensors)) for shape, tensors in shapes])
    return hashlib.sha256(told.encode()).digest()[:7]


def shapes_of(
    page_bytes: int, block_bytes: int, tokens: int, heads: HeadLayout, format: PackFormat, blocks_per_chunk: int
) -> list[BlockShape]:
    """The tiles of blocks of `page_bytes` that are `block_bytes` apart, by width. ConfigError where they have not all
    bytes of a block."""
    all_channels, rest = divmod(page_bytes, tokens * _ELEMENT_BYTES)
    channels, is_token_first = heads.channels or 0, heads.is_token_first
    widths = _widths_of(channels)
    tile_bytes = partial(format.tile_bytes, 0, tokens * blocks_per_chunk)
    packed_bytes = sum(map(tile_bytes, widths))
    if not widths or all_channels % channels or packed_bytes * TILE_CHANNELS > channels * tile_bytes(TILE_CHANNELS):
        # Heads are too small, or not known: their bytes in order.
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
    """Of the tiles that the channels of a head are divided into; none where they are no multiple of 16."""
    if channels % _WIDTHS[-1]:
        return []
    return [_WIDTHS[0]] * (channels // _WIDTHS[0]) + [width for width in _WIDTHS[1:] if channels & width]
