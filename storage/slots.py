"""Which slots of a store are free, and how much the pages in the others take. Kept in memory while the store is open.

A slot is in use, freed or free. A freed one keeps its disk space until another page is written to it, or until that
space is needed elsewhere; a free one is a hole. A freed slot may be written at once: whoever still reads it finds
another key in its block, or bytes that do not verify, and looks the key up again.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.storage.header import HEADER_BYTES
from hicache.storage.slot_file import BLOCK_BYTES, SlotFile

_PROBE_BYTES = 64 << 20


class Sizes(NamedTuple):
    """How many pages there are, and the bytes of their values and of the pages themselves."""

    entries: int = 0
    live_bytes: int = 0
    raw_bytes: int = 0

    @classmethod
    def of(cls, records: npt.NDArray[np.void]) -> Sizes:
        """Of the records of an index."""
        payloads, pages = (int(records[name].sum(dtype=np.int64)) for name in ("payload_bytes", "page_bytes"))
        return cls(len(records), len(records) * HEADER_BYTES + payloads, pages)

    def plus(self, sign: int, page_bytes: int, payload_bytes: int) -> Sizes:
        """With one page more, or less."""
        live_bytes = self.live_bytes + sign * (HEADER_BYTES + payload_bytes)
        return Sizes(self.entries + sign, live_bytes, self.raw_bytes + sign * page_bytes)


class FreeSlot(NamedTuple):
    """A slot to be written. `is_hole`: it takes no disk space yet."""

    slot: int
    is_hole: bool


@dataclass
class _SizeSlots:
    """The slots of one file: those below `num_slots` that are neither `free` (a heap) nor `freed` are in use."""

    file: SlotFile
    num_slots: int
    free: list[int]
    freed: dict[int, int] = field(default_factory=dict)  # slot -> disk space


class Slots:
    """All slots of a store, by page size; the writer's thread. OSError where the disk fails.

    `used_bytes`, `freed_bytes`: disk space. `num_misplaced`: how many pages have no slot of their own in their file, as
    the records of the index say, from which this is made.
    """

    def __init__(self, files: Mapping[int, SlotFile], records: npt.NDArray[np.void]) -> None:
        self.sizes, self.used_bytes, self.freed_bytes = Sizes.of(records), 0, 0
        self._files: dict[int, _SizeSlots] = {}
        num_fit = 0
        for page_bytes, file in files.items():
            pages, num_slots = records[records["page_bytes"] == page_bytes], file.num_slots()
            in_file = pages["slot"][pages["slot"] < num_slots].astype(np.int64)
            num_pages = np.bincount(in_file, minlength=num_slots)  # of each slot
            num_fit += int(np.count_nonzero(num_pages))
            self._files[page_bytes] = _SizeSlots(file, num_slots, np.flatnonzero(num_pages == 0).tolist())
            lengths, counts = (found.tolist() for found in np.unique(pages["payload_bytes"], return_counts=True))
            self.used_bytes += sum(file.space_of(n) * count for n, count in zip(lengths, counts, strict=True))
        self.num_misplaced = len(records) - num_fit

    def recount_freed(self) -> int:
        """What `freed_bytes` is to be."""
        return sum(sum(slots.freed.values()) for slots in self._files.values())

    def space_of(self, page_bytes: int, payload_bytes: int) -> int:
        return self._files[page_bytes].file.space_of(payload_bytes)

    def take(self, page_bytes: int, payload_bytes: int) -> FreeSlot:
        """A slot for a payload, from now on in use."""
        slots = self._files[page_bytes]
        self.used_bytes += slots.file.space_of(payload_bytes)
        self.sizes = self.sizes.plus(1, page_bytes, payload_bytes)
        if slots.freed:
            slot, space = slots.freed.popitem()
            self.freed_bytes -= space
            return FreeSlot(slot, is_hole=False)
        if slots.free:
            return FreeSlot(heapq.heappop(slots.free), is_hole=True)
        slots.num_slots += 1
        return FreeSlot(slots.num_slots - 1, is_hole=True)

    def release(self, page_bytes: int, slot: int, payload_bytes: int) -> None:
        """A page left its slot."""
        slots = self._files[page_bytes]
        space = slots.file.space_of(payload_bytes)
        self.used_bytes -= space
        self.freed_bytes += space
        self.sizes = self.sizes.plus(-1, page_bytes, payload_bytes)
        slots.freed[slot] = space

    def punch(self, max_bytes: int = 0) -> None:
        """Make freed slots holes until all slots take at most `max_bytes`."""
        for slots in self._files.values():
            excess_bytes, chosen = self.used_bytes + self.freed_bytes - max_bytes, list[int]()
            for slot, space in reversed(slots.freed.items()):
                if excess_bytes <= 0:
                    break
                chosen.append(slot)
                excess_bytes -= space
            slots.file.punch(chosen)
            for _ in chosen:
                slot, space = slots.freed.popitem()  # the last one, in constant time
                self.freed_bytes -= space
                heapq.heappush(slots.free, slot)

    def trim(self) -> None:
        """Make all freed slots holes, and cut those off that end a file."""
        self.punch()
        for slots in self._files.values():
            slots.free.sort()
            while slots.free and slots.free[-1] == slots.num_slots - 1:
                slots.num_slots = slots.free.pop()
            slots.file.truncate(slots.num_slots)

    def probe(self) -> None:
        """OSError when the disk takes no further slot of the largest size, or 64 MiB of a longer one."""
        slots = self._files[max(self._files)]
        payload = bytes(min(slots.file.slot_bytes - BLOCK_BYTES, _PROBE_BYTES))
        try:
            slots.file.write(slots.num_slots, bytes(BLOCK_BYTES), payload, is_hole=True)
            slots.file.sync()
        finally:
            slots.file.truncate(slots.num_slots)
