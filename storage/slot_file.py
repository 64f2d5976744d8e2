"""The files with the pages of a store. A file has slots of equal length. Each slot has a block that names its page,
then the payload.

    [ 0,  4)  magic, b"HKVS"
    [ 4,  6)  u16 version, 1
    [ 6,  8)  u16 length k of the key, 1 to 511
    [ 8, 16)  u64 sequence, below 2^63: of two slots with the same key, the higher sequence is valid
    [16, 68)  header of the value (header.py)
    next k    the key
    next 8    u64 XXH3_64 over all of the above; then zeros up to 4096, where the payload begins

Slots are allocated in segments and written in place. One O_DIRECT call reads or writes the blocks and payloads of pages
in consecutive slots. O_DIRECT avoids a copy through the kernel's page cache, and on ext4 a lock for which readers would
wait. After an interrupted write, the header in the block does not match the payload, so the page is a miss.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import xxhash

from hicache.storage.base import PageBuffer
from hicache.storage.directory import REFUSALS, open_private, slots_file, slots_files, sync_directory, synced
from hicache.storage.header import HEADER_BYTES
from hicache.storage.memory import ALIGNMENT, Scratch, aligned_buffer, round_up

T = TypeVar("T")

MAGIC, VERSION = b"HKVS", 1
BLOCK_BYTES = 4096
MAX_KEY_BYTES = 511
_LENGTHS = 16  # maximum number of slot lengths for pages of one size
MAX_RUN = 256  # maximum slots of one read or write: a slot has at most 4 buffers, the kernel accepts 1024
_END_SEQUENCE = 1 << 63  # all sequence numbers are lower
_START = struct.Struct(f"<4sHHQ{HEADER_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # constants of linux/falloc.h
_MAX_OFFSET = 1 << 40  # offset beyond the end of every slot file, within the limits of file systems
_STAT_BLOCK_BYTES = 512  # the unit of st_blocks
_NO_BLOCK = aligned_buffer(BLOCK_BYTES)[:BLOCK_BYTES]
_blocks, _gap, _joined = Scratch(), Scratch(), Scratch()


class SlotBlock(NamedTuple):
    """The first block of a slot: key, sequence and value header of its page."""

    key: bytes
    sequence: int
    header: bytes

    def pack(self) -> bytes:
        content = _START.pack(MAGIC, VERSION, len(self.key), self.sequence, self.header) + self.key
        return (content + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(content))).ljust(BLOCK_BYTES, b"\0")

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> SlotBlock | None:
        """Parse a block. Returns None if the block names no page or is damaged."""
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


class SlotLength(NamedTuple):
    """Page size and slot length of the slots of one file, in bytes."""

    page_bytes: int
    slot_bytes: int

    @classmethod
    def of(cls, page_bytes: int, payload_bytes: int) -> SlotLength:
        """Return the slot length for a payload. The slot has one block, plus the payload rounded up to a multiple of
        1/16 of the page; this unit is itself rounded up to blocks. A slot never has more blocks than the page or the
        payload needs."""
        rounded_bytes = round_up(payload_bytes, round_up(-(-page_bytes // _LENGTHS)))
        return cls(page_bytes, BLOCK_BYTES + min(rounded_bytes, round_up(max(page_bytes, payload_bytes))))


class SlotRead(NamedTuple):
    """A slot to read. The first `payload_bytes` of its payload are read into `payload`, which is aligned memory of a
    multiple of blocks."""

    slot: int
    payload: memoryview
    payload_bytes: int


class SlotWrite(NamedTuple):
    """A page to write. An unaligned `payload` is copied before it is written."""

    slot: int
    block: bytes
    payload: memoryview


def is_aligned(page: PageBuffer) -> bool:
    """Return whether a page can be read directly into its memory, because its address and length are multiples of a
    block."""
    return not (page.ctypes.data | page.nbytes) % ALIGNMENT


def runs(items: Iterable[T], slot_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Divide `items`, sorted by slot, into runs of consecutive slots."""
    for _, run in groupby(enumerate(items), key=lambda at: slot_of(at[1]) - at[0]):
        yield [item for _, item in run]


class SlotFile:
    """Reads, writes, allocates and frees the slots of one file. Any thread may read; only the writer thread calls
    methods that change the file.

    Raises OSError for I/O errors, a full disk, or a limit. slots.py tracks which slots are in use.
    """

    def __init__(self, data: Path, slot_bytes: int) -> None:
        self._data = data
        self.slot_bytes = slot_bytes
        self._num_writes = self._num_synced = 0
        self._system = ctypes.CDLL(None, use_errno=True)
        with contextlib.ExitStack() as held:
            self._file = self._direct = held.enter_context(io.FileIO(data, "r+", opener=open_private))
            with contextlib.suppress(OSError):  # the file system may lack direct access
                self._direct = held.enter_context(io.FileIO(data, "r+", opener=_open_direct))
            self.has_holes = self._punch(_MAX_OFFSET, BLOCK_BYTES)
            self._held = held.pop_all()

    def close(self) -> None:
        self._held.close()

    def disk_bytes(self) -> int:
        """Return the disk space of the file in bytes. Holes are not counted."""
        return os.fstat(self._file.fileno()).st_blocks * _STAT_BLOCK_BYTES

    def num_slots(self) -> int:
        """Return the length of the file in slots, rounded up."""
        return -(-os.fstat(self._file.fileno()).st_size // self.slot_bytes)

    def read(self, run: Sequence[SlotRead]) -> list[memoryview | None]:
        """Read consecutive slots in one call. Returns the block of each slot, valid until this thread reads again. The
        block is None if the file ends before the end of the slot's payload."""
        memory, parts, ends, at = _blocks.take(len(run) * BLOCK_BYTES), list[memoryview](), list[int](), 0
        blocks = [memory[n * BLOCK_BYTES : (n + 1) * BLOCK_BYTES] for n in range(len(run))]
        for block, one in zip(blocks, run, strict=True):
            full_bytes = BLOCK_BYTES + round_up(one.payload_bytes)
            parts += [block, one.payload[: full_bytes - BLOCK_BYTES]]
            parts.append(_gap.take(self.slot_bytes - full_bytes)[: self.slot_bytes - full_bytes])
            ends.append(at + BLOCK_BYTES + one.payload_bytes)
            at += self.slot_bytes
        done = self._transfer(os.preadv, parts[:-1], run[0].slot * self.slot_bytes)
        return [block if end <= done else None for block, end in zip(blocks, ends, strict=True)]

    def read_block(self, slot: int) -> SlotBlock | None:
        """Read the block of a slot. Returns None if the block names no page."""
        block = _blocks.take(BLOCK_BYTES)[:BLOCK_BYTES]
        done = self._transfer(os.preadv, [block], slot * self.slot_bytes)
        return SlotBlock.unpack(block) if done == BLOCK_BYTES else None

    def write(self, run: Sequence[SlotWrite]) -> None:
        """Write pages to consecutive slots in one call. The pages are on disk after the next `sync`."""
        bodies = [_aligned_part(one.payload) for one in run]
        used = [BLOCK_BYTES + round_up(len(one.payload)) for one in run]
        if max(used) > self.slot_bytes:
            raise ValueError(f"{max(used) - BLOCK_BYTES} bytes do not fit a slot of {self.slot_bytes}")
        used[:-1] = [self.slot_bytes] * (len(run) - 1)
        joined = _joined.take(sum(used) - sum(map(len, bodies)))
        parts, start, end = list[memoryview](), 0, 0
        for one, body, length in zip(run, bodies, used, strict=True):
            joined[end : end + BLOCK_BYTES] = one.block
            end += BLOCK_BYTES
            if body:
                parts += [joined[start:end], body]
                start = end
            rest = one.payload[len(body) :]
            joined[end : end + len(rest)] = rest
            end += length - BLOCK_BYTES - len(body)
        self._write([*parts, joined[start:end]], run[0].slot)

    def erase(self, slots: Iterable[int]) -> None:
        """Overwrite the block of each slot with zeros, so that no block names a page."""
        for slot in slots:
            self._write([_NO_BLOCK], slot)

    def allocate(self, slots: Iterable[int]) -> None:
        """Allocate disk space for `slots`, which are in ascending order. If the file system cannot allocate in advance,
        each write allocates its space."""
        descriptor = self._file.fileno()
        for run in runs(slots, int):
            start, num_bytes = run[0] * self.slot_bytes, len(run) * self.slot_bytes
            try:
                os.posix_fallocate(descriptor, start, num_bytes)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                os.ftruncate(descriptor, max(os.fstat(descriptor).st_size, start + num_bytes))

    def punch(self, slots: Iterable[int]) -> bool:
        """Free the disk space of `slots`, which are in ascending order and become holes. If the file system has no
        holes, only erase the blocks, and return False."""
        if not self.has_holes:
            self.erase(slots)
            return False
        for run in runs(slots, int):
            self._punch(run[0] * self.slot_bytes, len(run) * self.slot_bytes)
        return True

    def truncate(self, num_slots: int) -> None:
        """Cut the file after its first `num_slots` slots."""
        end = num_slots * self.slot_bytes
        if os.fstat(self._file.fileno()).st_size > end:
            os.ftruncate(self._file.fileno(), end)

    def sync(self) -> None:
        """Block until all writes that returned before this call are on disk. Any thread may call this method."""
        num_writes = self._num_writes
        if num_writes > self._num_synced:
            synced(os.fdatasync, self._file.fileno(), self._data.parent)
            self._num_synced = num_writes

    def _punch(self, offset: int, num_bytes: int) -> bool:
        """Make a range of bytes a hole. Returns False if the file system has no holes."""
        mode, where = ctypes.c_int(_KEEP_SIZE | _PUNCH_HOLE), (ctypes.c_int64(offset), ctypes.c_int64(num_bytes))
        if not self._system.fallocate(ctypes.c_int(self._file.fileno()), mode, *where):
            return True
        reason = ctypes.get_errno()
        if reason not in REFUSALS and not (reason == errno.EFBIG and offset == _MAX_OFFSET):
            raise OSError(reason, os.strerror(reason), str(self._data))
        return False

    def _write(self, parts: Sequence[memoryview], slot: int) -> None:
        self._transfer(os.pwritev, parts, slot * self.slot_bytes)
        self._num_writes += 1  # counted last: a sync that begins during the write may miss the write

    def _transfer(self, call: Callable[..., int], parts: Sequence[memoryview], start: int) -> int:
        """Read or write all parts from offset `start` on, with O_DIRECT if possible. Returns the number of transferred
        bytes, which is less than requested if the file ends first."""
        file, done, left = self._direct, 0, [part for part in parts if part]
        while left:
            try:
                moved = call(file.fileno(), left, start + done)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or file is self._file:
                    raise
                file = self._file  # O_DIRECT refuses unaligned memory, and the unaligned rest of a part
                continue
            if not moved:
                break
            done += moved
            drop_front(left, moved)
        return done


def drop_front(parts: list[memoryview], num_bytes: int) -> None:
    """Remove the first `num_bytes` bytes, which a call has read or written, from the parts of a transfer."""
    while parts and num_bytes >= len(parts[0]):
        num_bytes -= len(parts.pop(0))
    if num_bytes:
        parts[0] = parts[0][num_bytes:]


class SlotFiles(dict[SlotLength, SlotFile]):
    """The open slot files of a store, by slot length. A file exists for each slot length that a page has needed so far.
    Any thread may look up files, but only the writer creates them. Raises OSError if a file cannot be opened."""

    def __init__(self, path: Path, page_sizes: Collection[int]) -> None:
        super().__init__()
        self._path = path
        self._held = contextlib.ExitStack()
        try:
            for length in slot_lengths(path):
                longest = SlotLength.of(length.page_bytes, max(1, length.slot_bytes - BLOCK_BYTES))
                if length.page_bytes in page_sizes and length == longest:
                    self._open(length)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._held.close()

    def make(self, length: SlotLength) -> SlotFile:
        """Create and open the file for a slot length; its directory entry is synced."""
        file = self._open(length)
        sync_directory(self._path)
        return file

    def disk_bytes(self) -> int:
        return sum(file.disk_bytes() for file in list(self.values()))

    def num_slots(self) -> int:
        return sum(file.num_slots() for file in self.values())

    def _open(self, length: SlotLength) -> SlotFile:
        file = self._held.enter_context(
            contextlib.closing(SlotFile(slots_file(self._path, *length), length.slot_bytes))
        )
        self[length] = file
        return file


def slot_lengths(path: Path) -> list[SlotLength]:
    """Return the slot lengths of the slot files in a directory, from their names, sorted."""
    names = (re.fullmatch(r"pages-(\d+)-(\d+)\.dat", file.name) for file in slots_files(path))
    return sorted(SlotLength(*map(int, name.groups())) for name in names if name)


def _aligned_part(payload: memoryview) -> memoryview:
    """Return the part of a payload that can be written without a copy: its complete blocks. The part is empty if the
    memory is not aligned."""
    is_direct = len(payload) and not np.frombuffer(payload, dtype=np.uint8).ctypes.data % ALIGNMENT
    return payload[: len(payload) // ALIGNMENT * ALIGNMENT if is_direct else 0]


def _open_direct(file: str, flags: int) -> int:
    return os.open(file, flags | os.O_DIRECT)
