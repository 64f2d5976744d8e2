"""Reading a store that another process may be writing: its index in memory, or the sealed one that it left."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from hicache.storage.base import StoreError, StoreStats
from hicache.storage.cipher import PageCipher
from hicache.storage.codec import PageCodecs
from hicache.storage.index import Index, io_errors
from hicache.storage.live_index import copy_sealed, live_folder, live_target
from hicache.storage.lookup import PageReads
from hicache.storage.records import StoreRecord, identity_with_key
from hicache.storage.store_files import OpenFiles, OpenPages, open_slot_files, read_record

log = logging.getLogger("hicache.storage")

_OPENING_ERRORS: tuple[type[Exception], ...] = (StoreError, *io_errors)

_ATTEMPTS = 20


class ReaderFiles(OpenFiles):
    """The open files of a store that is read; any thread. Follows the writer when the index is elsewhere.

    Raises `StoreError` and its subclasses when it cannot be opened, or is read after `close`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, read_record(path))
        self._open()

    @contextlib.contextmanager
    def reading(self) -> Iterator[OpenPages]:
        """As in `OpenFiles`. OSError when the store cannot be followed."""
        self.owner.require_here()
        if not self.is_current():
            self._follow()
        with super().reading() as pages:
            yield pages

    def is_current(self) -> bool:
        """Whether the index that is open still says what is in the slots."""
        return live_target(self.path) == self._target

    def close(self) -> None:
        if self.owner.is_here:
            with self.replacing():
                self.closed = True
                self._held.close()

    def _follow(self) -> None:
        with self.replacing():
            if self.closed or self.is_current():
                return
            before = self._held
            try:
                self._open()
            except StoreError as error:
                raise OSError(errno.EIO, str(error)) from error
            before.close()

    def _open(self) -> None:
        """Open what is there now. While writers come and go, that may take several attempts."""
        for _ in range(_ATTEMPTS):
            target = live_target(self.path)
            try:
                with contextlib.ExitStack() as held:
                    record = read_record(self.path)
                    record.require(self.path, self.record)
                    files = open_slot_files(self.path, record, held, writable=False)
                    index = self._open_index(record, held)
                    if live_target(self.path) == target:
                        self.record, self.pages = record, OpenPages(index, files)
                        self._target, self._held = target, held.pop_all()
                        return
            except io_errors as error:
                if live_target(self.path) == target:
                    remedy = "no other store object for it may be open in this process"
                    if isinstance(error, FileNotFoundError):  # of a file of pages
                        remedy = "run `hicache store verify --repair`"
                    raise StoreError(f"cannot open the store {self.path} for reading: {error}; {remedy}") from error
            except StoreError:
                if live_target(self.path) == target:
                    raise
        raise StoreError(f"the store {self.path} is opened and closed all the time; try again later")

    def _open_index(self, record: StoreRecord, held: contextlib.ExitStack) -> Index:
        """The index of the store's writer, or a copy in memory of the sealed one. What LMDB raises passes on."""
        folder = live_folder(self.path)
        if folder is not None:
            index = Index(folder, record.budget_bytes, writable=False)
        else:
            copy = os.memfd_create("hicache-index")
            held.callback(os.close, copy)
            name = Path(f"/proc/self/fd/{copy}")
            if not copy_sealed(self.path, name):
                raise StoreError(
                    f"the store {self.path} has no sealed index: its writer is not visible here, or ended without "
                    "closing it; open it for writing once, or run `hicache store verify --repair`"
                )
            index = Index(name, record.budget_bytes, writable=False, shared=False)
        return held.enter_context(contextlib.closing(index))


class LmdbPageReader(PageReads):
    """A store as other processes may read it while one writes: `contains`, `get_into`, `stats`; any thread.

    Sees what was committed and holds up no writer. Reads do not count as uses. `identity` None: that of the store. An
    encrypted store that is opened without `cipher` serves operators: its pages cannot be read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        identity: Mapping[str, str | int] | None = None,
        cipher: PageCipher | None = None,
    ) -> None:
        self._reader = files = ReaderFiles(Path(path))
        record = files.record
        try:
            named = identity_with_key(identity or record.identity, cipher)
            record.require(files.path, dataclasses.replace(record, identity=named))
            super().__init__(files, PageCodecs(record.formats, record.namespace, record.level, cipher), cipher)
        except BaseException:
            files.close()
            raise

    def stats(self) -> StoreStats:
        """`entries` and `file_bytes` are those of what is committed now, 0 if it cannot be read."""
        entries = file_bytes = 0
        try:
            with self.reading() as pages:
                entries, file_bytes = pages.index.num_pages(), pages.file_bytes()
        except _OPENING_ERRORS as error:
            log.warning("cannot read the store %s: %s", self._files.path, error)
        now = {"entries": entries, "file_bytes": file_bytes, "budget_bytes": self._files.record.budget_bytes}
        return dataclasses.replace(self._counters.now, read_only=True, **now)

    def close(self) -> None:
        self._reader.close()

    def _note_corrupt(self, key: bytes, reason: str) -> None:
        if self._reader.is_current():
            super()._note_corrupt(key, reason)
