"""Which slot holds which value, and which slots are free, in the tables of the store.

Where a store has slots, there is one file of them for each page size, `pages-SIZE.dat`. A value is kept in two parts:
its header in the table `pages`, with the number of the slot that has the payload.
Writing never touches a slot that any snapshot still shows: one that transaction T frees is used again when T is two
commits old, so that a power cut cannot bring its page back, and no reader is left whose snapshot is older than T. Until
then it counts as freed, and keeps its bytes; afterwards it is free, and a hole.

    pages       key -> u64 slot, u32 length of the payload, header of 48 bytes, u32 CRC-32 over key and the 60 before it
    freed-SIZE  u64 T, u64 slot (both big-endian, so oldest first) -> u64 bytes that the slot has
    free-SIZE   u64 slot (big-endian, lowest first) -> nothing
    meta        b"slots-SIZE" -> u64 number of slots, u64 bytes of those in use, u64 bytes of those freed

Every slot below the number of slots of its file is in exactly one of the three. Bytes are whole blocks of 4096. Owns
these records and every change to them; gets transactions from the store.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from hicache.storage.header import HEADER_BYTES, page_bytes_of
from hicache.storage.lmdb_tree import Place
from hicache.storage.memory import ALIGNMENT
from hicache.storage.packages import lmdb
from hicache.storage.slot_file import Apart, SlotFile, whole_blocks

_RECORD = struct.Struct(f"<QI{HEADER_BYTES}s")
_CHECKSUM = struct.Struct("<I")
_SPACE = struct.Struct("<QQQ")
_FREED = struct.Struct(">QQ")
_SLOT = struct.Struct(">Q")
_BYTES = struct.Struct("<Q")
_COMMITS_KEPT = 2
_COMMIT_BYTES = 64 << 20  # of payloads that one commit writes at most, unless a single one is longer
_MAX_OFFSET = 1 << 62


class SlotRecord(NamedTuple):
    """What `pages` says of a value."""

    slot: int
    num_bytes: int
    head: bytes

    @property
    def page_bytes(self) -> int:
        """The size of the page, which names the file."""
        return page_bytes_of(self.head)

    def pack(self, key: bytes) -> bytes:
        fields = _RECORD.pack(*self)
        return fields + _CHECKSUM.pack(zlib.crc32(fields, zlib.crc32(key)))

    @classmethod
    def unpack(cls, key: bytes, raw: bytes | memoryview | None) -> SlotRecord | None:
        """None for a record that is damaged, or of another key."""
        if raw is None or len(raw) != _RECORD.size + _CHECKSUM.size:
            return None
        stated = _CHECKSUM.unpack_from(raw, _RECORD.size)[0]
        if stated != zlib.crc32(raw[: _RECORD.size], zlib.crc32(key)):
            return None
        return cls(*_RECORD.unpack_from(raw))


class Space(NamedTuple):
    """The counters of one file of slots."""

    num_slots: int = 0
    used_bytes: int = 0
    freed_bytes: int = 0

    @classmethod
    def unpack(cls, raw: bytes | memoryview | None) -> Space:
        """`lmdb.CorruptedError` for another length, or none."""
        if raw is None or len(raw) != _SPACE.size:
            raise lmdb.CorruptedError("the counters of the slots are damaged")
        return cls(*_SPACE.unpack(raw))

    def pack(self) -> bytes:
        return _SPACE.pack(*self)


class Payload(NamedTuple):
    """The slot of a value and the length of what it holds."""

    slot: int
    num_bytes: int


def slot_table_names(page_bytes: int) -> tuple[bytes, bytes]:
    """The tables of free and of freed slots for pages of one size."""
    return b"free-%d" % page_bytes, b"freed-%d" % page_bytes


def space_key(page_bytes: int) -> bytes:
    """The record in `meta` with the counters of the slots for pages of one size."""
    return b"slots-%d" % page_bytes


@dataclass(frozen=True)
class SlotTables:
    """The slots for pages of one size: their file, and the handles of the tables of free and freed ones."""

    page_bytes: int
    file: SlotFile
    free: Any
    freed: Any

    def space(self, txn: Any, meta: Any) -> Space:
        return Space.unpack(txn.get(space_key(self.page_bytes), db=meta))

    def tidy(self, txn: Any, meta: Any) -> None:
        """Remove what a process that died was writing: it wrote to the lowest free slots, and behind the last.

        As much as one commit writes; more behind the last slot is left for `faults`, since then a counter is wrong.
        """
        max_slots = max(1, _COMMIT_BYTES // self.file.slot_bytes)
        num_slots = self.space(txn, meta).num_slots
        if self.file.num_slots() <= num_slots + max_slots:
            self.file.cut(num_slots)
        # A damaged record is left for `faults`.
        with contextlib.suppress(lmdb.CorruptedError), txn.cursor(db=self.free) as cursor:
            for key in islice(cursor.iternext(values=False), max_slots):
                self.file.empty(_numbers(_SLOT, key)[0])

    def faults(self, txn: Any, meta: Any, used: Sequence[Payload]) -> Iterator[str]:
        """What does not hold, given every payload in this file that `pages` names."""
        space = self.space(txn, meta)
        with txn.cursor(db=self.free) as cursor:
            free = [_numbers(_SLOT, key)[0] for key in cursor.iternext(values=False)]
        with txn.cursor(db=self.freed) as cursor:
            freed = [Payload(_numbers(_FREED, key)[1], _numbers(_BYTES, held)[0]) for key, held in cursor]
        slots = [*free, *(payload.slot for payload in (*freed, *used))]
        if len(slots) != space.num_slots or sorted(slots) != list(range(len(slots))):
            counts = f"{len(used)} in use, {len(freed)} freed and {len(free)} free"
            yield f"pages of {self.page_bytes} bytes: the {space.num_slots} slots are not all there once: {counts}"
        for name, stated, actual in (
            ("in use", space.used_bytes, _blocks_bytes(used)),
            ("freed", space.freed_bytes, sum(payload.num_bytes for payload in freed)),
        ):
            if stated != actual:
                said = f"slots {name} are said to have {stated} bytes, they have {actual}"
                yield f"pages of {self.page_bytes} bytes: {said}"


@dataclass(frozen=True)
class SlotSet:
    """All slots of a store, by page size. `max_bytes` bounds what they take of the medium together."""

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

    def place(self, key: bytes, raw: bytes | memoryview | None) -> Place | None:
        """Where the payload of a value lies whose record is `raw`."""
        record = SlotRecord.unpack(key, raw)
        tables = None if record is None else self.by_page_bytes.get(record.page_bytes)
        if record is None or tables is None or whole_blocks(record.num_bytes) > tables.file.slot_bytes:
            return None
        offset = record.slot * tables.file.slot_bytes
        return Place(offset, HEADER_BYTES + record.num_bytes, record.head) if offset < _MAX_OFFSET else None

    def file_of(self, place: Place) -> SlotFile:
        return self.by_page_bytes[page_bytes_of(place.head)].file

    def read(self, place: Place, room: memoryview) -> memoryview:
        """The value, whole, within `room` of `aligned_buffer`."""
        start = ALIGNMENT - HEADER_BYTES
        room[start:ALIGNMENT] = place.head
        self.file_of(place).read(place.offset, place.length - HEADER_BYTES, room[ALIGNMENT:])
        return room[start : start + place.length]

    def payloads(self, places: Iterable[Place]) -> dict[int, list[Payload]]:
        """The payloads at `places`, by page size."""
        found: dict[int, list[Payload]] = {page_bytes: [] for page_bytes in self.by_page_bytes}
        for place in places:
            page_bytes, slot_bytes = page_bytes_of(place.head), self.file_of(place).slot_bytes
            found[page_bytes].append(Payload(place.offset // slot_bytes, place.length - HEADER_BYTES))
        return found

    def faults(self, txn: Any, meta: Any, places: Iterable[Place]) -> Iterator[str]:
        """What does not hold, given where all values are that `pages` has."""
        found = self.payloads(places)
        for page_bytes, tables in self.by_page_bytes.items():
            yield from tables.faults(txn, meta, found[page_bytes])


class SlotChanges:
    """All changes to slots of one write transaction; writer thread only. Nothing lasts unless `save` and the commit do.

    `oldest_reader` is the oldest snapshot that is being read.
    """

    def __init__(self, txn: Any, slots: SlotSet, meta: Any, oldest_reader: int) -> None:
        reusable = min(txn.id() - _COMMITS_KEPT, oldest_reader)
        self._slots = slots
        self._files = {
            page_bytes: _FileChanges(txn, tables, meta, reusable) for page_bytes, tables in slots.by_page_bytes.items()
        }

    @property
    def used_bytes(self) -> int:
        return sum(file.used_bytes for file in self._files.values())

    def store(self, key: bytes, value: Apart) -> bytes:
        """Write a payload; returns the record of its value. `lmdb.MapFullError` where that would pass `max_bytes`."""
        file, num_bytes = self._files[page_bytes_of(value.head)], whole_blocks(len(value.payload))
        slot = file.take()
        if self._taken_bytes() + num_bytes > self._slots.max_bytes:
            for each in self._files.values():  # slots of other sizes that may be emptied now
                each.recycle()
        if self._taken_bytes() + num_bytes > self._slots.max_bytes:
            raise lmdb.MapFullError("no room for another slot")
        file.write(slot, value.payload)
        return SlotRecord(slot, len(value.payload), value.head).pack(key)

    def release(self, key: bytes, raw: bytes | None) -> None:
        """Free the slot of the value whose record is `raw`. A damaged record frees none: it could be another's."""
        record = SlotRecord.unpack(key, raw)
        file = None if record is None else self._files.get(record.page_bytes)
        if record is not None and file is not None:
            file.release(Payload(record.slot, record.num_bytes))

    def rebuild(self, places: Iterable[Place]) -> None:
        """Begin anew with the slots of the values at `places`."""
        for page_bytes, used in self._slots.payloads(places).items():
            self._files[page_bytes].rebuild(used)

    def probe(self) -> None:
        """OSError when the medium takes no further slot of the largest size."""
        self._files[max(self._files)].probe()

    def save(self) -> None:
        """Empty what may be used again and was not, and have what was written reach the medium."""
        for file in self._files.values():
            file.save()

    def _taken_bytes(self) -> int:
        return sum(file.used_bytes + file.freed_bytes for file in self._files.values())


class _FileChanges:
    """The changes to the slots of one page size in one write transaction. Freed ones up to commit `reusable` may be
    used again."""

    def __init__(self, txn: Any, tables: SlotTables, meta: Any, reusable: int) -> None:
        self._txn, self._tables, self._meta, self._reusable = txn, tables, meta, reusable
        self._num_slots, self.used_bytes, self.freed_bytes = self._before = tables.space(txn, meta)
        self._has_written = self._has_recycled = False

    def take(self) -> int:
        """A slot to be written."""
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
        """Write to a slot that was taken."""
        file, num_bytes = self._tables.file, whole_blocks(len(payload))
        if num_bytes > file.slot_bytes:
            raise ValueError(f"{num_bytes} bytes do not fit a slot of {file.slot_bytes}")
        self._has_written = True
        file.write(slot, payload)
        if num_bytes < file.slot_bytes:
            # It may have more than it says: a process died that wrote to it, or a commit was undone.
            file.empty(slot, num_bytes)
        self.used_bytes += num_bytes

    def release(self, payload: Payload) -> None:
        num_bytes = whole_blocks(payload.num_bytes)
        self.used_bytes -= num_bytes
        self._free_later(payload.slot, num_bytes)

    def rebuild(self, used: Sequence[Payload]) -> None:
        """Begin anew with the slots that `used` names."""
        self._txn.drop(self._tables.free, delete=False)
        self._txn.drop(self._tables.freed, delete=False)
        self.used_bytes, self.freed_bytes = _blocks_bytes(used), 0
        taken = {payload.slot for payload in used}
        self._num_slots = max(taken, default=-1) + 1
        for slot in range(self._num_slots):
            if slot not in taken:
                self._free_later(slot, self._tables.file.slot_bytes)

    def recycle(self) -> None:
        """Empty the freed slots that may be used again: from now on they are free ones."""
        with self._txn.cursor(db=self._tables.freed) as cursor:
            while cursor.first() and _numbers(_FREED, cursor.key())[0] <= self._reusable:
                slot = self._pop(cursor)
                self._tables.file.empty(slot)
                self._txn.put(_SLOT.pack(slot), b"", db=self._tables.free)
                self._has_recycled = True

    def probe(self) -> None:
        self._tables.file.probe(self._num_slots)

    def save(self) -> None:
        self.recycle()
        if self._has_recycled:
            self._trim()
        # Never below zero, whatever a damaged record says: what does not fit would keep every later commit from saving.
        space = Space(self._num_slots, max(0, self.used_bytes), max(0, self.freed_bytes))
        if space != self._before:
            self._txn.put(space_key(self._tables.page_bytes), space.pack(), db=self._meta)
        if self._has_written:
            self._tables.file.sync()

    def _free_later(self, slot: int, num_bytes: int) -> None:
        self.freed_bytes += num_bytes
        self._txn.put(_FREED.pack(self._txn.id(), slot), _BYTES.pack(num_bytes), db=self._tables.freed)

    def _pop(self, cursor: Any) -> int:
        """Take the freed slot at the cursor out of its table."""
        slot, held_bytes = _numbers(_FREED, cursor.key())[1], _numbers(_BYTES, cursor.value())[0]
        cursor.delete()
        self.freed_bytes -= held_bytes
        return slot

    def _trim(self) -> None:
        """Forget free slots behind the last one that is not."""
        with self._txn.cursor(db=self._tables.free) as cursor:
            while cursor.last() and _numbers(_SLOT, cursor.key())[0] == self._num_slots - 1:
                cursor.delete()
                self._num_slots -= 1
        self._tables.file.cut(self._num_slots)


def _blocks_bytes(payloads: Iterable[Payload]) -> int:
    return sum(whole_blocks(payload.num_bytes) for payload in payloads)


def _numbers(fields: struct.Struct, raw: bytes | memoryview) -> tuple[int, ...]:
    """The numbers of a record; `lmdb.CorruptedError` for one of another length."""
    if len(raw) != fields.size:
        raise lmdb.CorruptedError("a record of the slots is damaged")
    return fields.unpack(raw)


def oldest_reader(env: Any) -> int:
    """The oldest snapshot that any process is reading; the newest there is when none is."""
    newest = int(env.info()["last_txnid"])
    rows = [line.split() for line in env.readers().splitlines()[1:]]
    return min([newest, *(int(row[2]) for row in rows if len(row) == 3 and row[2].isdecimal())])
