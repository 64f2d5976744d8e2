"""Memory that a client shares with its store process: pages and their locations, and the status of the process.

The status is one memory page of numbers, which only the store process writes. So `stats` of a client neither sends a
frame nor waits. The process updates the status before it sends the answer to a job. Each number is a float64, written
atomically, so integers are exact up to 2^53.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import mmap
import os
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from hicache.storage.base import PageBuffer, StoreError, StoreStats
from hicache.storage.memory import memory_file
from hicache.storage.process import frames
from hicache.storage.process.frames import OWN_MEMORY, Connection, FrameError, Pages
from hicache.storage.process.jobs import PageBytes, PageRows

_STATS = tuple(field.name for field in dataclasses.fields(StoreStats))
QUEUE_NUMBERS = ("state", "opens", "failures", "refused_jobs", "stalled_jobs", "queued_jobs", "queued_bytes")
# Numbers of the copies to a remote store, and the state of the breaker for writes to the remote store. The last two
# numbers count pages read from a remote store that the local store stored, or did not store.
BACKUP_NUMBERS = (
    "queued_pages", "queued_bytes", "sent_pages", "sent_bytes", "dropped_pages", "failed_pages", "state",
    "filled_pages", "unfilled_pages",
)  # fmt: skip
_REFUSES_UNTIL = "refuses_until_s"
_NAMES = (
    *_STATS,
    "failed_touches",
    *(f"{queue}_{name}" for queue in ("reads", "writes") for name in (*QUEUE_NUMBERS, _REFUSES_UNTIL)),
    *(f"backup_{name}" for name in BACKUP_NUMBERS),
)
_INDEX = {name: i for i, name in enumerate(_NAMES)}


_ROWS = attrgetter("rows")


class SharedMemories:
    """The memories that a client shares, numbered from 1. `same_process`: the server is in this process, so pages are
    named by address and may lie in any memory."""

    def __init__(self, same_process: bool) -> None:
        self._same_process = same_process
        self._memories: list[tuple[int, int, int]] = []  # descriptor, address and number of bytes of each memory

    @property
    def count(self) -> int:
        return len(self._memories)

    def add(self, descriptor: int, memory: PageBuffer) -> None:
        self._memories.append((descriptor, _address(memory), memory.nbytes))

    def send(self, connection: Connection, number: int) -> None:
        """Send the number, the size and the descriptor of the memory `number` to the process."""
        descriptor, _, num_bytes = self._memories[number - 1]
        connection.send_with(descriptor, frames.memory(number, num_bytes))

    def locate(self, groups: Sequence[Sequence[PageBytes]], page_sizes: tuple[int, ...]) -> Pages:
        """Return the locations of the pages in `groups`, to be sent to the process. If the groups are `PageRows`, all
        have the same memory.

        Raises StoreError unless all pages have the same size, one of `page_sizes`, and lie in one shared memory.
        `page_sizes`: page sizes of the store in bytes; () allows any size."""
        page_bytes, base, places = 0, 0, list[int]()
        if isinstance(groups[0], PageRows):
            memory = groups[0].memory
            page_bytes, base = memory.shape[1], _address(memory)
            places = [*map(page_bytes.__mul__, chain.from_iterable(map(_ROWS, groups)))]
        elif pages := [*chain(*groups)]:
            page_bytes, places = pages[0].nbytes, [_address(page) for page in pages]
        if places and page_sizes and page_bytes not in page_sizes:
            raise StoreError(f"a page has {page_bytes} bytes, and the store has pages of {page_sizes}")
        if self._same_process or not places:
            return Pages(OWN_MEMORY, page_bytes, array("Q", map(base.__add__, places)))
        first, last = base + min(places), base + max(places)
        for number, (_, start, num_bytes) in enumerate(self._memories, 1):
            if start <= first and last + page_bytes <= start + num_bytes:
                return Pages(number, page_bytes, array("Q", map((base - start).__add__, places)))
        raise StoreError("a page is in memory that the store process does not share")


class ClientMemory:
    """Maps the first `num_bytes` of the file that a client shares. `descriptor`: the descriptor of the file, which this
    object owns. `data`: the mapped bytes, uint8.

    The kernel kills a process that accesses mapped memory after the end of the file (SIGBUS). So the file is sealed
    against shrinking. If the kernel cannot seal the file, the length of the file is checked before each job.
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
            raise FrameError(f"a page ends after the end of its memory of {len(memory)} bytes")
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
    """Allocate memory that another process can map. Returns the descriptor, which the caller owns, and the memory.
    Raises StoreError if the memory cannot be allocated."""
    try:
        descriptor = memory_file(name, num_bytes)
        try:
            return descriptor, np.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=np.uint8)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise StoreError(f"cannot allocate memory to share with a store process: {error}") from error


def page_at(address: int, num_bytes: int) -> PageBytes:
    """Return a view of a page at an address of this process. The owner of the memory must keep it allocated while the
    view is used."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def _address(memory: PageBytes) -> int:
    return int(memory.__array_interface__["data"][0])


class StatusWriter:
    """Writes the status into the file of a client. `descriptor`: the descriptor of the file, which this object owns.
    The file is not mapped, because the kernel kills a process that accesses a mapping of a truncated file (SIGBUS)."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        if os.fstat(descriptor).st_size < mmap.PAGESIZE:
            self.close()
            raise FrameError("the status of a client is smaller than a memory page")

    def write(self, stats: StoreStats, failed_touches: int, queues: Mapping[str, tuple[float, ...]]) -> None:
        """Write all numbers. `queues`: for "reads" and "writes", the `QUEUE_NUMBERS` and the time until which jobs are
        refused; for "backup", the `BACKUP_NUMBERS`."""
        of_queues = (*queues["reads"], *queues["writes"], *queues["backup"])
        numbers = [*map(float, dataclasses.astuple(stats)), failed_touches, *of_queues]
        os.pwrite(self._descriptor, array("d", numbers), 0)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SharedStatus:
    """The status as a client reads it. `descriptor`: the descriptor of the status memory, which the client sends to the
    process; open until `close`. The numbers can also be read after `close`. Raises StoreError if the memory cannot be
    allocated."""

    def __init__(self) -> None:
        self.descriptor, memory = new_memory("hicache-status", mmap.PAGESIZE)
        self._numbers = memory.view(np.float64)

    def stats(self) -> StoreStats:
        numbers: dict[str, Any] = dict(zip(_STATS, map(int, self._numbers[: len(_STATS)]), strict=True))
        return StoreStats(**{**numbers, "read_only": bool(numbers["read_only"])})

    @property
    def failed_touches(self) -> int:
        return int(self._numbers[_INDEX["failed_touches"]])

    def queue(self, name: str) -> tuple[float, ...]:
        """Return the `QUEUE_NUMBERS` of the queue `name`, "reads" or "writes"."""
        first = _INDEX[f"{name}_{QUEUE_NUMBERS[0]}"]
        return tuple(self._numbers[first : first + len(QUEUE_NUMBERS)].tolist())

    @property
    def backup(self) -> tuple[float, ...]:
        """The counters of copies to the remote store, in the order of `BACKUP_NUMBERS`."""
        first = _INDEX[f"backup_{BACKUP_NUMBERS[0]}"]
        return tuple(self._numbers[first : first + len(BACKUP_NUMBERS)].tolist())

    def refuses_until_s(self, name: str) -> float:
        """Return the time until which the queue `name` refuses jobs, on the clock of the store process; 0 if it accepts
        jobs."""
        return float(self._numbers[_INDEX[f"{name}_{_REFUSES_UNTIL}"]])

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def clear(self) -> None:
        """Set all numbers to 0. Called before a new process writes the status."""
        self._numbers[:] = 0.0
