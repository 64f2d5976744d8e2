"""The sliding-window allocator compared with a model, a dict from full slots to window slots."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alloc_case import decode, extend, free_list, must, single, windowed
from hicache.alloc import SWATokenToKVPoolAllocator
from hicache.errors import ConfigError, DoubleFree, InvariantError, ShapeError


def sizes(allocator: SWATokenToKVPoolAllocator) -> tuple[int, int]:
    return allocator.full_available_size(), allocator.swa_available_size()


def lists(allocator: SWATokenToKVPoolAllocator) -> list[object]:
    """The complete state of an allocator."""
    both = (allocator.full_attn_allocator, allocator.swa_attn_allocator)
    return [*map(free_list, both), allocator.full_to_swa_index_mapping.tolist()]


class Model:
    """A model of the allocator: sequences of full slots, and the window slot of each slot that has one."""

    def __init__(self, allocator: SWATokenToKVPoolAllocator) -> None:
        self.allocator, self.device = allocator, allocator.device
        self.held: list[list[int]] = []
        self.window_of: dict[int, int] = {}
        self.snapshot: tuple[object, list[list[int]], dict[int, int]] | None = None

    def tensor(self, slots: list[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    def take(self, slots: torch.Tensor | None, num_pages: int, before: list[object]) -> list[int]:
        """Check an allocation: new slots with new window slots, or None if one of the allocators has too few pages."""
        page = self.allocator.page_size
        if slots is None:
            full = 12 - len({slot // page for held in self.held for slot in held})
            swa = 7 - len({slot // page for slot in self.window_of.values()})
            assert num_pages > min(full, swa) and lists(self.allocator) == before
            return []
        windows = self.allocator.translate_loc_from_full_to_swa(slots).tolist()
        assert all(slot >= page for slot in windows)
        assert not set(windows) & set(self.window_of.values())
        self.window_of.update(zip(slots.tolist(), windows, strict=True))
        return slots.tolist()

    def step(self, action: str, choice: int) -> None:
        allocator, held, page = self.allocator, self.held, self.allocator.page_size
        before = lists(allocator)
        chosen = held[choice % len(held)] if held else []
        if action == "alloc":
            held.append(self.take(allocator.alloc(choice % 4 * page), choice % 4, before))
        elif action == "extend":
            length = 1 + choice % (2 * page)
            held.append(self.take(extend(allocator, [0], [length], [-1]), -(-length // page), before))
        elif action == "decode" and chosen and (len(chosen) % page == 0 or chosen[-1] in self.window_of):
            new = decode(allocator, [len(chosen) + 1], [chosen[-1]])
            chosen += self.take(new, int(len(chosen) % page == 0), before)
        elif action == "leave":
            allocator.free_swa(self.tensor(chosen))
            self.forget(chosen)
        elif action == "free" and chosen:
            allocator.free(self.tensor(chosen))
            self.forget(held.pop(choice % len(held)))
        elif action == "group" and len(held) > 1:
            allocator.free_group_begin()
            removed = held.pop(choice % len(held))
            allocator.free(self.tensor(removed))
            allocator.free_swa(self.tensor(held[0]))
            allocator.free_group_end()
            self.forget(removed + held[0])
        elif action == "move" and len(held) > 1:
            source, target = chosen, held[(choice + 1) % len(held)]
            complete = len(source) == len(target) and len(source) % page == 0
            if complete and self.window_of.keys() >= set(source) and not self.window_of.keys() & set(target):
                allocator.move_window(self.tensor(source), self.tensor(target))
                self.window_of.update({to: self.window_of.pop(slot) for slot, to in zip(source, target, strict=True)})
        elif action == "window" and chosen and len(chosen) % page == 0 and not self.window_of.keys() & set(chosen):
            if allocator.alloc_window(self.tensor(chosen)):
                self.take(self.tensor(chosen), 0, before)
            else:
                assert len(chosen) > sizes(allocator)[1] and lists(allocator) == before
        elif action == "snapshot":
            self.snapshot = (allocator.backup_state(), [list(slots) for slots in held], dict(self.window_of))
        elif action == "restore" and self.snapshot is not None:
            allocator.restore_state(self.snapshot[0])  # type: ignore[arg-type]
            self.held, self.window_of = [list(slots) for slots in self.snapshot[1]], dict(self.snapshot[2])

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self.window_of.pop(slot, None)

    def check(self) -> None:
        allocator, page = self.allocator, self.allocator.page_size
        owned = [slot for slots in self.held for slot in slots]
        assert len(set(owned)) == len(owned)
        windows = allocator.translate_loc_from_full_to_swa(self.tensor(owned)).tolist()
        assert windows == [self.window_of.get(slot, 0) for slot in owned]
        assert all(slot % page == i % page for slots in self.held for i, slot in enumerate(slots))
        assert all(full % page == swa % page for full, swa in self.window_of.items())
        taken = len({slot // page for slot in owned}), len({slot // page for slot in self.window_of.values()})
        assert sizes(allocator) == ((12 - taken[0]) * page, (7 - taken[1]) * page)
        assert allocator.available_size() == min(sizes(allocator))
        allocator.check()


ACTIONS = ["alloc", "alloc", "extend", "decode", "leave", "free", "group", "move", "window", "snapshot", "restore"]
STEPS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1 << 16)), min_size=40, max_size=60)


@given(history=STEPS, page=st.sampled_from([1, 4]))
def test_any_history_conserves_slots(device: str, history: list[tuple[str, int]], page: int) -> None:
    """Over any allocations, frees, groups, moves and snapshots each full slot has one owner, and its own window slot at
    the same offset of a page, or none. An allocation for which one allocator lacks capacity changes nothing. In the end
    all slots are free."""
    model = Model(windowed(12 * page, 7 * page, page, device))
    for action, choice in history:
        model.step(action, choice)
        model.check()
    for slots in model.held:
        model.allocator.free(model.tensor(slots))
    assert sizes(model.allocator) == (12 * page, 7 * page) and not model.allocator.full_to_swa_index_mapping.any()
    model.allocator.check()


@pytest.mark.parametrize("page", [1, 4])
def test_the_mapping_is_read_when_a_free_is_requested(device: str, page: int) -> None:
    """A free in a group frees the window slots that are mapped then, not window slots that are mapped later in the
    group."""
    allocator = windowed(4 * page, 4 * page, page, device, need_sort=False)
    a, b = must(allocator.alloc(2 * page)), must(allocator.alloc(2 * page))
    allocator.free_group_begin()
    allocator.free(a)
    assert sizes(allocator) == (0, 0)
    assert not allocator.translate_loc_from_full_to_swa(a).any()
    # The slots of `a` get new window slots before the group ends, which the group must not free.
    allocator.full_to_swa_index_mapping[a] = allocator.translate_loc_from_full_to_swa(b)
    allocator.full_to_swa_index_mapping[b] = 0
    kept = allocator.translate_loc_from_full_to_swa(a)
    allocator.free_group_end()
    assert sizes(allocator) == (2 * page, 2 * page)
    assert not torch.isin(kept // page, allocator.swa_attn_allocator.free_pages).any()
    with pytest.raises(RuntimeError):
        allocator.free_group_end()


@pytest.mark.parametrize("page", [1, 4])
def test_bad_calls_raise_and_change_nothing(page: int) -> None:
    """These calls raise and change neither allocator: freeing slots that are free or were never allocated; extending a
    page whose window was freed; moving windows that cannot move; wrong lengths; restoring a snapshot of another
    allocator."""
    allocator = windowed(12 * page, 12 * page, page)
    slots, bare, removed = (must(allocator.alloc(n * page)) for n in (3, 3, 1))
    allocator.free_swa(bare)
    allocator.free(removed)
    lens = torch.tensor([0]), torch.tensor([5])
    wrong: list[tuple[type[Exception], Callable[[], object]]] = [
        *((DoubleFree, lambda bad=bad: allocator.free(bad)) for bad in (removed, lens[0], lens[1] * 99 * page)),
        (DoubleFree, lambda: allocator.free(torch.cat((slots, removed)))),
        (InvariantError, lambda: allocator.move_window(bare[:page], bare[page : 2 * page])),
        (InvariantError, lambda: allocator.move_window(slots[:page], slots[page : 2 * page])),
        (ShapeError, lambda: allocator.move_window(slots[:page], bare[: 2 * page])),
        (InvariantError, lambda: allocator.alloc_window(slots[:page])),
        (ShapeError, lambda: allocator.alloc_extend(lens[0], lens[0], lens[1], lens[1], lens[0] - 1, 3)),
        (ShapeError, lambda: allocator.restore_state(single(4).backup_state())),
    ]
    if page == 1:
        wrong += [(DoubleFree, lambda: allocator.free_swa(torch.cat((slots, slots))))]
    else:
        wrong += [
            (InvariantError, lambda: extend(allocator, [6], [12], [int(bare[5])])),
            (InvariantError, lambda: decode(allocator, [7], [int(bare[5])])),
            (ShapeError, lambda: allocator.move_window(slots[1 : page + 1], bare[:page])),
        ]
    before = lists(allocator)
    for error, call in wrong:
        with pytest.raises(error):
            call()
        assert lists(allocator) == before
    allocator.free_swa(torch.tensor([0, 99 * page]))
    allocator.move_window(slots[:0], bare[:0])
    assert lists(allocator) == before
    allocator.check()
    # Slots that can move have moved. Then the last window slots are mapped to slots without windows.
    windows = allocator.translate_loc_from_full_to_swa(slots).tolist()
    allocator.move_window(slots, bare)
    assert allocator.translate_loc_from_full_to_swa(torch.cat((slots, bare))).tolist() == [0] * 3 * page + windows
    must(allocator.alloc(6 * page))
    assert allocator.alloc_window(slots) and sizes(allocator) == (0, 0)
    allocator.check()
    allocator.clear()
    assert sizes(allocator) == (12 * page, 12 * page) and not allocator.full_to_swa_index_mapping.any()
    allocator.check()


def test_check_reports_every_violation() -> None:
    """`check` lists a mapping that points at free slots, at one slot twice, or at another offset, and a lost window
    page."""
    allocator = windowed(16, 16, 4)
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
    allocator.full_attn_allocator.free_pages = torch.tensor([9])
    with pytest.raises(InvariantError, match="full: "):
        allocator.check()
    with pytest.raises(ConfigError):
        windowed(16, 3, 4)


def test_stats_are_of_the_fuller_allocator() -> None:
    """The pressure is that of the allocator that will be full first."""
    allocator = windowed(100, 20)
    slots = must(allocator.alloc(18))
    stats = allocator.get_stats()
    assert (stats["total_tokens"], stats["used_tokens"], stats["free_pages"]) == (20, 18, 2)
    assert stats["utilization"] == 0.9 and allocator.check_memory_pressure() == "high"
    allocator.free_swa(slots)
    assert allocator.get_stats()["total_tokens"] == 100 and allocator.check_memory_pressure() == "low"
    assert "full:" in allocator.debug_print() and "swa:" in allocator.debug_print()
