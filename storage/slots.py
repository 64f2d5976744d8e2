"""Which slots of a store are in use, free or holes. Kept in memory while the store is open.

A free slot has its disk space, a hole has none. Holes become free by segments, so that a page is written where the file
system has nothing to decide, and the slots of a segment without a page can become holes again, for pages of another
length. A slot that a page left may be written at once: whoever still reads it finds another key in its block, or bytes
that do not verify, and looks the key up again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.storage.header import HEADER_BYTES
from hicache.storage.index import Entry
from hicache.storage.records import StoreRecord
from hicache.storage.slot_file import BLOCK_BYTES, SlotFile, SlotFiles, SlotLength, SlotWrite

_MAX_SEGMENT_BYTES, _SEGMENT_SHARE = 256 << 20, 64  # of the budget
_PROBE_BYTES = 64 << 20
_HOLE, _FREE, _STALE, _USED = range(4)  # what a slot is; the block of a stale one, which is free, may name a page


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


_Slots: TypeAlias = npt.NDArray[np.intp]


class _FileSlots:
    """The slots of one file, as `states[segment, slot]`; those behind the end of the file are holes."""

    def __init__(self, file: SlotFile, segment_bytes: int, used: npt.NDArray[np.bool_]) -> None:
        self.file = file
        self.states = np.zeros((0, max(1, segment_bytes // file.slot_bytes)), dtype=np.uint8)
        self._extend(len(used))
        self._all[: len(used)] = np.where(used, _USED, _FREE)

    @property
    def used(self) -> _Slots:
        return np.flatnonzero(self._all == _USED)

    @property
    def free(self) -> _Slots:
        return np.flatnonzero((self._all == _FREE) | (self._all == _STALE))

    @property
    def reclaimable(self) -> _Slots:
        """Those free slots that can become holes: in segments without a page."""
        if not self.file.has_holes:
            return np.zeros(0, dtype=np.intp)
        return np.flatnonzero((self.states != _HOLE) & ~(self.states == _USED).any(axis=1, keepdims=True))

    def take(self, count: int) -> list[int]:
        """So many free slots, from now on in use, the first ones."""
        taken: list[int] = self.free[:count].tolist()
        self._all[taken] = _USED
        return taken

    def release(self, slot: int) -> None:
        self._all[slot] = _STALE

    def grow(self, least: int, most: int) -> int:
        """Give disk space to holes, as many as end a segment if they are between `least` and `most`; how many. On a
        disk with too little space for that, `least`."""
        self._extend(int(np.count_nonzero(self.states)) + least)
        holes, per_segment = np.flatnonzero(self._all == _HOLE), self.states.shape[1]
        chosen = holes[: max(least, min(most, per_segment - int(holes[0]) % per_segment))]
        try:
            self.file.allocate(chosen.tolist())
        except OSError:
            self.file.truncate(int(np.flatnonzero(self._all != _HOLE).max(initial=-1)) + 1)
            if len(chosen) > least:
                return self.grow(least, least)
            raise
        self._all[chosen] = _FREE
        return len(chosen)

    def punch(self, slots: _Slots) -> None:
        """Make these free slots holes, where the file system can."""
        self._all[slots] = _HOLE if self.file.punch(slots.tolist()) else _FREE

    def erase(self) -> None:
        stale = np.flatnonzero(self._all == _STALE)
        self.file.erase(stale.tolist())
        self._all[stale] = _FREE

    def cut(self) -> None:
        """Cut off what ends the file and holds no page."""
        end = int(self.used.max(initial=-1)) + 1
        self.file.truncate(end)
        self._all[end:] = _HOLE

    def most_free(self) -> tuple[int, range]:
        """How many slots are free in the segment that has a page and most free ones, and its slots."""
        is_free = (self.states == _FREE) | (self.states == _STALE)
        counts = is_free.sum(axis=1) * (self.states == _USED).any(axis=1)
        at, per_segment = int(counts.argmax()) if len(counts) else 0, self.states.shape[1]
        return int(counts.max(initial=0)), range(at * per_segment, (at + 1) * per_segment)

    @property
    def _all(self) -> npt.NDArray[np.uint8]:
        return self.states.reshape(-1)

    def _extend(self, num_slots: int) -> None:
        missing = -(-num_slots // self.states.shape[1]) - len(self.states)
        self.states = np.pad(self.states, ((0, max(0, missing)), (0, 0)))


class Slots:
    """All slots of a store; the writer's thread. OSError where the disk fails.

    `num_misplaced`: how many pages have no slot of their own in their file, as the records of the index say, from which
    this is made.
    """

    def __init__(self, files: SlotFiles, record: StoreRecord, records: npt.NDArray[np.void]) -> None:
        self.sizes = Sizes.of(records)
        self._files = files
        self._record = record
        self._segment_bytes = min(_MAX_SEGMENT_BYTES, record.budget_bytes // _SEGMENT_SHARE)
        self._slots: dict[SlotLength, _FileSlots] = {}
        for length, file in sorted(files.items()):
            used = np.zeros(file.num_slots(), dtype=np.bool_)
            slots = records["slot"][_are_of(records, length)]
            used[slots[slots < len(used)].astype(np.int64)] = True
            self._slots[length] = _FileSlots(file, self._segment_bytes, used)
        self.num_misplaced = len(records) - sum(len(slots.used) for slots in self._slots.values())

    @property
    def used(self) -> dict[SlotLength, list[int]]:
        return {length: slots.used.tolist() for length, slots in self._slots.items()}

    @property
    def used_bytes(self) -> int:
        """Disk space of slots in use."""
        return sum(length.slot_bytes * len(slots.used) for length, slots in self._slots.items())

    @property
    def disk_bytes(self) -> int:
        """Disk space of all slots."""
        return sum(length.slot_bytes * int(np.count_nonzero(slots.states)) for length, slots in self._slots.items())

    def settle(self) -> None:
        """Have the disk space that is counted, after opening: of free slots some may be holes already."""
        if self._files.disk_bytes() < self.disk_bytes:
            self.trim()

    def missing_bytes(self, needed: Mapping[SlotLength, int], max_bytes: int) -> int:
        """How much more than `max_bytes` there would be with so many free slots, and without segments that have no
        page."""
        total_bytes = sum(length.slot_bytes * n for length, n in needed.items() if length not in self._slots)
        for length, slots in self._slots.items():
            count = max(needed.get(length, 0), len(slots.free) - len(slots.reclaimable))
            total_bytes += length.slot_bytes * (len(slots.used) + count)
        return total_bytes - max_bytes

    def reserve(self, needed: Mapping[SlotLength, int], max_bytes: int) -> None:
        """Have so many free slots, within `max_bytes`, of which none must be missing."""
        lacking = {length: max(0, count - len(self._of(length).free)) for length, count in needed.items()}
        left_bytes = max_bytes - self.disk_bytes
        left_bytes -= sum(length.slot_bytes * count for length, count in lacking.items())
        for length, slots in self._slots.items():
            if left_bytes >= 0:
                break
            surplus = slots.reclaimable[: max(0, len(slots.free) - needed.get(length, 0))]
            chosen = surplus[: max(slots.states.shape[1], -(left_bytes // length.slot_bytes))]
            slots.punch(chosen)
            left_bytes += length.slot_bytes * len(chosen)
        for length, count in lacking.items():
            if count:
                grown = self._slots[length].grow(count, count + max(0, left_bytes) // length.slot_bytes)
                left_bytes -= length.slot_bytes * (grown - count)

    def most_scattered(self, max_bytes: int) -> Segment | None:
        """If more than `max_bytes` are free in segments that have a page, that with most of it."""
        files = [(length, slots) for length, slots in self._slots.items() if slots.file.has_holes]
        scattered = (length.slot_bytes * (len(slots.free) - len(slots.reclaimable)) for length, slots in files)
        if sum(scattered) <= max_bytes:
            return None
        length, slots = max(files, key=lambda one: one[0].slot_bytes * one[1].most_free()[0])
        return Segment(length, slots.most_free()[1])

    def take(self, needed: Mapping[SlotLength, int]) -> dict[SlotLength, Iterator[int]]:
        """Slots that `reserve` made free, from now on in use, in ascending order."""
        return {length: iter(self._slots[length].take(count)) for length, count in needed.items()}

    def fill(self, entry: Entry) -> None:
        """A page came to a slot that was taken."""
        self.sizes = self.sizes.plus(1, entry.page_bytes, entry.payload_bytes)

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
            slots.punch(slots.free)
            slots.cut()

    def close(self) -> None:
        """Leave files that end with a page, no whole segment without one, and no slot that names one which it has
        not."""
        for slots in self._slots.values():
            slots.cut()
            slots.punch(slots.reclaimable)
            slots.erase()

    def probe(self) -> None:
        """OSError when the disk takes no further slot of the largest size, or 64 MiB of a longer one."""
        page_bytes = self._record.page_sizes[-1]
        slots = self._of(SlotLength(page_bytes, self._record.max_slot_bytes(page_bytes)))
        payload, end = bytes(min(page_bytes, _PROBE_BYTES)), slots.file.num_slots()
        try:
            slots.file.allocate([end])
            slots.file.write([SlotWrite(end, bytes(BLOCK_BYTES), memoryview(payload))])
            slots.file.sync()
        finally:
            slots.file.truncate(end)

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
