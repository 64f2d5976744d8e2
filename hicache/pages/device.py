"""The pages of one component on the device: their slots or states, locks and eviction order.

The rows are those of the prefix tree, which is the only writer. Sizes are in tokens, or in states.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from hicache.pages.order import EvictionOrder
from hicache.pages.policy import RankPolicy
from hicache.pages.table import NO_ROWS, Columns, Mask, PageTable, Rows

_NO_SLOTS = torch.empty(0, 1, dtype=torch.int64)


class DevicePages(Columns):
    """Owned by the scheduler thread.

    `load`   number of the load in flight that writes the page; 0: none
    `place`  where the slots of the page, or its state, are kept: memory grows with the pages of the device alone

    `size`: of a page. `full`: the full pages that these belong to; None: these are the full pages. `shares_slots`:
    their slots are those of `full`. Of full pages the end of a prompt leaves first; windows and states leave at any
    time.
    """

    fields: ClassVar = {"load": (np.int32, 0), "place": (np.int32, 0)}
    load: npt.NDArray[np.int32]
    place: npt.NDArray[np.int32]

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
        self._slots = _NO_SLOTS  # int64 `[place, size]`, where the first value came from
        self._free_places, self._num_free = NO_ROWS, 0  # a stack
        table.add_columns(self)
        self.order = EvictionOrder(table, policy, is_linked=full is None)

    # Looking

    def has(self, rows: Rows) -> Mask:
        """Which of these the device has, or gets by a load in flight."""
        found: Mask = self.order.is_held[rows]
        return found

    def held(self, rows: Rows) -> Rows:
        """Those of these that the device has."""
        return rows[self.order.is_held[rows]]

    def rows_held(self) -> Rows:
        """All that the device has, in no order."""
        return np.flatnonzero(self.order.is_held)

    def value(self, rows: Rows) -> torch.Tensor:
        """The slots or states of these, which the device has, int64; a copy."""
        if self._full is not None and self._shares_slots:
            return self._full.value(rows)
        if self._slots.is_cpu:
            return torch.from_numpy(self._slots.numpy()[self.place[rows]].reshape(-1))
        return self._slots[self._ids(rows)].view(-1)

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

    def uses_of(self, rows: Rows) -> npt.NDArray[np.floating]:
        """See `RankPolicy.uses_of`."""
        return self.order.policy.uses_of(self.order.at, rows)

    # Changing

    def enter(self, rows: Rows, value: torch.Tensor | None = None) -> None:
        """The device has these from now on, which follow each other in a prompt. They count as just used."""
        if value is not None:
            self._write(rows, value)
        self.num_held += len(rows)
        if self._full is None:
            self.order.at.note_created(rows)
        else:
            self.order.at.created[rows] = self._full.order.at.created[rows]
        self.order.enter(rows)

    def leave(self, rows: Rows) -> None:
        """The device has these no more."""
        self.num_held -= len(rows)
        self.order.leave(rows)
        if not self._shares_slots:
            self._free_places[self._num_free : self._num_free + len(rows)] = self.place[rows]
            self._num_free += len(rows)

    def use(self, rows: Rows) -> None:
        """A request used those of these that the device has."""
        self.order.use(self.held(rows))

    def lock(self, rows: Rows) -> None:
        """Keep these on the device, or at least their rows, see `RadixTree.remove`. A row occurs once."""
        self.table.hold(rows)
        self.order.lock(rows)

    def unlock(self, rows: Rows) -> None:
        """Undo one `lock`, which is no use."""
        self.order.unlock(rows)
        self.table.drop(rows)

    def begin_load(self, rows: Rows, number: int) -> None:
        """A load writes these."""
        self.load[rows] = number

    def end_load(self, rows: Rows) -> None:
        """Nothing writes these any more."""
        self.load[rows] = 0

    def take(self, size: int) -> Rows:
        """Some of the pages that leave next, of `size` together; see `EvictionOrder.take`."""
        return self.order.take(-(-size // self.size)) if size > 0 else NO_ROWS

    # Inside

    def _write(self, rows: Rows, value: torch.Tensor) -> None:
        if len(rows) > self._num_free:
            self._make_places(len(rows), value)
        self._num_free -= len(rows)
        self.place[rows] = self._free_places[self._num_free : self._num_free + len(rows)]
        if self._slots.is_cpu:
            self._slots.numpy()[self.place[rows]] = value.numpy().reshape(-1, self.size)
        else:
            self._slots[self._ids(rows)] = value.reshape(-1, self.size)

    def _make_places(self, num_places: int, value: torch.Tensor) -> None:
        """Double the places, or add `num_places` if that is more."""
        before = self._slots if len(self._slots) else value.new_zeros(0, self.size)
        num_new = max(num_places, len(before))
        self._slots = torch.cat((before, before.new_zeros(num_new, self.size)))
        free, self._free_places = self._free_places[: self._num_free], np.empty(len(self._slots), np.int64)
        self._num_free += num_new
        self._free_places[: self._num_free] = np.append(free, np.arange(len(before), len(self._slots)))

    def _ids(self, rows: Rows) -> torch.Tensor:
        """The places of `rows` where the slots are, without a wait."""
        places = torch.from_numpy(self.place[rows].astype(np.int64))
        return places.pin_memory().to(self._slots.device, non_blocking=True)
