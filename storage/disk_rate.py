"""Measures how fast a file system writes and reads a file. Bypasses the page cache of the system if possible."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from typing import NamedTuple

_CHUNK_BYTES = 8 << 20


class DiskRate(NamedTuple):
    """Rates in bytes per second. `is_direct`: False if the file system refuses O_DIRECT; then the page cache may serve
    reads."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    is_direct: bool


def measure_disk(folder: str | os.PathLike[str], num_bytes: int = 256 << 20) -> DiskRate:
    """Write a temporary file of `num_bytes`, rounded up to 8 MiB, in `folder`, and read it once. Raises OSError."""
    descriptor, path = tempfile.mkstemp(dir=folder)
    os.close(descriptor)
    num_chunks = -(-num_bytes // _CHUNK_BYTES)
    try:
        file, is_direct = _opened(path)
        with contextlib.closing(mmap.mmap(-1, _CHUNK_BYTES)) as chunk:  # anonymous memory is aligned to pages
            chunk.write(os.urandom(_CHUNK_BYTES))
            try:
                begin_s = time.perf_counter()
                for index in range(num_chunks):
                    os.pwritev(file, [chunk], index * _CHUNK_BYTES)
                os.fsync(file)
                written_s = time.perf_counter()
                for index in range(num_chunks):
                    os.preadv(file, [chunk], index * _CHUNK_BYTES)
                read_s = time.perf_counter()
            finally:
                os.close(file)
    finally:
        os.unlink(path)
    total_bytes = num_chunks * _CHUNK_BYTES
    return DiskRate(total_bytes / (written_s - begin_s), total_bytes / (read_s - written_s), is_direct)


def _opened(path: str) -> tuple[int, bool]:
    """Return the descriptor of the file, and whether the file is open with O_DIRECT."""
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT), True
    except OSError:
        return os.open(path, os.O_RDWR), False
