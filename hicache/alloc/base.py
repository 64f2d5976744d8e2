"""The contract of all slot allocators, and the free list that they share.

    slots [0, page_size)                          page 0, for padding: never allocated
    slots [page_size, (num_pages + 1)*page_size)  pages 1..num_pages, each free or allocated, never both

An allocator owns the free list; the pool owns its tensors. On ids in host memory, numpy is used, which runs on one
thread: torch divides work on ten thousand ids among its threads, and on a busy machine, waking these threads takes
milliseconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hicache.config.environment import debug_checks, kernel_choice
from hicache.errors import ConfigError, DoubleFree, InvariantError, ShapeError
from hicache.metrics import PoolStats, Pressure, memory_pressure, pool_stats
from hicache.tiers import joined

_MAX_PARTS = 64

Ids = npt.NDArray[np.int64]
CpuCopy = list[list[tuple[torch.Tensor, ...]]]


class SlotStore(Protocol):
    """The methods of a pool that its allocator calls."""

    def get_cpu_copy(self, indices: torch.Tensor) -> CpuCopy: ...

    def load_cpu_copy(self, kv_cache_cpu: CpuCopy, indices: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class AllocatorState:
    """A snapshot of the free list. The tensors of a snapshot are never written, so the snapshot stays valid after later
    calls."""

    free_pages: torch.Tensor
    release_pages: torch.Tensor


class OwnedPages:
    """Flags of pages 1..num_pages of one allocator. Allocators on the CPU always use the flags. Allocators on other
    devices use them only in debug mode, because the host would wait for the device to read the flags."""

    def __init__(self, num_pages: int, page_size: int, free: torch.Tensor) -> None:
        """Mark all pages except `free` as allocated."""
        self._page_size = page_size
        self.flags = torch.ones(num_pages + 1, dtype=torch.bool, device=free.device)
        self.flags[0] = False
        self.flags[free] = False
        self._on_host = self.flags.numpy() if free.device.type == "cpu" else None

    def take(self, pages: torch.Tensor) -> None:
        """Mark pages as allocated."""
        if self._on_host is None:
            self.flags[pages] = True
        else:
            self._on_host[pages.numpy()] = True

    def give(self, pages: torch.Tensor) -> None:
        """Mark pages as free. Raises DoubleFree, before any change, if a page is not allocated or is passed twice."""
        if self._on_host is None:
            self._check(pages)
            self.flags[pages] = False
            return
        ids: Ids = pages.numpy()
        if not self._all_owned_once(ids):
            self._check(pages)
        self._on_host[ids] = False

    def _all_owned_once(self, ids: Ids) -> bool:
        assert self._on_host is not None
        # `count_nonzero` is several times faster than `all` on the few ids of most frees.
        if np.count_nonzero(ids[1:] > ids[:-1]) < len(ids) - 1:
            ids = np.sort(ids)
            if np.count_nonzero(ids[1:] == ids[:-1]):
                return False
        inside = not len(ids) or (ids[0] > 0 and ids[-1] < len(self._on_host))
        return bool(inside and np.count_nonzero(self._on_host[ids]) == len(ids))

    def _check(self, pages: torch.Tensor) -> None:
        last = len(self.flags) - 1
        outside = pages[(pages < 1) | (pages > last)]
        if outside.numel():
            raise DoubleFree(f"pages {outside[:8].tolist()} were freed, but pages are 1..{last}")
        twice = pages[~self.flags[pages]]
        if twice.numel():
            raise DoubleFree(f"pages {twice[:8].tolist()} of {self._page_size} tokens were freed and are not allocated")
        ids, counts = pages.unique(return_counts=True)
        if ids.numel() != pages.numel():
            raise DoubleFree(f"slots {ids[counts > 1][:8].tolist()} are freed twice in one call")


class BaseTokenToKVPoolAllocator(ABC):
    """Allocates and frees slots of a pool. An allocation returns either all requested slots or no slot.

    Only the scheduler thread calls an allocator, so the allocator needs no lock. `free_pages` and `release_pages` are
    int64 page ids on `device` (slot ids if a page is one token); these tensors are replaced, never written in place.
    Pages are allocated from the front of `free_pages`. Freed pages are merged when an allocation finds too few free
    pages. With `need_sort`, freed pages are kept in `release_pages` until they are merged. Merging then sorts all free
    pages, which restores long contiguous runs. Without `need_sort`, freed pages are appended to `free_pages`.

    Freed pages are stored in parts that are joined on access, so the cost of a free depends only on the freed pages.

    A custom allocator defines `clear`, `alloc` and `free`, with any free list; the other methods use `free_pages` and
    `release_pages`.

    Freeing a slot that is not allocated raises `DoubleFree` on CPU tensors and with HICACHE_DEBUG=1. On CUDA outside of
    debug mode, only `check()` detects this error, because a test in `free` would make the host wait for the device.

    Only callers with SGLang's interface use `alloc_extend`, `alloc_decode`, free groups, `backup_state`,
    `merge_and_sort_free`, CPU copies, `get_stats`, `check_memory_pressure` and `debug_print`.
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
        """Create an allocator whose slots are all free. `size`: number of slots without page 0, rounded down to a
        multiple of the page size. Raises ConfigError below one page."""
        if page_size < 1 or size < page_size:
            raise ConfigError(f"size={size} is less than a page of page_size={page_size}; raise device_tokens")
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.need_sort = need_sort
        self.num_pages = size // page_size
        self._kvcache = kvcache
        self._debug = debug_checks()
        self._kernels = kernel_choice(self.device)
        self._group: list[torch.Tensor] | None = None
        self._released: list[torch.Tensor] = []
        self._num_released = 0
        self._owned: OwnedPages | None = None
        self.clear()

    @abstractmethod
    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Allocate `need_size` slots, int64. Returns None, without any change, if fewer slots are free. Returns an
        empty tensor if `need_size` is 0."""

    def alloc_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Allocate slots for new tokens of sequences, in the last page of each sequence and in new pages. Raises
        NotImplementedError if the allocator has no pages."""
        raise self._has_no_pages()

    def alloc_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Allocate one more slot for each sequence. Raises NotImplementedError if the allocator has no pages."""
        raise self._has_no_pages()

    def free(self, free_index: torch.Tensor) -> None:
        """Free slots; within a free group, the slots are freed when the group ends. The ids are copied. Raises
        DoubleFree."""
        if not free_index.numel():
            return
        if self._group is not None:
            self._group.append(free_index.clone())
        else:
            self._apply_free(free_index)

    def free_run(self, slots: torch.Tensor, first_position: int = 0) -> None:
        """Free the slots of consecutive tokens of one sequence, whose first token is at `first_position`.

        `slots` may also be several concatenated runs, if each run consists of complete pages. A paged allocator then
        computes the number of freed pages from the lengths.
        """
        self.free(slots)

    def free_pages_of(self, pages: torch.Tensor) -> None:
        """Free distinct pages by id; within a free group, the pages are freed when the group ends. The allocator keeps
        the tensor. Raises DoubleFree."""
        if self._group is not None:
            self._group.append(pages * self.page_size)
        else:
            self._give(pages)

    def free_group_begin(self) -> None:
        """Defer frees until `free_group_end`, which applies them together. Groups do not nest."""
        if self._group is not None:
            raise RuntimeError("a free group is open; end it before another begins")
        self._group = []

    def free_group_end(self) -> None:
        if self._group is None:
            raise RuntimeError("no free group is open")
        group, self._group = self._group, None
        if group:
            self._apply_free(joined(group))

    def available_size(self) -> int:
        """Return the number of tokens that can be allocated now.

        Waits for the device only if the device is still counting the pages of an earlier `free`.
        """
        self._settle()
        return (self._free_pages.numel() + self._num_released) * self.page_size

    @property
    def free_pages(self) -> torch.Tensor:
        """The ids of free pages, in the order in which pages are allocated."""
        if not self.need_sort:
            self._merge()
        return self._free_pages

    @free_pages.setter
    def free_pages(self, pages: torch.Tensor) -> None:
        self._free_pages = pages
        if not self.need_sort:
            self._released = []
            self._num_released = 0

    @property
    def release_pages(self) -> torch.Tensor:
        """Freed ids that are not merged yet, in the order of the frees; always empty without `need_sort`."""
        if not self.need_sort or not self._released:
            return self._free_pages.new_empty(0)
        if len(self._released) > 1:
            self._released = [joined(self._released)]
        return self._released[0]

    @release_pages.setter
    def release_pages(self, pages: torch.Tensor) -> None:
        self._released = [pages] if pages.numel() else []
        self._num_released = pages.numel()

    def clear(self) -> None:
        """Free all pages, and drop the frees of an open group."""
        self.free_pages = torch.arange(1, self.num_pages + 1, dtype=torch.int64, device=self.device)
        self._released = []
        self._num_released = 0
        self._group = None
        self._mark_owned()

    def backup_state(self) -> AllocatorState:
        """Take a snapshot for `restore_state`. The snapshot stays valid after any calls and restores."""
        self._settle()
        return AllocatorState(self.free_pages, self.release_pages)

    def restore_state(self, state: AllocatorState) -> None:
        """Restore a snapshot: pages that were allocated after the snapshot are free again."""
        self.free_pages = state.free_pages
        self.release_pages = state.release_pages
        if self._owned is not None:
            self._mark_owned()

    def merge_and_sort_free(self) -> None:
        """Move released pages to the free list, in ascending order."""
        self._settle()
        self._merge()

    def get_kvcache(self) -> SlotStore | None:
        return self._kvcache

    def get_cpu_copy(self, indices: torch.Tensor) -> CpuCopy:
        return self._store().get_cpu_copy(indices)

    def load_cpu_copy(self, kv_cache_cpu: CpuCopy, indices: torch.Tensor) -> None:
        self._store().load_cpu_copy(kv_cache_cpu, indices)

    def get_stats(self) -> PoolStats:
        """Return the numbers of total and used tokens, the utilisation, and the numbers of pages and free pages. Does
        not wait for the device."""
        return pool_stats(self.num_pages * self.page_size, self.available_size(), self.page_size)

    def check_memory_pressure(self) -> Pressure:
        """Classify the utilisation: "critical" above 0.95, "high" above 0.85, "medium" above 0.7, else "low"."""
        return memory_pressure(self.get_stats()["utilization"])

    def debug_print(self) -> str:
        return (
            f"#tokens available: {self.available_size()} of {self.num_pages * self.page_size}, "
            f"#pages free: {self.free_pages.numel()}, released: {self.release_pages.numel()}"
        )

    def check(self) -> None:
        """Raise InvariantError with all violations: free ids out of range, duplicate, or allocated."""
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
            owned = self._owned.flags.cpu()
            both = ids[owned[ids]]
            if both.numel():
                violations.append(f"ids {both[:8].tolist()} are free and allocated")
            if int(owned.sum()) + ids.numel() != self.num_pages:
                violations.append(f"{ids.numel()} free and {int(owned.sum())} allocated of {self.num_pages} pages")
        if violations:
            raise InvariantError(type(self).__name__, violations)

    def _take(self, num_pages: int) -> torch.Tensor | None:
        """Allocate page ids from the front of the free list, and return them as a copy. Returns None, without any
        change, if too few pages are free."""
        if not 0 <= num_pages <= self._free_pages.numel() and not self._reserve(num_pages):
            return None
        front, self._free_pages = self._free_pages.split_with_sizes((num_pages, self._free_pages.numel() - num_pages))
        pages = front.clone()
        if self._owned is not None:
            self._owned.take(pages)
        return pages

    def _reserve(self, num_pages: int) -> bool:
        """Return whether `_free_pages` has `num_pages` pages. Released pages are merged into `_free_pages` if that is
        necessary and sufficient."""
        if num_pages < 0:
            raise ShapeError(f"{num_pages} pages were requested; request 0 or more")
        if num_pages <= self._free_pages.numel():
            return True
        self._settle()
        if num_pages > self._free_pages.numel() + self._num_released:
            return False
        self._merge()
        return True

    def _merge(self) -> None:
        """Append the released pages to the free pages; with `need_sort`, sort all free pages."""
        if self._released:
            pages = joined((self._free_pages, *self._released))
            self._free_pages = ascending(pages) if self.need_sort else pages
            self._released = []
            self._num_released = 0

    def _drop_front(self, pages: torch.Tensor) -> None:
        """Mark pages from the front of the free list as allocated."""
        if self._owned is not None:
            self._owned.take(pages)
        self._free_pages = self._free_pages[pages.numel() :]

    def _has_no_pages(self) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no pages; use alloc, or a paged allocator")

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the page ids of `slots` in a new tensor."""
        raise NotImplementedError(f"{type(self).__name__} inherits free; it has to define _pages_of")

    def _pages_of_run(self, slots: torch.Tensor) -> torch.Tensor:
        """Return, in a new tensor, the page ids of the slots of consecutive tokens that begin at the start of a
        page."""
        return self._pages_of(slots)

    def _apply_free(self, slots: torch.Tensor) -> None:
        """Free the pages of slots."""
        self._give(self._pages_of(slots))

    def _settle(self) -> None:  # noqa: B027  (most allocators have nothing to apply)
        """Apply frees whose pages are still being counted on the device."""

    def _give(self, pages: torch.Tensor) -> None:
        """Free page ids, and keep the tensor `pages`. If the allocator verifies calls, it checks the ids before any
        change."""
        if self._owned is not None:
            self._owned.give(pages)
        self._released.append(pages)
        self._num_released += pages.numel()
        if len(self._released) > _MAX_PARTS:
            self._released = [joined(self._released)]

    def _mark_owned(self) -> None:
        """If the allocator verifies calls, derive the allocated pages from the free list."""
        if self.device.type == "cpu" or self._debug:
            self._owned = OwnedPages(self.num_pages, self.page_size, joined((self._free_pages, *self._released)))

    def _store(self) -> SlotStore:
        if self._kvcache is None:
            raise ConfigError("this allocator was built without a pool; pass kvcache to copy the contents of slots")
        return self._kvcache


def ascending(ids: torch.Tensor) -> torch.Tensor:
    """Sort ids. In host memory, numpy's stable sort is used, because it only merges the few ascending runs of ids that
    were freed together."""
    if not ids.is_cpu:
        return ids.sort().values
    return torch.from_numpy(np.sort(ids.numpy(), kind="stable"))


def slots_of(pages: torch.Tensor, page_size: int, offsets: torch.Tensor) -> torch.Tensor:
    """Return all slots of pages, in page order. `offsets` is int64 [0, 1, ..., `page_size` - 1], on the device of the
    pages."""
    if not pages.is_cpu:
        return (pages[:, None] * page_size + offsets).reshape(-1)
    return torch.from_numpy((pages.numpy()[:, None] * page_size + offsets.numpy()).reshape(-1))


def are_runs(slots: torch.Tensor, page_size: int) -> bool:
    """Return whether `slots`, in host memory, consist of runs of `page_size` slots, each run on one page; the last run
    may be shorter."""
    pages: Ids = slots.numpy() // page_size
    return bool((pages == np.repeat(pages[::page_size], page_size)[: len(pages)]).all())


def distinct(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the distinct page ids, ascending. `pages`: the page id of each slot. In host memory, this function is fast
    if the slots are complete pages."""
    if not pages.is_cpu:
        found: torch.Tensor = pages.unique()
        return found
    ids: Ids = pages.numpy()
    firsts = ids[::page_size]
    if len(ids) == len(firsts) * page_size and (ids.reshape(-1, page_size) == firsts[:, None]).all():
        ids = firsts
    return torch.from_numpy(np.unique(ids))
