"""Which slots of a store are in use, free or holes. Kept in memory while the store is open.

A free slot has its disk space, a hole has none. Holes become free by segments, so that a page is written where the file
system has nothing to decide, and a segment without a page can become a hole again, for pages of another length. A slot
that a page left may be written at once: whoever still reads it finds another key in its block, or bytes that do not
verify, and looks the key up again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.storage.header import HEADER_BYTES
from hicache.storage.index import Entry
from hicache.storage.slot_file import BLOCK_BYTES, SlotFile, SlotLength, SlotWrite
from hicache.storage.slot_files import SlotFiles

_MAX_SEGMENT_BYTES, _SEGMENT_SHARE = 256 << 20, 64  # of the budget
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


class Segment(NamedTuple):
    """Slots of one file that take and give back their disk space together."""

    length: SlotLength
    slots: range


class _FileSlots:
    """The slots of one file: those below `num_slots` that are neither `free` nor `holes`, both heaps, are in use.

    `stale`: free slots whose blocks may name pages. `num_empty`: free slots in segments without a page.
    """

    def __init__(self, file: SlotFile, segment_bytes: int, used: npt.NDArray[np.bool_]) -> None:
        self.file, self.per_segment = file, max(1, segment_bytes // file.slot_bytes)
        self.num_slots, self.free, self.holes = len(used), np.flatnonzero(~used).tolist(), list[int]()
        self.stale: set[int] = set()
        self.num_used = int(np.count_nonzero(used))
        self._used_in = Counter((np.flatnonzero(used) // self.per_segment).tolist())
        self._count_free()

    def take(self) -> int:
        slot = heapq.heappop(self.free)
        at = slot // self.per_segment
        if not self._used_in[at]:
            self.num_empty -= self._free_in[at]
        self._free_in[at] -= 1
        self._used_in[at] += 1
        self.num_used += 1
        self.stale.discard(slot)
        return slot

    def release(self, slot: int) -> None:
        at = slot // self.per_segment
        self._used_in[at] -= 1
        self._free_in[at] += 1
        if not self._used_in[at]:
            self.num_empty += self._free_in[at]
        self.num_used -= 1
        heapq.heappush(self.free, slot)
        self.stale.add(slot)

    @property
    def num_reclaimable(self) -> int:
        """How many free slots can become holes."""
        return self.num_empty if self.file.has_holes else 0

    def grow(self, least: int, most: int) -> int:
        """Give disk space to holes, as many as end a segment if they are between `least` and `most`; how many."""
        first = self.holes[0] if self.holes else self.num_slots
        count = max(least, min(most, self.per_segment - first % self.per_segment))
        chosen = [heapq.heappop(self.holes) for _ in range(min(count, len(self.holes)))]
        chosen += range(self.num_slots, self.num_slots + count - len(chosen))
        try:
            self.file.allocate(chosen)
        except OSError:
            self.file.truncate(self.num_slots)
            self.holes += [slot for slot in chosen if slot < self.num_slots]
            raise
        self.num_slots = max(self.num_slots, chosen[-1] + 1)
        self.free += chosen
        heapq.heapify(self.free)
        self._count_free()
        return len(chosen)

    def give_back(self, count: int) -> None:
        """Make the last `count` free slots in segments without a page holes."""
        empty = sorted(slot for slot in self.free if not self._used_in[slot // self.per_segment])
        self.punch(empty[len(empty) - count :])

    def punch(self, slots: list[int]) -> None:
        """Make these free slots holes, where the file system can."""
        chosen = set(slots)
        is_hole = self.file.punch(slots)
        self.stale -= chosen
        if is_hole:
            self.free = [slot for slot in self.free if slot not in chosen]
            self.holes += slots
            for heap in (self.free, self.holes):
                heapq.heapify(heap)
            self._count_free()

    def erase(self) -> None:
        self.file.erase(sorted(self.stale))
        self.stale.clear()

    def cut(self) -> None:
        """Cut off what ends the file and holds no page."""
        unused = {*self.free, *self.holes}
        while self.num_slots - 1 in unused:
            self.num_slots -= 1
        self.file.truncate(self.num_slots)
        self.stale = {slot for slot in self.stale if slot < self.num_slots}
        self.free, self.holes = (sorted(s for s in heap if s < self.num_slots) for heap in (self.free, self.holes))
        self._count_free()

    def most_free(self) -> tuple[int, range]:
        """How many slots are free in the segment that has a page and most free ones, and its slots."""
        most = max((at for at in self._free_in if self._used_in[at]), key=self._free_in.__getitem__, default=0)
        return self._free_in[most], range(most * self.per_segment, (most + 1) * self.per_segment)

    def recount(self) -> bool:
        """Whether every slot is counted once."""
        counts = dict(self._free_in), self.num_empty
        self._count_free()
        found = {at: n for at, n in self._free_in.items() if n}, self.num_empty
        unused = {*self.free, *self.holes}
        return (
            ({at: n for at, n in counts[0].items() if n}, counts[1]) == found
            and len(unused) == len(self.free) + len(self.holes) == self.num_slots - self.num_used
            and self.stale <= set(self.free)
        )

    def _count_free(self) -> None:
        self._free_in = Counter(slot // self.per_segment for slot in self.free)
        self.num_empty = sum(count for at, count in self._free_in.items() if not self._used_in[at])


class Slots:
    """All slots of a store; the writer's thread. OSError where the disk fails.

    `used_bytes`, `free_bytes`: disk space. `num_misplaced`: how many pages have no slot of their own in their file, as
    the records of the index say, from which this is made.
    """

    def __init__(self, files: SlotFiles, records: npt.NDArray[np.void]) -> None:
        self.sizes, self._files = Sizes.of(records), files
        self._segment_bytes = min(_MAX_SEGMENT_BYTES, files.record.budget_bytes // _SEGMENT_SHARE)
        self._slots: dict[SlotLength, _FileSlots] = {}
        num_fit = 0
        for length, file in files.items():
            used = np.zeros(file.num_slots(), dtype=np.bool_)
            slots = records["slot"][_are_of(records, length)]
            used[slots[slots < len(used)].astype(np.int64)] = True
            self._slots[length] = _FileSlots(file, self._segment_bytes, used)
            num_fit += self._slots[length].num_used
        self.num_misplaced = len(records) - num_fit

    @property
    def used_bytes(self) -> int:
        return sum(length.slot_bytes * slots.num_used for length, slots in self._slots.items())

    @property
    def free_bytes(self) -> int:
        return sum(length.slot_bytes * len(slots.free) for length, slots in self._slots.items())

    def settle(self) -> None:
        """Have the disk space that is counted, after opening: of free slots some may be holes already."""
        if self._files.disk_bytes() < self.used_bytes + self.free_bytes:
            self.trim()

    def missing_bytes(self, needed: Mapping[SlotLength, int], max_bytes: int) -> int:
        """How much more than `max_bytes` there would be with so many free slots, and without segments that have no
        page."""
        total_bytes = sum(length.slot_bytes * n for length, n in needed.items() if length not in self._slots)
        for length, slots in self._slots.items():
            count = max(needed.get(length, 0), len(slots.free) - slots.num_reclaimable)
            total_bytes += length.slot_bytes * (slots.num_used + count)
        return total_bytes - max_bytes

    def reserve(self, needed: Mapping[SlotLength, int], max_bytes: int) -> None:
        """Have so many free slots, within `max_bytes`, of which none must be missing."""
        lacking = {length: max(0, count - len(self._of(length).free)) for length, count in needed.items()}
        grown_bytes = sum(length.slot_bytes * count for length, count in lacking.items())
        left_bytes = max_bytes - self.used_bytes - self.free_bytes - grown_bytes
        for length, slots in self._slots.items():
            surplus = min(slots.num_reclaimable, len(slots.free) - needed.get(length, 0))
            if left_bytes < 0 < surplus:
                count = min(surplus, max(slots.per_segment, -(left_bytes // length.slot_bytes)))
                slots.give_back(count)
                left_bytes += length.slot_bytes * count
        for length, count in lacking.items():
            if count:
                grown = self._slots[length].grow(count, count + max(0, left_bytes) // length.slot_bytes)
                left_bytes -= length.slot_bytes * (grown - count)

    def most_scattered(self, max_bytes: int) -> Segment | None:
        """If more than `max_bytes` are free in segments that have a page, that with most of it."""
        files = [(length, slots) for length, slots in self._slots.items() if slots.file.has_holes]
        scattered_bytes = sum(length.slot_bytes * (len(slots.free) - slots.num_reclaimable) for length, slots in files)
        if scattered_bytes <= max_bytes:
            return None
        length, slots = max(files, key=lambda one: one[0].slot_bytes * one[1].most_free()[0])
        return Segment(length, slots.most_free()[1])

    def take(self, page_bytes: int, payload_bytes: int) -> Entry:
        """A slot for a payload, from now on in use; one is free, see `reserve`."""
        slot = self._slots[SlotLength.of(page_bytes, payload_bytes)].take()
        self.sizes = self.sizes.plus(1, page_bytes, payload_bytes)
        return Entry(slot, payload_bytes, page_bytes)

    def release(self, entry: Entry) -> None:
        """A page left its slot."""
        self.sizes = self.sizes.plus(-1, entry.page_bytes, entry.payload_bytes)
        self._slots[entry.length].release(entry.slot)

    def erase(self) -> None:
        """Have no free slot name a page."""
        for slots in self._slots.values():
            slots.erase()

    def trim(self) -> None:
        """Make all free slots holes, and cut those off that end a file."""
        for slots in self._slots.values():
            slots.punch(sorted(slots.free))
            slots.cut()

    def close(self) -> None:
        """Leave files that end with a page, no whole segment without one, and no slot that names one which it has
        not."""
        for slots in self._slots.values():
            slots.cut()
            slots.give_back(slots.num_reclaimable)
            slots.erase()

    def probe(self) -> None:
        """OSError when the disk takes no further slot of the largest size, or 64 MiB of a longer one."""
        page_bytes = self._files.record.page_sizes[-1]
        slots = self._of(SlotLength(page_bytes, self._files.record.max_slot_bytes(page_bytes)))
        payload = bytes(min(page_bytes, _PROBE_BYTES))
        try:
            slots.file.allocate([slots.num_slots])
            slots.file.write([SlotWrite(slots.num_slots, bytes(BLOCK_BYTES), memoryview(payload))])
            slots.file.sync()
        finally:
            slots.file.truncate(slots.num_slots)

    def recount(self) -> bool:
        """Whether what is counted agrees with what there is."""
        return all(slots.recount() for slots in self._slots.values())

    def _of(self, length: SlotLength) -> _FileSlots:
        if length not in self._slots:
            file = self._files.make(length)
            self._slots[length] = _FileSlots(file, self._segment_bytes, np.zeros(0, dtype=np.bool_))
        return self._slots[length]


def _are_of(records: npt.NDArray[np.void], length: SlotLength) -> npt.NDArray[np.bool_]:
    """Which of the records of an index are of pages in such slots."""
    found = np.asarray(records["page_bytes"] == length.page_bytes, dtype=np.bool_)
    payloads, which = np.unique(records["payload_bytes"][found], return_inverse=True)
    fit = np.array([SlotLength.of(length.page_bytes, n) == length for n in payloads.tolist()], dtype=np.bool_)
    found[found] = fit[which]
    return found
