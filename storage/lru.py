"""Which page goes first: use order and sizes, kept in the store itself so that they survive reopening.

Owns the four tables of the lmdb file and every change to them, and the log in which readers note accesses until the
writer folds them in. May import the standard library, lmdb_meta, lmdb_tree, slot_file and slots; gets its transactions
from the store.

    pages    key -> value, or a record of where it is (see slots)
    ages     key -> u64 tick, u32 value bytes, u32 page bytes        (little-endian)
    recency  u64 tick (big-endian, so oldest first) -> key
    meta     b"store", b"settings" -> JSON (see lmdb_record)
             b"counters" -> u64 next tick, u64 live bytes, u64 raw bytes
             b"probe" -> bytes, only while a store finds out whether it can write again

`ages` and `recency` hold the same ticks one to one, so use order changes without touching a page's value.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from hicache.storage.header import HEADER_BYTES, page_bytes_of
from hicache.storage.lmdb_meta import TreeRoot
from hicache.storage.lmdb_tree import Place, ValueFile
from hicache.storage.slot_file import Apart
from hicache.storage.slots import SlotChanges, SlotSet, oldest_reader

Value: TypeAlias = bytes | memoryview | Apart

TABLE_NAMES = (b"pages", b"ages", b"recency", b"meta")
COUNTERS_KEY, PROBE_KEY = b"counters", b"probe"
TICK = struct.Struct(">Q")
_AGE = struct.Struct("<QII")
_COUNTERS = struct.Struct("<QQQ")

# Accesses are remembered up to this many; beyond, the oldest of them are forgotten: a hint lost, never a page.
_MAX_LOGGED = 1 << 16
_FOLD_AT_ONCE = 1 << 13


class Age(NamedTuple):
    """The tick of a page's last use, the length of its value, and the length of the page itself."""

    tick: int
    value_bytes: int
    page_bytes: int

    def pack(self) -> bytes:
        return _AGE.pack(*self)

    @classmethod
    def unpack(cls, raw: bytes | memoryview | None) -> Age | None:
        """None for a record of another length, or none."""
        return None if raw is None or len(raw) != _AGE.size else cls(*_AGE.unpack(raw))


class Totals(NamedTuple):
    """The counters of a store: the next tick, and the sums over all pages of `value_bytes` and `page_bytes`."""

    next_tick: int = 1
    live_bytes: int = 0
    raw_bytes: int = 0

    def pack(self) -> bytes:
        # Never below zero, whatever a damaged record says: what does not fit would keep every later commit from saving.
        return _COUNTERS.pack(self.next_tick, max(0, self.live_bytes), max(0, self.raw_bytes))

    @classmethod
    def unpack(cls, raw: bytes | memoryview | None) -> Totals | None:
        """None for a record of another length, or none."""
        return None if raw is None or len(raw) != _COUNTERS.size else cls(*_COUNTERS.unpack(raw))

    @classmethod
    def read(cls, txn: Any, meta: Any) -> Totals:
        """Those of a snapshot, whose store was opened: the record was there then."""
        totals = cls.unpack(txn.get(COUNTERS_KEY, db=meta))
        assert totals is not None
        return totals


@dataclass(frozen=True)
class Tables:
    """An open lmdb environment and the handles of its tables, in the order of `TABLE_NAMES`; `psize` is a file page.

    `slots`: where long values are; None where all are in the table `pages`. Beware, then, of lmdb's `get` on `pages`:
    it reads the whole value. `has` and `places` do not.
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
        """What the files of the tables and of the slots take now."""
        return self.values.file_bytes() + (0 if self.slots is None else self.slots.allocated_bytes())

    def resolve(self, txn: Any) -> None:
        """Look the roots of all tables up. A cursor does so while it keeps Python's interpreter lock: where the medium
        hangs, they are waited for here, without it."""
        for table in self._handles():
            txn.stat(table)

    def has(self, txn: Any, key: bytes) -> bool:
        """Every page has an age record, and nothing else does."""
        return txn.get(key, db=self.ages) is not None

    def places(self, txn: Any, keys: Sequence[bytes]) -> list[Place | None]:
        """Where the values lie that `txn`, a read transaction, sees. OSError for a tree that cannot be read."""
        if self.slots is not None:
            return [self.slots.place(key, txn.get(key, db=self.pages)) for key in keys]
        root = TreeRoot.unpack(txn.get(TABLE_NAMES[0]), self.env.info()["last_pgno"])
        return self.values.places(root, keys)

    def read(self, place: Place, room: memoryview) -> memoryview:
        """The value at `place`, whole, within `room` of `aligned_buffer`. OSError for what cannot be read."""
        if self.slots is not None:
            return self.slots.read(place, room)
        return self.values.read(place, room)

    def header(self, place: Place) -> bytes | memoryview | None:
        """The header of the value at `place`, not verified; None for a value without one. OSError for what cannot be
        read."""
        if place.head or place.length < HEADER_BYTES:
            return place.head or None
        return self.values.read(place._replace(length=HEADER_BYTES), memoryview(bytearray(HEADER_BYTES)))

    def index_bytes(self) -> int:
        """Length of the file of the tables, as of the last commit."""
        return int((self.env.info()["last_pgno"] + 1) * self.psize)

    def used_bytes(self, txn: Any) -> int:
        """Bytes of the file that the tables need in `txn`, its own changes included and free pages not.

        Pages of values count once. Pages of the trees count three times: a commit may rewrite each of them while the
        commit before it, which still holds on to their old copies, did so too.
        """
        stats = [txn.stat(table) for table in self._handles()]
        tree_pages = sum(stat["branch_pages"] + stat["leaf_pages"] for stat in stats)
        return int((3 * tree_pages + sum(stat["overflow_pages"] for stat in stats)) * self.psize)

    def _handles(self) -> list[Any]:
        slots = [] if self.slots is None else self.slots.handles()
        return [self.pages, self.ages, self.recency, self.meta, *slots]


def entry_bytes(value_bytes: int, psize: int) -> int:
    """About what one entry adds to `used_bytes`, its index records included; rather too much than too little."""
    if value_bytes < psize // 2 - 600:
        return value_bytes + 600
    return -(-(value_bytes + 16) // psize) * psize + 600


class AccessLog:
    """What readers learnt since the writer last looked: keys used, and keys whose value did not verify. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: deque[bytes] = deque(maxlen=_MAX_LOGGED)
        self._doomed: dict[bytes, None] = {}

    def used(self, keys: Iterable[bytes]) -> None:
        """Note uses, oldest first."""
        with self._lock:
            self._used.extend(keys)

    def doom(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._doomed.update(dict.fromkeys(keys))

    def is_doomed(self, key: bytes) -> bool:
        return key in self._doomed

    @property
    def empty(self) -> bool:
        return not self._used and not self._doomed

    @property
    def any_doomed(self) -> bool:
        return bool(self._doomed)

    def peek(self) -> tuple[list[bytes], list[bytes]]:
        """The next uses to fold in and all doomed keys. They stay until `folded`, so an undone batch loses none."""
        with self._lock:
            return list(islice(self._used, _FOLD_AT_ONCE)), list(self._doomed)

    def folded(self, used: Sequence[bytes], doomed: Sequence[bytes]) -> None:
        """Forget what `peek` returned. Uses that overflowed meanwhile are gone already; the rest stay."""
        with self._lock:
            for key in used:
                if self._used and self._used[0] == key:
                    self._used.popleft()
            for key in doomed:
                self._doomed.pop(key, None)


class Ledger:
    """All changes of one write transaction; writer thread only. Nothing lasts unless `save` and the commit succeed.

    Invariants: `ages` and `recency` agree one to one with `pages`; `live_bytes` and `raw_bytes` are sums over `ages`.
    """

    def __init__(self, txn: Any, tables: Tables) -> None:
        self.txn, self._tables = txn, tables
        self._next_tick, self.live_bytes, self.raw_bytes = Totals.read(txn, tables.meta)
        self._slots: SlotChanges | None = None
        if tables.slots is not None:
            self._index_bytes = tables.index_bytes()
            self._slots = SlotChanges(txn, tables.slots, tables.meta, oldest_reader(tables.env))
        self.num_evicted = 0
        self.folded_used: list[bytes] = []
        self.folded_doomed: list[bytes] = []

    @property
    def used_bytes(self) -> int:
        """What the store needs of the medium with the changes made so far; what is freed does not count."""
        if self._slots is None:
            return self._tables.used_bytes(self.txn)
        return self._index_bytes + self._slots.used_bytes

    def fold(self, used: list[bytes], doomed: list[bytes]) -> None:
        """Take in what readers noted: drop what did not verify, then note the uses, oldest first."""
        for key in doomed:
            self.remove(key)
        for key in used:
            self.touch(key)
        self.folded_used, self.folded_doomed = used, doomed

    def save(self) -> None:
        totals = Totals(self._next_tick, self.live_bytes, self.raw_bytes)
        self.txn.put(COUNTERS_KEY, totals.pack(), db=self._tables.meta)
        if self._slots is not None:
            self._slots.save()

    def add(self, key: bytes, value: Value) -> None:
        """Store a value as the most recently used."""
        self.remove(key)
        if self._slots is not None:
            apart = value if isinstance(value, Apart) else Apart.of(value)
            self.txn.put(key, self._slots.store(key, apart), db=self._tables.pages)
        else:
            self.txn.put(key, value, db=self._tables.pages)
        page_bytes = page_bytes_of(value.head if isinstance(value, Apart) else value)
        self._stamp(key, len(value), page_bytes)
        self.live_bytes += len(value)
        self.raw_bytes += page_bytes

    def touch(self, key: bytes) -> None:
        """Make a key the most recently used; a key that is gone is left alone."""
        age = self._age(key)
        if age is not None:
            self.txn.delete(TICK.pack(age.tick), db=self._tables.recency)
            self._stamp(key, age.value_bytes, age.page_bytes)

    def probe(self, value_bytes: int) -> bool:
        """Store a record that means nothing, of `value_bytes`; 0 removes it."""
        if value_bytes and self._slots is not None:
            self._slots.probe()
            self.txn.put(PROBE_KEY, b"probe", db=self._tables.meta)
        elif value_bytes:
            self.txn.put(PROBE_KEY, bytes(value_bytes), db=self._tables.meta)
        else:
            self.txn.delete(PROBE_KEY, db=self._tables.meta)
        return True

    def remove(self, key: bytes) -> bool:
        age = self._age(key)
        if age is not None:
            self.txn.delete(TICK.pack(age.tick), db=self._tables.recency)
            self.txn.delete(key, db=self._tables.ages)
            self.live_bytes -= age.value_bytes
            self.raw_bytes -= age.page_bytes
        if self._slots is not None:
            self._slots.release(key, self.txn.get(key, db=self._tables.pages))
        return bool(self.txn.delete(key, db=self._tables.pages))

    def rebuild(self, dropped: Sequence[bytes]) -> bool:
        """Drop pages, and make `ages`, `recency` and the counters anew from the others; the first change of its
        transaction. The use order is kept for keys whose record has one; the others count as the least recently used.
        """
        tables, ages, places = self._tables, dict[bytes, Age](), dict[bytes, Place]()
        with self.txn.cursor(db=tables.pages) as cursor:
            keys = cursor.iternext(keys=True, values=False)
            while batch := list(islice(keys, _FOLD_AT_ONCE)):
                for key, place in zip(batch, tables.places(self.txn, batch), strict=True):
                    age = self._age(key)
                    header = None if place is None else tables.header(place)
                    if place is not None and header is not None:
                        ages[key] = Age(age.tick if age else 0, place.length, page_bytes_of(header))
                        places[key] = place
        for key in dropped:
            ages.pop(key, None)
            places.pop(key, None)
            self.txn.delete(key, db=tables.pages)
        if self._slots is not None:
            self._slots.rebuild(places.values())
        self.txn.drop(tables.ages, delete=False)
        self.txn.drop(tables.recency, delete=False)
        self._next_tick = 1
        self.live_bytes = sum(age.value_bytes for age in ages.values())
        self.raw_bytes = sum(age.page_bytes for age in ages.values())
        for key, age in sorted(ages.items(), key=lambda item: item[1].tick):
            self._stamp(key, age.value_bytes, age.page_bytes)
        return True

    def evict_to(self, used_bytes: int, index_bytes: int | None = None) -> int:
        """Remove the least recently used pages until the store needs at most `used_bytes`, and its tables, where values
        are in slots, at most `index_bytes` of that; returns how many went."""
        num_evicted = 0
        while self.used_bytes > used_bytes or self._is_index_above(index_bytes):
            with self.txn.cursor(db=self._tables.recency) as cursor:
                if not cursor.first():
                    break
                key = cursor.value()
                cursor.delete()  # whatever its record says: each turn leaves one less
            self.remove(key)
            num_evicted += 1
        self.num_evicted += num_evicted
        return num_evicted

    def _is_index_above(self, index_bytes: int | None) -> bool:
        if index_bytes is None or self._slots is None:
            return False
        return self._tables.used_bytes(self.txn) > index_bytes

    def _age(self, key: bytes) -> Age | None:
        return Age.unpack(self.txn.get(key, db=self._tables.ages))

    def _stamp(self, key: bytes, value_bytes: int, page_bytes: int) -> None:
        # Ticks only grow: appending packs the table's pages full and needs no search.
        if not self.txn.put(TICK.pack(self._next_tick), key, db=self._tables.recency, append=True):
            self._next_tick = self._last_tick() + 1  # a damaged counter
            self.txn.put(TICK.pack(self._next_tick), key, db=self._tables.recency, append=True)
        self.txn.put(key, Age(self._next_tick, value_bytes, page_bytes).pack(), db=self._tables.ages)
        self._next_tick += 1

    def _last_tick(self) -> int:
        with self.txn.cursor(db=self._tables.recency) as cursor:
            return int.from_bytes(cursor.key(), "big") if cursor.last() else 0
