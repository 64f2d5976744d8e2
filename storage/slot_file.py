"""The file with the pages of one size: slots of equal length, each a block that names the page, then its payload.

    [ 0,  4)  magic, b"HKVS"
    [ 4,  6)  u16 version, 1
    [ 6,  8)  u16 length k of the key, 1 to 511
    [ 8, 16)  u64 sequence, below 2^63: of two slots with one key the higher one counts
    [16, 68)  header of the value (header.py)
    and k     the key
    and 8     u64 XXH3_64 over all of that; zeros up to 4096, where the payload begins

Writes go through the kernel's page cache, and after each piece the kernel is told to start writing it back, so that the
next piece is copied meanwhile and recently written payloads are read from memory. The block is written last, and before
a slot is used again its old one is erased: a process that is killed leaves no block whose payload is not whole. A slot
that holds less than its size, or nothing, is a hole after that. Without holes one that holds nothing begins with zeros.

A read through the page cache page-faults memory for every page and copies the data once more, which takes cores from
decompression. So the kernel is asked (`cachestat`, Linux 6.5) how much of a payload is cached; if that is little, the
payload is read with O_DIRECT. Not while slots are written: file systems like ext4 block a write until all direct reads
of the file have ended, and later reads until the write has.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import math
import mmap
import os
import struct
import time
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import xxhash

from hicache.storage.base import PageBuffer
from hicache.storage.directory import PRIVATE_FILE_MODE
from hicache.storage.header import HEADER_BYTES
from hicache.storage.memory import ALIGNMENT, round_up

MAGIC, VERSION = b"HKVS", 1
BLOCK_BYTES = 4096
MAX_KEY_BYTES = 511
_END_SEQUENCE = 1 << 63  # later pages have higher ones
MIN_DIRECT_BYTES = 256 << 10  # of a payload: for shorter ones a direct read gains nothing
_START = struct.Struct(f"<4sHHQ{HEADER_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
_WRITE_BACK_BYTES = 1 << 20
_QUIET_S = 0.25  # without a write, until reads are direct again
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of linux/falloc.h
_START_WRITE_BACK = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h
_STAT_BLOCK_BYTES = 512  # the unit of st_blocks
_MAX_OFFSET = 1 << 40  # beyond the end of files, within the limits of file systems
_CACHESTAT = 451  # the number of the system call, on all architectures


class SlotBlock(NamedTuple):
    """The first block of a slot: which page it holds."""

    key: bytes
    sequence: int
    header: bytes

    def pack(self) -> bytes:
        content = _START.pack(MAGIC, VERSION, len(self.key), self.sequence, self.header) + self.key
        return (content + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(content))).ljust(BLOCK_BYTES, b"\0")

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> SlotBlock | None:
        """None for what is no such block, or a damaged one."""
        if len(raw) < BLOCK_BYTES:
            return None
        magic, version, key_bytes, sequence, header = _START.unpack_from(raw)
        is_block = magic == MAGIC and version == VERSION and sequence < _END_SEQUENCE
        if not is_block or not 1 <= key_bytes <= MAX_KEY_BYTES:
            return None
        end = _START.size + key_bytes
        if _CHECKSUM.unpack_from(raw, end)[0] != xxhash.xxh3_64_intdigest(raw[:end]):
            return None
        return cls(bytes(raw[_START.size : end]), sequence, header)


def is_aligned(page: PageBuffer) -> bool:
    """Whether a page can be read directly to its memory."""
    return not (page.ctypes.data | page.nbytes) % ALIGNMENT


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    """struct cachestat of linux/mman.h, in pages."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "just_evicted"))


class SlotFile:
    """Reads and writes slots, and gives their space back; any thread reads, one writes.

    OSError for I/O errors, a full disk, or a limit. Which slots are in use is known in slots.py.
    """

    def __init__(self, data: Path, slot_bytes: int, *, writable: bool) -> None:
        self._data, self.slot_bytes = data, slot_bytes
        self._num_writes = self._num_synced = 0
        self._synced_s = -math.inf
        self._system = ctypes.CDLL(None, use_errno=True)
        with contextlib.ExitStack() as held:
            self._file = held.enter_context(io.FileIO(data, "r+" if writable else "r", opener=_open_private))
            self._direct: io.FileIO | None = None
            if writable:  # only the writer's process knows when slots are written
                with contextlib.suppress(OSError):  # a file system without direct reads
                    self._direct = held.enter_context(io.FileIO(data, "r", opener=_open_direct))
            self.has_holes = writable and self._punch(_MAX_OFFSET, BLOCK_BYTES)
            self._held = held.pop_all()

    def close(self) -> None:
        self._held.close()

    def allocated_bytes(self) -> int:
        """Disk space of the file: holes take none."""
        return os.fstat(self._file.fileno()).st_blocks * _STAT_BLOCK_BYTES

    def space_of(self, payload_bytes: int) -> int:
        """Disk space of a slot with such a payload."""
        return BLOCK_BYTES + round_up(payload_bytes) if self.has_holes else self.slot_bytes

    def read(self, slot: int, payload_bytes: int, block: memoryview, payload: memoryview) -> bool:
        """Fill `block`, one aligned block, and the first `payload_bytes` of `payload`; whether the file has them.

        Aligned memory in whole blocks may be read directly.
        """
        start, done, end = slot * self.slot_bytes, 0, BLOCK_BYTES + payload_bytes
        whole = round_up(payload_bytes)
        is_quiet = self._num_writes == self._num_synced and time.monotonic() - self._synced_s > _QUIET_S
        if self._direct is not None and is_quiet and len(payload) >= whole and not self.is_cached(start, end):
            try:
                done = os.preadv(self._direct.fileno(), [block, payload[:whole]], start)
            except OSError as error:
                if error.errno != errno.EINVAL:  # memory or file system that cannot be read so after all
                    raise
        while done < end:
            parts = [block[done:BLOCK_BYTES], payload[max(0, done - BLOCK_BYTES) : payload_bytes]]
            got = os.preadv(self._file.fileno(), parts, start + done)
            if not got:
                return False
            done += got
        return True

    def is_cached(self, offset: int, length: int) -> bool:
        """Whether these bytes are best read through the page cache: few, half of them there, or nobody knows."""
        if length < MIN_DIRECT_BYTES:
            return True
        asked, found = _Range(offset, length), _CacheStat()
        pointers = ctypes.byref(asked), ctypes.byref(found)
        descriptor = ctypes.c_int(self._file.fileno())
        if self._system.syscall(ctypes.c_long(_CACHESTAT), descriptor, *pointers, ctypes.c_int(0)) != 0:
            return True  # an older kernel, or a file of another user
        return bool(2 * found.cached * mmap.PAGESIZE >= length)

    def read_block(self, slot: int) -> SlotBlock | None:
        """The block of a slot; None where there is none."""
        return SlotBlock.unpack(os.pread(self._file.fileno(), BLOCK_BYTES, slot * self.slot_bytes))

    def write(self, slot: int, block: bytes, payload: bytes | memoryview, *, is_hole: bool) -> None:
        """Write a page to a slot. The data is on disk after the next `sync`; until then, and for ever if that fails,
        reads are not direct. `is_hole`: the slot takes no disk space yet."""
        view, start = memoryview(payload), slot * self.slot_bytes
        if BLOCK_BYTES + len(view) > self.slot_bytes:
            raise ValueError(f"{len(view)} bytes do not fit a slot of {self.slot_bytes}")
        if not is_hole:
            self._write(bytes(BLOCK_BYTES), start)
        for at in range(0, len(view), _WRITE_BACK_BYTES):
            self._write(view[at : at + _WRITE_BACK_BYTES], start + BLOCK_BYTES + at)
        self._write(block, start)
        used_bytes = BLOCK_BYTES + round_up(len(view))
        if not is_hole and used_bytes < self.slot_bytes:
            self._punch(start + used_bytes, self.slot_bytes - used_bytes)

    def punch(self, slots: Iterable[int]) -> None:
        """Free the disk space of slots, that of neighbours in one call: each takes a file system a millisecond. If it
        has no holes, only erase their blocks."""
        for _, run in groupby(enumerate(sorted(slots)), key=lambda at: at[1] - at[0]):
            offsets = [slot * self.slot_bytes for _, slot in run]
            if not self._punch(offsets[0], len(offsets) * self.slot_bytes):
                for offset in offsets:
                    self._write(bytes(BLOCK_BYTES), offset)

    def num_slots(self) -> int:
        """How many slots the file reaches into."""
        return -(-os.fstat(self._file.fileno()).st_size // self.slot_bytes)

    def truncate(self, num_slots: int) -> None:
        """Remove what lies after the first `num_slots`."""
        end = num_slots * self.slot_bytes
        if os.fstat(self._file.fileno()).st_size > end:
            os.ftruncate(self._file.fileno(), end)

    def sync(self) -> None:
        """Return when everything written before is on disk; any thread."""
        num_writes = self._num_writes
        if num_writes > self._num_synced:
            os.fdatasync(self._file.fileno())
            self._num_synced, self._synced_s = num_writes, time.monotonic()

    def _punch(self, offset: int, num_bytes: int) -> bool:
        """Make these bytes a hole; False if the file system has none."""
        mode, where = ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE), (ctypes.c_int64(offset), ctypes.c_int64(num_bytes))
        if not self._system.fallocate(ctypes.c_int(self._file.fileno()), mode, *where):
            return True
        reason = ctypes.get_errno()
        if reason not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(reason, os.strerror(reason), str(self._data))
        return False

    def _write(self, data: bytes | memoryview, start: int) -> None:
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self._file.fileno(), view[done:], start + done)
        self._num_writes += 1  # after it: a sync that began meanwhile may have missed it
        where = ctypes.c_int64(start), ctypes.c_int64(len(view))
        # Only a hint: `sync` reports errors.
        self._system.sync_file_range(ctypes.c_int(self._file.fileno()), *where, ctypes.c_uint(_START_WRITE_BACK))


def _open_private(file: str, flags: int) -> int:
    return os.open(file, flags | (os.O_CREAT if flags & os.O_RDWR else 0), PRIVATE_FILE_MODE)


def _open_direct(file: str, flags: int) -> int:
    return os.open(file, flags | os.O_DIRECT)
