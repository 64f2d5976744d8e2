"""Which page of a store was used when: an array of ticks for each length of slots, one for each slot.

A tick counts uses, 0 says that no page is there. A use is one store to an array and costs the index nothing. The least
recently used pages are chosen many at a time, and each is compared with its tick when its turn comes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.storage.slot_file import SlotLength

TICK = np.dtype("<u8")
_MIN_CHOSEN, _CHOSEN_SHARE = 4096, 64
_MIN_SPARE, _SPARE_SHARE = 128, 8


class LastUse(NamedTuple):
    """The last use of a slot."""

    tick: int
    length: SlotLength
    slot: int


class UseOrder:
    """The last use of every slot, by its length. Any thread notes uses; everything else is the writer's.

    A use that is noted while an array grows may be lost, and one of a page that has just left its slot marks a slot
    without a page. Neither matters to any page but in its order.
    """

    def __init__(self, ticks: Mapping[SlotLength, npt.NDArray[np.uint64]]) -> None:
        self._ticks = dict(ticks)
        self._chosen: Iterator[LastUse] = iter(())
        self.restart_clock()

    @property
    def ticks(self) -> dict[SlotLength, npt.NDArray[np.uint64]]:
        """The tick of each slot, by length, up to the last one with a page."""
        return {length: np.trim_zeros(ticks, "b") for length, ticks in self._ticks.items()}

    @property
    def num_slots(self) -> list[int]:
        """How many slots each length has, and some to come."""
        return [len(ticks) for ticks in self._ticks.values()]

    def restart_clock(self) -> None:
        """Later ticks are higher than all that were set."""
        last = max((int(ticks.max(initial=0)) for ticks in self._ticks.values()), default=0)
        self._clock = itertools.count(last + 1)

    def trim(self) -> None:
        """Forget the slots behind the last one with a page."""
        self._ticks = self.ticks

    def next_tick(self) -> int:
        return next(self._clock)

    def note(self, length: SlotLength, slot: int) -> None:
        """The page in a slot is used now. What is no slot is ignored."""
        ticks = self._ticks.get(length)
        if ticks is not None and slot < len(ticks):
            ticks[slot] = next(self._clock)

    def set(self, length: SlotLength, slot: int, tick: int) -> None:
        """A page came to a slot, and was used at `tick`."""
        ticks = self._ticks.get(length, np.empty(0, TICK))
        if slot >= len(ticks):
            num_slots = slot + max(_MIN_SPARE, slot // _SPARE_SHARE)
            ticks = np.concatenate([ticks, np.zeros(num_slots - len(ticks), TICK)])
            self._ticks[length] = ticks
        ticks[slot] = tick

    def newest(self, length: SlotLength, slots: range) -> int:
        """The last tick of these slots."""
        return int(self._ticks[length][slots.start : slots.stop].max(initial=0))

    def pop_oldest(self) -> LastUse | None:
        """Take out the slot that was used least recently; None when none is left."""
        while True:
            for last in self._chosen:
                ticks = self._ticks[last.length]
                if ticks[last.slot] == last.tick:  # it was neither used nor filled anew since
                    ticks[last.slot] = 0
                    return last
            chosen = self.by_use(max(_MIN_CHOSEN, sum(self.num_slots) // _CHOSEN_SHARE))
            if not chosen:
                return None
            self._chosen = iter(chosen)

    def by_use(self, limit: int | None = None) -> list[LastUse]:
        """The slots that were used, least recently used first; at most `limit`."""
        lengths, uses = list(self._ticks), list(self._ticks.values())
        slots = [np.flatnonzero(ticks) for ticks in uses]
        if not slots:
            return []
        ticks = np.concatenate([of_length[used] for of_length, used in zip(uses, slots, strict=True)])
        which, used = np.repeat(np.arange(len(slots)), [len(used) for used in slots]), np.concatenate(slots)
        chosen = np.arange(len(ticks))
        if limit is not None and limit < len(ticks):
            chosen = np.argpartition(ticks, limit)[:limit]
        chosen = chosen[np.argsort(ticks[chosen])]
        of_chosen = (lengths[n] for n in which[chosen].tolist())
        return list(map(LastUse, ticks[chosen].tolist(), of_chosen, used[chosen].tolist()))
