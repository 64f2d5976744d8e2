"""The engine's client of a store process: it sends jobs and receives outcomes, and never waits for a disk or network.

One thread owns the client. `poll` receives outcomes; without jobs in flight, `poll` makes almost no system calls. The
store process may end or hang at any time:

    OPENING --- process has opened the store ---> OPEN --- process ends, or is silent ---> LOST
       ^                                                                                    |
       +------------------------------- the backoff is over --------------------------------+

In the states LOST and OPENING, the client answers new jobs as misses and failed writes. The process uses shared memory
until the connection ends. So the client answers the jobs in flight only after the connection has ended.
"""

from __future__ import annotations

import enum
import itertools
import logging
import math
import socket
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Generic, TypeVar

from hicache.storage.base import PageBuffer, StoreError, StoreStats, StoreUnavailable, is_lasting
from hicache.storage.process import frames
from hicache.storage.process.frames import NO_PAGES, Body, Connection, ConnectionEnded, Kind
from hicache.storage.process.jobs import (
    FIND,
    FindDone,
    FindJob,
    Job,
    Question,
    QuestionDone,
    ReadClass,
    ReadJob,
    RemoveJob,
    Stalled,
    WriteDone,
    WriteJob,
)
from hicache.storage.process.server import LOOK_S
from hicache.storage.process.service import unserved_read, unserved_write
from hicache.storage.process.shared_memory import SharedMemories, SharedStatus
from hicache.storage.process.stores import StoreRequest
from hicache.storage.process.transports import Transport

log = logging.getLogger(__name__)

_MAX_UNSENT_BYTES = 4 << 20  # if more bytes are unsent, uses of pages are not sent
_MIN_SILENCE_S, _DOUBT_S = 8 * LOOK_S, 4 * LOOK_S  # a process with jobs sends the frame ALIVE every LOOK_S
MAX_SILENCE_S = _MIN_SILENCE_S + _DOUBT_S  # delay until a hang is detected, if the I/O timeout is shorter
_OPEN_LOOK_S = 0.5
_IDLE_POLLS = 256  # consecutive polls without jobs after which the client checks whether the process is alive
_STALLED_CLOSE_S = 0.5  # maximum time for which `close` waits if a thread of the store is stalled


_PAGES = attrgetter("pages")
J = TypeVar("J", Question, WriteJob | RemoveJob)
D = TypeVar("D", QuestionDone, WriteDone)


class State(enum.IntEnum):
    """The state of a store process; metrics export these numbers."""

    OPEN = 0
    OPENING = 1
    LOST = 2


class ClientQueue(Generic[J, D]):
    """The queue of reads, or of writes, of a client. `refused`: number of jobs that the client answered without the
    process. `fault`: why the last write failed; "" if it succeeded or the store is full."""

    def __init__(self, client: StoreClient, name: str, capacity: int, unserved: Callable[[J], D]) -> None:
        self.name = name
        self._client = client
        self._capacity = capacity
        self._unserved: Callable[[J], D] = unserved
        self.in_flight: dict[tuple[int, int], J] = {}
        self._announced = set[tuple[int, int]]()
        self._cancelled = set[tuple[int, int]]()
        self._done: list[D | Stalled] = []
        self.refused = 0
        self.fault = ""

    def submit(self, *jobs: J) -> bool:
        """Send jobs of one class, whose pages lie in one memory. If the process would refuse the jobs, answer them as
        failed without sending them. If too many jobs are in flight, send no job and return False."""
        if self.refuses():
            self.refused += len(jobs)
            self._done += map(self._unserved, jobs)
            return True
        if len(self.in_flight) + len(jobs) > self._capacity:
            return False
        sent = list[J]()
        for job in jobs:
            if isinstance(job, ReadJob) and job.cancelled.is_set():
                self._done.append(self._unserved(job))
            else:
                sent.append(job)
        if sent:
            self._client.send_jobs(sent)
        for job in sent:
            self.in_flight[job.ticket, job.batch] = job
        return True

    @property
    def num_free(self) -> int:
        """Return how many more jobs `submit` accepts. If too many jobs are in flight, return 0, or 1 if the process
        would refuse jobs now."""
        return self._capacity - len(self.in_flight) or int(self.refuses())

    def refuses(self) -> bool:
        """Return whether the process would refuse a job."""
        client = self._client
        return client.state is not State.OPEN or client.clock() < client.status.refuses_until_s(self.name)

    def poll(self) -> list[D | Stalled]:
        """Return the outcomes that arrived since the last call, in the order of arrival. Never blocks. While no job is
        in flight, only the queue of reads looks for messages of the process.

        A job whose thread or process does not answer in time has two outcomes: first `Stalled`, and later the answer,
        when no thread uses the pages of the job.
        """
        client = self._client
        if self.in_flight or (self is client.reads and not client.writes.in_flight):  # else the other queue polls
            client.poll()
        found, self._done = self._done, []
        return found

    def notify_cancelled(self) -> None:
        """Send the process a cancellation for each read whose `cancelled` is set. Call this after setting it."""
        cancelled = [
            key
            for key, job in self.in_flight.items()
            if isinstance(job, ReadJob) and job.cancelled.is_set() and key not in self._cancelled
        ]
        self._cancelled.update(cancelled)
        if cancelled:
            self._client.send_cancels(cancelled)

    @property
    def is_stalled(self) -> bool:
        """Return whether all jobs in flight were announced as stalled."""
        return len(self._announced) == len(self.in_flight)

    def take(self, done: D | Stalled) -> None:
        """Record a received outcome. Raises KeyError if the outcome belongs to no job in flight."""
        key = done.ticket, done.batch
        if isinstance(done, Stalled):
            if key in self._announced:
                return
            self._announced.add(key)
            self.fault = "a write takes longer than io_timeout_s"
        else:
            self.fault = done.why if isinstance(done, WriteDone) else ""
            del self.in_flight[key]
            self._announced.discard(key)
            self._cancelled.discard(key)
        self._done.append(done)

    def announce(self) -> None:
        """Announce all jobs in flight as stalled."""
        for ticket, batch in self.in_flight:
            self.take(Stalled(ticket, batch))

    def settle(self) -> None:
        """Answer all jobs in flight as failed. Called when the process no longer uses the pages of these jobs."""
        for job in list(self.in_flight.values()):
            self.take(self._unserved(job))


class StoreClient:
    """A client of one store; the docstring of the module describes its states. Call `open` before use. `reads` and
    `writes` accept jobs and return their outcomes; each of these queues has at most `max_jobs` jobs in flight.
    `in_process`: a thread of this process serves the store, so pages may lie in any memory. `times_lost`: how often the
    store process ended or hung. `note`: the bytes that `keep` stored; valid when the store is open. `has_remote`: the
    store process has a remote store; valid when the store is open. A second client opens this remote store through
    `join` and a request with `opens_remote`. `clock`: returns seconds; deadlines are times of this clock.
    """

    def __init__(
        self,
        transport: Transport,
        request: StoreRequest,
        *,
        max_jobs: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._request = request
        self.clock = clock
        self._limits = request.settings.limits
        transport.keep(self)
        self.reads: ClientQueue[Question, QuestionDone]
        self.reads = ClientQueue(self, "reads", max_jobs, unserved_read)
        self.writes: ClientQueue[WriteJob | RemoveJob, WriteDone]
        self.writes = ClientQueue(self, "writes", max_jobs, unserved_write)
        self.status = SharedStatus()
        self.in_process = transport.same_process
        self._memories = SharedMemories(transport.same_process)
        self._connection: Connection | None = None
        self.state = State.LOST
        self.times_lost = 0
        self.page_sizes = tuple[int, ...]()
        self.note = b""
        self.has_remote = False
        self._is_closing = False
        self._error: StoreError | None = None
        self.last_message_s = 0.0  # `time.monotonic` of the last message, or of the first job after idling
        self._doubted_s = math.inf
        self._idle_polls = 0
        self._why = ""  # why the process was lost; "" after a process has answered a job again
        self._late_open_s = self._lost_at_s = self._retry_at_s = 0.0
        self._backoff_s = self._limits.reopen_backoff_s
        self._lookups = itertools.count(-2, -1)
        self._lookup: FindJob | None = None
        self._found: FindDone | None = None

    def share(self, descriptor: int, memory: PageBuffer) -> None:
        """Share `memory`, contiguous uint8, with the store process, because pages of later jobs lie in `memory`.
        `memory` is a shared mapping of `descriptor` from offset 0, valid until `close`. The caller keeps the descriptor
        open. Does nothing if a thread of this process serves the store."""
        if self.in_process:
            return
        self._memories.add(descriptor, memory)
        if self._connection is not None and self.state is not State.LOST:
            self._memories.send(self._connection, self._memories.count)

    def open(self) -> None:
        """Start the process, and wait at most `open_s` until the process has opened the store. If opening takes longer,
        the client uses the store as soon as it is open. A store that is unavailable now counts as lost, and the client
        tries again later. Any other error means that a setting is wrong. `open` raises such an error, and the client
        does not try again."""
        self._poll_lost()
        while self.state is State.OPENING and self._late_open_s < math.inf:
            self.wait(_OPEN_LOOK_S)
            self.poll()
        if is_lasting(self._error):
            self.end()
            raise self._error

    def stats(self) -> StoreStats:
        """Return the statistics that the process wrote last. Does no I/O."""
        return self.status.stats()

    @property
    def is_open(self) -> bool:
        return self.state is State.OPEN

    @property
    def write_fault(self) -> str:
        """Return why the store does not store pages; "" if the last write succeeded or the store is full."""
        if not self.is_open:
            return self._why or "the store is not open yet"
        return self.writes.fault or ("writes failed, and the backoff is not over" if self.writes.refuses() else "")

    def find(self, keys: Sequence[bytes], wait_s: float, others: Sequence[bytes] = ()) -> FindDone | None:
        """Ask which pages the store has with a `FindJob`, and wait for the answer. Returns None if no answer arrives
        within `wait_s`, or within the I/O timeout if that is shorter. Until the late answer arrives, further calls
        return None immediately."""
        if not (keys or others):
            return FindDone(FIND, 0)
        self.poll()
        if self.reads.refuses() or self._lookup is not None:
            return None
        if not self._is_waiting:
            self._note_message()
        job = self._lookup = FindJob(next(self._lookups), tuple(keys), ReadClass.LOOKUP, tuple(others))
        self._send(frames.of_jobs([job], NO_PAGES))
        until_s = time.monotonic() + min(wait_s, self._limits.io_timeout_s)
        while self._lookup is job and (left_s := until_s - time.monotonic()) > 0:
            self.wait(left_s)
            self._receive()
        found = self._found  # this may be the late answer to an earlier lookup
        return found if found is not None and found.ticket == job.ticket and found.answered else None

    def used(self, keys: Sequence[bytes]) -> None:
        """Report that a request used these pages; any tier may have served them. `keys` are in the order of the
        prompt."""
        if keys and self._takes_hints:
            self._send(frames.frame(Kind.USED, frames.keys_of(keys)))

    def keep_until(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """Ask the store to evict these pages only after all other pages, until `deadline_s` of the client's clock.
        `keys` are in the order of a prompt. A remote store, and a store that is not open, ignore this call."""
        if keys and self._takes_hints:
            self._send(frames.keep(keys, deadline_s))

    @property
    def _takes_hints(self) -> bool:
        """Return whether the store is open and few bytes are unsent. Otherwise the client drops frames that only
        improve the eviction order."""
        connection = self._connection if self.state is State.OPEN else None
        return connection is not None and len(connection.unsent) < _MAX_UNSENT_BYTES

    def join(self) -> socket.socket:
        """Connect a second client to the store process of this client. Returns the second client's end of the
        connection. Raises StoreUnavailable while the process has not opened the store of this client."""
        if self._connection is None or not self.is_open:
            raise StoreUnavailable("the store process of this machine has not opened its store")
        client_end, server_end = socket.socketpair()
        with server_end:
            try:
                self._connection.send_with(server_end.fileno(), frames.frame(Kind.JOIN))
            except ConnectionEnded as ended:
                client_end.close()
                self._lose(f"the store process ended: {ended}")
                raise StoreUnavailable(str(ended)) from ended
        return client_end

    def keep(self, note: bytes) -> None:
        """Store a few bytes for the next client that opens the store. If the process is killed, these bytes are
        lost."""
        if self.is_open:
            self.note = note
            self._send(frames.frame(Kind.NOTE, note))

    def poll(self) -> None:
        """Receive outcomes, and reconnect after the backoff. Never blocks."""
        if self.state is State.LOST:
            self._poll_lost()
        elif self.reads.in_flight or self.writes.in_flight or self._is_waiting:
            self._idle_polls = 0
            self._transport.look()
            self._receive()
            now_s = time.monotonic()
            if self.state is State.OPENING or now_s - self.last_message_s > _MIN_SILENCE_S:
                self._look_for_silence(now_s)
        else:
            self._idle_polls += 1
            if self._idle_polls > _IDLE_POLLS:
                self._idle_polls = 0
                self._receive()

    def _note_message(self) -> None:
        self.last_message_s, self._doubted_s = time.monotonic(), math.inf

    def _is_silent(self, now_s: float) -> bool:
        """Return whether the process has been silent for too long. The process must be late at two checks that are at
        least `_DOUBT_S` apart, because after a suspension of the machine a single check proves nothing."""
        enough_s = max(_MIN_SILENCE_S, self._limits.io_timeout_s if self.is_open else self._limits.open_s)
        is_late = self._is_waiting and now_s - self.last_message_s > enough_s
        self._doubted_s = min(self._doubted_s, now_s) if is_late else math.inf
        return now_s - self._doubted_s > _DOUBT_S

    def _look_for_silence(self, now_s: float) -> None:
        if self._is_silent(now_s):
            self._lose(f"the store process has not answered for {now_s - self.last_message_s:.3g} s", announce=True)
        elif self.state is State.OPENING and now_s > self._late_open_s:
            self._late_open_s = math.inf
            text = "the store of the %s tier is not open after %g s, and is used once it is; is its disk frozen?"
            log.warning(text, self._request.settings.name, self._limits.open_s)

    def close(self, within_s: float) -> bool:
        """Wait for jobs in flight, close the store, and let the process end. Idempotent.

        Returns False if closing takes longer than `within_s`, or if a thread of the store is stalled. If False is
        returned, the process may still use the pages of jobs. The process closes the store later, and a later call of
        `close` returns True. Raises the error of closing the store.
        """
        until_s = time.monotonic() + within_s
        self._retry_at_s = math.inf
        self._error = None
        if self.state is State.OPENING and self._connection is not None:
            self._is_closing = True
            self._connection.finish()  # the process closes a store that it is still opening
        while self._is_waiting and not self._is_stalled and self._poll_until(until_s):
            continue
        if self.state is State.OPEN and not self._is_closing:
            self._is_closing = True
            self._send(frames.frame(Kind.CLOSE))
        if self._is_waiting and self._is_stalled:
            until_s = min(until_s, time.monotonic() + _STALLED_CLOSE_S)
        while self._connection is not None and self._poll_until(until_s):
            continue
        while self._connection is None and not self._transport.has_ended() and time.monotonic() < until_s:
            time.sleep(1e-3)
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._connection is not None or not self._transport.has_ended():
            return False
        self.status.close()
        return True

    def end(self) -> None:
        """Kill the process if this client started it, and wait briefly for its end."""
        self._retry_at_s = math.inf
        self.status.close()
        self._transport.end()
        until_s = time.monotonic() + _STALLED_CLOSE_S
        while not self._transport.has_ended() and time.monotonic() < until_s:
            time.sleep(1e-3)

    @property
    def pid(self) -> int:
        """The id of the process that was started for the store; 0 if there is none."""
        return self._transport.pid

    @property
    def _is_stalled(self) -> bool:
        return self._lookup is None and self.reads.is_stalled and self.writes.is_stalled

    def _poll_until(self, until_s: float) -> bool:
        """Wait at most `_OPEN_LOOK_S` for outcomes, and receive them. Returns False if `until_s` has passed."""
        left_s = until_s - time.monotonic()
        if left_s > 0:
            self.wait(min(_OPEN_LOOK_S, left_s))
            if self.is_open and not self._is_waiting:
                self._receive()
            else:
                self.poll()
        return left_s > 0

    # Jobs

    def send_cancels(self, jobs: Sequence[tuple[int, int]]) -> None:
        """Send a cancellation for each job, given by ticket and batch. The queues call this method."""
        for ticket, batch in jobs:
            self._send(frames.cancel(ticket, batch))
        self._transport.look()

    def send_jobs(self, jobs: Sequence[Job]) -> None:
        """Send jobs of one class. The queues call this method."""
        frame = frames.of_jobs(jobs, self._memories.locate([*map(_PAGES, jobs)], self.page_sizes))
        if not self._is_waiting:  # restart the watch for silence, because a process without jobs sends no messages
            self._note_message()
        self._send(frame)

    @property
    def _is_waiting(self) -> bool:
        """Return whether the client expects an answer or has unsent bytes."""
        expects_message = self.reads.in_flight or self.writes.in_flight or self._lookup or self.state is State.OPENING
        return bool(expects_message or (self._connection is not None and self._connection.unsent))

    # The connection

    def _connect(self) -> None:
        connection = self._connection = Connection(self._transport.connect())
        self.state = State.OPENING
        self._late_open_s = time.monotonic() + self._limits.open_s
        self._note_message()
        self.status.clear()
        try:
            connection.send_with(self.status.descriptor, frames.frame(Kind.OPEN, self._request.pack()))
            for number in range(1, self._memories.count + 1):
                self._memories.send(connection, number)
        except ConnectionEnded as ended:
            self._lose(f"the store process ended: {ended}")

    def _send(self, data: bytes = b"") -> None:
        if self._connection is not None:
            try:
                self._connection.send(data)
            except ConnectionEnded as ended:
                self._lose(f"the store process ended: {ended}")

    def _receive(self) -> None:
        if self._connection is not None and self._connection.unsent:
            self._send()
        if self._connection is None or self.state is State.LOST:
            return
        try:
            for kind, body in self._connection.receive():
                self._note_message()
                self._take(kind, body)
        except ConnectionEnded:
            self._has_ended()
        except (KeyError, ValueError) as error:
            self._lose(f"the store process sent an invalid answer: {error!r}")

    def _take(self, kind: Kind, body: Body) -> None:
        if kind is Kind.ALIVE:
            return
        if kind is Kind.OPENED:
            self.page_sizes, self.note, self.has_remote = body.opened()
            if self.state is State.OPENING:
                self.state = State.OPEN
                if self.times_lost:
                    log.info("the store of the %s tier is open again", self._request.settings.name)
        elif kind is Kind.FAILED:
            self._error = error = body.failed()
            if self.state is State.OPENING:
                self._lose(str(error))
                self._error = None if self._is_closing else error  # `close` raises only errors of closing
        else:
            done, is_write = body.outcome(kind)
            if self._lookup is not None and not is_write and done.ticket == self._lookup.ticket:
                self._found = done if isinstance(done, FindDone) else None
                self._lookup = None
                return
            if done.ticket < FIND and not is_write:  # answer to a lookup that was announced as stalled
                return
            if isinstance(done, WriteDone) or (isinstance(done, Stalled) and is_write):
                self.writes.take(done)
            else:
                self.reads.take(done)
            if not isinstance(done, Stalled):
                self._backoff_s = self._limits.reopen_backoff_s
                self._why = ""

    def _lose(self, why: str, *, announce: bool = False) -> None:
        """Stop using the process. The client answers jobs in flight when the connection ends."""
        if self.state is State.LOST:
            return
        self.state = State.LOST
        self._lost_at_s = time.monotonic()
        self._lookup = None
        if self._is_closing:
            return
        # `open` raises this error, so it is not logged
        is_known = why == self._why or (is_lasting(self._error) and not self.times_lost)
        self.times_lost += 1
        self._retry_at_s = time.monotonic() + self._backoff_s
        name, level = self._request.settings.name, logging.DEBUG if is_known else logging.WARNING
        log.log(level, "the %s tier is without its store: %s; it is tried again in %g s", name, why, self._backoff_s)
        self._why = why
        self._backoff_s = min(2 * self._backoff_s, self._limits.max_reopen_backoff_s)
        if announce:
            self.reads.announce()
            self.writes.announce()
        self._transport.end()
        if self._connection is not None:
            self._connection.finish()

    def _has_ended(self) -> None:
        """Close a connection that has ended, and answer the jobs in flight, because the process no longer uses shared
        memory."""
        self._lose("the store process ended")
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        self.reads.settle()
        self.writes.settle()

    def _poll_lost(self) -> None:
        if self._connection is not None:
            self._wait_for_its_end(self._connection)
        elif time.monotonic() >= self._retry_at_s and self._transport.has_ended():
            try:
                self._connect()
            except StoreError as error:
                self.state = State.OPENING
                self._error = error
                self._lose(str(error))

    def _wait_for_its_end(self, connection: Connection) -> None:
        """Discard received bytes. If the connection has ended, answer all jobs in flight. Does not block."""
        try:
            while connection.take():
                continue
        except ConnectionEnded:
            self._has_ended()
        else:
            if time.monotonic() - self._lost_at_s > self._limits.io_timeout_s:
                self.reads.announce()
                self.writes.announce()

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until `poll` can receive or send bytes. Another thread may submit jobs during this
        call."""
        wait_for_clients([self], seconds)

    @property
    def connection(self) -> Connection | None:
        """The connection to the process; None without a connection."""
        return self._connection


def wait_for_clients(clients: Sequence[StoreClient], seconds: float) -> None:
    """Wait at most `seconds` until `poll` of one of the clients can receive or send bytes."""
    frames.wait_for_any([one.connection for one in clients if one.connection is not None], seconds)
