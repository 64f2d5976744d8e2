"""Finds the file that backs memory of this process, so that another process can map the same file."""

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
    """A new descriptor of the file that backs `memory`. `memory` is contiguous and begins at the first byte of a shared
    mapping of the file. None if there is no such file, or if this process does not have it open."""
    file = _file_at(memory)
    if file is None:
        return None
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            found = os.fstat(descriptor)
            is_writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            if (found.st_dev, found.st_ino) == file[:2] and found.st_size >= memory.nbytes and is_writable:
                return os.dup(descriptor)
        except OSError:  # another thread closed it
            continue
    return None


def name_of(memory: PageBuffer) -> str:
    """The name of the file that backs `memory`, or the kernel's name of a file without one."""
    file = _file_at(memory)
    return "" if file is None else file.name


def _file_at(memory: PageBuffer) -> _File | None:
    """The file whose first byte is mapped, shared, at the beginning of `memory`; None if there is none."""
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
