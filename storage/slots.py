"""The state of each slot of a store: used, free or hole. The states are in memory while the store is open.

A free slot has disk space; a hole is a slot without disk space. All holes of a segment become free slots at the same
time, so that a write needs no allocation by the file system. The slots of a segment without pages can become holes
again, which frees space for pages of another length. The slot of a removed page may be overwritten immediately. A
thread that still reads the slot finds another key in the block, or bytes that fail verification, and looks up the key
again.
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

_MAX_SEGMENT_BYTES, _SEGMENT_SHARE = 256 << 20, 64  # a segment has 1/64 of the budget, at most 256 MiB
_PROBE_BYTES = 64 << 20
_HOLE, _FREE, _STALE, _USED = range(4)  # states of a slot; a stale slot is free, but its block still names a page


class Sizes(NamedTuple):
    """Number of pages, bytes of their values with headers, and bytes of the uncompressed pages."""

    entries: int = 0
    live_bytes: int = 0
    raw_bytes: int = 0

    @classmethod
    def of(cls, records: npt.NDArray[np.void]) -> Sizes:
        """Compute the sizes from the records of an index."""
        payloads, pages = (int(records[name].sum(dtype=np.int64)) for name in ("payload_bytes", "page_bytes"))
        return cls(len(records), len(records) * HEADER_BYTES + payloads, pages)

    def plus(self, sign: int, page_bytes: int, payload_bytes: int) -> Sizes:
        """Return the sizes after one page is added (`sign` 1) or removed (`sign` -1)."""
        live_bytes = self.live_bytes + sign * (HEADER_BYTES + payload_bytes)
        return Sizes(self.entries + sign, live_bytes, self.raw_bytes + sign * page_bytes)


class Segment(NamedTuple):
    """Slots of one file that are allocated and freed together."""

    length: SlotLength
    slots: range


_Slots: TypeAlias = npt.NDArray[np.intp]


class _FileSlots:
    """The slots of one file, as `states[segment, slot]`; slots after the end of the file are holes."""

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
        """Return the slots that can become holes: the free slots in segments without a page."""
        if not self.file.has_holes:
            return np.zeros(0, dtype=np.intp)
        return np.flatnonzero((self.states != _HOLE) & ~(self.states == _USED).any(axis=1, keepdims=True))

    def take(self, count: int) -> list[int]:
        """Mark the first `count` free slots as used; returns them in ascending order."""
        taken: list[int] = self.free[:count].tolist()
        self._all[taken] = _USED
        return taken

    def release(self, slot: int) -> None:
        self._all[slot] = _STALE

    def grow(self, least: int, most: int) -> int:
        """Allocate disk space for holes up to the end of a segment, but for at least `least` and at most `most` slots.
        If the disk has too little space, allocate `least` slots. Returns the number of allocated slots."""
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
        """Turn free slots into holes if the file system has holes."""
        self._all[slots] = _HOLE if self.file.punch(slots.tolist()) else _FREE

    def erase(self) -> None:
        stale = np.flatnonzero(self._all == _STALE)
        self.file.erase(stale.tolist())
        self._all[stale] = _FREE

    def cut(self) -> None:
        """Cut the file after its last used slot."""
        end = int(self.used.max(initial=-1)) + 1
        self.file.truncate(end)
        self._all[end:] = _HOLE

    def most_free(self) -> tuple[int, range]:
        """Find the segment with most free slots among the segments with a page. Returns the number of free slots, and
        the slots of the segment."""
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
    """All slots of a store. The `records` of the index name the used slots. Only the writer thread calls the methods.
    Raises OSError if the disk fails.

    `num_misplaced`: number of pages in `records` whose slot lies outside their file or belongs to another page too.
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
        """Disk space of all used slots, in bytes."""
        return sum(length.slot_bytes * len(slots.used) for length, slots in self._slots.items())

    @property
    def disk_bytes(self) -> int:
        """Disk space of all used and free slots, in bytes."""
        return sum(length.slot_bytes * int(np.count_nonzero(slots.states)) for length, slots in self._slots.items())

    def settle(self) -> None:
        """Correct the states after opening. If the files have less disk space than `disk_bytes`, some slots that count
        as free are holes; then trim the files."""
        if self._files.disk_bytes() < self.disk_bytes:
            self.trim()

    def missing_bytes(self, needed: Mapping[SlotLength, int], max_bytes: int) -> int:
        """Return the bytes by which the slots would exceed `max_bytes` if all segments without pages became holes and
        the `needed` slots were free."""
        total_bytes = sum(length.slot_bytes * n for length, n in needed.items() if length not in self._slots)
        for length, slots in self._slots.items():
            count = max(needed.get(length, 0), len(slots.free) - len(slots.reclaimable))
            total_bytes += length.slot_bytes * (len(slots.used) + count)
        return total_bytes - max_bytes

    def reserve(self, needed: Mapping[SlotLength, int], max_bytes: int) -> None:
        """Allocate disk space within `max_bytes` until the `needed` slots are free. `missing_bytes` must have returned
        at most 0."""
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
        """Return the segment with most free bytes among the segments with pages. Returns None unless the free slots of
        all these segments have more than `max_bytes` together."""
        files = [(length, slots) for length, slots in self._slots.items() if slots.file.has_holes]
        scattered = (length.slot_bytes * (len(slots.free) - len(slots.reclaimable)) for length, slots in files)
        if sum(scattered) <= max_bytes:
            return None
        length, slots = max(files, key=lambda one: one[0].slot_bytes * one[1].most_free()[0])
        return Segment(length, slots.most_free()[1])

    def take(self, needed: Mapping[SlotLength, int]) -> dict[SlotLength, Iterator[int]]:
        """Mark the slots that `reserve` made free as used. Returns these slots in ascending order."""
        return {length: iter(self._slots[length].take(count)) for length, count in needed.items()}

    def fill(self, entry: Entry) -> None:
        """Count a page written to a slot that `take` returned."""
        self.sizes = self.sizes.plus(1, entry.page_bytes, entry.payload_bytes)

    def release(self, entry: Entry) -> None:
        """Free the slot of a page that was removed."""
        self.sizes = self.sizes.plus(-1, entry.page_bytes, entry.payload_bytes)
        self._slots[entry.length].release(entry.slot)

    def erase(self) -> None:
        """Erase the blocks of all stale slots, so that no free slot names a page."""
        for slots in self._slots.values():
            slots.erase()

    def trim(self) -> None:
        """Turn all free slots into holes, and cut each file after its last used slot."""
        for slots in self._slots.values():
            slots.punch(slots.free)
            slots.cut()

    def close(self) -> None:
        """Cut each file after its last used slot, turn segments without pages into holes, and erase the blocks of stale
        slots."""
        for slots in self._slots.values():
            slots.cut()
            slots.punch(slots.reclaimable)
            slots.erase()

    def probe(self) -> None:
        """Write a slot of the largest size, but at most 64 MiB of its payload, and remove the slot again. Raises
        OSError if the disk has no space."""
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
    """Return, for each record of an index, whether its page has this slot length."""
    found = np.asarray(records["page_bytes"] == length.page_bytes, dtype=np.bool_)
    payloads, which = np.unique(records["payload_bytes"][found], return_inverse=True)
    fit = np.array([SlotLength.of(length.page_bytes, n) == length for n in payloads.tolist()], dtype=np.bool_)
    found[found] = fit[which]
    return found
