"""Raw reads of a store's file, the ceiling of first tokens from disk. A helper of the serving bench."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BLOCK = 8 << 20  # a host page of 64 tokens of 8B geometry
_THREADS = 8


def raw_read_s(path: Path, num_bytes: int) -> float:
    """Seconds of reading `num_bytes` of a file past the page cache, in blocks of 8 MiB by 8 threads.

    At most 4 GiB of it are read, and the time is extrapolated.
    """
    size = max(_BLOCK, min(num_bytes, 4 << 30, path.stat().st_size) // _BLOCK * _BLOCK)
    flags = os.O_RDONLY | os.O_DIRECT
    try:
        descriptor = os.open(path, flags)
    except OSError:  # a file system in memory has no direct reads
        descriptor = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            start = time.perf_counter()
            list(pool.map(lambda t: _read(descriptor, t, size), range(_THREADS)))
            elapsed = time.perf_counter() - start
    finally:
        os.close(descriptor)
    return elapsed * num_bytes / size


def _read(descriptor: int, thread: int, size: int) -> None:
    buffer = mmap.mmap(-1, _BLOCK)  # direct reads need aligned memory
    for offset in range(thread * _BLOCK, size, _THREADS * _BLOCK):
        if not os.preadv(descriptor, [buffer], offset):
            raise AssertionError(f"nothing is at {offset}")
