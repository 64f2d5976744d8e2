"""The files of an lmdb page store: whether they are ours, and opening them without a crash.

lmdb trusts its file: a truncated one kills the process on first touch, a foreign one may do worse. So what can be
checked is checked before lmdb maps it. Owns the environment's flags. May import lmdb, the standard library, base,
cipher, direct_read, directory, lmdb_meta, lmdb_record, lmdb_tree, lru, reader_table, slot_file, slots and tree_check.

    DIR/data.mdb     lmdb's data      DIR/writer.lock   held by the one store that writes (see directory)
    DIR/lock.mdb     lmdb's readers   DIR/compact.tmp   a copy being compacted; a left-over is removed
    DIR/pages-SIZE.dat   the slots for pages of that size, where a store has slots
    DIR/rescue.tmp/  tables that are being built anew; left-overs are removed

Readers in other processes register in `lock.mdb` (see reader_table). It is never replaced while anyone has the store
open, so that readers of the old data file and the writer of a compacted one agree on the current transaction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache.storage.base import StoreCorrupt, StoreError, StoreTreesDamaged
from hicache.storage.cipher import SEAL_BYTES
from hicache.storage.directory import DATA_FILE, PRIVATE_FILE_MODE, slots_file, writer_of
from hicache.storage.lmdb_meta import Meta, read_meta
from hicache.storage.lmdb_record import MAX_FORMATS, SETTINGS_KEY, STORE_KEY, IdentityRecord, Settings
from hicache.storage.lmdb_tree import ValueFile
from hicache.storage.lru import COUNTERS_KEY, PROBE_KEY, TABLE_NAMES, Tables, Totals
from hicache.storage.memory import ALIGNMENT
from hicache.storage.packages import lmdb, medium_errors
from hicache.storage.reader_table import READER_SLOTS
from hicache.storage.slot_file import SlotFile, whole_blocks
from hicache.storage.slots import SlotSet, SlotTables, Space, slot_table_names, space_key
from hicache.storage.tree_check import trees_fault

__all__ = [
    "DATA_FILE",
    "MAX_TABLES",
    "FileSpec",
    "create_tables",
    "find_tables",
    "mend_length",
    "open_tables",
    "read_identity",
    "require_trees",
    "sync_directory",
    "writer_of",
]

_SHRINKING_BYTES, _SPARE_INDEX_BYTES = 16 << 20, 128 << 10
_TREES_AT_OPENING_BYTES = 64 << 20  # about a quarter of a second from a cold disk
MAX_TABLES = len(TABLE_NAMES) + 2 * MAX_FORMATS


def mend_length(path: Path) -> int | None:
    """Look at the data file before lmdb maps it. Raises `StoreCorrupt` for what lmdb must not be given.

    lmdb may leave the file shorter than its last page number says when the pages at the end are free, but maps it
    as if it were whole. A file that is short is extended with zeros; then the length it had is returned, for the caller
    to verify all values before it trusts any. None: the file is whole, or new.
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


def require_trees(path: Path, meta: Meta | None, *, whole: bool = False) -> None:
    """Look at the trees of a snapshot before lmdb walks them; it must be held, or nobody write. Large ones are looked
    at only where the `whole` is asked for, and then so are the pages with which long values begin.

    Raises `StoreTreesDamaged`, and `StoreError` where the medium fails.
    """
    data = path / DATA_FILE
    if meta is None:
        return
    try:
        fault = trees_fault(data, meta, most_bytes=None if whole else _TREES_AT_OPENING_BYTES, heads=whole)
    except OSError as error:
        raise StoreError(f"cannot read {data}: {error}; mend the medium or choose another disk path") from error
    if fault:
        raise StoreTreesDamaged(data, fault)


@dataclass(frozen=True)
class FileSpec:
    """What an environment is opened with: the bound of its files, what of that is for tables beside slots, the identity
    that the store must have, the settings to be recorded, and the page size from which on a new store has slots."""

    path: Path
    map_bytes: int
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
                identity = dataclasses.replace(spec.identity, has_slots=_make_slot_files(spec))
                create_tables(env, txn, identity, spec.settings)
        else:
            _adopt(env, spec)
        tables = find_tables(env, path, writable=True)
    except medium_errors as error:
        env.close()
        if is_new or isinstance(error, (lmdb.DiskError, lmdb.MapFullError)):
            raise StoreError(f"no room for a store at {path}: {error}; free space or choose another path") from error
        if isinstance(error, SystemError):
            raise StoreError(f"lmdb failed to open {path}: {error}; try again") from error
        raise StoreCorrupt(f"{path} is not a page store: {error}; choose another disk path") from error
    except StoreError:
        env.close()
        raise
    return tables if tables.slots is None else _with_bounds(tables, tables.slots, spec)


def find_tables(env: Any, path: Path, *, writable: bool) -> Tables:
    """The tables of an open environment that is a store. Raises what lmdb raises when one is missing, OSError when a
    file is, and `StoreError`."""
    *others, meta = (env.open_db(name, create=False) for name in TABLE_NAMES)
    with env.begin() as txn:
        identity = read_identity(path, txn, meta)
        if not identity.has_slots and any(txn.get(space_key(size), db=meta) for size in identity.page_sizes):
            raise StoreCorrupt(f"the store {path} has slots, its identity record has none; choose another disk path")
    psize = env.stat()["psize"]
    with contextlib.ExitStack() as opened:
        values = ValueFile(Path(env.path()) / DATA_FILE, psize, writable=writable)
        opened.callback(values.close)
        by_page_bytes = {}
        for page_bytes in identity.page_sizes if identity.has_slots else ():
            free, freed = (env.open_db(name, create=False) for name in slot_table_names(page_bytes))
            file = SlotFile(slots_file(path, page_bytes), slot_bytes_for(identity, page_bytes), writable=writable)
            opened.callback(file.close)
            by_page_bytes[page_bytes] = SlotTables(page_bytes, file, free, freed)
        opened.pop_all()
    pages, ages, recency = others
    return Tables(env, psize, values, pages, ages, recency, meta, SlotSet(by_page_bytes) if by_page_bytes else None)


def read_identity(path: Path, txn: Any, meta: Any) -> IdentityRecord:
    """Whose pages the store holds. Raises `StoreCorrupt`, and `StoreMismatch` for a newer format."""
    totals = Totals.unpack(txn.get(COUNTERS_KEY, db=meta))
    return IdentityRecord.unpack(path, None if totals is None else txn.get(STORE_KEY, db=meta))


def sync_directory(path: Path) -> None:
    """Make renames in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_env(spec: FileSpec) -> Any:
    path = spec.path
    try:
        size = (path / DATA_FILE).stat().st_size if (path / DATA_FILE).exists() else 0
        return lmdb.open(
            str(path),
            # A file made with a larger budget needs room beyond its end before anything in it can be evicted.
            map_size=spec.map_bytes if size <= spec.map_bytes else size + size // 64 + _SHRINKING_BYTES,
            max_dbs=MAX_TABLES,
            max_readers=READER_SLOTS,
            mode=PRIVATE_FILE_MODE,
            metasync=spec.settings.durability == "commit",
            # Values are long runs of file pages and are read whole: without read-ahead cold reads take 6 times as long.
            readahead=True,
        )
    except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as error:
        raise StoreCorrupt(f"{path} is not a page store of this version: {error}; choose another disk path") from error
    except medium_errors as error:
        raise StoreError(f"cannot open the store {path}: {error}; choose another disk path") from error


def create_tables(env: Any, txn: Any, identity: IdentityRecord, settings: Settings) -> None:
    """The tables and records of a store without a page."""
    *_, meta = (env.open_db(name, txn=txn) for name in TABLE_NAMES)
    for page_bytes in identity.page_sizes if identity.has_slots else ():
        for name in slot_table_names(page_bytes):
            env.open_db(name, txn=txn)
        txn.put(space_key(page_bytes), Space().pack(), db=meta)
    txn.put(STORE_KEY, identity.pack(), db=meta)
    txn.put(SETTINGS_KEY, settings.pack(), db=meta)
    txn.put(COUNTERS_KEY, Totals().pack(), db=meta)


def slot_bytes_for(identity: IdentityRecord, page_bytes: int) -> int:
    """Length of a slot for pages of one size."""
    return whole_blocks(page_bytes + (SEAL_BYTES if identity.key_id else 0))


def _make_slot_files(spec: FileSpec) -> bool:
    """Whether a new store has its values in slots; their files are there then, empty.

    All sizes go the same way, so that one budget holds for all: by the largest one.
    """
    if spec.identity.page_sizes[-1] < spec.slots_from_bytes:
        return False
    try:
        return all(_make_slot_file(spec, page_bytes) for page_bytes in spec.identity.page_sizes)
    finally:
        sync_directory(spec.path)


def _make_slot_file(spec: FileSpec, page_bytes: int) -> bool:
    """An empty file of slots; whether slots can become holes in it."""
    path = slots_file(spec.path, page_bytes)
    _require_unused(path)
    file = SlotFile(path, slot_bytes_for(spec.identity, page_bytes), writable=True, create=True)
    try:
        file.cut(0)
        return file.can_empty()
    finally:
        file.close()


def _require_unused(file: Path) -> None:
    """A store that is being made may have left a block of zeros here; what else there is is not ours to remove."""
    with contextlib.suppress(FileNotFoundError), file.open("rb") as there:
        if any(there.read(ALIGNMENT)) or there.read(1):
            raise StoreError(f"{file} is there, but no store; move it away or choose another disk path")


def _with_bounds(tables: Tables, slots: SlotSet, spec: FileSpec) -> Tables:
    """The bound divided between tables and slots, and the slots tidied up."""
    try:
        map_bytes = max(spec.index_bytes, tables.index_bytes() + _SPARE_INDEX_BYTES)
        tables.env.set_mapsize(map_bytes)
        with tables.env.begin() as txn:
            for each in slots.by_page_bytes.values():
                each.tidy(txn, tables.meta)
    except medium_errors as error:
        tables.close()
        raise StoreCorrupt(f"cannot open the slots of {spec.path}: {error}; choose another disk path") from error
    max_bytes = spec.map_bytes - spec.index_bytes
    return dataclasses.replace(tables, slots=dataclasses.replace(slots, max_bytes=max_bytes))


def _adopt(env: Any, spec: FileSpec) -> None:
    """Compare the identity; then note the settings that are in force now, and drop what a killed probe left."""
    *_, meta = (env.open_db(name, create=False) for name in TABLE_NAMES)
    with env.begin() as txn, txn.cursor(db=meta) as cursor:
        stored = read_identity(spec.path, txn, meta)
        settings = txn.get(SETTINGS_KEY, db=meta)
        has_probe = cursor.set_key(PROBE_KEY)
    stored.require(spec.path, spec.identity)
    if settings == spec.settings.pack() and not has_probe:
        return
    # A full disk must not keep a store from being read: the records are as they were, then.
    with contextlib.suppress(lmdb.DiskError, lmdb.MapFullError, OSError), env.begin(write=True) as txn:
        txn.put(SETTINGS_KEY, spec.settings.pack(), db=meta)
        txn.delete(PROBE_KEY, db=meta)
