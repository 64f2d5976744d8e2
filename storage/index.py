"""The index of a store: where each page is, and which was used when. An LMDB environment of two tables.

    pages    key -> u64 tick of the last use, u64 slot, u32 bytes of the payload, u32 bytes of the page (little-endian)
    recency  u64 tick (big-endian, so the oldest is first) -> key

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
import numpy.typing as npt

from hicache.storage.directory import PRIVATE_FILE_MODE
from hicache.storage.header import HEADER_BYTES

READER_SLOTS = 1000  # concurrent read transactions of all processes
_TABLES = (b"pages", b"recency")
_OTHER_PAGES = 3  # of the file: two that say where the tables are, and one with their names
_MIN_MAP_BYTES = 1 << 30  # address space, not memory
_CHANGES_PER_CHECK = 256
_ENTRY = struct.Struct("<QQII")
_TICK = struct.Struct(">Q")
_RECORD = np.dtype([("tick", "<u8"), ("slot", "<u8"), ("payload_bytes", "<u4"), ("page_bytes", "<u4")])

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


class Index:
    """An open index; any thread reads, one writes. What LMDB raises passes on. Closed once nobody is inside."""

    def __init__(self, path: Path, budget_bytes: int, *, writable: bool, shared: bool = True) -> None:
        """`path`: a folder, or a file, which nobody changes. `budget_bytes` of the store: the index needs less than a
        page's share of it for each page. `shared`: others may read or write it meanwhile."""
        self._env = lmdb.open(
            str(path),
            subdir=path.is_dir(),
            map_size=-(-max(_MIN_MAP_BYTES, budget_bytes) // _MIN_MAP_BYTES) * _MIN_MAP_BYTES,
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
            self._pages, self._recency = (self._env.open_db(name, create=writable) for name in _TABLES)
            if shared:
                self._env.reader_check()
            self.next_tick = 1 + max((tick for tick, _ in self.by_use(newest=True, limit=1)), default=0)
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

    def num_pages(self) -> int:
        with self._env.begin() as txn:
            return int(txn.stat(self._pages)["entries"])

    def num_bytes(self) -> int:
        """What a compact copy of it takes."""
        with self._env.begin() as txn:
            stats = [txn.stat(table) for table in (self._pages, self._recency)]
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return int((pages + _OTHER_PAGES) * stats[0]["psize"])

    def by_use(self, *, newest: bool = False, limit: int | None = None) -> list[tuple[int, bytes]]:
        """Ticks and keys in the order of use, oldest or `newest` first; at most `limit`."""
        with self._env.begin() as txn, txn.cursor(db=self._recency) as cursor:
            steps = cursor.iterprev() if newest else cursor.iternext()
            return [(_TICK.unpack(tick)[0], key) for tick, key in islice(steps, limit)]

    def entries(self) -> list[tuple[bytes, Entry]]:
        """Every page and where it is, by key."""
        with self._env.begin() as txn, txn.cursor(db=self._pages) as cursor:
            return [(key, Entry(*_ENTRY.unpack(raw))) for key, raw in cursor]

    def records(self) -> npt.NDArray[np.void]:
        """Where every page is, as an array of records with the fields of `Entry`: a million in 0.2 s."""
        with self._env.begin() as txn, txn.cursor(db=self._pages) as cursor:
            return np.frombuffer(b"".join(cursor.iternext(keys=False)), dtype=_RECORD)

    @contextlib.contextmanager
    def changes(self) -> Iterator[IndexChanges]:
        """Changes that become visible together, when the block ends; none of them if it raises."""
        self._num_changes += 1
        if self._num_changes % _CHANGES_PER_CHECK == 0:
            self._env.reader_check()  # a reader that was killed keeps freed pages from being used again
        with self._env.begin(write=True) as txn:
            changes = IndexChanges(txn, self._pages, self._recency, self.next_tick)
            yield changes
        self.next_tick = changes.next_tick

    def copy_to(self, descriptor: int) -> None:
        """Write a compact copy."""
        self._env.copyfd(descriptor, compact=True)


class IndexChanges:
    """The changes of one write transaction. `pages` and `recency` stay one to one."""

    def __init__(self, txn: Any, pages: Any, recency: Any, next_tick: int) -> None:
        self._txn, self._pages, self._recency = txn, pages, recency
        self.next_tick = next_tick

    def clear(self) -> None:
        """Remove all pages."""
        for table in (self._pages, self._recency):
            self._txn.drop(table, delete=False)

    def put(self, key: bytes, slot: int, payload_bytes: int, page_bytes: int) -> None:
        """Add a page, which is not there, as the most recently used."""
        entry = Entry(self._append(key), slot, payload_bytes, page_bytes)
        self._txn.put(key, _ENTRY.pack(*entry), db=self._pages)

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
        tick = self.next_tick
        # Ticks only grow: appending fills the pages of the table and needs no search.
        self._txn.put(_TICK.pack(tick), key, db=self._recency, append=True)
        self.next_tick = tick + 1
        return tick


def _entry(raw: bytes | memoryview | None) -> Entry | None:
    return None if raw is None else Entry(*_ENTRY.unpack(raw))
