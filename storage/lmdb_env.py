"""An open store directory: its lock, its lmdb environment, and the safe moments to read, close or replace it.

May import lmdb, the standard library, base, check, codec, counters, gate, lmdb_file and lru.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

from hicache.storage import check
from hicache.storage.base import StoreCorrupt, StoreError
from hicache.storage.codec import PageCodec
from hicache.storage.counters import Counters, Counts
from hicache.storage.gate import Gate
from hicache.storage.lmdb_file import (
    COMPACT_FILE,
    DATA_FILE,
    FileSpec,
    lock_directory,
    mend_length,
    open_tables,
    sync_directory,
)
from hicache.storage.lru import Tables
from hicache.storage.packages import lmdb

log = logging.getLogger("hicache.storage")
T = TypeVar("T")


class StoreEnv:
    """Owns the writer lock and the tables of one directory, from construction to `close`.

    `read` from any thread; `compact` and `close` from the writer. `tables` changes only while no reader is inside.
    Raises what `lmdb_file` raises; a failed opening leaves nothing locked, open or changed.
    """

    tables: Tables

    def __init__(self, spec: FileSpec, codec: PageCodec, counters: Counters) -> None:
        self._spec, self._codec, self._counters = spec, codec, counters
        self._data = spec.path / DATA_FILE
        self._gate = Gate(spec.max_readers)
        self._lock_descriptor = lock_directory(spec.path)
        try:
            self._open()
        except BaseException:
            os.close(self._lock_descriptor)
            raise

    @property
    def closed(self) -> bool:
        return self._gate.closed

    def file_bytes(self) -> int:
        return self._data.stat().st_size

    def read(self, body: Callable[[Any], T], otherwise: T) -> T:
        """`body` in a read transaction of its own, buffers valid until it returns.

        When lmdb cannot read, that is counted and logged and the result is `otherwise`.
        """
        with self._gate.shared():
            try:
                with self.tables.env.begin(buffers=True) as txn:
                    return body(txn)
            except lmdb.Error as error:
                log.warning("cannot read the store %s: %s", self._spec.path, error)
                self._counters.add(Counts(read_errors=1))
        return otherwise

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Wait for the readers inside and keep others out for the duration."""
        return self._gate.exclusive()

    def violations(self) -> list[str]:
        with self._gate.shared():
            found = check.violations(self.tables, self._codec, self._spec.page_bytes)
        if self.file_bytes() > self._spec.map_bytes:
            found.append(f"the file has {self.file_bytes()} bytes, the budget allows {self._spec.map_bytes}")
        return found

    def compact(self) -> int:
        """Copy what is live into a new file and let it take the old one's place; returns the bytes saved.

        A crash leaves one or the other whole. Readers go on during the copy and wait for the exchange.
        """
        before_bytes, copy = self.file_bytes(), self._spec.path / COMPACT_FILE
        try:
            with copy.open("wb") as file:
                self.tables.env.copyfd(file.fileno(), compact=True)
                os.fsync(file.fileno())
        except (lmdb.Error, OSError) as error:
            copy.unlink(missing_ok=True)
            self._counters.add(Counts(write_errors=1))
            log.warning("cannot compact the store %s: %s; it stays as it is", self._spec.path, error)
            return 0
        if copy.stat().st_size >= before_bytes:
            copy.unlink()
            return 0
        with self._gate.exclusive():
            self.tables.env.close()
            copy.replace(self._data)
            sync_directory(self._spec.path)
            self.tables = open_tables(self._spec)
        return before_bytes - self.file_bytes()

    def close(self) -> None:
        """Wait for readers, then release everything."""
        with self._gate.exclusive(close=True):
            self.tables.env.close()
        os.close(self._lock_descriptor)

    def _open(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._spec.path / COMPACT_FILE).unlink()
        short_bytes = mend_length(self._spec.path)
        try:
            self.tables = open_tables(self._spec)
            if short_bytes is not None and check.violations(self.tables, self._codec, self._spec.page_bytes):
                self.tables.env.close()
                raise StoreCorrupt(f"the store {self._spec.path} is cut short and has lost pages; remove the directory")
        except StoreError:
            if short_bytes is not None:  # the next opening must see the file as it was
                os.truncate(self._data, short_bytes)
            raise
