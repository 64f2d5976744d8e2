"""Packing pages beside the writer: while one group is being committed, the next is packed.

A commit waits for the medium and packing for the processor; one after the other they would add up. Values wait for
their commit in memory that is used again and again: fresh memory costs more than packing a page that does not pack.
Owns its threads and that memory. May import the standard library, base, codec, direct_read and lru.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from hicache.storage.base import PageBuffer
from hicache.storage.codec import PageCodec
from hicache.storage.direct_read import aligned_room
from hicache.storage.lru import Value

T = TypeVar("T")

_THREADS = 2  # zstd packs 0.8 GB/s a thread, about what one writer commits
_LEAST_BYTES = 64 << 10  # handing a smaller page to another thread takes longer than packing it


class Packer:
    """Encodes pages in order, at most `ahead_bytes` or one page ahead of who takes them. For the writer thread.

    `apart`: values come in two parts, for slots.

    Values are valid until `release`, which frees all that were handed out.
    """

    def __init__(self, codec: PageCodec, page_bytes: int, ahead_bytes: int, *, apart: bool) -> None:
        self._codec, self._apart = codec, apart
        self._is_small = page_bytes < _LEAST_BYTES
        self._num_ahead = max(1, ahead_bytes // page_bytes)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="hicache-disk-pack")
        self._free: list[memoryview] = []
        self._lent: list[memoryview] = []

    def values(
        self, keys: Sequence[bytes], pages: Mapping[bytes, PageBuffer], lag: float
    ) -> Generator[Value, None, None]:
        """The value of each key's page. Closed early, it waits for the pages being packed: they are the caller's."""
        if self._is_small:
            for key in keys:
                yield memoryview(self._codec.encode(key, pages[key], lag=lag))
            return
        pending: deque[tuple[memoryview, Future[Value]]] = deque()
        try:
            for key in keys:
                room = self._free.pop() if self._free else aligned_room(self._codec.max_value_bytes)
                pending.append((room, self._submit(key, pages[key], lag, room)))
                if len(pending) > self._num_ahead:
                    yield self._lend(*pending.popleft())
            while pending:
                yield self._lend(*pending.popleft())
        finally:
            for room, future in pending:
                if not future.cancel():
                    future.exception()
                self._free.append(room)

    def release(self) -> None:
        self._free += self._lent
        self._lent.clear()

    def close(self) -> None:
        self._threads.shutdown()

    def _submit(self, key: bytes, page: PageBuffer, lag: float, room: memoryview) -> Future[Value]:
        try:
            return self._threads.submit(self._pack, key, page, lag, room)
        except RuntimeError:  # at the interpreter's exit no thread takes work any more, and the writer has some left
            packed: Future[Value] = Future()
            packed.set_result(self._pack(key, page, lag, room))
            return packed

    def _pack(self, key: bytes, page: PageBuffer, lag: float, room: memoryview) -> Value:
        if self._apart:
            return self._codec.encode_apart(key, page, room, lag=lag)
        return room[: self._codec.encode_into(key, page, room, lag=lag)]

    def _lend(self, room: memoryview, future: Future[Value]) -> Value:
        self._lent.append(room)
        return future.result()


class Replay(Generic[T]):
    """What an iterator gives, to be gone through as often as need be; the iterator is asked once for each item."""

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._seen: list[T] = []

    def __iter__(self) -> Iterator[T]:
        yield from self._seen
        for item in self._source:
            self._seen.append(item)
            yield item
