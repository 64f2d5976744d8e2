"""The files in /dev/shm behind vLLM's CPU tier, which are as large as that is.

    named       from when the first worker makes them until the scheduler and all workers have mapped them
    nameless    from then on: the memory goes with the last process, however that ends

vLLM's tiering keeps the names until an orderly shutdown, which its processes are often killed before. What a server
left that was killed while its files had names, the next one removes before it makes its own. Imports nothing of vLLM,
which calls `remove_leftovers` in each of its processes as a plug-in.
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
    """Remove the files that a killed server left: those of this user that nobody has open or mapped, in whichever
    container. Where the file system cannot tell, they stay."""
    for path in sorted(_FOLDER.glob("vllm_offload_*")):
        if _NAME.fullmatch(path.name) is None:
            continue
        with contextlib.suppress(OSError):  # another process removes it too
            num_bytes = _remove_unused(path)
            if num_bytes is not None:
                log.warning("removed %s, of %d bytes, which a killed server had left", path, num_bytes)


def shared_bytes() -> int:
    """That the folder has room for."""
    found = os.statvfs(_FOLDER)
    return found.f_bavail * found.f_frsize


def agreed_bytes(engine_id: str, measure: Callable[[], int]) -> int:
    """What the first process of an engine measures, also in the others: a region has one size. The file that tells it
    goes with the names of the region."""
    path = _FOLDER / f"vllm_offload_{engine_id}.bytes"
    if not path.exists():
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.write_text(str(measure()))
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(own, path)
        own.unlink()
    return int(path.read_text())


def remove_names(path: str) -> None:
    """Of the region whose first file is `path`; it may be in several, of numbered names (vLLM 0.33). What is no region
    of vLLM's stays."""
    if Path(path).parent != _FOLDER or _NAME.fullmatch(Path(path).name) is None:
        return
    for name in (path, f"{path.removesuffix('.mmap')}.bytes", *glob.glob(f"{glob.escape(path)}.*")):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.unlink(name)


def remove_names_once_mapped(path: str, descriptor: int, user: int, num_users: int) -> bool:
    """The user of this number, of `num_users`, has mapped the region that is open as `descriptor`, and keeps it open.
    If all have, remove the names. Whether that is so.

    Each user locks the byte of its number, which ends with its process. On a kernel without such locks: False.
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
    """Its size where it was removed: where the kernel gives a lease, which it refuses for what anybody has open for
    writing. All who use a region do, as long as they have it mapped."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            return None
        fcntl.fcntl(
            descriptor, fcntl.F_SETSIG, signal.SIGURG
        )  # who opens it now sends this, and not SIGIO, which ends us
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        if not found.st_size:  # it may be in the making: then its maker asks for the lease before he has it open
            time.sleep(_MAKING_S)
        if fcntl.fcntl(descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
            return None
        os.unlink(path)
        return found.st_size
    finally:
        os.close(descriptor)
