"""Reads of files by O_DIRECT, which are the ceiling of the disk tier, and helpers that its benchmarks share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hicache.storage import PageBuffer
from hicache.storage.memory import aligned_buffer


@contextmanager
def raw_file(path: Path) -> Iterator[Callable[[int, PageBuffer], None]]:
    """Open a file for reads at an offset into a buffer, by O_DIRECT if the file system supports it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # the file system is in memory
        file = os.open(path, os.O_RDONLY)

    def read(offset: int, into: PageBuffer) -> None:
        if os.preadv(file, [into.data], offset) != len(into):
            raise AssertionError(f"the block at {offset} is cut short")

    try:
        yield read
    finally:
        os.close(file)


def host_pages(count: int, page_bytes: int) -> list[PageBuffer]:
    """Allocate pages in huge memory pages, like the engine's host pool."""
    return [np.frombuffer(aligned_buffer(page_bytes), dtype=np.uint8, count=page_bytes) for _ in range(count)]


def drop_caches(path: Path) -> None:
    """Drop the kernel's cached pages of a file that no process has mapped, or of all files in a folder."""
    for file in path.iterdir() if path.is_dir() else [path]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def in_threads(works: Sequence[Callable[[], None]]) -> None:
    """Run all functions concurrently, and raise the first error."""
    with ThreadPoolExecutor(len(works)) as threads:
        for done in [threads.submit(work) for work in works]:
            done.result()
