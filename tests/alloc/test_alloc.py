"""The slot allocators compared with a model, a set of slots."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alloc_case import decode, extend, free_list, must, paged, single
from hicache.errors import ConfigError, DoubleFree, InvariantError, ShapeError

OPERATION = st.tuples(
    st.sampled_from(["alloc", "free", "group", "sort", "clear", "snapshot", "restore"]), st.integers(0, 9)
)


@given(page_size=st.sampled_from([1, 4]), need_sort=st.booleans(), steps=st.lists(OPERATION, min_size=20, max_size=30))
def test_conservation(device: str, page_size: int, need_sort: bool, steps: list[tuple[str, int]]) -> None:
    """After any calls, each slot outside of page 0 is free or allocated once. Pages are complete and in order. An
    allocation that does not fit returns None and changes nothing. A snapshot can restore the free list any number of
    times."""
    total = 8 * page_size
    allocator = single(total, need_sort, device) if page_size == 1 else paged(total, page_size, need_sort, device)
    held: list[list[int]] = []
    snapshot = None
    for kind, n in steps:
        available = total - sum(map(len, held))
        if kind == "alloc":
            before = free_list(allocator)
            slots = allocator.alloc(n * page_size)
            if n * page_size > available:
                assert slots is None and free_list(allocator) == before
            else:
                assert slots is not None and slots.dtype == torch.int64 and slots.device.type == allocator.device.type
                by_page = slots.view(n, page_size)
                assert torch.equal(by_page, by_page[:, :1] + torch.arange(page_size, device=device))
                assert not (by_page[:, 0] % page_size).any()
                held += [slots.tolist()] if n else []
        elif kind == "free" and held:
            allocator.free(torch.tensor(held.pop(n % len(held)), dtype=torch.int64, device=device))
        elif kind == "group":
            allocator.free_group_begin()
            for slots_held in held[:n]:
                allocator.free(torch.tensor(slots_held, dtype=torch.int64, device=device))
            allocator.free_group_end()
            del held[:n]
        elif kind == "sort":
            allocator.merge_and_sort_free()
        elif kind == "clear" and n == 0:
            allocator.free_group_begin()
            for slots_held in held:
                allocator.free_run(torch.tensor(slots_held, dtype=torch.int64, device=device))
            allocator.clear()  # an open group of frees ends too
            held.clear()
        elif kind == "snapshot":
            snapshot = (allocator.backup_state(), free_list(allocator), list(held))
        elif kind == "restore" and snapshot is not None:
            allocator.restore_state(snapshot[0])
            assert free_list(allocator) == snapshot[1]
            held = list(snapshot[2])
        out = [slot for slots_held in held for slot in slots_held]
        assert len(set(out)) == len(out) and all(page_size <= slot < total + page_size for slot in out)
        assert allocator.available_size() + len(out) == total
        allocator.check()


@pytest.mark.parametrize("need_sort", [True, False])
def test_freed_pages_merge_when_short(need_sort: bool) -> None:
    """With need_sort, freed pages are merged in ascending order when an allocation is short of pages. Without
    need_sort, freed pages are merged at once."""
    allocator = single(6, need_sort)
    slots = must(allocator.alloc(4))
    allocator.free(slots[[3, 0, 2]])
    assert free_list(allocator) == (([5, 6], [4, 1, 3]) if need_sort else ([5, 6, 4, 1, 3], []))
    assert must(allocator.alloc(3)).tolist() == ([1, 3, 4] if need_sort else [5, 6, 4])
    allocator.check()


def test_kept_slots_keep_no_parent() -> None:
    """Tensors that are allocated or freed have their own storage of their size, so no slice keeps a long tensor
    alive."""
    allocator = single(1000)
    slots = must(allocator.alloc(4))
    assert slots.untyped_storage().nbytes() == 4 * 8
    allocator.free(slots[:1])
    assert allocator.release_pages.untyped_storage().nbytes() == 8
    slots.fill_(7)
    assert allocator.free_pages[0] == 5


def test_double_frees_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is freed twice, or twice in one call, or that is foreign or 0, raises DoubleFree. Nothing changes."""
    monkeypatch.setenv("HICACHE_DEBUG", "1")
    for allocator in (single(8, device=device), paged(8, 4, device=device)):
        slots = must(allocator.alloc(4))
        allocator.free(slots[:1])
        before = free_list(allocator)
        for bad in ([int(slots[0])], [0], [1000], [-9], *([[2, 2]] if allocator.page_size == 1 else [])):
            with pytest.raises(DoubleFree):
                allocator.free(torch.tensor(bad, device=device))
        assert free_list(allocator) == before


def test_check_finds_every_violation() -> None:
    """`check` lists ids that are out of range, ids that are in a list twice, and ids that are both free and
    allocated."""
    allocator = single(6)
    allocator.alloc(3)
    for planted, count in (([0, 4, 5], 1), ([9, 5, 5], 2), ([2, 4, 5, 6], 2), ([4, 5], 1)):
        allocator.free_pages = torch.tensor(planted)
        with pytest.raises(InvariantError) as caught:
            allocator.check()
        assert len(caught.value.violations) == count


@pytest.mark.parametrize("debug", ["0", "1"])
def test_sizes_and_lengths_that_are_wrong_are_refused(debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that fill no complete page stay unused. Sizes and lengths that fit no pages or do not add up, and slots
    that do not end their prefixes, raise and change nothing, also outside debug mode. An empty batch gets no slots."""
    assert paged(19, 4).available_size() == 16
    with pytest.raises(ConfigError, match="device_tokens"):
        paged(3, 4)
    with pytest.raises(ConfigError, match="kvcache"):
        single(4).get_cpu_copy(torch.tensor([1]))
    assert single(4).get_kvcache() is None
    monkeypatch.setenv("HICACHE_DEBUG", debug)
    allocator, one = paged(16, 4), torch.tensor([1])
    for out in (extend(allocator, [], [], []), extend(allocator, [3], [3], [6]), decode(allocator, [], [])):
        assert must(out).numel() == 0
    for wrong in (
        lambda: allocator.alloc(6),
        lambda: single(8).alloc(-1),
        lambda: extend(allocator, [5], [4], [8]),
        lambda: decode(allocator, [0], [-1]),
        lambda: allocator.alloc_extend(one, one, one + 2, one + 2, one + 3, 7),
    ):
        with pytest.raises(ShapeError):
            wrong()
    for unended in (lambda: extend(allocator, [5], [6], [9]), lambda: decode(allocator, [6], [9])):
        with pytest.raises(InvariantError):
            unended()
    assert allocator.available_size() == 16 and "16 of 16" in allocator.debug_print()


_UNENDED = """
import sys, torch
from alloc_case import must, paged, windowed
call, last = sys.argv[1], torch.tensor([int(sys.argv[2])], device="cuda")
allocator = windowed(64, 64, 4, device="cuda") if call == "window" else paged(64, 4, device="cuda")
slots = must(allocator.alloc(8))  # of two pages, 4 to 11
if call == "window":
    allocator.free_swa(slots)
five, six = torch.tensor([5]), torch.tensor([6])
on_device = five.cuda(), six.cuda()
torch.cuda.synchronize()
torch.cuda.set_sync_debug_mode("error")
if call == "extend":
    allocator.alloc_extend(on_device[0], five, on_device[1], six, last, 1)
else:
    allocator.alloc_decode(on_device[1], six, last)
torch.cuda.set_sync_debug_mode("default")
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("call", ["extend", "decode", "window"])
def test_the_device_refuses_slots_that_do_not_end_their_prefixes(call: str) -> None:
    """On CUDA outside debug mode the host does not wait and the device asserts, so the next wait raises. Window slots
    that were freed within their page have the same effect. The device is then lost for its process, so the test runs in
    another process."""
    for last, refused in ((8, call == "window"), (11, True)):
        run = [sys.executable, "-c", _UNENDED, call, str(last)]
        done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=200)
        assert ("assert" in done.stderr.lower()) == refused == bool(done.returncode), done.stderr
