"""Pages in a Redis or Valkey server, 6.2 or newer: values under `hicache:NAMESPACE:KEY`.

One pipeline a batch. The server evicts what it likes (`maxmemory-policy`), so a prefix may have holes: a missing key is
a miss, and the others of the batch are read.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFormat
from hicache.storage.header import HEADER_BYTES
from hicache.storage.memory import Scratch
from hicache.storage.remote import RemotePageStore
from hicache.storage.resp import RedisAddress, RedisConnection, Reply, ReplyError, command

MAX_VALUE_BYTES = 512 << 20  # what a server takes unless its proto-max-bulk-len says otherwise
_MAX_USED_KEYS = 1 << 16
# Replies that wait in the server count against its maxmemory: a whole batch of them would have it evict pages.
_BYTES_AHEAD = 8 << 20


class RedisPageStore(RemotePageStore):
    """See `PageStore`; `touch` is told to the server by the next call that writes.

    `timeout_s`: for how long a call waits for a server that does nothing. `ttl_s`: how long a page that nobody uses is
    kept, 0 for as long as the server likes. Pages whose values are longer than `max_value_bytes` are not stored.
    Opening connects to nothing: a server that cannot be reached is one that misses, and is counted.
    """

    def __init__(
        self,
        address: RedisAddress,
        *,
        identity: Mapping[str, str | int],
        formats: Sequence[PageFormat],
        level: int = 1,
        cipher: PageCipher | None = None,
        timeout_s: float = 1.0,
        ttl_s: int = 0,
        max_value_bytes: int = MAX_VALUE_BYTES,
    ) -> None:
        if timeout_s <= 0 or ttl_s < 0 or max_value_bytes <= HEADER_BYTES:
            raise StoreError(f"{timeout_s=}, {ttl_s=}, {max_value_bytes=}: one of them is out of range")
        super().__init__(str(address), identity=identity, formats=formats, level=level, cipher=cipher)
        self._address, self._timeout_s, self._max_value_bytes = address, timeout_s, max_value_bytes
        self._expiry = (b"EX", b"%d" % ttl_s) if ttl_s else ()
        self._idle: deque[RedisConnection] = deque()
        self._received = Scratch()
        self._used: deque[bytes] = deque(maxlen=_MAX_USED_KEYS)  # least recently first

    def touch(self, keys: Sequence[bytes]) -> None:
        self._require(keys)
        self._used.extend(reversed(keys))

    def sync(self) -> None:
        self._tell_used()

    def _exist(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        commands = [command(b"EXISTS", self._key(key)) for key in keys]
        return self._batch(commands, len(commands), lambda _, n, reply: reply == 1, deadline_s)

    def _fetch(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], deadline_s: float) -> list[bool]:
        verb = b"GETEX" if self._expiry else b"GET"
        commands = [command(verb, self._key(key), *self._expiry) for key in keys]
        num_ahead = max(2, _BYTES_AHEAD // max(map(len, buffers)))

        def receive(connection: RedisConnection, n: int, reply: Reply) -> bool:
            if isinstance(reply, ReplyError) and reply.is_wrong_type:
                self._refuse(keys[n], reply.text)
            return isinstance(reply, int) and self._receive(connection, keys[n], reply, buffers[n], deadline_s)

        return self._batch(commands, num_ahead, receive, deadline_s)

    def _receive(
        self, connection: RedisConnection, key: bytes, value_bytes: int, page: PageBuffer, deadline_s: float
    ) -> bool:
        """Read a value, a raw page straight into `page`; whether it is there now."""
        payload_bytes = value_bytes - HEADER_BYTES
        if payload_bytes < 0 or value_bytes > self._codecs.max_value_bytes:
            connection.end_value(value_bytes, deadline_s)
            self._refuse(key, f"value of {value_bytes} bytes")
            return False
        header = bytearray(HEADER_BYTES)
        payload = page.data if payload_bytes == len(page) else self._received.take(payload_bytes)[:payload_bytes]
        connection.read_into(memoryview(header), deadline_s)
        connection.read_into(payload, deadline_s)
        connection.end_value(0, deadline_s)
        return self._decode(key, bytes(header), payload, page)

    def _send(self, pages: Mapping[bytes, PageBuffer], lag: float, deadline_s: float) -> list[bool]:
        self._tell_used()
        stored: set[bytes] = set()
        errors: list[object] = []
        try:
            with self._connected(deadline_s) as connection:
                sent = {key: self._send_page(connection, key, page, lag, deadline_s) for key, page in pages.items()}
                for key, value_bytes in sent.items():
                    reply = connection.reply(deadline_s) if value_bytes else ReplyError("a value is too long")
                    if isinstance(reply, ReplyError):
                        errors.append(reply)
                        continue
                    stored.add(key)
                    if reply is None:  # present
                        self._used.append(key)
                    else:
                        self._written(len(pages[key]), value_bytes)
        except OSError as error:
            errors.append(error)
            self._disconnect()
        if errors:
            self._failed(errors[0], writes=len(pages) - len(stored))
        return [key in stored for key in pages]

    def _send_page(
        self, connection: RedisConnection, key: bytes, page: PageBuffer, lag: float, deadline_s: float
    ) -> int:
        """Send one page; the length of its value, 0 if that is too long."""
        value = self._encode(key, page, lag)
        if len(value) > self._max_value_bytes:
            return 0
        name, options = self._key(key), (b"NX", *self._expiry)
        start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(options), len(name), name, len(value))
        # A command's last words, without the line that counts them.
        end = b"\r\n" + command(*options).partition(b"\r\n")[2]
        connection.send(start + value.header, memoryview(value.payload), end, deadline_s=deadline_s)
        return len(value)

    def _remove(self, keys: Sequence[bytes]) -> int:
        try:
            with self._connected(math.inf) as connection:
                connection.send(command(b"UNLINK", *map(self._key, keys)))
                reply: Reply = connection.reply()
        except OSError as error:
            self._disconnect()
            reply = ReplyError(str(error))
        if isinstance(reply, ReplyError):
            self._failed(reply, writes=len(keys))
        return reply if isinstance(reply, int) else 0

    def _tell_used(self) -> None:
        """Have the server count uses, which it notes to the second, and keep what was used for another `ttl_s`."""
        used, self._used = self._used, deque(maxlen=_MAX_USED_KEYS)
        if used:
            verb, options = (b"EXPIRE", self._expiry[1:]) if self._expiry else (b"TOUCH", ())
            commands = [command(verb, self._key(key), *options) for key in dict.fromkeys(used)]
            self._batch(commands, len(commands), lambda _, n, reply: True, math.inf)

    def _disconnect(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _key(self, key: bytes) -> bytes:
        return self._name(key, ":").encode()

    def _batch(
        self,
        commands: Sequence[bytes],
        num_ahead: int,
        receive: Callable[[RedisConnection, int, Reply], bool],
        deadline_s: float,
    ) -> list[bool]:
        """What `receive` says to each reply; False from where the connection fails. At most `num_ahead` commands are
        sent whose replies are not read yet."""
        received: list[bool] = []
        errors: list[object] = []
        try:
            with self._connected(deadline_s) as connection:
                connection.send(b"".join(commands[:num_ahead]), deadline_s=deadline_s)
                for n in range(len(commands)):
                    reply = connection.reply(deadline_s)
                    if isinstance(reply, ReplyError) and not reply.is_wrong_type:
                        errors.append(reply)
                    received.append(receive(connection, n, reply))
                    connection.send(*commands[n + num_ahead : n + num_ahead + 1], deadline_s=deadline_s)
        except OSError as error:
            errors += [error] * (len(commands) - len(received))
            self._disconnect()  # idle connections have most likely failed too
        if errors:
            self._failed(errors[0], reads=len(errors))
        return received + [False] * (len(commands) - len(received))

    @contextlib.contextmanager
    def _connected(self, deadline_s: float) -> Iterator[RedisConnection]:
        """A connection of one's own; one whose replies were not all read is closed."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = RedisConnection(self._address, self._timeout_s, deadline_s)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
