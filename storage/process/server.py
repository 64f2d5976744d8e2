"""The loop of a store process: clients on sockets, their jobs to the threads of stores, outcomes back.

One thread runs the loop and owns every connection. The threads of a store hand outcomes to `_Client.post` and wake
it. Opening and closing a store may take long, so each has a thread of its own. The loop sleeps as long as nothing is
under way; else it looks for stalled threads every `LOOK_S` seconds, and tells clients that it is alive.

In a process of its own (`__main__`) or in a thread of the client's (`transports.InlineServer`): the same loop, the same
frames.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.process import frames
from hicache.storage.process.connection import Connection, ConnectionEnded
from hicache.storage.process.frames import OWN_MEMORY, Body, FrameError, Kind, Outcome, Pages
from hicache.storage.process.jobs import FindJob, Job, PageBytes, ReadJob, Stalled
from hicache.storage.process.service import StoreService
from hicache.storage.process.shared_memory import mapped, page_at
from hicache.storage.process.status import SharedStatus
from hicache.storage.process.stores import OpenStores

log = logging.getLogger(__name__)

LOOK_S = 0.25
T = TypeVar("T")
_MAX_DESCRIPTORS = 16  # of one call
_CREDENTIALS = struct.Struct("iII")  # process, user, group


class Server:
    """Serves `stores` to the clients that `add` and `listener` bring. `run` returns after `stop`, and without a
    listener when the last client has left. `same_process`: clients may name pages by their addresses."""

    def __init__(
        self, stores: OpenStores, *, listener: socket.socket | None = None, same_process: bool = False
    ) -> None:
        self.stores, self.same_process = stores, same_process
        self.selector = selectors.DefaultSelector()
        self._listener = listener
        self._clients: set[_Client] = set()
        self._calls: deque[Callable[[], None]] = deque()
        self._woken, self._wakes = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._is_awake = self._stopped = False
        self.selector.register(self._woken, selectors.EVENT_READ, self._drain)
        if listener is not None:
            listener.setblocking(False)
            self.selector.register(listener, selectors.EVENT_READ, self._accept)

    def add(self, connected: socket.socket) -> None:
        """Before `run`, or on its thread."""
        self._clients.add(_Client(self, connected))

    def call(self, do: Callable[[], None]) -> None:
        """Have the loop call `do`. Any thread."""
        self._calls.append(do)
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(BlockingIOError, OSError):
                self._wakes.send(b"\0")

    def stop(self) -> None:
        """End `run`, and every connection. Any thread."""
        self.call(self._stop)

    def run(self) -> None:
        last_look_s = time.monotonic()
        while not self._stopped and (self._listener is not None or self._clients):
            is_busy = any(client.is_busy for client in self._clients)
            for key, events in self.selector.select(LOOK_S if is_busy else None):
                key.data(events)
            self._is_awake = False
            while self._calls:
                self._calls.popleft()()
            if is_busy and time.monotonic() - last_look_s >= LOOK_S:
                last_look_s = time.monotonic()
                self.look()
        for client in list(self._clients):
            client.end("the process ends")
        for part in (self._woken, self._wakes, self._listener, self.selector):
            if part is not None:
                part.close()

    def look(self) -> None:
        """Announce stalled threads, and tell clients that the loop is alive. On the loop's thread."""
        for client in list(self._clients):
            client.look()

    def forget(self, client: _Client) -> None:
        self._clients.discard(client)

    def _stop(self) -> None:
        self._stopped = True

    def _drain(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _accept(self, _events: int) -> None:
        assert self._listener is not None
        try:
            connected, _ = self._listener.accept()
        except OSError as error:  # it is gone again, or descriptors have run out
            log.warning("a client could not be accepted: %s", error)
            return
        uid = user_of(connected)
        if uid != os.getuid():
            log.warning("a client of user %d is refused: this store serves user %d alone", uid, os.getuid())
            connected.close()
            return
        self.add(connected)


class _Client(Connection):
    """One client. On the loop's thread, but for `post`."""

    def __init__(self, server: Server, connected: socket.socket) -> None:
        super().__init__(connected)
        self._server = server
        self._descriptors = deque[int]()  # that came and nobody has taken
        self._memories: dict[int, PageBuffer] = {}
        self._status: SharedStatus | None = None
        self._service: StoreService | None = None
        self._cancels: dict[tuple[int, int], threading.Event] = {}
        self._outcomes: deque[tuple[Outcome, bool]] = deque()
        self._waits_to_send = False
        self._num_jobs = 0  # not answered yet
        self._ended = self._is_opening = False
        server.selector.register(connected, selectors.EVENT_READ, self._on_ready)

    @property
    def is_busy(self) -> bool:
        return self._num_jobs > 0 or self._is_opening or (self._service is not None and self._service.is_busy)

    def post(self, is_write: bool, done: Outcome) -> None:
        """Take an outcome from the thread that did the job."""
        self._outcomes.append((done, is_write))
        self._server.call(self._deliver)

    def look(self) -> None:
        if self._service is not None:
            self._service.look()
            self._deliver()
        self._tell(frames.frame(Kind.ALIVE))

    def end(self, why: str) -> None:
        """Listen to the client no more: its reads end, its writes are still done."""
        if self._ended:
            return
        self._ended = True
        log.debug("a client leaves: %s", why)
        for cancelled in self._cancels.values():
            cancelled.set()
        self._server.selector.unregister(self.socket)
        for descriptor in self._descriptors:
            os.close(descriptor)
        if self._service is not None:
            self._aside("close", partial(self._release, self._service))
        self._leave()

    def _leave(self) -> None:
        """Close the connection once no thread uses the client's memory: that is what its end tells the client. What is
        being opened has to be closed by this loop."""
        if self._ended and not self._num_jobs:
            self.close()
            if not self._is_opening:
                self._server.forget(self)

    def _release(self, service: StoreService) -> None:
        try:
            self._server.stores.release(service)
        except Exception:
            log.exception("a store could not be closed")

    # What the client says

    def _on_ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._tell(b"")
        if not events & selectors.EVENT_READ or self._ended:
            return
        try:
            for kind, body in self.frames.feed(self.take()):
                self._hear(kind, body)
        except ConnectionEnded as ended:
            self.end(str(ended))
        except (OSError, StoreError, ValueError, KeyError, IndexError) as error:
            log.warning("a client of the store process is left: %s", error)
            self.end(str(error))

    def _read(self, num_bytes: int) -> bytes:
        data, descriptors, _, _ = socket.recv_fds(self.socket, num_bytes, _MAX_DESCRIPTORS)
        self._descriptors += descriptors
        return data

    def _hear(self, kind: Kind, body: Body) -> None:
        if kind is Kind.MEMORY:
            number, num_bytes = body.memory()
            self._memories[number] = mapped(self._descriptors.popleft(), num_bytes)
            if self._service is not None:
                self._register(self._service, self._memories[number])
        elif kind is Kind.OPEN:
            self._open(json.loads(body.rest()))
        elif self._service is None:
            raise FrameError("a job for a store that is not open")
        else:
            self._ask(kind, body, self._service)

    def _ask(self, kind: Kind, body: Body, service: StoreService) -> None:
        if kind in (Kind.FIND, Kind.READ, Kind.WRITE, Kind.REMOVE):
            self._submit(body.job(kind, partial(self._pages, service)), service)
        elif kind is Kind.USED:
            service.used(body.keys())
            self._note_status(service)
        elif kind is Kind.NOTE:
            service.note = body.note()
        elif kind is Kind.CANCEL:
            if (wanted := self._cancels.get(body.cancel())) is not None:
                wanted.set()
        elif kind is Kind.CLOSE:
            self._service = None
            self._aside("close", partial(self._attempt, partial(self._server.stores.release, service), self._closed))
        else:
            raise FrameError(f"a client does not send {kind.name}")

    def _submit(self, job: Job, service: StoreService) -> None:
        self._num_jobs += 1
        if isinstance(job, FindJob | ReadJob):
            if isinstance(job, ReadJob):
                self._cancels[job.ticket, job.batch] = job.cancelled
            service.reads.submit(job, partial(self.post, False))
        else:
            service.writes.submit(job, partial(self.post, True))

    def _pages(self, service: StoreService, pages: Pages) -> tuple[PageBytes, ...]:
        num_bytes, sizes = pages.page_bytes, service.store.page_sizes
        if sizes and pages.offsets and num_bytes not in sizes:
            raise FrameError(f"pages of {num_bytes} bytes in a store of {sizes}")
        if pages.memory == OWN_MEMORY:
            if not self._server.same_process:
                raise FrameError("pages by address, from another process")
            return tuple(page_at(address, num_bytes) for address in pages.offsets)
        memory = self._memories[pages.memory]
        if any(offset + num_bytes > len(memory) for offset in pages.offsets):
            raise FrameError(f"a page ends behind its memory of {len(memory)} bytes")
        return tuple(memory[offset : offset + num_bytes] for offset in pages.offsets)

    # Beside the loop: what may take long

    def _open(self, request: object) -> None:
        if self._status is not None:
            raise FrameError("a client asks for a second store")
        if not isinstance(request, dict) or request.pop("version", None) != frames.VERSION:
            raise FrameError(f"this store process speaks version {frames.VERSION} of its frames")
        self._status = SharedStatus(self._descriptors.popleft())
        self._status.close()
        self._is_opening = True
        self._aside("open", partial(self._attempt, partial(self._server.stores.acquire, request), self._opened))

    def _aside(self, what: str, do: Callable[[], None]) -> None:
        """A process ends after such a thread, so a store that its engine closed is closed whatever becomes of the
        engine. In a thread of an engine it is a daemon, as that thread is."""
        threading.Thread(target=do, name=f"hicache-store-{what}").start()

    def _attempt(self, do: Callable[[], T], then: Callable[[T], None]) -> None:
        try:
            result = do()
        except Exception as error:  # which the client raises
            log.debug("a store cannot be opened or closed", exc_info=True)
            self._server.call(partial(self._fail, error))
        else:
            self._server.call(partial(then, result))

    def _opened(self, service: StoreService) -> None:
        self._is_opening = False
        if self._ended:
            self._aside("close", partial(self._release, service))
            self._leave()
            return
        self._service = service
        for memory in self._memories.values():
            self._register(service, memory)
        self._note_status(service)
        about = {"page_sizes": service.store.page_sizes, "note": service.note.hex()}
        self._tell(frames.frame(Kind.OPENED, json.dumps(about).encode()))

    @staticmethod
    def _register(service: StoreService, memory: PageBuffer) -> None:
        """A hint: without it a store copies through memory of its own."""
        try:
            service.store.register_memory(memory)
        except StoreError as error:
            log.warning("the store takes no shared memory, and will copy: %s", error)

    def _closed(self, _: None) -> None:
        self._deliver()
        self.end("its store is closed")

    def _fail(self, error: Exception) -> None:
        self._is_opening = False
        self._tell(frames.failed(error))
        self.end("its store is not open")
        self._leave()

    # What the client is told

    def _deliver(self) -> None:
        if self._service is not None:
            self._note_status(self._service)
        found = []
        while self._outcomes:
            done, is_write = self._outcomes.popleft()
            if not isinstance(done, Stalled):
                self._num_jobs -= 1
                self._cancels.pop((done.ticket, done.batch), None)
            found.append(frames.outcome(done, is_write=is_write))
        self._tell(b"".join(found))
        self._leave()

    def _note_status(self, service: StoreService) -> None:
        assert self._status is not None
        self._status.write(service.store.stats(), service.failed_touches, service.numbers())

    def _tell(self, data: bytes) -> None:
        if self._ended:
            return
        try:
            self.send(data)
        except ConnectionEnded as ended:
            self.end(str(ended))
            return
        if self._waits_to_send != bool(self.unsent):
            self._waits_to_send = bool(self.unsent)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0)
            self._server.selector.modify(self.socket, wanted, self._on_ready)


def user_of(connected: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
