"""Where tokens and channels lie within a block of vLLM's cache, as `PagePacker` needs it.

A tile has one token in each of its rows, with channels of one head's keys or values, so that a channel's exponents are
near one another:

    HND (LBHNC)   [head][token][keys, values]     row of token n, head h: number h * tokens + n
    NHD (LBNHC)   [token][head][keys, values]     number n, all heads in it

A shape that is not that of the cache makes chunks that do not fit more frequent; what is packed comes back in any case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import ConfigError
from hicache.integrations.vllm.row_packing import WIDTHS

_ELEMENT_BYTES = 2


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

    @classmethod
    def of(cls, page_bytes: int, block_bytes: int, tokens: int, heads: HeadLayout) -> BlockShape:
        """Of blocks of `page_bytes` that are `block_bytes` apart. ConfigError where no tiles cover them."""
        all_channels, rest = divmod(page_bytes, tokens * _ELEMENT_BYTES)
        channels, is_token_first = heads.channels or 0, heads.is_token_first
        width = _width_of(channels)
        if not width or all_channels % channels:  # heads are too small, or not known: their bytes in order
            channels = width = _width_of(all_channels)
            is_token_first = False
        row_bytes = (all_channels if is_token_first else channels) * _ELEMENT_BYTES
        if rest or not width or block_bytes % row_bytes:
            raise ConfigError(
                f"kv_packing cannot pack blocks of {page_bytes} bytes for {tokens} tokens; set kv_packing to off"
            )
        tile, head = width * _ELEMENT_BYTES, channels * _ELEMENT_BYTES
        stride = head if is_token_first else tokens * head
        firsts = (h * stride + j * tile for h in range(all_channels // channels) for j in range(channels // width))
        return cls(tokens, width, row_bytes, block_bytes // row_bytes, tuple(firsts))

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


def _width_of(channels: int) -> int:
    """Of the tiles that divide so many channels; 0: none does."""
    return next((width for width in WIDTHS if channels and channels % width == 0), 0)
