"""Rebuilds the index of a store whose B-tree pages are damaged, from the leaf pages that can still be read.

Every page of the file that may be a leaf is read, whatever leads to it: a node has a key and either a value, which is
verified, or the record of a slot, which has a checksum. Leaf pages that no B-tree uses any more are found too: then a
key or a slot may be claimed twice, and the value itself tells whose it is. Recently evicted or deleted pages may
reappear. The new file replaces the old one at once, as after compacting; a crash before that leaves the old one.
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
from hicache.storage.cipher import ENCRYPTION_BYTES
from hicache.storage.directory import (
    DATA_FILE,
    PRIVATE_FILE_MODE,
    PRIVATE_FOLDER_MODE,
    RESCUE_FOLDER,
    WriterLock,
    sync_directory,
)
from hicache.storage.header import HEADER_BYTES
from hicache.storage.lmdb_file import MAX_TABLES, create_tables, find_tables
from hicache.storage.lmdb_pages import (
    LEAF_PAGE,
    NODE,
    NUM_META_PAGES,
    OVERFLOW_NODE,
    PAGE_HEADER,
    PAGE_NUMBER,
    Meta,
    read_meta,
    renumber,
)
from hicache.storage.lmdb_store import codecs_of
from hicache.storage.memory import aligned_buffer
from hicache.storage.optional_packages import io_errors, lmdb, require_packages
from hicache.storage.records import SETTINGS_KEY, STORE_KEY, IdentityRecord, Settings
from hicache.storage.slots import SlotRecord, SlotSet
from hicache.storage.tables import TICK, Age, Tables
from hicache.storage.value_file import ValueFile, ValueLocation
from hicache.storage.write_transaction import WriteTransaction

log = logging.getLogger("hicache.storage")

_MAX_PAGE_NUMBER = 1 << 48
_READ_BYTES, _COMMIT_BYTES, _SPARE_BYTES = 8 << 20, 16 << 20, 1 << 30


def rescue(path: str | os.PathLike[str]) -> int:
    """Rebuild the index of the store at `path`; returns how many pages it has. Values are verified only in doubt.

    Raises `StoreError` and its subclasses, also if the meta pages of the file are damaged or no record says what the
    pages are; then nothing was changed.
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
    except io_errors as error:
        raise StoreError(f"cannot rebuild the index of {path}: {error}; free space or repair the disk") from error
    finally:
        shutil.rmtree(copy, ignore_errors=True)
        lock.close()


class _Node(NamedTuple):
    """A key in a leaf page and its data: the bytes in the leaf, and where the data would be as a value."""

    key: bytes
    inline: bytes
    location: ValueLocation


@dataclass
class _Found:
    """What the leaf pages contain. `records` and `values`: by key, everything that may be its value."""

    identities: list[bytes] = field(default_factory=list)
    settings: list[bytes] = field(default_factory=list)
    ticks: dict[bytes, int] = field(default_factory=dict)
    records: dict[bytes, dict[bytes, SlotRecord]] = field(default_factory=dict)
    values: dict[bytes, dict[ValueLocation, None]] = field(default_factory=dict)

    def add(self, node: _Node) -> None:
        if len(node.key) == TICK.size:  # of `recency`; the data of other keys of that length names no page
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
        elif node.location.length >= HEADER_BYTES:
            self.values.setdefault(node.key, {})[node.location] = None

    def _note_tick(self, key: bytes, tick: int) -> None:
        self.ticks[key] = max(tick, self.ticks.get(key, 0))


class _Rescue:
    """One rescue, in a locked directory."""

    def __init__(self, path: Path, meta: Meta) -> None:
        self._path, self._meta = path, meta
        self._found = _Found()
        for node in _nodes(path / DATA_FILE, meta.psize):
            self._found.add(node)
        self._identity = self._find_identity()
        recorded, page_sizes = next(iter(self._found.settings), None), self._identity.page_sizes
        self._settings = Settings.unpack(recorded, page_sizes, meta.map_bytes)
        codecs = codecs_of(self._identity, self._settings, None)
        self._verifier = Verifier(codecs.verify_stored, codecs.max_value_bytes + ENCRYPTION_BYTES)
        self._buffer = aligned_buffer(self._verifier.max_value_bytes)

    def build(self, copy: Path) -> int:
        """Write the new data file to `copy` and replace the old one by it; returns how many pages it has."""
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

    def _find_identity(self) -> IdentityRecord:
        """The leaf pages of older commits have the same identity record."""
        for raw in self._found.identities:
            try:
                return IdentityRecord.unpack(self._path, raw)
            except StoreCorrupt:
                continue
        raise StoreCorrupt(f"nothing in {self._path / DATA_FILE} says what its pages are; remove the directory")

    def _fill(self, tables: Tables) -> int:
        """Write the pages with their ages; then rebuild the other tables from these."""
        slots = tables.slots
        data = ValueFile(self._path / DATA_FILE, self._meta.psize)
        try:
            entries = self._values(data) if slots is None else self._records(tables, slots)
            num_pages, is_left = 0, True
            while is_left:
                is_left, num_bytes = False, 0
                with tables.env.begin(write=True) as txn:
                    for key, stored, value_bytes in entries:
                        txn.put(key, stored, db=tables.pages)
                        txn.put(key, Age(self._found.ticks.get(key, 0), value_bytes, 0).pack(), db=tables.ages)
                        num_pages, num_bytes = num_pages + 1, num_bytes + len(stored)
                        if num_bytes >= _COMMIT_BYTES:
                            is_left = True
                            break
        finally:
            data.close()
        with tables.env.begin(write=True) as txn:
            transaction = WriteTransaction(txn, tables)
            transaction.rebuild([])
            transaction.save()
        return num_pages

    def _values(self, data: ValueFile) -> Iterator[tuple[bytes, bytes, int]]:
        """Key, value and its length, of the values in tables that verify."""
        for key, locations in self._found.values.items():
            for location in locations:
                value = self._verifier.read(data, key, location, self._buffer)
                if not isinstance(value, str):
                    yield key, bytes(value), len(value)
                    break

    def _records(self, tables: Tables, slots: SlotSet) -> Iterator[tuple[bytes, bytes, int]]:
        """Key, record and length of the value, at most one for each key and slot. One claimed once is not verified."""
        found = self._found.records.values()
        claims = Counter(_slot_of(record) for records in found for record in records.values())
        assigned = set[tuple[int, int]]()
        for key, records in self._found.records.items():
            for raw, record in records.items():
                location, slot = slots.locate(key, raw), _slot_of(record)
                is_doubtful = len(records) > 1 or claims[slot] > 1
                if location is None or slot in assigned:
                    continue
                if is_doubtful and self._verifier.reason(tables, key, location, self._buffer):
                    continue
                assigned.add(slot)
                yield key, raw, location.length
                break


def _slot_of(record: SlotRecord) -> tuple[int, int]:
    """The page size, which determines the file, and the number of the slot in it."""
    return record.page_bytes, record.slot


def _nodes(data: Path, psize: int) -> Iterator[_Node]:
    """All plausible nodes of all pages that may be leaves."""
    descriptor = os.open(data, os.O_RDONLY)
    try:
        file_bytes = os.fstat(descriptor).st_size
        for start in range(NUM_META_PAGES * psize, file_bytes, _READ_BYTES):
            for offset, page in _pages(descriptor, start, min(start + _READ_BYTES, file_bytes), psize):
                yield from _nodes_of(page, offset // psize, psize)
    finally:
        os.close(descriptor)


def _pages(descriptor: int, start: int, end: int, psize: int) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each page that can be read."""
    try:
        batch = os.pread(descriptor, end - start, start)
        yield from ((start + i, batch[i : i + psize]) for i in range(0, len(batch) - psize + 1, psize))
    except OSError as error:
        if end - start <= psize:
            log.warning("page %d is skipped: %s", start // psize, error)
            return
        for offset in range(start, end, psize):
            yield from _pages(descriptor, offset, min(offset + psize, end), psize)


def _nodes_of(page: bytes, number: int, psize: int) -> Iterator[_Node]:
    stated, _, flags, end, _ = PAGE_HEADER.unpack_from(page)
    is_another_kind = stated == number and flags != LEAF_PAGE
    if is_another_kind or not PAGE_HEADER.size < end <= psize:
        return
    for offset in struct.unpack_from(f"<{(end - PAGE_HEADER.size) // 2}H", page, PAGE_HEADER.size):
        if offset + NODE.size > psize:
            continue
        low, high, kind, key_bytes = NODE.unpack_from(page, offset)
        start, length = offset + NODE.size + key_bytes, low | high << 16
        key = page[offset + NODE.size : start]
        if kind == OVERFLOW_NODE and start + PAGE_NUMBER.size <= psize:
            first = PAGE_NUMBER.unpack_from(page, start)[0]
            if first < _MAX_PAGE_NUMBER:
                yield _Node(key, b"", ValueLocation(first * psize + PAGE_HEADER.size, length))
        elif not kind and start + length <= psize:
            yield _Node(key, page[start : start + length], ValueLocation(number * psize + start, length))
