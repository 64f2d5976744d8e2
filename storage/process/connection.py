"""One end of a stream of frames that neither sends nor receives by waiting."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

from hicache.storage.process.frames import Body, Frames, Kind

_RECEIVE_BYTES = 1 << 16  # more would be mapped and unmapped by each call
_WAIT_S = 0.5


class ConnectionEnded(Exception):
    """The other end is closed: nothing there touches shared memory any more."""


class Connection:
    """Owned by one thread. Every method but `finish` and `close` raises `ConnectionEnded`.

    `unsent`: what the socket did not take yet; each `send` tries again. `frames`: cut out of what was taken.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.frames = Frames()
        self.unsent = bytearray()

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
        """A descriptor travels with the first byte of its frame, so what was to be sent before goes first. May wait."""
        while self.unsent:
            self._await(select.POLLOUT, _WAIT_S)
            self.send()
        try:
            sent = socket.send_fds(self.socket, [data], [descriptor])
        except OSError as error:
            raise ConnectionEnded(str(error)) from error
        self.unsent += data[sent:]

    def receive(self) -> Iterator[tuple[Kind, Body]]:
        """All frames that have come. Raises ValueError too."""
        is_more = True
        while is_more and (data := self.take()):
            yield from self.frames.feed(data)
            is_more = len(data) == _RECEIVE_BYTES  # less is all that has come

    def take(self) -> bytes:
        """Some of the bytes that have come; b"" where none have."""
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
        """Until something has come, or can be sent. Another thread may use the connection meanwhile."""
        self._await(select.POLLIN | (select.POLLOUT if self.unsent else 0), seconds)

    def finish(self) -> None:
        """Tell the other end that nothing more comes: it ends the connection when it has done what it has."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.socket.close()

    def _await(self, events: int, seconds: float) -> None:
        descriptor = self.socket.fileno()
        if descriptor >= 0:
            poller = select.poll()  # select() takes no descriptor from 1024 on
            poller.register(descriptor, events)
            poller.poll(1e3 * seconds)

    def _read(self, num_bytes: int) -> bytes:
        return self.socket.recv(num_bytes)
