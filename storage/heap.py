"""Memory that lmdb frees after a commit, kept for the next.

lmdb allocates every page that a commit changes, and frees it afterwards. glibc gives blocks of that size back to the
system at once, and the next commit touches fresh pages again, which takes longer than copying values into them (1.7
against 7 GB/s on one machine). Owns nothing. May import the standard library.
"""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger("hicache.storage")

# Of glibc's malloc.h. Blocks up to the threshold come from the heap (32 MiB is the most it takes), and so much free
# memory may stay at its end.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_HEAP_BLOCK_BYTES, _KEPT_BYTES = 32 << 20, 256 << 20


def keep_freed_memory() -> None:
    """Have this process keep up to 256 MiB of freed memory. Again is harmless; without glibc it does nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    if not (mallopt(_M_MMAP_THRESHOLD, _HEAP_BLOCK_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)):
        log.debug("this malloc takes no thresholds")
