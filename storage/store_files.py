"""The open files of a store that is written: its lock, its records, its slots and its index.

DIR/store.json       identity and settings (records.py)     DIR/writer.lock   held by the writer (directory.py)
DIR/pages-SIZE.dat   slots (slot_file.py)                   DIR/live, DIR/index.mdb, DIR/index.seal (live_index.py)
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hicache.storage.base import StoreCorrupt, StoreError
from hicache.storage.cipher import ENCRYPTION_BYTES
from hicache.storage.directory import (
    INDEX_FILE,
    LOCK_FILE,
    STORE_FILE,
    WriterLock,
    is_store_file,
    slots_file,
    sync_directory,
    write_atomically,
)
from hicache.storage.index import Index, io_errors
from hicache.storage.live_index import LiveFolder, break_seal, copy_sealed, seal, size_of
from hicache.storage.memory import round_up
from hicache.storage.read_write_lock import ReadWriteLock
from hicache.storage.rebuild import Progress, rebuild
from hicache.storage.records import IdentityRecord, Settings, pack_store, unpack_store
from hicache.storage.slot_block import BLOCK_BYTES
from hicache.storage.slot_file import SlotFile
from hicache.storage.slots import Slots

log = logging.getLogger("hicache.storage")

_MAX_READERS = 126
_MIN_MAP_BYTES = 1 << 30  # address space, not memory


class Sizes(NamedTuple):
    """How many pages there are, the bytes of their values, of the pages themselves, and of the files."""

    entries: int = 0
    live_bytes: int = 0
    raw_bytes: int = 0
    file_bytes: int = 0


@dataclass(frozen=True)
class OpenPages:
    """What a page is read from: the index, and the slot files by page size. Valid inside `reading`. `is_current`:
    whether the index still says what is in the slots."""

    index: Index
    files: dict[int, SlotFile]
    is_current: Callable[[], bool]

    def sizes(self) -> Sizes:
        """The disk space is that of the slots, and of the index once it is sealed."""
        totals = self.index.totals()
        file_bytes = sum(file.allocated_bytes() for file in self.files.values()) + self.index.num_bytes()
        return Sizes(self.index.num_pages(), totals.live_bytes, totals.raw_bytes, file_bytes)


class StoreFiles:
    """Owns everything that is open for one writer, from construction to `close`.

    `reading` from any thread, everything else from the writer. `rebuilt_pages`: how many pages the index had when it
    was built anew by this opening, None if it was sealed. Raises `StoreError` and its subclasses; then nothing stays
    locked or open.
    """

    def __init__(self, path: Path, identity: IdentityRecord, settings: Settings, progress: Progress) -> None:
        self._path, self._identity, self._settings, self._progress = path, identity, settings, progress
        self._lock = ReadWriteLock(_MAX_READERS)
        self._is_sealed = self._is_changed = False
        self.rebuilt_pages: int | None = None
        with contextlib.ExitStack() as held:
            self._writer_lock = held.enter_context(contextlib.closing(WriterLock(path)))
            try:
                _record(path, identity, settings)
                self._files = open_slot_files(path, identity, held, writable=True)
                sync_directory(path)
                self._open_index(size_of(path / INDEX_FILE), rebuilds=False)
            except io_errors as error:
                raise StoreError(f"cannot open the store {path}: {error}; free space or repair the disk") from error
            self._held = held.pop_all()

    @property
    def closed(self) -> bool:
        return self._lock.closed

    @property
    def pages(self) -> OpenPages:
        """For the writer, which needs no lock against itself."""
        return self._pages

    @contextlib.contextmanager
    def reading(self) -> Iterator[OpenPages]:
        """What to read from, as long as the block lasts. `StoreError` when the store is closed."""
        with self._lock.shared():
            yield self._pages

    def require_changeable(self, *, pages: bool = True) -> None:
        """To be called before every change, of `pages` or of their use order alone. OSError when the directory is not
        the locked one any more."""
        self._writer_lock.require_same()
        self._is_changed = True
        if pages and self._is_sealed:
            break_seal(self._path)
            self._is_sealed = False

    def rebuild(self) -> None:
        """Build the index anew from the slots. OSError or what LMDB raises; then every read is a miss."""
        self._writer_lock.require_same()
        with self._lock.exclusive():
            index_bytes = size_of(self._live.path / "data.mdb")
            self._close_index()
            self._open_index(index_bytes, rebuilds=True)

    def close(self, *, is_whole: bool) -> None:
        """Wait for readers, seal the index if it `is_whole`, and release everything."""
        with self._lock.exclusive(close=True):
            try:
                if is_whole and self._is_changed:
                    self._writer_lock.require_same()
                    self.slots.trim()
                    for noted in self.slots.now():
                        self._pages.index.note_slots(noted)
                    seal(self._path, self._pages.index)
            except io_errors as error:
                log.warning("the index of the store %s is not sealed, and is rebuilt next time: %s", self._path, error)
            finally:
                self._close_index()
                self._held.close()

    def _open_index(self, index_bytes: int, *, rebuilds: bool) -> None:
        """The sealed index, or a new one built from the slots."""
        live, self.slots = LiveFolder(self._path, index_bytes), Slots(self._files)
        index: Index | None = None
        try:
            is_sealed = not rebuilds and copy_sealed(self._path, live.path / "data.mdb")
            if not is_sealed:
                (live.path / "data.mdb").unlink(missing_ok=True)
                break_seal(self._path)
            index = Index(live.path, map_bytes(self._settings.budget_bytes), writable=True)
            if is_sealed:
                slots = [index.noted_slots(page_bytes) for page_bytes in self._files]
            else:
                slots = rebuild(index, self._files, self._identity.namespace, self._progress)
                self.rebuilt_pages = index.num_pages()
            for noted in slots:
                self.slots.restore(noted)
            live.publish()
        except BaseException:
            if index is not None:
                index.close()
            live.close()
            raise
        self._is_sealed, self._is_changed = is_sealed, not is_sealed
        self._live, self._pages = live, OpenPages(index, self._files, lambda: True)

    def _close_index(self) -> None:
        self._pages.index.close()
        self._live.close()


def open_slot_files(
    path: Path, identity: IdentityRecord, held: contextlib.ExitStack, *, writable: bool
) -> dict[int, SlotFile]:
    """The slot files by page size, which `held` closes. OSError for what cannot be opened."""
    files = {}
    for page_bytes in identity.page_sizes:
        file = SlotFile(slots_file(path, page_bytes), slot_bytes(page_bytes, identity.key_id), writable=writable)
        files[page_bytes] = held.enter_context(contextlib.closing(file))
    return files


def slot_bytes(page_bytes: int, key_id: str) -> int:
    """The length of a slot; `key_id` is "" where pages are not encrypted."""
    return BLOCK_BYTES + round_up(page_bytes + (ENCRYPTION_BYTES if key_id else 0))


def map_bytes(budget_bytes: int) -> int:
    """Address space for the index, which needs less than a page's share of the budget for each page."""
    return round_up(max(_MIN_MAP_BYTES, budget_bytes))


def read_records(path: Path) -> tuple[IdentityRecord, Settings]:
    """What a store says of itself. Raises `StoreError` and its subclasses."""
    try:
        raw = (path / STORE_FILE).read_bytes()
    except FileNotFoundError:
        if _left_files(path):
            raise StoreCorrupt(f"the store {path} has lost its {STORE_FILE}; remove the directory") from None
        raise StoreError(f"there is no store at {path}; check the path") from None
    except OSError as error:
        raise StoreError(f"cannot read the store {path}: {error.strerror}; check the path") from error
    return unpack_store(str(path / STORE_FILE), raw)


def _record(path: Path, identity: IdentityRecord, settings: Settings) -> None:
    """Require that the store in the directory has this identity, or make one of it; record the settings."""
    content = pack_store(identity, settings)
    if (path / STORE_FILE).exists() or _left_files(path):
        read_records(path)[0].require(path, identity)
        if (path / STORE_FILE).read_bytes() == content:
            return
    write_atomically(path / STORE_FILE, content)


def _left_files(path: Path) -> list[str]:
    """Names of files that only a store makes."""
    try:
        names = os.listdir(path)
    except OSError:
        return []
    return [name for name in names if is_store_file(name) and not name.startswith((LOCK_FILE, STORE_FILE))]
