"""The open files of a store; only one process at a time has them open.

DIR/store.json      identity and settings (records.py)   DIR/writer.lock   locked while open (directory.py)
DIR/pages-*.dat     slots (slot_file.py)                 DIR/index.mdb     the index, only while closed (index.py)
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from hicache.storage.base import StoreCorrupt, StoreError, opening_error
from hicache.storage.directory import (
    INDEX_FILE,
    STORE_FILE,
    WriterLock,
    replacing,
    slots_files,
    sync_directory,
)
from hicache.storage.header import parse_header
from hicache.storage.index import Entry, Index, io_errors
from hicache.storage.owner import OwnerProcess
from hicache.storage.read_write_lock import ReadWriteLock
from hicache.storage.records import StoreRecord
from hicache.storage.slot_file import SlotFile, SlotFiles, SlotLength
from hicache.storage.slots import Slots
from hicache.storage.store_folder import is_store_name

log = logging.getLogger("hicache.storage")
Progress = Callable[[int, int], None]  # called with the number of slots read so far and the number of all slots

_THREADS, _SLOTS_AT_ONCE = 8, 256


class StoreFiles:
    """Owns the lock, the slot files and the index of one store, from construction to `close`.

    Any thread calls `reading`; only the writer thread calls the other methods. An LMDB buffer is an address in a memory
    map, and reading the buffer after the map is closed ends the process. So `close` and `rebuild` wait until no thread
    is in `reading`, and new readers wait for them. `rebuilt_pages`: number of pages if this opening rebuilt the index,
    None if the index was sealed. `drive_bytes`: size of the file system. `recorded`: identity and settings of the
    previous opening. `keeps_index`: see `LmdbPageStore`. Raises `StoreError` and its subclasses; then no file stays
    locked or open.
    """

    def __init__(self, path: Path, record: StoreRecord, progress: Progress | None, *, keeps_index: bool) -> None:
        self.path = path
        self.record = record
        self.closed = False
        self.owner = OwnerProcess(f"the store {path}")
        self._reading = ReadWriteLock()
        self._progress = progress or (lambda done, total: None)
        self.rebuilt_pages: int | None = None
        with contextlib.ExitStack() as held:
            self.lock = held.enter_context(contextlib.closing(WriterLock(path)))
            try:
                self.recorded = _record(path, record)
                self.slot_files = held.enter_context(contextlib.closing(SlotFiles(path, record.page_sizes)))
                sync_directory(path)
                self.drive_bytes = shutil.disk_usage(path).total
                self.index = Index(record.budget_bytes)
                held.callback(self._close_index)
                self._open_index(keeps_index=keeps_index)
            except io_errors as error:
                raise opening_error(f"the store {path}", error) from error
            self._held = held.pop_all()

    @contextlib.contextmanager
    def reading(self) -> Iterator[StoreFiles]:
        """Keep index and slot files open until the `with` block ends. Raises `StoreError` if the store is closed."""
        self.owner.require_here()  # checked first, because in a forked process another thread may hold the lock forever
        with self._reading:
            self.require_open()
            yield self

    def require_open(self) -> None:
        """Raise `StoreError` if the store is closed, NotRunning in a forked process."""
        self.owner.require_here()
        if self.closed:
            raise StoreError("the store is closed; open it again")

    def file_bytes(self) -> int:
        return self.slot_files.disk_bytes() + self.index.num_bytes()

    def record_settings(self) -> None:
        """Write the present settings to store.json. Call this method after pages above the budget are evicted, because
        a full disk has no space for this file before."""
        if self.recorded != self.record:
            try:
                with replacing(self.path / STORE_FILE) as file:
                    file.write(self.record.pack())
            except OSError as error:
                log.warning("the store %s is open with settings that are not recorded: %s", self.path, error)

    def rebuild(self) -> None:
        """Rebuild the index from the slots. Raises `io_errors`; after a failed rebuild, reads are misses."""
        self.lock.require_same()
        with self._reading.writing():
            self._build_index()
            self.slots.settle()

    def close(self, *, is_complete: bool) -> None:
        """Wait for readers, seal the index if it `is_complete`, and release the lock, the files and the index."""
        with self._reading.writing():
            self.closed = True
            try:
                if is_complete:
                    self.lock.require_same()
                    self.slots.close()
                    self.index.seal(self.path / INDEX_FILE)
            except io_errors as error:
                log.warning("the index of the store %s is not sealed, and is rebuilt next time: %s", self.path, error)
            finally:
                self._held.close()

    def _open_index(self, *, keeps_index: bool) -> None:
        """Open the sealed index. If the sealed index is missing or does not match the slots, rebuild the index from the
        slots. Then remove the file of the sealed index, because the first write would make this file stale."""
        sealed, num_sealed = Index.open_sealed(self.path / INDEX_FILE, self.record.budget_bytes), 0
        if sealed is not None:
            self._use_index(sealed)
            num_sealed = sealed.num_pages()
        if sealed is None or (self.slots.num_misplaced and not keeps_index):
            if num_slots := self.slot_files.num_slots():
                log.warning("the index of the store %s is rebuilt from its %d slots", self.path, num_slots)
            self._build_index()
            self.rebuilt_pages = self.index.num_pages()
            if self.rebuilt_pages < num_sealed:
                lost = "%d of %d pages of the store %s are lost: since it was closed its files were cut or removed"
                log.warning(lost, num_sealed - self.rebuilt_pages, num_sealed, self.path)
        self.slots.settle()
        (self.path / INDEX_FILE).unlink(missing_ok=True)
        sync_directory(self.path)

    def _build_index(self) -> None:
        self._use_index(Index(self.record.budget_bytes))
        _rebuild(self.index, self.slot_files, self.record.namespace, self._progress)
        self.slots = Slots(self.slot_files, self.record, self.index.records())

    def _close_index(self) -> None:
        self.index.close()

    def _use_index(self, index: Index) -> None:
        self._close_index()
        self.index = index
        self.slots = Slots(self.slot_files, self.record, index.records())


def read_record(path: Path) -> StoreRecord:
    """Read the record of a store. Raises `StoreError` and its subclasses."""
    try:
        raw = (path / STORE_FILE).read_bytes()
    except FileNotFoundError:
        if _is_left(path):
            raise StoreCorrupt(f"the store {path} has lost its {STORE_FILE}; remove the directory") from None
        if denied := _denied_folder(path):
            raise StoreError(f"cannot look for a store in {denied}: permission denied; run this as its owner") from None
        raise StoreError(f"there is no store at {path}; check the path") from None
    except OSError as error:
        raise opening_error(f"the store {path}", error) from error
    return StoreRecord.unpack(str(path / STORE_FILE), raw)


def _record(path: Path, record: StoreRecord) -> StoreRecord:
    """Read the record of the store in a directory; the store must have the identity of `record`. If the directory has
    no store, write `record`."""
    if (path / STORE_FILE).exists() or _is_left(path):
        stored = read_record(path)
        stored.require(path, record)
        return stored
    with replacing(path / STORE_FILE) as file:
        file.write(record.pack())
    return record


def _denied_folder(path: Path) -> Path | None:
    """Return the first folder of a store in `path` that this user has no permission to read. Returns None if there is
    no such folder."""
    try:
        named = [folder for folder in sorted(path.iterdir()) if is_store_name(folder.name)]
    except OSError:
        return None
    return next((folder for folder in named if not os.access(folder, os.R_OK | os.X_OK)), None)


def _is_left(path: Path) -> bool:
    """Return whether `path` has files of a store, apart from its record and lock."""
    return (path / INDEX_FILE).exists() or bool(slots_files(path))


class _Found(NamedTuple):
    """A page found in the block of a slot."""

    sequence: int
    entry: Entry
    key: bytes


def _rebuild(index: Index, files: SlotFiles, namespace: bytes, progress: Progress) -> None:
    """Fill an empty index from the blocks of the slots. The sequence numbers in the blocks give the use order. Slots
    without a valid page, and slots that cannot be read, become holes. Raises OSError if the disk fails."""

    def read(length: SlotLength, slots: range) -> list[_Found]:
        return [found for slot in slots if (found := _page_of(files[length], length, slot, namespace))]

    total, done = files.num_slots(), 0
    newest: dict[bytes, _Found] = {}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hicache-disk-rebuild") as threads:
        for length, file in sorted(files.items()):
            slots = range(file.num_slots())
            parts = [slots[start : start + _SLOTS_AT_ONCE] for start in range(0, len(slots), _SLOTS_AT_ONCE)]
            for part, found in zip(parts, threads.map(read, [length] * len(parts), parts), strict=True):
                for one in found:
                    if one.key not in newest or newest[one.key] < one:
                        newest[one.key] = one
                done += len(part)
                progress(done, total)
    with index.changes() as changes:
        for one in newest.values():
            changes.put(one.key, one.entry, max(1, one.sequence))
    index.uses.restart_clock()  # later sequence numbers are higher than all found ones
    for length, file in files.items():
        used = {one.entry.slot for one in newest.values() if one.entry.length == length}
        file.truncate(max(used, default=-1) + 1)
        file.punch(sorted(set(range(file.num_slots())) - used))


def _page_of(file: SlotFile, length: SlotLength, slot: int, namespace: bytes) -> _Found | None:
    try:
        block = file.read_block(slot)
    except OSError as error:
        log.warning(
            "slot %d of %d bytes for pages of %d is lost: %s", slot, length.slot_bytes, length.page_bytes, error
        )
        return None
    fields = "" if block is None else parse_header(block.header)
    if block is None or isinstance(fields, str):
        return None
    entry = Entry(slot, fields.stored_bytes, length.page_bytes)
    if entry.length != length or fields.contradiction(fields.stored_bytes, length.page_bytes, namespace):
        return None
    return _Found(block.sequence, entry, block.key)
