"""Building the tables of a store anew where their trees are damaged, from the leaves that can still be read.

Every page of the file that may be a leaf is looked at, whatever led to it: a node has a key and either a value, which
is verified, or the record of one in a slot, which has a checksum of its own. Leaves that no tree has any more are found
with those that one has: a key or a slot may be claimed twice, and then the value itself says whose it is. Pages that
were evicted or deleted lately may be there again. The new file takes the old one's place at once, as after compacting;
a crash before leaves the old one.

Owns nothing; holds the writer's lock. May import lmdb, the standard library and its siblings.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hicache.storage.base import StoreCorrupt, StoreError
from hicache.storage.check import Verifier
from hicache.storage.cipher import SEAL_BYTES
from hicache.storage.directory import DATA_FILE, PRIVATE_FILE_MODE, PRIVATE_FOLDER_MODE, RESCUE_FOLDER, WriterLock
from hicache.storage.header import HEADER_BYTES
from hicache.storage.lmdb_file import MAX_TABLES, create_tables, find_tables, sync_directory
from hicache.storage.lmdb_meta import Meta, read_meta, renumber
from hicache.storage.lmdb_record import SETTINGS_KEY, STORE_KEY, IdentityRecord, Settings
from hicache.storage.lmdb_store import codecs_of
from hicache.storage.lmdb_tree import Place, ValueFile
from hicache.storage.lru import TICK, Age, Ledger, Tables
from hicache.storage.memory import aligned_buffer
from hicache.storage.packages import lmdb, medium_errors, require_packages
from hicache.storage.slots import SlotRecord, SlotSet

log = logging.getLogger("hicache.storage")

_HEAD, _NODE, _NUMBER = struct.Struct("<QHHH"), struct.Struct("<HHHH"), struct.Struct("<Q")
_HEAD_BYTES, _LEAF, _IN_A_RUN = 16, 2, 1
_MAX_PAGE = 1 << 48
_READ_BYTES, _COMMIT_BYTES, _SPARE_BYTES = 8 << 20, 16 << 20, 1 << 30


def rescue(path: str | os.PathLike[str]) -> int:
    """Build the tables of the store at `path` anew; returns how many pages they have, verified only where in doubt.

    Raises `StoreError` and its kinds, also where the head of the file is damaged or no record says what the pages are;
    then nothing was changed.
    """
    require_packages()
    path = Path(path)
    if not (path / DATA_FILE).exists():
        raise StoreError(f"there is no store at {path}; check the path")
    lock = WriterLock(path)
    copy = path / RESCUE_FOLDER
    try:
        meta = read_meta(path / DATA_FILE)
        if meta is None:
            raise StoreCorrupt(f"{path / DATA_FILE} is empty; remove the directory")
        return _Rescue(path, meta).build(copy)
    except medium_errors as error:
        raise StoreError(f"cannot build the tables of {path} anew: {error}; free space or mend the medium") from error
    finally:
        shutil.rmtree(copy, ignore_errors=True)
        lock.close()


class _Node(NamedTuple):
    """A key of a leaf and its data: in the leaf, and, of a value, where it lies in the file."""

    key: bytes
    inline: bytes
    place: Place


@dataclass
class _Found:
    """What the leaves have. `records` and `values`: by key, all that may be its value."""

    identities: list[bytes] = field(default_factory=list)
    settings: list[bytes] = field(default_factory=list)
    ticks: dict[bytes, int] = field(default_factory=dict)
    records: dict[bytes, dict[bytes, SlotRecord]] = field(default_factory=dict)
    values: dict[bytes, dict[Place, None]] = field(default_factory=dict)

    def take(self, node: _Node) -> None:
        if len(node.key) == TICK.size:  # of `recency`; what else has such a key names no page in its data
            self._note_tick(node.inline, TICK.unpack(node.key)[0])
        record, age = SlotRecord.unpack(node.key, node.inline), Age.unpack(node.inline)
        if node.key == STORE_KEY:
            self.identities.append(node.inline)
        elif node.key == SETTINGS_KEY:
            self.settings.append(node.inline)
        elif record is not None:
            self.records.setdefault(node.key, {})[node.inline] = record
        elif age is not None:
            self._note_tick(node.key, age.tick)
        elif node.place.length >= HEADER_BYTES:
            self.values.setdefault(node.key, {})[node.place] = None

    def _note_tick(self, key: bytes, tick: int) -> None:
        self.ticks[key] = max(tick, self.ticks.get(key, 0))


class _Rescue:
    """One rescue. The directory is locked."""

    def __init__(self, path: Path, meta: Meta) -> None:
        self._path, self._meta = path, meta
        self._found = _Found()
        for node in _nodes(path / DATA_FILE, meta.psize):
            self._found.take(node)
        self._identity = self._identity_found()
        recorded, page_sizes = next(iter(self._found.settings), None), self._identity.page_sizes
        self._settings = Settings.unpack(recorded, page_sizes, meta.map_bytes)
        codecs = codecs_of(self._identity, self._settings, None)
        self._verifier = Verifier(codecs.verify_stored, codecs.max_value_bytes + SEAL_BYTES)
        self._room = aligned_buffer(self._verifier.max_value_bytes)

    def build(self, copy: Path) -> int:
        """Write the new tables to `copy` and let it take the old file's place."""
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(mode=PRIVATE_FOLDER_MODE)
        map_bytes = 2 * (self._path / DATA_FILE).stat().st_size + _SPARE_BYTES
        options = {"lock": False, "map_size": map_bytes, "max_dbs": MAX_TABLES, "mode": PRIVATE_FILE_MODE}
        with lmdb.open(str(copy), **options) as env:
            with env.begin(write=True) as txn:
                create_tables(env, txn, self._identity, self._settings)
            tables = find_tables(env, self._path, writable=True)
            try:
                num_pages = self._fill(tables)
            finally:
                tables.close()
        renumber(copy / DATA_FILE, self._meta.transaction)
        (copy / DATA_FILE).replace(self._path / DATA_FILE)
        sync_directory(self._path)
        return num_pages

    def _identity_found(self) -> IdentityRecord:
        """Leaves of older commits have the same one."""
        for raw in self._found.identities:
            try:
                return IdentityRecord.unpack(self._path, raw)
            except StoreCorrupt:
                continue
        raise StoreCorrupt(f"nothing in {self._path / DATA_FILE} says what its pages are; remove the directory")

    def _fill(self, tables: Tables) -> int:
        """Pages with their sizes and ticks; then the indexes of these."""
        slots = tables.slots
        data = ValueFile(self._path / DATA_FILE, self._meta.psize)
        try:
            pairs = self._values(tables, data) if slots is None else self._records(tables, slots)
            num_pages, is_left = 0, True
            while is_left:
                is_left, num_bytes = False, 0
                with tables.env.begin(write=True) as txn:
                    for key, stored, value_bytes in pairs:
                        txn.put(key, stored, db=tables.pages)
                        txn.put(key, Age(self._found.ticks.get(key, 0), value_bytes, 0).pack(), db=tables.ages)
                        num_pages, num_bytes = num_pages + 1, num_bytes + len(stored)
                        if num_bytes >= _COMMIT_BYTES:
                            is_left = True
                            break
        finally:
            data.close()
        with tables.env.begin(write=True) as txn:
            ledger = Ledger(txn, tables)
            ledger.rebuild([])
            ledger.save()
        return num_pages

    def _values(self, tables: Tables, data: ValueFile) -> Iterator[tuple[bytes, bytes, int]]:
        """Key, value and its length, of the values of a store without slots that verify."""
        for key, places in self._found.values.items():
            for place in places:
                value = self._verifier.value(data, key, place, self._room)
                if not isinstance(value, str):
                    yield key, bytes(value), len(value)
                    break

    def _records(self, tables: Tables, slots: SlotSet) -> Iterator[tuple[bytes, bytes, int]]:
        """Key, record and length of the value, one for each key and slot. Those that are claimed once are believed."""
        found = self._found.records.values()
        claims = Counter(_slot_of(record) for records in found for record in records.values())
        taken = set[tuple[int, int]]()
        for key, records in self._found.records.items():
            for raw, record in records.items():
                place = slots.place(key, raw)
                slot = _slot_of(record)
                in_doubt = len(records) > 1 or claims[slot] > 1
                if place is None or slot in taken:
                    continue
                if in_doubt and self._verifier.reason(tables, key, place, self._room):
                    continue
                taken.add(slot)
                yield key, raw, place.length
                break


def _slot_of(record: SlotRecord) -> tuple[int, int]:
    """The page size, which names the file, and the number of the slot in it."""
    return record.page_bytes, record.slot


def _nodes(data: Path, psize: int) -> Iterator[_Node]:
    """All nodes of all pages that may be leaves, as far as they make sense."""
    descriptor = os.open(data, os.O_RDONLY)
    try:
        file_bytes = os.fstat(descriptor).st_size
        for start in range(2 * psize, file_bytes, _READ_BYTES):
            for offset, page in _pages(descriptor, start, min(start + _READ_BYTES, file_bytes), psize):
                yield from _nodes_of(page, offset // psize, psize)
    finally:
        os.close(descriptor)


def _pages(descriptor: int, start: int, end: int, psize: int) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each page that can be read."""
    try:
        batch = os.pread(descriptor, end - start, start)
        yield from ((start + at, batch[at : at + psize]) for at in range(0, len(batch) - psize + 1, psize))
    except OSError as error:
        if end - start <= psize:
            log.warning("page %d is passed over: %s", start // psize, error)
            return
        for offset in range(start, end, psize):
            yield from _pages(descriptor, offset, min(offset + psize, end), psize)


def _nodes_of(page: bytes, number: int, psize: int) -> Iterator[_Node]:
    stated, _, flags, end = _HEAD.unpack_from(page)
    is_another = stated == number and flags != _LEAF
    if is_another or not _HEAD_BYTES < end <= psize:
        return
    for at in struct.unpack_from(f"<{(end - _HEAD_BYTES) // 2}H", page, _HEAD_BYTES):
        if at + _NODE.size > psize:
            continue
        low, high, kind, key_bytes = _NODE.unpack_from(page, at)
        start, length = at + _NODE.size + key_bytes, low | high << 16
        key = page[at + _NODE.size : start]
        if kind == _IN_A_RUN and start + _NUMBER.size <= psize:
            first = _NUMBER.unpack_from(page, start)[0]
            if first < _MAX_PAGE:
                yield _Node(key, b"", Place(first * psize + _HEAD_BYTES, length))
        elif not kind and start + length <= psize:
            yield _Node(key, page[start : start + length], Place(number * psize + start, length))
