"""The tables of an open store: their records, and reading values through them.

    pages    key -> value, or the record of its slot (slots.py)
    ages     key -> u64 tick, u32 bytes of the value, u32 bytes of the page        (little-endian)
    recency  u64 tick (big-endian, so the oldest is first) -> key
    meta     b"store", b"settings" -> JSON (records.py)
             b"counters" -> u64 next tick, u64 bytes of all values, u64 bytes of all pages
             b"probe" -> bytes, only while a store finds out whether it can write again

A tick counts uses. `ages` and `recency` hold the same ticks one to one, so the use order changes without touching the
value of a page.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hicache.storage.header import HEADER_BYTES
from hicache.storage.lmdb_pages import TreeRoot
from hicache.storage.slots import SlotSet
from hicache.storage.value_file import ValueFile, ValueLocation

TABLE_NAMES = (b"pages", b"ages", b"recency", b"meta")
COUNTERS_KEY, PROBE_KEY = b"counters", b"probe"
TICK = struct.Struct(">Q")
_AGE = struct.Struct("<QII")
_COUNTERS = struct.Struct("<QQQ")


class Age(NamedTuple):
    """The tick of a page's last use, the length of its value, and the length of the page itself."""

    tick: int
    value_bytes: int
    page_bytes: int

    def pack(self) -> bytes:
        return _AGE.pack(*self)

    @classmethod
    def unpack(cls, raw: bytes | memoryview | None) -> Age | None:
        """None if the record is missing or of another length."""
        return None if raw is None or len(raw) != _AGE.size else cls(*_AGE.unpack(raw))


class Totals(NamedTuple):
    """The counters of a store: the next tick, and the sums over all pages of `value_bytes` and `page_bytes`."""

    next_tick: int = 1
    live_bytes: int = 0
    raw_bytes: int = 0

    def pack(self) -> bytes:
        # Not below zero, whatever a damaged record said: a number that cannot be packed would make every commit fail.
        return _COUNTERS.pack(self.next_tick, max(0, self.live_bytes), max(0, self.raw_bytes))

    @classmethod
    def unpack(cls, raw: bytes | memoryview | None) -> Totals | None:
        """None if the record is missing or of another length."""
        return None if raw is None or len(raw) != _COUNTERS.size else cls(*_COUNTERS.unpack(raw))

    @classmethod
    def read(cls, txn: Any, meta: Any) -> Totals:
        """The counters in a snapshot of an open store, which has the record."""
        totals = cls.unpack(txn.get(COUNTERS_KEY, db=meta))
        assert totals is not None
        return totals


class Sizes(NamedTuple):
    """How many pages there are, the bytes of their values, of the pages themselves, and of the files."""

    entries: int = 0
    live_bytes: int = 0
    raw_bytes: int = 0
    file_bytes: int = 0


@dataclass(frozen=True)
class Tables:
    """An open LMDB environment and the handles of its tables; `psize`: bytes of a page of the file.

    `slots`: where values are in slots; None where they are in the table `pages`. LMDB's `get` on that table then reads
    the whole value; `contains` and `locate` do not.
    """

    env: Any
    psize: int
    values: ValueFile
    pages: Any
    ages: Any
    recency: Any
    meta: Any
    slots: SlotSet | None = None

    def close(self) -> None:
        self.env.close()
        self.values.close()
        if self.slots is not None:
            self.slots.close()

    def file_bytes(self) -> int:
        """Disk space of the data file and the slot files now."""
        return self.values.file_bytes() + (0 if self.slots is None else self.slots.allocated_bytes())

    def sizes(self, txn: Any) -> Sizes:
        """The sizes in a snapshot, and of the files now."""
        totals = Totals.read(txn, self.meta)
        return Sizes(txn.stat(self.pages)["entries"], totals.live_bytes, totals.raw_bytes, self.file_bytes())

    def preload_roots(self, txn: Any) -> None:
        """Load the roots of all tables. A cursor does that while it holds Python's interpreter lock; here a hanging
        disk is waited for without it."""
        for table in self._handles():
            txn.stat(table)

    def contains(self, txn: Any, key: bytes) -> bool:
        """Whether there is a page: every page has an age record, and nothing else has."""
        return txn.get(key, db=self.ages) is not None

    def locate(self, txn: Any, keys: Sequence[bytes]) -> list[ValueLocation | None]:
        """Where the values are in the snapshot of `txn`, a read transaction. OSError for an index that cannot be
        read."""
        if self.slots is not None:
            return [self.slots.locate(key, txn.get(key, db=self.pages)) for key in keys]
        root = TreeRoot.unpack(txn.get(TABLE_NAMES[0]), self.env.info()["last_pgno"])
        return self.values.locate(root, keys)

    def read(self, location: ValueLocation, buffer: memoryview) -> memoryview:
        """The whole value, within `buffer`, from `aligned_buffer`. OSError for what cannot be read."""
        if self.slots is not None:
            return self.slots.read(location, buffer)
        return self.values.read(location, buffer)

    def header(self, location: ValueLocation) -> bytes | memoryview | None:
        """The header of a value, not verified; None for a value that is too short for one. OSError for what cannot be
        read."""
        if location.header or location.length < HEADER_BYTES:
            return location.header or None
        return self.values.read(location._replace(length=HEADER_BYTES), memoryview(bytearray(HEADER_BYTES)))

    def data_bytes(self) -> int:
        """Length of the data file, as of the last commit."""
        return int((self.env.info()["last_pgno"] + 1) * self.psize)

    def used_bytes(self, txn: Any) -> int:
        """Bytes of the data file that the tables need in `txn`, including its own changes, without free pages.

        Overflow pages, which hold values, count once. B-tree pages count three times: a commit may rewrite each of them
        while the commit before, whose old copies are not free yet, has done so too.
        """
        stats = [txn.stat(table) for table in self._handles()]
        index_pages = sum(stat["branch_pages"] + stat["leaf_pages"] for stat in stats)
        return int((3 * index_pages + sum(stat["overflow_pages"] for stat in stats)) * self.psize)

    def _handles(self) -> list[Any]:
        slots = [] if self.slots is None else self.slots.handles()
        return [self.pages, self.ages, self.recency, self.meta, *slots]


def entry_bytes(value_bytes: int, psize: int) -> int:
    """About what one page adds to `used_bytes`, index records included; rather too much than too little."""
    if value_bytes < psize // 2 - 600:
        return value_bytes + 600
    return -(-(value_bytes + 16) // psize) * psize + 600
