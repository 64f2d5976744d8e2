"""Memory that a client shares with its store process, and the locations of pages in it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from array import array
from collections.abc import Sequence

import numpy as np

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.memory import memory_file
from hicache.storage.process import frames
from hicache.storage.process.connection import Connection
from hicache.storage.process.frames import OWN_MEMORY, FrameError, Pages
from hicache.storage.process.jobs import PageBytes, PageRows


class SharedMemories:
    """A client's shared memories, numbered from 1. `same_process`: pages are named by address and may lie anywhere."""

    def __init__(self, same_process: bool) -> None:
        self._same_process = same_process
        self._memories: list[tuple[int, int, int]] = []  # descriptor, address and number of bytes of each memory

    @property
    def count(self) -> int:
        return len(self._memories)

    def add(self, descriptor: int, memory: PageBuffer) -> None:
        self._memories.append((descriptor, _address(memory), memory.nbytes))

    def send(self, connection: Connection, number: int) -> None:
        """Send the memory `number`, with its descriptor, to the process."""
        descriptor, _, num_bytes = self._memories[number - 1]
        connection.send_with(descriptor, frames.memory(number, num_bytes))

    def locate(self, pages: Sequence[PageBytes], page_sizes: tuple[int, ...]) -> Pages:
        """Return the locations of `pages` for the process. Raises StoreError unless all pages have the same size, one
        of `page_sizes`, and lie in one shared memory. `page_sizes`: page sizes of the store in bytes; () allows any."""
        if isinstance(pages, PageRows):
            page_bytes, base = pages.memory.shape[1], _address(pages.memory)
            places = [*map(page_bytes.__mul__, pages.rows)]
        else:
            page_bytes, base = pages[0].nbytes if pages else 0, 0
            places = [_address(page) for page in pages]
        if places and page_sizes and page_bytes not in page_sizes:
            raise StoreError(f"a page has {page_bytes} bytes, and the store has pages of {page_sizes}")
        if self._same_process or not places:
            return Pages(OWN_MEMORY, page_bytes, array("Q", map(base.__add__, places)))
        first, last = base + min(places), base + max(places)
        for number, (_, start, num_bytes) in enumerate(self._memories, 1):
            if start <= first and last + page_bytes <= start + num_bytes:
                return Pages(number, page_bytes, array("Q", map((base - start).__add__, places)))
        raise StoreError("a page lies in memory that the store process does not share")


class ClientMemory:
    """Maps the first `num_bytes` of the file of `descriptor`, which a client shares. `data`: the bytes, uint8. Owns the
    descriptor.

    Touching memory after the end of its file ends a process (SIGBUS). So the file is sealed against shrinking. If the
    kernel cannot seal it, its length is checked before each job.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._is_sealed = False
        try:
            with contextlib.suppress(OSError):  # the descriptor is no memfd, or a memfd that accepts no seals
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
                self._is_sealed = True
            self._require(max(1, num_bytes))
            mapping = mmap.mmap(descriptor, num_bytes)
        except BaseException:
            self.close()
            raise
        with contextlib.suppress(OSError):  # the kernel may lack huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.data: PageBuffer = np.frombuffer(mapping, dtype=np.uint8)
        if self._is_sealed:
            self.close()

    def pages(self, pages: Pages) -> tuple[PageBytes, ...]:
        """Return views of pages. Raises FrameError if a page ends after the end of the memory."""
        memory, num_bytes = self.data, pages.page_bytes
        if any(offset + num_bytes > len(memory) for offset in pages.offsets):
            raise FrameError(f"a page ends behind its memory of {len(memory)} bytes")
        if not self._is_sealed:
            self._require(len(memory))
        return tuple(memory[offset : offset + num_bytes] for offset in pages.offsets)

    def close(self) -> None:
        """Close the descriptor. Idempotent. The memory is unmapped when the last page that refers to it is freed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _require(self, num_bytes: int) -> None:
        found = os.fstat(self._descriptor).st_size
        if found < num_bytes:
            raise FrameError(f"memory of {found} bytes was to have {num_bytes}")


def new_memory(name: str, num_bytes: int) -> tuple[int, PageBuffer]:
    """Allocate memory that another process can map; returns its descriptor, which the caller owns, and the memory.
    Raises StoreError if none is available."""
    try:
        descriptor = memory_file(name, num_bytes)
        try:
            return descriptor, np.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=np.uint8)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise StoreError(f"no memory to share with a store process: {error}") from error


def page_at(address: int, num_bytes: int) -> PageBytes:
    """Return a view of a page at an address of this process; its owner must keep the memory alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def _address(memory: PageBytes) -> int:
    return int(memory.__array_interface__["data"][0])
