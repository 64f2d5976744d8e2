"""The index of a store: where each page is, and which was used when. An LMDB environment of three tables.

    pages    key -> u64 tick of the last use, u64 slot, u32 bytes of the payload, u32 bytes of the page (little-endian)
    recency  u64 tick (big-endian, so the oldest is first) -> key
    meta     b"totals" -> u64 next tick, u64 bytes of all values, u64 bytes of all pages
             b"slots-SIZE" -> u64 number of slots, u64 disk space of those in use, a u64 for each free one; in a sealed
             index alone

A tick counts uses. Nothing here is verified when it is read: a wrong record leads to a slot that names another page.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np

from hicache.storage.directory import PRIVATE_FILE_MODE
from hicache.storage.header import HEADER_BYTES

READER_SLOTS = 1000  # concurrent read transactions of all processes
_TABLES = (b"pages", b"recency", b"meta")
_CHANGES_PER_CHECK = 256
_TOTALS_KEY = b"totals"
_ENTRY = struct.Struct("<QQII")
_TICK = struct.Struct(">Q")
_TOTALS = struct.Struct("<QQQ")

# What an LMDB call raises when it fails: its own errors, those of the operating system, and SystemError, with which the
# binding reports a failure that it cannot name.
io_errors: tuple[type[Exception], ...] = (OSError, SystemError, lmdb.Error)


class Entry(NamedTuple):
    """Where a page is."""

    tick: int
    slot: int
    payload_bytes: int
    page_bytes: int

    @property
    def place(self) -> tuple[int, int, int]:
        """The entry without its last use."""
        return self[1:]

    @property
    def value_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes


class Totals(NamedTuple):
    """The next tick, and sums over all pages: of their values, and of the pages themselves."""

    next_tick: int = 1
    live_bytes: int = 0
    raw_bytes: int = 0


class NotedSlots(NamedTuple):
    """The slots for pages of one size: how many, the disk space of those in use, and the others."""

    page_bytes: int
    num_slots: int
    used_bytes: int
    free: list[int]


class Index:
    """An open index; any thread reads, one writes. What LMDB raises passes on. Closed once nobody is inside."""

    def __init__(self, path: Path, map_bytes: int, *, writable: bool, shared: bool = True) -> None:
        """`path`: a folder, or a file, which nobody changes. `shared`: others may read or write it meanwhile."""
        self._env = lmdb.open(
            str(path),
            subdir=path.is_dir(),
            map_size=map_bytes,
            readonly=not writable,
            create=writable,
            lock=shared,
            sync=False,
            max_dbs=len(_TABLES),
            max_readers=READER_SLOTS,
            mode=PRIVATE_FILE_MODE,
            meminit=False,
        )
        self._num_changes = 0
        try:
            self._pages, self._recency, self._meta = (self._env.open_db(name, create=writable) for name in _TABLES)
            if shared:
                self._env.reader_check()
        except BaseException:
            self._env.close()
            raise

    def close(self) -> None:
        self._env.close()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._env.begin(buffers=True) as txn:
            get, pages = txn.get, self._pages
            return [get(key, None, pages) is not None for key in keys]

    def locate(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Where the pages are; None for what is not there."""
        with self._env.begin(buffers=True) as txn:
            return [_entry(txn.get(key, None, self._pages)) for key in keys]

    def totals(self) -> Totals:
        with self._env.begin() as txn:
            raw = txn.get(_TOTALS_KEY, db=self._meta)
            return Totals() if raw is None else Totals(*_TOTALS.unpack(raw))

    def num_pages(self) -> int:
        with self._env.begin() as txn:
            return int(txn.stat(self._pages)["entries"])

    def num_bytes(self) -> int:
        """What a compact copy of it takes."""
        with self._env.begin() as txn:
            stats = [txn.stat(table) for table in (self._pages, self._recency, self._meta)]
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return int((pages + len(stats)) * stats[0]["psize"])

    def by_use(self, first_tick: int = 0, *, newest: bool = False, limit: int | None = None) -> list[tuple[int, bytes]]:
        """Ticks and keys in the order of use from a tick on, or from the `newest` back; at most `limit`."""
        with self._env.begin() as txn, txn.cursor(db=self._recency) as cursor:
            if not newest and not cursor.set_range(_TICK.pack(first_tick)):
                return []
            steps = cursor.iterprev() if newest else cursor.iternext()
            return [(_TICK.unpack(tick)[0], key) for tick, key in islice(steps, limit)]

    def entries(self) -> list[tuple[bytes, Entry]]:
        """Every page and where it is, by key."""
        with self._env.begin() as txn, txn.cursor(db=self._pages) as cursor:
            return [(key, Entry(*_ENTRY.unpack(raw))) for key, raw in cursor]

    @contextlib.contextmanager
    def changes(self) -> Iterator[IndexChanges]:
        """Changes that become visible together, when the block ends; none of them if it raises."""
        self._num_changes += 1
        if self._num_changes % _CHANGES_PER_CHECK == 0:
            self._env.reader_check()  # a reader that was killed keeps freed pages from being used again
        with self._env.begin(write=True) as txn:
            changes = IndexChanges(txn, self._pages, self._recency, self._meta)
            yield changes
            totals = (max(0, number) for number in changes.totals)  # whatever a wrong record said
            txn.put(_TOTALS_KEY, _TOTALS.pack(*totals), db=self._meta)

    def note_slots(self, slots: NotedSlots) -> None:
        """Record which slots are in use, for the next opening."""
        numbers = np.array([slots.num_slots, slots.used_bytes, *slots.free], dtype="<u8")
        with self._env.begin(write=True) as txn:
            txn.put(b"slots-%d" % slots.page_bytes, numbers.tobytes(), db=self._meta)

    def noted_slots(self, page_bytes: int) -> NotedSlots:
        with self._env.begin() as txn:
            raw = txn.get(b"slots-%d" % page_bytes, bytes(16), db=self._meta)
        num_slots, used_bytes, *free = np.frombuffer(raw, dtype="<u8").tolist()
        return NotedSlots(page_bytes, num_slots, used_bytes, free)

    def copy_to(self, descriptor: int) -> None:
        """Write a compact copy."""
        self._env.copyfd(descriptor, compact=True)


class IndexChanges:
    """The changes of one write transaction. `pages` and `recency` stay one to one, and `totals` their sums."""

    def __init__(self, txn: Any, pages: Any, recency: Any, meta: Any) -> None:
        self._txn, self._pages, self._recency = txn, pages, recency
        raw = txn.get(_TOTALS_KEY, db=meta)
        self.totals = Totals() if raw is None else Totals(*_TOTALS.unpack(raw))

    def put(self, key: bytes, slot: int, payload_bytes: int, page_bytes: int) -> None:
        """Add a page, which is not there, as the most recently used."""
        entry = Entry(self._append(key), slot, payload_bytes, page_bytes)
        self._txn.put(key, _ENTRY.pack(*entry), db=self._pages)
        self._add(1, entry)

    def touch(self, key: bytes) -> None:
        """Make a page the most recently used; an absent key is ignored."""
        entry = _entry(self._txn.get(key, db=self._pages))
        if entry is not None:
            self._txn.delete(_TICK.pack(entry.tick), db=self._recency)
            self._txn.put(key, _ENTRY.pack(*entry._replace(tick=self._append(key))), db=self._pages)

    def delete(self, key: bytes) -> Entry | None:
        """Remove a page; returns where it was."""
        entry = _entry(self._txn.get(key, db=self._pages))
        if entry is not None:
            self._txn.delete(_TICK.pack(entry.tick), db=self._recency)
            self._txn.delete(key, db=self._pages)
            self._add(-1, entry)
        return entry

    def pop_oldest(self) -> tuple[bytes, Entry] | None:
        """Remove the least recently used page; returns its key and where it was."""
        with self._txn.cursor(db=self._recency) as cursor:
            while cursor.first():
                key = bytes(cursor.value())
                entry = self.delete(key)
                if entry is not None:
                    return key, entry
                cursor.delete()
        return None

    def _append(self, key: bytes) -> int:
        """The next tick, which is the key's from now on."""
        tick = self.totals.next_tick
        # Ticks only grow: appending fills the pages of the table and needs no search.
        self._txn.put(_TICK.pack(tick), key, db=self._recency, append=True)
        self.totals = self.totals._replace(next_tick=tick + 1)
        return tick

    def _add(self, sign: int, entry: Entry) -> None:
        tick, live_bytes, raw_bytes = self.totals
        self.totals = Totals(tick, live_bytes + sign * entry.value_bytes, raw_bytes + sign * entry.page_bytes)


def _entry(raw: bytes | memoryview | None) -> Entry | None:
    return None if raw is None else Entry(*_ENTRY.unpack(raw))
