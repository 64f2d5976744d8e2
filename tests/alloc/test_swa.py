"""The sliding-window allocator against a dict from full slots to window slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.alloc import SWATokenToKVPoolAllocator, TokenToKVPoolAllocator
from hicache.device import SWAKVPool
from hicache.errors import ConfigError, DoubleFree, InvariantError, ShapeError


def swa_allocator(
    size: int, size_swa: int, page: int = 1, device: str = "cpu", kvcache: SWAKVPool | None = None, sort: bool = True
) -> SWATokenToKVPoolAllocator:
    return SWATokenToKVPoolAllocator(size, size_swa, page, torch.bfloat16, device, kvcache, sort)


def sizes(allocator: SWATokenToKVPoolAllocator) -> tuple[int, int]:
    return allocator.full_available_size(), allocator.swa_available_size()


def must(slots: torch.Tensor | None) -> torch.Tensor:
    assert slots is not None
    return slots


def extend(
    allocator: SWATokenToKVPoolAllocator, prefixes: list[int], seqs: list[int], last: list[int]
) -> torch.Tensor | None:
    p, s, loc = (torch.tensor(x, dtype=torch.int64) for x in (prefixes, seqs, last))
    device = allocator.device
    return allocator.alloc_extend(p.to(device), p, s.to(device), s, loc.to(device), sum(seqs) - sum(prefixes))


def decode(allocator: SWATokenToKVPoolAllocator, seqs: list[int], last: list[int]) -> torch.Tensor | None:
    s, loc = torch.tensor(seqs, dtype=torch.int64), torch.tensor(last, dtype=torch.int64)
    return allocator.alloc_decode(s.to(allocator.device), s, loc.to(allocator.device))


@pytest.mark.parametrize("page", [1, 4])
def test_a_full_and_a_window_slot_or_neither(device: str, page: int) -> None:
    """Each slot is mapped to a window slot; where either allocator is short the result is None and nothing changes."""
    allocator = swa_allocator(16 * page, 6 * page, page, device)
    first = must(allocator.alloc(4 * page))
    window_slots = allocator.translate_loc_from_full_to_swa(first)
    assert window_slots.unique().numel() == 4 * page and int(window_slots.min()) >= page
    assert torch.equal(first % page, window_slots % page)
    mapping = allocator.full_to_swa_index_mapping.clone()
    assert allocator.alloc(3 * page) is None
    assert sizes(allocator) == (12 * page, 2 * page) and allocator.available_size() == 2 * page
    assert torch.equal(mapping, allocator.full_to_swa_index_mapping)
    # Full slots are short, window slots are not.
    allocator = swa_allocator(4 * page, 6 * page, page, device)
    assert allocator.alloc(5 * page) is None and sizes(allocator) == (4 * page, 6 * page)
    assert not allocator.full_to_swa_index_mapping.any()
    assert must(allocator.alloc(0)).numel() == 0
    allocator.check()


@pytest.mark.parametrize("page", [1, 4])
def test_the_window_goes_first(device: str, page: int) -> None:
    """After free_swa a free of the same slots frees full slots alone, and no window slot of another owner."""
    allocator = swa_allocator(8 * page, 4 * page, page, device)
    old = must(allocator.alloc(4 * page))
    allocator.free_swa(old[: 3 * page])
    assert sizes(allocator) == (4 * page, 3 * page)
    assert allocator.translate_loc_from_full_to_swa(old).tolist()[: 3 * page] == [0] * (3 * page)
    allocator.free_swa(old[: 3 * page])
    assert sizes(allocator) == (4 * page, 3 * page)
    new = must(allocator.alloc(3 * page))
    window_slots = allocator.translate_loc_from_full_to_swa(new)
    allocator.free(old)
    assert sizes(allocator) == (5 * page, page)
    assert torch.equal(allocator.translate_loc_from_full_to_swa(new), window_slots)
    allocator.check()
    allocator.free(new)
    assert sizes(allocator) == (8 * page, 4 * page) and not allocator.full_to_swa_index_mapping.any()
    allocator.check()


@pytest.mark.parametrize("page", [1, 4])
def test_the_mapping_is_read_when_a_free_is_requested(device: str, page: int) -> None:
    """A free in a group frees the window slots that are mapped then, not those mapped anew before the group ends."""
    allocator = swa_allocator(4 * page, 4 * page, page, device, sort=False)
    a, b = must(allocator.alloc(2 * page)), must(allocator.alloc(2 * page))
    allocator.free_group_begin()
    allocator.free(a)
    assert sizes(allocator) == (0, 0)
    assert not allocator.translate_loc_from_full_to_swa(a).any()
    # The slots of `a` are mapped anew before the group ends; the group must not free their new window slots.
    allocator.full_to_swa_index_mapping[a] = allocator.translate_loc_from_full_to_swa(b)
    allocator.full_to_swa_index_mapping[b] = 0
    kept = allocator.translate_loc_from_full_to_swa(a)
    allocator.free_group_end()
    assert sizes(allocator) == (2 * page, 2 * page)
    assert not torch.isin(kept // page, allocator.swa_attn_allocator.free_pages).any()
    allocator.full_to_swa_index_mapping[b] = kept
    allocator.full_to_swa_index_mapping[a] = 0
    allocator.check()


def test_a_group_frees_in_both_allocators(device: str) -> None:
    """Frees of a group are applied together in both allocators, even if the caller has overwritten its tensor since."""
    allocator = swa_allocator(16, 16, 4, device)
    slots = must(allocator.alloc(16))
    allocator.free_group_begin()
    allocator.free(slots[:4])
    allocator.free_swa(slots[4:8])
    allocator.free(slots[4:8])
    slots.zero_()
    assert sizes(allocator) == (0, 0)
    allocator.free_group_end()
    assert sizes(allocator) == (8, 8)
    allocator.check()
    with pytest.raises(RuntimeError, match="no free group"):
        allocator.free_group_end()


@pytest.mark.parametrize("debug", ["0", "1"])
def test_extends_and_decodes_fill_the_same_page(device: str, debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New tokens fill the page that their prefix ends in, full and window; windows of earlier pages may be freed."""
    monkeypatch.setenv("HICACHE_DEBUG", debug)
    allocator = swa_allocator(64, 40, 4, device)
    a = must(extend(allocator, [0, 0], [6, 9], [-1, -1]))
    one, two = a[:6], a[6:]
    for sequence in (one, two):
        window_slots = allocator.translate_loc_from_full_to_swa(sequence)
        assert torch.equal(window_slots % 4, sequence % 4) and int(window_slots.min()) >= 4
    more = must(extend(allocator, [6, 9], [8, 14], [int(one[-1]), int(two[-1])]))
    assert more[:2].tolist() == [int(one[-1]) + 1, int(one[-1]) + 2]
    window_slots = allocator.translate_loc_from_full_to_swa(torch.cat((one, more[:2])))
    assert window_slots.tolist() == [int(p) * 4 + o for p in window_slots[::4] // 4 for o in range(4)]
    # Of the first sequence, 8 tokens in whole pages, no window is left: its next token opens a page.
    allocator.free_swa(torch.cat((one, more[:2])))
    last = [int(more[1]), int(more[-1])]
    new = must(decode(allocator, [9, 15], last))
    assert int(new[1]) == last[1] + 1 and int(new[0]) % 4 == 0
    assert bool((allocator.translate_loc_from_full_to_swa(new) >= 4).all())
    allocator.check()
    allocator.free(torch.cat((a, more, new)))
    assert sizes(allocator) == (64, 40)
    allocator.check()


@pytest.mark.parametrize("page", [1, 4])
def test_what_one_allocator_cannot_hold_changes_nothing(page: int) -> None:
    """Extends and decodes that only one allocator can hold are None, and free lists and mapping are as before."""
    for size, size_swa in ((16, 8), (8, 16)):
        allocator = swa_allocator(size, size_swa, page)
        slots = must(extend(allocator, [0], [8], [-1]))
        before = allocator.backup_state()
        assert extend(allocator, [0], [3], [-1]) is None
        assert decode(allocator, [9], [int(slots[-1])]) is None
        after = allocator.backup_state()
        for x, y in ((before.full, after.full), (before.swa, after.swa)):
            assert torch.equal(x.free_pages, y.free_pages) and torch.equal(x.release_pages, y.release_pages)
        assert torch.equal(before.mapping, after.mapping)
        allocator.check()


@pytest.mark.parametrize("page", [1, 4])
def test_a_snapshot_restores_both_allocators(page: int) -> None:
    """After restore_state the slots allocated or freed since are as they were, the mapping included."""
    allocator = swa_allocator(8 * page, 6 * page, page)
    kept = must(allocator.alloc(2 * page))
    window_slots = allocator.translate_loc_from_full_to_swa(kept)
    state = allocator.backup_state()
    allocator.alloc(3 * page)
    allocator.free(kept)
    allocator.restore_state(state)
    assert sizes(allocator) == (6 * page, 4 * page)
    assert torch.equal(allocator.translate_loc_from_full_to_swa(kept), window_slots)
    allocator.check()
    with pytest.raises(ShapeError, match="no snapshot"):
        allocator.restore_state(TokenToKVPoolAllocator(4, torch.bfloat16, "cpu", None, True).backup_state())
    allocator.clear()
    assert sizes(allocator) == (8 * page, 6 * page) and not allocator.full_to_swa_index_mapping.any()
    allocator.check()


@pytest.mark.parametrize("page", [1, 4])
def test_bad_frees_raise_and_change_nothing(page: int) -> None:
    """Slots freed twice, never allocated, or of page 0 raise DoubleFree, and both allocators stay as they were."""
    allocator = swa_allocator(8 * page, 8 * page, page)
    slots, gone = must(allocator.alloc(3 * page)), must(allocator.alloc(page))
    allocator.free(gone)
    mapping = allocator.full_to_swa_index_mapping.clone()
    for bad in (gone, torch.tensor([0]), torch.tensor([99 * page]), torch.cat((slots, gone))):
        with pytest.raises(DoubleFree):
            allocator.free(bad)
        assert sizes(allocator) == (5 * page, 5 * page)
        assert torch.equal(mapping, allocator.full_to_swa_index_mapping)
    if page == 1:
        with pytest.raises(DoubleFree, match="twice in one call"):
            allocator.free_swa(torch.cat((slots, slots)))
        assert sizes(allocator) == (5, 5) and torch.equal(mapping, allocator.full_to_swa_index_mapping)
    allocator.free_swa(torch.tensor([0, 99 * page]))
    allocator.check()


def test_filling_a_page_needs_its_window_page() -> None:
    """Tokens that would fill a page whose window slots were freed raise, and both allocators stay as they were."""
    allocator = swa_allocator(16, 16, 4)
    slots = must(extend(allocator, [0], [6], [-1]))
    allocator.free_swa(slots)
    before = sizes(allocator)
    with pytest.raises(InvariantError, match="were freed, and new tokens would fill"):
        extend(allocator, [6], [12], [int(slots[-1])])
    with pytest.raises(InvariantError, match="were freed, and new tokens would fill"):
        decode(allocator, [7], [int(slots[-1])])
    with pytest.raises(ShapeError, match="extend_num_tokens=3"):
        lens = torch.tensor([0]), torch.tensor([5])
        swa_allocator(16, 16).alloc_extend(lens[0], lens[0], lens[1], lens[1], torch.tensor([-1]), 3)
    assert sizes(allocator) == before
    allocator.check()


def test_check_finds_what_is_wrong() -> None:
    """A mapping that points at free slots, twice at one, or at another offset, and a lost window page, are listed."""
    allocator = swa_allocator(16, 16, 4)
    slots = must(allocator.alloc(8))
    mapping = allocator.full_to_swa_index_mapping
    good = mapping.clone()
    for wrong, message in (
        ({int(slots[0]): int(good[slots[4]])}, "two full slots are mapped to one"),
        ({int(slots[0]): int(good[slots[0]]) + 1, int(slots[1]): 0}, "another offset"),
        ({12: 12}, r"full slots \[12\] are free and mapped"),
        ({int(s): 0 for s in slots[:4]}, "2 window pages are allocated, and 1 are mapped"),
    ):
        for slot, window_slot in wrong.items():
            mapping[slot] = window_slot
        with pytest.raises(InvariantError, match=message):
            allocator.check()
        mapping.copy_(good)
    allocator.check()
    with pytest.raises(ConfigError, match="size=3 holds no page"):
        swa_allocator(16, 3, 4)


@pytest.mark.parametrize("page", [1, 4])
def test_windows_move_to_other_full_slots(device: str, page: int) -> None:
    """After a move the target slots are mapped to the window slots of the sources, in order, and only their free frees
    them."""
    allocator = swa_allocator(8 * page, 8 * page, page, device)
    old, new = must(allocator.alloc(3 * page)), must(allocator.alloc(3 * page))
    allocator.free_swa(old[page:])
    window_slots = allocator.translate_loc_from_full_to_swa(new)
    allocator.move_window(new[page:], old[page:])
    allocator.move_window(new[:0], old[:0])
    allocator.check()
    assert torch.equal(allocator.translate_loc_from_full_to_swa(old[page:]), window_slots[page:])
    assert allocator.translate_loc_from_full_to_swa(new).tolist() == window_slots[:page].tolist() + [0] * (2 * page)
    allocator.free(new)
    assert sizes(allocator) == (5 * page, 5 * page)
    assert torch.equal(allocator.translate_loc_from_full_to_swa(old[page:]), window_slots[page:])
    allocator.free(old)
    assert sizes(allocator) == (8 * page, 8 * page)
    allocator.check()


def test_windows_that_cannot_move_stay() -> None:
    """Unmapped sources, mapped targets, other numbers and other offsets raise, and the mapping stays."""
    allocator = swa_allocator(32, 32, 4)
    slots = must(allocator.alloc(16))
    allocator.free_swa(slots[:8])
    mapping = allocator.full_to_swa_index_mapping.clone()
    for source, target, error, message in (
        (slots[:4], slots[4:8], InvariantError, "are unmapped"),
        (slots[8:12], slots[12:], InvariantError, "are mapped already"),
        (slots[8:12], slots[:8], ShapeError, "4 full slots for 8"),
        (slots[9:13], slots[:4], ShapeError, "other offsets"),
    ):
        with pytest.raises(error, match=message):
            allocator.move_window(source, target)
        assert torch.equal(mapping, allocator.full_to_swa_index_mapping)
    allocator.check()


def test_stats_are_of_the_fuller_allocator() -> None:
    """Pressure follows the allocator that runs out first."""
    allocator = swa_allocator(100, 20)
    slots = must(allocator.alloc(18))
    stats = allocator.get_stats()
    assert (stats["total_tokens"], stats["used_tokens"], stats["free_pages"]) == (20, 18, 2)
    assert stats["utilization"] == 0.9 and allocator.check_memory_pressure() == "high"
    allocator.free_swa(slots)
    assert allocator.get_stats()["total_tokens"] == 100 and allocator.check_memory_pressure() == "low"
    assert "full:" in allocator.debug_print() and "swa:" in allocator.debug_print()


@given(st.lists(st.tuples(st.sampled_from("aaaewfgm"), st.integers(0, 1 << 16)), max_size=60), st.sampled_from([1, 4]))
def test_any_history_conserves_slots(history: list[tuple[str, int]], page: int) -> None:
    """Over any allocs, extends, window frees, frees and groups, each slot has one owner and all are free at the end."""
    allocator = swa_allocator(12 * page, 7 * page, page)
    held: list[torch.Tensor] = []
    for action, choice in history:
        if action == "a":
            slots = allocator.alloc(choice % 4 * page)
            held += [] if slots is None else [slots]
        elif action == "e":
            slots = extend(allocator, [0], [1 + choice % (2 * page)], [-1])
            held += [] if slots is None else [slots]
        elif action == "w" and held:
            allocator.free_swa(held[choice % len(held)])
        elif action == "f" and held:
            allocator.free(held.pop(choice % len(held)))
        elif action == "g" and len(held) > 1:
            allocator.free_group_begin()
            allocator.free(held.pop(choice % len(held)))
            allocator.free_swa(held[choice % len(held)])
            allocator.free_group_end()
        elif action == "m" and len(held) > 1:
            source, target = (held[at % len(held)] for at in (choice, choice + 1))
            give, take = (allocator.translate_loc_from_full_to_swa(slots) > 0 for slots in (source, target))
            if len(source) == len(target) >= page and len(source) % page == 0 and give.all() and not take.any():
                allocator.move_window(source, target)
        allocator.check()
        owned = torch.cat(held) if held else torch.empty(0, dtype=torch.int64)
        assert owned.unique().numel() == owned.numel()
        assert allocator.full_available_size() == (12 - (owned // page).unique().numel()) * page
        window_slots = allocator.translate_loc_from_full_to_swa(owned)
        assert allocator.swa_available_size() == (7 - (window_slots[window_slots > 0] // page).unique().numel()) * page
    for slots in held:
        allocator.free(slots)
    assert sizes(allocator) == (12 * page, 7 * page)
    allocator.check()
