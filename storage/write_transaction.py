"""The changes that one commit makes to the tables of a store, and the log of accesses that it applies.

Readers note in the access log which pages were used, and which did not verify; the writer applies it with its next
commit. The use order is kept in the store itself, so it survives reopening.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, TypeAlias

from hicache.storage.header import HeaderAndPayload, page_bytes_of
from hicache.storage.slots import SlotChanges, oldest_reader
from hicache.storage.tables import COUNTERS_KEY, PROBE_KEY, TICK, Age, Tables, Totals
from hicache.storage.value_file import ValueLocation

Value: TypeAlias = bytes | memoryview | HeaderAndPayload

# The log keeps this many uses; the oldest are dropped beyond that, which loses a hint and no page.
_MAX_LOGGED = 1 << 16
_KEYS_AT_ONCE = 1 << 13


class AccessLog:
    """What readers noted since the last commit: keys that were used, and keys whose value did not verify. The latter
    are quarantined: they count as absent until the writer has deleted them. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: deque[bytes] = deque(maxlen=_MAX_LOGGED)
        self._quarantined: dict[bytes, None] = {}

    def add_used(self, keys: Iterable[bytes]) -> None:
        """Note uses, oldest first."""
        with self._lock:
            self._used.extend(keys)

    def quarantine(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            self._quarantined.update(dict.fromkeys(keys))

    def is_quarantined(self, key: bytes) -> bool:
        return key in self._quarantined

    @property
    def empty(self) -> bool:
        return not self._used and not self._quarantined

    @property
    def any_quarantined(self) -> bool:
        return bool(self._quarantined)

    def peek(self) -> tuple[list[bytes], list[bytes]]:
        """The next uses to apply and all quarantined keys. They stay until `remove`, so an aborted commit loses
        none."""
        with self._lock:
            return list(islice(self._used, _KEYS_AT_ONCE)), list(self._quarantined)

    def remove(self, used: Sequence[bytes], quarantined: Sequence[bytes]) -> None:
        """Remove what `peek` returned, after it was applied. Uses that were dropped meanwhile are gone already."""
        with self._lock:
            for key in used:
                if self._used and self._used[0] == key:
                    self._used.popleft()
            for key in quarantined:
                self._quarantined.pop(key, None)


class WriteTransaction:
    """The changes of one write transaction; writer thread. They last if `save` and then the commit succeed.

    Invariants: `ages` and `recency` agree one to one with `pages`; `live_bytes` and `raw_bytes` are sums over `ages`.
    """

    def __init__(self, txn: Any, tables: Tables) -> None:
        self.txn, self._tables = txn, tables
        self._next_tick, self.live_bytes, self.raw_bytes = Totals.read(txn, tables.meta)
        self._slots: SlotChanges | None = None
        # The data file, if values are in slots: it has a bound of its own (lmdb_writer.py).
        self.index_bytes = 0
        if tables.slots is not None:
            self.index_bytes = tables.data_bytes()
            self._slots = SlotChanges(txn, tables.slots, tables.meta, oldest_reader(tables.env))
        self.num_evicted = 0
        self.removed: list[bytes] = []  # pages that the store lacks from the commit on
        self.applied_used: list[bytes] = []
        self.applied_quarantined: list[bytes] = []

    @property
    def used_bytes(self) -> int:
        """Disk space that the store needs with the changes made so far; freed space does not count."""
        if self._slots is None:
            return self._tables.used_bytes(self.txn)
        return self.index_bytes + self._slots.used_bytes

    def apply_access_log(self, used: list[bytes], quarantined: list[bytes]) -> None:
        """Delete what did not verify, then note the uses, oldest first."""
        for key in quarantined:
            self.delete(key)
        for key in used:
            self.touch(key)
        self.applied_used, self.applied_quarantined = used, quarantined

    def save(self) -> None:
        totals = Totals(self._next_tick, self.live_bytes, self.raw_bytes)
        self.txn.put(COUNTERS_KEY, totals.pack(), db=self._tables.meta)
        if self._slots is not None:
            self._slots.save()

    def put(self, key: bytes, value: Value) -> None:
        """Store a value as the most recently used."""
        self._delete(key)
        if self._slots is not None:
            split = value if isinstance(value, HeaderAndPayload) else HeaderAndPayload.of(value)
            self.txn.put(key, self._slots.store(key, split), db=self._tables.pages)
        else:
            self.txn.put(key, value, db=self._tables.pages)
        page_bytes = page_bytes_of(value.header if isinstance(value, HeaderAndPayload) else value)
        self._append_age(key, len(value), page_bytes)
        self.live_bytes += len(value)
        self.raw_bytes += page_bytes

    def touch(self, key: bytes) -> None:
        """Make a key the most recently used; an absent key is ignored."""
        age = self._age(key)
        if age is not None:
            self.txn.delete(TICK.pack(age.tick), db=self._tables.recency)
            self._append_age(key, age.value_bytes, age.page_bytes)

    def delete(self, key: bytes) -> bool:
        """Remove a page for good; whether there was one."""
        was_present = self._delete(key)
        if was_present:
            self.removed.append(bytes(key))
        return was_present

    def _delete(self, key: bytes) -> bool:
        age = self._age(key)
        if age is not None:
            self.txn.delete(TICK.pack(age.tick), db=self._tables.recency)
            self.txn.delete(key, db=self._tables.ages)
            self.live_bytes -= age.value_bytes
            self.raw_bytes -= age.page_bytes
        if self._slots is not None:
            self._slots.free(key, self.txn.get(key, db=self._tables.pages))
        return bool(self.txn.delete(key, db=self._tables.pages))

    def probe(self, value_bytes: int) -> bool:
        """Write a record of `value_bytes` without meaning; 0 removes it. Finds out whether the disk takes writes."""
        if value_bytes and self._slots is not None:
            self._slots.probe()
            self.txn.put(PROBE_KEY, b"probe", db=self._tables.meta)
        elif value_bytes:
            self.txn.put(PROBE_KEY, bytes(value_bytes), db=self._tables.meta)
        else:
            self.txn.delete(PROBE_KEY, db=self._tables.meta)
        return True

    def rebuild(self, dropped: Sequence[bytes]) -> bool:
        """Delete pages, and rebuild `ages`, `recency`, slot tables and counters from the others; the first change of
        its transaction. Keys without an age record become the least recently used.
        """
        tables, ages, locations = self._tables, dict[bytes, Age](), dict[bytes, ValueLocation]()
        with self.txn.cursor(db=tables.pages) as cursor:
            keys = cursor.iternext(keys=True, values=False)
            while batch := list(islice(keys, _KEYS_AT_ONCE)):
                for key, location in zip(batch, tables.locate(self.txn, batch), strict=True):
                    age = self._age(key)
                    header = None if location is None else tables.header(location)
                    if location is not None and header is not None:
                        ages[key] = Age(age.tick if age else 0, location.length, page_bytes_of(header))
                        locations[key] = location
        for key in dropped:
            ages.pop(key, None)
            locations.pop(key, None)
            self.txn.delete(key, db=tables.pages)
        if self._slots is not None:
            self._slots.rebuild(locations.values())
        self.txn.drop(tables.ages, delete=False)
        self.txn.drop(tables.recency, delete=False)
        self._next_tick = 1
        self.live_bytes = sum(age.value_bytes for age in ages.values())
        self.raw_bytes = sum(age.page_bytes for age in ages.values())
        for key, age in sorted(ages.items(), key=lambda item: item[1].tick):
            self._append_age(key, age.value_bytes, age.page_bytes)
        return True

    def evict_to(self, used_bytes: int, index_bytes: int | None = None) -> int:
        """Delete the least recently used pages until the store needs at most `used_bytes`, of which its tables, if
        values are in slots, need at most `index_bytes`; returns how many pages were deleted."""
        num_evicted = 0
        while self.used_bytes > used_bytes or self._is_index_above(index_bytes):
            with self.txn.cursor(db=self._tables.recency) as cursor:
                if not cursor.first():
                    break
                key = cursor.value()
                cursor.delete()  # also if the age record of the key is damaged, so that the loop ends
            self.delete(key)
            num_evicted += 1
        self.num_evicted += num_evicted
        return num_evicted

    def _is_index_above(self, index_bytes: int | None) -> bool:
        if index_bytes is None or self._slots is None:
            return False
        return self._tables.used_bytes(self.txn) > index_bytes

    def _age(self, key: bytes) -> Age | None:
        return Age.unpack(self.txn.get(key, db=self._tables.ages))

    def _append_age(self, key: bytes, value_bytes: int, page_bytes: int) -> None:
        """Give a key the next tick."""
        # Ticks only grow: appending fills the pages of the table and needs no search.
        if not self.txn.put(TICK.pack(self._next_tick), key, db=self._tables.recency, append=True):
            self._next_tick = self._last_tick() + 1  # the counter was damaged
            self.txn.put(TICK.pack(self._next_tick), key, db=self._tables.recency, append=True)
        self.txn.put(key, Age(self._next_tick, value_bytes, page_bytes).pack(), db=self._tables.ages)
        self._next_tick += 1

    def _last_tick(self) -> int:
        with self.txn.cursor(db=self._tables.recency) as cursor:
            return int.from_bytes(cursor.key(), "big") if cursor.last() else 0
