"""One client of a store process: the frames of the client, its shared memory, and the answers to its jobs.

All methods except `post` run on the loop's thread (`server`). Received bytes and descriptors are not trusted. An
invalid frame or descriptor ends only this session.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.process import frames
from hicache.storage.process.frames import (
    OWN_MEMORY,
    Body,
    Connection,
    ConnectionEnded,
    FrameError,
    Kind,
    Outcome,
    Pages,
)
from hicache.storage.process.jobs import Job, PageBytes, Question, ReadJob, Stalled
from hicache.storage.process.service import CLOSES_DISK, CLOSES_REMOTE, OPENS, StoreService
from hicache.storage.process.shared_memory import ClientMemory, StatusWriter, page_at
from hicache.storage.process.stores import OpenStores

log = logging.getLogger(__name__)

T = TypeVar("T")
OPEN_WITHIN_S = 30.0  # maximum time until a client sends OPEN
_MAX_DESCRIPTORS = 16  # maximum descriptors received in one call, and received but not yet used by a frame
_MAX_MEMORIES = 256
_MAX_UNSENT_BYTES = 16 << 20  # limit of unsent bytes for a client that does not read


class Loop(Protocol):
    """The methods of `Server` that a session uses."""

    stores: OpenStores
    same_process: bool
    selector: selectors.BaseSelector

    def call(self, do: Callable[[], None]) -> None: ...

    def call_later(self, do: Callable[[], None], why: str) -> None: ...

    def add(self, connected: socket.socket, *, is_joined: bool = False) -> None: ...

    def forget(self, client: Session) -> None: ...

    def log_left(self, error: Exception) -> None: ...


class Session(Connection):
    """The session of one client. The client's memory stays mapped until the session has ended and its last job is
    answered. `is_joined`: another client has sent the socket of this client."""

    def __init__(self, server: Loop, connected: socket.socket, *, is_joined: bool = False) -> None:
        super().__init__(connected)
        self._read = self._read_with_descriptors
        self._server = server
        self._is_joined = is_joined
        self._descriptors = deque[int]()  # descriptors that were received but not yet used by a frame
        self._memories: dict[int, ClientMemory] = {}
        self._status: StatusWriter | None = None
        self._service: StoreService | None = None
        self._cancels: dict[tuple[int, int], threading.Event] = {}
        self._outcomes: deque[tuple[Outcome, bool]] = deque()
        self._noted = dict[str, tuple[float, ...]]()
        self._waits_to_send = False
        self._num_jobs = 0  # number of jobs that were not answered yet
        self._ended = self._is_opening = False
        self._open_until_s = time.monotonic() + OPEN_WITHIN_S
        server.selector.register(connected, selectors.EVENT_READ, lambda events: self._try(self._on_ready, events))

    @property
    def keeps_process(self) -> bool:
        """Return whether the process must not end yet because of this session. A joined client does not keep the
        process, nor does the ended client of a remote store, because a call to this store may hang."""
        is_on_disk = self._service is not None and self._service.is_on_disk
        return not self._is_joined and (not self._ended or is_on_disk)

    @property
    def is_busy(self) -> bool:
        """Return whether the loop has to call `look` regularly."""
        is_asking = self._status is None or self._is_opening
        return self._num_jobs > 0 or is_asking or (self._service is not None and self._has_changes(self._service))

    def _has_changes(self, service: StoreService) -> bool:
        """Return whether the numbers of the store may change, or differ from the numbers that the client has. When a
        stalled thread returns or a copy ends, the numbers change without an answer to the client."""
        return service.is_busy or service.numbers() != self._noted

    def post(self, is_write: bool, done: Outcome) -> None:
        """Queue an outcome for the client. The thread that ran the job calls this method."""
        self._outcomes.append((done, is_write))
        self._call(self._deliver)

    def look(self) -> None:
        self._try(self._look)

    def _look(self) -> None:
        if self._service is not None:
            self._service.look()
            self._deliver()
            self._note_status(self._service)  # copies change the numbers without jobs of this client
        if self._status is None and time.monotonic() > self._open_until_s:
            self.end("it has not requested a store")
        self._send(frames.frame(Kind.ALIVE))

    def drain(self, why: str) -> None:
        """Accept all frames that an ended client has sent, then `end` the session."""
        if not self._ended:
            self._try(self._receive_all)
        self.end(why)

    def end(self, why: str) -> None:
        """Stop reading from the client, and cancel its reads. Queued writes still run."""
        if self._ended:
            return
        self._ended = True
        log.debug("the session of a client ends: %s", why)
        for cancelled in self._cancels.values():
            cancelled.set()
        self._server.selector.unregister(self.socket)
        while self._descriptors:
            os.close(self._descriptors.popleft())
        if self._service is not None:
            self._close(self._service, partial(self._release, self._service))
        self._leave()

    def _leave(self) -> None:
        """Close the connection if the session has ended and no thread uses the client's memory. A closed connection
        tells the client that its memory is no longer used. If a store is still being opened, the server keeps the
        session, because the session must close this store."""
        if self._ended and not self._num_jobs:
            self.close()
            for memory in self._memories.values():
                memory.close()
            self._memories.clear()
            if self._status is not None:
                self._status.close()
            if not self._is_opening:
                self._server.forget(self)

    def _release(self, service: StoreService) -> None:
        try:
            self._server.stores.release(service)
        except Exception:
            log.exception("a store could not be closed")

    def _try(self, do: Callable[..., None], *arguments: object) -> None:
        """Call `do`. If `do` raises, end only this session."""
        try:
            do(*arguments)
        except ConnectionEnded as ended:
            self.end(str(ended))
        except (OSError, StoreError, ValueError) as error:
            self._server.log_left(error)
            self.end(str(error))
        except Exception as error:
            log.exception("a client of the store process is disconnected after an unexpected error")
            self.end(repr(error))
        if self._ended:
            self._leave()

    def _call(self, do: Callable[..., None], *arguments: object) -> None:
        """Run `do` on the loop's thread soon. Any thread may call this method."""
        self._server.call(partial(self._try, do, *arguments))

    # Frames from the client

    def _on_ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(b"")
        if not events & selectors.EVENT_READ or self._ended:
            return
        self._receive_some()

    def _receive_all(self) -> None:
        while self._receive_some():
            continue

    def _receive_some(self) -> bool:
        """Receive and handle some frames. Returns whether any bytes had arrived."""
        data = self.take()
        for kind, body in self.feed(data):
            self._handle(kind, body)
        if len(self._descriptors) > _MAX_DESCRIPTORS:
            raise FrameError("descriptors that belong to no frame")
        return bool(data)

    def _read_with_descriptors(self, num_bytes: int) -> bytes:
        data, descriptors, _, _ = socket.recv_fds(self.socket, num_bytes, _MAX_DESCRIPTORS)
        self._descriptors += descriptors
        return data

    def _descriptor(self) -> int:
        if not self._descriptors:
            raise FrameError(
                "a frame arrived without its descriptor; if this process is out of descriptors, raise ulimit -n"
            )
        return self._descriptors.popleft()

    def _handle(self, kind: Kind, body: Body) -> None:
        if kind is Kind.MEMORY:
            self._share(*body.memory())
        elif kind is Kind.OPEN:
            self._open(body.json())
        elif kind is Kind.JOIN:
            self._join()
        elif self._service is None:
            raise FrameError("a job for a store that is not open")
        else:
            self._ask(kind, body, self._service)

    def _join(self) -> None:
        """Serve the new client whose socket this client has sent."""
        descriptor = self._descriptor()
        try:
            connected = socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            raise
        self._server.add(connected, is_joined=True)

    def _share(self, number: int, num_bytes: int) -> None:
        descriptor = self._descriptor()
        if number in self._memories or len(self._memories) >= _MAX_MEMORIES:
            os.close(descriptor)
            raise FrameError(f"memory {number} after {len(self._memories)} others")
        self._memories[number] = ClientMemory(descriptor, num_bytes)
        if self._service is not None:
            self._register(self._service, self._memories[number].data)

    def _ask(self, kind: Kind, body: Body, service: StoreService) -> None:
        if kind in (Kind.FIND, Kind.READ, Kind.LEASE, Kind.WRITE, Kind.REMOVE):
            for job in body.jobs(kind, partial(self._pages, service)):
                self._submit(job, service)
        elif kind is Kind.USED:
            service.used(body.keys())
            self._note_status(service)
        elif kind is Kind.KEEP:
            service.keep_until(*body.keep())
        elif kind is Kind.NOTE:
            service.note = body.note()
        elif kind is Kind.CANCEL:
            if (cancelled := self._cancels.get(body.cancel())) is not None:
                cancelled.set()
                service.drop_cancelled()
        elif kind is Kind.CLOSE:
            self._service = None
            self._close(service, partial(self._attempt, partial(self._server.stores.release, service), self._closed))
        else:
            raise FrameError(f"a client does not send {kind.name}")

    def _submit(self, job: Job, service: StoreService) -> None:
        if isinstance(job, Question):
            if isinstance(job, ReadJob):
                self._cancels[job.ticket, job.batch] = job.cancelled
            service.ask(job, partial(self.post, False))
        else:
            service.writes.submit(job, partial(self.post, True))
        self._num_jobs += 1

    def _pages(self, service: StoreService, pages: Pages) -> tuple[PageBytes, ...]:
        num_bytes, sizes = pages.page_bytes, service.page_sizes
        if pages.offsets and (not num_bytes or (sizes and num_bytes not in sizes)):
            raise FrameError(f"pages of {num_bytes} bytes in a store of {sizes}")
        if pages.memory == OWN_MEMORY:
            if not self._server.same_process:
                raise FrameError("pages by address, from another process")
            return tuple(page_at(address, num_bytes) for address in pages.offsets)
        if pages.memory not in self._memories:
            raise FrameError(f"pages in memory {pages.memory}, which is not shared")
        return self._memories[pages.memory].pages(pages)

    # Slow operations, which run in other threads

    def _open(self, request: object) -> None:
        if self._status is not None:
            raise FrameError("a client requests a second store")
        if not isinstance(request, dict) or request.pop("version", None) != frames.VERSION:
            raise FrameError(f"this store process speaks version {frames.VERSION} of its frames")
        self._status = StatusWriter(self._descriptor())
        self._is_opening = True
        opening = partial(self._attempt, partial(self._server.stores.acquire, request), self._opened)
        self._aside("open", opening, OPENS)

    def _close(self, service: StoreService, close: Callable[[], None]) -> None:
        self._aside("close", close, CLOSES_DISK if service.is_on_disk else CLOSES_REMOTE)

    def _aside(self, what: str, do: Callable[[], None], name: str) -> None:
        """Run `do` in a new thread. A store process exits only after this thread has ended, so closing a store
        completes even if the engine has ended. But a store process waits for threads that open stores or close
        remote stores for a limited time. In an engine's process the new thread is a daemon thread, as the loop's thread
        is."""
        try:
            threading.Thread(target=do, name=name).start()
        except RuntimeError as error:
            again = partial(self._aside, what, do, name)
            self._server.call_later(again, f"a store cannot {what}: {error}; raise ulimit -u")

    def _attempt(self, do: Callable[[], T], then: Callable[[T], None]) -> None:
        try:
            result = do()
        except Exception as error:  # the error is sent to the client, which raises it
            log.debug("a store cannot be opened or closed", exc_info=True)
            self._call(self._fail, error)
        else:
            self._call(then, result)

    def _opened(self, service: StoreService) -> None:
        self._is_opening = False
        if self._ended:
            self._close(service, partial(self._release, service))
            self._leave()
            return
        self._service = service
        for memory in self._memories.values():
            self._register(service, memory.data)
        self._note_status(service)
        self._send(frames.opened(service.page_sizes, service.note, has_remote=service.has_remote))

    @staticmethod
    def _register(service: StoreService, memory: PageBuffer) -> None:
        """Register a client's memory with the store. If the store cannot register the memory, it copies pages through
        its own memory."""
        try:
            service.store.register_memory(memory)
        except Exception:
            log.warning("the store cannot register shared memory, and copies pages", exc_info=True)

    def _closed(self, _: None) -> None:
        self._deliver()
        self.end("its store is closed")

    def _fail(self, error: Exception) -> None:
        self._is_opening = False
        self._send(frames.failed(error))
        self.end("its store is not open")
        self._leave()

    # Frames to the client

    def _deliver(self) -> None:
        found, why, outcomes = [], "", [self._outcomes.popleft() for _ in range(len(self._outcomes))]
        if self._service is not None:
            self._note_status(
                self._service
            )  # written before the answers are sent, so that the numbers which a client sees include each answered job
            why = self._service.writes.breaker.why
        for done, is_write in outcomes:
            if not isinstance(done, Stalled):
                self._num_jobs -= 1
                self._cancels.pop((done.ticket, done.batch), None)
            found.append(frames.outcome(done, is_write=is_write, why=why))
        self._send(b"".join(found))
        self._leave()

    def _note_status(self, service: StoreService) -> None:
        if self._status is not None and not self._ended:
            self._noted = service.numbers()
            self._status.write(service.stats(), service.failed_touches, self._noted)

    def _send(self, data: bytes) -> None:
        if self._ended:
            return
        try:
            self.send(data)
        except ConnectionEnded:  # jobs that the client sent before it disconnected must still run
            self._receive_all()
            raise
        if len(self.unsent) > _MAX_UNSENT_BYTES:
            raise FrameError("the client does not read its answers")
        if self._waits_to_send != bool(self.unsent):
            self._waits_to_send = bool(self.unsent)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0)
            key = self._server.selector.get_key(self.socket)
            self._server.selector.modify(self.socket, events, key.data)
