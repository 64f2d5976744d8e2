"""Page sizes of a store and their filters. A filter reorders the bytes of a page before compression, and restores their
order after decompression.

zstd compresses bytes that resemble their neighbours. In a page of numbers the i-th bytes of all elements resemble each
other, because exponents repeat. A filter moves bytes and does not change their values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.storage.base import PageBuffer

FilterKind: TypeAlias = Literal["none", "byte_shuffle", "uncompressed"]
# the header of a stored value contains the index of its filter in this tuple
FILTER_KINDS: tuple[FilterKind, ...] = ("none", "byte_shuffle")
_ELEMENT_BYTES = (1, 2, 4, 8)

Elements: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class PageFilter:
    """The order of the bytes of a page before zstd compresses it. For each kind, the axes of a page before and after
    the filter, outermost first:

        none          unchanged
        byte_shuffle  [elements, element_bytes] -> [element_bytes, elements]
        uncompressed  unchanged, and zstd is not applied

    `element_bytes` is 1, 2, 4 or 8.
    """

    kind: FilterKind = "none"
    element_bytes: int = 1

    def mismatch(self, page_bytes: int) -> str:
        """Return why this filter does not fit pages of `page_bytes`; "" if it does."""
        if self.kind not in (*FILTER_KINDS, "uncompressed"):
            return f"filter kind {self.kind!r}: choose one of {', '.join((*FILTER_KINDS, 'uncompressed'))}"
        if self.element_bytes not in _ELEMENT_BYTES or (self.kind != "byte_shuffle" and self.element_bytes != 1):
            return f"filter {self.kind} with element_bytes={self.element_bytes}: choose 1, 2, 4 or 8, and 1 for none"
        if page_bytes % self.element_bytes:
            return f"filter {self.kind} with element_bytes={self.element_bytes}: choose a divisor of {page_bytes=}"
        return ""


@dataclass(frozen=True)
class PageFormat:
    """One page size of a store, in bytes, and the filter of pages of that size."""

    page_bytes: int
    filter: PageFilter = PageFilter()


def shuffle(filter: PageFilter, page: PageBuffer, shuffled: PageBuffer) -> None:
    """Fill `shuffled` with the bytes of `page`, reordered by `filter`. The filter must fit the size of the page. `page`
    and `shuffled` are contiguous uint8 `[page_bytes]` and do not overlap."""
    # `shuffled` starts with the lowest bytes of all elements. The unsafe cast keeps the low byte of each shifted
    # element.
    for i, plane in enumerate(_byte_planes(filter, shuffled)):
        np.right_shift(_elements(filter, page), 8 * i, out=plane, casting="unsafe")


def unshuffle(filter: PageFilter, shuffled: PageBuffer, page: PageBuffer) -> None:
    """Undo `shuffle`: fill `page` from `shuffled`."""
    elements, planes = _elements(filter, page), _byte_planes(filter, shuffled)
    if len(planes) == 1:
        np.copyto(elements, planes[0])
        return
    np.multiply(planes[-1], elements.dtype.type(256), out=elements)
    np.bitwise_or(elements, planes[-2], out=elements)
    for plane in planes[-3::-1]:
        np.left_shift(elements, 8, out=elements)
        np.bitwise_or(elements, plane, out=elements)


def _elements(filter: PageFilter, page: PageBuffer) -> Elements:
    return page.view(f"<u{filter.element_bytes}")


def _byte_planes(filter: PageFilter, shuffled: PageBuffer) -> PageBuffer:
    """View a shuffled page as one plane for each byte of an element: `[element_bytes, elements]`."""
    return shuffled.reshape(filter.element_bytes, -1)
