"""Moves pages from a store to an archive, and from an archive to a store. An archive gets its name when it is
complete."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from hicache.errors import ConfigError
from hicache.storage import LmdbPageStore, PageCipher, StoreError, open_existing, put_values
from hicache.storage.directory import STORE_FILE, sync_directory, synced
from hicache.storage.records import identity_with_key
from hicache.storage.store_files import read_record
from hicache.storage.store_folder import name_of
from hicache.store_command.archive import ArchiveReader

STREAM = "-"
_MAX_BATCH_PAGES, _MAX_BATCH_BYTES = 256, 64 << 20


@contextlib.contextmanager
def destination(name: str, *, force: bool) -> Iterator[io.RawIOBase]:
    """Where an archive is written: stdout for `-`, else a file that gets its name when the block ends without error."""
    if name == STREAM:
        if sys.stdout is None or sys.stdout.isatty():
            raise ConfigError("an archive is not for a terminal; redirect the output or give a file")
        with open(sys.stdout.fileno(), "wb", buffering=0, closefd=False) as stream:
            yield stream
        return
    path = Path(name)
    _require_absent(path, force=force)
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise ConfigError(f"cannot write the archive {name}: {error.strerror}; choose another file") from error
    try:
        with open(descriptor, "wb", buffering=0) as file:
            yield file
            _publish(file, path, Path(temporary), force=force)
    finally:
        Path(temporary).unlink(missing_ok=True)


@contextlib.contextmanager
def source(name: str) -> Iterator[tuple[BinaryIO, int | None]]:
    """Where an archive is read, stdin for `-`, and its size if that is known."""
    if name == STREAM:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError("an archive does not come from a terminal; redirect the input or give a file")
        yield sys.stdin.buffer, None
        return
    try:
        file = Path(name).open("rb")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"cannot read the archive {name}: {error.strerror}; check the path") from error
    with file:
        yield file, os.fstat(file.fileno()).st_size or None


@dataclass(frozen=True)
class ImportLimits:
    """The limits of a new store, whatever an archive asks for. `budget_bytes`: its budget in any case, if given."""

    budget_bytes: int | None
    max_budget_bytes: int
    max_page_bytes: int

    def budget_for(self, archive: ArchiveReader) -> int:
        """The budget of the new store for an archive. ConfigError if the archive asks for too much."""
        page_bytes, asked_bytes = archive.record.page_sizes[-1], archive.record.budget_bytes
        if page_bytes > self.max_page_bytes:
            raise ConfigError(f"the archive has pages of {page_bytes} bytes; raise --max-page if they may have as many")
        if self.budget_bytes is not None:
            return self.budget_bytes
        if asked_bytes > self.max_budget_bytes:
            raise ConfigError(
                f"the archive asks for a budget of {asked_bytes} bytes; give --budget, or raise --max-budget"
            )
        return asked_bytes


def open_target(
    path: Path, archive: ArchiveReader, cipher: PageCipher | None, limits: ImportLimits
) -> tuple[LmdbPageStore, bool]:
    """The store for the pages of an archive, and whether it is new: at `path`, or that of its identity in there.
    StoreMismatch if `path` is a store of another identity."""
    if not (path / STORE_FILE).exists():
        path = path / name_of(archive.record)
    if (path / STORE_FILE).exists():
        if limits.budget_bytes is not None:
            raise ConfigError(f"--budget is for a new store, and {path} holds one; leave it out")
        read_record(path).require(path, archive.record)
        return open_existing(path, cipher=cipher), False
    wanted = replace(archive.record, budget_bytes=limits.budget_for(archive))
    archive.record.require(path, replace(wanted, identity=identity_with_key(wanted.identity, cipher)))
    return LmdbPageStore(path, cipher=cipher, **vars(wanted)), True


@dataclass
class Loader:
    """Stores pages in batches. `kept`: pages that are present now; `refused`: why others are not.

    StoreError when the store accepts no more; what it accepted stays.
    """

    store: LmdbPageStore
    kept: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    _batch: dict[bytes, bytes] = field(default_factory=dict)
    _batch_bytes: int = 0

    def add(self, key: bytes, value: bytes) -> None:
        full = self._batch_bytes + len(value) > _MAX_BATCH_BYTES
        # A key that comes again was used meanwhile: its later place in the use order counts.
        if full or key in self._batch or len(self._batch) == _MAX_BATCH_PAGES:
            self.flush()
        self._batch[key] = value
        self._batch_bytes += len(value)

    def flush(self) -> None:
        batch = list(self._batch.items())
        self._batch, self._batch_bytes = {}, 0
        verify = self.store.verify_value
        short = 0
        for (key, value), kept in zip(batch, put_values(self.store, batch), strict=True):
            reason = "" if kept else verify(key, value)
            self.kept += kept
            self.refused.update([reason] if reason else [])
            short += not kept and not reason
        if short:
            raise StoreError(f"the store refused {short} pages; free disk space or raise its budget")


def _require_absent(path: Path, *, force: bool) -> None:
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no regular file; choose another one, or - for the standard output")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; choose another file or give --force")


def _publish(file: io.RawIOBase, path: Path, temporary: Path, *, force: bool) -> None:
    """Give the file its name, after its content is on disk."""
    try:
        synced(os.fsync, file.fileno(), path.parent)
        _require_absent(path, force=force)
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise StoreError(f"cannot write the archive {path}: {error.strerror}; choose another file") from error
