"""Where the index of an open store lies, and the sealed copy of it that a closed store leaves in its directory.

    DIR/live -> /dev/shm/hicache-UID/DEVICE-INODE-TOKEN/    while a writer has the store open: data.mdb, lock.mdb
    DIR/index.mdb                                           while none has: a copy, and 8 bytes, its seal

In memory a hanging disk holds up no access to the index, and LMDB's table of readers in lock.mdb neither. LMDB trusts
what it maps, so a copy is mapped after it was compared with its seal. A store without a sealed index, because its
writer was killed or the power failed, gets a new index from its slots. The writer holds a lock on the folder in memory:
without it, nobody uses the folder, and the next opening of any store of this user removes it. Device and inode in its
name distinguish a copied directory from its original.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from hicache.storage.directory import (
    INDEX_FILE,
    LIVE_FOLDER,
    LIVE_LINK,
    NEW_SUFFIX,
    PRIVATE_FOLDER_MODE,
    open_directory,
    open_private,
    replacing,
)
from hicache.storage.index import Index
from hicache.storage.records import FORMAT

log = logging.getLogger("hicache.storage")

MEMORY = Path("/dev/shm")
_READER_TABLE_BYTES = 64 << 10  # holds `READER_SLOTS`
_SPARE_BYTES, _CHUNK_BYTES = 16 << 20, 8 << 20
_SEAL_BYTES = 8


class LiveFolder:
    """The folder of an open store's index, from construction to `close`; the writer of the store owns it.

    Without space in memory for twice the sealed index it is in the directory of the store, with a warning. OSError if
    it cannot be made.
    """

    def __init__(self, store: Path) -> None:
        self._link = store / LIVE_LINK
        self._link.unlink(missing_ok=True)
        shutil.rmtree(store / LIVE_FOLDER, ignore_errors=True)
        self._held = contextlib.ExitStack()
        try:
            self.path = self._make(store)
            # Zeros, not a hole: on a full file system the first write to a mapped hole would end the process.
            with open(self.path / "lock.mdb", "xb", opener=open_private) as table:
                table.write(bytes(_READER_TABLE_BYTES))
        except BaseException:
            self._held.close()
            raise
        self.data = self.path / "data.mdb"
        self._target = LIVE_FOLDER if self.path.parent == store else str(self.path)

    def publish(self) -> None:
        """Lead readers to the index."""
        new = self._link.with_name(LIVE_LINK + NEW_SUFFIX)
        new.unlink(missing_ok=True)
        new.symlink_to(self._target)
        new.replace(self._link)

    def close(self) -> None:
        """Remove it; readers that have it open keep what they see."""
        with contextlib.suppress(OSError):
            if str(self._link.readlink()) == self._target:
                self._link.unlink()
        shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()

    def _make(self, store: Path) -> Path:
        try:
            with _memory_folder() as memory:
                sealed, space = store / INDEX_FILE, os.statvfs(memory)
                needed_bytes = _SPARE_BYTES + (2 * sealed.stat().st_size if sealed.exists() else 0)
                if space.f_bavail * space.f_frsize < needed_bytes:
                    raise OSError(errno.ENOSPC, f"it has not {needed_bytes} bytes left")
                return self._create(memory / f"{_name_start(store)}{secrets.token_hex(8)}")
        except OSError as error:
            log.warning("the index of %s is in its directory, and waits where the disk hangs: %s", store, error)
            return self._create(store / LIVE_FOLDER)

    def _create(self, folder: Path) -> Path:
        folder.mkdir(mode=PRIVATE_FOLDER_MODE)
        fcntl.flock(self._held.enter_context(open_directory(folder)), fcntl.LOCK_EX)
        return folder


def live_folder(store: Path) -> Path | None:
    """Where a writer, which is alive, has the index of the store; None without one that is visible here."""
    try:
        folder = store / (store / LIVE_LINK).readlink()
        ours = folder.parent == _memory_path() and folder.name.startswith(_name_start(store))
        return folder if (ours or folder == store / LIVE_FOLDER) and not _is_left(folder) else None
    except OSError:
        return None


def live_target(store: Path) -> str:
    """What changes whenever the index is another one: where a writer has it, else which sealed one there is."""
    with contextlib.suppress(OSError):
        return os.readlink(store / LIVE_LINK)
    with contextlib.suppress(OSError):
        found = (store / INDEX_FILE).stat()
        return f"{found.st_ino} {found.st_mtime_ns}"
    return ""


def seal(store: Path, index: Index) -> None:
    """Leave a sealed copy of the index. OSError if the disk fails."""
    with replacing(store / INDEX_FILE) as file:
        index.copy_to(file.fileno())
        file.write(_seal_of(file, file.seek(0, os.SEEK_END)))


def copy_sealed(store: Path, copy: Path) -> bool:
    """Copy the sealed index; whether there is one, and it is what was sealed."""
    try:
        with open(store / INDEX_FILE, "rb") as source, open(copy, "w+b", opener=open_private) as target:
            shutil.copyfileobj(source, target, _CHUNK_BYTES)
            num_bytes = max(0, target.tell() - _SEAL_BYTES)
            found = _seal_of(target, num_bytes)
            is_whole = target.read() == found
            target.truncate(num_bytes)
            return is_whole
    except FileNotFoundError:
        return False
    except OSError as error:
        log.warning("cannot read the sealed index of %s: %s", store, error)
        return False


def _seal_of(file: BinaryIO, num_bytes: int) -> bytes:
    """XXH3_64, with the format as its seed, of the first bytes of a file, which stands behind them then."""
    checksum = xxhash.xxh3_64(seed=FORMAT)
    file.seek(0)
    while chunk := file.read(min(_CHUNK_BYTES, num_bytes - file.tell())):
        checksum.update(chunk)
    return bytes(checksum.digest())


def _memory_path() -> Path:
    return MEMORY / f"hicache-{os.geteuid()}"


@contextlib.contextmanager
def _memory_folder() -> Iterator[Path]:
    """The user's folder in memory, locked, without what killed processes left. OSError without one."""
    folder = _memory_path()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=PRIVATE_FOLDER_MODE)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, f"{folder} is not a private folder of this user")
    with open_directory(folder) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.iterdir():
            with contextlib.suppress(OSError):
                if _is_left(left):
                    shutil.rmtree(left)
        yield folder


def _is_left(folder: Path) -> bool:
    """Whether nobody writes to an index there."""
    with open_directory(folder) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _name_start(store: Path) -> str:
    found = store.stat()
    return f"{found.st_dev:x}-{found.st_ino:x}-"
