"""The frames between an engine and a store process, over a stream socket of one machine.

    frame     length u32 of what follows, kind u8, body; all numbers little-endian
    keys      count u32, count lengths u16, the bytes of all keys
    pages     memory u32, page_bytes u32, count u32, count offsets u64

Memory is shared: `MEMORY` brings its number and size, and with its first byte the descriptor (SCM_RIGHTS). Memory 0 is
the address space of the client and its offsets are addresses, for a server in the same process. `OPEN` brings the
descriptor of the shared numbers (see `status`). Bodies of OPEN, OPENED and FAILED are JSON, for they cross once.

Neither side trusts lengths: what does not parse raises `FrameError`, after which the connection ends.
"""

from __future__ import annotations

import enum
import itertools
import json
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hicache.storage.base import StoreCorrupt, StoreError, StoreLocked, StoreMismatch
from hicache.storage.process.jobs import (
    FindDone,
    FindJob,
    Job,
    ReadClass,
    ReadDone,
    ReadJob,
    RemoveJob,
    Stalled,
    WriteDone,
)
from hicache.storage.slot_file import MAX_KEY_BYTES

VERSION = 1
MAX_FRAME_BYTES = 64 << 20
OWN_MEMORY = 0  # the number of the address space that client and server share when they are one process
_HEAD = struct.Struct("<IB")
_COUNT = struct.Struct("<I")
_PAGES = struct.Struct("<III")
_FIND = struct.Struct("<qibI")  # ticket, batch, queue class, how many of the keys are a prompt's first
_READ = struct.Struct("<qibd")  # ticket, batch, queue class, deadline
_WRITE = struct.Struct("<qi")  # ticket, batch; also of CANCEL
_REMOVE = struct.Struct("<qiB")  # ticket, batch, whether all pages go
_FOUND = struct.Struct("<qiIB")  # ticket, batch, pages, answered
_READ_DONE = struct.Struct("<qiId")  # ticket, batch, asked, seconds
_WRITTEN = struct.Struct("<qidI")  # ticket, batch, seconds, count of verdicts
_STALLED = struct.Struct("<qiB")  # ticket, batch, whether it is a write
_MEMORY = struct.Struct("<IQ")  # number, bytes
_ERRORS = {error.__name__: error for error in (StoreLocked, StoreMismatch)}


class FrameError(ValueError):
    """Bytes that are no frame of this version."""


class Kind(enum.IntEnum):
    """From the client below 32, from the server above."""

    OPEN = 1
    MEMORY = 2
    FIND = 3
    READ = 4
    WRITE = 5
    USED = 6
    CANCEL = 7
    CLOSE = 8
    REMOVE = 9
    OPENED = 32
    FAILED = 33
    FOUND = 34
    READ_DONE = 35
    WRITTEN = 36
    STALLED = 37
    ALIVE = 38
    CLOSED = 39


@dataclass(frozen=True)
class Pages:
    """Pages of one size in one memory, by their offsets in bytes."""

    memory: int
    page_bytes: int
    offsets: array[int]


Outcome: TypeAlias = FindDone | ReadDone | WriteDone | Stalled


def frame(kind: Kind, *parts: bytes) -> bytes:
    return b"".join((_HEAD.pack(1 + sum(map(len, parts)), kind), *parts))


def keys_of(keys: Sequence[bytes]) -> bytes:
    """StoreError for what is no key."""
    if keys and not 1 <= min(map(len, keys)) <= max(map(len, keys)) <= MAX_KEY_BYTES:
        raise StoreError(f"a key has 1 to {MAX_KEY_BYTES} bytes")
    return b"".join((_COUNT.pack(len(keys)), array("H", map(len, keys)).tobytes(), *keys))


def pages_of(pages: Pages) -> bytes:
    return _PAGES.pack(pages.memory, pages.page_bytes, len(pages.offsets)) + pages.offsets.tobytes()


def find(job: FindJob) -> bytes:
    head = _FIND.pack(job.ticket, job.batch, job.queue_class, len(job.keys))
    return frame(Kind.FIND, head, keys_of((*job.keys, *job.others)))


def read(ticket: int, batch: int, queue_class: int, deadline_s: float, keys: Sequence[bytes], pages: Pages) -> bytes:
    return frame(Kind.READ, _READ.pack(ticket, batch, queue_class, deadline_s), pages_of(pages), keys_of(keys))


def write(ticket: int, batch: int, keys: Sequence[bytes], pages: Pages) -> bytes:
    return frame(Kind.WRITE, _WRITE.pack(ticket, batch), pages_of(pages), keys_of(keys))


def remove(job: RemoveJob) -> bytes:
    return frame(Kind.REMOVE, _REMOVE.pack(job.ticket, job.batch, job.keys is None), keys_of(job.keys or ()))


def of_job(job: Job, pages: Pages) -> bytes:
    """`pages`: where those of the job lie."""
    if isinstance(job, FindJob):
        return find(job)
    if isinstance(job, RemoveJob):
        return remove(job)
    if isinstance(job, ReadJob):
        return read(job.ticket, job.batch, job.queue_class, job.deadline_s, job.keys, pages)
    return write(job.ticket, job.batch, job.keys, pages)


def cancel(ticket: int, batch: int) -> bytes:
    return frame(Kind.CANCEL, _WRITE.pack(ticket, batch))


def memory(number: int, num_bytes: int) -> bytes:
    return frame(Kind.MEMORY, _MEMORY.pack(number, num_bytes))


def failed(error: Exception) -> bytes:
    violations = list(error.violations) if isinstance(error, StoreCorrupt) else []
    about = {"error": type(error).__name__, "message": str(error), "violations": violations}
    return frame(Kind.FAILED, json.dumps(about).encode())


def outcome(done: Outcome, *, is_write: bool) -> bytes:
    if isinstance(done, Stalled):
        return frame(Kind.STALLED, _STALLED.pack(done.ticket, done.batch, is_write))
    if isinstance(done, FindDone):
        head = _FOUND.pack(done.ticket, done.batch, done.num_pages, done.answered)
        return frame(Kind.FOUND, head, bytes(done.others))
    if isinstance(done, ReadDone):
        return frame(Kind.READ_DONE, _READ_DONE.pack(done.ticket, done.batch, done.asked, done.seconds), bytes(done.ok))
    head = _WRITTEN.pack(done.ticket, done.batch, done.seconds, len(done.ok))
    return frame(Kind.WRITTEN, head, bytes(done.ok), keys_of(done.removed))


class Body:
    """Reads the body of one frame from its beginning. `FrameError` where it is too short."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def fields(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def take(self, num_bytes: int) -> bytes:
        start, self._at = self._at, self._at + num_bytes
        if num_bytes < 0 or self._at > len(self._data):
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

    def pages(self) -> Pages:
        number, page_bytes, count = self.fields(_PAGES)
        return Pages(number, page_bytes, array("Q", self.take(8 * count)))

    def find(self) -> FindJob:
        ticket, batch, queue_class, num_first = self.fields(_FIND)
        keys = self.keys()
        return FindJob(ticket, keys[:num_first], _class(queue_class), keys[num_first:], batch)

    def read(self) -> tuple[int, int, ReadClass, float, Pages, tuple[bytes, ...]]:
        """Ticket, batch, queue class, deadline, pages, keys."""
        ticket, batch, queue_class, deadline_s = self.fields(_READ)
        return ticket, batch, _class(queue_class), deadline_s, self.pages(), self.keys()

    def write(self) -> tuple[int, int, Pages, tuple[bytes, ...]]:
        ticket, batch = self.fields(_WRITE)
        return ticket, batch, self.pages(), self.keys()

    def remove(self) -> RemoveJob:
        ticket, batch, all_pages = self.fields(_REMOVE)
        keys = self.keys()
        return RemoveJob(ticket, None if all_pages else keys, batch)

    def cancel(self) -> tuple[int, int]:
        ticket, batch = self.fields(_WRITE)
        return ticket, batch

    def memory(self) -> tuple[int, int]:
        number, num_bytes = self.fields(_MEMORY)
        return number, num_bytes

    def failed(self) -> StoreError:
        about = json.loads(self.rest())
        name, message = str(about["error"]), str(about["message"])
        if name == StoreCorrupt.__name__:
            return StoreCorrupt(message, about["violations"])
        return _ERRORS.get(name, StoreError)(message)

    def outcome(self, kind: Kind) -> tuple[Outcome, bool]:
        """What a job came to, and whether it was a write."""
        if kind is Kind.STALLED:
            ticket, batch, is_write = self.fields(_STALLED)
            return Stalled(ticket, batch), bool(is_write)
        if kind is Kind.FOUND:
            ticket, batch, num_pages, answered = self.fields(_FOUND)
            return FindDone(ticket, num_pages, bool(answered), tuple(map(bool, self.rest())), batch), False
        if kind is Kind.READ_DONE:
            ticket, batch, asked, seconds = self.fields(_READ_DONE)
            return ReadDone(ticket, batch, tuple(map(bool, self.rest())), asked, seconds), False
        if kind is not Kind.WRITTEN:
            raise FrameError(f"a frame of kind {kind} brings no outcome")
        ticket, batch, seconds, count = self.fields(_WRITTEN)
        ok = tuple(map(bool, self.take(count)))
        return WriteDone(ticket, ok, batch, seconds, self.keys()), True


class Frames:
    """Cuts a stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, Body]]:
        """The frames that are complete with `data`."""
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= _HEAD.size:
                length, kind = _HEAD.unpack_from(self._buffer, at)
                if not 1 <= length <= MAX_FRAME_BYTES:
                    raise FrameError(f"a frame of {length} bytes")
                end = at + _COUNT.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[at + _HEAD.size : end])
                at = end
                yield _kind(kind), Body(body)
        finally:
            del self._buffer[:at]


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError:
        raise FrameError(f"a frame of unknown kind {number}") from None


def _class(number: int) -> ReadClass:
    try:
        return ReadClass(number)
    except ValueError:
        raise FrameError(f"a job of unknown class {number}") from None
