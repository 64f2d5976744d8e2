"""The allocator of models with sliding windows: full slots for full layers, mapped to window slots for window layers.

    full slots     callers allocate, keep and free full slots
    window slots   full slot s is mapped to full_to_swa_index_mapping[s]; 0: unmapped

Complete pages are mapped: the slots of a full page are mapped to the slots of one window page, at the same offsets. The
allocator owns the full allocator, the window allocator and the mapping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hicache.alloc.base import AllocatorState, BaseTokenToKVPoolAllocator, SlotStore
from hicache.alloc.paged import PagedTokenToKVPoolAllocator
from hicache.alloc.token import TokenToKVPoolAllocator
from hicache.errors import DoubleFree, InvariantError, ShapeError
from hicache.kernels.swa import translate_slots
from hicache.metrics import PoolStats


class WindowStore(SlotStore, Protocol):
    """The methods of a pool that this allocator calls. The pool reads the registered mapping, and the allocator writes
    the mapping in place."""

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class SWAAllocatorState(AllocatorState):
    """A snapshot of both allocators and of the mapping; the inherited fields belong to the full allocator."""

    full: AllocatorState
    swa: AllocatorState
    mapping: torch.Tensor


class SWATokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Allocates from `full_attn_allocator` and `swa_attn_allocator` together. Scheduler thread only.

    An allocation takes slots from both allocators or from neither. `free_swa` frees only window slots; a later `free`
    of the same full slots frees the full slots. A free reads the mapping at once, even within a free group, because the
    full slots may be mapped for another owner when the group ends. To find the slots that are still mapped, the host
    waits for the device. `free_pages` and `release_pages` are the properties of the full allocator.
    """

    def __init__(
        self,
        size: int,
        size_swa: int,
        page_size: int,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: WindowStore | None,
        need_sort: bool,
    ) -> None:
        """Create both allocators with all slots free. `size`, `size_swa`: numbers of full slots and of window slots,
        without page 0. Raises ConfigError if either number is below one page."""

        def allocator_of(tokens: int) -> TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator:
            if page_size == 1:
                return TokenToKVPoolAllocator(tokens, dtype, device, None, need_sort)
            return PagedTokenToKVPoolAllocator(tokens, page_size, dtype, device, None, need_sort)

        self.full_attn_allocator = allocator_of(size)
        self.swa_attn_allocator = allocator_of(size_swa)
        self.full_to_swa_index_mapping = torch.zeros(
            size + page_size, dtype=torch.int64, device=self.full_attn_allocator.device
        )
        num_pages = size // page_size
        self._mapping_by_page = self.full_to_swa_index_mapping[: (num_pages + 1) * page_size].view(-1, page_size)
        # The first window slot of every page. On the CPU this is a numpy view, because numpy reads a few elements much
        # faster than torch.
        self._first_on_host = self._mapping_by_page[:, 0].numpy() if self._mapping_by_page.is_cpu else None
        self.size_swa = size_swa
        self._num_unmapped = 0
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)
        if kvcache is not None:
            kvcache.register_mapping(self.full_to_swa_index_mapping)

    def full_available_size(self) -> int:
        return self.full_attn_allocator.available_size()

    def swa_available_size(self) -> int:
        return self.swa_attn_allocator.available_size()

    def available_size(self) -> int:
        """Return the number of tokens that can be allocated now, the smaller one of the two allocators' numbers."""
        return min(self.full_available_size(), self.swa_available_size())

    def translate_loc_from_full_to_swa(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the window slots of full slots, int64 in the shape of `loc`: 0 for unmapped slots; -1 stays -1."""
        return translate_slots(self.full_to_swa_index_mapping, loc, self._kernels)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Allocate `need_size` full slots, each mapped to a new window slot. Returns None, without any change, if
        either allocator has too few free slots."""
        if need_size > self.available_size():
            return None
        full, swa = self.full_attn_allocator.alloc(need_size), self.swa_attn_allocator.alloc(need_size)
        return self._mapped(full, swa)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Allocate from both allocators as `PagedTokenToKVPoolAllocator.alloc_extend` does. `last_loc`: full slots.

        If a prefix ends within a page, its last token must still be mapped, because new tokens fill the rest of this
        page.
        """
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        if isinstance(full, TokenToKVPoolAllocator) or isinstance(swa, TokenToKVPoolAllocator):
            return self.alloc(_grown(prefix_lens_cpu, seq_lens_cpu, extend_num_tokens))
        new_pages = _pages(seq_lens_cpu, self.page_size) - _pages(prefix_lens_cpu, self.page_size)
        if int(new_pages.sum()) * self.page_size > self.available_size():
            return None
        last_window_slots = self._last_window_slots(last_loc, prefix_lens)  # raises before anything is allocated
        lens = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu)
        full_slots = full.alloc_extend(*lens, last_loc, extend_num_tokens)
        return self._mapped(full_slots, swa.alloc_extend(*lens, last_window_slots, extend_num_tokens))

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Allocate from both allocators as `PagedTokenToKVPoolAllocator.alloc_decode` does; see `alloc_extend`."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        if isinstance(full, TokenToKVPoolAllocator) or isinstance(swa, TokenToKVPoolAllocator):
            return self.alloc(seq_lens_cpu.numel())
        new_pages = int(((seq_lens_cpu - 1) % self.page_size == 0).sum())
        if new_pages * self.page_size > self.available_size():
            return None
        last_window_slots = self._last_window_slots(last_loc, seq_lens - 1)
        full_slots = full.alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        return self._mapped(full_slots, swa.alloc_decode(seq_lens, seq_lens_cpu, last_window_slots))

    def free(self, free_index: torch.Tensor) -> None:
        """Free full slots, and the window slots to which they are still mapped. Raises DoubleFree."""
        if not free_index.numel():
            return
        pages = self._pages_of(free_index)
        self.full_attn_allocator.free_pages_of(pages)
        self._free_windows(pages)

    def free_run(self, slots: torch.Tensor, first_position: int = 0) -> None:
        """Free the slots of consecutive tokens, as in the base class. The mapping gives the window pages of these
        slots."""
        if first_position % self.page_size:
            self.free(slots)
        elif slots.numel():
            pages = self.full_attn_allocator._pages_of_run(slots)
            self.full_attn_allocator.free_pages_of(pages)
            self._free_windows(pages)

    def free_swa(self, free_index: torch.Tensor) -> None:
        """Free the window slots of full slots. The full slots must be complete pages; they stay allocated and are no
        longer mapped."""
        if not free_index.numel():
            return
        pages = self._pages_of(free_index)
        if self.page_size == 1 and self.device.type != "cpu" and pages.unique().numel() != pages.numel():
            raise DoubleFree(f"slots {pages[:8].tolist()}… are freed twice in one call")
        self._free_windows(pages)

    def alloc_window(self, full_slots: torch.Tensor) -> bool:
        """Map unmapped full slots, complete pages, to new window slots. Returns False if too few window slots are free.

        Raises InvariantError, on the CPU and in debug mode, if one of the full slots is already mapped.
        """
        if full_slots.numel() > self.swa_available_size():
            return False
        if (self._debug or self.device.type == "cpu") and self.full_to_swa_index_mapping[full_slots].any():
            raise InvariantError(type(self).__name__, [f"slots {full_slots[:8].tolist()}… are mapped already"])
        self._mapped(full_slots, self.swa_attn_allocator.alloc(full_slots.numel()))
        return True

    def move_window(self, from_slots: torch.Tensor, to_slots: torch.Tensor) -> None:
        """Map full slots `to_slots` to the window slots of `from_slots`, one to one, and unmap `from_slots`.
        `from_slots` and `to_slots` are complete pages.

        Does not wait for the device. Raises InvariantError, on the CPU and in debug mode, if one of `from_slots` is
        unmapped or one of `to_slots` is mapped. Raises ShapeError if `from_slots` and `to_slots` differ in their number
        or in their offsets within pages.
        """
        if from_slots.numel() != to_slots.numel():
            raise ShapeError(f"window slots of {from_slots.numel()} full slots for {to_slots.numel()} others")
        if not from_slots.numel():
            return
        mapping = self.full_to_swa_index_mapping
        window_slots = mapping[from_slots]
        if self._debug or self.device.type == "cpu":
            self._check_move(from_slots, window_slots, to_slots)
        mapping[to_slots] = window_slots
        mapping[from_slots] = 0

    def unmap(self, full_slots: torch.Tensor) -> torch.Tensor:
        """Unmap full slots, complete pages, and return their window slots. The caller owns the window slots until it
        passes them to `free_unmapped`. Does not wait for the device."""
        window_slots = self.full_to_swa_index_mapping[full_slots]
        self.full_to_swa_index_mapping[full_slots] = 0
        self._num_unmapped += full_slots.numel()
        return window_slots

    def free_unmapped(self, window_slots: torch.Tensor) -> None:
        """Free window slots that `unmap` returned."""
        self.swa_attn_allocator.free_run(window_slots)
        self._num_unmapped -= window_slots.numel()

    def free_group_begin(self) -> None:
        self.full_attn_allocator.free_group_begin()
        self.swa_attn_allocator.free_group_begin()

    def free_group_end(self) -> None:
        try:
            self.full_attn_allocator.free_group_end()
        finally:
            self.swa_attn_allocator.free_group_end()

    def clear(self) -> None:
        self.full_attn_allocator.clear()
        self.swa_attn_allocator.clear()
        self.full_to_swa_index_mapping.zero_()
        self._num_unmapped = 0

    def backup_state(self) -> SWAAllocatorState:
        full, swa = self.full_attn_allocator.backup_state(), self.swa_attn_allocator.backup_state()
        mapping = self.full_to_swa_index_mapping.clone()
        return SWAAllocatorState(full.free_pages, full.release_pages, full, swa, mapping)

    def restore_state(self, state: AllocatorState) -> None:
        if not isinstance(state, SWAAllocatorState):
            raise ShapeError(f"a state of {type(state).__name__} is no snapshot of a full and a window allocator")
        self.full_attn_allocator.restore_state(state.full)
        self.swa_attn_allocator.restore_state(state.swa)
        self.full_to_swa_index_mapping.copy_(state.mapping)

    def merge_and_sort_free(self) -> None:
        self.full_attn_allocator.merge_and_sort_free()
        self.swa_attn_allocator.merge_and_sort_free()

    def get_stats(self) -> PoolStats:
        """Return the statistics of the inner allocator with the higher utilisation."""
        both = self.full_attn_allocator.get_stats(), self.swa_attn_allocator.get_stats()
        return max(both, key=lambda stats: stats["utilization"])

    def debug_print(self) -> str:
        return f"full: {self.full_attn_allocator.debug_print()}; swa: {self.swa_attn_allocator.debug_print()}"

    def check(self) -> None:
        """Raise InvariantError with all violations of both allocators and of the mapping. Not valid within a free
        group."""
        violations: list[str] = []
        for name, allocator in (("full", self.full_attn_allocator), ("swa", self.swa_attn_allocator)):
            try:
                allocator.check()
            except InvariantError as error:
                violations.extend(f"{name}: {violation}" for violation in error.violations)
        mapping = self.full_to_swa_index_mapping.cpu()
        slots = mapping.nonzero().flatten()
        window_slots = mapping[slots]
        if window_slots.unique().numel() != window_slots.numel():
            violations.append("two full slots are mapped to one window slot")
        if (slots % self.page_size != window_slots % self.page_size).any():
            violations.append("a full slot is mapped to a window slot at another offset of its page")
        for name, allocator, mapped in (
            ("full", self.full_attn_allocator, slots),
            ("swa", self.swa_attn_allocator, window_slots),
        ):
            free = torch.cat((allocator.free_pages, allocator.release_pages)).cpu()
            stale = mapped[torch.isin(mapped // self.page_size, free)]
            if stale.numel():
                violations.append(f"{name} slots {stale[:8].tolist()} are free and mapped")
        window_pages = (window_slots // self.page_size).unique().numel()
        taken = self.swa_attn_allocator.num_pages - self.swa_available_size() // self.page_size
        if window_pages + self._num_unmapped // self.page_size != taken:
            violations.append(f"{taken} window pages are allocated, and {window_pages} are mapped")
        if violations:
            raise InvariantError(type(self).__name__, violations)

    @property
    def free_pages(self) -> torch.Tensor:
        return self.full_attn_allocator.free_pages

    @free_pages.setter
    def free_pages(self, pages: torch.Tensor) -> None:
        self.full_attn_allocator.free_pages = pages

    @property
    def release_pages(self) -> torch.Tensor:
        return self.full_attn_allocator.release_pages

    @release_pages.setter
    def release_pages(self, pages: torch.Tensor) -> None:
        self.full_attn_allocator.release_pages = pages

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        return self.full_attn_allocator._pages_of(slots)

    def _free_windows(self, pages: torch.Tensor) -> None:
        """Free the window pages of distinct full pages that are mapped.

        A full page is mapped completely, to one window page, if its first slot is mapped.
        """
        if self._first_on_host is None:
            window_slots = self.translate_loc_from_full_to_swa(pages * self.page_size)
            mapped = window_slots > 0
            pages, window_pages = pages[mapped], window_slots[mapped] // self.page_size
        else:
            ids = pages.numpy()
            if np.count_nonzero(ids.view(np.uint64) >= len(self._first_on_host)):
                ids = ids[(ids >= 0) & (ids < len(self._first_on_host))]
            firsts = self._first_on_host[ids]
            if np.count_nonzero(firsts) < len(ids):
                ids, firsts = ids[firsts > 0], firsts[firsts > 0]
            pages, window_pages = torch.from_numpy(ids), torch.from_numpy(firsts // self.page_size)
        self.swa_attn_allocator.free_pages_of(window_pages)
        # Written by torch and not by numpy, because torch counts writes: the pool reuses its last translation until the
        # count changes.
        self._mapping_by_page[pages] = 0

    def _last_window_slots(self, last_loc: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
        """Return the window slots of the prefixes' last tokens; -1 for a prefix of complete pages, whose last slot is
        not needed and may be outside the window.

        New tokens may not fill the rest of a window page that was freed. In this case, the method raises InvariantError
        on the CPU and in debug mode. On CUDA the returned slot is -1, which fails the window allocator's assertion.
        """
        window_slots = self.translate_loc_from_full_to_swa(last_loc)
        needed = prefix_lens % self.page_size != 0
        if self._debug or self.device.type == "cpu":
            freed = last_loc[needed & (window_slots == 0)]
            if freed.numel():
                raise InvariantError(
                    type(self).__name__,
                    [f"the window slots of {freed[:8].tolist()} were freed, and new tokens would fill their pages"],
                )
        return torch.where(needed & (window_slots > 0), window_slots, -1)

    def _check_move(self, from_slots: torch.Tensor, window_slots: torch.Tensor, to_slots: torch.Tensor) -> None:
        if (from_slots % self.page_size != to_slots % self.page_size).any():
            raise ShapeError(
                f"slots {to_slots[:8].tolist()}… have other offsets in their pages than {from_slots[:8].tolist()}…"
            )
        violations = []
        if (window_slots == 0).any():
            violations.append(f"slots {from_slots[window_slots == 0][:8].tolist()} are unmapped")
        taken = self.full_to_swa_index_mapping[to_slots] != 0
        if taken.any():
            violations.append(f"slots {to_slots[taken][:8].tolist()} are mapped already")
        if violations:
            raise InvariantError(type(self).__name__, violations)

    def _mapped(self, full: torch.Tensor | None, swa: torch.Tensor | None) -> torch.Tensor:
        assert full is not None and swa is not None, "capacity was checked before"
        self.full_to_swa_index_mapping[full] = swa
        return full


def _pages(lens: torch.Tensor, page_size: int) -> torch.Tensor:
    return (lens + page_size - 1) // page_size


def _grown(prefix_lens_cpu: torch.Tensor, seq_lens_cpu: torch.Tensor, extend_num_tokens: int) -> int:
    """Return the number of new tokens of all sequences. Raises ShapeError if this number differs from
    `extend_num_tokens`, or if a sequence shrinks."""
    new_tokens = seq_lens_cpu - prefix_lens_cpu
    if int(new_tokens.sum()) != extend_num_tokens or (new_tokens < 0).any():
        raise ShapeError(f"extend_num_tokens={extend_num_tokens}, but the lengths grow by {new_tokens.tolist()}")
    return extend_num_tokens
