"""The contract of all slot allocators, and the free list that they share.

    slots [0, page_size)                          page 0, the sink for padding: never handed out
    slots [page_size, (num_pages + 1)*page_size)  pages 1..num_pages, each free or handed out, never both

Owns the free list; the pool's tensors belong to the pool. May import layout, config, metrics, errors and kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hicache.alloc.on_host import all_once_and_flagged, ascending, flag, joined
from hicache.config import debug_checks
from hicache.errors import ConfigError, DoubleFree, InvariantError, ShapeError
from hicache.metrics import PoolStats, Pressure, memory_pressure, pool_stats

_MAX_PARTS = 64

CpuCopy = list[list[tuple[torch.Tensor, ...]]]


class SlotStore(Protocol):
    """What an allocator asks of the pool behind it."""

    def get_cpu_copy(self, indices: torch.Tensor) -> CpuCopy: ...

    def load_cpu_copy(self, kv_cache_cpu: CpuCopy, indices: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class AllocatorState:
    """A snapshot of the free list. Its tensors are never written, so it outlives later calls."""

    free_pages: torch.Tensor
    release_pages: torch.Tensor


class BaseTokenToKVPoolAllocator(ABC):
    """Hands out slots of a pool whole or not at all, and takes them back.

    Called by the scheduler thread only; needs no lock. `free_pages` and `release_pages` are int64 page ids on
    `device` (slot ids where the page is one token) and are replaced, never written in place. `free_pages` is handed
    out from the front; with `need_sort`, freed pages wait in `release_pages` until an allocation is short, then both
    are merged in ascending order, so that long runs come back.

    `release_pages` is kept in parts and joined when somebody looks at it, so that a free costs what it frees.

    An allocator of one's own defines `clear`, `alloc` and `free`, and keeps its free slots as it likes; the rest works
    on `free_pages` and `release_pages`, where it has them.

    Frees of what is not handed out raise `DoubleFree` on CPU tensors and with HICACHE_DEBUG=1; elsewhere finding
    them would make the host wait for the device, and `check()` finds them.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: SlotStore | None,
        need_sort: bool,
    ) -> None:
        """`size` in tokens, page 0 not counted; a rest below a whole page stays unused. ConfigError below one page."""
        if page_size < 1 or size < page_size:
            raise ConfigError(f"size={size} holds no page of page_size={page_size}; raise device_tokens")
        self.size, self.page_size, self.dtype = size, page_size, dtype
        self.device = torch.device(device)
        self.need_sort = need_sort
        self.num_pages = size // page_size
        self._kvcache = kvcache
        self._debug = debug_checks()
        self._group: list[torch.Tensor] | None = None
        self._released: list[torch.Tensor] = []
        self._num_released = 0
        # One flag a page, kept only where looking at it is free of waiting: True while handed out.
        self._owned: torch.Tensor | None = None
        self.clear()

    @abstractmethod
    def alloc(self, need_size: int) -> torch.Tensor | None:
        """`need_size` slots, int64, or None when short; None changes nothing, 0 is an empty tensor."""

    def alloc_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Slots that sequences grow by, within their pages and in new ones. NotImplementedError without pages."""
        raise self._has_no_pages()

    def alloc_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """One slot more for each sequence. NotImplementedError without pages."""
        raise self._has_no_pages()

    def free(self, free_index: torch.Tensor) -> None:
        """Take slots back; in a group, when the group ends. Copies what it keeps. Raises DoubleFree."""
        if not free_index.numel():
            return
        if self._group is not None:
            self._group.append(free_index.clone())
        else:
            self._land(free_index)

    def free_run(self, slots: torch.Tensor, first_position: int = 0) -> None:
        """As `free`, for the slots of consecutive tokens of one sequence, the first of them at `first_position`.

        Also for several such runs one after the other, where each is whole pages. An allocator of pages then knows
        from the lengths alone how many pages come back.
        """
        self.free(slots)

    def free_group_begin(self) -> None:
        """Hold frees back until `free_group_end`, so that they land together. Groups do not nest."""
        if self._group is not None:
            raise RuntimeError("a free group is open; end it before another begins")
        self._group = []

    def free_group_end(self) -> None:
        if self._group is None:
            raise RuntimeError("no free group is open")
        group, self._group = self._group, None
        if group:
            self._land(joined(group))

    def available_size(self) -> int:
        """Tokens that can be handed out now, from lengths that the host knows.

        Waits for the device only where `free` was given tokens of pages whose count it is still finding out.
        """
        self._settle()
        return (self.free_pages.numel() + self._num_released) * self.page_size

    @property
    def release_pages(self) -> torch.Tensor:
        """Freed ids, in the order of the frees."""
        if len(self._released) != 1:
            self.release_pages = joined(self._released) if self._released else self.free_pages.new_empty(0)
        return self._released[0]

    @release_pages.setter
    def release_pages(self, pages: torch.Tensor) -> None:
        self._released, self._num_released = [pages], pages.numel()

    def clear(self) -> None:
        """Take everything back, and drop frees held in an open group."""
        self.free_pages = torch.arange(1, self.num_pages + 1, dtype=torch.int64, device=self.device)
        self.release_pages = self.free_pages.new_empty(0)
        self._group = None
        self._mark_owned()

    def backup_state(self) -> AllocatorState:
        """A snapshot for `restore_state`, valid however often and whatever is called in between."""
        self._settle()
        return AllocatorState(self.free_pages, self.release_pages)

    def restore_state(self, state: AllocatorState) -> None:
        """Go back to a snapshot: what was handed out since then is free again."""
        self.free_pages, self.release_pages = state.free_pages, state.release_pages
        if self._owned is not None:
            self._mark_owned()

    def merge_and_sort_free(self) -> None:
        """Move released pages to the free list, in ascending order."""
        self._settle()
        if self._num_released:
            self.free_pages = ascending(joined((self.free_pages, self.release_pages)))
            self.release_pages = self.free_pages.new_empty(0)

    def get_kvcache(self) -> SlotStore | None:
        return self._kvcache

    def get_cpu_copy(self, indices: torch.Tensor) -> CpuCopy:
        return self._store().get_cpu_copy(indices)

    def load_cpu_copy(self, kv_cache_cpu: CpuCopy, indices: torch.Tensor) -> None:
        self._store().load_cpu_copy(kv_cache_cpu, indices)

    def get_stats(self) -> PoolStats:
        """Total and used tokens, utilisation, pages and free pages. No wait for the device."""
        return pool_stats(self.num_pages * self.page_size, self.available_size(), self.page_size)

    def check_memory_pressure(self) -> Pressure:
        """How full the pool is: "critical" above 0.95 in use, "high" above 0.85, "medium" above 0.7, else "low"."""
        return memory_pressure(self.get_stats()["utilization"])

    def debug_print(self) -> str:
        return (
            f"#tokens available: {self.available_size()} of {self.num_pages * self.page_size}, "
            f"#pages free: {self.free_pages.numel()}, released: {self.release_pages.numel()}"
        )

    def check(self) -> None:
        """Raise InvariantError with all violations: a free id out of range or there twice, or free and handed out."""
        self._settle()
        free = torch.cat((self.free_pages, self.release_pages)).cpu()
        violations = []
        outside = free[(free < 1) | (free > self.num_pages)]
        if outside.numel():
            violations.append(f"free ids {outside[:8].tolist()} are outside 1..{self.num_pages}")
        ids, counts = free.unique(return_counts=True)
        if (counts > 1).any():
            violations.append(f"ids {ids[counts > 1][:8].tolist()} are free more than once")
        if self._owned is not None and not outside.numel():
            owned = self._owned.cpu()
            both = ids[owned[ids]]
            if both.numel():
                violations.append(f"ids {both[:8].tolist()} are free and handed out")
            if int(owned.sum()) + ids.numel() != self.num_pages:
                violations.append(f"{ids.numel()} free and {int(owned.sum())} handed out of {self.num_pages} pages")
        if violations:
            raise InvariantError(type(self).__name__, violations)

    def _take(self, num_pages: int) -> torch.Tensor | None:
        """Page ids from the front of the free list, a copy; None when short, which changes nothing."""
        if not self._reserve(num_pages):
            return None
        pages = self.free_pages[:num_pages].clone()
        self._drop_front(num_pages)
        return pages

    def _reserve(self, num_pages: int) -> bool:
        """Whether `free_pages` holds `num_pages` or, after merging, can; merges only where that suffices."""
        if num_pages < 0:
            raise ShapeError(f"{num_pages} pages were asked for; ask for 0 or more")
        if num_pages <= self.free_pages.numel():
            return True
        self._settle()
        if num_pages > self.free_pages.numel() + self._num_released:
            return False
        if num_pages > self.free_pages.numel():
            self.merge_and_sort_free()
        return True

    def _drop_front(self, num_pages: int) -> None:
        if self._owned is not None:
            flag(self._owned, self.free_pages[:num_pages], True)
        self.free_pages = self.free_pages[num_pages:]

    def _has_no_pages(self) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no pages; use alloc, or a paged allocator")

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The page ids that freeing `slots` gives back, in a tensor of their own."""
        raise NotImplementedError(f"{type(self).__name__} inherits free; it has to say which pages slots are of")

    def _land(self, slots: torch.Tensor) -> None:
        """Give back the pages of slots that were freed."""
        self._give(self._pages_of(slots))

    def _settle(self) -> None:  # noqa: B027  (most have none)
        """Take in frees whose page counts were still on their way to the host."""

    def _give(self, pages: torch.Tensor) -> None:
        """Put page ids back and keep the tensor; checks first where checks are on, so that a refused free changes
        nothing."""
        if self._owned is not None:
            self._check_owned(pages, self._owned)
            flag(self._owned, pages, False)
        if self.need_sort:
            self._released.append(pages)
            self._num_released += pages.numel()
            if len(self._released) > _MAX_PARTS:
                self.release_pages = joined(self._released)
        else:
            self.free_pages = joined((self.free_pages, pages))

    def _check_owned(self, pages: torch.Tensor, owned: torch.Tensor) -> None:
        if pages.device.type == "cpu" and all_once_and_flagged(owned, pages):
            return
        outside = pages[(pages < 1) | (pages > self.num_pages)]
        if outside.numel():
            raise DoubleFree(f"pages {outside[:8].tolist()} were freed, but pages are 1..{self.num_pages}")
        twice = pages[~owned[pages]]
        if twice.numel():
            raise DoubleFree(f"pages {twice[:8].tolist()} of {self.page_size} tokens were freed and are not handed out")
        ids, counts = pages.unique(return_counts=True)
        if ids.numel() != pages.numel():
            raise DoubleFree(f"slots {ids[counts > 1][:8].tolist()} are freed twice in one call")

    def _mark_owned(self) -> None:
        """Derive the flags from the free list."""
        if self.device.type == "cpu" or self._debug:
            owned = torch.ones(self.num_pages + 1, dtype=torch.bool, device=self.device)
            owned[0] = False
            owned[self.free_pages] = False
            owned[self.release_pages] = False
            self._owned = owned

    def _store(self) -> SlotStore:
        if self._kvcache is None:
            raise ConfigError("this allocator was built without a pool; pass kvcache to copy what slots hold")
        return self._kvcache
