"""A connection to a Redis server, as far as a page store needs one: values leave and reach the caller's memory without
a copy, and nothing is tried twice. docs/decisions/037-remote-clients.md says why it is not redis-py's.

The protocol is RESP2: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import io
import math
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import TypeAlias, cast

_BUFFER_BYTES = 64 << 10
_MAX_LINE_BYTES = 4096


@dataclass(frozen=True)
class RedisAddress:
    """Where a server listens: `host` and `port`, or the Unix socket `path`. `user` "" is the default user, `password`
    "" none. `ca_file`: the certificates that a server's is verified by, "" for those of the system."""

    host: str = ""
    port: int = 6379
    path: str = ""
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    db: int = 0
    tls: bool = False
    ca_file: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"redis+unix://{self.path}?db={self.db}"
        return f"redis{'s' if self.tls else ''}://{self.host}:{self.port}/{self.db}"


@dataclass(frozen=True)
class ReplyError:
    """What a server answers instead: "OOM command not allowed", "WRONGTYPE Operation against a key", and so on."""

    text: str

    @property
    def is_wrong_type(self) -> bool:
        """Whether there is something under the key that is no string."""
        return self.text.startswith("WRONGTYPE")

    def __str__(self) -> str:
        return self.text


# "+OK" is 1, a missing value None; of a value this is the length, and its bytes are still to be read.
Reply: TypeAlias = int | ReplyError | None


class RedisConnection:
    """One connection; one thread at a time. Raises `OSError` when it fails, and is then of no use any more.

    `timeout_s`: for how long at most nothing moves. Deadlines are times of `time.monotonic`.
    """

    def __init__(self, address: RedisAddress, timeout_s: float, deadline_s: float = math.inf) -> None:
        self._timeout_s = timeout_s
        wait_s = self._wait_s(deadline_s)
        if address.path:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(wait_s)
        else:
            self._socket = socket.create_connection((address.host, address.port), wait_s)
        try:
            self._set_up(address, deadline_s)
        except BaseException:
            self._socket.close()
            raise

    def _set_up(self, address: RedisAddress, deadline_s: float) -> None:
        if address.path:
            self._socket.connect(address.path)
        else:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.tls:
            context = ssl.create_default_context(cafile=address.ca_file or None)
            self._socket = context.wrap_socket(self._socket, server_hostname=address.host)
        self._reader = cast(io.BufferedReader, self._socket.makefile("rb", _BUFFER_BYTES))
        if address.password:
            names = [address.user] if address.user else []
            self._ask(["AUTH", *names, address.password], deadline_s)
        if address.db:
            self._ask(["SELECT", str(address.db)], deadline_s)

    def send(self, *parts: bytes | memoryview, deadline_s: float = math.inf) -> None:
        """Send commands, in any number of parts."""
        for part in parts:
            left = memoryview(part)
            while left:
                self._socket.settimeout(self._wait_s(deadline_s))
                left = left[self._socket.send(left) :]

    def reply(self, deadline_s: float = math.inf) -> Reply:
        """The answer to the next command that has none yet."""
        self._socket.settimeout(self._wait_s(deadline_s))
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

    def read_into(self, target: memoryview, deadline_s: float = math.inf) -> None:
        """Fill `target` with the next bytes of a value."""
        while target:
            self._socket.settimeout(self._wait_s(deadline_s))
            num_bytes = self._reader.readinto1(target)
            if not num_bytes:
                raise ConnectionError("the server closed the connection")
            target = target[num_bytes:]

    def end_value(self, unread_bytes: int = 0, deadline_s: float = math.inf) -> None:
        """Skip what is left of a value, and its end."""
        unread_bytes += len(b"\r\n")
        scratch = memoryview(bytearray(min(unread_bytes, _BUFFER_BYTES)))
        while unread_bytes:
            part = scratch[: min(unread_bytes, len(scratch))]
            self.read_into(part, deadline_s)
            unread_bytes -= len(part)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def _ask(self, words: list[str], deadline_s: float) -> None:
        """A command that has to succeed."""
        self.send(command(*(word.encode() for word in words)), deadline_s=deadline_s)
        answer = self.reply(deadline_s)
        if isinstance(answer, ReplyError):
            raise ConnectionError(f"{words[0]} is refused: {answer}")

    def _wait_s(self, deadline_s: float) -> float:
        left_s = min(self._timeout_s, deadline_s - time.monotonic())
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        return left_s


def command(*words: bytes) -> bytes:
    """A command as it is sent."""
    return b"".join((b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)))
