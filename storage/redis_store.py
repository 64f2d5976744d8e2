"""Pages in a Redis or Valkey server, 6.2 or newer: values under `hicache:NAMESPACE:KEY`.

One pipeline a batch. The server evicts what it likes (`maxmemory-policy`), so a prefix may have holes: a missing key is
a miss, and the others of the batch are read.
"""

from __future__ import annotations

import contextlib
import logging
import math
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.header import HEADER_BYTES
from hicache.storage.memory import Scratch
from hicache.storage.remote import RemotePageStore
from hicache.storage.resp import RedisConnection, Reply, ReplyError, command
from hicache.storage.store_url import StoreUrl

log = logging.getLogger("hicache.storage")

# Replies that wait in the server count against its maxmemory: a whole batch of them would have it evict pages.
_BYTES_AHEAD = 8 << 20


class RedisPageStore(RemotePageStore):
    """See `PageStore`; docs/remote.md has the options of the URL. Opening connects to nothing: a server that cannot be
    reached is one that misses, and is counted."""

    def __init__(self, url: str, /, **about: Any) -> None:
        at = StoreUrl.parse(url)
        is_unix, number = at.scheme == "redis+unix", at.path.strip("/")
        if is_unix == bool(at.host) or not (is_unix or number.isdecimal() or not number):
            raise StoreError(
                "a URL of Redis is redis://host:6379/0, with the number of a database, or redis+unix:///path"
            )
        if number and not is_unix:
            if "db" in at.given:
                raise StoreError(f"a URL of Redis names its database twice, /{number[:20]} and db: give one")
            at = replace(at, given={**at.given, "db": number})
        options = at.options(db=0, ttl_s=0, max_value_bytes=512 << 20, level=1, timeout_s=1.0, ca_file="")
        if options["ca_file"] and at.scheme != "rediss":
            raise StoreError(f"ca in a URL of {at.scheme}, which has no TLS: write rediss://")
        super().__init__(str(at), level=options["level"], **about)
        tls = _tls(options["ca_file"]) if at.scheme == "rediss" else None
        self._connection_to = at, options["db"], tls, options["timeout_s"]
        self._max_value_bytes, ttl_s = options["max_value_bytes"], options["ttl_s"]
        self._expiry = (b"EX", b"%d" % ttl_s) if ttl_s else ()
        self._idle: deque[RedisConnection] = deque()
        self._received = Scratch()
        for page_bytes, codec in self._codecs.items():
            if codec.max_value_bytes > self._max_value_bytes:
                log.warning("the store %s takes no pages of %d bytes; raise max_value in its URL", at, page_bytes)

    def _note_used(self, keys: Sequence[bytes]) -> None:
        """The server notes uses to the second, and keeps what was used for another `ttl`."""
        verb, options = (b"EXPIRE", self._expiry[1:]) if self._expiry else (b"TOUCH", ())
        self._ask(verb, keys, options)

    def _exist(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        return self._ask(b"EXISTS", keys, deadline_s=deadline_s)

    def _fetch(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], deadline_s: float) -> list[bool]:
        def receive(connection: RedisConnection, n: int, reply: Reply) -> bool:
            if isinstance(reply, ReplyError):
                self._refuse(keys[n], str(reply))
            return isinstance(reply, int) and self._receive(connection, keys[n], reply, buffers[n])

        verb = b"GETEX" if self._expiry else b"GET"
        commands = ([command(verb, self._key(key), *self._expiry)] for key in keys)
        num_ahead = max(2, _BYTES_AHEAD // max(map(len, buffers)))
        return self._answers(self._pipeline(commands, len(keys), num_ahead, receive, deadline_s), is_read=True)

    def _receive(self, connection: RedisConnection, key: bytes, value_bytes: int, page: PageBuffer) -> bool:
        """Read a value, a raw page straight into `page`; whether it is there now."""
        payload_bytes = value_bytes - HEADER_BYTES
        if payload_bytes < 0 or value_bytes > self._codecs.max_value_bytes:
            connection.end_value(value_bytes)
            self._refuse(key, f"value of {value_bytes} bytes")
            return False
        header = bytearray(HEADER_BYTES)
        payload = page.data if payload_bytes == len(page) else self._received.take(payload_bytes)[:payload_bytes]
        connection.read_into(memoryview(header))
        connection.read_into(payload)
        connection.end_value()
        return self._decode(key, bytes(header), payload, page)

    def _send(self, pages: Mapping[bytes, PageBuffer], lag: float, deadline_s: float) -> list[bool]:
        keys = [key for key in pages if self._codecs[len(pages[key])].max_value_bytes <= self._max_value_bytes]
        lengths: list[int] = []

        def commands() -> Iterator[Sequence[bytes | memoryview]]:
            for key in keys:
                value = self._encode(key, pages[key], lag)
                lengths.append(len(value))
                # The value is the third word; its header and its payload are sent from where they lie.
                start, end = command(b"SET", self._key(key), b"", b"NX", *self._expiry).split(b"$0\r\n", 1)
                yield start + b"$%d\r\n" % len(value), value.header, memoryview(value.payload), end

        def receive(_: RedisConnection, n: int, reply: Reply) -> bool:
            if reply is None:  # present
                self._used.append(keys[n])
            else:
                self._written(len(pages[keys[n]]), lengths[n])
            return True

        answers = dict(zip(keys, self._pipeline(commands(), len(keys), len(keys), receive, deadline_s), strict=True))
        return self._answers([answers.get(key, False) for key in pages], is_read=False)

    def _remove(self, keys: Sequence[bytes]) -> int:
        return sum(self._ask(b"UNLINK", keys, is_read=False))

    def _disconnect(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _key(self, key: bytes) -> bytes:
        return self._name(key, ":").encode()

    def _ask(
        self,
        verb: bytes,
        keys: Sequence[bytes],
        options: Sequence[bytes] = (),
        *,
        deadline_s: float = math.inf,
        is_read: bool = True,
    ) -> list[bool]:
        """For which keys the server answers 1."""
        commands = ([command(verb, self._key(key), *options)] for key in keys)
        answers = self._pipeline(commands, len(keys), len(keys), lambda _, n, reply: reply == 1, deadline_s)
        return self._answers(answers, is_read=is_read)

    def _pipeline(
        self,
        commands: Iterable[Sequence[bytes | memoryview]],
        num_commands: int,
        num_ahead: int,
        receive: Callable[[RedisConnection, int, Reply], bool],
        deadline_s: float,
    ) -> list[bool | Exception]:
        """What `receive` says to the reply of each command, or the error in its place. At most `num_ahead` commands are
        sent whose replies are not read yet."""
        answers: list[bool | Exception] = []
        if not num_commands:
            return answers
        parts = iter(commands)
        try:
            with self._connected(deadline_s) as connection:
                for n in range(-min(num_ahead, num_commands), num_commands):
                    connection.send(*next(parts, ()))
                    if n >= 0:
                        reply = connection.reply()
                        if isinstance(reply, ReplyError) and not str(reply).startswith("WRONGTYPE"):
                            answers.append(reply)
                        else:
                            answers.append(receive(connection, n, reply))
        except OSError as error:
            answers += [error] * (num_commands - len(answers))
            self._disconnect()  # idle connections have most likely failed too
        return answers

    @contextlib.contextmanager
    def _connected(self, deadline_s: float) -> Iterator[RedisConnection]:
        """A connection of one's own; one whose replies were not all read is closed."""
        connection = self._unused() or RedisConnection(*self._connection_to, deadline_s)
        connection.deadline_s = deadline_s
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)

    def _unused(self) -> RedisConnection | None:
        """An idle connection that the server has not closed, as it does after its `timeout`."""
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if connection.is_open():
                    return connection
                connection.close()
        return None


def _tls(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise StoreError(f"ca={ca_file!r} in a URL of rediss: give a file of certificates in PEM ({error})") from None
