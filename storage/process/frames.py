"""The frames between an engine and a store process, over a stream socket of one machine.

    All numbers are little-endian.

    frame     length u32 of kind and body, kind u8, body
    keys      count u32, count lengths u16, the bytes of all keys;
    pages     memory u32, page_bytes u32, count u32, count offsets u64;
    verdicts  count u32, count bytes 0 or 1;
    keep      deadline; keys;
    job       ticket, batch, queue class, deadline, a number; pages; keys;
    outcome   ticket, batch, a flag, a number, seconds; verdicts; keys; for a failed write the reason, in UTF-8.

Memory is shared: `MEMORY` has its number and size, and the descriptor is attached to its first byte (SCM_RIGHTS).
Memory 0 is the address space of the client, for a server in the same process; its offsets are addresses. `OPEN` has the
descriptor of the shared status (see `status`). `JOIN` has that of a socket, whose other end is one more client. `NOTE`
has the bytes that the store keeps for clients, at most `MAX_NOTE_BYTES`; `OPENED` returns them, in hexadecimal digits.
Bodies of OPEN, OPENED and FAILED are JSON, because they are sent only once.

Neither side trusts lengths: an invalid frame raises `FrameError` or another ValueError, and the connection ends.
"""

from __future__ import annotations

import enum
import itertools
import json
import math
import struct
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hicache.storage.base import StoreCorrupt, StoreError, StoreLocked, StoreMismatch, StoreUnavailable
from hicache.storage.process.jobs import (
    FindDone,
    FindJob,
    Job,
    LeaseDone,
    LeaseJob,
    PageBytes,
    QuestionDone,
    ReadClass,
    ReadDone,
    ReadJob,
    RemoveJob,
    Stalled,
    WriteDone,
    WriteJob,
)
from hicache.storage.slot_file import MAX_KEY_BYTES

VERSION = 6
MAX_FRAME_BYTES = 64 << 20
MAX_NOTE_BYTES = 1024
_MAX_SHORT_BYTES = 1 << 20  # limit for frames without keys
_MAX_ERROR_CHARS = 1 << 14
OWN_MEMORY = 0  # the number of the address space that client and server share when they are one process
_HEAD = struct.Struct("<IB")
_COUNT = struct.Struct("<I")
_PAGES = struct.Struct("<III")
# The deadline: of a lease, its end. The number: of a find, how many keys are `keys`, not `others`; 1: remove all pages,
# or a write is costly.
_JOB = struct.Struct("<qibdI")
_CANCEL = struct.Struct("<qi")
_KEEP = struct.Struct("<d")
# The flag: a find is answered, a lease has begun, or a stalled job is a write. The number: of pages.
_OUTCOME = struct.Struct("<qiBId")
_MEMORY = struct.Struct("<IQ")
_ERRORS: dict[str, Callable[[str], StoreError]] = {
    error.__name__: error for error in (StoreCorrupt, StoreLocked, StoreMismatch, StoreUnavailable)
}


class FrameError(ValueError):
    """The bytes are not a frame of this version."""


class Kind(enum.IntEnum):
    """Kinds of frames: below 32 the client sends them, from 32 on the server."""

    OPEN = 1
    MEMORY = 2
    FIND = 3
    READ = 4
    WRITE = 5
    USED = 6
    CANCEL = 7
    CLOSE = 8
    REMOVE = 9
    NOTE = 10
    KEEP = 11
    JOIN = 12
    LEASE = 13
    OPENED = 32
    FAILED = 33
    FOUND = 34
    READ_DONE = 35
    WRITTEN = 36
    STALLED = 37
    ALIVE = 38
    LEASED = 39


# Frames with keys, or with one byte for each key.
_LONG = {
    *(Kind.FIND, Kind.READ, Kind.WRITE, Kind.USED, Kind.KEEP, Kind.REMOVE),
    *(Kind.FOUND, Kind.READ_DONE, Kind.WRITTEN),
}


@dataclass(frozen=True)
class Pages:
    """Offsets in bytes of pages of one size in one shared memory."""

    memory: int
    page_bytes: int
    offsets: array[int]


NO_PAGES = Pages(OWN_MEMORY, 0, array("Q"))
Outcome: TypeAlias = QuestionDone | WriteDone | Stalled


def frame(kind: Kind, *parts: bytes) -> bytes:
    return b"".join((_HEAD.pack(1 + sum(map(len, parts)), kind), *parts))


def keys_of(keys: Sequence[bytes]) -> bytes:
    """Encode keys. StoreError for a key without 1 to `MAX_KEY_BYTES` bytes."""
    lengths = list(map(len, keys))
    if keys and not 1 <= min(lengths) <= max(lengths) <= MAX_KEY_BYTES:
        raise StoreError(f"a key has 1 to {MAX_KEY_BYTES} bytes")
    return b"".join((_COUNT.pack(len(keys)), array("H", lengths).tobytes(), *keys))


def of_job(job: Job, pages: Pages) -> bytes:
    """Encode a job; `pages`: the locations of its pages."""
    kind, keys, deadline_s, number = Kind.WRITE, job.keys or (), math.inf, 0
    if isinstance(job, FindJob):
        kind, keys, number = Kind.FIND, (*job.keys, *job.others), len(job.keys)
    elif isinstance(job, ReadJob):
        kind, deadline_s = Kind.READ, job.deadline_s
    elif isinstance(job, RemoveJob):
        kind, number = Kind.REMOVE, job.keys is None
    elif isinstance(job, LeaseJob):
        kind, deadline_s = Kind.LEASE, job.until_s
    else:
        number = job.is_costly
    head = _JOB.pack(job.ticket, job.batch, job.queue_class, deadline_s, number)
    places = _PAGES.pack(pages.memory, pages.page_bytes, len(pages.offsets)) + pages.offsets.tobytes()
    return frame(kind, head, places, keys_of(keys))


def keep(keys: Sequence[bytes], deadline_s: float) -> bytes:
    return frame(Kind.KEEP, _KEEP.pack(deadline_s), keys_of(keys))


def cancel(ticket: int, batch: int) -> bytes:
    return frame(Kind.CANCEL, _CANCEL.pack(ticket, batch))


def memory(number: int, num_bytes: int) -> bytes:
    return frame(Kind.MEMORY, _MEMORY.pack(number, num_bytes))


def opened(page_sizes: Sequence[int], note: bytes, *, has_remote: bool) -> bytes:
    about = {"page_sizes": page_sizes, "note": note.hex(), "has_remote": has_remote}
    return frame(Kind.OPENED, json.dumps(about).encode())


def failed(error: Exception) -> bytes:
    return frame(Kind.FAILED, json.dumps([type(error).__name__, str(error)[:_MAX_ERROR_CHARS]]).encode())


def outcome(done: Outcome, *, is_write: bool, why: str = "") -> bytes:
    """Encode an outcome; `why`: the reason if the store did not store all pages of a write."""
    flag, number, seconds, ok, removed = is_write, 0, 0.0, tuple[bool, ...](), tuple[bytes, ...]()
    if isinstance(done, FindDone):
        kind, flag, number, ok = Kind.FOUND, done.answered, done.num_pages, done.others
    elif isinstance(done, ReadDone):
        kind, number, seconds, ok = Kind.READ_DONE, done.asked, done.seconds, done.ok
    elif isinstance(done, WriteDone):
        kind, number, seconds, ok, removed = Kind.WRITTEN, done.num_new, done.seconds, done.ok, done.removed
    elif isinstance(done, LeaseDone):
        kind, flag, seconds = Kind.LEASED, done.has_begun, done.until_s
    else:
        kind = Kind.STALLED
    head = _OUTCOME.pack(done.ticket, done.batch, flag, number, seconds)
    text = why[:_MAX_ERROR_CHARS].encode() if kind is Kind.WRITTEN and not all(ok) else b""
    return frame(kind, head, _COUNT.pack(len(ok)), bytes(ok), keys_of(removed), text)


class Body:
    """Parses the body of one frame from its start. `FrameError` if it is too short."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def fields(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def take(self, num_bytes: int) -> bytes:
        start, self._at = self._at, self._at + num_bytes
        if self._at > len(self._data):
            raise FrameError(f"a frame of {len(self._data)} bytes ends before byte {self._at}")
        return self._data[start : self._at]

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at)

    def keys(self) -> tuple[bytes, ...]:
        (count,) = self.fields(_COUNT)
        lengths = array("H", self.take(2 * count))
        if count and not 1 <= min(lengths) <= max(lengths) <= MAX_KEY_BYTES:
            raise FrameError("a key of no length, or too long")
        joined = self.take(sum(lengths))
        ends = itertools.accumulate(lengths)
        return tuple(joined[end - length : end] for end, length in zip(ends, lengths, strict=True))

    def keep(self) -> tuple[tuple[bytes, ...], float]:
        """Parse KEEP: the keys and their deadline."""
        (deadline_s,) = self.fields(_KEEP)
        if math.isnan(deadline_s):
            raise FrameError("a deadline that is no number")
        return self.keys(), deadline_s

    def job(self, kind: Kind, pages_at: Callable[[Pages], tuple[PageBytes, ...]]) -> Job:
        """Parse a job; `pages_at` returns the pages of a read or a write at their locations."""
        ticket, batch, queue_class, deadline_s, number = self.fields(_JOB)
        if math.isnan(deadline_s):
            raise FrameError("a deadline that is no number")
        memory, page_bytes, count = self.fields(_PAGES)
        places, keys = Pages(memory, page_bytes, array("Q", self.take(8 * count))), self.keys()
        if kind is Kind.FIND:
            return FindJob(ticket, keys[:number], ReadClass(queue_class), keys[number:], batch)
        if kind is Kind.LEASE:
            if len(keys) != 1:
                raise FrameError(f"a lease of {len(keys)} keys")
            return LeaseJob(ticket, keys[0], deadline_s, batch)
        if kind is Kind.REMOVE:
            return RemoveJob(ticket, None if number else keys, batch)
        if count != len(keys):
            raise FrameError(f"{count} pages for {len(keys)} keys")
        pages = pages_at(places)
        if kind is Kind.WRITE:
            return WriteJob(ticket, keys, pages, batch, bool(number))
        return ReadJob(ticket, batch, keys, pages, threading.Event(), deadline_s, ReadClass(queue_class))

    def note(self) -> bytes:
        note = self.rest()
        if len(note) > MAX_NOTE_BYTES:
            raise FrameError(f"a note of {len(note)} bytes")
        return note

    def cancel(self) -> tuple[int, int]:
        ticket, batch = self.fields(_CANCEL)
        return ticket, batch

    def memory(self) -> tuple[int, int]:
        number, num_bytes = self.fields(_MEMORY)
        return number, num_bytes

    def json(self) -> object:
        try:
            return json.loads(self.rest())
        except (ValueError, RecursionError) as error:
            raise FrameError(f"a frame brings no JSON: {error}") from None

    def opened(self) -> tuple[tuple[int, ...], bytes, bool]:
        """Parse OPENED: the page sizes of the store in bytes, its note, and whether the process has a remote store."""
        try:
            match self.json():
                case {"page_sizes": [*sizes], "note": str(note), "has_remote": bool(has_remote)}:
                    return tuple(map(int, sizes)), bytes.fromhex(note), has_remote
        except TypeError:
            pass
        raise FrameError("the store process sent an invalid answer: OPENED cannot be parsed")

    def failed(self) -> StoreError:
        match self.json():
            case [str(name), str(message)]:
                return _ERRORS.get(name, StoreError)(message)
        raise FrameError("the store process sent an invalid answer: FAILED cannot be parsed")

    def outcome(self, kind: Kind) -> tuple[Outcome, bool]:
        """Parse the outcome of a job, and whether the job was a write."""
        ticket, batch, flag, number, seconds = self.fields(_OUTCOME)
        (count,) = self.fields(_COUNT)
        ok, removed = tuple(map(bool, self.take(count))), self.keys()
        if kind is Kind.FOUND:
            return FindDone(ticket, number, bool(flag), ok, batch), False
        if kind is Kind.LEASED:
            return LeaseDone(ticket, bool(flag), seconds, batch), False
        if kind is Kind.READ_DONE:
            return ReadDone(ticket, batch, ok, number, seconds), False
        if kind is Kind.WRITTEN:
            return WriteDone(ticket, ok, batch, seconds, removed, number, self.rest().decode(errors="replace")), True
        if kind is Kind.STALLED:
            return Stalled(ticket, batch), bool(flag)
        raise FrameError(f"a frame of kind {kind} brings no outcome")


class Frames:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, Body]]:
        """Append `data` and yield the frames that are now complete."""
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= _HEAD.size:
                length, number = _HEAD.unpack_from(self._buffer, at)
                kind = Kind(number)
                if not 1 <= length <= (MAX_FRAME_BYTES if kind in _LONG else _MAX_SHORT_BYTES):
                    raise FrameError(f"a frame of {length} bytes")
                end = at + _COUNT.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[at + _HEAD.size : end])
                at = end
                yield kind, Body(body)
        finally:
            del self._buffer[:at]
