"""The files of a store: validated, created, and opened as tables.

LMDB trusts its file: a cut one ends the process on first access, a foreign one may do worse. So everything that can be
validated is validated before LMDB maps the file.

    DIR/data.mdb         LMDB's data           DIR/writer.lock   held by the one process that writes (directory.py)
    DIR/lock.mdb         LMDB's readers        DIR/compact.tmp   a copy being compacted; a left-over is removed
    DIR/pages-SIZE.dat   slots (slots.py)      DIR/rescue.tmp/   an index being rebuilt; a left-over is removed

Readers in other processes register in `lock.mdb` (reader_table.py). It is never replaced while anyone has the store
open, so readers of the old data file and the writer of a compacted one agree on the current transaction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache.storage.base import StoreCorrupt, StoreError, StoreIndexDamaged
from hicache.storage.cipher import ENCRYPTION_BYTES
from hicache.storage.directory import DATA_FILE, PRIVATE_FILE_MODE, slots_file, sync_directory
from hicache.storage.index_check import index_fault
from hicache.storage.lmdb_pages import Meta, read_meta
from hicache.storage.memory import ALIGNMENT, round_up
from hicache.storage.optional_packages import io_errors, lmdb
from hicache.storage.reader_table import READER_SLOTS
from hicache.storage.records import MAX_FORMATS, SETTINGS_KEY, STORE_KEY, IdentityRecord, Settings
from hicache.storage.slot_file import SlotFile
from hicache.storage.slots import SlotCounters, SlotSet, SlotTables, counters_key, slot_table_names
from hicache.storage.tables import COUNTERS_KEY, PROBE_KEY, TABLE_NAMES, Tables, Totals
from hicache.storage.value_file import ValueFile

_SHRINKING_BYTES, _SPARE_INDEX_BYTES = 16 << 20, 128 << 10
MAX_INDEX_CHECKED_BYTES = 64 << 20  # when a store is opened; about a quarter of a second from a cold disk
MAX_TABLES = len(TABLE_NAMES) + 2 * MAX_FORMATS


def restore_length(path: Path) -> int | None:
    """Validate the data file before LMDB maps it. Raises `StoreCorrupt` for what LMDB must not open.

    LMDB may leave the file shorter than its last page number states if the pages at the end are free, but maps it in
    full length. A short file is extended with zeros and its former length returned: the caller then verifies all values
    before it trusts any. None: the file has its length, or is new.
    """
    data = path / DATA_FILE
    meta = read_meta(data)
    if meta is None:
        return None
    size = data.stat().st_size
    if size >= meta.file_bytes:
        return None
    os.truncate(data, meta.file_bytes)
    return size


def require_valid_index(path: Path, meta: Meta | None, *, whole: bool = False) -> None:
    """Validate the index of a snapshot before LMDB follows it; a read transaction holds it, or nobody writes. A large
    index is validated only if `whole`, and then also the first page of each long value.

    Raises `StoreIndexDamaged`, and `StoreError` if the file cannot be read.
    """
    data = path / DATA_FILE
    if meta is None:
        return
    try:
        fault = index_fault(data, meta, max_bytes=None if whole else MAX_INDEX_CHECKED_BYTES, overflow=whole)
    except OSError as error:
        raise StoreError(f"cannot read {data}: {error}; repair the disk or choose another disk path") from error
    if fault:
        raise StoreIndexDamaged(data, fault)


@dataclass(frozen=True)
class FileSpec:
    """What a store is opened with for writing: the maximum of all its files, what of that is for the data file if
    values are in slots, the required identity, the settings to record, and the page size from which a new store has
    slots."""

    path: Path
    max_bytes: int
    index_bytes: int
    max_readers: int
    identity: IdentityRecord
    settings: Settings
    slots_from_bytes: int


def open_tables(spec: FileSpec) -> Tables:
    """Open the tables of a store for writing, or create them in an empty directory.

    Raises `StoreCorrupt`, `StoreMismatch` or `StoreError`; then nothing stays open and no page was changed.
    """
    env = _open_env(spec)
    path, is_new = spec.path, False
    try:
        env.reader_check()
        is_new = env.stat()["entries"] == 0
        if is_new:
            with env.begin(write=True) as txn:
                identity = dataclasses.replace(spec.identity, has_slots=_create_slot_files(spec))
                create_tables(env, txn, identity, spec.settings)
        else:
            _require_identity(env, spec)
        tables = find_tables(env, path, writable=True)
    except io_errors as error:
        env.close()
        if is_new or isinstance(error, (lmdb.DiskError, lmdb.MapFullError)):
            raise StoreError(f"no space for a store at {path}: {error}; free space or choose another path") from error
        if isinstance(error, SystemError):
            raise StoreError(f"lmdb failed to open {path}: {error}; try again") from error
        raise StoreCorrupt(f"{path} is not a page store: {error}; choose another disk path") from error
    except StoreError:
        env.close()
        raise
    return tables if tables.slots is None else _with_bounds(tables, tables.slots, spec)


def find_tables(env: Any, path: Path, *, writable: bool) -> Tables:
    """The tables of an open environment that is a store. Raises what LMDB raises for a missing table, OSError for a
    missing file, and `StoreError`."""
    *others, meta = (env.open_db(name, create=False) for name in TABLE_NAMES)
    with env.begin() as txn:
        identity = read_identity(path, txn, meta)
        if not identity.has_slots and any(txn.get(counters_key(size), db=meta) for size in identity.page_sizes):
            raise StoreCorrupt(f"the store {path} has slots, its identity record has none; choose another disk path")
    psize = env.stat()["psize"]
    with contextlib.ExitStack() as opened:
        values = ValueFile(Path(env.path()) / DATA_FILE, psize, writable=writable)
        opened.callback(values.close)
        by_page_bytes = {}
        for page_bytes in identity.page_sizes if identity.has_slots else ():
            free, freed = (env.open_db(name, create=False) for name in slot_table_names(page_bytes))
            file = SlotFile(slots_file(path, page_bytes), _slot_bytes(identity, page_bytes), writable=writable)
            opened.callback(file.close)
            by_page_bytes[page_bytes] = SlotTables(page_bytes, file, free, freed)
        opened.pop_all()
    pages, ages, recency = others
    return Tables(env, psize, values, pages, ages, recency, meta, SlotSet(by_page_bytes) if by_page_bytes else None)


def read_identity(path: Path, txn: Any, meta: Any) -> IdentityRecord:
    """Whose pages the store holds. Raises `StoreCorrupt`, and `StoreMismatch` for another format."""
    totals = Totals.unpack(txn.get(COUNTERS_KEY, db=meta))
    return IdentityRecord.unpack(path, None if totals is None else txn.get(STORE_KEY, db=meta))


def create_tables(env: Any, txn: Any, identity: IdentityRecord, settings: Settings) -> None:
    """Create the tables and records of a store without pages."""
    *_, meta = (env.open_db(name, txn=txn) for name in TABLE_NAMES)
    for page_bytes in identity.page_sizes if identity.has_slots else ():
        for name in slot_table_names(page_bytes):
            env.open_db(name, txn=txn)
        txn.put(counters_key(page_bytes), SlotCounters().pack(), db=meta)
    txn.put(STORE_KEY, identity.pack(), db=meta)
    txn.put(SETTINGS_KEY, settings.pack(), db=meta)
    txn.put(COUNTERS_KEY, Totals().pack(), db=meta)


def _open_env(spec: FileSpec) -> Any:
    path = spec.path
    try:
        size = (path / DATA_FILE).stat().st_size if (path / DATA_FILE).exists() else 0
        return lmdb.open(
            str(path),
            # A file made with a larger budget needs space after its end before anything in it can be evicted.
            map_size=spec.max_bytes if size <= spec.max_bytes else size + size // 64 + _SHRINKING_BYTES,
            max_dbs=MAX_TABLES,
            max_readers=READER_SLOTS,
            mode=PRIVATE_FILE_MODE,
            metasync=spec.settings.durability == "commit",
            # Values are long runs of file pages and are read whole: without read-ahead cold reads take 6 times as long.
            readahead=True,
        )
    except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as error:
        raise StoreCorrupt(f"{path} is not a page store of this version: {error}; choose another disk path") from error
    except io_errors as error:
        raise StoreError(f"cannot open the store {path}: {error}; choose another disk path") from error


def _slot_bytes(identity: IdentityRecord, page_bytes: int) -> int:
    """Length of a slot for pages of one size."""
    return round_up(page_bytes + (ENCRYPTION_BYTES if identity.key_id else 0))


def _create_slot_files(spec: FileSpec) -> bool:
    """Whether a new store has its values in slots; then their files exist and are empty.

    The largest page decides for all sizes, so that one budget and one use order hold for all.
    """
    if spec.identity.page_sizes[-1] < spec.slots_from_bytes:
        return False
    try:
        return all(_create_slot_file(spec, page_bytes) for page_bytes in spec.identity.page_sizes)
    finally:
        sync_directory(spec.path)


def _create_slot_file(spec: FileSpec, page_bytes: int) -> bool:
    """Create an empty slot file; whether holes free disk space in it."""
    path = slots_file(spec.path, page_bytes)
    _require_unused(path)
    file = SlotFile(path, _slot_bytes(spec.identity, page_bytes), writable=True, create=True)
    try:
        file.truncate(0)
        return file.can_punch_holes()
    finally:
        file.close()


def _require_unused(file: Path) -> None:
    """An interrupted creation may have left a block of zeros here; anything else belongs to somebody."""
    with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:
        if any(opened.read(ALIGNMENT)) or opened.read(1):
            raise StoreError(f"{file} is there, but no store; move it away or choose another disk path")


def _with_bounds(tables: Tables, slots: SlotSet, spec: FileSpec) -> Tables:
    """Divide the maximum between data file and slots, and free what uncommitted writes take of the slots."""
    try:
        map_bytes = max(spec.index_bytes, tables.data_bytes() + _SPARE_INDEX_BYTES)
        tables.env.set_mapsize(map_bytes)
        with tables.env.begin() as txn:
            for each in slots.by_page_bytes.values():
                each.discard_uncommitted(txn, tables.meta)
    except io_errors as error:
        tables.close()
        raise StoreCorrupt(f"cannot open the slots of {spec.path}: {error}; choose another disk path") from error
    max_bytes = spec.max_bytes - spec.index_bytes
    return dataclasses.replace(tables, slots=dataclasses.replace(slots, max_bytes=max_bytes))


def _require_identity(env: Any, spec: FileSpec) -> None:
    """Compare the identity; then record the settings now in force, and remove what a killed probe left."""
    *_, meta = (env.open_db(name, create=False) for name in TABLE_NAMES)
    with env.begin() as txn, txn.cursor(db=meta) as cursor:
        stored = read_identity(spec.path, txn, meta)
        settings = txn.get(SETTINGS_KEY, db=meta)
        has_probe = cursor.set_key(PROBE_KEY)
    stored.require(spec.path, spec.identity)
    if settings == spec.settings.pack() and not has_probe:
        return
    # A full disk must not prevent reading: then the records stay as they were.
    with contextlib.suppress(lmdb.DiskError, lmdb.MapFullError, OSError), env.begin(write=True) as txn:
        txn.put(SETTINGS_KEY, spec.settings.pack(), db=meta)
        txn.delete(PROBE_KEY, db=meta)
