"""Which slot holds which value, and which slots are free: the slot tables of a store and every change to them.

A store with slots has one file of them for each page size, `pages-SIZE.dat`. A value is kept in two parts: its header
in the table `pages`, with the number of the slot, and its payload in the slot. A slot that any snapshot may still show
is never written: a slot that transaction T freed is reused when T is two commits old, so that a power failure cannot
bring its page back, and when no reader of a snapshot older than T is left. Until then it counts as freed and keeps its
disk space; after that it is free, and a hole.

    pages       key -> u64 slot, u32 length of the payload, header of 52 bytes, u32 CRC-32 over key and the 64 before it
    freed-SIZE  u64 T, u64 slot (both big-endian, so the oldest is first) -> u64 disk space of the slot
    free-SIZE   u64 slot (big-endian, the lowest is first) -> nothing
    meta        b"slots-SIZE" -> u64 number of slots, u64 disk space of those in use, u64 disk space of those freed

Every slot of a file below its number of slots is in exactly one of the three tables. Disk space counts whole blocks of
4096 bytes.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from hicache.storage.header import HEADER_BYTES, HeaderAndPayload, page_bytes_of
from hicache.storage.memory import ALIGNMENT, round_up
from hicache.storage.optional_packages import lmdb
from hicache.storage.slot_file import SlotFile
from hicache.storage.value_file import ValueLocation

_RECORD = struct.Struct(f"<QI{HEADER_BYTES}s")
_CHECKSUM = struct.Struct("<I")
_COUNTERS = struct.Struct("<QQQ")
_FREED = struct.Struct(">QQ")
_SLOT = struct.Struct(">Q")
_SPACE = struct.Struct("<Q")
_COMMITS_KEPT = 2
_MAX_COMMIT_BYTES = 64 << 20  # of payloads that one commit writes, unless it writes a single longer one
_MAX_OFFSET = 1 << 62


class SlotRecord(NamedTuple):
    """The record of a value in `pages`."""

    slot: int
    num_bytes: int
    header: bytes

    @property
    def page_bytes(self) -> int:
        """The size of the page, which determines the file."""
        return page_bytes_of(self.header)

    def pack(self, key: bytes) -> bytes:
        fields = _RECORD.pack(*self)
        return fields + _CHECKSUM.pack(zlib.crc32(fields, zlib.crc32(key)))

    @classmethod
    def unpack(cls, key: bytes, raw: bytes | memoryview | None) -> SlotRecord | None:
        """None for a record that is damaged or belongs to another key."""
        if raw is None or len(raw) != _RECORD.size + _CHECKSUM.size:
            return None
        stated = _CHECKSUM.unpack_from(raw, _RECORD.size)[0]
        if stated != zlib.crc32(raw[: _RECORD.size], zlib.crc32(key)):
            return None
        return cls(*_RECORD.unpack_from(raw))


class SlotCounters(NamedTuple):
    """The counters of one slot file."""

    num_slots: int = 0
    used_bytes: int = 0
    freed_bytes: int = 0

    @classmethod
    def unpack(cls, raw: bytes | memoryview | None) -> SlotCounters:
        """`lmdb.CorruptedError` if the record is missing or of another length."""
        if raw is None or len(raw) != _COUNTERS.size:
            raise lmdb.CorruptedError("the slot counters are damaged")
        return cls(*_COUNTERS.unpack(raw))

    def pack(self) -> bytes:
        return _COUNTERS.pack(*self)


class Payload(NamedTuple):
    """The slot of a value and the length of its payload."""

    slot: int
    num_bytes: int


def slot_table_names(page_bytes: int) -> tuple[bytes, bytes]:
    """The tables of free and of freed slots for pages of one size."""
    return b"free-%d" % page_bytes, b"freed-%d" % page_bytes


def counters_key(page_bytes: int) -> bytes:
    """The key in `meta` of the slot counters for pages of one size."""
    return b"slots-%d" % page_bytes


@dataclass(frozen=True)
class SlotTables:
    """The slots for pages of one size: their file, and the handles of the tables of free and freed slots."""

    page_bytes: int
    file: SlotFile
    free: Any
    freed: Any

    def counters(self, txn: Any, meta: Any) -> SlotCounters:
        return SlotCounters.unpack(txn.get(counters_key(self.page_bytes), db=meta))

    def discard_uncommitted(self, txn: Any, meta: Any) -> None:
        """Free the disk space of what a killed process wrote without a commit: to the lowest free slots, or after the
        last slot.

        At most as much as one commit writes. If there is more after the last slot, a counter is wrong, which `faults`
        reports.
        """
        max_slots = max(1, _MAX_COMMIT_BYTES // self.file.slot_bytes)
        num_slots = self.counters(txn, meta).num_slots
        if self.file.num_slots() <= num_slots + max_slots:
            self.file.truncate(num_slots)
        # `faults` reports damaged records.
        with contextlib.suppress(lmdb.CorruptedError), txn.cursor(db=self.free) as cursor:
            for key in islice(cursor.iternext(values=False), max_slots):
                self.file.punch_hole(_numbers(_SLOT, key)[0])

    def faults(self, txn: Any, meta: Any, used: Sequence[Payload]) -> Iterator[str]:
        """Violations, given every payload in this file that `pages` names."""
        counters = self.counters(txn, meta)
        with txn.cursor(db=self.free) as cursor:
            free = [_numbers(_SLOT, key)[0] for key in cursor.iternext(values=False)]
        with txn.cursor(db=self.freed) as cursor:
            freed = [Payload(_numbers(_FREED, key)[1], _numbers(_SPACE, space)[0]) for key, space in cursor]
        slots = [*free, *(payload.slot for payload in (*freed, *used))]
        where = f"pages of {self.page_bytes} bytes"
        if len(slots) != counters.num_slots or sorted(slots) != list(range(len(slots))):
            found = f"{len(used)} in use, {len(freed)} freed and {len(free)} free"
            yield f"{where}: not every one of {counters.num_slots} slots is recorded once: {found}"
        for name, stated, actual in (
            ("in use", counters.used_bytes, _space_of(used)),
            ("freed", counters.freed_bytes, sum(payload.num_bytes for payload in freed)),
        ):
            if stated != actual:
                yield f"{where}: slots {name} are recorded with {stated} bytes, they have {actual}"


@dataclass(frozen=True)
class SlotSet:
    """All slots of a store, by page size. `max_bytes` bounds the disk space of all slot files together."""

    by_page_bytes: Mapping[int, SlotTables]
    max_bytes: int = 0

    def close(self) -> None:
        for tables in self.by_page_bytes.values():
            tables.file.close()

    def allocated_bytes(self) -> int:
        return sum(tables.file.allocated_bytes() for tables in self.by_page_bytes.values())

    def handles(self) -> list[Any]:
        """The handles of all tables of free and freed slots."""
        return [handle for tables in self.by_page_bytes.values() for handle in (tables.free, tables.freed)]

    def locate(self, key: bytes, raw: bytes | memoryview | None) -> ValueLocation | None:
        """Where the value is whose record is `raw`; None for a damaged record."""
        record = SlotRecord.unpack(key, raw)
        tables = None if record is None else self.by_page_bytes.get(record.page_bytes)
        if record is None or tables is None or round_up(record.num_bytes) > tables.file.slot_bytes:
            return None
        offset = record.slot * tables.file.slot_bytes
        if offset >= _MAX_OFFSET:
            return None
        return ValueLocation(offset, HEADER_BYTES + record.num_bytes, record.header)

    def file_of(self, location: ValueLocation) -> SlotFile:
        return self.by_page_bytes[page_bytes_of(location.header)].file

    def read(self, location: ValueLocation, buffer: memoryview) -> memoryview:
        """The whole value, within `buffer`, from `aligned_buffer`."""
        start = ALIGNMENT - HEADER_BYTES
        buffer[start:ALIGNMENT] = location.header
        self.file_of(location).read(location.offset, location.length - HEADER_BYTES, buffer[ALIGNMENT:])
        return buffer[start : start + location.length]

    def payloads(self, locations: Iterable[ValueLocation]) -> dict[int, list[Payload]]:
        """The payloads at `locations`, by page size."""
        found: dict[int, list[Payload]] = {page_bytes: [] for page_bytes in self.by_page_bytes}
        for location in locations:
            slot = location.offset // self.file_of(location).slot_bytes
            found[page_bytes_of(location.header)].append(Payload(slot, location.length - HEADER_BYTES))
        return found

    def faults(self, txn: Any, meta: Any, locations: Iterable[ValueLocation]) -> Iterator[str]:
        """Violations, given where all values are that `pages` names."""
        found = self.payloads(locations)
        for page_bytes, tables in self.by_page_bytes.items():
            yield from tables.faults(txn, meta, found[page_bytes])


class SlotChanges:
    """The changes to slots of one write transaction; writer thread. They last if `save` and then the commit succeed.

    `oldest_reader`: the oldest snapshot that is being read.
    """

    def __init__(self, txn: Any, slots: SlotSet, meta: Any, oldest_reader: int) -> None:
        reusable = min(txn.id() - _COMMITS_KEPT, oldest_reader)
        self._slots = slots
        self._files = {
            page_bytes: _FileChanges(txn, tables, meta, reusable) for page_bytes, tables in slots.by_page_bytes.items()
        }

    @property
    def used_bytes(self) -> int:
        """Disk space of the slots in use."""
        return sum(file.used_bytes for file in self._files.values())

    def store(self, key: bytes, value: HeaderAndPayload) -> bytes:
        """Write a payload; returns the record of its value. `lmdb.MapFullError` where that would pass `max_bytes`."""
        file, num_bytes = self._files[page_bytes_of(value.header)], round_up(len(value.payload))
        slot = file.allocate()
        if self._allocated_bytes() + num_bytes > self._slots.max_bytes:
            for each in self._files.values():  # freed slots of other sizes still have their disk space
                each.recycle()
        if self._allocated_bytes() + num_bytes > self._slots.max_bytes:
            raise lmdb.MapFullError("no space for another slot")
        file.write(slot, value.payload)
        return SlotRecord(slot, len(value.payload), value.header).pack(key)

    def free(self, key: bytes, raw: bytes | None) -> None:
        """Free the slot of the value whose record is `raw`. A damaged record frees none: it could be another
        value's."""
        record = SlotRecord.unpack(key, raw)
        file = None if record is None else self._files.get(record.page_bytes)
        if record is not None and file is not None:
            file.free(Payload(record.slot, record.num_bytes))

    def rebuild(self, locations: Iterable[ValueLocation]) -> None:
        """Rebuild all slot tables from the values at `locations`."""
        for page_bytes, used in self._slots.payloads(locations).items():
            self._files[page_bytes].rebuild(used)

    def probe(self) -> None:
        """OSError when the disk takes no further slot of the largest size."""
        self._files[max(self._files)].probe()

    def save(self) -> None:
        """Make reusable slots holes, store the counters, and sync what was written."""
        for file in self._files.values():
            file.save()

    def _allocated_bytes(self) -> int:
        return sum(file.used_bytes + file.freed_bytes for file in self._files.values())


class _FileChanges:
    """The changes to the slots of one page size in one write transaction. Slots that were freed up to commit `reusable`
    may be reused."""

    def __init__(self, txn: Any, tables: SlotTables, meta: Any, reusable: int) -> None:
        self._txn, self._tables, self._meta, self._reusable = txn, tables, meta, reusable
        self._num_slots, self.used_bytes, self.freed_bytes = self._before = tables.counters(txn, meta)
        self._has_written = self._has_recycled = False

    def allocate(self) -> int:
        """A slot to be written: a reusable one, a free one, or a new one."""
        with self._txn.cursor(db=self._tables.freed) as cursor:
            if cursor.first() and _numbers(_FREED, cursor.key())[0] <= self._reusable:
                return self._pop(cursor)
        with self._txn.cursor(db=self._tables.free) as cursor:
            if cursor.first():
                slot = _numbers(_SLOT, cursor.key())[0]
                cursor.delete()
                return slot
        self._num_slots += 1
        return self._num_slots - 1

    def write(self, slot: int, payload: bytes | memoryview) -> None:
        """Write to an allocated slot."""
        file, num_bytes = self._tables.file, round_up(len(payload))
        if num_bytes > file.slot_bytes:
            raise ValueError(f"{num_bytes} bytes do not fit a slot of {file.slot_bytes}")
        self._has_written = True
        file.write(slot, payload)
        if num_bytes < file.slot_bytes:
            # A killed process or an aborted commit may have written more to it.
            file.punch_hole(slot, num_bytes)
        self.used_bytes += num_bytes

    def free(self, payload: Payload) -> None:
        num_bytes = round_up(payload.num_bytes)
        self.used_bytes -= num_bytes
        self._add_freed(payload.slot, num_bytes)

    def rebuild(self, used: Sequence[Payload]) -> None:
        """Rebuild the tables: the slots of `used` are in use, all others freed."""
        self._txn.drop(self._tables.free, delete=False)
        self._txn.drop(self._tables.freed, delete=False)
        self.used_bytes, self.freed_bytes = _space_of(used), 0
        slots = {payload.slot for payload in used}
        self._num_slots = max(slots, default=-1) + 1
        for slot in range(self._num_slots):
            if slot not in slots:
                self._add_freed(slot, self._tables.file.slot_bytes)

    def recycle(self) -> None:
        """Turn the freed slots that may be reused into free ones, which are holes."""
        with self._txn.cursor(db=self._tables.freed) as cursor:
            while cursor.first() and _numbers(_FREED, cursor.key())[0] <= self._reusable:
                slot = self._pop(cursor)
                self._tables.file.punch_hole(slot)
                self._txn.put(_SLOT.pack(slot), b"", db=self._tables.free)
                self._has_recycled = True

    def probe(self) -> None:
        self._tables.file.probe(self._num_slots)

    def save(self) -> None:
        self.recycle()
        if self._has_recycled:
            self._trim()
        # Not below zero, whatever a damaged record said: a number that cannot be packed would make every commit fail.
        counters = SlotCounters(self._num_slots, max(0, self.used_bytes), max(0, self.freed_bytes))
        if counters != self._before:
            self._txn.put(counters_key(self._tables.page_bytes), counters.pack(), db=self._meta)
        if self._has_written:
            self._tables.file.sync()

    def _add_freed(self, slot: int, num_bytes: int) -> None:
        self.freed_bytes += num_bytes
        self._txn.put(_FREED.pack(self._txn.id(), slot), _SPACE.pack(num_bytes), db=self._tables.freed)

    def _pop(self, cursor: Any) -> int:
        """Remove the freed slot at the cursor from its table."""
        slot, num_bytes = _numbers(_FREED, cursor.key())[1], _numbers(_SPACE, cursor.value())[0]
        cursor.delete()
        self.freed_bytes -= num_bytes
        return slot

    def _trim(self) -> None:
        """Remove the free slots at the end of the file."""
        with self._txn.cursor(db=self._tables.free) as cursor:
            while cursor.last() and _numbers(_SLOT, cursor.key())[0] == self._num_slots - 1:
                cursor.delete()
                self._num_slots -= 1
        self._tables.file.truncate(self._num_slots)


def _space_of(payloads: Iterable[Payload]) -> int:
    return sum(round_up(payload.num_bytes) for payload in payloads)


def _numbers(fields: struct.Struct, raw: bytes | memoryview) -> tuple[int, ...]:
    """The numbers of a record; `lmdb.CorruptedError` for a record of another length."""
    if len(raw) != fields.size:
        raise lmdb.CorruptedError("a slot record is damaged")
    return fields.unpack(raw)


def oldest_reader(env: Any) -> int:
    """The oldest snapshot that any process is reading; the newest one if none is read."""
    newest = int(env.info()["last_txnid"])
    rows = [line.split() for line in env.readers().splitlines()[1:]]
    return min([newest, *(int(row[2]) for row in rows if len(row) == 3 and row[2].isdecimal())])
