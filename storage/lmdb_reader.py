"""Reading a store that another process may be writing.

LMDB does not reuse the pages of an open read transaction: it is registered in the table of readers, which all processes
map (reader_table.py). A writer that compacts replaces the data file: readers keep the old one until they see that its
inode changed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hicache.storage.base import PageBuffer, StoreCorrupt, StoreError, StoreIndexDamaged, StoreLocked, StoreStats
from hicache.storage.check import Verifier
from hicache.storage.cipher import PageCipher
from hicache.storage.codec import PageCodecs
from hicache.storage.counters import Counters, Counts
from hicache.storage.directory import DATA_FILE, share_lock, writer_of
from hicache.storage.header import NAMESPACE_BYTES
from hicache.storage.lmdb_file import MAX_TABLES, find_tables, read_identity, require_valid_index
from hicache.storage.lmdb_pages import Meta, read_meta
from hicache.storage.lookup import Lookup, StoredValues
from hicache.storage.optional_packages import io_errors, lmdb, opening_errors, require_packages
from hicache.storage.read_write_lock import ReadWriteLock
from hicache.storage.reader_table import READER_SLOTS, ReaderTable
from hicache.storage.records import (
    SETTINGS_KEY,
    IdentityRecord,
    Settings,
    identity_with_key,
    identity_without_key,
    namespace_digest,
)
from hicache.storage.tables import Sizes, Tables
from hicache.storage.write_transaction import AccessLog

log = logging.getLogger("hicache.storage")
T = TypeVar("T")

_ATTEMPTS, _PAUSE_S = 5, 0.005


class ReaderEnv:
    """The tables of a directory, opened for reading; any thread. Follows the writer when it replaces or extends the
    file.

    `read` never raises because of what is stored: if the file cannot be read, that is counted and logged. Raises
    `StoreError` and its subclasses when it cannot be opened, or is read after `close`.
    """

    def __init__(self, path: Path, max_readers: int, counters: Counters) -> None:
        self._path, self._data, self._counters = path, path / DATA_FILE, counters
        self._map_lock = ReadWriteLock(max_readers)
        self._tables: Tables | None = None
        self._inode: tuple[int, int] | None = None
        self._min_file_bytes = 0
        with contextlib.ExitStack() as held:
            self._registers = not _is_read_only(path)
            if self._registers:
                held.enter_context(contextlib.closing(ReaderTable(path)))
            elif (descriptor := _exclude_writers(path)) is not None:
                held.callback(os.close, descriptor)
            held.callback(self._close_tables)  # before what protects their reads
            self._open()
            self.identity, self.settings = self._records()
            self._held = held.pop_all()

    @property
    def path(self) -> Path:
        return self._path

    def sizes(self) -> Sizes:
        """Of what is committed now; all 0 if it cannot be read."""
        return self.read(lambda txn, tables: tables.sizes(txn), Sizes())

    def read(self, body: Callable[[Any, Tables], T], otherwise: T) -> T:
        """`body` in a read transaction of its own, whose buffers are valid until it returns."""
        reason: Exception | None = None
        for _ in range(_ATTEMPTS):
            try:
                self._follow(force=isinstance(reason, lmdb.MapResizedError))
                with self._map_lock.shared():
                    tables = self._require_whole()
                    tables.values.preload_meta()
                    with tables.env.begin(buffers=True) as txn:
                        return body(txn, tables)
            except (lmdb.MapResizedError, lmdb.ReadersFullError, _Replaced) as error:
                reason = error
            except io_errors as error:
                reason = error
                break
        log.warning("cannot read the store %s: %s", self._path, reason)
        self._counters.add(Counts(read_errors=1))
        return otherwise

    def close(self) -> None:
        with self._map_lock.exclusive(close=True):
            self._held.close()

    def _require_whole(self) -> Tables:
        """The tables, if the file is the one that is open and was not cut."""
        min_bytes = self._min_file_bytes  # before the size: another thread may have seen the file grow meanwhile
        stat = self._data.stat()
        if self._tables is None or (stat.st_dev, stat.st_ino) != self._inode:
            raise _Replaced(errno.ESTALE, f"{self._data} is being replaced")
        if stat.st_size < min_bytes:
            raise OSError(errno.EIO, f"{self._data} was cut from {min_bytes} to {stat.st_size} bytes")
        self._min_file_bytes = stat.st_size
        return self._tables

    def _follow(self, *, force: bool) -> None:
        """Open the file again if it is another one than before; `force`: in any case."""
        stat = self._data.stat()
        if (stat.st_dev, stat.st_ino) == self._inode and self._tables is not None and not force:
            return
        with self._map_lock.exclusive():
            if self._map_lock.closed:
                return
            self._close_tables()
            try:
                self._open()
                identity, self.settings = self._records()
                identity.require(self._path, self.identity)
            except StoreError as error:
                self._close_tables()
                raise OSError(errno.EIO, str(error)) from error

    def _open(self) -> None:
        """Open what is there now. The writer may replace the file meanwhile, or commit while its meta pages are
        read."""
        for attempt in range(_ATTEMPTS):
            try:
                stat = self._data.stat()
                meta = read_meta(self._data)
                if meta is None:
                    raise StoreCorrupt(f"{self._data} is empty; open the store for writing once")
                if stat.st_size < meta.file_bytes:  # perhaps by free pages only: an opening for writing finds out
                    raise StoreIndexDamaged(self._data, "the file is cut short")
                # A file that replaced another was written by LMDB just now, and is not validated again.
                tables = _open_tables(self._path, meta, is_first=self._inode is None, registers=self._registers)
            except FileNotFoundError as error:
                raise StoreError(f"there is no store at {self._path}; check the path") from error
            except StoreCorrupt:
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_PAUSE_S)
                continue
            self._tables, self._inode, self._min_file_bytes = tables, (stat.st_dev, stat.st_ino), stat.st_size
            now = self._data.stat()
            if (now.st_dev, now.st_ino) == self._inode:
                return
            self._close_tables()
        raise StoreError(f"the store {self._path} is being replaced all the time; try again later")

    def _records(self) -> tuple[IdentityRecord, Settings]:
        assert self._tables is not None
        tables = self._tables
        try:
            with tables.env.begin() as txn:
                identity = read_identity(self._path, txn, tables.meta)
                recorded, map_bytes = txn.get(SETTINGS_KEY, db=tables.meta), tables.env.info()["map_size"]
                settings = Settings.unpack(recorded, identity.page_sizes, map_bytes)
        except io_errors as error:
            raise StoreCorrupt(f"cannot read the store {self._path}: {error}; choose another disk path") from error
        return identity, settings

    def _close_tables(self) -> None:
        if self._tables is not None:
            self._tables.close()
            self._tables = None


class LmdbPageReader:
    """A store as other processes may read it while one writes: `contains`, `get_into`, `stats`; any thread.

    Sees what was committed and takes no lock. Except on a read-only mount: readers cannot register there, so writers
    are excluded while a reader is open. Reads do not count as uses. `identity` None: that of the store.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        identity: Mapping[str, str | int] | None = None,
        cipher: PageCipher | None = None,
        max_readers: int = 126,
    ) -> None:
        require_packages()
        self._counters = Counters()
        self._env = ReaderEnv(Path(path), max_readers, self._counters)
        stored = self._env.identity
        try:
            named = identity or identity_without_key(stored.identity)
            stored.require(self._env.path, IdentityRecord(identity_with_key(named, cipher), stored.page_sizes))
            namespace, settings = namespace_digest(stored.identity)[:NAMESPACE_BYTES], self._env.settings
            self._codecs = PageCodecs(settings.formats, namespace, settings.level, cipher)
        except BaseException:
            self._env.close()
            raise
        self._lookup = Lookup(self._env, self._codecs, _DiscardedLog(), self._counters, str(path))

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """The sizes that pages may have, in bytes, ascending."""
        return self._env.identity.page_sizes

    @property
    def stored_values(self) -> StoredValues:
        return StoredValues(self._env, Verifier(self._codecs.verify_stored, self._codecs.max_value_bytes))

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        return self._lookup.contains(keys)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        return self._lookup.get_into(keys, buffers, deadline_s)

    def stats(self) -> StoreStats:
        return self._lookup.stats(self._env.settings.budget_bytes, read_only=True)

    def thread_read_errors(self) -> int:
        return self._counters.thread_read_errors

    def close(self) -> None:
        self._env.close()


class _Replaced(OSError):
    """The data file is not the one that is open."""


class _DiscardedLog(AccessLog):
    """The access log of a reader: it cannot tell the writer, and a bad page may be rewritten."""

    def add_used(self, keys: Iterable[bytes]) -> None:
        del keys

    def quarantine(self, keys: Iterable[bytes]) -> None:
        del keys


def _is_read_only(path: Path) -> bool:
    """Whether the store is on a read-only mount."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError as error:
        raise StoreError(f"there is no store at {path}: {error.strerror}; check the path") from error


def _exclude_writers(path: Path) -> int | None:
    """On a read-only mount no table of readers can be created, and a writer would reuse pages that are being read."""
    descriptor = share_lock(path)
    if descriptor is None and (holder := writer_of(path)) is not None:
        name = f"process {holder}" if holder else "a process that cannot be named"
        raise StoreLocked(
            f"{name} writes to the store {path}, and readers cannot register on a read-only mount; "
            "mount it writable, or close the store there"
        )
    return descriptor


def _open_tables(path: Path, meta: Meta, *, is_first: bool, registers: bool) -> Tables:
    env = None
    try:
        env = lmdb.open(
            str(path),
            readonly=True,
            create=False,
            map_size=max(meta.map_bytes, meta.file_bytes),
            max_dbs=MAX_TABLES,
            max_readers=READER_SLOTS,
            lock=registers,
        )
        env.reader_check()
        if is_first:
            with env.begin() as txn:  # holds the snapshot
                require_valid_index(path, read_meta(path / DATA_FILE, txn.id()))
        return find_tables(env, path, writable=False)
    except opening_errors as error:
        if env is not None:
            env.close()
        if isinstance(error, StoreError):
            raise
        if isinstance(error, (lmdb.NotFoundError, lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError)):
            raise StoreCorrupt(f"{path} is not a page store: {error}; choose another disk path") from error
        raise StoreError(
            f"cannot open the store {path} for reading: {error}; no other store object for it may be open in this "
            "process"
        ) from error
