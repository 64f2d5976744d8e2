"""Base class of the stores on other machines: names of page keys on the server, argument checks, values, verification,
counters.

The server stores, under the name of a key, the value that the codec encodes: header and payload. Therefore identity,
verification, compression and encryption are the same as on disk, and processes with the same identity share pages.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hicache.storage.base import PageBuffer, StoreError, StoreStats
from hicache.storage.calls import Counters, check_keys, check_pages
from hicache.storage.cipher import PageCipher
from hicache.storage.codec import PageCodecs
from hicache.storage.filters import PageFormat
from hicache.storage.header import NAMESPACE_BYTES, HeaderAndPayload, page_bytes_of
from hicache.storage.memory import Scratch
from hicache.storage.owner import OwnerProcess
from hicache.storage.records import identity_with_key, namespace_digest, sorted_formats

log = logging.getLogger("hicache.storage")

_NAME_DIGEST_BYTES = 8
_MAX_NAMED_KEY_BYTES, DIGEST_PREFIX = 180, "sha256."
_MAX_USED_KEYS = 1 << 16
_MAX_SHOWN = 1000  # an error of S3 has its reason after twice the name of the object


class RemotePageStore(ABC):
    """A `PageStore` without the transfers. A subclass adds methods that fetch, send, look up and remove a batch of
    values.

    `on_value`: if set, threads of `get_into` call this function for each page that they read, with the page key and a
    copy of the value.

    A failed call is not retried: the next call reconnects, and the caller decides how often to try. `description` names
    the store in messages. The rules of `PageStore` for threads apply, except that any number of threads may write.
    """

    def __init__(
        self,
        description: str,
        *,
        identity: Mapping[str, str | int],
        formats: Sequence[PageFormat],
        level: int,
        cipher: PageCipher | None,
    ) -> None:
        if not identity:
            raise StoreError("a store needs an identity; name the model, the dtype and the layout of its pages")
        digest = namespace_digest(identity_with_key(identity, cipher))
        self._codecs = PageCodecs(sorted_formats(formats), digest[:NAMESPACE_BYTES], level, cipher)
        self._namespace = digest[:_NAME_DIGEST_BYTES].hex()
        self._description = description
        self._counters = Counters()
        self._closed = False
        self.on_value: Callable[[bytes, memoryview], None] | None = None
        self._owner = OwnerProcess(f"the store {description}")
        self._values = Scratch()
        self._used: deque[bytes] = deque(maxlen=_MAX_USED_KEYS)  # least recently used key first
        self._lock = threading.Lock()
        self._corrupt: set[bytes] = set()  # keys of values that the next writing call deletes

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return tuple(self._codecs)

    def register_memory(self, memory: PageBuffer) -> None:
        """Do nothing, because sockets send from and receive into any memory."""
        self._require()

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        self._require(keys)
        if not keys or time.monotonic() >= deadline_s:
            return [False] * len(keys)
        found = self._exist(keys, deadline_s)
        return [exists and key not in self._corrupt for key, exists in zip(keys, found, strict=True)]

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        self._require()
        check_pages(keys, buffers, self._codecs, writeable=True)
        is_late = time.monotonic() >= deadline_s
        found = [False] * len(keys) if is_late or not keys else self._fetch(keys, buffers, deadline_s)
        num_hits = sum(found)
        failed = len(keys) if is_late else 0
        self._counters.add(hits=num_hits, misses=len(keys) - num_hits, read_errors=failed)
        return found

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record uses of pages. The next `put`, `sync` or `close` sends these uses to the server."""
        self._require(keys)
        self._used.extend(reversed(keys))

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        self._require()
        check_pages([key for key, _ in items], [page for _, page in items], self._codecs, writeable=False)
        if not items or time.monotonic() >= deadline_s:
            return [False] * len(items)
        self._drop_corrupt()
        self.sync()
        pages = dict(reversed(items))  # of two pages with one key, the first one is stored
        keys = list(dict.fromkeys(key for key, _ in items))
        stored = dict(zip(keys, self._send({key: pages[key] for key in keys}, lag, deadline_s), strict=True))
        return [stored[key] for key, _ in items]

    def get_value(self, key: bytes) -> bytes | None:
        self._require([key])
        value = self._fetch_value(key)
        if value is not None and (reason := self._codecs.value_fault(key, value)):
            self._refuse(key, reason)
            return None
        return value

    def put_values(self, items: Sequence[tuple[bytes, bytes | memoryview]]) -> list[bool]:
        self._require([key for key, _ in items])
        self._drop_corrupt()
        self.sync()
        sound = dict[bytes, bytes | memoryview]()
        for key, value in items:
            if reason := self._codecs.value_fault(key, value):
                log.warning("the store %s refuses a value: %s", self._description, reason)
                self._counters.add(corrupt=1)
            else:
                sound.setdefault(key, value)
        stored = dict(zip(sound, self._send_values(sound), strict=True)) if sound else {}
        return [stored.get(key, False) for key, _ in items]

    def reopen(self) -> bool:
        """Return True, because each call of the store connects if there is no connection."""
        self._require()
        return True

    def delete(self, keys: Sequence[bytes]) -> int:
        self._require(keys)
        self._drop_corrupt()
        return self._remove(keys) if keys else 0

    def stats(self) -> StoreStats:
        """Return counters of the calls of this object. Calls of other clients of the server are not counted."""
        return self._counters.now

    def thread_read_errors(self) -> int:
        return self._counters.thread_read_errors

    def sync(self) -> None:
        """Send the recorded uses to the server. Pages are on the server when `put` returns; the server's settings
        decide how durable the pages are."""
        used, self._used = self._used, deque(maxlen=_MAX_USED_KEYS)
        if used:
            self._note_used(list(dict.fromkeys(used)))

    def close(self) -> None:
        if not self._closed and self._owner.is_here:
            self._drop_corrupt()
            self.sync()
            self._closed = True
            self._disconnect()

    @abstractmethod
    def _exist(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Return, for each key, whether the server has a value."""

    @abstractmethod
    def _fetch(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], deadline_s: float) -> list[bool]:
        """Fill the buffers by `_decode`. Return False for each key that fails, and pass each failure to `_failed`."""

    @abstractmethod
    def _send(self, pages: Mapping[bytes, PageBuffer], lag: float, deadline_s: float) -> list[bool]:
        """Encode the pages with `_encode`, and store the values under keys that have no value yet. Pass each stored
        page to `_written` and each failure to `_failed`."""

    @abstractmethod
    def _fetch_value(self, key: bytes) -> bytes | None:
        """Return the value of a key. Return None if the key has no value, or if the read fails; pass a failure to
        `_failed`."""

    @abstractmethod
    def _send_values(self, values: Mapping[bytes, bytes | memoryview]) -> list[bool]:
        """Store values that `value_fault` accepted. The result and the calls of `_written` and `_failed` are those of
        `_send`."""

    @abstractmethod
    def _remove(self, keys: Sequence[bytes]) -> int:
        """Delete values. Return the number of values that were present."""

    def _note_used(self, keys: Sequence[bytes]) -> None:  # noqa: B027 - not every server has a use order
        """Send uses to the server, the most recent one last."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Release connections and threads."""

    def _name(self, key: bytes, separator: str) -> str:
        """Return the name of a key on the server: `hicache`, the first 8 bytes of the namespace digest in hex, and the
        key in base64url without padding. For a key above 180 bytes, the name has `sha256.` and the SHA-256 of the key
        in hex instead, because servers limit a part of a name to 255 bytes. The checksum of a value covers its key, so
        a value under a wrong name fails verification."""
        text = base64.urlsafe_b64encode(key).rstrip(b"=").decode()
        if len(key) > _MAX_NAMED_KEY_BYTES:
            text = f"{DIGEST_PREFIX}{hashlib.sha256(key).hexdigest()}"
        return separator.join(("hicache", self._namespace, text))

    def _encode(self, key: bytes, page: PageBuffer, lag: float) -> HeaderAndPayload:
        """Encode a page. The value is valid until the same thread encodes the next page."""
        codec = self._codecs[len(page)]
        return codec.encode_split(key, page, self._values.take(codec.max_value_bytes), lag=lag)

    def _decode(self, key: bytes, header: bytes, payload: memoryview, page: PageBuffer) -> bool:
        """Decode a value into `page`. Returns whether `page` has verified bytes. `payload` may lie in `page`. A value
        that fails verification is counted as corrupt and deleted later, unless it is a valid page of another size."""
        keep, value = self.on_value, None
        if keep is not None:  # copied now: decoding may overwrite a payload in `page`
            value = np.empty(len(header) + len(payload), np.uint8)
            value[: len(header)] = np.frombuffer(header, np.uint8)
            np.copyto(value[len(header) :], np.frombuffer(payload, np.uint8))  # releases the interpreter lock
        reason = self._codecs[len(page)].decode_split(key, header, payload, page)
        if not reason:
            if keep is not None and value is not None:
                keep(key, value.data)
            return True
        if page_bytes_of(header) == len(page) or self._codecs.verify_stored(key, header + bytes(payload)):
            self._refuse(key, reason)
        return False

    def _refuse(self, key: bytes, reason: str) -> None:
        """Count a value that is not the page of `key`; the next writing call deletes it."""
        log.warning("deleting a page of the store %s that does not verify: %s", self._description, reason)
        self._counters.add(corrupt=1)
        with self._lock:
            self._corrupt.add(key)

    def _answers(self, answers: Sequence[bool | Exception], *, is_read: bool) -> list[bool]:
        """Return for each answer whether it is True. Exceptions among the answers are counted as errors."""
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if errors:
            self._failed(errors[0], len(errors), is_read=is_read)
        return [answer is True for answer in answers]

    def _failed(self, error: object, num: int, *, is_read: bool) -> None:
        log.warning("the store %s fails: %s", self._description, first_line(error))
        self._counters.add(**{"read_errors" if is_read else "write_errors": num})

    def _written(self, page_bytes: int, value_bytes: int) -> None:
        self._counters.add(puts=1, put_bytes_raw=page_bytes, put_bytes_stored=value_bytes)

    def _drop_corrupt(self) -> None:
        with self._lock:
            corrupt, self._corrupt = self._corrupt, set()
        if corrupt:
            self._remove(list(corrupt))

    def _require(self, keys: Sequence[bytes] = ()) -> None:
        """Raise `StoreError` if the store is closed or a key is invalid, and NotRunning in a forked process."""
        self._owner.require_here()
        if self._closed:
            raise StoreError("the store is closed; open it again")
        check_keys(keys)


def first_line(error: object) -> str:
    """Return the first line of a client's or server's message, for logs; at most `_MAX_SHOWN` characters."""
    line = str(error).partition("\n")[0]
    return line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}..."
