"""Reading a store that another process may be writing.

lmdb keeps the pages of an open read transaction from being used again, by a slot in the table of readers, which all
processes map (see reader_table).
A writer that compacts replaces the data file: readers keep the old one until they see that its inode changed. Owns the
environment of such a reader. May import lmdb, the standard library and its siblings below the store.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hicache.storage.base import PageBuffer, StoreCorrupt, StoreError, StoreLocked, StoreStats, StoreTreesDamaged
from hicache.storage.check import Verifier
from hicache.storage.cipher import PageCipher
from hicache.storage.codec import NAMESPACE_BYTES, PageCodecs
from hicache.storage.counters import Counters, Counts
from hicache.storage.directory import DATA_FILE, share_lock, writer_of
from hicache.storage.gate import Gate
from hicache.storage.lmdb_file import MAX_TABLES, find_tables, read_identity, require_trees
from hicache.storage.lmdb_meta import Meta, read_meta
from hicache.storage.lmdb_record import (
    KEY_ID_FIELD,
    SETTINGS_KEY,
    IdentityRecord,
    Settings,
    namespace_digest,
    sealed_identity,
)
from hicache.storage.lookup import Lookup, SealedValues, Sizes, sizes_of
from hicache.storage.lru import AccessLog, Tables
from hicache.storage.packages import lmdb, medium_errors, opening_errors, require_packages
from hicache.storage.reader_table import READER_SLOTS, ReaderTable

log = logging.getLogger("hicache.storage")
T = TypeVar("T")

_ATTEMPTS, _PAUSE_S = 5, 0.005


class ReaderEnv:
    """The tables of a directory, opened for reading; any thread. Follows the writer when it replaces or grows the file.

    `read` is a miss, counted and logged, whenever the file cannot be read; it never raises for what is stored. Raises
    `StoreError` and its kinds when it cannot be opened, or is read after `close`.
    """

    def __init__(self, path: Path, max_readers: int, counters: Counters) -> None:
        self._path, self._data, self._counters = path, path / DATA_FILE, counters
        self._gate = Gate(max_readers)
        self._tables: Tables | None = None
        self._inode: tuple[int, int] | None = None
        self._least_file_bytes = 0
        with contextlib.ExitStack() as held:
            self._registers = not _is_read_only(path)
            if self._registers:
                held.enter_context(contextlib.closing(ReaderTable(path)))
            elif (descriptor := _keep_writers_out(path)) is not None:
                held.callback(os.close, descriptor)
            held.callback(self._shut)  # before what protects its reads
            self._open()
            self.identity, self.settings = self._records()
            self._held = held.pop_all()

    @property
    def path(self) -> Path:
        return self._path

    def sizes(self) -> Sizes:
        """Of what is committed now; all 0 where it cannot be read."""
        return self.read(sizes_of, Sizes())

    def read(self, body: Callable[[Any, Tables], T], otherwise: T) -> T:
        """`body` in a read transaction of its own, buffers valid until it returns."""
        reason: Exception | None = None
        for _ in range(_ATTEMPTS):
            try:
                self._follow(force=isinstance(reason, lmdb.MapResizedError))
                with self._gate.shared():
                    tables = self._require_whole()
                    tables.values.warm_head()
                    with tables.env.begin(buffers=True) as txn:
                        return body(txn, tables)
            except (lmdb.MapResizedError, lmdb.ReadersFullError, _Replaced) as error:
                reason = error
            except medium_errors as error:
                reason = error
                break
        log.warning("cannot read the store %s: %s", self._path, reason)
        self._counters.add(Counts(read_errors=1))
        return otherwise

    def close(self) -> None:
        with self._gate.exclusive(close=True):
            self._held.close()

    def _require_whole(self) -> Tables:
        """The tables, when the file is the one that is open and none of it was cut off."""
        least = self._least_file_bytes  # before the size: another thread may have seen the file grow meanwhile
        stat = self._data.stat()
        if self._tables is None or (stat.st_dev, stat.st_ino) != self._inode:
            raise _Replaced(errno.ESTALE, f"{self._data} is being replaced")
        if stat.st_size < least:
            raise OSError(errno.EIO, f"{self._data} was cut from {least} to {stat.st_size} bytes")
        self._least_file_bytes = stat.st_size
        return self._tables

    def _follow(self, *, force: bool) -> None:
        """Open the file anew when it is another one than before; `force`: in any case."""
        stat = self._data.stat()
        if (stat.st_dev, stat.st_ino) == self._inode and self._tables is not None and not force:
            return
        with self._gate.exclusive():
            if self._gate.closed:
                return
            self._shut()
            try:
                self._open()
                identity, self.settings = self._records()
                identity.require(self._path, self.identity)
            except StoreError as error:
                self._shut()
                raise OSError(errno.EIO, str(error)) from error

    def _open(self) -> None:
        """Open what is there now. The writer may replace the file meanwhile, or commit while its head is read."""
        for attempt in range(_ATTEMPTS):
            try:
                stat = self._data.stat()
                meta = read_meta(self._data)
                if meta is None:
                    raise StoreCorrupt(f"{self._data} is empty; open the store for writing once")
                if stat.st_size < meta.file_bytes:  # of free pages alone, perhaps: who opens it for writing finds out
                    raise StoreTreesDamaged(self._data, "the file is cut short")
                # What takes the place of a file was written by lmdb just now.
                tables = _open_tables(self._path, meta, is_first=self._inode is None, registers=self._registers)
            except FileNotFoundError as error:
                raise StoreError(f"there is no store at {self._path}; check the path") from error
            except StoreCorrupt:
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_PAUSE_S)
                continue
            self._tables, self._inode, self._least_file_bytes = tables, (stat.st_dev, stat.st_ino), stat.st_size
            now = self._data.stat()
            if (now.st_dev, now.st_ino) == self._inode:
                return
            self._shut()
        raise StoreError(f"the store {self._path} is being replaced all the time; try again later")

    def _records(self) -> tuple[IdentityRecord, Settings]:
        assert self._tables is not None
        tables = self._tables
        try:
            with tables.env.begin() as txn:
                identity = read_identity(self._path, txn, tables.meta)
                recorded, map_bytes = txn.get(SETTINGS_KEY, db=tables.meta), tables.env.info()["map_size"]
                settings = Settings.unpack(recorded, identity.page_sizes, map_bytes)
        except medium_errors as error:
            raise StoreCorrupt(f"cannot read the store {self._path}: {error}; choose another disk path") from error
        return identity, settings

    def _shut(self) -> None:
        if self._tables is not None:
            self._tables.close()
            self._tables = None


class LmdbPageReader:
    """A store as other processes may read it while one writes: `contains`, `get_into`, `stats`; any thread.

    Sees what was committed, and takes no lock, except on a read-only mount: readers cannot register there, so a writer
    is kept out for as long as one is open. What it reads does not count as used. `identity` None: that of the store.
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
            named = identity or {name: value for name, value in stored.identity.items() if name != KEY_ID_FIELD}
            stored.require(self._env.path, IdentityRecord(sealed_identity(named, cipher), stored.page_sizes))
            namespace, settings = namespace_digest(stored.identity)[:NAMESPACE_BYTES], self._env.settings
            self._codecs = PageCodecs(settings.formats, namespace, settings.level, cipher)
        except BaseException:
            self._env.close()
            raise
        self._lookup = Lookup(self._env, self._codecs, _Unkept(), self._counters, str(path))

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """The sizes that pages may have, in bytes, ascending."""
        return self._env.identity.page_sizes

    @property
    def sealed(self) -> SealedValues:
        return SealedValues(self._env, Verifier(self._codecs.verify_stored, self._codecs.max_value_bytes))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._lookup.contains(keys)

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer]) -> list[bool]:
        return self._lookup.get_into(keys, buffers)

    def stats(self) -> StoreStats:
        return self._lookup.stats(self._env.settings.budget_bytes, read_only=True)

    def close(self) -> None:
        self._env.close()


class _Replaced(OSError):
    """The data file is not the one that is open."""


class _Unkept(AccessLog):
    """The notes of a reader: it has no way to tell the writer, and a page that was bad may be rewritten."""

    def used(self, keys: Iterable[bytes]) -> None:
        del keys

    def doom(self, keys: Iterable[bytes]) -> None:
        del keys


def _is_read_only(path: Path) -> bool:
    """Whether the store is on a read-only mount."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError as error:
        raise StoreError(f"there is no store at {path}: {error.strerror}; check the path") from error


def _keep_writers_out(path: Path) -> int | None:
    """On a read-only mount no table of readers can be made, and a writer would use pages again that are being read."""
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
                require_trees(path, read_meta(path / DATA_FILE, txn.id()))
        return find_tables(env, path, writable=False)
    except opening_errors as error:
        if env is not None:
            env.close()
        if isinstance(error, StoreError):
            raise
        if isinstance(error, (lmdb.NotFoundError, lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError)):
            raise StoreCorrupt(f"{path} is not a page store: {error}; choose another disk path") from error
        raise StoreError(
            f"cannot open the store {path} for reading: {error}; it takes no other store object for it in this process"
        ) from error
