"""Frees of pages: which pages are free afterwards, and that no free waits for a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alloc_case import must, paged, single
from hicache.alloc.paged import distinct_first
from hicache.errors import DoubleFree, ShapeError
from kernel_case import no_waits


@given(ids=st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_distinct_ids_stand_first(ids: list[int]) -> None:
    """The distinct ids come first, ascending, in a tensor of the input's length, with the index of the last."""
    distinct, last = distinct_first(torch.tensor(ids))
    assert distinct.numel() == len(ids) and last.shape == (1,)
    assert distinct[: int(last) + 1].tolist() == sorted(set(ids))


@pytest.mark.parametrize("need_sort", [True, False])
def test_any_token_frees_its_page(device: str, need_sort: bool) -> None:
    """Some or all tokens of pages, in any order and repeated, free each page once. In a group of frees, pages are freed
    at its end, even if the caller has overwritten its tensor."""
    allocator = paged(40, 4, need_sort, device)
    slots = must(allocator.alloc(40))
    for tokens, pages in (([3], 1), ([5, 4, 6, 5], 1), ([38, 9, 39, 11, 9], 2), (list(range(12, 24)), 3)):
        before = allocator.available_size()
        allocator.free(slots[torch.tensor(tokens, device=device)])
        assert allocator.available_size() == before + 4 * pages
        allocator.check()
    allocator.free_group_begin()
    with pytest.raises(RuntimeError):
        allocator.free_group_begin()
    for tokens in ([24, 25], [26, 29], [28]):
        freed = slots[torch.tensor(tokens, device=device)]
        allocator.free(freed)
        freed.zero_()
    assert allocator.available_size() == 28
    allocator.free_group_end()
    with pytest.raises(RuntimeError):
        allocator.free_group_end()
    assert allocator.available_size() == 36
    assert sorted(must(allocator.alloc(36)).tolist()) == [s for s in range(4, 44) if s // 4 != 9]
    allocator.check()


@pytest.mark.parametrize("group", [True, False])
def test_runs_are_counted_by_length(device: str, group: bool) -> None:
    """A run that begins at the start of a page frees every page that it touches, with an incomplete page or several
    complete ones."""
    allocator = paged(80, 4, device=device)
    slots = must(allocator.alloc(80))
    if group:
        allocator.free_group_begin()
    allocator.free_run(slots[:9])
    allocator.free_run(slots[12:20].to(torch.int32), 8)
    allocator.free_run(torch.cat((slots[40:48], slots[24:28])))
    allocator.free_run(slots[:0])
    allocator.free_run(slots[34:38], 2)
    if group:
        allocator.free(slots[9:12])  # a part of the run's last page, which is freed once
        assert allocator.available_size() == 0
        allocator.free_group_end()
    assert allocator.available_size() == 4 * (3 + 2 + 3 + 2)
    allocator.check()
    if group:
        allocator.free_group_begin()
    allocator.free_run(torch.cat((slots[20:24], slots[28:32])), 16)
    allocator.free_run(slots[48:])
    if group:
        allocator.free_group_end()
    assert allocator.available_size() == 80
    allocator.check()


def test_runs_that_are_none_are_refused() -> None:
    """On the CPU, slots that are no run from the start of a page raise ShapeError. A page that is freed twice raises
    DoubleFree."""
    allocator = paged(40, 4)
    slots = must(allocator.alloc(40))
    with pytest.raises(ShapeError):
        allocator.free_run(slots[2:9])
    assert allocator.available_size() == 0
    allocator.free_run(slots[:8])
    with pytest.raises(DoubleFree):
        allocator.free_run(slots[4:12])
    assert allocator.available_size() == 8


@pytest.mark.gpu
def test_small_allocations_share_a_block() -> None:
    """On CUDA small allocations share a block. The allocated slots are distinct, outlive later calls, keep at most one
    block alive, and survive merges, snapshots and frees in between."""
    allocator = single(5000, device="cuda")
    held: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(1)
    for step in range(300):
        n = int(torch.randint(1, 300, (1,), generator=generator))
        slots = allocator.alloc(n)
        if slots is not None:
            assert slots.untyped_storage().nbytes() <= max(8192, n * 8)
            held.append(slots)
        if step % 3 == 2 or slots is None:
            allocator.free(held.pop(step % len(held)))
        if step % 50 == 7:
            state = allocator.backup_state()
            for size in (5, 200, 256):
                allocator.alloc(size)
            allocator.restore_state(state)
        out = torch.cat(held)
        assert out.unique().numel() == out.numel() and out.numel() + allocator.available_size() == 5000
        assert int(out.min()) >= 1 and int(out.max()) <= 5000
        allocator.check()


@pytest.mark.gpu
def test_no_free_waits_for_the_device() -> None:
    """The host waits for the device neither in a free of the pages of 256 requests, as runs or as any tokens, nor in an
    extend or a decode."""
    page, tokens, requests = 64, 640, 256
    allocator = paged(requests * tokens * 2, page, device="cuda")
    zeros, ends = torch.zeros(requests, dtype=torch.int64), torch.full((requests,), tokens)
    on = [x.cuda() for x in (zeros, ends, zeros - 1)]
    for unit in ("runs", "tokens"):
        with no_waits():
            slots = must(allocator.alloc_extend(on[0], zeros, on[1], ends, on[2], requests * tokens))
            more = must(allocator.alloc_decode(on[1] + 1, ends + 1, slots[tokens - 1 :: tokens]))
            allocator.free_group_begin()
            for part in slots.split(tokens):
                if unit == "runs":
                    allocator.free_run(part)
                else:
                    allocator.free(part)
            allocator.free(more)
            allocator.free_group_end()
        assert allocator.available_size() == requests * tokens * 2
        allocator.check()
    with no_waits():
        slots = must(allocator.alloc_extend(on[0], zeros, on[1], ends, on[2], requests * tokens))
        for part in slots.split(tokens):
            allocator.free_run(part)
        assert allocator.available_size() == requests * tokens * 2
        assert allocator.alloc(requests * tokens * 2) is not None
