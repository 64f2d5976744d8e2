"""The slot allocators against a set of slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.alloc import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from hicache.alloc.base import BaseTokenToKVPoolAllocator
from hicache.errors import ConfigError, DoubleFree, InvariantError, ShapeError


def token(size: int, need_sort: bool = True, device: str = "cpu") -> TokenToKVPoolAllocator:
    return TokenToKVPoolAllocator(size, torch.bfloat16, device, None, need_sort)


def paged(size: int, page_size: int, need_sort: bool = True, device: str = "cpu") -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(size, page_size, torch.bfloat16, device, None, need_sort)


def free_list(allocator: BaseTokenToKVPoolAllocator) -> tuple[list[int], list[int]]:
    return allocator.free_pages.tolist(), allocator.release_pages.tolist()


def extend(
    allocator: PagedTokenToKVPoolAllocator, prefixes: list[int], seqs: list[int], last: list[int]
) -> torch.Tensor | None:
    p, s, loc = (torch.tensor(x, dtype=torch.int64) for x in (prefixes, seqs, last))
    device = allocator.device
    return allocator.alloc_extend(p.to(device), p, s.to(device), s, loc.to(device), sum(seqs) - sum(prefixes))


def decode(allocator: PagedTokenToKVPoolAllocator, seqs: list[int], last: list[int]) -> torch.Tensor | None:
    s, loc = torch.tensor(seqs, dtype=torch.int64), torch.tensor(last, dtype=torch.int64)
    return allocator.alloc_decode(s.to(allocator.device), s, loc.to(allocator.device))


def test_every_slot_once_and_never_zero(device: str) -> None:
    """Slots 1..size come out once each as int64, and then None, which changes nothing."""
    allocator = token(5, device=device)
    first, second = allocator.alloc(2), allocator.alloc(3)
    assert first is not None and second is not None and first.dtype == torch.int64
    assert sorted(first.tolist() + second.tolist()) == [1, 2, 3, 4, 5]
    assert allocator.alloc(1) is None and allocator.available_size() == 0
    allocator.free(second)
    before = free_list(allocator)
    assert allocator.alloc(4) is None and free_list(allocator) == before
    nothing = allocator.alloc(0)
    assert nothing is not None and nothing.numel() == 0 and free_list(allocator) == before
    allocator.check()


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_pages_come_whole(device: str, page_size: int) -> None:
    """`alloc` hands out whole pages, page 0 never, and one token of each is enough to free them."""
    allocator = paged(6 * page_size, page_size, device=device)
    slots = allocator.alloc(4 * page_size)
    assert slots is not None
    assert slots.tolist() == list(range(page_size, 5 * page_size))
    assert allocator.available_size() == 2 * page_size
    allocator.free(slots[page_size - 1 :: page_size])
    assert allocator.available_size() == 6 * page_size
    allocator.check()


def test_sizes_that_hold_no_whole_page() -> None:
    """A rest below a page stays unused; no page at all is a ConfigError, and half a page asked for a ShapeError."""
    assert paged(19, 4).available_size() == 16
    with pytest.raises(ConfigError, match="device_tokens"):
        paged(3, 4)
    with pytest.raises(ShapeError, match="page_size=4"):
        paged(8, 4).alloc(6)
    with pytest.raises(ShapeError, match="0 or more"):
        token(8).alloc(-1)


@pytest.mark.parametrize("need_sort", [True, False])
def test_freed_pages_merge_when_short(need_sort: bool) -> None:
    """With need_sort, freed pages are merged in ascending order when an allocation is short; else at once."""
    allocator = token(6, need_sort)
    slots = allocator.alloc(4)
    assert slots is not None
    allocator.free(slots[[3, 0, 2]])
    assert free_list(allocator) == (([5, 6], [4, 1, 3]) if need_sort else ([5, 6, 4, 1, 3], []))
    again = allocator.alloc(3)
    assert again is not None and again.tolist() == ([1, 3, 4] if need_sort else [5, 6, 4])
    allocator.check()


def test_group_frees_land_together(device: str) -> None:
    """Frees in a group land at its end, as copies: the caller may overwrite its tensor, and pages count once."""
    allocator = paged(16, 4, need_sort=False, device=device)
    slots = allocator.alloc(12)
    assert slots is not None
    allocator.free_group_begin()
    kept = slots.clone()
    allocator.free(kept[:2])
    allocator.free(kept[2:6])
    kept.zero_()
    assert allocator.available_size() == 4
    allocator.free_group_end()
    assert allocator.available_size() == 12
    allocator.check()
    with pytest.raises(RuntimeError, match="no free group"):
        allocator.free_group_end()
    allocator.free_group_begin()
    with pytest.raises(RuntimeError, match="is open"):
        allocator.free_group_begin()


def test_kept_slots_keep_no_parent() -> None:
    """What `alloc` returns and what is freed has storage of its own size: no slice keeps a long tensor alive."""
    allocator = token(1000)
    slots = allocator.alloc(4)
    assert slots is not None and slots.untyped_storage().nbytes() == 4 * 8
    allocator.free(slots[:1])
    assert allocator.release_pages.untyped_storage().nbytes() == 8
    slots.fill_(7)
    assert allocator.free_pages[0] == 5


@pytest.mark.parametrize("need_sort", [True, False])
def test_a_snapshot_survives_later_calls(need_sort: bool) -> None:
    """A snapshot brings the free list back after allocs, frees, sorting and clear, and more than once."""
    allocator = paged(32, 4, need_sort)
    held = allocator.alloc(12)
    assert held is not None
    allocator.free(held[:4])
    state, expected = allocator.backup_state(), free_list(allocator)
    for _ in range(2):
        allocator.alloc(8)
        allocator.free(held[4:])
        allocator.merge_and_sort_free()
        allocator.alloc(16)
        allocator.clear()
        allocator.restore_state(state)
        assert free_list(allocator) == expected
        allocator.check()
    allocator.free(held[4:])
    assert allocator.available_size() == 32


def test_double_frees_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot freed twice, twice in one call, foreign, or 0, raises DoubleFree and changes nothing."""
    monkeypatch.setenv("HICACHE_DEBUG", "1")
    for allocator in (token(8, device=device), paged(8, 4, device=device)):
        slots = allocator.alloc(4)
        assert slots is not None
        allocator.free(slots[:1])
        before = free_list(allocator)
        for bad in ([int(slots[0])], [0], [1000], [-9]):
            with pytest.raises(DoubleFree):
                allocator.free(torch.tensor(bad, device=device))
        assert free_list(allocator) == before
    allocator = token(8, device=device)
    slots = allocator.alloc(2)
    assert slots is not None
    with pytest.raises(DoubleFree, match="twice in one call"):
        allocator.free(slots[[0, 0]])
    assert allocator.available_size() == 6


def test_check_names_every_violation() -> None:
    """`check` lists ids that are outside, there twice, and both free and allocated."""
    allocator = token(6)
    allocator.alloc(3)
    allocator.free_pages = torch.tensor([0, 9, 5, 5])
    with pytest.raises(InvariantError, match=r"ids \[0, 9\] are outside 1..6; ids \[5\] are free more than once"):
        allocator.check()
    allocator.free_pages = torch.tensor([2, 4, 5, 6])
    with pytest.raises(InvariantError, match=r"ids \[2\] are free and allocated; 4 free and 3 allocated of 6"):
        allocator.check()


def test_extend_then_decode_fills_pages(device: str) -> None:
    """A sequence grown by extends and decodes holds each page in order, and a page's start is page aligned."""
    allocator = paged(64, 4, device=device)
    table = [[], []]
    for ends in ((3, 9), (3, 10), (12, 10)):
        prefixes, last = [len(t) for t in table], [t[-1] if t else -1 for t in table]
        out = extend(allocator, prefixes, list(ends), last)
        assert out is not None and out.dtype == torch.int64
        new = out.tolist()
        for row, (prefix, end) in enumerate(zip(prefixes, ends, strict=True)):
            table[row] += new[: end - prefix]
            new = new[end - prefix :]
    for _ in range(6):
        out = decode(allocator, [len(t) + 1 for t in table], [t[-1] for t in table])
        assert out is not None
        for row, slot in enumerate(out.tolist()):
            table[row].append(slot)
    assert [len(t) for t in table] == [18, 16]
    for row in table:
        for position, slot in enumerate(row):
            assert slot % 4 == position % 4 and (position % 4 == 0 or slot == row[position - 1] + 1)
    every = table[0] + table[1]
    assert len(set(every)) == len(every) and min(every) >= 4
    allocator.free(torch.tensor(every, device=device))
    assert allocator.available_size() == 64
    allocator.check()


def test_a_short_extend_or_decode_changes_nothing() -> None:
    """Where pages are short, extend and decode give None and leave the free list, released pages included."""
    allocator = paged(16, 4)
    held = allocator.alloc(12)
    assert held is not None
    allocator.free(held[:4])
    before = free_list(allocator)
    assert extend(allocator, [0, 4], [5, 9], [-1, 11]) is None
    assert decode(allocator, [1, 5, 9], [-1, 11, 15]) is None
    assert free_list(allocator) == before
    fits = extend(allocator, [0, 6], [4, 9], [-1, 9])
    assert fits is not None and fits.tolist() == [4, 5, 6, 7, 10, 11, 16]


def test_empty_batches() -> None:
    """No requests, and requests that do not grow, get an empty tensor."""
    allocator = paged(16, 4)
    for out in (extend(allocator, [], [], []), extend(allocator, [3], [3], [6]), decode(allocator, [], [])):
        assert out is not None and out.numel() == 0
    assert allocator.available_size() == 16


def test_lengths_that_disagree_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that shrink or do not add up raise ShapeError; with checks on, a bad last slot raises too."""
    allocator = paged(16, 4)
    with pytest.raises(ShapeError, match="below prefix_lens"):
        extend(allocator, [5], [4], [8])
    one = torch.tensor([1])
    with pytest.raises(ShapeError, match="extend_num_tokens=7"):
        allocator.alloc_extend(one, one, one + 2, one + 2, one + 3, 7)
    monkeypatch.setenv("HICACHE_DEBUG", "1")
    checked = paged(16, 4)
    with pytest.raises(InvariantError, match="do not end prefixes"):
        extend(checked, [5], [6], [9])
    with pytest.raises(InvariantError, match="do not end prefixes"):
        decode(checked, [6], [9])
    assert checked.available_size() == 16


def test_copies_need_a_pool() -> None:
    """Without a pool, a request for a copy is a ConfigError; debug_print names the sizes."""
    allocator = token(4)
    assert allocator.get_kvcache() is None
    with pytest.raises(ConfigError, match="kvcache"):
        allocator.get_cpu_copy(torch.tensor([1]))
    assert "4 of 4" in allocator.debug_print()


OPERATION = st.tuples(st.sampled_from(["alloc", "free", "group", "snapshot"]), st.integers(0, 9), st.booleans())


@given(page_size=st.sampled_from([1, 4]), need_sort=st.booleans(), steps=st.lists(OPERATION, max_size=30))
def test_conservation(page_size: int, need_sort: bool, steps: list[tuple[str, int, bool]]) -> None:
    """After any calls, available and allocated slots add up to the total, and no slot is allocated twice; an allocation
    that does not fit is None."""
    total = 8 * page_size
    single = page_size == 1
    allocator = token(total, need_sort) if single else paged(total, page_size, need_sort)
    held: list[list[int]] = []
    snapshot = None
    for kind, n, flag in steps:
        available = total - sum(len(slots) for slots in held)
        if kind == "alloc":
            before = free_list(allocator)
            slots = allocator.alloc(n * page_size)
            if n * page_size > available:
                assert slots is None and free_list(allocator) == before
            else:
                assert slots is not None and slots.numel() == n * page_size
                held.append(slots.tolist())
        elif kind == "free" and held:
            allocator.free(torch.tensor(held.pop(n % len(held)), dtype=torch.int64))
        elif kind == "group":
            allocator.free_group_begin()
            for slots in held[:n]:
                allocator.free(torch.tensor(slots, dtype=torch.int64))
            allocator.free_group_end()
            del held[:n]
        elif kind == "snapshot" and flag:
            snapshot = (allocator.backup_state(), [list(slots) for slots in held])
        elif kind == "snapshot" and snapshot is not None:
            allocator.restore_state(snapshot[0])
            held = [list(slots) for slots in snapshot[1]]
        out = [slot for slots in held for slot in slots]
        assert len(set(out)) == len(out) and all(page_size <= slot < total + page_size for slot in out)
        assert allocator.available_size() + len(out) == total
        allocator.check()


@pytest.mark.usefixtures("kernels")
@given(page_size=st.sampled_from([1, 4, 16]), need_sort=st.booleans(), data=st.data())
def test_growing_sequences(page_size: int, need_sort: bool, data: st.DataObject) -> None:
    """Random extends, decodes and ends: every sequence has ordered pages of its own, and all are free at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HICACHE_DEBUG", "1")
        allocator = paged(20 * page_size, page_size, need_sort)
    rows: list[list[int]] = [[], [], []]
    for _ in range(data.draw(st.integers(1, 8))):
        pages = sum(-(-len(row) // page_size) for row in rows)
        grow = data.draw(st.one_of(st.just([1, 1, 1]), st.lists(st.integers(0, 3 * page_size), min_size=3, max_size=3)))
        seqs = [len(row) + n for row, n in zip(rows, grow, strict=True)]
        last = [row[-1] if row else -1 for row in rows]
        before = free_list(allocator)
        if grow == [1, 1, 1]:
            out = decode(allocator, seqs, last)
        else:
            out = extend(allocator, [len(row) for row in rows], seqs, last)
        needed = sum(-(-s // page_size) for s in seqs) - pages
        if needed > 20 - pages:
            assert out is None and free_list(allocator) == before
        else:
            assert out is not None
            new = out.tolist()
            for index, n in enumerate(grow):
                rows[index] += new[:n]
                new = new[n:]
        for row in rows:
            assert all(s % page_size == i % page_size for i, s in enumerate(row))
            assert all(s == row[i] + 1 for i, s in enumerate(row[1:]) if (i + 1) % page_size)
        owned = [{s // page_size for s in row} for row in rows]
        assert 0 not in set().union(*owned)
        assert sum(len(o) for o in owned) == len(set().union(*owned))
        assert allocator.available_size() == (20 - len(set().union(*owned))) * page_size
        if data.draw(st.booleans()):
            ended = rows[data.draw(st.integers(0, 2))]
            allocator.free(torch.tensor(ended, dtype=torch.int64))
            ended.clear()
        allocator.check()
    for row in rows:
        allocator.free(torch.tensor(row, dtype=torch.int64))
    assert allocator.available_size() == 20 * page_size
