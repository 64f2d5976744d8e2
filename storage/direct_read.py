"""Long values read past the kernel's memory, where they are not in it already.

A read through the page cache finds memory for every page and copies it once more, which takes cores from unpacking. So
the kernel is asked (`cachestat`, Linux 6.5) how much of a value it has, and where that is little, the value is read
directly; where nothing tells, as ever. May import the standard library.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from pathlib import Path

from hicache.storage.memory import ALIGNMENT

log = logging.getLogger("hicache.storage")

LEAST_BYTES = 256 << 10  # of a value: shorter ones gain nothing
_CACHESTAT = 451  # the system call, of all architectures


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    """struct cachestat of linux/mman.h, in pages."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "just_evicted"))


class DirectReads:
    """Reads of one file, for which the caller has another descriptor open; any thread.

    Does nothing where the file system, the kernel or its rules do not let it.
    """

    def __init__(self, data: Path, descriptor: int) -> None:
        self._cached = descriptor
        try:
            self._direct: int | None = os.open(data, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            self._direct = None
        self._syscall = ctypes.CDLL(None).syscall

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)

    def wants(self, offset: int, length: int) -> bool:
        """Whether these bytes are better read here: many, and less than half of them in the kernel's memory."""
        if self._direct is None or length < LEAST_BYTES:
            return False
        asked, found = _Range(offset, length), _CacheStat()
        pointers = ctypes.byref(asked), ctypes.byref(found)
        if self._syscall(ctypes.c_long(_CACHESTAT), ctypes.c_int(self._cached), *pointers, ctypes.c_int(0)) != 0:
            return False  # an older kernel, or a file of somebody else
        return bool(2 * found.cached * mmap.PAGESIZE < length)

    def read(self, room: memoryview, offset: int, num_bytes: int) -> int:
        """Read from an aligned `offset` into the start of `room`, of `aligned_buffer`; how many bytes there are now.

        Fewer than `num_bytes` at the file's end, or 0 where direct reads turn out to be refused: read the rest
        otherwise. OSError where the medium fails.
        """
        if self._direct is None:
            return 0
        try:
            return os.preadv(self._direct, [room[: -(-num_bytes // ALIGNMENT) * ALIGNMENT]], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            log.debug("no direct reads: %s", error)
            return 0
