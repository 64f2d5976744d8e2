"""The allocator of models with sliding windows: a slot of the full space and its peer in the window space, or neither.

    full slots     handed out, freed and kept by callers
    window slots   the peer of full slot s is full_to_swa_index_mapping[s]; 0: none, or given back already

Pages pair as wholes: the peers of a full page's slots lie in one window page, at the same offsets. Owns two allocators
and the mapping. May import what the base may.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from hicache.alloc.base import AllocatorState, BaseTokenToKVPoolAllocator, SlotStore
from hicache.alloc.paged import PagedTokenToKVPoolAllocator
from hicache.alloc.token import TokenToKVPoolAllocator
from hicache.config import kernel_choice
from hicache.errors import DoubleFree, InvariantError, ShapeError
from hicache.kernels.swa import translate_slots
from hicache.metrics import PoolStats


class WindowStore(SlotStore, Protocol):
    """What this allocator asks of its pool: to read peers from the mapping that it goes on writing in place."""

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class SWAAllocatorState(AllocatorState):
    """A snapshot of both sides and of the mapping; the inherited fields are the full side's."""

    full: AllocatorState
    swa: AllocatorState
    mapping: torch.Tensor


class SWATokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Pairs `full_attn_allocator` and `swa_attn_allocator`. Scheduler thread only.

    What is allocated is allocated on both sides, or not at all. `free_swa` gives the window's part back alone, and a
    later `free` of the same slots gives back only what is left. Peers are looked up when a free is asked for, also
    within a group: what the mapping says when the group lands may be of another owner. Looking up which slots still
    have a peer makes the host wait for the device. `free_pages` and `release_pages` are the full side's.
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
        """`size` and `size_swa` in tokens, page 0 not counted. ConfigError below one page on either side."""

        def side(tokens: int) -> TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator:
            if page_size == 1:
                return TokenToKVPoolAllocator(tokens, dtype, device, None, need_sort)
            return PagedTokenToKVPoolAllocator(tokens, page_size, dtype, device, None, need_sort)

        self.full_attn_allocator, self.swa_attn_allocator = side(size), side(size_swa)
        self.full_to_swa_index_mapping = torch.zeros(
            size + page_size, dtype=torch.int64, device=self.full_attn_allocator.device
        )
        self.size_swa = size_swa
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)
        self._kernels = kernel_choice(self.device)
        self._offsets = torch.arange(page_size, dtype=torch.int64, device=self.device)
        if kvcache is not None:
            kvcache.register_mapping(self.full_to_swa_index_mapping)

    def full_available_size(self) -> int:
        return self.full_attn_allocator.available_size()

    def swa_available_size(self) -> int:
        return self.swa_attn_allocator.available_size()

    def available_size(self) -> int:
        """Tokens that can be handed out now: the smaller side's."""
        return min(self.full_available_size(), self.swa_available_size())

    def translate_loc_from_full_to_swa(self, loc: torch.Tensor) -> torch.Tensor:
        """Window slots of full slots, int64 in the shape of `loc`: 0 where there is no peer, and -1 stays -1."""
        return translate_slots(self.full_to_swa_index_mapping, loc, self._kernels)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """`need_size` full slots, each with a window slot; None when either side is short. As the base's."""
        if need_size > self.available_size():
            return None
        full, swa = self.full_attn_allocator.alloc(need_size), self.swa_attn_allocator.alloc(need_size)
        return self._paired(full, swa)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """As the paged allocator's, on both sides; `last_loc` are full slots.

        Where a prefix ends within a page, the window slot of its last token must not have been freed: new tokens go
        on in its page.
        """
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        if isinstance(full, TokenToKVPoolAllocator) or isinstance(swa, TokenToKVPoolAllocator):
            return self.alloc(_grown(prefix_lens_cpu, seq_lens_cpu, extend_num_tokens))
        new_pages = _pages(seq_lens_cpu, self.page_size) - _pages(prefix_lens_cpu, self.page_size)
        if int(new_pages.sum()) * self.page_size > self.available_size():
            return None
        state = full.backup_state()
        lens = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu)
        full_slots = full.alloc_extend(*lens, last_loc, extend_num_tokens)
        try:
            swa_slots = swa.alloc_extend(*lens, self._last_peers(last_loc, prefix_lens), extend_num_tokens)
        except (InvariantError, ValueError):
            full.restore_state(state)
            raise
        return self._paired(full_slots, swa_slots)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """As the paged allocator's, on both sides; see `alloc_extend`."""
        full, swa = self.full_attn_allocator, self.swa_attn_allocator
        if isinstance(full, TokenToKVPoolAllocator) or isinstance(swa, TokenToKVPoolAllocator):
            return self.alloc(seq_lens_cpu.numel())
        new_pages = int(((seq_lens_cpu - 1) % self.page_size == 0).sum())
        if new_pages * self.page_size > self.available_size():
            return None
        state = full.backup_state()
        full_slots = full.alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        try:
            swa_slots = swa.alloc_decode(seq_lens, seq_lens_cpu, self._last_peers(last_loc, seq_lens - 1))
        except (InvariantError, ValueError):
            full.restore_state(state)
            raise
        return self._paired(full_slots, swa_slots)

    def free(self, free_index: torch.Tensor) -> None:
        """Take slots back on both sides; the window's part only where `free_swa` did not before. Raises DoubleFree."""
        if not free_index.numel():
            return
        self.full_attn_allocator.free(free_index)
        self.free_swa(free_index)

    def free_run(self, slots: torch.Tensor, first_position: int = 0) -> None:
        """As the base's: the full side then needs no count; the window side is looked up as ever."""
        if not slots.numel():
            return
        self.full_attn_allocator.free_run(slots, first_position)
        self.free_swa(slots)

    def free_swa(self, free_index: torch.Tensor) -> None:
        """Take back the window slots of full slots (whole pages of them); the full slots stay handed out."""
        if not free_index.numel():
            return
        slots = free_index.to(torch.int64)
        if self.page_size > 1:
            pages = (slots // self.page_size).unique()
            slots = (pages[:, None] * self.page_size + self._offsets).reshape(-1)
        peers = self.translate_loc_from_full_to_swa(slots)
        held = peers > 0
        slots, peers = slots[held], peers[held]
        if slots.numel() != peers.unique().numel():
            raise DoubleFree(f"window slots {peers[:8].tolist()} are freed twice in one call")
        self.swa_attn_allocator.free(peers)
        self.full_to_swa_index_mapping[slots] = 0

    def alloc_full(self, need_size: int) -> torch.Tensor | None:
        """`need_size` full slots without window slots, for what lies before every window; None when short."""
        return self.full_attn_allocator.alloc(need_size)

    def alloc_window(self, full_slots: torch.Tensor) -> bool:
        """Give full slots (whole pages of them) that have no peer one each; False when the window side is short.

        On the CPU and in debug mode InvariantError where one has a peer.
        """
        if full_slots.numel() > self.swa_available_size():
            return False
        if (self._debug or self.device.type == "cpu") and self.full_to_swa_index_mapping[full_slots].any():
            raise InvariantError(type(self).__name__, [f"some of slots {full_slots[:8].tolist()}… have window slots"])
        self._paired(full_slots, self.swa_attn_allocator.alloc(full_slots.numel()))
        return True

    def move_window(self, from_slots: torch.Tensor, to_slots: torch.Tensor) -> None:
        """Pair the window slots of full slots `from_slots` with `to_slots` instead, one to one; whole pages of both.

        No wait for the device. On the CPU and in debug mode InvariantError where one has no window slot to give, or
        has one already where it is to get one. ShapeError where their numbers or offsets within pages differ.
        """
        if from_slots.numel() != to_slots.numel():
            raise ShapeError(f"window slots of {from_slots.numel()} full slots for {to_slots.numel()} others")
        if not from_slots.numel():
            return
        mapping = self.full_to_swa_index_mapping
        peers = mapping[from_slots]
        if self._debug or self.device.type == "cpu":
            self._check_move(from_slots, peers, to_slots)
        mapping[to_slots] = peers
        mapping[from_slots] = 0

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

    def backup_state(self) -> SWAAllocatorState:
        full, swa = self.full_attn_allocator.backup_state(), self.swa_attn_allocator.backup_state()
        mapping = self.full_to_swa_index_mapping.clone()
        return SWAAllocatorState(full.free_pages, full.release_pages, full, swa, mapping)

    def restore_state(self, state: AllocatorState) -> None:
        if not isinstance(state, SWAAllocatorState):
            raise ShapeError(f"a state of {type(state).__name__} is no snapshot of this allocator's two sides")
        self.full_attn_allocator.restore_state(state.full)
        self.swa_attn_allocator.restore_state(state.swa)
        self.full_to_swa_index_mapping.copy_(state.mapping)

    def merge_and_sort_free(self) -> None:
        self.full_attn_allocator.merge_and_sort_free()
        self.swa_attn_allocator.merge_and_sort_free()

    def get_stats(self) -> PoolStats:
        """The statistics of the side that is fuller."""
        sides = self.full_attn_allocator.get_stats(), self.swa_attn_allocator.get_stats()
        return max(sides, key=lambda stats: stats["utilization"])

    def debug_print(self) -> str:
        return f"full: {self.full_attn_allocator.debug_print()}; swa: {self.swa_attn_allocator.debug_print()}"

    def check(self) -> None:
        """Raise InvariantError with all violations of both sides and of the mapping. Not within a free group."""
        violations: list[str] = []
        for name, side in (("full", self.full_attn_allocator), ("swa", self.swa_attn_allocator)):
            try:
                side.check()
            except InvariantError as error:
                violations.extend(f"{name}: {violation}" for violation in error.violations)
        mapping = self.full_to_swa_index_mapping.cpu()
        slots = mapping.nonzero().flatten()
        peers = mapping[slots]
        if peers.unique().numel() != peers.numel():
            violations.append("two full slots have one window slot")
        if (slots % self.page_size != peers % self.page_size).any():
            violations.append("a window slot stands at another offset of its page than its full slot")
        for name, side, held in (("full", self.full_attn_allocator, slots), ("swa", self.swa_attn_allocator, peers)):
            free = torch.cat((side.free_pages, side.release_pages)).cpu()
            stale = held[torch.isin(held // self.page_size, free)]
            if stale.numel():
                violations.append(f"{name} slots {stale[:8].tolist()} are free and paired")
        window_pages = (peers // self.page_size).unique().numel()
        taken = self.swa_attn_allocator.num_pages - self.swa_available_size() // self.page_size
        if window_pages != taken:
            violations.append(f"{taken} window pages are handed out, and {window_pages} have a full slot")
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

    def _last_peers(self, last_loc: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
        """Window slots of the prefixes' last tokens. On the CPU and in debug mode InvariantError where one is needed
        and was freed."""
        peers = self.translate_loc_from_full_to_swa(last_loc)
        if self._debug or self.device.type == "cpu":
            needed = prefix_lens % self.page_size != 0
            freed = last_loc[needed & (peers == 0)]
            if freed.numel():
                raise InvariantError(
                    type(self).__name__,
                    [f"the window slots of {freed[:8].tolist()} were freed, and new tokens go on in their pages"],
                )
            # A prefix of whole pages needs no last token, which may be out of the window.
            peers = torch.where(needed, peers, -1)
        return peers

    def _check_move(self, from_slots: torch.Tensor, peers: torch.Tensor, to_slots: torch.Tensor) -> None:
        if (from_slots % self.page_size != to_slots % self.page_size).any():
            raise ShapeError(f"slots {to_slots[:8].tolist()}… stand at other offsets than {from_slots[:8].tolist()}…")
        violations = []
        if (peers == 0).any():
            violations.append(f"slots {from_slots[peers == 0][:8].tolist()} have no window slots to give")
        taken = self.full_to_swa_index_mapping[to_slots] != 0
        if taken.any():
            violations.append(f"slots {to_slots[taken][:8].tolist()} have window slots already")
        if violations:
            raise InvariantError(type(self).__name__, violations)

    def _paired(self, full: torch.Tensor | None, swa: torch.Tensor | None) -> torch.Tensor:
        assert full is not None and swa is not None, "room on both sides was counted before"
        self.full_to_swa_index_mapping[full] = swa
        return full


def _pages(lens: torch.Tensor, page_size: int) -> torch.Tensor:
    return (lens + page_size - 1) // page_size


def _grown(prefix_lens_cpu: torch.Tensor, seq_lens_cpu: torch.Tensor, extend_num_tokens: int) -> int:
    """The tokens by which all sequences grow. ShapeError where the caller's sum is another, or one shrinks."""
    new_tokens = seq_lens_cpu - prefix_lens_cpu
    if int(new_tokens.sum()) != extend_num_tokens or (new_tokens < 0).any():
        raise ShapeError(f"extend_num_tokens={extend_num_tokens}, but the lengths grow by {new_tokens.tolist()}")
    return extend_num_tokens
