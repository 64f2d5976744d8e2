"""Encodes pages in threads concurrently with the writer: while one group is committed, the next is compressed.

A commit waits for the disk, and compression waits for the CPU. If compression and commit ran one after the other, their
times would add up. A writer with a backlog compresses less only if it waits for compression. If the writer waits for
the disk, compression helps, because fewer bytes are written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from hicache.storage.base import PageBuffer
from hicache.storage.codec import PageCodecs
from hicache.storage.header import HeaderAndPayload
from hicache.storage.memory import aligned_from_heap, usable_cpus

# One thread compresses 0.8 GB/s with zstd, and one writer commits 2 GB/s or more. Readers decode on the other cores.
_MAX_THREADS, _SHARE_OF_CORES = 8, 2
# minimum size of pages encoded in threads: passing a smaller page to another thread takes longer than encoding it
_MIN_THREADED_BYTES = 64 << 10
_WAITS_MEMORY = 16  # number of last pages over which the share of waits is averaged


class PageCompressor:
    """Encodes pages in order, at most `ahead_bytes` or one page ahead of the consumer. Called by the writer thread."""

    def __init__(self, codecs: PageCodecs, ahead_bytes: int) -> None:
        self._codecs = codecs
        self._ahead_bytes = ahead_bytes
        num_threads = min(_MAX_THREADS, max(2, len(usable_cpus()) // _SHARE_OF_CORES))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="hicache-disk-compress")
        self._waits_share = 0.0  # share of the last pages for whose encoding the consumer had to wait

    def values(self, pages: Mapping[bytes, PageBuffer], lag: float) -> Generator[HeaderAndPayload, None, None]:
        """Yield the value of each page, in the order of `pages`. If closed early, wait for pages that threads still
        encode, because the caller owns their memory.

        `lag`: see `PageCodec.encode_split`; counts as 0 while most pages are encoded before the consumer needs them.
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
        """Start to encode a page in a thread. Returns None if the consumer encodes the page when it needs it."""
        if len(page) < _MIN_THREADED_BYTES:
            return None
        try:
            return self._threads.submit(self._encode, key, page, lag if self._waits_share > 0.5 else 0.0)
        # the interpreter exits and its threads accept no more work, but the writer still has pages
        except RuntimeError:
            return None

    def _encode(self, key: bytes, page: PageBuffer, lag: float) -> HeaderAndPayload:
        codec = self._codecs[len(page)]
        return codec.encode_split(key, page, aligned_from_heap(codec.max_payload_bytes), lag=lag)
