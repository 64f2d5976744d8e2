"""The file with the payloads of one page size: slots of equal length.

Written through the kernel's memory, and the kernel is told after each piece to write it on to the medium: the next is
copied meanwhile, and what was written lately can be read from there. Read past it where it does not have the bytes
(direct_read), but not while slots are written: file systems like ext4 hold up a write until all direct reads of the
file have ended, and those that come later until it has. A slot that holds less than its size, or nothing, is a hole
behind that. Owns the file's descriptors; which slots are in use is in slots.py. May import numpy, the standard library,
base, direct_read, directory and header.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from hicache.storage.base import PageBuffer
from hicache.storage.direct_read import DirectReads
from hicache.storage.directory import PRIVATE_FILE_MODE
from hicache.storage.header import HEADER_BYTES
from hicache.storage.memory import ALIGNMENT

_PROBE_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_QUIET_S = 0.25  # without a write, until reads are direct again
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of linux/falloc.h
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h
_BLOCK_BYTES = 512  # the unit of st_blocks


def whole_blocks(num_bytes: int) -> int:
    """`num_bytes` rounded up to the blocks in which slots are counted, emptied and read directly."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def is_aligned(page: PageBuffer) -> bool:
    """Whether a page can be read directly to where it is."""
    return not (page.ctypes.data | page.nbytes) % ALIGNMENT


@dataclass(frozen=True)
class Apart:
    """A value in two parts, its header and its payload."""

    head: bytes
    payload: bytes | memoryview

    def __len__(self) -> int:
        """Length of the value as one."""
        return len(self.head) + len(self.payload)

    @classmethod
    def of(cls, value: bytes | memoryview) -> Apart:
        """The parts of a value that is whole."""
        view = memoryview(value)
        return cls(bytes(view[:HEADER_BYTES]), view[HEADER_BYTES:])


class SlotFile:
    """Reads, writes and empties slots; any thread, but nothing is done to a slot that is being written.

    OSError for what the medium, the file's length or a limit refuses.
    """

    def __init__(self, data: Path, slot_bytes: int, *, writable: bool, create: bool = False) -> None:
        self._data, self.slot_bytes = data, slot_bytes
        self._file = os.open(
            data, (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT if create else 0), PRIVATE_FILE_MODE
        )
        # Another process than the writer does not know when it writes.
        self._direct = DirectReads(data, self._file) if writable else None
        self._written_s = -math.inf
        system = ctypes.CDLL(None, use_errno=True)
        self._fallocate, self._sync_file_range = system.fallocate, system.sync_file_range

    def close(self) -> None:
        if self._direct is not None:
            self._direct.close()
        os.close(self._file)

    def allocated_bytes(self) -> int:
        """What the file takes of the medium: holes take nothing."""
        return os.fstat(self._file).st_blocks * _BLOCK_BYTES

    def read(self, offset: int, num_bytes: int, room: memoryview) -> None:
        """Fill the first `num_bytes` of `room`, aligned memory of as many whole blocks; zeros behind the end."""
        done = 0
        is_quiet = time.monotonic() - self._written_s > _QUIET_S
        if self._direct is not None and is_quiet and self._direct.wants(offset, num_bytes):
            done = self._direct.read(room, offset, num_bytes)
        while done < num_bytes:
            got = os.preadv(self._file, [room[done:num_bytes]], offset + done)
            if not got:  # what was cut off does not come back, and is not to keep its page from being stored again
                room[done:num_bytes] = bytes(num_bytes - done)
                return
            done += got

    def write(self, slot: int, payload: bytes | memoryview) -> None:
        """Write to the start of a slot. It reaches the medium with the next `sync`, or before; until then, and where
        this fails for ever, reads are not direct."""
        view, start = memoryview(payload), slot * self.slot_bytes
        self._written_s = math.inf
        for piece in range(0, len(view), _PIECE_BYTES):
            done, end = piece, min(piece + _PIECE_BYTES, len(view))
            while done < end:
                done += os.pwrite(self._file, view[done:end], start + done)
            # A hint: what becomes of it, `sync` tells.
            self._sync_file_range(
                ctypes.c_int(self._file),
                ctypes.c_int64(start + piece),
                ctypes.c_int64(end - piece),
                ctypes.c_uint(_START_WRITING),
            )

    def empty(self, slot: int, start: int = 0) -> None:
        """Give the medium back what a slot has from byte `start` on. Does nothing where holes cannot be made."""
        offset, length = ctypes.c_int64(slot * self.slot_bytes + start), ctypes.c_int64(self.slot_bytes - start)
        if self._fallocate(ctypes.c_int(self._file), ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE), offset, length) != 0:
            reason = ctypes.get_errno()
            if reason not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(reason, os.strerror(reason), str(self._data))

    def can_empty(self) -> bool:
        """Whether slots become holes here, tried on the first one, which must not be in use."""
        try:
            self.write(0, bytes(ALIGNMENT))
            self.sync()
            before_bytes = self.allocated_bytes()
            self.empty(0)
            return self.allocated_bytes() < before_bytes
        finally:
            self.cut(0)

    def num_slots(self) -> int:
        """How many slots the file reaches into."""
        return -(-os.fstat(self._file).st_size // self.slot_bytes)

    def cut(self, num_slots: int) -> None:
        """Remove what lies behind the first `num_slots`."""
        end = num_slots * self.slot_bytes
        if os.fstat(self._file).st_size > end:
            os.ftruncate(self._file, end)

    def probe(self, num_slots: int) -> None:
        """Find out whether the medium takes another slot behind the first `num_slots`, or 64 MiB of a longer one. The
        file stays as it was."""
        try:
            self.write(num_slots, bytes(min(self.slot_bytes, _PROBE_BYTES)))
            self.sync()
        finally:
            self.cut(num_slots)

    def sync(self) -> None:
        """Return when all that was written is on the medium."""
        try:
            os.fdatasync(self._file)
        finally:
            self._written_s = time.monotonic()
