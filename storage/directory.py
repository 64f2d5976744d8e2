"""The directory of a store: the names and modes of its files, and the lock of the only process that may write.

The kernel lists the process that holds the lock, and releases the lock when this process ends for any reason, so the
lock file is never stale. The file is empty while the lock is held. Before the holder of the lock closes the store, it
writes one byte to this file. A process that finds this byte waits for the lock; without it, the process fails to open
the store.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from hicache.storage.base import StoreError, StoreLocked, opening_error

log = logging.getLogger("hicache.storage")

# Error codes of calls that are not supported by a file system, an old kernel or the seccomp profile of a container.
REFUSALS = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF, errno.EPERM})
STORE_FILE, INDEX_FILE, LOCK_FILE = "store.json", "index.mdb", "writer.lock"
NEW_SUFFIX = ".new"
PRIVATE_FOLDER_MODE, PRIVATE_FILE_MODE = 0o700, 0o600
_MODE_OF_OTHERS = 0o077
_KERNEL_LOCKS = Path("/proc/locks")
_CLOSING_WAIT_S, _POLL_S = 60.0, 0.02


def slots_file(path: Path, page_bytes: int, slot_bytes: int) -> Path:
    """Return the path of the file with slots of `slot_bytes` for pages of `page_bytes`."""
    return path / f"pages-{page_bytes}-{slot_bytes}.dat"


def slots_files(path: Path) -> list[Path]:
    """Return all slot files in a directory, sorted."""
    return sorted(path.glob("pages-[1-9]*.dat"))


def sync_directory(path: Path) -> None:
    """Make renames in `path` survive a power failure, if the file system of `path` supports this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        synced(os.fsync, descriptor, path)
    finally:
        os.close(descriptor)


def synced(call: Callable[[int], None], descriptor: int, path: Path) -> None:
    """Call fsync or fdatasync on a file in the folder `path`, or on the folder itself. If the file system or the
    container does not support the call, log one warning. Raises OSError if the disk fails."""
    try:
        call(descriptor)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        _warn_of_no_sync(str(path), error.strerror)


@functools.cache
def _warn_of_no_sync(path: str, why: str) -> None:
    """Log once per path that its files cannot be synced."""
    log.warning(
        "the file system of %s cannot flush writes to its disk (%s): a power failure may lose the pages stored last",
        path, why,
    )  # fmt: skip


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces `file` when the `with` block ends. After a power failure, `file` is the complete
    old file or the complete new file."""
    new = file.with_name(file.name + NEW_SUFFIX)
    with open(new, "w+b", opener=open_private) as written:
        yield written
        written.flush()
        synced(os.fsync, written.fileno(), file.parent)
    new.replace(file)
    sync_directory(file.parent)


def open_private(file: str, flags: int) -> int:
    """Open a file. A missing file is created, private to its user."""
    return os.open(file, flags | os.O_CREAT, PRIVATE_FILE_MODE)


class WriterLock:
    """The lock that a process must hold to write to a directory, from construction to `close`.

    A missing directory is created, private to its user. The files in an existing directory are made private, with a
    warning. If another process holds the lock and has announced that it will close, the constructor waits at most
    `wait_s` seconds. Raises `StoreLocked` or `StoreError`.
    """

    def __init__(self, path: Path, wait_s: float = _CLOSING_WAIT_S) -> None:
        self._path = path
        with contextlib.ExitStack() as held:
            try:
                path.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER_MODE)
                self._descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, PRIVATE_FILE_MODE)
                held.callback(os.close, self._descriptor)
                self._acquire(wait_s)
                # If a forked child also has the descriptor, closing it here does not release the lock.
                held.callback(fcntl.flock, self._descriptor, fcntl.LOCK_UN)
                self.require_same()  # the directory may have been removed while this call waited
                before = os.fstat(self._descriptor)
                os.ftruncate(self._descriptor, 0)  # other processes stop waiting when the file is empty
                # Keep the modification time, which is the time of the last use of the store.
                os.utime(self._descriptor, ns=(before.st_atime_ns, before.st_mtime_ns))
            except (FileExistsError, NotADirectoryError):
                raise StoreError(f"the disk path {path} is not a directory; choose another path") from None
            except BlockingIOError:
                pid = _holder(self._descriptor)
                holder = f"process {pid}" if pid else "a process that cannot be named (in another container?)"
                raise StoreLocked(
                    f"the store {path} is in use by {holder}; close it there, choose another path, or share it with "
                    "`hicache store serve`",
                    pid,
                ) from None
            except OSError as error:
                raise opening_error(f"the store {path}", error) from error
            _make_private(path)
            self._held = held.pop_all()

    def _acquire(self, wait_s: float) -> None:
        """Acquire the lock. Raises BlockingIOError if another process holds the lock and has not announced that it will
        close, or does not close within `wait_s` seconds."""
        until_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in (*REFUSALS, errno.ENOLCK):
                    raise StoreError(
                        f"the file system of {self._path} has no locks ({error.strerror}), so nothing would keep "
                        "another process from writing there; choose a path on another one, or mount it with locks"
                    ) from error
                if not isinstance(error, BlockingIOError):
                    raise
                if not os.fstat(self._descriptor).st_size or time.monotonic() > until_s:
                    raise
                time.sleep(_POLL_S)

    def announce_close(self) -> None:
        """Announce that the lock will be released soon, so that processes that open the store wait for the lock instead
        of failing."""
        try:
            os.pwrite(self._descriptor, b"\0", 0)
        except OSError as error:
            log.warning("%s: the next process that opens the store does not wait for this one: %s", self._path, error)

    def require_same(self) -> None:
        """Raise OSError if the path no longer leads to the locked directory, because another process may then write to
        the store at the path."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._descriptor), os.stat(self._path / LOCK_FILE)):
                return
        raise OSError(errno.ESTALE, f"{self._path} was removed or replaced while it was open; open the store again")

    def close(self) -> None:
        self._held.close()


def _holder(descriptor: int) -> int:
    """Return the id of the process that the kernel lists as holder of a lock on the file, 0 if it lists no live
    process.

    The kernel does not list a holder in another container, nor holders on network file systems.
    """
    held = os.fstat(descriptor)
    file = f"{os.major(held.st_dev):02x}:{os.minor(held.st_dev):02x}:{held.st_ino}"
    try:
        rows = [line.split() for line in _KERNEL_LOCKS.read_text().splitlines()]
    except OSError:
        return 0
    pids = [int(row[4]) for row in rows if len(row) == 8 and row[1] == "FLOCK" and row[5] == file]
    return next((pid for pid in pids if pid > 0 and Path(f"/proc/{pid}").exists()), 0)


def _make_private(path: Path) -> None:
    """Remove the access rights of other users from the files of a store."""
    for file in filter(Path.exists, (path / LOCK_FILE, path / STORE_FILE, *slots_files(path))):
        mode = stat.S_IMODE(file.stat().st_mode)
        if mode & _MODE_OF_OTHERS:
            log.warning("%s could be read or written by other users; it is private now", file)
            try:
                file.chmod(mode & ~_MODE_OF_OTHERS)
            except OSError as error:
                log.warning("it is not: %s; let its owner run chmod go= on it", error.strerror)
