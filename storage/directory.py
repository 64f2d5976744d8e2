"""The directory of a store: its file names, their modes, and the lock of the one process that writes.

The kernel releases the lock when its process ends, however it ends, and lists the holder, so the lock file itself is
empty and cannot be out of date.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
from pathlib import Path

from hicache.storage.base import StoreError, StoreLocked

log = logging.getLogger("hicache.storage")

STORE_FILE, INDEX_FILE, SEAL_FILE, LOCK_FILE = "store.json", "index.mdb", "index.seal", "writer.lock"
LIVE_LINK, LIVE_FOLDER, NEW_SUFFIX = "live", "live.tmp", ".new"
_FILES = frozenset(
    name + suffix for name in (STORE_FILE, INDEX_FILE, SEAL_FILE, LOCK_FILE, LIVE_LINK) for suffix in ("", NEW_SUFFIX)
) | {LIVE_FOLDER}
_SLOTS_FILE = re.compile(r"pages-[1-9][0-9]*\.dat")
PRIVATE_FOLDER_MODE, PRIVATE_FILE_MODE = 0o700, 0o600
_MODE_OF_OTHERS = 0o077
_KERNEL_LOCKS = Path("/proc/locks")


def slots_file(path: Path, page_bytes: int) -> Path:
    """The file with the slots for pages of one size."""
    return path / f"pages-{page_bytes}.dat"


def is_store_file(name: str) -> bool:
    """Whether a store may have made a file of that name in its directory."""
    return name in _FILES or _SLOTS_FILE.fullmatch(name) is not None


def sync_directory(path: Path) -> None:
    """Make renames in `path` survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(file: Path, data: bytes) -> None:
    """Replace `file`, which holds the old data or the new whenever the power fails."""
    new = file.with_name(file.name + NEW_SUFFIX)
    with open(new, "wb", opener=open_private) as written:
        written.write(data)
        written.flush()
        os.fsync(written.fileno())
    new.replace(file)
    sync_directory(file.parent)


def open_private(file: str, flags: int) -> int:
    """An opener that makes new files private to their user."""
    return os.open(file, flags, PRIVATE_FILE_MODE)


class WriterLock:
    """The right to write to one directory, from construction to `close`.

    A missing directory is created, private to its user. An existing one and its files are made private, with a warning.
    Raises `StoreLocked` or `StoreError`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER_MODE)
            self._descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, PRIVATE_FILE_MODE)
        except (FileExistsError, NotADirectoryError):
            raise StoreError(f"the disk path {path} is not a directory; choose another path") from None
        except OSError as error:
            raise StoreError(f"cannot write to the disk path {path}: {error.strerror}; choose another path") from error
        try:
            self._lock()
            _make_private(path)
        except BaseException:
            self.close()
            raise

    def require_same(self) -> None:
        """OSError when the path no longer leads to the locked directory: a store there belongs to another writer."""
        held = os.fstat(self._descriptor)
        try:
            found = os.stat(self._path / LOCK_FILE)
        except FileNotFoundError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
            raise OSError(errno.ESTALE, f"{self._path} was removed or replaced while it was open; open the store again")

    def close(self) -> None:
        os.close(self._descriptor)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreLocked(
                f"the store {self._path} is in use by {_holder_in_words(self._descriptor)}; close it there or choose "
                "another path"
            ) from None
        except OSError as error:
            raise StoreError(
                f"cannot lock the disk path {self._path}: {error.strerror}; choose a local directory"
            ) from error


def share_lock(path: Path) -> int | None:
    """Exclude writers while the returned descriptor is open; None when a writer is active, or without a lock file."""
    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def writer_of(path: Path) -> int | None:
    """The id of the process that writes to the store now, 0 when it cannot be named, None when there is none."""
    descriptor = share_lock(path)
    if descriptor is not None:
        os.close(descriptor)
        return None
    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return None
    try:
        return _holder(descriptor)
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> int:
    """The process that the kernel lists as the holder of a lock on the file, 0 if it lists none that is alive.

    It lists no holder in another container, and none at all on network file systems.
    """
    held = os.fstat(descriptor)
    file = f"{os.major(held.st_dev):02x}:{os.minor(held.st_dev):02x}:{held.st_ino}"
    try:
        rows = [line.split() for line in _KERNEL_LOCKS.read_text().splitlines()]
    except OSError:
        return 0
    pids = [int(row[4]) for row in rows if len(row) == 8 and row[1] == "FLOCK" and row[5] == file]
    return next((pid for pid in pids if pid > 0 and Path(f"/proc/{pid}").exists()), 0)


def _holder_in_words(descriptor: int) -> str:
    pid = _holder(descriptor)
    try:
        user = Path(f"/proc/{pid}").stat().st_uid if pid else os.geteuid()
    except OSError:
        pid = 0
    if not pid:
        return "a process that cannot be named (in another container, or of another machine)"
    return f"process {pid}" if user == os.geteuid() else f"process {pid} of user {user}"


def _make_private(path: Path) -> None:
    """Remove the rights of others from the files of a store, and from the directory if it contains nothing else."""
    names = sorted(os.listdir(path))
    # What the link `live` leads to is private by itself.
    ours = [path / name for name in names if is_store_file(name) and not (path / name).is_symlink()]
    if all(map(is_store_file, names)):
        ours.insert(0, path)
    for file in ours:
        mode = stat.S_IMODE(file.stat().st_mode)
        if not mode & _MODE_OF_OTHERS:
            continue
        try:
            file.chmod(mode & ~_MODE_OF_OTHERS)
        except OSError as error:
            log.warning("other users may read %s (%s); let its owner run chmod go= on it", file, error.strerror)
        else:
            log.warning("%s could be read or written by other users; it is private now", file)
