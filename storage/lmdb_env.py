"""A store directory that is open for writing: its lock, its tables, and when they may be read, closed or replaced."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

from hicache.storage import check
from hicache.storage.base import StoreError, StoreIndexDamaged
from hicache.storage.check import Verifier, Violation
from hicache.storage.counters import Counters, Counts
from hicache.storage.directory import (
    COMPACT_FILE,
    DATA_FILE,
    PRIVATE_FILE_MODE,
    RESCUE_FOLDER,
    WriterLock,
    sync_directory,
)
from hicache.storage.lmdb_file import FileSpec, open_tables, require_valid_index, restore_length
from hicache.storage.lmdb_pages import read_meta, renumber
from hicache.storage.optional_packages import io_errors, lmdb, opening_errors
from hicache.storage.read_write_lock import ReadWriteLock
from hicache.storage.reader_table import ReaderTable
from hicache.storage.tables import Sizes, Tables

log = logging.getLogger("hicache.storage")
T = TypeVar("T")


class StoreEnv:
    """Owns the writer lock and the tables of one directory, from construction to `close`.

    `read` and `sizes` from any thread, everything else from the writer. `tables` changes only while no reader is
    inside. Open files are known by their descriptors: files that replaced the locked ones are left alone. Raises what
    lmdb_file.py raises; a failed opening leaves nothing locked, open or changed.
    """

    def __init__(self, spec: FileSpec, verifier: Verifier, counters: Counters) -> None:
        self._spec, self._verifier, self._counters = spec, verifier, counters
        self._data = spec.path / DATA_FILE
        self._map_lock = ReadWriteLock(spec.max_readers)
        self._tables: Tables | None = None
        self._min_file_bytes = 0
        self._sizes = Sizes()
        with contextlib.ExitStack() as held:
            self._writer_lock = held.enter_context(contextlib.closing(WriterLock(spec.path)))
            held.enter_context(contextlib.closing(ReaderTable(spec.path)))
            self._open()
            self._held = held.pop_all()

    @property
    def closed(self) -> bool:
        return self._map_lock.closed

    @property
    def tables(self) -> Tables:
        """The open tables. OSError when the last attempt to reopen them failed."""
        if self._tables is None:
            raise OSError(errno.EIO, f"the store {self._spec.path} could not be opened again")
        return self._tables

    def file_bytes(self) -> int:
        return self.tables.file_bytes()

    def sizes(self) -> Sizes:
        """Those after the last commit; does no I/O."""
        return self._sizes

    def require_changeable(self) -> None:
        """OSError when the file was cut, or is not the one in the directory any more."""
        self._writer_lock.require_same()
        self._require_whole()

    def note_commit(self, entries: int, live_bytes: int, raw_bytes: int) -> None:
        """Update the sizes after a commit, and the length that the data file must have from now on. LMDB does not write
        free pages at its end: they become a hole."""
        data_bytes = self.tables.data_bytes()
        self.tables.values.extend(data_bytes)
        self._min_file_bytes = data_bytes
        self._sizes = Sizes(entries, live_bytes, raw_bytes, self.file_bytes())

    def read(self, body: Callable[[Any, Tables], T], otherwise: T) -> T:
        """`body` in a read transaction of its own, whose buffers are valid until it returns.

        If the file cannot be read, that is counted and logged, and the result is `otherwise`.
        """
        with self._map_lock.shared():
            try:
                self._require_whole()
                tables = self.tables
                tables.values.preload_meta()
                with tables.env.begin(buffers=True) as txn:
                    return body(txn, tables)
            except io_errors as error:
                log.warning("cannot read the store %s: %s", self._spec.path, error)
                self._counters.add(Counts(read_errors=1))
        return otherwise

    def without_readers(self) -> contextlib.AbstractContextManager[None]:
        """Wait for the readers inside and keep others out for the duration."""
        return self._map_lock.exclusive()

    def is_panicked(self) -> bool:
        """Whether LMDB refuses even to read, as it does after it failed to write its meta page."""
        try:
            self._require_whole()
            with self.tables.env.begin():
                return False
        except lmdb.PanicError:
            return True
        except io_errors:
            return False

    def clear_dead_readers(self) -> int:
        """Remove dead processes from the table of readers, where they keep freed pages from being reused."""
        return int(self.tables.env.reader_check())

    def violations(self, verifier: Verifier, progress: Callable[[int], None] = lambda _: None) -> list[Violation]:
        """All violations, see check.py. Raises `StoreIndexDamaged` for an index that LMDB must not follow."""
        found: list[Violation] = []
        with self._map_lock.shared():
            try:
                self._require_whole()
                with self.tables.env.begin() as txn:
                    require_valid_index(self._spec.path, read_meta(self._data, txn.id()), whole=True)
                found.extend(check.violations(self.tables, verifier, progress))
                if self.file_bytes() > self._spec.max_bytes:
                    found.append(
                        Violation(f"the file has {self.file_bytes()} bytes, the budget allows {self._spec.max_bytes}")
                    )
            except io_errors as error:
                found.append(Violation(f"the file cannot be read: {error}"))
        return found

    def compact(self) -> int:
        """Copy what the tables use to a new data file and replace the old one by it; returns the bytes saved.

        A crash leaves one or the other complete. Readers of this process go on during the copy and wait for the
        replacement; those of other processes keep the old file until they see the new one.
        """
        copy = self._spec.path / COMPACT_FILE
        try:
            self.require_changeable()
            before_bytes = self.tables.values.file_bytes()
            with open(copy, "wb", opener=_open_private) as file:
                self.tables.env.copyfd(file.fileno(), compact=True)
                os.fsync(file.fileno())
            renumber(copy, self.tables.env.info()["last_txnid"])
            copy_bytes = copy.stat().st_size
            self._writer_lock.require_same()
        except opening_errors as error:
            copy.unlink(missing_ok=True)
            self._counters.add(Counts(write_errors=1))
            log.warning("cannot compact the store %s: %s; it stays as it is", self._spec.path, error)
            return 0
        if copy_bytes >= before_bytes:
            copy.unlink()
            return 0
        with self._map_lock.exclusive():
            self._close_tables()
            copy.replace(self._data)
            sync_directory(self._spec.path)
            self._use(open_tables(self._spec))
        return before_bytes - copy_bytes

    def reopen(self) -> None:
        """Open the files again: after a failed write LMDB may refuse even to read. Raises what opening raises; then
        every read is a miss until it succeeds. OSError, and nothing is changed, when the locked directory is gone."""
        self._writer_lock.require_same()
        with self._map_lock.exclusive():
            self._close_tables()
            self._open()

    def close(self) -> None:
        """Wait for readers, then release everything."""
        with self._map_lock.exclusive(close=True):
            self._close_tables()
            self._held.close()

    def _require_whole(self) -> None:
        """OSError when the file is shorter than it was: accessing the map beyond its end would end the process."""
        min_bytes = self._min_file_bytes  # before the size: a commit may extend both meanwhile
        size = self.tables.values.file_bytes()
        if size < min_bytes:
            raise OSError(errno.EIO, f"{self._data} was cut from {min_bytes} to {size} bytes from outside")

    def _close_tables(self) -> None:
        if self._tables is not None:
            self._tables.close()
            self._tables = None

    def _use(self, tables: Tables) -> None:
        """Make newly opened tables the current ones."""
        self._tables = tables
        try:
            self._writer_lock.require_same()  # it may have been replaced meanwhile
            with tables.env.begin() as txn:
                self._sizes = tables.sizes(txn)
            self.note_commit(self._sizes.entries, self._sizes.live_bytes, self._sizes.raw_bytes)
        except io_errors as error:
            self._close_tables()
            raise StoreError(f"cannot open the store {self._spec.path}: {error}; repair the disk") from error

    def _open(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._spec.path / COMPACT_FILE).unlink()
        shutil.rmtree(self._spec.path / RESCUE_FOLDER, ignore_errors=True)
        short_bytes = restore_length(self._spec.path)
        try:
            require_valid_index(self._spec.path, read_meta(self._data))
            self._use(open_tables(self._spec))
            if short_bytes is not None and self._has_lost_pages():
                raise StoreIndexDamaged(self._data, "the file is cut short and has lost pages")
        except BaseException:
            self._close_tables()
            if short_bytes is not None:  # the next opening must see the file as it was
                os.truncate(self._data, short_bytes)
            raise

    def _has_lost_pages(self) -> bool:
        try:
            return any(True for _ in check.violations(self.tables, self._verifier))
        except io_errors:
            return True


def _open_private(file: str, flags: int) -> int:
    return os.open(file, flags, PRIVATE_FILE_MODE)
