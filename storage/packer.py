"""Packing pages beside the writer: while one group is being committed, the next is packed.

A commit waits for the medium and packing for the processor; one after the other they would add up. Values wait for
their commit in memory that is used again and again: fresh memory costs more than packing a page that does not pack.
Owns its threads and that memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

from hicache.storage.base import PageBuffer
from hicache.storage.codec import PageCodecs
from hicache.storage.lru import Value
from hicache.storage.memory import MAX_KEPT_BYTES, aligned_buffer

T = TypeVar("T")

_THREADS = 2  # zstd packs 0.8 GB/s a thread, about what one writer commits
_LEAST_BYTES = 64 << 10  # handing a smaller page to another thread takes longer than packing it


class _Job(NamedTuple):
    """A page being packed: its size, the memory for its value (none for a small one), and the value."""

    page_bytes: int
    room: memoryview | None
    value: Future[Value]


class Packer:
    """Encodes pages in order, at most `ahead_bytes` or one page ahead of who takes them. For the writer thread.

    `apart`: values come in two parts, for slots.

    Values are valid until `release`, which frees all that were handed out.
    """

    def __init__(self, codecs: PageCodecs, ahead_bytes: int, *, apart: bool) -> None:
        self._codecs, self._ahead_bytes, self._apart = codecs, ahead_bytes, apart
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="hicache-disk-pack")
        self._free: dict[int, list[memoryview]] = {page_bytes: [] for page_bytes in codecs}
        self._lent: list[_Job] = []

    def values(
        self, keys: Sequence[bytes], pages: Mapping[bytes, PageBuffer], lag: float
    ) -> Generator[Value, None, None]:
        """The value of each key's page. Closed early, it waits for the pages being packed: they are the caller's."""
        pending, pending_bytes = deque[_Job](), 0
        try:
            for key in keys:
                job = self._submit(key, pages[key], lag)
                pending.append(job)
                pending_bytes += job.page_bytes
                while len(pending) > 1 and pending_bytes > self._ahead_bytes:
                    pending_bytes -= pending[0].page_bytes
                    yield self._lend(pending.popleft())
            while pending:
                yield self._lend(pending.popleft())
        finally:
            for job in pending:
                if not job.value.cancel():
                    job.value.exception()
                self._keep(job)

    def release(self) -> None:
        for job in self._lent:
            self._keep(job)
        self._lent.clear()

    def close(self) -> None:
        self._threads.shutdown()

    def _submit(self, key: bytes, page: PageBuffer, lag: float) -> _Job:
        page_bytes = len(page)
        codec, done = self._codecs[page_bytes], Future[Value]()
        if page_bytes < _LEAST_BYTES:
            done.set_result(memoryview(codec.encode(key, page, lag=lag)))
            return _Job(page_bytes, None, done)
        free = self._free[page_bytes]
        room = free.pop() if free else aligned_buffer(codec.max_value_bytes)
        try:
            return _Job(page_bytes, room, self._threads.submit(self._pack, key, page, lag, room))
        except RuntimeError:  # at the interpreter's exit no thread takes work any more, and the writer has some left
            done.set_result(self._pack(key, page, lag, room))
            return _Job(page_bytes, room, done)

    def _pack(self, key: bytes, page: PageBuffer, lag: float, room: memoryview) -> Value:
        codec = self._codecs[len(page)]
        if self._apart:
            return codec.encode_apart(key, page, room, lag=lag)
        return room[: codec.encode_into(key, page, room, lag=lag)]

    def _lend(self, job: _Job) -> Value:
        self._lent.append(job)
        return job.value.result()

    def _keep(self, job: _Job) -> None:
        """Keep its memory for the next page of its size, unless that is large."""
        if job.room is not None and job.page_bytes <= MAX_KEPT_BYTES:
            self._free[job.page_bytes].append(job.room)


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
