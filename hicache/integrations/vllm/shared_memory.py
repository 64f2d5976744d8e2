"""Finds the file that is mapped as memory of this process, so that another process can map the same file."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import NamedTuple

from hicache.storage import PageBuffer


class _File(NamedTuple):
    device: int
    inode: int
    name: str


def descriptor_of(memory: PageBuffer) -> int | None:
    """Return a new descriptor of the file that is mapped at `memory`. `memory` is contiguous and begins at the first
    byte of a shared mapping of the file. Returns None if no file is mapped there, or if this process does not have the
    file open for writing."""
    file = _file_at(memory)
    if file is None:
        return None
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            found = os.fstat(descriptor)
            is_writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            if (found.st_dev, found.st_ino) == file[:2] and found.st_size >= memory.nbytes and is_writable:
                return os.dup(descriptor)
        except OSError:  # another thread has closed the descriptor
            continue
    return None


def name_of(memory: PageBuffer) -> str:
    """Return the name of the file that is mapped at `memory`. For a file without a name, return the name that the
    kernel shows."""
    file = _file_at(memory)
    return "" if file is None else file.name


def _file_at(memory: PageBuffer) -> _File | None:
    """Return the file whose first byte is at the beginning of `memory` in a shared mapping; None if there is no such
    file."""
    address = int(memory.__array_interface__["data"][0])
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # a container without /proc
        return None
    for line in lines:
        span, flags, offset, device, inode, *name = line.split(maxsplit=5)
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= address < end:
            major, minor = (int(number, 16) for number in device.split(":"))
            is_first = flags[3] == "s" and int(offset, 16) + address - start == 0
            return _File(os.makedev(major, minor), int(inode), "".join(name)) if is_first else None
    return None
