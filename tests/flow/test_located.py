"""Chosen pages of a value are slices of it, so choosing them copies nothing to a GPU. A copy would wait for the forward
pass."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.flow.located import slices_of


@given(st.sets(st.integers(0, 19)), st.sampled_from([1, 4]))
def test_chosen_pages_share_the_memory_of_their_value(chosen: set[int], page_size: int) -> None:
    value, indices = torch.arange(100, 100 + 20 * page_size), sorted(chosen)
    slices = slices_of(value, indices, page_size)
    expected = [100 + page * page_size + at for page in indices for at in range(page_size)]
    assert [slot for part in slices for slot in part.tolist()] == expected
    assert {part.untyped_storage().data_ptr() for part in slices} <= {value.untyped_storage().data_ptr()}
