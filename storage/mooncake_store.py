"""Pages in a Mooncake store: values under `hicache-NAMESPACE-KEY` in memory that machines lend to a master's pool.

An unencrypted page in registered memory is sent and received in place: its value is one object of two buffers, header
and page. All other pages are copied through registered memory of the store. No page is compressed, because compressing
took longer than sending. Other clients may remove or evict values at any time, and the machine that holds a value may
fail, so every value is verified after it is received.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.cipher import PageCipher
from hicache.storage.header import HEADER_BYTES, HeaderAndPayload, page_bytes_of
from hicache.storage.memory import aligned_buffer
from hicache.storage.mooncake_client import (
    INVALID_PARAMS,
    PRESENT,
    TIMED_OUT,
    TRANSFER_FAILED,
    Codes,
    MooncakeClient,
    load_mooncake,
)
from hicache.storage.remote import RemotePageStore
from hicache.storage.store_url import StoreUrl

_MAX_CHUNKS = 4  # maximum chunks of the store's own memory; each chunk serves one call at a time
# Number of threads that one call uses for checksums and copies. A core reads pages that other cores wrote at 7 GB/s,
# about the rate at which the library transfers. More threads would wait for the interpreter lock.
_MAX_THREADS = 4
_SLOW_FAILURE_S = 1.0
_BATCH_BYTES = 64 << 20  # bytes of pages in one call of the library; the deadline is checked between two calls


@dataclass(frozen=True)
class _Value:
    """A value of `length` bytes in transfer. `in_place`: the library transfers from or to the page itself, and only the
    header is in a chunk."""

    key: bytes
    page: PageBuffer
    length: int
    in_place: bool

    @property
    def staging_bytes(self) -> int:
        """Return the bytes of a chunk that the value needs."""
        return HEADER_BYTES if self.in_place else self.length

    def addresses(self, staging: PageBuffer) -> list[int]:
        return [staging.ctypes.data, self.page.ctypes.data] if self.in_place else [staging.ctypes.data]

    @property
    def sizes(self) -> list[int]:
        return [HEADER_BYTES, len(self.page)] if self.in_place else [self.length]


T = TypeVar("T")
_Batch: TypeAlias = "list[tuple[_Value, PageBuffer]]"  # values, each with its part of a chunk


class MooncakePageStore(RemotePageStore):
    """A `PageStore` in Mooncake; docs/remote.md has the options of the URL. The next `put` or `sync` renews the leases
    of pages that were used; these leases decide Mooncake's eviction order. A call returns when the library no longer
    uses the buffers of the call; if a machine hangs, this takes up to 60 s."""

    def __init__(self, url: str, /, *, cipher: PageCipher | None = None, **about: Any) -> None:
        at = StoreUrl.parse(url)
        if not at.host or at.path not in ("", "/") or at.user or at.password:
            raise StoreError("a URL of Mooncake names its master: mooncake://host:50051?replicas=2")
        client: dict[str, Any] = {"segment_bytes": 0, "protocol": "tcp", "device": "", "metadata": "P2PHANDSHAKE"}
        given = at.options(**client, buffer_bytes=64 << 20, replicas=1, timeout_s=10.0)
        super().__init__(str(at), level=0, cipher=cipher, **about)
        self._is_plain = cipher is None
        self._config = load_mooncake().ReplicateConfig()
        self._config.replica_num = given["replicas"]
        client = {name: given[name] for name in (*client, "timeout_s")}
        self._client = MooncakeClient(at.host, at.port or 50051, **client)
        self._chunks = self._register_chunks(given["buffer_bytes"])
        self._num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(self._num_threads, "hicache-mooncake-page")

    def register_memory(self, memory: PageBuffer) -> None:
        """Register `memory` with Mooncake. If Mooncake registers the memory, pages in `memory` are transferred without
        a copy. RDMA needs a sufficient limit of locked memory (`ulimit -l`)."""
        self._require()
        if not self._client.register(memory):
            self._failed(f"cannot register {len(memory)} bytes of memory; its pages are copied", 0, is_read=True)

    def reopen(self) -> bool:
        """Return whether the master answers."""
        self._require()
        return self._call(_exist, [b"\0"])[0] >= 0

    def _exist(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        codes = self._call(_exist, keys)
        self._count(codes, is_read=True)
        return [code == 1 for code in codes]

    def _fetch(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], deadline_s: float) -> list[bool]:
        values = list(map(self._value, keys, buffers))
        codes = self._in_batches(values, deadline_s, self._receive)
        # The library returns the same codes for a value of another length and for a value that cannot be read.
        unclear = [n for n, code in enumerate(codes) if code in (INVALID_PARAMS, TRANSFER_FAILED)]
        lengths = self._call(_lengths, [keys[n] for n in unclear]) if unclear else []
        for n, length in zip(unclear, lengths, strict=True):
            if length >= 0 and length != values[n].length:
                codes[n] = 0
                if all(length != codec.max_value_bytes for codec in self._codecs.values()):
                    self._refuse(keys[n], f"value of {length} bytes")
        self._count(codes, is_read=True)
        return [code > 0 for code in codes]

    def _receive(self, batch: _Batch) -> Codes:
        codes = self._transfer(lambda library, *where: library.batch_get_into_multi_buffers(*where), batch)
        arrived = [part for part, code in zip(batch, codes, strict=True) if code >= 0]
        verified = iter(self._in_threads(self._is_verified, arrived))
        return [code if code < 0 or next(verified) else 0 for code in codes]

    def _is_verified(self, value: _Value, staging: PageBuffer) -> bool:
        payload = value.page.data if value.in_place else staging[HEADER_BYTES:].data
        return self._decode(value.key, staging[:HEADER_BYTES].tobytes(), payload, value.page)

    def _send(self, pages: Mapping[bytes, PageBuffer], lag: float, deadline_s: float) -> list[bool]:
        def send(batch: _Batch) -> Codes:
            self._in_threads(self._encode_into, batch)
            codes = self._transfer(
                lambda library, *where: library.batch_put_from_multi_buffers(*where, self._config), batch
            )
            for (value, _), code in zip(batch, codes, strict=True):
                if not code:
                    self._written(len(value.page), value.length)
            return codes

        present = dict(zip(pages, self._call(_exist, list(pages)), strict=True))
        values = [self._value(key, page) for key, page in pages.items() if not present[key]]
        codes = self._in_batches(values, deadline_s, send)
        self._count([*codes, *(code for code in present.values() if code < 0)], is_read=False)
        stored = {value.key for value, code in zip(values, codes, strict=True) if code in (0, PRESENT)}
        return [present[key] == 1 or key in stored for key in pages]

    def _fetch_value(self, key: bytes) -> bytes | None:
        codes = self._call(_lengths, [key])
        self._count(codes, is_read=True)
        lengths = {codec.max_value_bytes: page_bytes for page_bytes, codec in self._codecs.items()}
        if codes[0] not in lengths:
            if codes[0] >= 0:
                self._refuse(key, f"value of {codes[0]} bytes")
            return None
        page = np.empty(lengths[codes[0]], np.uint8)
        if self._fetch([key], [page], math.inf) != [True]:
            return None
        value = self._encode(key, page, 0.0)
        return value.header + bytes(value.payload)

    def _send_values(self, values: Mapping[bytes, bytes | memoryview]) -> list[bool]:
        """Decode the values, then store their pages uncompressed, because in this store the length of a value
        determines its page size."""
        pages = {key: np.empty(page_bytes_of(value), np.uint8) for key, value in values.items()}
        found = dict[bytes, PageBuffer]()
        for key, page in pages.items():
            value = HeaderAndPayload.of(values[key])
            # `_decode` is for values that were received: it reports them to `on_value`.
            if not self._codecs[len(page)].decode_split(key, value.header, value.payload, page):
                found[key] = page
        sent = dict(zip(found, self._send(found, 0.0, math.inf), strict=True)) if found else {}
        return [sent.get(key, False) for key in values]

    def _value(self, key: bytes, page: PageBuffer) -> _Value:
        in_place = self._is_plain and self._client.is_registered(page)
        return _Value(key, page, self._codecs[len(page)].max_value_bytes, in_place)

    def _encode_into(self, value: _Value, staging: PageBuffer) -> None:
        """Write the header of the value to `staging`. Unless the page is transferred in place, write the payload
        too."""
        encoded = self._codecs[len(value.page)].encode_split(value.key, value.page, staging.data[HEADER_BYTES:])
        staging[:HEADER_BYTES] = np.frombuffer(encoded.header, np.uint8)
        # If the store encrypts pages, `encode_split` has already written the payload to `staging`.
        if not value.in_place and self._is_plain:
            staging[HEADER_BYTES:] = value.page

    def _note_used(self, keys: Sequence[bytes]) -> None:
        self._call(_exist, keys)

    def _remove(self, keys: Sequence[bytes]) -> int:
        # Remove values even if they have leases. A client that reads a value while it is removed detects this, because
        # every value is verified.
        codes = self._call(lambda library, names: library.batch_remove(names, True), keys)
        self._count(codes, is_read=False)
        return codes.count(0)

    def _disconnect(self) -> None:
        self._client.close()
        self._threads.shutdown()

    def _in_threads(self, work: Callable[[_Value, PageBuffer], T], batch: _Batch) -> list[T]:
        """Call `work` for each item of a batch, divided among the threads; returns the results in order."""
        length = -(-len(batch) // self._num_threads)
        runs = [batch[at : at + length] for at in range(0, len(batch), max(1, length))]
        return list(
            itertools.chain.from_iterable(self._threads.map(lambda run: list(itertools.starmap(work, run)), runs))
        )

    def _in_batches(self, values: Sequence[_Value], deadline_s: float, move: Callable[[_Batch], Codes]) -> Codes:
        """Call `move` for batches that fit a chunk; returns the codes of all values. After the deadline, or after a
        batch in which every value failed slowly, all remaining values get TIMED_OUT."""
        left_s = max(0.0, deadline_s - time.monotonic())
        try:
            chunk = self._chunks.get(timeout=None if left_s == math.inf else left_s)
        except queue.Empty:
            return [TIMED_OUT] * len(values)
        codes: Codes = []
        try:
            for batch in _batches(values, chunk):
                if time.monotonic() >= deadline_s:
                    break
                begin_s = time.monotonic()
                moved = move(batch)
                codes += moved
                if all(map(self._client.has_failed, moved)) and time.monotonic() - begin_s > _SLOW_FAILURE_S:
                    break
        finally:
            self._chunks.put(chunk)
        return codes + [TIMED_OUT] * (len(values) - len(codes))

    def _transfer(self, call: Callable[..., Codes], batch: _Batch) -> Codes:
        """Run `call(library, names, addresses, sizes)` for a batch."""
        names = [self._name(value.key, "-") for value, _ in batch]
        addresses, sizes = [value.addresses(staging) for value, staging in batch], [value.sizes for value, _ in batch]
        return self._client.call(lambda library: list(call(library, names, addresses, sizes)), len(names))

    def _call(self, call: Callable[[Any, list[str]], Codes], keys: Sequence[bytes]) -> Codes:
        """Run `call(library, names)` for keys."""
        names = [self._name(key, "-") for key in keys]
        return self._client.call(lambda library: list(call(library, names)), len(names))

    def _count(self, codes: Sequence[int], *, is_read: bool) -> None:
        failed = [code for code in codes if self._client.has_failed(code)]
        if failed:
            why = f"{len(failed)} of {len(codes)} keys failed, {self._client.meaning(failed[0])}"
            self._failed(why, len(failed), is_read=is_read)

    def _register_chunks(self, buffer_bytes: int) -> queue.LifoQueue[PageBuffer]:
        max_value_bytes = self._codecs.max_value_bytes
        num_chunks = min(_MAX_CHUNKS, max(1, buffer_bytes // max_value_bytes))
        chunk_bytes = max(buffer_bytes // num_chunks, max_value_bytes)
        chunks: queue.LifoQueue[PageBuffer] = queue.LifoQueue()
        for _ in range(num_chunks):
            try:
                chunk = np.frombuffer(aligned_buffer(chunk_bytes), np.uint8, chunk_bytes)
                is_registered = self._client.register(chunk)
            except OSError:  # there is not enough memory
                is_registered = False
            if not is_registered:
                self._client.close()
                raise StoreError(
                    f"Mooncake cannot register {chunk_bytes} bytes; lower buffer in its URL or raise the limit of "
                    "locked memory"
                )
            chunks.put(chunk)
        return chunks


def _exist(library: Any, names: list[str]) -> Codes:
    return list(library.batch_is_exist(names))


def _lengths(library: Any, names: list[str]) -> Codes:
    """Return the lengths of values in bytes, or error codes. After the first failed call, the remaining values get the
    code of this failure without a call, because each call to a failed master would take seconds."""
    lengths: Codes = []
    for name in names:
        has_failed = bool(lengths) and MooncakeClient.has_failed(lengths[-1])
        lengths.append(lengths[-1] if has_failed else library.get_size(name))
    return lengths


def _batches(values: Sequence[_Value], chunk: PageBuffer) -> Iterator[_Batch]:
    """Divide values into batches that fit the chunk and `_BATCH_BYTES`."""
    batch: _Batch = []
    end = page_bytes = 0
    for value in values:
        if batch and (end + value.staging_bytes > len(chunk) or page_bytes + len(value.page) > _BATCH_BYTES):
            yield batch
            batch, end, page_bytes = [], 0, 0
        batch.append((value, chunk[end : end + value.staging_bytes]))
        end, page_bytes = end + value.staging_bytes, page_bytes + len(value.page)
    if batch:
        yield batch
