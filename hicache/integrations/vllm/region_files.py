"""The files in /dev/shm that back vLLM's CPU tier. They are as large as the tier.

    named       from when the first worker creates them until the scheduler and all workers have mapped them
    nameless    from then on: the kernel frees the memory when the last process ends, however it ends

vLLM's tiering keeps the names until a clean shutdown, but its processes are often killed before. If a server is killed
while its files have names, the next server removes them before it creates its own. Imports nothing of vLLM, which calls
`remove_leftovers` in each of its processes as a plug-in.
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
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, process
_MAKING_S = 0.05


def remove_leftovers() -> None:
    """Remove the files of killed servers: files of this user that no process in any container has open or mapped. If
    the file system cannot tell that, the files stay."""
    for path in sorted(_FOLDER.glob("vllm_offload_*")):
        if _NAME.fullmatch(path.name) is None:
            continue
        with contextlib.suppress(OSError):  # another process removes it too
            num_bytes = _remove_unused(path)
            if num_bytes is not None:
                log.warning("removed %s, of %d bytes, which a killed server had left", path, num_bytes)


def shared_bytes() -> int:
    """Free bytes in the folder."""
    found = os.statvfs(_FOLDER)
    return found.f_bavail * found.f_frsize


def agreed_bytes(engine_id: str, measure: Callable[[], int]) -> int:
    """The bytes that the first process of an engine measures. The other processes return the same, because a region has
    one size. The number is in a file, which is removed together with the names of the region."""
    path = _FOLDER / f"vllm_offload_{engine_id}.bytes"
    if not path.exists():
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.write_text(str(measure()))
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(own, path)
        own.unlink()
    return int(path.read_text())


def remove_names(path: str) -> None:
    """Remove the names of the region whose first file is `path`. It may consist of several numbered files (vLLM 0.33).
    Paths that are not regions of vLLM are ignored."""
    if Path(path).parent != _FOLDER or _NAME.fullmatch(Path(path).name) is None:
        return
    for name in (path, f"{path.removesuffix('.mmap')}.bytes", *glob.glob(f"{glob.escape(path)}.*")):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.unlink(name)


def remove_names_once_mapped(path: str, descriptor: int, user: int, num_users: int) -> bool:
    """Note that process number `user` of `num_users` has mapped the region open as `descriptor`, and keeps it open. If
    all have, remove the names and return True.

    Each process locks the byte of its number; the lock ends with the process. On a kernel without such locks: return
    False.
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


def _remove_unused(path: Path) -> int | None:
    """Remove a file that no process uses. Returns its bytes if it was removed. The kernel grants a lease only on a file
    that no process has open for writing; processes that have mapped a region have it open for writing."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            return None
        fcntl.fcntl(
            descriptor, fcntl.F_SETSIG, signal.SIGURG
        )  # a process that opens the file now causes this signal, and not SIGIO, which would end this process
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        if not found.st_size:  # it may just have been created; its creator breaks the lease when it opens the file
            time.sleep(_MAKING_S)
        if fcntl.fcntl(descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
            return None
        os.unlink(path)
        return found.st_size
    finally:
        os.close(descriptor)
