"""The index of a store: the slot and the last use of each page. The index is an LMDB environment of three tables.

    pages   key -> u64 slot, u32 bytes of the payload, u32 bytes of the page (little-endian)
    slots   u32 bytes of the page, u32 bytes of the slot, u64 slot (big-endian) -> key
    uses    u32 bytes of the page, u32 bytes of the slot (big-endian) -> u64 tick of each slot (little-endian)
    -       "note" -> a few bytes that clients store, in LMDB's unnamed table of table names

The table `uses` and the note are written only when the index is sealed.

While a store is open, its index is an anonymous file in memory. So a disk that hangs does not block a look-up, and the
index disappears when the process ends. A closed store has a copy of the index in a file, sealed by a checksum. LMDB
trusts every file that it maps, so the checksum is verified before LMDB maps the copy. The records of the index are not
verified: if a record names a wrong slot, the reader finds the key of another page in this slot.

The last uses are one array of ticks for each slot length, with one tick per slot, so recording a use writes one array
element. The least recently used pages are chosen in batches. A chosen page is evicted only if its tick is still the
same.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash

from hicache.storage.directory import replacing
from hicache.storage.header import HEADER_BYTES
from hicache.storage.memory import memory_file
from hicache.storage.records import FORMAT
from hicache.storage.slot_file import SlotLength

log = logging.getLogger("hicache.storage")

_TABLES = (b"pages", b"slots", b"uses")
_NOTE = b"note"
_OTHER_PAGES = 4  # LMDB pages of an empty index: two for meta data, one for table names, one for the table `uses`
_MIN_MAP_BYTES = 1 << 30  # bytes of address space; unused ones take no memory
_SEAL_BYTES, _CHUNK_BYTES = 8, 8 << 20
# number of slots that are chosen for eviction in one batch: 1/64 of all slots, but at least 4096
_MIN_CHOSEN, _CHOSEN_SHARE = 4096, 64
_MIN_SPARE, _SPARE_SHARE = 128, 8
_KEPT_SHARE = 0.9  # share of the bytes in slots that pages with deadlines may take
_KEPT = np.uint64(1 << 63)  # added to the tick of a page with a deadline, to sort it last
_ENTRY, _SLOT, _LENGTH = struct.Struct("<QII"), struct.Struct(">IIQ"), struct.Struct(">II")
TICK = np.dtype("<u8")
_RECORD = np.dtype([("slot", "<u8"), ("payload_bytes", "<u4"), ("page_bytes", "<u4")])

# Errors that LMDB calls raise: `lmdb.Error`, OSError, and SystemError, which the Python binding raises for failures
# without a class of their own.
io_errors: tuple[type[Exception], ...] = (OSError, SystemError, lmdb.Error)


class Entry(NamedTuple):
    """The slot of a page, and the lengths of its payload and of the page, in bytes."""

    slot: int
    payload_bytes: int
    page_bytes: int

    @property
    def length(self) -> SlotLength:
        return SlotLength.of(self.page_bytes, self.payload_bytes)

    @property
    def value_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes


class LastUse(NamedTuple):
    """The tick of the last use of a slot."""

    tick: int
    length: SlotLength
    slot: int


class UseOrder:
    """The tick of the last use of every slot, by slot length. Any thread calls `note`; only the writer calls the other
    methods.

    A page may have a deadline: until the deadline, the page is evicted after pages without a deadline. Pages with
    deadlines take at most nine tenths of the bytes in slots. If pages with deadlines exceed this share, the least
    recently used of these pages are no longer protected. A restart deletes all deadlines.

    A use that is recorded while an array grows may be lost. A use of a page that was just removed is recorded for a
    slot without a page. Lost or misplaced uses affect only the eviction order.
    """

    def __init__(self, ticks: Mapping[SlotLength, npt.NDArray[np.uint64]]) -> None:
        self._ticks = dict(ticks)
        self._until_s = dict[SlotLength, npt.NDArray[np.float64]]()  # deadlines; may be shorter than `_ticks`
        self._chosen: Iterator[LastUse] = iter(())
        self.restart_clock()

    @property
    def ticks(self) -> dict[SlotLength, npt.NDArray[np.uint64]]:
        """Return the ticks `[slots]` by slot length, cut after the last slot with a page."""
        return {length: np.trim_zeros(ticks, "b") for length, ticks in self._ticks.items()}

    @property
    def num_slots(self) -> list[int]:
        """Return the number of elements in the array of each slot length; arrays have spare elements at the end."""
        return [len(ticks) for ticks in self._ticks.values()]

    def restart_clock(self) -> None:
        """Make later ticks higher than all ticks in the arrays."""
        last = max((int(ticks.max(initial=0)) for ticks in self._ticks.values()), default=0)
        self._clock = itertools.count(last + 1)

    def trim(self) -> None:
        """Drop the array elements after the last slot with a page."""
        self._ticks = self.ticks

    def next_tick(self) -> int:
        return next(self._clock)

    def note(self, length: SlotLength, slot: int) -> None:
        """Record that the page in `slot` is used now. An unknown slot is ignored."""
        ticks = self._ticks.get(length)
        if ticks is not None and slot < len(ticks):
            ticks[slot] = next(self._clock)

    def keep_until(self, length: SlotLength, slot: int, until_s: float) -> None:
        """Record a use of the page in `slot`, and set its deadline, a time of `time.monotonic`. An unknown slot is
        ignored."""
        deadlines = self._until_s.get(length, np.empty(0))
        num_slots = len(self._ticks.get(length, ()))
        if slot >= len(deadlines) and slot < num_slots:
            deadlines = self._until_s[length] = np.concatenate([deadlines, np.zeros(num_slots - len(deadlines))])
        if slot < len(deadlines):
            deadlines[slot] = until_s
            self.note(length, slot)

    def has_deadline(self, length: SlotLength, slots: range) -> bool:
        """Return whether a page in these slots has a deadline that has not passed."""
        deadlines = self._deadlines(length, np.arange(slots.start, slots.stop))
        return bool(deadlines.max(initial=0.0) > time.monotonic())

    def set(self, length: SlotLength, slot: int, tick: int) -> None:
        """Record that `slot` has a new page without a deadline, last used at `tick`."""
        deadlines = self._until_s.get(length)
        if deadlines is not None and slot < len(deadlines):
            deadlines[slot] = 0.0
        ticks = self._ticks.get(length, np.empty(0, TICK))
        if slot >= len(ticks):
            num_slots = slot + max(_MIN_SPARE, slot // _SPARE_SHARE)
            ticks = np.concatenate([ticks, np.zeros(num_slots - len(ticks), TICK)])
            self._ticks[length] = ticks
        ticks[slot] = tick

    def newest(self, length: SlotLength, slots: range) -> int:
        return int(self._ticks[length][slots.start : slots.stop].max(initial=0))

    def pop_oldest(self) -> LastUse | None:
        """Remove and return the slot that is evicted next; None if no slot has a page."""
        while True:
            for last in self._chosen:
                ticks = self._ticks[last.length]
                if ticks[last.slot] == last.tick:  # true if the slot was neither used nor refilled since it was chosen
                    ticks[last.slot] = 0
                    return last
            num = max(_MIN_CHOSEN, sum(self.num_slots) // _CHOSEN_SHARE)
            # A batch has no pages with deadlines, because pages that are stored after the choice must be evicted before
            # them.
            chosen = self.by_use(num, with_kept=False) or self.by_use(1)
            if not chosen:
                return None
            self._chosen = iter(chosen)

    def by_use(self, limit: int | None = None, *, with_kept: bool = True) -> list[LastUse]:
        """Return at most `limit` slots that have a page, in the order of eviction. `with_kept`: append the pages that a
        deadline protects."""
        lengths, uses = list(self._ticks), list(self._ticks.values())
        slots = [np.flatnonzero(ticks) for ticks in uses]
        if not slots:
            return []
        ticks = np.concatenate([of_length[used] for of_length, used in zip(uses, slots, strict=True)])
        which, used = np.repeat(np.arange(len(slots)), [len(used) for used in slots]), np.concatenate(slots)
        chosen, order = np.arange(len(ticks)), ticks
        if self._until_s:
            is_kept = self._are_kept(lengths, slots, ticks)
            order = ticks + is_kept * _KEPT
            chosen = chosen if with_kept else np.flatnonzero(~is_kept)
        if limit is not None and limit < len(chosen):
            chosen = chosen[np.argpartition(order[chosen], limit)[:limit]]
        chosen = chosen[np.argsort(order[chosen])]
        of_chosen = (lengths[n] for n in which[chosen].tolist())
        return list(map(LastUse, ticks[chosen].tolist(), of_chosen, used[chosen].tolist()))

    def _deadlines(self, length: SlotLength, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the deadline of each slot; 0 for a slot without a deadline."""
        deadlines = self._until_s.get(length, np.empty(0))
        found = np.zeros(len(slots))
        is_known = slots < len(deadlines)
        found[is_known] = deadlines[slots[is_known]]
        return found

    def _are_kept(
        self, lengths: Sequence[SlotLength], slots: Sequence[npt.NDArray[np.int64]], ticks: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.bool_]:
        """Return for each page whether its deadline still protects it from eviction. If the pages with deadlines exceed
        `_KEPT_SHARE` of the bytes of all pages, the least recently used pages with deadlines are not protected.
        `slots`: the slots with a page, by length; `ticks`: the last use of each page."""
        until_s = [self._deadlines(length, used) for length, used in zip(lengths, slots, strict=True)]
        is_kept = np.concatenate(until_s) > time.monotonic()
        kept = np.flatnonzero(is_kept)
        if len(kept):
            num_bytes = np.repeat([length.slot_bytes for length in lengths], [len(used) for used in slots])
            newest_first = kept[np.argsort(ticks[kept])[::-1]]
            is_kept[newest_first] = np.cumsum(num_bytes[newest_first]) <= _KEPT_SHARE * num_bytes.sum()
        return is_kept


class Index:
    """An open index. Any thread reads and notes uses; one thread writes. Errors of LMDB are not converted
    (`io_errors`). The caller closes the index when no thread is inside a call.

    `uses`: the use order. `note`: a few bytes that clients store. This environment has no lock file of LMDB, so one
    lock separates readers and the writer. A thread holds the lock for a short time and without I/O.
    """

    def __init__(self, budget_bytes: int, memory: int | None = None) -> None:
        """Open the index in `memory`, a descriptor of a memfd. If `memory` is None, open an empty index.
        `budget_bytes`, the budget of the store, limits the size of the index."""
        descriptor = memory_file("hicache-index") if memory is None else os.dup(memory)
        try:
            self._env = lmdb.open(
                f"/proc/self/fd/{descriptor}",
                subdir=False,
                map_size=-(-max(_MIN_MAP_BYTES, budget_bytes) // _MIN_MAP_BYTES) * _MIN_MAP_BYTES,
                lock=False,
                sync=False,
                max_dbs=len(_TABLES),
                meminit=False,
            )
        finally:
            os.close(descriptor)  # LMDB has opened the path itself
        self._lock = threading.Lock()
        try:
            self._pages, self._slots, self._uses = (self._env.open_db(name) for name in _TABLES)
            with self._env.begin() as txn, txn.cursor(db=self._uses) as cursor:
                ticks = {SlotLength(*_LENGTH.unpack(length)): np.frombuffer(raw, TICK).copy() for length, raw in cursor}
                self.note: bytes = txn.get(_NOTE, b"")
            self.uses = UseOrder(ticks)
        except BaseException:
            self._env.close()
            raise

    @classmethod
    def open_sealed(cls, file: Path, budget_bytes: int) -> Index | None:
        """Copy the sealed index in `file` to memory and open the copy. Returns None if the file is absent, cannot be
        read, or has a wrong checksum."""
        with open(memory_file("hicache-index"), "wb") as memory:
            try:
                with open(file, "rb") as source:
                    if _copied(source, os.fstat(source.fileno()).st_size - _SEAL_BYTES, memory) != source.read():
                        return None
            except FileNotFoundError:
                return None
            except OSError as error:
                log.warning("cannot read the sealed index %s: %s", file, error)
                return None
            memory.flush()
            return cls(budget_bytes, memory.fileno())

    def seal(self, file: Path) -> None:
        """Write a sealed copy of the index to `file`. No other thread may read or write the index during the call.
        Raises OSError if the disk fails."""
        with self._env.begin(write=True) as txn:
            txn.drop(self._uses, delete=False)
            for length, ticks in self.uses.ticks.items():
                txn.put(_LENGTH.pack(*length), ticks.tobytes(), db=self._uses)
            txn.put(_NOTE, self.note)
        with replacing(file) as sealed:
            self._env.copyfd(sealed.fileno(), compact=True)
            num_bytes = sealed.seek(0, os.SEEK_END)
            sealed.seek(0)
            sealed.write(_copied(sealed, num_bytes))

    def close(self) -> None:
        self._env.close()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock, self._env.begin(buffers=True) as txn:
            get, pages = txn.get, self._pages
            return [get(key, None, pages) is not None for key in keys]

    def locate(self, keys: Iterable[bytes]) -> list[Entry | None]:
        """Return the entry of each key, None if the key is absent."""
        with self._lock, self._env.begin(buffers=True) as txn:
            get, pages = txn.get, self._pages
            return [_entry(get(key, None, pages)) for key in keys]

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count pages as used; the last key counts as the most recently used. Absent keys are ignored."""
        for entry in self.locate(keys):
            if entry is not None:
                self.uses.note(entry.length, entry.slot)

    def keep_until(self, keys: Iterable[bytes], until_s: float) -> None:
        """Count pages as used, and set their deadline (see `UseOrder`). Absent keys are ignored."""
        for entry in self.locate(keys):
            if entry is not None:
                self.uses.keep_until(entry.length, entry.slot, until_s)

    def num_pages(self) -> int:
        with self._lock, self._env.begin() as txn:
            return int(txn.stat(self._pages)["entries"])

    def num_bytes(self) -> int:
        """Return the size of a sealed copy of the index, in bytes."""
        with self._lock, self._env.begin() as txn:
            stats = [txn.stat(table) for table in (self._pages, self._slots)]
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        pages += sum(num_slots * TICK.itemsize // stats[0]["psize"] for num_slots in self.uses.num_slots)
        return int((pages + _OTHER_PAGES) * stats[0]["psize"])

    def by_use(self, *, newest: bool = False, limit: int | None = None) -> list[bytes]:
        """Return keys in the order of use, least recent or `newest` first; at most `limit`."""
        used = self.uses.by_use()
        with self._lock, self._env.begin() as txn:
            steps = reversed(used) if newest else used
            keys = (txn.get(_SLOT.pack(*last.length, last.slot), db=self._slots) for last in steps)
            return list(itertools.islice((key for key in keys if key is not None), limit))

    def entries(self) -> list[tuple[bytes, Entry]]:
        """Return key and entry of every page, sorted by key."""
        with self._lock, self._env.begin() as txn, txn.cursor(db=self._pages) as cursor:
            return [(key, Entry(*_ENTRY.unpack(raw))) for key, raw in cursor]

    def slot_keys(self) -> dict[tuple[int, int, int], bytes]:
        """Return the key of the page in each slot, by (page bytes, slot bytes, slot)."""
        with self._lock, self._env.begin() as txn, txn.cursor(db=self._slots) as cursor:
            return {_SLOT.unpack(raw): key for raw, key in cursor}

    def records(self) -> npt.NDArray[np.void]:
        """Return the entry of every page, as an array of records with the fields of `Entry`; a million entries take 0.2
        s."""
        with self._lock, self._env.begin() as txn, txn.cursor(db=self._pages) as cursor:
            return np.frombuffer(b"".join(cursor.iternext(keys=False)), dtype=_RECORD)

    @contextlib.contextmanager
    def changes(self) -> Iterator[IndexChanges]:
        """Open a transaction. All changes become visible together when the `with` block ends; if the block raises, no
        change does."""
        with self._lock, self._env.begin(write=True) as txn:
            yield IndexChanges(txn, self._pages, self._slots, self.uses)


class IndexChanges:
    """The changes of one write transaction. Each page has one slot, and each used slot has one page."""

    def __init__(self, txn: Any, pages: Any, slots: Any, uses: UseOrder) -> None:
        self._txn = txn
        self._pages = pages
        self._slots = slots
        self._uses = uses

    def put(self, key: bytes, entry: Entry, tick: int) -> None:
        """Add a page that the index lacks, last used at `tick`."""
        slot = _SLOT.pack(*entry.length, entry.slot)
        self._txn.put(key, _ENTRY.pack(*entry), db=self._pages)
        # Appending slots after all others fills the B-tree pages completely and needs no search.
        if not self._txn.put(slot, key, db=self._slots, append=True):
            self._txn.put(slot, key, db=self._slots)
        self._uses.set(entry.length, entry.slot, tick)

    def delete(self, key: bytes) -> Entry | None:
        entry = _entry(self._txn.get(key, db=self._pages))
        if entry is not None:
            self._txn.delete(_SLOT.pack(*entry.length, entry.slot), db=self._slots)
            self._txn.delete(key, db=self._pages)
        return entry

    def delete_slots(self, length: SlotLength, slots: Iterable[int]) -> list[tuple[bytes, Entry | None]]:
        keys = (self._txn.get(_SLOT.pack(*length, slot), db=self._slots) for slot in slots)
        return [(key, self.delete(key)) for key in keys if key is not None]

    def pop_oldest(self) -> tuple[bytes, Entry] | None:
        """Remove the least recently used page. Returns its key and entry, or None if the index is empty."""
        while last := self._uses.pop_oldest():
            key = self._txn.pop(_SLOT.pack(*last.length, last.slot), db=self._slots)
            entry = None if key is None else self.delete(key)
            if key is not None and entry is not None:
                return key, entry
        return None


def _entry(raw: bytes | memoryview | None) -> Entry | None:
    return None if raw is None else Entry(*_ENTRY.unpack(raw))


def _copied(source: BinaryIO, num_bytes: int, target: BinaryIO | None = None) -> bytes:
    """Read `num_bytes` from `source`, copy them to `target` if given, and return their seal (a checksum)."""
    checksum, left = xxhash.xxh3_64(seed=FORMAT), num_bytes
    while left > 0 and (chunk := source.read(min(_CHUNK_BYTES, left))):
        checksum.update(chunk)
        left -= len(chunk)
        if target is not None:
            target.write(chunk)
    return bytes(checksum.digest())
