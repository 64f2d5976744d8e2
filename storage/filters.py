"""How a page's bytes are arranged before they are packed, and back.

zstd packs bytes that resemble their neighbours. In a page of numbers those are the i-th bytes of all elements
(exponents repeat, mantissas do not), and within one channel more than within one token. A filter moves bytes and
changes none. Owns the arrangements and the scratch they need. May import numpy, the standard library and base.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.storage.base import PageBuffer

FilterKind: TypeAlias = Literal["none", "planes", "channel_planes"]
FILTER_KINDS: tuple[FilterKind, ...] = ("none", "planes", "channel_planes")
_ELEMENT_BYTES = (1, 2, 4, 8)

# Channels are transposed in blocks that stay in a core's second-level cache.
_BLOCK_BYTES = 256 << 10
# Read across, rows that lie a power of two apart share few sets of the first-level cache: so much of each is first
# copied together.
_ROW_BYTES = 512

Elements: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class PageFilter:
    """How a page's bytes are arranged before zstd. The names of a page's axes, outermost first:

        none            as they are
        planes          [elements, element_bytes] becomes [element_bytes, elements]
        channel_planes  [segments, tokens, channels, element_bytes] becomes [element_bytes, segments, channels, tokens]

    `element_bytes` is 1, 2, 4 or 8; `tokens` and `channels` are the shape of a segment, 0 for the other kinds.
    """

    kind: FilterKind = "none"
    element_bytes: int = 1
    tokens: int = 0
    channels: int = 0

    def misfit(self, page_bytes: int) -> str:
        """Why this filter cannot arrange pages of `page_bytes`; "" if it can."""
        shape = (self.tokens, self.channels)
        if self.kind not in FILTER_KINDS:
            return f"filter kind {self.kind!r}: choose one of {', '.join(FILTER_KINDS)}"
        if self.element_bytes not in _ELEMENT_BYTES or (self.kind == "none" and self.element_bytes != 1):
            return f"filter {self.kind} with element_bytes={self.element_bytes}: choose 1, 2, 4 or 8, and 1 for none"
        if self.kind != "channel_planes" and shape != (0, 0):
            return f"filter {self.kind} with a segment of {shape}: leave tokens and channels 0"
        if self.kind == "channel_planes" and min(shape) < 1:
            return f"filter channel_planes with a segment of {shape}: give tokens and channels, at least 1 each"
        unit_bytes = self.element_bytes * max(1, self.tokens * self.channels)
        if page_bytes % unit_bytes:
            return f"filter {self.kind} arranges units of {unit_bytes} bytes: choose a divisor of {page_bytes=}"
        return ""


@dataclass(frozen=True)
class PageFormat:
    """One size of the pages that a store keeps, in bytes, and how such pages are arranged before zstd."""

    page_bytes: int
    filter: PageFilter = PageFilter()


class Arranger:
    """One thread's filters for pages of `page_bytes`, with two blocks of scratch; allocates nothing afterwards.

    Pages and arranged pages are contiguous uint8 `[page_bytes]` and do not overlap; the filter must fit them.
    """

    def __init__(self, page_bytes: int) -> None:
        self._block_bytes = min(page_bytes, _BLOCK_BYTES)
        self._gathered: PageBuffer = np.empty(self._block_bytes, dtype=np.uint8)
        self._turned: PageBuffer = np.empty(self._block_bytes, dtype=np.uint8)

    def arrange(self, how: PageFilter, page: PageBuffer, arranged: PageBuffer) -> None:
        """Fill `arranged` with the bytes of `page` in the order of `how`."""
        elements, planes = _elements(how, page), _planes(how, arranged)
        if how.kind != "channel_planes":
            _split(elements, planes)
            return
        for segments, tokens, channels in self._blocks(how, len(elements), _ROW_BYTES // how.element_bytes):
            block = elements[segments, tokens, channels]
            gathered = self._scratch(self._gathered, block.shape, block.dtype)
            turned = self._scratch(self._turned, (block.shape[0], block.shape[2], block.shape[1]), block.dtype)
            np.copyto(gathered, block)
            np.copyto(turned, gathered.transpose(0, 2, 1))
            _split(turned, planes[:, segments, channels, tokens])

    def restore(self, how: PageFilter, arranged: PageBuffer, page: PageBuffer) -> None:
        """Undo `arrange`: fill `page` from `arranged`."""
        elements, planes = _elements(how, page), _planes(how, arranged)
        if how.kind != "channel_planes":
            _merge(planes, elements)
            return
        for segments, tokens, channels in self._blocks(how, len(elements), how.channels):
            part = planes[:, segments, channels, tokens]
            turned = self._scratch(self._turned, part.shape[1:], elements.dtype)
            _merge(part, turned)
            np.copyto(elements[segments, tokens, channels], turned.transpose(0, 2, 1))

    def _blocks(self, how: PageFilter, num_segments: int, most_channels: int) -> Iterator[tuple[slice, slice, slice]]:
        """Segments, tokens and channels of one block after the other; each fits the scratch."""
        most = self._block_bytes // how.element_bytes
        tokens = min(how.tokens, most)
        channels = min(how.channels, most_channels, most // tokens)
        segments = most // (tokens * channels)
        for s in range(0, num_segments, segments):
            for c in range(0, how.channels, channels):
                for t in range(0, how.tokens, tokens):
                    yield slice(s, s + segments), slice(t, t + tokens), slice(c, c + channels)

    def _scratch(self, block: PageBuffer, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Elements:
        return block[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)


def _elements(how: PageFilter, page: PageBuffer) -> Elements:
    elements = page.view(f"<u{how.element_bytes}")
    return elements.reshape(-1, how.tokens, how.channels) if how.kind == "channel_planes" else elements


def _planes(how: PageFilter, arranged: PageBuffer) -> PageBuffer:
    shape = (-1, how.channels, how.tokens) if how.kind == "channel_planes" else (-1,)
    return arranged.reshape(how.element_bytes, *shape)


def _split(elements: Elements, planes: PageBuffer) -> None:
    """`planes[i]` becomes the i-th bytes, lowest first. The shift's result is cut to one byte on its way out."""
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
