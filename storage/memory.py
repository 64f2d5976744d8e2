"""Memory for pages and values: aligned for direct reads, used again where that pays, given back where it is large."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading

import numpy as np

from hicache.storage.base import PageBuffer

log = logging.getLogger("hicache.storage")

ALIGNMENT = 4096  # bytes; of offset, length and memory of a direct read: as much as any medium asks for
# A buffer up to this size is kept for the next value. Touching fresh memory costs more than copying a small value into
# it; a large one (a recurrent state of hundreds of MiB) must not stay allocated in every thread.
MAX_KEPT_BYTES = 64 << 20

# Of glibc's malloc.h. Blocks up to the threshold come from the heap (32 MiB is the maximum), and so much free memory
# may stay at its end.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_HEAP_BLOCK_BYTES, _KEPT_HEAP_BYTES = 32 << 20, 256 << 20


def aligned_buffer(num_bytes: int) -> memoryview:
    """Page-aligned memory, a block longer than `num_bytes` in whole blocks of `ALIGNMENT`. Takes none until touched."""
    return memoryview(mmap.mmap(-1, -(-num_bytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT))


class Scratch(threading.local):
    """One buffer a thread. What `take` returned is valid until the same thread calls `take` again."""

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
    """Have this process keep up to 256 MiB of freed memory. Another call is harmless; without glibc it does nothing.

    lmdb allocates every page that a commit changes, and frees it afterwards. glibc returns blocks of that size to the
    system at once, and the next commit faults in fresh pages, which takes longer than copying values into them (1.7
    against 7 GB/s on one machine).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    if not (mallopt(_M_MMAP_THRESHOLD, _HEAP_BLOCK_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_HEAP_BYTES)):
        log.debug("this malloc takes no thresholds")
