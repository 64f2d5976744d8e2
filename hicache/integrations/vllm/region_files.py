"""The files in /dev/shm that contain vLLM's CPU tier. Together they are as large as the tier.

    named       from when the first worker creates them until the scheduler and all workers have mapped them
    nameless    afterwards: the kernel frees the memory when the last process ends, even if it is killed

vLLM's tiering keeps the names until a clean shutdown, but often its processes are killed instead. If a server is killed
while its files have names, the next server removes these files before it creates its own files. This module imports
nothing of vLLM, because vLLM calls `remove_leftovers` as a plug-in in each of its processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import os
import re
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"vllm_offload_.+\.mmap(\.\d+)?")
_NUMBER_NAME = re.compile(r"vllm_offload_.+\.bytes(\.\d+)?")  # the files that `agreed_bytes` creates
_MAX_START_S = 24 * 3600.0  # no server takes longer to start
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, process
_MAKING_S = 0.05


def remove_leftovers() -> None:
    """Remove the files of killed servers: regions of this user that no process in any container has open or mapped, and
    the numbers of `agreed_bytes` that are older than a day. If the file system cannot show whether a process has a
    region open, the region is not removed."""
    for path in sorted(_FOLDER.glob("vllm_offload_*")):
        with contextlib.suppress(OSError):  # another process removes the same file
            if _NUMBER_NAME.fullmatch(path.name) is not None:
                _remove_old(path)
            elif _NAME.fullmatch(path.name) is not None and (num_bytes := _remove_unused(path)) is not None:
                log.warning("removed %s, of %d bytes, which a killed server had left", path, num_bytes)


def shared_bytes() -> int:
    """Return the free bytes in /dev/shm."""
    found = os.statvfs(_FOLDER)
    return found.f_bavail * found.f_frsize


def agreed_bytes(engine_id: str, measure: Callable[[], int]) -> int:
    """Return the number of bytes that the first process of an engine measures. All other processes of the engine return
    the same number, because a region has one size. The number is stored in a file, which is removed together with the
    names of the region."""
    path = _FOLDER / f"vllm_offload_{engine_id}.bytes"
    if not path.exists():
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.write_text(str(measure()))
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(own, path)
        own.unlink()
    return int(path.read_text())


def remove_names(path: str) -> None:
    """Remove the names of the region whose first file is `path`. A region may have several numbered files (vLLM 0.33).
    Paths that are not regions of vLLM are ignored."""
    if Path(path).parent != _FOLDER or _NAME.fullmatch(Path(path).name) is None:
        return
    for name in (path, f"{path.removesuffix('.mmap')}.bytes", *glob.glob(f"{glob.escape(path)}.*")):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.unlink(name)


def remove_names_once_mapped(path: str, descriptor: int, user: int, num_users: int) -> bool:
    """Record that process number `user` of `num_users` has mapped the region and keeps it open as `descriptor`. If all
    processes have mapped the region, remove its names and return True.

    Each process locks the byte at the offset of its number; the kernel releases the lock when the process ends. Returns
    False on a kernel without such locks.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, user, 1, 0))
        is_mapped = all(_is_locked(descriptor, other) for other in range(num_users) if other != user)
    except OSError:
        return False
    if is_mapped:
        remove_names(path)
    return is_mapped


def _is_locked(descriptor: int, byte: int) -> bool:
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    return struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK


def _remove_old(path: Path) -> None:
    """Remove a file of this user that was written before the longest start of a server began."""
    found = path.lstat()
    if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _MAX_START_S:
        path.unlink()


def _remove_unused(path: Path) -> int | None:
    """Remove a file unless a process uses it. Returns the size of the file in bytes if it was removed, otherwise None.
    The kernel grants a lease only on a file that no process has open for writing, and every process that has mapped a
    region has its file open for writing."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            return None
        fcntl.fcntl(
            descriptor, fcntl.F_SETSIG, signal.SIGURG
        )  # if a process opens the file now, the kernel sends SIGURG, and not SIGIO, which would end this process
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        if not found.st_size:  # an empty file may be new; its creator breaks the lease when it opens the file again
            time.sleep(_MAKING_S)
        if fcntl.fcntl(descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
            return None
        os.unlink(path)
        return found.st_size
    finally:
        os.close(descriptor)
