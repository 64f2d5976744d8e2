"""An open store directory: its lock, its lmdb environment, and the safe moments to read, close or replace it.

May import lmdb, the standard library, base, check, counters, directory, gate, lmdb_file, lmdb_meta, lookup, lru and
reader_table.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

from hicache.storage import check
from hicache.storage.base import StoreError, StoreTreesDamaged
from hicache.storage.check import Verifier, Violation
from hicache.storage.counters import Counters, Counts
from hicache.storage.directory import COMPACT_FILE, DATA_FILE, PRIVATE_FILE_MODE, RESCUE_FOLDER, WriterLock
from hicache.storage.gate import Gate
from hicache.storage.lmdb_file import FileSpec, mend_length, open_tables, require_trees, sync_directory
from hicache.storage.lmdb_meta import read_meta, renumber
from hicache.storage.lookup import Sizes, sizes_of
from hicache.storage.lru import Tables
from hicache.storage.packages import lmdb, medium_errors, opening_errors
from hicache.storage.reader_table import ReaderTable

log = logging.getLogger("hicache.storage")
T = TypeVar("T")


class StoreEnv:
    """Owns the writer lock and the tables of one directory, from construction to `close`.

    `read` and `sizes` from any thread; everything else from the writer. `tables` changes only while no reader is
    inside. What is open is known by its descriptors: files that took the place of the locked ones are left alone.
    Raises what `lmdb_file` raises; a failed opening leaves nothing locked, open or changed.
    """

    def __init__(self, spec: FileSpec, verifier: Verifier, counters: Counters) -> None:
        self._spec, self._verifier, self._counters = spec, verifier, counters
        self._data = spec.path / DATA_FILE
        self._gate = Gate(spec.max_readers)
        self._tables: Tables | None = None
        self._least_file_bytes = 0
        self._sizes = Sizes()
        with contextlib.ExitStack() as held:
            self._lock = held.enter_context(contextlib.closing(WriterLock(spec.path)))
            held.enter_context(contextlib.closing(ReaderTable(spec.path)))
            self._open()
            self._held = held.pop_all()

    @property
    def closed(self) -> bool:
        return self._gate.closed

    @property
    def tables(self) -> Tables:
        """The open tables. OSError when the last attempt to open them again failed."""
        if self._tables is None:
            raise OSError(errno.EIO, f"the store {self._spec.path} could not be opened again")
        return self._tables

    def file_bytes(self) -> int:
        return self.tables.file_bytes()

    def sizes(self) -> Sizes:
        """Those after the last commit; never waits for the medium."""
        return self._sizes

    def require_whole(self) -> None:
        """OSError when the file is shorter than it was: touching the map beyond its end would kill the process."""
        least = self._least_file_bytes  # before the size: a commit may lengthen both meanwhile
        size = self.tables.values.file_bytes()
        if size < least:
            raise OSError(errno.EIO, f"{self._data} was cut from {least} to {size} bytes from outside")

    def require_changeable(self) -> None:
        """OSError when the file was cut short, or is not the one in the directory any more."""
        self._lock.require_same()
        self.require_whole()

    def committed(self, entries: int, live_bytes: int, raw_bytes: int) -> None:
        """Note what was committed, and how long the file has to be from now on. lmdb leaves out free pages at its end:
        they become a hole."""
        whole = self.tables.index_bytes()
        self.tables.values.lengthen(whole)
        self._least_file_bytes = whole
        self._sizes = Sizes(entries, live_bytes, raw_bytes, self.file_bytes())

    def read(self, body: Callable[[Any, Tables], T], otherwise: T) -> T:
        """`body` in a read transaction of its own, buffers valid until it returns.

        When the file cannot be read, that is counted and logged and the result is `otherwise`.
        """
        with self._gate.shared():
            try:
                self.require_whole()
                tables = self.tables
                tables.values.warm_head()
                with tables.env.begin(buffers=True) as txn:
                    return body(txn, tables)
            except medium_errors as error:
                log.warning("cannot read the store %s: %s", self._spec.path, error)
                self._counters.add(Counts(read_errors=1))
        return otherwise

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Wait for the readers inside and keep others out for the duration."""
        return self._gate.exclusive()

    def poisoned(self) -> bool:
        """Whether lmdb refuses even to read, as it does after a failed write of its meta page."""
        try:
            self.require_whole()
            with self.tables.env.begin():
                return False
        except lmdb.PanicError:
            return True
        except medium_errors:
            return False

    def clear_dead_readers(self) -> int:
        """Free the slots of processes that died while reading: they keep freed pages from being used again."""
        return int(self.tables.env.reader_check())

    def faults(self, verifier: Verifier, seen: Callable[[int], None] = lambda _: None) -> list[Violation]:
        """All that does not hold; see `check.faults`. Raises `StoreTreesDamaged` for tables that lmdb must not walk."""
        found: list[Violation] = []
        with self._gate.shared():
            try:
                self.require_whole()
                with self.tables.env.begin() as txn:
                    require_trees(self._spec.path, read_meta(self._data, txn.id()), whole=True)
                found.extend(check.faults(self.tables, verifier, seen))
                if self.file_bytes() > self._spec.map_bytes:
                    found.append(
                        Violation(f"the file has {self.file_bytes()} bytes, the budget allows {self._spec.map_bytes}")
                    )
            except medium_errors as error:
                found.append(Violation(f"the file cannot be read: {error}"))
        return found

    def compact(self) -> int:
        """Copy what is live in the tables into a new file and let it take the old one's place; returns the bytes saved.

        A crash leaves one or the other whole. Readers of this process go on during the copy and wait for the exchange;
        those of others keep the old file until they see the new one.
        """
        copy = self._spec.path / COMPACT_FILE
        try:
            self.require_changeable()
            before_bytes = self.tables.values.file_bytes()
            with open(copy, "wb", opener=_private) as file:
                self.tables.env.copyfd(file.fileno(), compact=True)
                os.fsync(file.fileno())
            renumber(copy, self.tables.env.info()["last_txnid"])
            copy_bytes = copy.stat().st_size
            self._lock.require_same()
        except opening_errors as error:
            copy.unlink(missing_ok=True)
            self._counters.add(Counts(write_errors=1))
            log.warning("cannot compact the store %s: %s; it stays as it is", self._spec.path, error)
            return 0
        if copy_bytes >= before_bytes:
            copy.unlink()
            return 0
        with self._gate.exclusive():
            self._shut()
            copy.replace(self._data)
            sync_directory(self._spec.path)
            self._adopt(open_tables(self._spec))
        return before_bytes - copy_bytes

    def reopen(self) -> None:
        """Open the file anew: after a failed write lmdb may refuse even to read. Raises what opening raises; then every
        read is a miss until it succeeds. OSError, and nothing is changed, when the locked directory is gone."""
        self._lock.require_same()
        with self._gate.exclusive():
            self._shut()
            self._open()

    def close(self) -> None:
        """Wait for readers, then release everything."""
        with self._gate.exclusive(close=True):
            self._shut()
            self._held.close()

    def _shut(self) -> None:
        if self._tables is not None:
            self._tables.close()
            self._tables = None

    def _adopt(self, tables: Tables) -> None:
        self._tables = tables
        try:
            self._lock.require_same()  # it may have been replaced since that was seen last
            with tables.env.begin() as txn:
                self._sizes = sizes_of(txn, tables)
            self.committed(self._sizes.entries, self._sizes.live_bytes, self._sizes.raw_bytes)
        except medium_errors as error:
            self._shut()
            raise StoreError(f"cannot open the store {self._spec.path}: {error}; mend the medium") from error

    def _open(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._spec.path / COMPACT_FILE).unlink()
        shutil.rmtree(self._spec.path / RESCUE_FOLDER, ignore_errors=True)
        short_bytes = mend_length(self._spec.path)
        try:
            require_trees(self._spec.path, read_meta(self._data))
            self._adopt(open_tables(self._spec))
            if short_bytes is not None and self._lost_pages():
                raise StoreTreesDamaged(self._data, "the file is cut short and has lost pages")
        except BaseException:
            self._shut()
            if short_bytes is not None:  # the next opening must see the file as it was
                os.truncate(self._data, short_bytes)
            raise

    def _lost_pages(self) -> bool:
        try:
            return any(True for _ in check.faults(self.tables, self._verifier))
        except medium_errors:
            return True


def _private(file: str, flags: int) -> int:
    return os.open(file, flags, PRIVATE_FILE_MODE)
