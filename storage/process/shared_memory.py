"""The memory that a client shares with its store process, and where pages lie in it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from array import array
from collections.abc import Sequence

import numpy as np

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.process import frames
from hicache.storage.process.connection import Connection
from hicache.storage.process.frames import OWN_MEMORY, FrameError, Pages
from hicache.storage.process.jobs import PageBytes, PageRows


class SharedMemories:
    """Numbered from 1. `same_process`: pages are named by their addresses, wherever they lie."""

    def __init__(self, same_process: bool) -> None:
        self._same_process = same_process
        self._memories: list[tuple[int, int, int]] = []  # descriptor, address, number of bytes

    @property
    def count(self) -> int:
        return len(self._memories)

    def add(self, descriptor: int, memory: PageBuffer) -> None:
        self._memories.append((descriptor, _address(memory), memory.nbytes))

    def send(self, connection: Connection, number: int) -> None:
        """Pass the memory of this number on."""
        descriptor, _, num_bytes = self._memories[number - 1]
        connection.send_with(descriptor, frames.memory(number, num_bytes))

    def locate(self, pages: Sequence[PageBytes], page_sizes: tuple[int, ...]) -> Pages:
        """Where the process finds `pages`, which are of one of the sizes and in one memory. StoreError where it does
        not. `page_sizes`: those of its store; none: any."""
        if isinstance(pages, PageRows):
            page_bytes, base = pages.memory.shape[1], _address(pages.memory)
            places = [row * page_bytes for row in pages.rows]
        else:
            page_bytes, base = pages[0].nbytes if pages else 0, 0
            places = [_address(page) for page in pages]
        if pages and page_sizes and page_bytes not in page_sizes:
            raise StoreError(f"a page has {page_bytes} bytes, and the store has pages of {page_sizes}")
        if self._same_process or not pages:
            return Pages(OWN_MEMORY, page_bytes, array("Q", [base + place for place in places]))
        first, last = base + min(places), base + max(places)
        for number, (_, start, num_bytes) in enumerate(self._memories, 1):
            if start <= first and last + page_bytes <= start + num_bytes:
                return Pages(number, page_bytes, array("Q", [base - start + place for place in places]))
        raise StoreError("a page lies in memory that the store process does not share")


def mapped(descriptor: int, num_bytes: int) -> PageBuffer:
    """The shared memory behind `descriptor`, which is closed."""
    try:
        if os.fstat(descriptor).st_size < num_bytes:
            raise FrameError(f"memory of {os.fstat(descriptor).st_size} bytes was to have {num_bytes}")
        mapping = mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype=np.uint8)


def page_at(address: int, num_bytes: int) -> PageBytes:
    """A page of this process, which its owner keeps."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def _address(memory: PageBytes) -> int:
    return int(memory.__array_interface__["data"][0])
