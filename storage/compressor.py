"""Encodes pages in threads beside the writer: while one group is committed, the next is compressed.

A commit waits for the disk and compression for the processor; one after the other they would add up. Values wait for
their commit in buffers that are reused, since page-faulting fresh memory costs more than encoding an incompressible
page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from hicache.storage.base import PageBuffer
from hicache.storage.codec import PageCodecs
from hicache.storage.header import HeaderAndPayload
from hicache.storage.memory import MAX_KEPT_BYTES, aligned_buffer

_NUM_THREADS = 2  # zstd compresses 0.8 GB/s a thread, about what one writer commits
_MIN_THREADED_BYTES = 64 << 10  # handing a smaller page to another thread takes longer than encoding it


class _Job(NamedTuple):
    """A page being encoded: its size, the buffer for its value (None for a small page), and the value."""

    page_bytes: int
    buffer: memoryview | None
    value: Future[HeaderAndPayload]


class PageCompressor:
    """Encodes pages in order, at most `ahead_bytes` or one page ahead of the consumer; writer thread.

    Values are valid until `release`.
    """

    def __init__(self, codecs: PageCodecs, ahead_bytes: int) -> None:
        self._codecs, self._ahead_bytes = codecs, ahead_bytes
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hicache-disk-compress")
        self._free: dict[int, list[memoryview]] = {page_bytes: [] for page_bytes in codecs}
        self._lent: list[_Job] = []

    def values(
        self, keys: Sequence[bytes], pages: Mapping[bytes, PageBuffer], lag: float
    ) -> Generator[HeaderAndPayload, None, None]:
        """The value of each key's page. Closed early, it waits for pages being encoded: they belong to the caller."""
        pending, pending_bytes = deque[_Job](), 0
        try:
            for key in keys:
                page = pages[key]
                if not pending and len(page) < _MIN_THREADED_BYTES:
                    yield self._encode_small(key, page, lag)
                    continue
                job = self._submit(key, page, lag)
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
        """Reuse the buffers of all values that were handed out."""
        for job in self._lent:
            self._keep(job)
        self._lent.clear()

    def close(self) -> None:
        self._threads.shutdown()

    def _submit(self, key: bytes, page: PageBuffer, lag: float) -> _Job:
        page_bytes = len(page)
        codec, done = self._codecs[page_bytes], Future[HeaderAndPayload]()
        if page_bytes < _MIN_THREADED_BYTES:
            done.set_result(self._encode_small(key, page, lag))
            return _Job(page_bytes, None, done)
        free = self._free[page_bytes]
        buffer = free.pop() if free else aligned_buffer(codec.max_value_bytes)
        try:
            return _Job(page_bytes, buffer, self._threads.submit(self._encode, key, page, lag, buffer))
        except RuntimeError:  # at the interpreter's exit threads accept no work any more, and the writer has some left
            done.set_result(self._encode(key, page, lag, buffer))
            return _Job(page_bytes, buffer, done)

    def _encode(self, key: bytes, page: PageBuffer, lag: float, buffer: memoryview) -> HeaderAndPayload:
        return self._codecs[len(page)].encode_split(key, page, buffer, lag=lag)

    def _encode_small(self, key: bytes, page: PageBuffer, lag: float) -> HeaderAndPayload:
        return self._encode(key, page, lag, memoryview(bytearray(self._codecs[len(page)].max_value_bytes)))

    def _lend(self, job: _Job) -> HeaderAndPayload:
        self._lent.append(job)
        return job.value.result()

    def _keep(self, job: _Job) -> None:
        """Keep the buffer of a job for the next page of its size, unless it is large."""
        if job.buffer is not None and job.page_bytes <= MAX_KEPT_BYTES:
            self._free[job.page_bytes].append(job.buffer)
