"""Which page goes first: use order and sizes, kept in the store itself so that they survive reopening.

Owns the four tables of the lmdb file and every change to them, and the log in which readers note accesses until the
writer folds them in. May import the standard library; gets its lmdb transactions from the store.

    pages    key -> value
    ages     key -> u64 tick, u64 value bytes        (little-endian)
    recency  u64 tick (big-endian, so oldest first) -> key
    meta     b"store" -> JSON of the format and identity;  b"counters" -> u64 next tick, u64 live bytes

`ages` and `recency` hold the same ticks one to one, so use order changes without touching a page's value.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

TABLE_NAMES = (b"pages", b"ages", b"recency", b"meta")
COUNTERS_KEY = b"counters"
PAIR = struct.Struct("<QQ")
TICK = struct.Struct(">Q")

# Accesses are remembered up to this many; beyond, the oldest of them are forgotten: a hint lost, never a page.
_MAX_LOGGED = 1 << 16
_FOLD_AT_ONCE = 1 << 13


@dataclass(frozen=True)
class Tables:
    """An open lmdb environment and the handles of its tables, in the order of `TABLE_NAMES`; `psize` is a file page."""

    env: Any
    psize: int
    pages: Any
    ages: Any
    recency: Any
    meta: Any

    def used_bytes(self, txn: Any) -> int:
        """Bytes of the file that the tables need in `txn`, its own changes included and free pages not.

        Pages of values count once. Pages of the trees count three times: a commit may rewrite each of them while the
        commit before it, which still holds on to their old copies, did so too.
        """
        stats = [txn.stat(table) for table in (self.pages, self.ages, self.recency, self.meta)]
        tree_pages = sum(stat["branch_pages"] + stat["leaf_pages"] for stat in stats)
        return int((3 * tree_pages + sum(stat["overflow_pages"] for stat in stats)) * self.psize)

    def slot_bytes(self, value_bytes: int) -> int:
        """About what one entry adds to `used_bytes`, its index records included; rather too much than too little."""
        if value_bytes < self.psize // 2 - 600:
            return value_bytes + 600
        return -(-(value_bytes + 16) // self.psize) * self.psize + 600


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

    Invariants: `ages` and `recency` agree one to one with `pages`; `live_bytes` is the sum of the value sizes.
    """

    def __init__(self, txn: Any, tables: Tables) -> None:
        self.txn, self._tables = txn, tables
        self._next_tick, self.live_bytes = PAIR.unpack(txn.get(COUNTERS_KEY, db=tables.meta))
        self.num_evicted = 0
        self.folded_used: list[bytes] = []
        self.folded_doomed: list[bytes] = []

    def fold(self, used: list[bytes], doomed: list[bytes]) -> None:
        """Take in what readers noted: drop what did not verify, then note the uses, oldest first."""
        for key in doomed:
            self.remove(key)
        for key in used:
            self.touch(key)
        self.folded_used, self.folded_doomed = used, doomed

    def save(self) -> None:
        self.txn.put(COUNTERS_KEY, PAIR.pack(self._next_tick, self.live_bytes), db=self._tables.meta)

    def add(self, key: bytes, value: bytes) -> None:
        """Store a value as the most recently used."""
        self.remove(key)
        self.txn.put(key, value, db=self._tables.pages)
        self._stamp(key, len(value))
        self.live_bytes += len(value)

    def touch(self, key: bytes) -> None:
        """Make a key the most recently used; a key that is gone is left alone."""
        record = self._record(key)
        if record is not None:
            tick, value_bytes = record
            self.txn.delete(TICK.pack(tick), db=self._tables.recency)
            self._stamp(key, value_bytes)

    def remove(self, key: bytes) -> bool:
        record = self._record(key)
        if record is not None:
            tick, value_bytes = record
            self.txn.delete(TICK.pack(tick), db=self._tables.recency)
            self.txn.delete(key, db=self._tables.ages)
            self.live_bytes -= value_bytes
        return bool(self.txn.delete(key, db=self._tables.pages))

    def evict_to(self, used_bytes: int) -> int:
        """Remove the least recently used pages until the tables occupy at most `used_bytes`; returns how many went."""
        num_evicted = 0
        while self._tables.used_bytes(self.txn) > used_bytes:
            with self.txn.cursor(db=self._tables.recency) as cursor:
                if not cursor.first():
                    break
                tick, key = cursor.item()
            if not self.remove(key):
                self.txn.delete(tick, db=self._tables.recency)
            num_evicted += 1
        self.num_evicted += num_evicted
        return num_evicted

    def _record(self, key: bytes) -> tuple[int, int] | None:
        packed = self.txn.get(key, db=self._tables.ages)
        if packed is None or len(packed) != PAIR.size:
            return None
        tick, value_bytes = PAIR.unpack(packed)
        return tick, value_bytes

    def _stamp(self, key: bytes, value_bytes: int) -> None:
        self.txn.put(key, PAIR.pack(self._next_tick, value_bytes), db=self._tables.ages)
        # Ticks only grow: appending packs the table's pages full and needs no search.
        self.txn.put(TICK.pack(self._next_tick), key, db=self._tables.recency, append=True)
        self._next_tick += 1
