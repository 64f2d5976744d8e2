"""Encodes pages in threads beside the writer: while one group is committed, the next is compressed.

A commit waits for the disk and compression for the processor; one after the other they would add up. A writer that is
behind compresses less, but only where it waits for compression: where the disk is slower, fewer bytes are faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from hicache.storage.base import PageBuffer
from hicache.storage.codec import PageCodecs
from hicache.storage.header import HeaderAndPayload
from hicache.storage.memory import aligned_from_heap, usable_cpus

# zstd compresses 0.8 GB/s a thread, and one writer commits 2 GB/s or more; readers decode on the other cores.
_MAX_THREADS, _SHARE_OF_CORES = 8, 2
_MIN_THREADED_BYTES = 64 << 10  # handing a smaller page to another thread takes longer than encoding it
_WAITS_MEMORY = 16  # of about so many of the last pages it is known how many the writer waited for


class PageCompressor:
    """Encodes pages in order, at most `ahead_bytes` or one page ahead of the consumer; writer thread."""

    def __init__(self, codecs: PageCodecs, ahead_bytes: int) -> None:
        self._codecs = codecs
        self._ahead_bytes = ahead_bytes
        num_threads = min(_MAX_THREADS, max(2, len(usable_cpus()) // _SHARE_OF_CORES))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="hicache-disk-compress")
        self._waits_share = 0.0  # of the last pages

    def values(self, pages: Mapping[bytes, PageBuffer], lag: float) -> Generator[HeaderAndPayload, None, None]:
        """The value of each page, by key. Closed early, it waits for pages being encoded: they belong to the caller.

        `lag`: see `PageCodec.encode_split`; 0 is taken while most pages are encoded before the consumer needs them.
        """
        pending, pending_bytes = deque[tuple[bytes, Future[HeaderAndPayload] | None]](), 0

        def first() -> HeaderAndPayload:
            nonlocal pending_bytes
            key, value = pending.popleft()
            pending_bytes -= len(pages[key])
            if value is None:
                return self._encode(key, pages[key], lag)
            self._waits_share += ((not value.done()) - self._waits_share) / _WAITS_MEMORY
            return value.result()

        try:
            for key, page in pages.items():
                while pending_bytes > self._ahead_bytes:
                    yield first()
                pending.append((key, self._begin(key, page, lag)))
                pending_bytes += len(page)
            while pending:
                yield first()
        finally:
            for _, value in pending:
                if value is not None and not value.cancel():
                    value.exception()

    def close(self) -> None:
        self._threads.shutdown()

    def _begin(self, key: bytes, page: PageBuffer, lag: float) -> Future[HeaderAndPayload] | None:
        """Encode in a thread; None: when it is needed."""
        if len(page) < _MIN_THREADED_BYTES:
            return None
        try:
            return self._threads.submit(self._encode, key, page, lag if self._waits_share > 0.5 else 0.0)
        except RuntimeError:  # at the interpreter's exit threads accept no work any more, and the writer has some left
            return None

    def _encode(self, key: bytes, page: PageBuffer, lag: float) -> HeaderAndPayload:
        codec = self._codecs[len(page)]
        return codec.encode_split(key, page, aligned_from_heap(codec.max_payload_bytes), lag=lag)
