"""A filter moves the bytes of a page and changes none. Each kind is compared with its definition, and the inverse
restores the page exactly."""

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
    """`shuffle` equals the definition, and `unshuffle` undoes it. Sources, and bytes around targets, do not change,
    also at addresses that are not aligned to elements (`offset`)."""
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
    """A filter for which 100 is a wrong page size raises an error that says why."""
    assert filter.mismatch(100).startswith("filter ")
