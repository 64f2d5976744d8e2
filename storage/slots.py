"""Which slots of a store are free, and how much disk space the others take. Kept in memory while the store is open.

A slot is in use, freed or free. A freed one keeps its disk space until another page is written to it, or until that
space is needed elsewhere; a free one is a hole. A freed slot may be written at once: whoever still reads it finds
another key in its block, or bytes that do not verify, and looks the key up again.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hicache.storage.index import NotedSlots
from hicache.storage.slot_file import SlotFile


class FreeSlot(NamedTuple):
    """A slot to be written. `is_hole`: it takes no disk space yet."""

    slot: int
    is_hole: bool


@dataclass
class _SizeSlots:
    """The slots of one file: those below `num_slots` that are neither `free` (a heap) nor `freed` are in use."""

    file: SlotFile
    num_slots: int = 0
    used_bytes: int = 0
    free: list[int] = field(default_factory=list)
    freed: dict[int, int] = field(default_factory=dict)  # slot -> disk space


class Slots:
    """All slots of a store, by page size; the writer's thread. OSError where the disk fails."""

    def __init__(self, files: Mapping[int, SlotFile]) -> None:
        self._sizes = {page_bytes: _SizeSlots(file) for page_bytes, file in files.items()}
        self.used_bytes = self.freed_bytes = 0

    def restore(self, noted: NotedSlots) -> None:
        """Set which slots there are, and which of them are free."""
        slots = self._sizes[noted.page_bytes]
        slots.num_slots, slots.free = noted.num_slots, sorted(noted.free)
        self.used_bytes += noted.used_bytes - slots.used_bytes
        slots.used_bytes = noted.used_bytes

    def now(self) -> list[NotedSlots]:
        return [
            NotedSlots(page_bytes, slots.num_slots, slots.used_bytes, [*slots.free, *slots.freed])
            for page_bytes, slots in self._sizes.items()
        ]

    def space_of(self, page_bytes: int, payload_bytes: int) -> int:
        return self._sizes[page_bytes].file.space_of(payload_bytes)

    def take(self, page_bytes: int, payload_bytes: int, max_bytes: int) -> FreeSlot:
        """A slot for a payload, from now on in use. Freed ones become holes as far as `max_bytes` of disk space for all
        slots demand it."""
        slots = self._sizes[page_bytes]
        self._use(slots, slots.file.space_of(payload_bytes))
        if slots.freed:
            slot, space = slots.freed.popitem()
            self.freed_bytes -= space
            taken = FreeSlot(slot, is_hole=False)
        elif slots.free:
            taken = FreeSlot(heapq.heappop(slots.free), is_hole=True)
        else:
            taken = FreeSlot(slots.num_slots, is_hole=True)
            slots.num_slots += 1
        self.punch(max_bytes)
        return taken

    def release(self, page_bytes: int, slot: int, payload_bytes: int) -> None:
        """A page left its slot."""
        slots = self._sizes[page_bytes]
        space = slots.file.space_of(payload_bytes)
        self._use(slots, -space)
        self.freed_bytes += space
        slots.freed[slot] = space

    def punch(self, max_bytes: int = 0) -> None:
        """Make freed slots holes until all slots take at most `max_bytes`."""
        for slots in self._sizes.values():
            while slots.freed and self.used_bytes + self.freed_bytes > max_bytes:
                slot, space = slots.freed.popitem()
                heapq.heappush(slots.free, slot)
                self.freed_bytes -= space
                slots.file.punch(slot)

    def trim(self) -> None:
        """Make all freed slots holes, and cut those off that end a file."""
        self.punch()
        for slots in self._sizes.values():
            free = set(slots.free)
            while slots.num_slots - 1 in free:
                slots.num_slots -= 1
            slots.free = sorted(slot for slot in free if slot < slots.num_slots)
            slots.file.truncate(slots.num_slots)

    def probe(self) -> None:
        """OSError when the disk takes no further slot of the largest size."""
        largest = self._sizes[max(self._sizes)]
        largest.file.probe(largest.num_slots)

    def _use(self, slots: _SizeSlots, num_bytes: int) -> None:
        slots.used_bytes += num_bytes
        self.used_bytes += num_bytes
