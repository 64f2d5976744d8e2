"""A filter moves a page's bytes and changes none: each kind is compared with its definition, and undone exactly."""

from __future__ import annotations

import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.storage.filters import PageFilter, shuffle, unshuffle

Bytes = npt.NDArray[np.uint8]

# Element width, segments, tokens, channels: one element, odd shapes, several blocks of each axis.
SHAPES = [
    (1, 1, 1, 1),
    (2, 3, 5, 7),
    (8, 1, 3, 65),
    (2, 4, 64, 1024),
    (4, 2, 333, 257),
    (1, 300, 64, 100),
    (2, 3, 150_000, 1),
    (8, 1, 40_001, 2),
    (1, 1, 1, 300_001),
]


def defined(filter: PageFilter, page: Bytes) -> Bytes:
    """The arrangement as the class's docstring states it, by one transposition of the whole page."""
    if filter.kind == "none":
        return page.copy()
    if filter.kind == "byte_shuffle":
        return np.ascontiguousarray(page.reshape(-1, filter.element_bytes).T).reshape(-1)
    axes = page.reshape(-1, filter.tokens, filter.channels, filter.element_bytes)
    return np.ascontiguousarray(axes.transpose(3, 0, 2, 1)).reshape(-1)


def check_both_ways(filter: PageFilter, page_bytes: int, seed: int, offset: int = 0) -> None:
    """`shuffle` equals the definition, `unshuffle` undoes it, and sources and the bytes around targets stay.

    `offset` puts the pages at addresses that no element is aligned to.
    """
    assert filter.mismatch(page_bytes) == ""
    memory = np.random.default_rng(seed).integers(0, 256, (3, page_bytes + 32 + offset), dtype=np.uint8)
    page, shuffled, back = (row[16 + offset : 16 + offset + page_bytes] for row in memory)
    before = memory.copy()
    shuffle(filter, page, shuffled)
    np.testing.assert_array_equal(shuffled, defined(filter, page))
    unshuffle(filter, shuffled, back)
    np.testing.assert_array_equal(back, page)
    np.testing.assert_array_equal(memory[0], before[0])
    for row, was in zip(memory[1:], before[1:], strict=True):
        np.testing.assert_array_equal(row[: 16 + offset], was[: 16 + offset])
        np.testing.assert_array_equal(row[16 + offset + page_bytes :], was[16 + offset + page_bytes :])


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("width", "segments", "tokens", "channels"), SHAPES)
def test_channel_byte_shuffle(width: int, segments: int, tokens: int, channels: int, offset: int) -> None:
    """Segments of any shape, of less than a block or of many, come out channel by channel and go back."""
    filter = PageFilter("channel_byte_shuffle", width, tokens, channels)
    check_both_ways(filter, width * segments * tokens * channels, tokens, offset)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("num_elements", [1, 7, 100_003])
def test_byte_shuffle(num_elements: int, width: int, offset: int) -> None:
    """Elements of any number and width come out plane by plane and go back."""
    check_both_ways(PageFilter("byte_shuffle", width), width * num_elements, num_elements, offset)


def test_none() -> None:
    """The filter that does nothing copies the page, both ways."""
    check_both_ways(PageFilter(), 1001, 5)


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    segments=st.integers(1, 9),
    tokens=st.integers(1, 80),
    channels=st.integers(1, 150),
)
def test_any_shape(width: int, segments: int, tokens: int, channels: int) -> None:
    """Whatever the shape, both ways hold."""
    page_bytes = width * segments * tokens * channels
    check_both_ways(PageFilter("channel_byte_shuffle", width, tokens, channels), page_bytes, page_bytes)
    check_both_ways(PageFilter("byte_shuffle", width), page_bytes, page_bytes)


@pytest.mark.parametrize("filter", [PageFilter("byte_shuffle", 2), PageFilter("channel_byte_shuffle", 2, 64, 512)])
def test_nothing_is_allocated(filter: PageFilter) -> None:
    """Once a thread has shuffled a page, shuffling and its inverse allocate far less than a page."""
    page = np.zeros(4 << 20, dtype=np.uint8)
    shuffled = np.empty_like(page)
    shuffle(filter, page, shuffled)
    tracemalloc.start()
    try:
        shuffle(filter, page, shuffled)
        unshuffle(filter, shuffled, page)
        assert tracemalloc.get_traced_memory()[1] < len(page) // 64
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("filter", "words"),
    [
        (PageFilter("rows"), "filter kind 'rows'"),  # type: ignore[arg-type]
        (PageFilter("none", 2), "element_bytes=2"),
        (PageFilter("byte_shuffle", 3), "element_bytes=3"),
        (PageFilter("byte_shuffle", 0), "element_bytes=0"),
        (PageFilter("byte_shuffle", 2, 4, 4), r"segment of \(4, 4\)"),
        (PageFilter("none", 1, 0, 1), r"segment of \(0, 1\)"),
        (PageFilter("channel_byte_shuffle", 2, 0, 4), r"segment of \(0, 4\)"),
        (PageFilter("channel_byte_shuffle", 2, -4, -4), r"segment of \(-4, -4\)"),
        (PageFilter("channel_byte_shuffle", 2, 5, 4), "units of 40 bytes"),
        (PageFilter("byte_shuffle", 8), "units of 8 bytes"),
    ],
)
def test_mismatches_are_named(filter: PageFilter, words: str) -> None:
    """A filter that cannot arrange pages of 100 bytes says why."""
    with pytest.raises(AssertionError, match=words):
        check_both_ways(filter, 100, 0)
