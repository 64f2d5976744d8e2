"""The frames between an engine and a store process, and their connection, a stream socket of one machine.

    All numbers are little-endian.

    frame     length u32 of kind and body, kind u8, body
    keys      count u32, count lengths u16, the bytes of all keys;
    pages     memory u32, page_bytes u32, count u32, count offsets u64;
    verdicts  count u32, count bytes 0 or 1;
    keep      deadline; keys;
    jobs      count u32; of each: ticket, batch, queue class, deadline, a number, its number of keys; pages; keys;
    outcome   ticket, batch, a flag, a number, seconds; verdicts; keys; for a failed write the reason, in UTF-8.

Pages lie in shared memory. A frame `MEMORY` has the number and the size of a memory; the descriptor of the memory is
attached to the first byte of the frame (SCM_RIGHTS). Memory 0 is the address space of the client, for a server in the
same process, and offsets in memory 0 are addresses. `OPEN` has the descriptor of the shared status (see
`shared_memory`). `JOIN` has the descriptor of a socket whose other end belongs to a new client. `NOTE` has the bytes
that the store keeps for clients, at most `MAX_NOTE_BYTES`; `OPENED` returns these bytes as hexadecimal digits. Bodies
of OPEN, OPENED and FAILED are JSON, because they are sent only once.

Client and server check every length in a frame. An invalid frame raises `FrameError` or another ValueError, and the
connection ends.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import math
import select
import socket
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

VERSION = 9
MAX_FRAME_BYTES = 64 << 20
MAX_NOTE_BYTES = 1024
_MAX_SHORT_BYTES = 1 << 20  # maximum length of a frame without keys
_MAX_ERROR_CHARS = 1 << 14
_RECEIVE_BYTES = 1 << 16  # the allocator would map and unmap a larger buffer in each call
_WAIT_S = 0.5
OWN_MEMORY = 0  # the number of the address space that client and server share when they are one process
_HEAD = struct.Struct("<IB")
_COUNT = struct.Struct("<I")
_PAGES = struct.Struct("<III")
# The deadline of a lease is the time at which the lease ends. The number of a find is the length of `FindJob.keys`; the
# other keys are `others`. The number 1 of a remove means all pages, and of a write that the write is costly.
_JOB = struct.Struct("<qibdII")
_CANCEL = struct.Struct("<qi")
_KEEP = struct.Struct("<d")
# The flag of a find says whether the find was answered, of a lease whether the lease has begun, and of a stalled job
# whether the job is a write. The number is a number of pages.
_OUTCOME = struct.Struct("<qiBId")
_MEMORY = struct.Struct("<IQ")
_ERRORS: dict[str, Callable[[str], StoreError]] = {
    error.__name__: error for error in (StoreCorrupt, StoreLocked, StoreMismatch, StoreUnavailable)
}


class FrameError(ValueError):
    """The bytes are not a frame of this version."""


class Kind(enum.IntEnum):
    """Kinds of frames. The client sends the kinds below 32, and the server sends the kinds from 32 on."""

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
    """Encode keys. Raises StoreError unless each key has 1 to `MAX_KEY_BYTES` bytes."""
    lengths = list(map(len, keys))
    if keys and not 1 <= min(lengths) <= max(lengths) <= MAX_KEY_BYTES:
        raise StoreError(f"a key has 1 to {MAX_KEY_BYTES} bytes")
    return b"".join((_COUNT.pack(len(keys)), array("H", lengths).tobytes(), *keys))


def of_jobs(jobs: Sequence[Job], pages: Pages) -> bytes:
    """Encode one or more jobs of one class. `pages`: the locations of the pages of all jobs."""
    kind, heads, all_keys, deadline_s, number = Kind.WRITE, list[bytes](), list[bytes](), math.inf, 0
    for job in jobs:
        keys = job.keys or ()
        if isinstance(job, FindJob):
            kind, keys, number = Kind.FIND, (*job.keys, *job.others), len(job.keys)
        elif isinstance(job, ReadJob):
            kind, deadline_s = Kind.READ, job.deadline_s
        elif isinstance(job, LeaseJob):
            kind, deadline_s = Kind.LEASE, job.until_s
        elif isinstance(job, RemoveJob):
            kind, number = Kind.REMOVE, job.keys is None
        else:
            number = job.is_costly
        heads.append(_JOB.pack(job.ticket, job.batch, job.queue_class, deadline_s, number, len(keys)))
        all_keys += keys
    places = _PAGES.pack(pages.memory, pages.page_bytes, len(pages.offsets)) + pages.offsets.tobytes()
    return frame(kind, _COUNT.pack(len(jobs)), *heads, places, keys_of(all_keys))


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
    """Encode an outcome. `why`: if the store did not store all pages of a write, the reason."""
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
    """Parses the body of one frame from its start. Raises `FrameError` if the body is too short."""

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
            raise FrameError("a key is empty or too long")
        joined = self.take(sum(lengths))
        ends = itertools.accumulate(lengths)
        return tuple(joined[end - length : end] for end, length in zip(ends, lengths, strict=True))

    def keep(self) -> tuple[tuple[bytes, ...], float]:
        """Parse KEEP: the keys and their deadline."""
        (deadline_s,) = self.fields(_KEEP)
        if math.isnan(deadline_s):
            raise FrameError("a deadline that is no number")
        return self.keys(), deadline_s

    def jobs(self, kind: Kind, pages_at: Callable[[Pages], Sequence[PageBytes]]) -> list[Job]:
        """Parse jobs. `pages_at` returns the pages of reads or writes for given locations."""
        (count,) = self.fields(_COUNT)
        heads = [*_JOB.iter_unpack(self.take(count * _JOB.size))]
        memory, page_bytes, num_pages = self.fields(_PAGES)
        places, all_keys = Pages(memory, page_bytes, array("Q", self.take(8 * num_pages))), self.keys()
        has_pages = kind in (Kind.READ, Kind.WRITE)
        if sum([head[-1] for head in heads]) != len(all_keys) or (has_pages and num_pages != len(all_keys)):
            raise FrameError(f"{count} jobs with {num_pages} pages and {len(all_keys)} keys")
        pages, jobs, end = pages_at(places) if has_pages else (), list[Job](), 0
        for ticket, batch, queue_class, deadline_s, number, num_keys in heads:
            if math.isnan(deadline_s):
                raise FrameError("a deadline that is no number")
            start, end = end, end + num_keys
            keys = all_keys[start:end]
            if kind is Kind.FIND:
                jobs.append(FindJob(ticket, keys[:number], ReadClass(queue_class), keys[number:], batch))
            elif kind is Kind.LEASE:
                if num_keys != 1:
                    raise FrameError(f"a lease of {num_keys} keys")
                jobs.append(LeaseJob(ticket, keys[0], deadline_s, batch))
            elif kind is Kind.REMOVE:
                jobs.append(RemoveJob(ticket, None if number else keys, batch))
            elif kind is Kind.WRITE:
                jobs.append(WriteJob(ticket, keys, pages[start:end], batch, bool(number)))
            else:
                cancelled = threading.Event()
                job = ReadJob(ticket, batch, keys, pages[start:end], cancelled, deadline_s, ReadClass(queue_class))
                jobs.append(job)
        return jobs

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
            raise FrameError(f"the body of a frame is not JSON: {error}") from None

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
        raise FrameError(f"a frame of kind {kind} has no outcome")


class ConnectionEnded(Exception):
    """The other end has closed the connection, so the other end no longer uses shared memory."""


class Connection:
    """One end of a stream of frames. Sending and receiving do not block. One thread owns the connection. All methods
    except `finish` and `close` raise `ConnectionEnded` if the connection has ended.

    `unsent`: bytes that the socket has not accepted yet. Each `send` tries to send them again.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.unsent = bytearray()
        self._buffer = bytearray()  # received bytes of a frame that is not complete
        self._read: Callable[[int], bytes] = connected.recv

    def send(self, data: bytes = b"") -> None:
        self.unsent += data
        if self.unsent:
            try:
                sent = self.socket.send(self.unsent)
            except BlockingIOError:
                return
            except OSError as error:
                self.unsent.clear()
                raise ConnectionEnded(str(error)) from error
            del self.unsent[:sent]

    def send_with(self, descriptor: int, data: bytes) -> None:
        """Send a frame with a descriptor. The descriptor is attached to the first byte of the frame, so all unsent
        bytes are sent before. May block."""
        while self.unsent:
            _wait([(self.socket, select.POLLOUT)], _WAIT_S)
            self.send()
        try:
            sent = socket.send_fds(self.socket, [data], [descriptor])
        except OSError as error:
            raise ConnectionEnded(str(error)) from error
        self.unsent += data[sent:]

    def receive(self) -> Iterator[tuple[Kind, Body]]:
        """Receive all frames that have arrived. Also raises ValueError, for invalid frames."""
        is_more = True
        while is_more and (data := self.take()):
            yield from self.feed(data)
            is_more = len(data) == _RECEIVE_BYTES  # a shorter read has emptied the socket

    def feed(self, data: bytes) -> Iterator[tuple[Kind, Body]]:
        """Append received bytes and yield the frames that are now complete."""
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

    def take(self) -> bytes:
        """Receive some bytes; b"" if none have arrived."""
        try:
            data = self._read(_RECEIVE_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise ConnectionEnded(str(error)) from error
        if not data:
            raise ConnectionEnded("the connection is closed")
        return data

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until bytes arrive, or unsent bytes can be sent. Another thread may use the connection
        during this call."""
        wait_for_any([self], seconds)

    def finish(self) -> None:
        """Stop sending. The other end closes the connection when it has finished the jobs that it received."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.socket.close()

    @property
    def events(self) -> int:
        """The events of `select.poll` that `wait` waits for."""
        return select.POLLIN | (select.POLLOUT if self.unsent else 0)


def wait_for_any(connections: Sequence[Connection], seconds: float) -> None:
    """Wait at most `seconds` until an open connection has received bytes, or can send its unsent bytes."""
    _wait([(connection.socket, connection.events) for connection in connections], seconds)


def _wait(sockets: Sequence[tuple[socket.socket, int]], seconds: float) -> None:
    """Wait at most `seconds` for the events of any open socket."""
    poller, num_open = select.poll(), 0  # select() accepts only descriptors below 1024
    for one, events in sockets:
        if (descriptor := one.fileno()) >= 0:
            poller.register(descriptor, events)
            num_open += 1
    if num_open:
        poller.poll(1e3 * seconds)
