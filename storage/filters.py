"""How the bytes of a page are ordered before compression, and back: the sizes of a store's pages and their filters.

zstd compresses bytes that resemble their neighbours. In a page of numbers the i-th bytes of all elements resemble each
other (exponents repeat, mantissas do not), and more so within one channel than within one token. A filter reorders
bytes and changes none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.storage.base import PageBuffer
from hicache.storage.memory import Scratch

FilterKind: TypeAlias = Literal["none", "byte_shuffle", "channel_byte_shuffle", "uncompressed"]
FILTER_KINDS: tuple[FilterKind, ...] = ("none", "byte_shuffle", "channel_byte_shuffle")  # by number, in values
_ELEMENT_BYTES = (1, 2, 4, 8)

# Channels are transposed in blocks that fit a core's second-level cache.
_BLOCK_BYTES = 256 << 10
# Rows that lie a power of two apart compete for few sets of the first-level cache when they are read across: so many
# bytes of each row are copied together first.
_ROW_BYTES = 512

Elements: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class PageFilter:
    """How the bytes of a page are ordered before zstd. The axes of a page, outermost first:

        none                  unchanged
        byte_shuffle          [elements, element_bytes] -> [element_bytes, elements]
        channel_byte_shuffle  [segments, tokens, channels, element_bytes] -> [element_bytes, segments, channels, tokens]
        uncompressed          unchanged, and there is no zstd

    `element_bytes` is 1, 2, 4 or 8; `tokens` and `channels` are the shape of a segment, 0 for the other kinds.
    """

    kind: FilterKind = "none"
    element_bytes: int = 1
    tokens: int = 0
    channels: int = 0

    def mismatch(self, page_bytes: int) -> str:
        """Why this filter does not fit pages of `page_bytes`; "" if it does."""
        shape = (self.tokens, self.channels)
        if self.kind not in (*FILTER_KINDS, "uncompressed"):
            return f"filter kind {self.kind!r}: choose one of {', '.join((*FILTER_KINDS, 'uncompressed'))}"
        if self.element_bytes not in _ELEMENT_BYTES or ("shuffle" not in self.kind and self.element_bytes != 1):
            return f"filter {self.kind} with element_bytes={self.element_bytes}: choose 1, 2, 4 or 8, and 1 for none"
        if self.kind != "channel_byte_shuffle" and shape != (0, 0):
            return f"filter {self.kind} with a segment of {shape}: leave tokens and channels 0"
        if self.kind == "channel_byte_shuffle" and min(shape) < 1:
            return f"filter channel_byte_shuffle with a segment of {shape}: give tokens and channels, at least 1 each"
        unit_bytes = self.element_bytes * max(1, self.tokens * self.channels)
        if page_bytes % unit_bytes:
            return f"filter {self.kind} reorders units of {unit_bytes} bytes: choose a divisor of {page_bytes=}"
        return ""


@dataclass(frozen=True)
class PageFormat:
    """One size of the pages that a store keeps, in bytes, and the filter of such pages."""

    page_bytes: int
    filter: PageFilter = PageFilter()


_gathered, _transposed = Scratch(), Scratch()


def shuffle(filter: PageFilter, page: PageBuffer, shuffled: PageBuffer) -> None:
    """Fill `shuffled` with the bytes of `page`, reordered by `filter`, which must fit it. Both are contiguous uint8
    `[page_bytes]` and do not overlap."""
    elements, planes = _elements(filter, page), _byte_planes(filter, shuffled)
    if filter.kind != "channel_byte_shuffle":
        _split(elements, planes)
        return
    for segments, tokens, channels in _blocks(filter, len(elements), _ROW_BYTES // filter.element_bytes):
        block = elements[segments, tokens, channels]
        gathered = _array(_gathered, block.shape, block.dtype)
        transposed = _array(_transposed, (block.shape[0], block.shape[2], block.shape[1]), block.dtype)
        np.copyto(gathered, block)
        np.copyto(transposed, gathered.transpose(0, 2, 1))
        _split(transposed, planes[:, segments, channels, tokens])


def unshuffle(filter: PageFilter, shuffled: PageBuffer, page: PageBuffer) -> None:
    """Undo `shuffle`: fill `page` from `shuffled`."""
    elements, planes = _elements(filter, page), _byte_planes(filter, shuffled)
    if filter.kind != "channel_byte_shuffle":
        _merge(planes, elements)
        return
    for segments, tokens, channels in _blocks(filter, len(elements), filter.channels):
        part = planes[:, segments, channels, tokens]
        transposed = _array(_transposed, part.shape[1:], elements.dtype)
        _merge(part, transposed)
        np.copyto(elements[segments, tokens, channels], transposed.transpose(0, 2, 1))


def _blocks(filter: PageFilter, num_segments: int, max_channels: int) -> Iterator[tuple[slice, slice, slice]]:
    """Segments, tokens and channels of one block of at most `_BLOCK_BYTES` after the other."""
    max_elements = _BLOCK_BYTES // filter.element_bytes
    tokens = min(filter.tokens, max_elements)
    channels = min(filter.channels, max_channels, max_elements // tokens)
    segments = max_elements // (tokens * channels)
    for s in range(0, num_segments, segments):
        for c in range(0, filter.channels, channels):
            for t in range(0, filter.tokens, tokens):
                yield slice(s, s + segments), slice(t, t + tokens), slice(c, c + channels)


def _array(scratch: Scratch, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Elements:
    """The thread's memory for a block, as an array."""
    return np.frombuffer(scratch.take(_BLOCK_BYTES), dtype, math.prod(shape)).reshape(shape)


def _elements(filter: PageFilter, page: PageBuffer) -> Elements:
    elements = page.view(f"<u{filter.element_bytes}")
    is_by_channel = filter.kind == "channel_byte_shuffle"
    return elements.reshape(-1, filter.tokens, filter.channels) if is_by_channel else elements


def _byte_planes(filter: PageFilter, shuffled: PageBuffer) -> PageBuffer:
    """A shuffled page as one plane for each byte of an element."""
    shape = (-1, filter.channels, filter.tokens) if filter.kind == "channel_byte_shuffle" else (-1,)
    return shuffled.reshape(filter.element_bytes, *shape)


def _split(elements: Elements, planes: PageBuffer) -> None:
    """`planes[i]` becomes the i-th bytes, lowest first; the unsafe cast keeps the low byte of each shifted element."""
    for i, plane in enumerate(planes):
        np.right_shift(elements, 8 * i, out=plane, casting="unsafe")


def _merge(planes: PageBuffer, elements: Elements) -> None:
    if len(planes) == 1:
        np.copyto(elements, planes[0])
        return
    np.multiply(planes[-1], elements.dtype.type(256), out=elements)
    np.bitwise_or(elements, planes[-2], out=elements)
    for plane in planes[-3::-1]:
        np.left_shift(elements, 8, out=elements)
        np.bitwise_or(elements, plane, out=elements)
