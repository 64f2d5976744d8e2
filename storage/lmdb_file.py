"""The files of an lmdb page store: who owns the directory, whether it is ours, and opening it without a crash.

lmdb trusts its file: a truncated one kills the process on first touch, a foreign one may do worse. So what can be
checked is checked before lmdb maps it. Owns the writer's lock file, the identity record and the environment's flags.
May import lmdb, the standard library, base and lru.

    DIR/data.mdb     lmdb's data      DIR/writer.lock   held by the one store that writes; names its process
    DIR/lock.mdb     lmdb's readers   DIR/compact.tmp   a copy being compacted; a left-over is removed
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache.storage.base import Durability, StoreCorrupt, StoreError, StoreLocked, StoreMismatch
from hicache.storage.lru import COUNTERS_KEY, PAIR, TABLE_NAMES, Tables
from hicache.storage.packages import lmdb

STORE_FORMAT = 1
DATA_FILE, LOCK_FILE, READERS_FILE, COMPACT_FILE = "data.mdb", "writer.lock", "lock.mdb", "compact.tmp"
_STORE_KEY = b"store"
_READERS_FILE_BYTES = 64 << 10
_SHRINKING_BYTES = 16 << 20

# lmdb 0.9 on a little-endian 64-bit machine, pages 0 and 1 of the file: a page header of 16 bytes, then u32 magic,
# u32 version, address, map size, two table records of 48 bytes (the first begins with the page size), u64 last page,
# u64 transaction.
_META_START = struct.Struct("<16xII16xI")
_META_END = struct.Struct("<136xQQ")
_LMDB_MAGIC, _LMDB_VERSION = 0xBEEFC0DE, 1


def canonical(identity: Mapping[str, str | int], page_bytes: int) -> str:
    """The record of format and identity as a store keeps it: JSON with sorted names."""
    record = {"format": STORE_FORMAT, "page_bytes": page_bytes, "identity": dict(identity)}
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


def namespace_digest(identity: Mapping[str, str | int]) -> bytes:
    """SHA-256 over the identity as canonical JSON; its first 16 bytes go into every value."""
    return hashlib.sha256(json.dumps(dict(identity), sort_keys=True, separators=(",", ":")).encode()).digest()


def lock_directory(path: Path) -> int:
    """Create the directory if need be and take its writer lock; returns the descriptor that holds it.

    The kernel releases the lock with the process, however it ends. Raises `StoreLocked` or `StoreError`.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except (FileExistsError, NotADirectoryError):
        raise StoreError(f"the disk path {path} is not a directory; choose another path") from None
    except OSError as error:
        raise StoreError(f"cannot write to the disk path {path}: {error.strerror}; choose another path") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise StoreLocked(
                f"the store {path} is in use by process {holder}; close it there or choose another path"
            ) from None
        raise StoreError(f"cannot lock the disk path {path}: {error.strerror}; choose a local directory") from error
    with contextlib.suppress(OSError):  # on a full disk the name is missing from a message, nothing else
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def mend_length(path: Path) -> int | None:
    """Look at the data file before lmdb maps it. Raises `StoreCorrupt` for what is not an lmdb file.

    lmdb may leave the file shorter than its last page number says when the pages at the end are free, but maps it
    as if it were whole. A file that is short is extended with zeros; then the length it had is returned, for the caller
    to verify all values before it trusts any. None: the file is whole, or new.
    """
    data = path / DATA_FILE
    size = data.stat().st_size if data.exists() else 0
    if not size:
        return None
    foreign = StoreCorrupt(f"{data} is not the data of a page store; move it away or choose another disk path")
    if not data.is_file():
        raise foreign
    with data.open("rb") as file:
        head = file.read(_META_END.size)
        if len(head) < _META_END.size:
            raise foreign
        magic, version, psize = _META_START.unpack_from(head)
        if magic != _LMDB_MAGIC or not 256 <= psize <= 1 << 16:
            raise foreign
        file.seek(psize)
        second = file.read(_META_END.size)
    if len(second) < _META_END.size or _META_START.unpack_from(second)[0] != _LMDB_MAGIC:
        raise foreign
    if version != _LMDB_VERSION:
        return None  # lmdb itself says what is wrong with it
    last_page, _ = max((_META_END.unpack_from(meta) for meta in (head, second)), key=lambda pair: pair[1])
    whole = (last_page + 1) * psize
    if size >= whole:
        return None
    os.truncate(data, whole)
    return size


@dataclass(frozen=True)
class FileSpec:
    """What an environment is opened with. `record` is the identity record (`canonical`) that the store must have."""

    path: Path
    page_bytes: int
    map_bytes: int
    durability: Durability
    max_readers: int
    record: str


def open_tables(spec: FileSpec) -> Tables:
    """Open the tables of a store, or create them in an empty directory.

    Raises `StoreCorrupt`, `StoreMismatch` or `StoreError`; then nothing stays open and nothing was changed.
    """
    env = _open_env(spec)
    path = spec.path
    try:
        env.reader_check()
        psize = env.stat()["psize"]
        if env.stat()["entries"] == 0:
            tables = _create(env, psize, spec.record)
        else:
            tables = Tables(env, psize, *(env.open_db(name, create=False) for name in TABLE_NAMES))
            _compare(path, tables, spec.record)
    except (lmdb.Error, OSError) as error:
        env.close()
        if isinstance(error, (lmdb.DiskError, lmdb.MapFullError)):
            raise StoreError(f"no room for a store at {path}: {error}; free space or choose another path") from error
        raise StoreCorrupt(f"{path} is not a page store: {error}; choose another disk path") from error
    except StoreError:
        env.close()
        raise
    return tables


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
        _reserve_readers_file(path)
        size = (path / DATA_FILE).stat().st_size if (path / DATA_FILE).exists() else 0
        return lmdb.open(
            str(path),
            # A file made with a larger budget needs room beyond its end before anything in it can be evicted.
            map_size=spec.map_bytes if size <= spec.map_bytes else size + size // 64 + _SHRINKING_BYTES,
            max_dbs=len(TABLE_NAMES),
            max_readers=spec.max_readers + 2,
            metasync=spec.durability == "commit",
            # Values are long runs of file pages and are read whole: without read-ahead cold reads take 6 times as long.
            readahead=True,
        )
    except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as error:
        raise StoreCorrupt(f"{path} is not a page store of this version: {error}; choose another disk path") from error
    except (lmdb.Error, OSError) as error:
        raise StoreError(f"cannot open the store {path}: {error}; choose another disk path") from error


def _reserve_readers_file(path: Path) -> None:
    # lmdb makes its reader table a sparse file and maps it writable: on a full disk the first write to a hole would
    # kill the process. Reserved ahead, a full disk is an error here.
    descriptor = os.open(path / READERS_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        missing = max(0, _READERS_FILE_BYTES - size)
        if os.pwrite(descriptor, bytes(missing), size) < missing:
            raise OSError(errno.ENOSPC, "no space left for the reader table")
    finally:
        os.close(descriptor)


def _create(env: Any, psize: int, record: str) -> Tables:
    with env.begin(write=True) as txn:
        tables = Tables(env, psize, *(env.open_db(name, txn=txn) for name in TABLE_NAMES))
        txn.put(_STORE_KEY, record.encode(), db=tables.meta)
        txn.put(COUNTERS_KEY, PAIR.pack(1, 0), db=tables.meta)
    return tables


def _compare(path: Path, tables: Tables, record: str) -> None:
    with tables.env.begin() as txn:
        raw, counters = txn.get(_STORE_KEY, db=tables.meta), txn.get(COUNTERS_KEY, db=tables.meta)
    if raw is None or counters is None or len(counters) != PAIR.size:
        raise StoreCorrupt(f"the store {path} has lost its identity record; choose another disk path")
    if raw == record.encode():
        return
    try:
        theirs, ours = _flat(json.loads(raw)), _flat(json.loads(record))
    except (ValueError, TypeError, AttributeError, KeyError):
        raise StoreCorrupt(f"the store {path} has an unreadable identity record; choose another disk path") from None
    names = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    differences = "; ".join(f"{n}: stored {theirs.get(n)!r}, now {ours.get(n)!r}" for n in names)
    raise StoreMismatch(
        f"the store {path} was made for something else ({differences}); use another disk path, or the same model and "
        "settings"
    )


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """One level of names; the store's own fields cannot be hidden by the identity's."""
    own = {"store.format": record["format"], "store.page_bytes": record["page_bytes"]}
    return {**record["identity"], **own}
