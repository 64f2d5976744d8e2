"""A connection to a Redis server, as far as a page store needs one: values leave and reach the caller's memory without
a copy, and nothing is tried twice. docs/decisions/037-remote-clients.md says why it is not redis-py's.

The protocol is RESP2: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import io
import select
import socket
import ssl
import time
from typing import TypeAlias, cast

from hicache.storage.store_url import StoreUrl

_BUFFER_BYTES = 64 << 10
_MAX_LINE_BYTES = 4096


class ReplyError(Exception):
    """What a server answers instead: "OOM command not allowed", "WRONGTYPE Operation against a key", and so on."""


# "+OK" is 1, a missing value None; of a value this is the length, and its bytes are still to be read.
Reply: TypeAlias = int | ReplyError | None


class RedisConnection:
    """One connection; one thread at a time. Raises `OSError` when it fails, and is then of no use any more.

    `timeout_s`: for how long at most nothing moves. `deadline_s`: a time of `time.monotonic` after which nothing more
    is sent or read.
    """

    def __init__(self, at: StoreUrl, db: int, tls: ssl.SSLContext | None, timeout_s: float, deadline_s: float) -> None:
        self._timeout_s, self.deadline_s = timeout_s, deadline_s
        self._unsent = bytearray()
        is_unix = at.scheme == "redis+unix"
        if is_unix:
            self._socket = socket.socket(socket.AF_UNIX)
            self._wait()
        else:
            self._socket = socket.create_connection((at.host, at.port or 6379), self._left_s())
        try:
            if is_unix:
                self._socket.connect(at.path)
            else:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls:
                self._socket = tls.wrap_socket(self._socket, server_hostname=at.host)
            self._reader = cast(io.BufferedReader, self._socket.makefile("rb", _BUFFER_BYTES))
            if at.password:
                self._require(b"AUTH", *([at.user.encode()] if at.user else []), at.password.encode())
            if db:
                self._require(b"SELECT", b"%d" % db)
        except BaseException:
            self._socket.close()
            raise

    def send(self, *parts: bytes | memoryview) -> None:
        """Send commands, in any number of parts. Short ones are copied, and leave with a long one or before a reply is
        read."""
        for part in parts:
            if len(self._unsent) + len(part) > _BUFFER_BYTES:
                self._flush()
            if len(part) < _BUFFER_BYTES:
                self._unsent += part
            else:
                self._send_all(part)

    def reply(self) -> Reply:
        """The answer to the next command that has none yet."""
        self._flush()
        self._wait()
        line = self._reader.readline(_MAX_LINE_BYTES)
        kind, text = line[:1], line[1:-2]
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server closed the connection, or speaks another protocol")
        if kind == b"-":
            return ReplyError(text.decode(errors="replace"))
        if kind == b"+":
            return 1
        if line == b"$-1\r\n":
            return None
        if kind not in (b":", b"$") or not text.isdigit():
            raise ConnectionError("the server answers in another protocol")
        return int(text)

    def read_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes of a value."""
        while target:
            self._wait()
            num_bytes = self._reader.readinto1(target)
            if not num_bytes:
                raise ConnectionError("the server closed the connection")
            target = target[num_bytes:]

    def end_value(self, unread_bytes: int = 0) -> None:
        """Skip what is left of a value, and its end."""
        unread_bytes += len(b"\r\n")
        skipped = memoryview(bytearray(min(unread_bytes, _BUFFER_BYTES)))
        for left_bytes in range(unread_bytes, 0, -_BUFFER_BYTES):
            self.read_into(skipped[:left_bytes])

    def is_open(self) -> bool:
        """Whether the server has closed it, as far as is known; for a time when no reply is awaited."""
        unasked = select.poll()
        unasked.register(self._socket, select.POLLIN)
        return not unasked.poll(0)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def _require(self, *words: bytes) -> None:
        """A command that has to succeed."""
        self.send(command(*words))
        answer = self.reply()
        if isinstance(answer, ReplyError):
            raise ConnectionError(f"{words[0].decode()} is refused: {answer}")

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, bytearray()
        self._send_all(unsent)

    def _send_all(self, part: bytes | bytearray | memoryview) -> None:
        left = memoryview(part)
        while left:
            self._wait()
            left = left[self._socket.send(left) :]

    def _wait(self) -> None:
        """The next operation may take what is left of the time."""
        self._socket.settimeout(self._left_s())

    def _left_s(self) -> float:
        left_s = min(self._timeout_s, self.deadline_s - time.monotonic())
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        return left_s


def command(*words: bytes) -> bytes:
    """A command as it is sent."""
    return b"".join((b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)))
