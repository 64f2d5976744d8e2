"""The pages of one component on the device: their slots or states, locks and eviction order.

The rows are the rows of the prefix tree. Only the prefix tree changes this data. Sizes are in tokens, or in states.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from hicache.pages.order import EvictionOrder
from hicache.pages.policy import RankPolicy
from hicache.pages.table import NO_ROWS, Columns, Index, Mask, PageTable, Rows
from hicache.tiers import own

_NO_SLOTS = torch.empty(0, 1, dtype=torch.int64)
_MANY = 16  # pages from which on a slice is faster than an index, including the search for the slice


class DevicePages(Columns):
    """The pages of one component on the device. Owned by the scheduler thread.

    `load`   number of the load in flight that writes the page; 0: none
    `pool_page`  index of the page's slots, or of its state, in `_slots`, which grows with the pages of the device only

    `size`: tokens or states of a page. `full`: the full pages of these windows or states; None if these pages are the
    full pages. `shares_slots`: these pages have the slots of `full`. The full pages at the end of a prompt are evicted
    first; windows and states may be evicted in any order.
    """

    fields: ClassVar = {"load": (np.int32, 0), "pool_page": (np.int64, 0)}
    unclean: ClassVar = frozenset({"pool_page"})
    load: npt.NDArray[np.int32]
    pool_page: npt.NDArray[np.int64]

    def __init__(
        self,
        table: PageTable,
        policy: RankPolicy,
        size: int,
        full: DevicePages | None = None,
        *,
        shares_slots: bool = False,
    ) -> None:
        self.table, self.size, self._full, self._shares_slots = table, size, full, shares_slots
        self.num_held = 0
        self._slots = _NO_SLOTS  # int64 `[pool_page, size]`, on the device of the first value
        self._free_places, self._first_free = NO_ROWS, 0  # a stack: free entries of `_slots`, from an index to the end
        self._numbers = NO_ROWS  # the indices of all entries of `_slots`
        table.add_columns(self)
        self.order = EvictionOrder(table, policy, is_linked=full is None)

    # Questions

    def has(self, rows: Rows) -> Mask:
        """Return which pages are on the device or are being loaded."""
        found: Mask = self.order.is_held[rows]
        return found

    def held(self, rows: Rows) -> Rows:
        """Return the pages of `rows` that are on the device."""
        is_held = self.order.is_held[self.table.span(rows) if len(rows) >= self.table.many else rows]
        return rows if is_held.all() else rows[is_held]

    def rows_held(self) -> Rows:
        """Return all pages of the device, in no order."""
        return np.flatnonzero(self.order.is_held)

    def value(self, rows: Rows, *, is_kept: bool = True) -> torch.Tensor:
        """Return the slots or states of the pages `rows`, which are on the device, int64. `is_kept`: False if the
        caller drops the tensor before the device gets or loses a page; the tensor may then be a view."""
        if self._full is not None and self._shares_slots:
            return self._full.value(rows, is_kept=is_kept)
        pool_pages = self._index(self.pool_page[rows])
        if isinstance(pool_pages, slice):
            found = self._slots[pool_pages].view(-1)
            return own(found) if is_kept else found
        if self._slots.is_cpu:
            return torch.from_numpy(self._slots.numpy()[pool_pages].reshape(-1))
        return self._slots[self._ids(pool_pages)].view(-1)

    @property
    def evictable(self) -> int:
        """The size of unlocked pages."""
        return self.order.num_evictable * self.size

    @property
    def protected(self) -> int:
        """The size of locked pages."""
        return self.total - self.evictable

    @property
    def total(self) -> int:
        return self.num_held * self.size

    # Events

    def enter(self, rows: Rows, value: torch.Tensor | None = None) -> None:
        """Record that the device has the pages `rows`, consecutive pages of a prompt. This counts as a use."""
        if value is not None:
            self._write(rows, value)
        self.num_held += len(rows)
        if self.order.policy.reads_created:
            if self._full is None:
                self.order.at.note_created(rows)
            else:
                self.order.at.created[rows] = self._full.order.at.created[rows]
        self.order.enter(rows)

    def leave(self, rows: Rows) -> None:
        """Record that the device has lost the pages `rows`."""
        self.num_held -= len(rows)
        self.order.leave(rows)
        if not self._shares_slots:
            self._first_free -= len(rows)
            self._free_places[self._first_free : self._first_free + len(rows)] = self.pool_page[rows]

    def use(self, rows: Rows) -> None:
        """Record that a request used the pages of `rows` that the device has."""
        self.order.use(self.held(rows))

    def lock(self, rows: Rows) -> None:
        """Keep the pages `rows` on the device, or at least their rows, see `RadixTree.remove`. Each row occurs once."""
        self.table.hold(rows)
        self.order.lock(rows)

    def unlock(self, rows: Rows) -> None:
        """Release one lock of each page in `rows`. This does not count as a use."""
        self.order.unlock(rows)
        self.table.drop(rows)

    def take(self, size: int) -> Rows:
        """Return the next pages to evict, with at most `size` tokens or states in total, rounded up to pages; see
        `EvictionOrder.take`."""
        return self.order.take(-(-size // self.size)) if size > 0 else NO_ROWS

    # Inside

    def _write(self, rows: Rows, value: torch.Tensor) -> None:
        if self._first_free + len(rows) > len(self._free_places):
            self._make_places(len(rows), value)
        free = self._free_places[self._first_free : self._first_free + len(rows)]
        self._first_free += len(rows)
        self.pool_page[self.table.span(rows) if len(rows) >= self.table.many else rows] = free
        pool_pages = self._index(free)
        if self._slots.is_cpu:
            self._slots.numpy()[pool_pages] = value.numpy().reshape(-1, self.size)
        else:
            at = pool_pages if isinstance(pool_pages, slice) else self._ids(pool_pages)
            self._slots[at] = value.reshape(-1, self.size)

    def _make_places(self, num_pool_pages: int, value: torch.Tensor) -> None:
        """Double the number of entries of `_slots`, or add `num_pool_pages` entries if this number is larger."""
        before = self._slots if len(self._slots) else value.new_zeros(0, self.size)
        self._slots = torch.cat((before, before.new_zeros(max(num_pool_pages, len(before)), self.size)))
        self._numbers = np.arange(len(self._slots))
        free = np.concatenate((self._free_places[self._first_free :], self._numbers[len(before) :]))
        self._free_places, self._first_free = np.empty(len(self._slots), np.int64), len(self._slots) - len(free)
        self._free_places[self._first_free :] = free

    def _index(self, pool_pages: Rows) -> Index:
        """Return the indices as a slice if they are consecutive."""
        if len(pool_pages) < _MANY or pool_pages[-1] - pool_pages[0] != len(pool_pages) - 1:
            return pool_pages
        at = slice(int(pool_pages[0]), int(pool_pages[-1]) + 1)
        return at if (pool_pages == self._numbers[at]).all() else pool_pages

    def _ids(self, pool_pages: Rows) -> torch.Tensor:
        """Return the indices as a tensor on the device of the slots, without waiting for the device."""
        return torch.from_numpy(pool_pages).pin_memory().to(self._slots.device, non_blocking=True)
