"""Which slot holds which long value, and which slots are free, in the tables of the store.

A long value is kept in two parts: its header in the table `pages`, with the number of the slot that has the payload.
Writing never touches a slot that any snapshot still shows: one that transaction T frees is used again when T is two
commits old, so that a power cut cannot bring its page back, and no reader is left whose snapshot is older than T. Until
then it counts as freed, and keeps its bytes; afterwards it is free, and a hole.

    pages   key -> u64 slot, u32 length of the payload, header of 48 bytes, u32 CRC-32 over key and the 60 before it
    freed   u64 T, u64 slot (both big-endian, so oldest first) -> u64 bytes that the slot has
    free    u64 slot (big-endian, lowest first) -> nothing
    meta    b"slots" -> u64 number of slots, u64 bytes of those in use, u64 bytes of those freed

Every slot below the number of slots is in exactly one of the three. Bytes are whole blocks of 4096. Owns these records
and every change to them; gets transactions from the store. May import lmdb, the standard library, direct_read, header,
lmdb_tree, packages and slot_file.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from hicache.storage.direct_read import ALIGNMENT
from hicache.storage.header import HEADER_BYTES
from hicache.storage.lmdb_tree import Place
from hicache.storage.packages import lmdb
from hicache.storage.slot_file import Apart, SlotFile, whole_blocks

SLOT_TABLE_NAMES = (b"free", b"freed")
SPACE_KEY = b"slots"
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
    """The counters of the slots."""

    num_slots: int
    used_bytes: int
    freed_bytes: int

    @classmethod
    def read(cls, txn: Any, meta: Any) -> Space:
        """`lmdb.CorruptedError` where there are none."""
        raw = txn.get(SPACE_KEY, db=meta)
        if raw is None or len(raw) != _SPACE.size:
            raise lmdb.CorruptedError("the counters of the slots are damaged")
        return cls(*_SPACE.unpack(raw))

    def pack(self) -> bytes:
        return _SPACE.pack(*self)


@dataclass(frozen=True)
class SlotTables:
    """The file of a store's slots and the handles of their tables. `wall_bytes` bounds what they take of the medium."""

    file: SlotFile
    free: Any
    freed: Any
    wall_bytes: int = 0

    def place(self, key: bytes, raw: bytes | memoryview | None) -> Place | None:
        """Where the payload of a value lies whose record is `raw`."""
        record = SlotRecord.unpack(key, raw)
        if record is None or whole_blocks(record.num_bytes) > self.file.slot_bytes:
            return None
        offset = record.slot * self.file.slot_bytes
        return Place(offset, HEADER_BYTES + record.num_bytes, record.head) if offset < _MAX_OFFSET else None

    def read(self, place: Place, room: memoryview) -> memoryview:
        """The value, whole, within `room` of `aligned_room`."""
        start = ALIGNMENT - HEADER_BYTES
        room[start:ALIGNMENT] = place.head
        self.file.read(place.offset, place.length - HEADER_BYTES, room[ALIGNMENT:])
        return room[start : start + place.length]

    def used(self, places: Iterable[Place]) -> list[tuple[int, int]]:
        """Slot and length of the payload of each place."""
        return [(place.offset // self.file.slot_bytes, place.length - HEADER_BYTES) for place in places]

    def tidy(self, txn: Any, meta: Any) -> None:
        """Remove what a process that died was writing: it wrote to the lowest free slots, and behind the last.

        As much as one commit writes; more behind the last slot is left for `faults`, since then a counter is wrong.
        """
        most_slots = max(1, _COMMIT_BYTES // self.file.slot_bytes)
        num_slots = Space.read(txn, meta).num_slots
        if self.file.num_slots() <= num_slots + most_slots:
            self.file.cut(num_slots)
        # A damaged record is left for `faults`.
        with contextlib.suppress(lmdb.CorruptedError), txn.cursor(db=self.free) as cursor:
            for key in islice(cursor.iternext(values=False), most_slots):
                self.file.empty(_numbers(_SLOT, key)[0])

    def faults(self, txn: Any, meta: Any, used: Sequence[tuple[int, int]]) -> Iterator[str]:
        """What does not hold, given slot and length of every payload in `pages`."""
        space = Space.read(txn, meta)
        with txn.cursor(db=self.free) as cursor:
            free = [_numbers(_SLOT, key)[0] for key in cursor.iternext(values=False)]
        with txn.cursor(db=self.freed) as cursor:
            freed = [(_numbers(_FREED, key)[1], _numbers(_BYTES, held)[0]) for key, held in cursor]
        slots = [*free, *(slot for slot, _ in freed), *(slot for slot, _ in used)]
        if len(slots) != space.num_slots or sorted(slots) != list(range(len(slots))):
            counts = f"{len(used)} in use, {len(freed)} freed and {len(free)} free"
            yield f"the {space.num_slots} slots are not all there once: {counts}"
        for name, stated, actual in (
            ("in use", space.used_bytes, sum(whole_blocks(length) for _, length in used)),
            ("freed", space.freed_bytes, sum(held for _, held in freed)),
        ):
            if stated != actual:
                yield f"slots {name} are said to have {stated} bytes, they have {actual}"


class SlotSpace:
    """All changes to slots of one write transaction; writer thread only. Nothing lasts unless `save` and the commit do.

    `oldest_reader` is the oldest snapshot that is being read.
    """

    def __init__(self, txn: Any, tables: SlotTables, meta: Any, oldest_reader: int) -> None:
        self._txn, self._tables, self._meta = txn, tables, meta
        self._reusable = min(txn.id() - _COMMITS_KEPT, oldest_reader)
        self._num_slots, self.used_bytes, self._freed_bytes = Space.read(txn, meta)
        self._has_written = False

    def store(self, key: bytes, value: Apart) -> bytes:
        """Write a payload; returns the record of its value. `lmdb.MapFullError` where that would pass the wall."""
        slot = self._take()
        num_bytes = whole_blocks(len(value.payload))
        if num_bytes > self._tables.file.slot_bytes:
            raise ValueError(f"{num_bytes} bytes do not fit a slot of {self._tables.file.slot_bytes}")
        if self.used_bytes + self._freed_bytes + num_bytes > self._tables.wall_bytes:
            raise lmdb.MapFullError("no room for another slot")
        self._has_written = True
        self._tables.file.write(slot, value.payload)
        if num_bytes < self._tables.file.slot_bytes:
            # It may have more than it says: a process died that wrote to it, or a commit was undone.
            self._tables.file.empty(slot, num_bytes)
        self.used_bytes += num_bytes
        return SlotRecord(slot, len(value.payload), value.head).pack(key)

    def release(self, key: bytes, raw: bytes | None) -> None:
        """Free the slot of the value whose record is `raw`. A damaged record frees none: it could be another's."""
        record = SlotRecord.unpack(key, raw)
        if record is not None:
            num_bytes = whole_blocks(record.num_bytes)
            self.used_bytes -= num_bytes
            self._free_later(record.slot, num_bytes)

    def rebuild(self, used: Sequence[tuple[int, int]]) -> None:
        """Begin anew with the slots that `used` names, each with the length of its payload."""
        self._txn.drop(self._tables.free, delete=False)
        self._txn.drop(self._tables.freed, delete=False)
        self.used_bytes, self._freed_bytes = sum(whole_blocks(length) for _, length in used), 0
        taken = {slot for slot, _ in used}
        self._num_slots = max(taken, default=-1) + 1
        for slot in range(self._num_slots):
            if slot not in taken:
                self._free_later(slot, self._tables.file.slot_bytes)

    def probe(self) -> None:
        """OSError when the medium takes no further slot."""
        self._tables.file.probe(self._num_slots)

    def save(self) -> None:
        """Empty what may be used again and was not, and have what was written reach the medium."""
        if self._recycle():
            self._trim()
        # Never below zero, whatever a damaged record says: what does not fit would keep every later commit from saving.
        space = Space(self._num_slots, max(0, self.used_bytes), max(0, self._freed_bytes))
        self._txn.put(SPACE_KEY, space.pack(), db=self._meta)
        if self._has_written:
            self._tables.file.sync()

    def _take(self) -> int:
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

    def _free_later(self, slot: int, num_bytes: int) -> None:
        self._freed_bytes += num_bytes
        self._txn.put(_FREED.pack(self._txn.id(), slot), _BYTES.pack(num_bytes), db=self._tables.freed)

    def _pop(self, cursor: Any) -> int:
        """Take the freed slot at the cursor out of its table."""
        slot, held_bytes = _numbers(_FREED, cursor.key())[1], _numbers(_BYTES, cursor.value())[0]
        cursor.delete()
        self._freed_bytes -= held_bytes
        return slot

    def _recycle(self) -> bool:
        """Turn freed slots that may be used again into free ones; whether there were any."""
        recycled = False
        with self._txn.cursor(db=self._tables.freed) as cursor:
            while cursor.first() and _numbers(_FREED, cursor.key())[0] <= self._reusable:
                slot = self._pop(cursor)
                self._tables.file.empty(slot)
                self._txn.put(_SLOT.pack(slot), b"", db=self._tables.free)
                recycled = True
        return recycled

    def _trim(self) -> None:
        """Forget free slots behind the last one that is not."""
        with self._txn.cursor(db=self._tables.free) as cursor:
            while cursor.last() and _numbers(_SLOT, cursor.key())[0] == self._num_slots - 1:
                cursor.delete()
                self._num_slots -= 1
        self._tables.file.cut(self._num_slots)


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
