"""Memory for pages and values: aligned for direct reads, reused where that pays, returned where it is large."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading

import numpy as np

from hicache.storage.base import PageBuffer

log = logging.getLogger("hicache.storage")

ALIGNMENT = 4096  # bytes: offset, length and memory of an O_DIRECT read; sufficient for every common disk
# Buffers up to this size are kept for the next value: page-faulting fresh memory costs more than copying a small value.
# A large buffer (a recurrent state of hundreds of MiB) must not stay allocated in every thread.
MAX_KEPT_BYTES = 64 << 20

# From glibc's malloc.h. Blocks up to the mmap threshold come from the heap (32 MiB is its maximum), and the heap keeps
# free memory at its end up to the trim threshold.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_HEAP_BLOCK_BYTES, _KEPT_HEAP_BYTES = 32 << 20, 256 << 20


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


def keep_freed_memory() -> None:
    """Have this process keep up to 256 MiB of freed memory. Calling it again is harmless; without glibc it does
    nothing.

    LMDB allocates every page that a commit changes, and frees it afterwards. By default glibc returns blocks of that
    size to the system, and the next commit page-faults fresh ones, which is slower than copying values into them
    (1.7 against 7 GB/s on one machine).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    if not (mallopt(_M_MMAP_THRESHOLD, _HEAP_BLOCK_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_HEAP_BYTES)):
        log.debug("this malloc takes no thresholds")
