"""The file with the payloads of one page size: slots of equal length, read with O_DIRECT where that pays.

Writes go through the kernel's page cache, and after each piece the kernel is told to start writing it back, so that the
next piece is copied meanwhile and recently written payloads are read from memory. A slot that holds less than its size,
or nothing, is a hole after that.

A read through the page cache page-faults memory for every page and copies the data once more, which takes cores from
decompression. So the kernel is asked (`cachestat`, Linux 6.5) how much of a payload is cached; if that is little, the
payload is read with O_DIRECT. Not while slots are written: file systems like ext4 block a write until all direct reads
of the file have ended, and later reads until the write has.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import mmap
import os
import time
from pathlib import Path

from hicache.storage.base import PageBuffer
from hicache.storage.directory import PRIVATE_FILE_MODE
from hicache.storage.memory import ALIGNMENT, round_up

log = logging.getLogger("hicache.storage")

MIN_DIRECT_BYTES = 256 << 10  # of a payload: for shorter ones a direct read gains nothing
_WRITE_BACK_BYTES = 1 << 20
_PROBE_BYTES = 64 << 20
_QUIET_S = 0.25  # without a write, until reads are direct again
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of linux/falloc.h
_START_WRITE_BACK = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h
_STAT_BLOCK_BYTES = 512  # the unit of st_blocks
_CACHESTAT = 451  # the number of the system call, on all architectures


def is_aligned(page: PageBuffer) -> bool:
    """Whether a page can be read directly to its memory."""
    return not (page.ctypes.data | page.nbytes) % ALIGNMENT


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    """struct cachestat of linux/mman.h, in pages."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "just_evicted"))


class DirectReads:
    """O_DIRECT reads of one file, for which the caller has the descriptor `cached` open; any thread.

    Does nothing if the file system or the kernel does not support them.
    """

    def __init__(self, data: Path, cached: int) -> None:
        self._cached = cached
        try:
            self._direct: int | None = os.open(data, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            self._direct = None
        self._syscall = ctypes.CDLL(None).syscall

    def close(self) -> None:
        if self._direct is not None:
            os.close(self._direct)

    def pays_off(self, offset: int, length: int) -> bool:
        """Whether these bytes are read faster directly: many, and less than half of them in the page cache."""
        if self._direct is None or length < MIN_DIRECT_BYTES:
            return False
        asked, found = _Range(offset, length), _CacheStat()
        pointers = ctypes.byref(asked), ctypes.byref(found)
        if self._syscall(ctypes.c_long(_CACHESTAT), ctypes.c_int(self._cached), *pointers, ctypes.c_int(0)) != 0:
            return False  # an older kernel, or a file of another user
        return bool(2 * found.cached * mmap.PAGESIZE < length)

    def read(self, buffer: memoryview, offset: int, num_bytes: int) -> int:
        """Read from an aligned `offset` into the start of `buffer`, from `aligned_buffer`; returns how many bytes.

        Fewer than `num_bytes` at the end of the file, or 0 if direct reads turn out to be refused: the caller reads the
        rest through the page cache. OSError if the disk fails.
        """
        if self._direct is None:
            return 0
        try:
            return os.preadv(self._direct, [buffer[: round_up(num_bytes)]], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            log.debug("no direct reads: %s", error)
            return 0


class SlotFile:
    """Reads and writes slots, and gives their space back; any thread, but none uses a slot that is being written.

    OSError for I/O errors, a full disk, or a limit. Which slots are in use is known in slots.py.
    """

    def __init__(self, data: Path, slot_bytes: int, *, writable: bool, create: bool = False) -> None:
        self._data, self.slot_bytes = data, slot_bytes
        self._file = os.open(
            data, (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT if create else 0), PRIVATE_FILE_MODE
        )
        # Only the writer's process knows when slots are written.
        self._direct = DirectReads(data, self._file) if writable else None
        self._written_s = -math.inf
        system = ctypes.CDLL(None, use_errno=True)
        self._fallocate, self._sync_file_range = system.fallocate, system.sync_file_range

    def close(self) -> None:
        if self._direct is not None:
            self._direct.close()
        os.close(self._file)

    def allocated_bytes(self) -> int:
        """Disk space of the file: holes take none."""
        return os.fstat(self._file).st_blocks * _STAT_BLOCK_BYTES

    def read(self, offset: int, num_bytes: int, buffer: memoryview) -> None:
        """Fill the first `num_bytes` of `buffer`, aligned memory in whole blocks; zeros beyond the end of the file."""
        done = 0
        is_quiet = time.monotonic() - self._written_s > _QUIET_S
        if self._direct is not None and is_quiet and self._direct.pays_off(offset, num_bytes):
            done = self._direct.read(buffer, offset, num_bytes)
        while done < num_bytes:
            got = os.preadv(self._file, [buffer[done:num_bytes]], offset + done)
            if not got:  # cut off: the page does not verify, is deleted, and can be stored again
                buffer[done:num_bytes] = bytes(num_bytes - done)
                return
            done += got

    def write(self, slot: int, payload: bytes | memoryview) -> None:
        """Write to the start of a slot. The data is on disk after the next `sync`; until then, and for ever if that
        fails, reads are not direct."""
        view, start = memoryview(payload), slot * self.slot_bytes
        self._written_s = math.inf
        for piece in range(0, len(view), _WRITE_BACK_BYTES):
            done, end = piece, min(piece + _WRITE_BACK_BYTES, len(view))
            while done < end:
                done += os.pwrite(self._file, view[done:end], start + done)
            # Only a hint: `sync` reports errors.
            self._sync_file_range(
                ctypes.c_int(self._file),
                ctypes.c_int64(start + piece),
                ctypes.c_int64(end - piece),
                ctypes.c_uint(_START_WRITE_BACK),
            )

    def punch_hole(self, slot: int, start: int = 0) -> None:
        """Free the disk space of a slot from byte `start` on. Does nothing if the file system has no holes."""
        offset, length = ctypes.c_int64(slot * self.slot_bytes + start), ctypes.c_int64(self.slot_bytes - start)
        if self._fallocate(ctypes.c_int(self._file), ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE), offset, length) != 0:
            reason = ctypes.get_errno()
            if reason not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(reason, os.strerror(reason), str(self._data))

    def can_punch_holes(self) -> bool:
        """Whether the file system frees the space of holes; tried on the first slot, which must not be in use."""
        try:
            self.write(0, bytes(ALIGNMENT))
            self.sync()
            before_bytes = self.allocated_bytes()
            self.punch_hole(0)
            return self.allocated_bytes() < before_bytes
        finally:
            self.truncate(0)

    def num_slots(self) -> int:
        """How many slots the file reaches into."""
        return -(-os.fstat(self._file).st_size // self.slot_bytes)

    def truncate(self, num_slots: int) -> None:
        """Remove what lies after the first `num_slots`."""
        end = num_slots * self.slot_bytes
        if os.fstat(self._file).st_size > end:
            os.ftruncate(self._file, end)

    def probe(self, num_slots: int) -> None:
        """Find out whether the disk takes another slot after the first `num_slots`, or 64 MiB of a longer one. The file
        stays as it was."""
        try:
            self.write(num_slots, bytes(min(self.slot_bytes, _PROBE_BYTES)))
            self.sync()
        finally:
            self.truncate(num_slots)

    def sync(self) -> None:
        """Return when everything written is on disk."""
        try:
            os.fdatasync(self._file)
        finally:
            self._written_s = time.monotonic()
