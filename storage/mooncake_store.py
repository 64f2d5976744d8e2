"""Pages in a Mooncake store: values under `hicache-NAMESPACE-KEY` in memory that machines lend to a master's pool.

A raw page in registered memory is sent and received in place: its value is one object of two buffers, header and page.
Other pages, and compressed and encrypted ones, go through registered memory of the store's own. Others may remove or
evict values at any time, and the machine that holds one may die: a value is worth what its verification says.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFormat
from hicache.storage.header import HEADER_BYTES, copy_parts
from hicache.storage.memory import aligned_buffer
from hicache.storage.mooncake_client import (
    ABSENT,
    FULL,
    INVALID_PARAMS,
    PRESENT,
    TIMED_OUT,
    TRANSFER_FAILED,
    Codes,
    MooncakeAddress,
    MooncakeClient,
)
from hicache.storage.remote import RemotePageStore

_MAX_CHUNKS = 4  # of the store's own memory: so many calls transfer at the same time
_BATCH_BYTES = 64 << 20  # of pages in one call of the library, between two looks at the deadline


class _Parts(NamedTuple):
    """Where a value lies: addresses and lengths of its parts."""

    addresses: tuple[int, ...]
    sizes: tuple[int, ...]


class MooncakePageStore(RemotePageStore):
    """See `PageStore`; `touch` renews the leases, which is the order of eviction.

    `buffer_bytes`: registered memory of the store's own, at least one page. `replicas`: how many machines are to hold a
    page. `timeout_s`: for how long opening, `contains` and `delete` wait for a master that does not answer; `get_into`
    and `put` return when the library has let go of their buffers, which takes up to 60 s when a machine hangs.
    """

    def __init__(
        self,
        address: MooncakeAddress,
        *,
        identity: Mapping[str, str | int],
        formats: Sequence[PageFormat],
        level: int = 0,
        cipher: PageCipher | None = None,
        buffer_bytes: int = 64 << 20,
        replicas: int = 1,
        timeout_s: float = 10.0,
    ) -> None:
        if timeout_s <= 0 or replicas < 1 or buffer_bytes < 1:
            raise StoreError(f"{timeout_s=}, {replicas=}, {buffer_bytes=}: one of them is out of range")
        super().__init__(str(address), identity=identity, formats=formats, level=level, cipher=cipher)
        self._is_raw, self._is_plain, self._replicas = not level, cipher is None, replicas
        self._client = MooncakeClient(address, timeout_s)
        self._chunks = self._register_chunks(buffer_bytes)

    def register_memory(self, memory: PageBuffer) -> None:
        """Pages in it are not copied, if Mooncake can use it: RDMA needs a sufficient limit of locked memory."""
        self._require()
        if not self._client.register(memory):
            self._failed(f"cannot register {len(memory)} bytes of memory; its pages are copied")

    def touch(self, keys: Sequence[bytes]) -> None:
        self._require(keys)
        names = [self._name(key, "-") for key in reversed(keys)]
        self._client.tell(lambda library: library.batch_is_exist(names))

    def reopen(self) -> bool:
        """Whether the master answers."""
        self._require()
        return self._ask(_exist, [b"\0"], math.inf)[0] >= 0

    def _exist(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        codes = self._ask(_exist, keys, deadline_s)
        self._count(codes, is_read=True)
        return [code == 1 for code in codes]

    def _fetch(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], deadline_s: float) -> list[bool]:
        if self._is_raw:
            lengths = [self._codecs[len(buffer)].max_value_bytes for buffer in buffers]
        else:
            lengths = self._lengths(keys, deadline_s)
        codes = self._read(keys, buffers, lengths, deadline_s)
        # Of another length, or not to be read: the library has one code for both.
        unclear = (
            [n for n, code in enumerate(codes) if code in (INVALID_PARAMS, TRANSFER_FAILED)] if self._is_raw else []
        )
        for n, length in zip(unclear, self._lengths([keys[n] for n in unclear], deadline_s), strict=True):
            if length != lengths[n]:
                codes[n] = self._read([keys[n]], [buffers[n]], [length], deadline_s)[0]
        self._count(codes, is_read=True)
        return [code > 0 for code in codes]

    def _lengths(self, keys: Sequence[bytes], deadline_s: float) -> Codes:
        """How long the values are, or why that is not known."""

        def ask(library: Any) -> Codes:
            lengths: Codes = []
            for name in names:  # once the master fails, no more: each call takes seconds
                failed = bool(lengths) and lengths[-1] < 0 and lengths[-1] not in ABSENT
                lengths.append(lengths[-1] if failed else library.get_size(name))
            return lengths

        names = [self._name(key, "-") for key in keys]
        return self._client.ask(ask, len(names), deadline_s) if names else []

    def _read(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], lengths: Sequence[int], deadline_s: float
    ) -> Codes:
        """For each value of a known length: that length if its page is there and verified, 0 if it does not verify, or
        the code of the failure. A length below 0 is such a code."""
        codes = [min(length, 0) for length in lengths]
        asked = []
        for n, length in enumerate(lengths):
            if HEADER_BYTES <= length <= self._codecs.max_value_bytes:
                asked.append(n)
            elif length >= 0:
                self._refuse(keys[n], f"value of {length} bytes")
        in_place = [self._is_in_place(pages[n]) and lengths[n] == HEADER_BYTES + len(pages[n]) for n in asked]
        rooms = [HEADER_BYTES if direct else lengths[n] for n, direct in zip(asked, in_place, strict=True)]

        def receive(chunk: PageBuffer, offsets: Sequence[int], batch: range) -> Codes:
            parts = [
                _parts(chunk, offset, rooms[i], pages[asked[i]] if in_place[i] else None)
                for i, offset in zip(batch, offsets, strict=True)
            ]
            got = self._transfer(_get, [keys[asked[i]] for i in batch], parts)
            for j, (i, offset) in enumerate(zip(batch, offsets, strict=True)):
                n, value = asked[i], chunk[offset : offset + rooms[i]].data
                payload = pages[n].data if in_place[i] else value[HEADER_BYTES:]
                if got[j] == lengths[n] and not self._decode(keys[n], bytes(value[:HEADER_BYTES]), payload, pages[n]):
                    got[j] = 0
            return got

        for n, code in zip(asked, self._in_batches(rooms, [pages[n] for n in asked], deadline_s, receive), strict=True):
            codes[n] = code
        return codes

    def _send(self, pages: Mapping[bytes, PageBuffer], lag: float, deadline_s: float) -> list[bool]:
        present = dict(zip(pages, self._ask(_exist, list(pages), deadline_s), strict=True))
        absent = [key for key, code in present.items() if not code]
        codecs = [self._codecs[len(pages[key])] for key in absent]
        in_place = [self._is_raw and self._is_in_place(pages[key]) for key in absent]
        rooms = [HEADER_BYTES if at else codec.max_value_bytes for at, codec in zip(in_place, codecs, strict=True)]

        def send(chunk: PageBuffer, offsets: Sequence[int], batch: range) -> Codes:
            parts = []
            for i, offset in zip(batch, offsets, strict=True):
                page, room = pages[absent[i]], chunk[offset : offset + rooms[i]].data
                value = codecs[i].encode_split(absent[i], page, room[HEADER_BYTES:], lag=lag)
                room[:HEADER_BYTES] = value.header
                if not in_place[i] and self._is_plain:  # an encrypted payload is there already
                    copy_parts(room[HEADER_BYTES:], value.payload)
                parts.append(_parts(chunk, offset, min(rooms[i], len(value)), page if in_place[i] else None))
            codes = self._transfer(self._put, [absent[i] for i in batch], parts)
            for i, part, code in zip(batch, parts, codes, strict=True):
                if not code:
                    self._written(len(pages[absent[i]]), sum(part.sizes))
            return codes

        codes = self._in_batches(rooms, [pages[key] for key in absent], deadline_s, send)
        self._count([*codes, *(code for code in present.values() if code < 0)], is_read=False)
        stored = {key for key, code in zip(absent, codes, strict=True) if code in (0, PRESENT)}
        return [present[key] == 1 or key in stored for key in pages]

    def _remove(self, keys: Sequence[bytes]) -> int:
        # By force: whoever reads a value now, under a lease, verifies what arrives.
        codes = self._ask(lambda library, names: library.batch_remove(names, True), keys, math.inf)
        self._count(codes, is_read=False)
        return codes.count(0)

    def _disconnect(self) -> None:
        self._client.close()

    def _put(self, library: Any, names: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> Codes:
        return list(
            library.batch_put_from_multi_buffers(names, addresses, sizes, self._client.replicas(self._replicas))
        )

    def _in_batches(
        self,
        rooms: Sequence[int],
        pages: Sequence[PageBuffer],
        deadline_s: float,
        move: Callable[[PageBuffer, Sequence[int], range], Codes],
    ) -> Codes:
        """The codes of `move(chunk, offsets, batch)` for each batch of pages that fits a chunk, with `rooms` bytes."""
        if not rooms:
            return []
        left_s = max(0.0, deadline_s - time.monotonic())
        try:
            chunk = self._chunks.get(timeout=None if left_s == math.inf else left_s)
        except queue.Empty:
            return [TIMED_OUT] * len(rooms)
        codes: Codes = []
        try:
            for batch in _batches(rooms, pages, len(chunk)):
                if time.monotonic() >= deadline_s:
                    break
                ends = np.cumsum([rooms[i] for i in batch]).tolist()
                codes += move(chunk, [0, *ends[:-1]], batch)
        finally:
            self._chunks.put(chunk)
        return codes + [TIMED_OUT] * (len(rooms) - len(codes))

    def _transfer(self, call: Callable[..., Codes], keys: Sequence[bytes], parts: Sequence[_Parts]) -> Codes:
        """`call(library, names, addresses, sizes)` for values in parts."""
        names = [self._name(key, "-") for key in keys]
        addresses, sizes = [list(part.addresses) for part in parts], [list(part.sizes) for part in parts]
        return self._client.transfer(lambda library: list(call(library, names, addresses, sizes)), len(names))

    def _ask(self, call: Callable[[Any, list[str]], Codes], keys: Sequence[bytes], deadline_s: float) -> Codes:
        names = [self._name(key, "-") for key in keys]
        return self._client.ask(lambda library: list(call(library, names)), len(names), deadline_s)

    def _count(self, codes: Sequence[int], *, is_read: bool) -> None:
        """Count what failed, not what is absent, nor that there is no room."""
        failed = [code for code in codes if code < 0 and code not in ABSENT and code != FULL]
        if failed:
            reads, writes = (len(failed), 0) if is_read else (0, len(failed))
            self._failed(f"{len(failed)} of {len(codes)} keys failed with code {failed[0]}", reads=reads, writes=writes)

    def _is_in_place(self, page: PageBuffer) -> bool:
        """Whether a raw page is sent from where it lies and received there."""
        return self._is_plain and self._client.is_registered(page)

    def _register_chunks(self, buffer_bytes: int) -> queue.LifoQueue[PageBuffer]:
        max_value_bytes = self._codecs.max_value_bytes
        num_chunks = min(_MAX_CHUNKS, max(1, buffer_bytes // max_value_bytes))
        chunk_bytes = max(buffer_bytes // num_chunks, max_value_bytes)
        chunks: queue.LifoQueue[PageBuffer] = queue.LifoQueue()
        for _ in range(num_chunks):
            chunk = np.frombuffer(aligned_buffer(chunk_bytes), np.uint8, chunk_bytes)
            if not self._client.register(chunk):
                self._client.close()
                raise StoreError(f"Mooncake cannot register {chunk_bytes} bytes; raise the limit of locked memory")
            chunks.put(chunk)
        return chunks


def _exist(library: Any, names: list[str]) -> Codes:
    return list(library.batch_is_exist(names))


def _get(library: Any, names: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> Codes:
    return list(library.batch_get_into_multi_buffers(names, addresses, sizes))


def _parts(chunk: PageBuffer, offset: int, num_bytes: int, page: PageBuffer | None) -> _Parts:
    """A value that begins in `num_bytes` of the chunk, and ends in the page if it is given."""
    start = chunk.ctypes.data + offset
    return _Parts((start,), (num_bytes,)) if page is None else _Parts((start, page.ctypes.data), (num_bytes, len(page)))


def _batches(rooms: Sequence[int], pages: Sequence[PageBuffer], chunk_bytes: int) -> Iterator[range]:
    """Runs of pages whose rooms fit a chunk."""
    begin = used_bytes = page_bytes = 0
    for n, (room, page) in enumerate(zip(rooms, pages, strict=True)):
        if n > begin and (used_bytes + room > chunk_bytes or page_bytes + len(page) > _BATCH_BYTES):
            yield range(begin, n)
            begin, used_bytes, page_bytes = n, 0, 0
        used_bytes, page_bytes = used_bytes + room, page_bytes + len(page)
    yield range(begin, len(rooms))
