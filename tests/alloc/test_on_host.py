"""Ids in host memory: numpy functions on one thread give the results of torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.alloc.base import OwnedPages, are_runs, ascending, distinct, slots_of
from hicache.errors import DoubleFree
from hicache.tiers import joined

ids = st.lists(st.integers(-2, 12), max_size=12).map(lambda values: torch.tensor(values, dtype=torch.int64))


@given(st.lists(ids, min_size=1, max_size=4))
def test_joining_and_ordering(parts: list[torch.Tensor]) -> None:
    """`joined` concatenates the parts, and `ascending` sorts them."""
    assert torch.equal(joined(parts), torch.cat(parts))
    assert torch.equal(ascending(torch.cat(parts)), torch.cat(parts).sort().values)


@given(ids, st.lists(st.booleans(), min_size=9, max_size=9))
def test_a_double_free_is_found(named: torch.Tensor, allocated: list[bool]) -> None:
    """Pages are freed if each is named once, is from 1 to 9, and is allocated. Otherwise DoubleFree is raised and
    nothing changes."""
    want = named.tolist()
    owned = OwnedPages(9, 4, torch.tensor([i for i in range(1, 10) if not allocated[i - 1]], dtype=torch.int64))
    assert owned.flags.tolist() == [False, *allocated]
    if len(set(want)) == len(want) and all(0 < i < 10 and allocated[i - 1] for i in want):
        owned.give(named)
        assert owned.flags.tolist() == [False, *(allocated[i - 1] and i not in want for i in range(1, 10))]
        owned.take(named)
    else:
        with pytest.raises(DoubleFree):
            owned.give(named)
    assert owned.flags.tolist() == [False, *allocated]


@given(st.lists(st.integers(1, 9), max_size=6), st.sampled_from([1, 4]), st.data())
def test_slots_and_runs(pages: list[int], page_size: int, data: st.DataObject) -> None:
    """The slots of pages are runs, up to any length. Slots are no runs if two slots of different pages are
    exchanged."""
    slots = slots_of(torch.tensor(pages, dtype=torch.int64), page_size, torch.arange(page_size))
    assert slots.tolist() == [p * page_size + i for p in pages for i in range(page_size)]
    some = slots[data.draw(st.lists(st.integers(0, len(slots) - 1)) if len(slots) else st.just([]))]
    for part in (slots, some):
        assert distinct(part // page_size, page_size).tolist() == sorted({slot // page_size for slot in part.tolist()})
    assert are_runs(slots[: data.draw(st.integers(0, len(slots)))], page_size)
    if page_size > 1 and len(set(pages[:2])) == 2:
        slots[[1, page_size + 1]] = slots[[page_size + 1, 1]]
        assert not are_runs(slots, page_size)
