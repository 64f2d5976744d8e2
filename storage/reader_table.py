"""LMDB's table of readers, kept in memory so that a hanging disk does not block those who register a read in it.

LMDB registers each read transaction in `lock.mdb`, which it maps writable. The kernel write-protects a page of that
mapping once it has written it back, and the next registration waits for the file system. If the disk hangs, that wait
is inside a call that holds Python's interpreter lock, so the whole process stops. Therefore `lock.mdb` is a symbolic
link to a file on a memory file system, private to the user:

    DIR/lock.mdb -> /dev/shm/hicache-UID/DEVICE-INODE-TOKEN      device and inode of DIR, a random token

All users of a store must register in the same table, or the writer reuses pages that are being read. Another machine or
container has another /dev/shm. So everybody who has the store open, writer or reader, holds a shared lock on DIR, and
only who gets that lock exclusively may create a table. Who does not see the linked table while others hold the lock is
refused. Device and inode in the name distinguish a copied directory from its original.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from pathlib import Path

from hicache.storage.base import StoreError, StoreLocked
from hicache.storage.directory import NEW_READERS_FILE, PRIVATE_FILE_MODE, PRIVATE_FOLDER_MODE, READERS_FILE

log = logging.getLogger("hicache.storage")

MEMORY = Path("/dev/shm")
# Concurrent read transactions of all processes; they fit the table, whose space is allocated at once.
READER_SLOTS = 1000
_TABLE_BYTES = 64 << 10
_ATTEMPTS, _PAUSE_S = 200, 0.005  # another opening may hold the lock exclusively, for a few file operations


class ReaderTable:
    """Holds the table of readers of one directory while an environment uses it; `close` it after the environment.

    Without a memory file system the table is a file in the directory, with a warning. Raises `StoreLocked` if others
    use a table that is not visible here, `StoreError` if none can be created.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path / READERS_FILE
        self._in_memory: Path | None = None
        try:
            self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise StoreError(f"there is no store at {path}: {error.strerror}; check the path") from error
        try:
            held = os.fstat(self._directory)
            self._prefix = f"{held.st_dev:x}-{held.st_ino:x}-"
            self._memory = _memory_folder(held.st_dev)
            self._share()
        except OSError as error:
            os.close(self._directory)
            raise StoreError(
                f"cannot create the table of readers of {path}: {error}; free space there and in {MEMORY}"
            ) from error
        except BaseException:
            os.close(self._directory)
            raise

    def close(self) -> None:
        """The last user removes the table from memory, also when the directory is gone."""
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._in_memory is not None:
                    self._in_memory.unlink()
                    if self._linked() == self._in_memory:
                        self._file.unlink()
        finally:
            os.close(self._directory)

    def _share(self) -> None:
        for _ in range(_ATTEMPTS):
            fcntl.flock(self._directory, fcntl.LOCK_SH)
            if self._is_here():
                self._in_memory = self._linked()
                return
            fcntl.flock(self._directory, fcntl.LOCK_UN)
            try:
                fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_PAUSE_S)
                continue
            if not self._is_here():
                self._create()
        raise StoreLocked(
            f"the store {self._path} is in use by processes whose table of readers is not visible here: {MEMORY} is "
            "another one in their container or on their machine, or was emptied; let all share it, or close the store "
            "there"
        )

    def _is_here(self) -> bool:
        """Whether `lock.mdb` leads to a complete table of this directory, in memory if possible."""
        try:
            if self._memory is None:
                return stat.S_ISREG(self._file.lstat().st_mode) and self._file.stat().st_size >= _TABLE_BYTES
            target = self._linked()
            return target is not None and target.stat().st_size >= _TABLE_BYTES
        except OSError:
            return False

    def _linked(self) -> Path | None:
        """The table in memory that `lock.mdb` links to, if it belongs to this directory."""
        try:
            target = self._file.readlink()
        except OSError:
            return None
        return target if target.is_relative_to(MEMORY) and target.name.startswith(self._prefix) else None

    def _create(self) -> None:
        """Replace what was there by a new table. Nobody else has the store open."""
        new = self._path / NEW_READERS_FILE
        new.unlink(missing_ok=True)
        if self._memory is None:
            _allocate(new)
        else:
            table = self._memory / f"{self._prefix}{secrets.token_hex(8)}"
            _allocate(table)
            new.symlink_to(table)
        new.replace(self._file)


def _memory_folder(device: int) -> Path | None:
    """The user's folder on the memory file system; None: the table stays in the directory."""
    folder = MEMORY / f"hicache-{os.geteuid()}"
    try:
        if MEMORY.stat().st_dev == device:  # the store is in memory already, or /dev/shm is an ordinary folder
            return None
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=PRIVATE_FOLDER_MODE)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it is not a private folder of this user")
    except OSError as error:
        log.warning("the table of readers stays on the disk, and the process stops while the disk hangs: %s", error)
        return None
    return folder


def _allocate(table: Path) -> None:
    """A table of zeros, not a hole: on a full file system the first write to a mapped hole would end the process."""
    descriptor = os.open(table, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE_FILE_MODE)
    try:
        if os.write(descriptor, bytes(_TABLE_BYTES)) < _TABLE_BYTES:
            raise OSError(errno.ENOSPC, "no space left for the table of readers")
    except OSError:
        table.unlink()
        raise
    finally:
        os.close(descriptor)
