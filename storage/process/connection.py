"""One end of a stream of frames; sending and receiving do not block."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

from hicache.storage.process.frames import Body, Frames, Kind

_RECEIVE_BYTES = 1 << 16  # bytes of one call; the allocator would map and unmap a larger buffer in each call
_WAIT_S = 0.5


class ConnectionEnded(Exception):
    """The other end has closed the connection, so it no longer uses shared memory."""


class Connection:
    """A non-blocking socket with frames; owned by one thread. All methods except `finish` and `close` raise
    `ConnectionEnded`.

    `unsent`: bytes that the socket has not accepted yet; each `send` tries again. `frames`: parses received bytes.
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
        """Send a frame with a descriptor, which is attached to its first byte, so unsent bytes are sent first. May
        block."""
        while self.unsent:
            self._await(select.POLLOUT, _WAIT_S)
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
            yield from self.frames.feed(data)
            is_more = len(data) == _RECEIVE_BYTES  # a shorter read has emptied the socket

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
        meanwhile."""
        self._await(select.POLLIN | (select.POLLOUT if self.unsent else 0), seconds)

    def finish(self) -> None:
        """Stop sending. The other end closes the connection when it has finished the jobs that it received."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.socket.close()

    def _await(self, events: int, seconds: float) -> None:
        descriptor = self.socket.fileno()
        if descriptor >= 0:
            poller = select.poll()  # poll is used because select() accepts only descriptors below 1024
            poller.register(descriptor, events)
            poller.poll(1e3 * seconds)

    def _read(self, num_bytes: int) -> bytes:
        return self.socket.recv(num_bytes)
