"""Ids in host memory: what numpy does by one thread is what torch says."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.alloc.on_host import all_once_and_flagged, are_runs, ascending, flag, joined, slots_of

ids = st.lists(st.integers(-2, 12), max_size=12).map(lambda values: torch.tensor(values, dtype=torch.int64))


@given(st.lists(ids, min_size=1, max_size=4))
def test_joining_and_ordering(parts: list[torch.Tensor]) -> None:
    """Parts come one behind the other, and in order, in memory of their own."""
    assert torch.equal(joined(parts), torch.cat(parts))
    assert torch.equal(ascending(torch.cat(parts)), torch.cat(parts).sort().values)
    alone = joined(parts[:1])
    alone.fill_(99)
    assert 99 not in parts[0].tolist()


@given(ids, st.lists(st.booleans(), min_size=10, max_size=10))
def test_flags(named: torch.Tensor, flags: list[bool]) -> None:
    """Ids pass when each is named once, is from 1 to 9 and has its flag; marking sets those and no others."""
    state = torch.tensor(flags)
    want = named.tolist()
    expected = len(set(want)) == len(want) and all(0 < i < 10 and flags[i] for i in want)
    assert all_once_and_flagged(state, named) == expected
    inside = named[(named >= 0) & (named < 10)]
    for value in (True, False):
        flag(state, inside, value)
        assert state.tolist() == [value if i in inside.tolist() else old for i, old in enumerate(flags)]


@given(st.lists(st.integers(1, 9), max_size=6), st.sampled_from([1, 4]), st.data())
def test_slots_and_runs(pages: list[int], page_size: int, data: st.DataObject) -> None:
    """Slots of pages are runs of them, up to any length; with two slots of different pages exchanged they are not."""
    slots = slots_of(torch.tensor(pages, dtype=torch.int64), page_size, torch.arange(page_size))
    assert slots.tolist() == [p * page_size + i for p in pages for i in range(page_size)]
    assert are_runs(slots[: data.draw(st.integers(0, len(slots)))], page_size)
    if page_size > 1 and len(set(pages[:2])) == 2:
        slots[[1, page_size + 1]] = slots[[page_size + 1, 1]]
        assert not are_runs(slots, page_size)
