"""A filter moves a page's bytes and changes none: each kind is compared with its definition, and undone exactly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hicache.storage.filters import FILTER_KINDS, FilterKind, PageFilter, shuffle, unshuffle

Bytes = npt.NDArray[np.uint8]


def defined(filter: PageFilter, page: Bytes) -> Bytes:
    """The arrangement as the class's docstring states it, by one transposition of the whole page."""
    if filter.kind == "none":
        return page.copy()
    if filter.kind == "byte_shuffle":
        return np.ascontiguousarray(page.reshape(-1, filter.element_bytes).T).reshape(-1)
    axes = page.reshape(-1, filter.tokens, filter.channels, filter.element_bytes)
    return np.ascontiguousarray(axes.transpose(3, 0, 2, 1)).reshape(-1)


# One element, odd shapes, several blocks of each axis.
@example("channel_byte_shuffle", 1, 1, 1, 1, 0)
@example("channel_byte_shuffle", 2, 4, 64, 1024, 0)
@example("channel_byte_shuffle", 4, 2, 333, 257, 0)
@example("channel_byte_shuffle", 1, 300, 64, 100, 1)
@example("channel_byte_shuffle", 2, 3, 150_000, 1, 0)
@example("channel_byte_shuffle", 8, 1, 40_001, 2, 1)
@example("channel_byte_shuffle", 1, 1, 1, 300_001, 0)
@example("byte_shuffle", 8, 1, 1, 1, 1)
@example("byte_shuffle", 4, 1, 100_003, 1, 0)
@example("none", 1, 1, 1, 1001, 1)
@given(
    kind=st.sampled_from(FILTER_KINDS),
    width=st.sampled_from([1, 2, 4, 8]),
    segments=st.integers(1, 9),
    tokens=st.integers(1, 80),
    channels=st.integers(1, 150),
    offset=st.integers(0, 1),
)
def test_both_ways(kind: FilterKind, width: int, segments: int, tokens: int, channels: int, offset: int) -> None:
    """Whatever the shape, `shuffle` equals the definition, `unshuffle` undoes it, and sources and the bytes around
    targets stay, also at addresses that no element is aligned to (`offset`)."""
    page_bytes = width * segments * tokens * channels
    is_by_channel = kind == "channel_byte_shuffle"
    filter = PageFilter(kind, 1 if kind == "none" else width, *((tokens, channels) if is_by_channel else (0, 0)))
    assert filter.mismatch(page_bytes) == ""
    memory = np.random.default_rng(tokens).integers(0, 256, (3, page_bytes + 32 + offset), dtype=np.uint8)
    page, shuffled, back = (row[16 + offset : 16 + offset + page_bytes] for row in memory)
    expected = memory.copy()
    expected[1, 16 + offset : 16 + offset + page_bytes] = defined(filter, page)
    expected[2, 16 + offset : 16 + offset + page_bytes] = page
    shuffle(filter, page, shuffled)
    unshuffle(filter, shuffled, back)
    np.testing.assert_array_equal(memory, expected)


@pytest.mark.parametrize(
    "filter",
    [
        PageFilter("rows"),  # type: ignore[arg-type]
        PageFilter("none", 2),
        PageFilter("byte_shuffle", 3),
        PageFilter("byte_shuffle", 0),
        PageFilter("byte_shuffle", 2, 4, 4),
        PageFilter("none", 1, 0, 1),
        PageFilter("channel_byte_shuffle", 2, 0, 4),
        PageFilter("channel_byte_shuffle", 2, -4, -4),
        PageFilter("channel_byte_shuffle", 2, 5, 4),  # units of 40 bytes
        PageFilter("byte_shuffle", 8),
    ],
)
def test_mismatches_are_named(filter: PageFilter) -> None:
    """A filter that cannot arrange pages of 100 bytes says why."""
    assert filter.mismatch(100).startswith("filter ")
