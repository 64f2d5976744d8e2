"""Where a store's table of readers is: in memory, for a disk that hangs must not hold up those who note a read in it.

lmdb notes each read transaction in `lock.mdb`, which it maps writable. A page of that mapping which the kernel has
written back is write-protected, and the next note waits for the file system: on a disk that hangs, for as long as it
hangs, inside a call that keeps Python's interpreter lock, so the whole process stands still. So `lock.mdb` is a
symbolic link to a file on a memory file system, private to the user.

    DIR/lock.mdb -> /dev/shm/hicache-UID/DEVICE-INODE-TOKEN      device and inode of DIR, a random token

All who use a store must note their reads in one and the same table, else the writer uses pages again that are being
read. Another machine, or a container, has another /dev/shm. So whoever has the store open, writer or reader, holds a
shared lock on DIR, and only who gets it exclusively may make a table. Who does not see the table that is linked, while
others hold the directory, is refused. Device and inode in the name tell a copied directory from its original.

Owns the link, the file behind it and the lock on the directory. May import the standard library, base and directory.
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
# Slots for read transactions of all processes at a time; they fit the table, which is reserved as a whole.
READER_SLOTS = 1000
_TABLE_BYTES = 64 << 10
_ATTEMPTS, _PAUSE_S = 200, 0.005  # another opening may hold the directory exclusively, for a few file operations


class ReaderTable:
    """Keeps the table of readers of one directory in its place while an environment uses it; `close` it after that.

    Where there is no memory file system, the table is a file in the directory, with a warning. Raises `StoreLocked`
    where others use a table that is not seen here, `StoreError` where none can be made.
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
                f"cannot make the table of readers of {path}: {error}; free space there and in {MEMORY}"
            ) from error
        except BaseException:
            os.close(self._directory)
            raise

    def close(self) -> None:
        """The last one takes a table in memory along, also where the directory is gone."""
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
                self._make()
        raise StoreLocked(
            f"the store {self._path} is in use by processes whose table of readers is not seen from here: {MEMORY} is "
            "another one in their container or on their machine, or was emptied; let all share it, or close the store "
            "there"
        )

    def _is_here(self) -> bool:
        """Whether `lock.mdb` leads to a whole table of this directory, in memory where there is some."""
        try:
            if self._memory is None:
                return stat.S_ISREG(self._file.lstat().st_mode) and self._file.stat().st_size >= _TABLE_BYTES
            target = self._linked()
            return target is not None and target.stat().st_size >= _TABLE_BYTES
        except OSError:
            return False

    def _linked(self) -> Path | None:
        """The table in memory that `lock.mdb` names, where it is of this directory."""
        try:
            target = self._file.readlink()
        except OSError:
            return None
        return target if target.is_relative_to(MEMORY) and target.name.startswith(self._prefix) else None

    def _make(self) -> None:
        """A new table in the place of what was there. Nobody else has the store open."""
        new = self._path / NEW_READERS_FILE
        new.unlink(missing_ok=True)
        if self._memory is None:
            _reserve(new)
        else:
            table = self._memory / f"{self._prefix}{secrets.token_hex(8)}"
            _reserve(table)
            new.symlink_to(table)
        new.replace(self._file)


def _memory_folder(device: int) -> Path | None:
    """The user's folder on the memory file system; None: the table stays in the directory."""
    folder = MEMORY / f"hicache-{os.geteuid()}"
    try:
        if MEMORY.stat().st_dev == device:  # the store is in memory, or this is no file system of its own
            return None
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=PRIVATE_FOLDER_MODE)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it is not a private folder of this user")
    except OSError as error:
        log.warning("the table of readers stays on the disk, whose hanging may hold up the process: %s", error)
        return None
    return folder


def _reserve(table: Path) -> None:
    """A table of zeros. Not a hole: on a full file system the first write to a mapped hole would kill the process."""
    descriptor = os.open(table, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE_FILE_MODE)
    try:
        if os.write(descriptor, bytes(_TABLE_BYTES)) < _TABLE_BYTES:
            raise OSError(errno.ENOSPC, "no space left for the table of readers")
    except OSError:
        table.unlink()
        raise
    finally:
        os.close(descriptor)
