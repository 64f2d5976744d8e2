"""Memory for pages and values: aligned for direct reads, reused where that pays, returned where it is large."""

from __future__ import annotations

import mmap
import threading

import numpy as np

from hicache.storage.base import PageBuffer

ALIGNMENT = 4096  # bytes: offset, length and memory of an O_DIRECT read; sufficient for every common disk
# Buffers up to this size are kept for the next value: page-faulting fresh memory costs more than copying a small value.
# A large buffer (a recurrent state of hundreds of MiB) must not stay allocated in every thread.
MAX_KEPT_BYTES = 64 << 20


def round_up(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole blocks of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_buffer(num_bytes: int) -> memoryview:
    """Page-aligned memory of `num_bytes` in whole blocks, and one block more. Uses no memory until it is touched."""
    return memoryview(mmap.mmap(-1, round_up(num_bytes) + ALIGNMENT))


class Scratch(threading.local):
    """One buffer per thread. What `take` returned is valid until the same thread calls `take` again."""

    def __init__(self) -> None:
        self._kept: memoryview = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        """A buffer as `aligned_buffer` makes it; its content is undefined."""
        if num_bytes > MAX_KEPT_BYTES:
            return aligned_buffer(num_bytes)
        if len(self._kept) < num_bytes + ALIGNMENT:
            self._kept = aligned_buffer(num_bytes)
        return self._kept

    def take_page(self, num_bytes: int) -> PageBuffer:
        """The same memory as uint8 `[num_bytes]`."""
        return np.frombuffer(self.take(num_bytes), dtype=np.uint8, count=num_bytes)
