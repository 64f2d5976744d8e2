"""The loop of a store process. The loop passes jobs from the sockets of clients to the threads of stores, and outcomes
back to the clients.

One thread runs the loop and owns every connection (`session`). The threads of a store pass outcomes to `Session.post`,
which wakes the loop. Opening or closing a store may take long, so the loop starts a new thread for each. Without jobs
the loop sleeps. While there are jobs, the loop checks for stalled threads every `LOOK_S` seconds, and sends clients the
frame ALIVE.

The same loop runs in a separate process (`__main__`) or in a thread of the client's process
(`transports.InlineServer`), with the same frames.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

from hicache.storage.base import StoreError
from hicache.storage.process.session import Session
from hicache.storage.process.stores import OpenStores

log = logging.getLogger(__name__)

LOOK_S = 0.25
_CREDENTIALS = struct.Struct("iII")  # process, user and group of a client


class Server:
    """Serves `stores` to clients passed to `add` or accepted by `listener`. `run` returns after `stop`. Without a
    listener, `run` also returns when no client keeps the process (`Session.keeps_process`). `same_process`: clients are
    in this process, and name pages by their addresses; `run` returns only when the last client has disconnected.

    An invalid frame, or an error of a store that a client caused, ends only the connection of this client.
    """

    def __init__(
        self, stores: OpenStores, *, listener: socket.socket | None = None, same_process: bool = False
    ) -> None:
        self.stores = stores
        self.same_process = same_process
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._listener = listener
        self._is_accepting = False
        self._clients: set[Session] = set()
        self._calls: deque[Callable[[], None]] = deque()
        self._later: list[Callable[[], None]] = []
        self._num_left = 0
        self._why_later = ""  # the last reason of `call_later` that was logged
        self._last_look_s = time.monotonic()
        self._woken, self._wakes = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._is_awake = self._stopped = False
        self.selector.register(self._woken, selectors.EVENT_READ, self._drain)
        if listener is not None:
            listener.setblocking(False)
            self._resume_accepting(listener)

    def add(self, connected: socket.socket, *, is_joined: bool = False) -> None:
        """Serve a connected client. `is_joined`: another client has sent the socket of this client. Call this method
        before `run`, or on the loop's thread."""
        self._clients.add(Session(self, connected, is_joined=is_joined))

    def call(self, do: Callable[[], None]) -> None:
        """Run `do` on the loop's thread soon. `do` must not raise. Any thread may call this method."""
        self._calls.append(do)
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(BlockingIOError, OSError):
                self._wakes.send(b"\0")

    def call_later(self, do: Callable[[], None], why: str) -> None:
        """Run `do` at the next check, because the machine lacks resources now. Call this method on the loop's
        thread."""
        self._later.append(do)
        if why != self._why_later:
            log.warning("%s; it is tried again", why)
            self._why_later = why

    def end_clients(self, why: str) -> None:
        """Accept all jobs that each client has sent, then end the session of the client. Called on the loop's thread
        after the engine has ended."""
        for client in list(self._clients):
            client.drain(why)

    def stop(self) -> None:
        """Make `run` return. The process must end directly afterwards, because connections with jobs in flight stay
        open until the process ends. Any thread may call this method."""
        self.call(self._stop)

    def run(self) -> None:
        try:
            while not self._stopped and (self._listener is not None or self._keeps_process()):
                self._step()
        finally:
            for client in list(self._clients):
                client.end("the process ends")
            for part in (self._woken, self._wakes, self._listener, self.selector):
                if part is not None:
                    part.close()

    def _keeps_process(self) -> bool:
        return any(self.same_process or client.keeps_process for client in self._clients)

    def _step(self) -> None:
        """Handle ready sockets and calls once. A separate function, so that no local variable keeps a disconnected
        client alive while the loop sleeps."""
        is_busy = bool(self._later) or any(client.is_busy for client in self._clients)
        for key, events in self.selector.select(LOOK_S if is_busy else None):
            key.data(events)
        self._is_awake = False
        while self._calls:
            self._calls.popleft()()
        now_s = time.monotonic()
        if not is_busy:
            self._last_look_s = now_s
        elif now_s - self._last_look_s >= LOOK_S:
            self._last_look_s = now_s
            self.look()

    def look(self) -> None:
        """Announce stalled threads, send ALIVE to all clients, and run the functions of `call_later`. Called on the
        loop's thread."""
        for client in list(self._clients):
            client.look()
        waiting, self._later = self._later, []
        for do in waiting:
            do()
        if not self._later:
            self._why_later = ""

    def forget(self, client: Session) -> None:
        self._clients.discard(client)

    def log_left(self, error: Exception) -> None:
        """Log why the server drops a client. Only the counts 1, 2, 4, 8 and so on are warnings, so clients cannot fill
        the log."""
        self._num_left += 1
        level = logging.WARNING if self._num_left.bit_count() == 1 else logging.DEBUG
        log.log(level, "a client of the store process is disconnected: %s (%d so far)", error, self._num_left)

    def _stop(self) -> None:
        self._stopped = True

    def _drain(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _resume_accepting(self, listener: socket.socket) -> None:
        if not self._is_accepting:
            self.selector.register(listener, selectors.EVENT_READ, self._accept)
            self._is_accepting = True

    def _accept(self, _events: int = 0) -> None:
        """Accept a waiting client. If the process has no free descriptor, stop accepting until the next check.
        Otherwise the loop would spin, because the listener stays readable."""
        listener = self._listener
        assert listener is not None
        try:
            connected, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client has already disconnected
            self._resume_accepting(listener)
            return
        except OSError as error:
            if self._is_accepting:
                self.selector.unregister(listener)
                self._is_accepting = False
            self.call_later(self._accept, f"a client cannot be accepted: {error}; raise ulimit -n")
            return
        self._resume_accepting(listener)
        try:
            if (uid := user_of(connected)) != os.getuid():
                raise StoreError(f"this store serves only user {os.getuid()}, and the client runs as user {uid}")
            self.add(connected)
        except (OSError, StoreError) as error:
            self.log_left(error)
            connected.close()


def user_of(connected: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket. Raises StoreError if the kernel does not
    report the user id."""
    try:
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError as error:
        raise StoreError(
            f"the kernel does not report the user of a client (SO_PEERCRED: {error.strerror}), so no store is "
            "served here; give each engine a directory of its own"
        ) from error
    return int(_CREDENTIALS.unpack(credentials)[1])
