"""Reads files by O_DIRECT, which is the ceiling of the disk tier. Also has helpers that the benchmarks of the disk tier
share."""

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
    """Open a file, by O_DIRECT if its file system supports that. Yields a function that fills a buffer from an offset
    of the file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # a file system in memory has no O_DIRECT
        file = os.open(path, os.O_RDONLY)

    def read(offset: int, into: PageBuffer) -> None:
        if os.preadv(file, [into.data], offset) != len(into):
            raise AssertionError(f"the block at {offset} is cut short")

    try:
        yield read
    finally:
        os.close(file)


def host_pages(count: int, page_bytes: int) -> list[PageBuffer]:
    """Allocate pages in huge memory pages, as the engine's host pool does."""
    return [np.frombuffer(aligned_buffer(page_bytes), dtype=np.uint8, count=page_bytes) for _ in range(count)]


def drop_caches(path: Path) -> None:
    """Drop a file, or all files of a folder, from the kernel's page cache. No process may have mapped the files."""
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
