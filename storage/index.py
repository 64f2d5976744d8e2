"""The index of a store: where each page is, and which was used when. An LMDB environment of three tables.

    pages   key -> u64 slot, u32 bytes of the payload, u32 bytes of the page (little-endian)
    slots   u32 bytes of the page, u32 bytes of the slot, u64 slot (big-endian) -> key
    uses    u32 bytes of the page, u32 bytes of the slot (big-endian) -> u64 tick of each slot (little-endian); written
            when it is sealed. Beside the names of the tables: "note" -> what clients keep with the store

While a store is open its index is in memory without a name: a disk that hangs holds up no look-up, and it ends with its
process. A closed store has a copy in a file, sealed by a checksum: LMDB trusts what it maps, so a copy is mapped after
it was compared with its seal. Nothing else is verified: a wrong record leads to a slot that names another page.

Uses are an array of ticks for each length of slots, one for each slot: a use is one store to an array. The least
recently used pages are chosen many at a time, and each is compared with its tick when its turn comes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import struct
import threading
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
_OTHER_PAGES = 4  # of the file: two that say where the tables are, one with their names, one of the table of uses
_MIN_MAP_BYTES = 1 << 30  # address space, not memory
_SEAL_BYTES, _CHUNK_BYTES = 8, 8 << 20
_MIN_CHOSEN, _CHOSEN_SHARE = 4096, 64  # of the slots, to be evicted next
_MIN_SPARE, _SPARE_SHARE = 128, 8
_ENTRY, _SLOT, _LENGTH = struct.Struct("<QII"), struct.Struct(">IIQ"), struct.Struct(">II")
TICK = np.dtype("<u8")
_RECORD = np.dtype([("slot", "<u8"), ("payload_bytes", "<u4"), ("page_bytes", "<u4")])

# What an LMDB call raises when it fails: its own errors, those of the operating system, and SystemError, with which the
# binding reports a failure that it cannot name.
io_errors: tuple[type[Exception], ...] = (OSError, SystemError, lmdb.Error)


class Entry(NamedTuple):
    """Where a page is."""

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
    """The last use of a slot."""

    tick: int
    length: SlotLength
    slot: int


class UseOrder:
    """The last use of every slot, by its length. Any thread notes uses; everything else is the writer's.

    A use that is noted while an array grows may be lost, and one of a page that has just left its slot marks a slot
    without a page. Neither matters to any page but in its order.
    """

    def __init__(self, ticks: Mapping[SlotLength, npt.NDArray[np.uint64]]) -> None:
        self._ticks = dict(ticks)
        self._chosen: Iterator[LastUse] = iter(())
        self.restart_clock()

    @property
    def ticks(self) -> dict[SlotLength, npt.NDArray[np.uint64]]:
        """The tick of each slot, by length, up to the last one with a page."""
        return {length: np.trim_zeros(ticks, "b") for length, ticks in self._ticks.items()}

    @property
    def num_slots(self) -> list[int]:
        """How many slots each length has, and some to come."""
        return [len(ticks) for ticks in self._ticks.values()]

    def restart_clock(self) -> None:
        """Later ticks are higher than all that were set."""
        last = max((int(ticks.max(initial=0)) for ticks in self._ticks.values()), default=0)
        self._clock = itertools.count(last + 1)

    def trim(self) -> None:
        """Forget the slots behind the last one with a page."""
        self._ticks = self.ticks

    def next_tick(self) -> int:
        return next(self._clock)

    def note(self, length: SlotLength, slot: int) -> None:
        """The page in a slot is used now. What is no slot is ignored."""
        ticks = self._ticks.get(length)
        if ticks is not None and slot < len(ticks):
            ticks[slot] = next(self._clock)

    def set(self, length: SlotLength, slot: int, tick: int) -> None:
        """A page came to a slot, and was used at `tick`."""
        ticks = self._ticks.get(length, np.empty(0, TICK))
        if slot >= len(ticks):
            num_slots = slot + max(_MIN_SPARE, slot // _SPARE_SHARE)
            ticks = np.concatenate([ticks, np.zeros(num_slots - len(ticks), TICK)])
            self._ticks[length] = ticks
        ticks[slot] = tick

    def newest(self, length: SlotLength, slots: range) -> int:
        return int(self._ticks[length][slots.start : slots.stop].max(initial=0))

    def pop_oldest(self) -> LastUse | None:
        """Take out the slot that was used least recently; None when none is left."""
        while True:
            for last in self._chosen:
                ticks = self._ticks[last.length]
                if ticks[last.slot] == last.tick:  # it was neither used nor filled anew since
                    ticks[last.slot] = 0
                    return last
            chosen = self.by_use(max(_MIN_CHOSEN, sum(self.num_slots) // _CHOSEN_SHARE))
            if not chosen:
                return None
            self._chosen = iter(chosen)

    def by_use(self, limit: int | None = None) -> list[LastUse]:
        """The slots that were used, least recently used first; at most `limit`."""
        lengths, uses = list(self._ticks), list(self._ticks.values())
        slots = [np.flatnonzero(ticks) for ticks in uses]
        if not slots:
            return []
        ticks = np.concatenate([of_length[used] for of_length, used in zip(uses, slots, strict=True)])
        which, used = np.repeat(np.arange(len(slots)), [len(used) for used in slots]), np.concatenate(slots)
        chosen = np.arange(len(ticks))
        if limit is not None and limit < len(ticks):
            chosen = np.argpartition(ticks, limit)[:limit]
        chosen = chosen[np.argsort(ticks[chosen])]
        of_chosen = (lengths[n] for n in which[chosen].tolist())
        return list(map(LastUse, ticks[chosen].tolist(), of_chosen, used[chosen].tolist()))


class Index:
    """An open index; any thread reads and notes uses, one writes. What LMDB raises passes on. Closed once nobody is
    inside.

    `uses`: the use order. `note`: what clients keep with the store, a few bytes. LMDB has no lock file here, so one
    lock keeps readers and the writer apart: what happens under it is short, and no I/O.
    """

    def __init__(self, budget_bytes: int, memory: int | None = None) -> None:
        """`budget_bytes` of the store: the index needs less than a page's share of it for each page. `memory`:
        descriptor of a memfd with the index; it is an empty one without."""
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
            os.close(descriptor)  # LMDB has opened it on its own
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
        """A copy of the index in a file; None if there is none, or it is not what was sealed."""
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
        """Leave a sealed copy in a file; nobody reads or writes meanwhile. OSError if the disk fails."""
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
        """Where the pages are; None for what is not there."""
        with self._lock, self._env.begin(buffers=True) as txn:
            get, pages = txn.get, self._pages
            return [_entry(get(key, None, pages)) for key in keys]

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count pages as used, the last one as the most recently used; absent keys are ignored."""
        for entry in self.locate(keys):
            if entry is not None:
                self.uses.note(entry.length, entry.slot)

    def num_pages(self) -> int:
        with self._lock, self._env.begin() as txn:
            return int(txn.stat(self._pages)["entries"])

    def num_bytes(self) -> int:
        """What a sealed copy of it takes."""
        with self._lock, self._env.begin() as txn:
            stats = [txn.stat(table) for table in (self._pages, self._slots)]
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        pages += sum(num_slots * TICK.itemsize // stats[0]["psize"] for num_slots in self.uses.num_slots)
        return int((pages + _OTHER_PAGES) * stats[0]["psize"])

    def by_use(self, *, newest: bool = False, limit: int | None = None) -> list[bytes]:
        """Keys in the order of use, oldest or `newest` first; at most `limit`."""
        used = self.uses.by_use()
        with self._lock, self._env.begin() as txn:
            steps = reversed(used) if newest else used
            keys = (txn.get(_SLOT.pack(*last.length, last.slot), db=self._slots) for last in steps)
            return list(itertools.islice((key for key in keys if key is not None), limit))

    def entries(self) -> list[tuple[bytes, Entry]]:
        """Every page and where it is, by key."""
        with self._lock, self._env.begin() as txn, txn.cursor(db=self._pages) as cursor:
            return [(key, Entry(*_ENTRY.unpack(raw))) for key, raw in cursor]

    def slot_keys(self) -> dict[tuple[int, int, int], bytes]:
        """The key of the page in each slot, by the length of slots and slot."""
        with self._lock, self._env.begin() as txn, txn.cursor(db=self._slots) as cursor:
            return {_SLOT.unpack(raw): key for raw, key in cursor}

    def records(self) -> npt.NDArray[np.void]:
        """Where every page is, as an array of records with the fields of `Entry`: a million in 0.2 s."""
        with self._lock, self._env.begin() as txn, txn.cursor(db=self._pages) as cursor:
            return np.frombuffer(b"".join(cursor.iternext(keys=False)), dtype=_RECORD)

    @contextlib.contextmanager
    def changes(self) -> Iterator[IndexChanges]:
        """Changes that become visible together, when the block ends; none of them if it raises."""
        with self._lock, self._env.begin(write=True) as txn:
            yield IndexChanges(txn, self._pages, self._slots, self.uses)


class IndexChanges:
    """The changes of one write transaction. `pages` and `slots` stay one to one."""

    def __init__(self, txn: Any, pages: Any, slots: Any, uses: UseOrder) -> None:
        self._txn = txn
        self._pages = pages
        self._slots = slots
        self._uses = uses

    def put(self, key: bytes, entry: Entry, tick: int) -> None:
        """Add a page, which is not there, used at `tick`."""
        slot = _SLOT.pack(*entry.length, entry.slot)
        self._txn.put(key, _ENTRY.pack(*entry), db=self._pages)
        # Slots beyond all others fill the pages of the table whole, and need no search.
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
        """Remove the least recently used page; returns its key and where it was."""
        while last := self._uses.pop_oldest():
            key = self._txn.pop(_SLOT.pack(*last.length, last.slot), db=self._slots)
            entry = None if key is None else self.delete(key)
            if key is not None and entry is not None:
                return key, entry
        return None


def _entry(raw: bytes | memoryview | None) -> Entry | None:
    return None if raw is None else Entry(*_ENTRY.unpack(raw))


def _copied(source: BinaryIO, num_bytes: int, target: BinaryIO | None = None) -> bytes:
    """Read so many bytes, into `target` if there is one; the seal of what was read."""
    checksum, left = xxhash.xxh3_64(seed=FORMAT), num_bytes
    while left > 0 and (chunk := source.read(min(_CHUNK_BYTES, left))):
        checksum.update(chunk)
        left -= len(chunk)
        if target is not None:
            target.write(chunk)
    return bytes(checksum.digest())
