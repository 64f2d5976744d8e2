"""A filter moves a page's bytes and changes none: each kind is compared with its definition, and undone exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hicache.storage.filters import FILTER_KINDS, FilterKind, PageFilter, shuffle, unshuffle


@example("byte_shuffle", 8, 1, 1)
@example("byte_shuffle", 4, 100_003, 0)
@example("none", 1, 1001, 1)
@given(
    kind=st.sampled_from(FILTER_KINDS),
    width=st.sampled_from([1, 2, 4, 8]),
    elements=st.integers(1, 10_000),
    offset=st.integers(0, 1),
)
def test_both_ways(kind: FilterKind, width: int, elements: int, offset: int) -> None:
    """`shuffle` equals the definition, `unshuffle` undoes it, and sources and the bytes around targets stay, also at
    addresses that no element is aligned to (`offset`)."""
    page_bytes = width * elements
    filter = PageFilter(kind, 1 if kind == "none" else width)
    assert filter.mismatch(page_bytes) == ""
    memory = np.random.default_rng(elements).integers(0, 256, (3, page_bytes + 32 + offset), dtype=np.uint8)
    page, shuffled, back = (row[16 + offset : 16 + offset + page_bytes] for row in memory)
    expected = memory.copy()
    expected[1, 16 + offset : 16 + offset + page_bytes] = page.reshape(-1, filter.element_bytes).T.reshape(-1)
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
        PageFilter("byte_shuffle", 8),
    ],
)
def test_mismatches_are_named(filter: PageFilter) -> None:
    """A filter that cannot arrange pages of 100 bytes says why."""
    assert filter.mismatch(100).startswith("filter ")
