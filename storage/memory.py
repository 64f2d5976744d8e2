"""Memory for pages and values, aligned for direct reads. Small buffers are reused, and large buffers are freed after
use."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import mmap
import os
import queue
import tempfile
import threading
from collections.abc import Iterator

import numpy as np

from hicache.storage.base import PageBuffer

log = logging.getLogger(__name__)

# alignment in bytes of the file offset, the length and the memory address of an O_DIRECT read; sufficient for every
# common disk
ALIGNMENT = 4096
# A buffer up to this size is reused for the next value, because page faults of new memory take longer than copying a
# small value. A larger buffer, for example for a recurrent state of hundreds of MiB, must not stay allocated in every
# thread.
MAX_KEPT_BYTES = 64 << 20
HUGE_PAGE_BYTES = 2 << 20
_SHARED_FOLDER = "/dev/shm"


def round_up(num_bytes: int, unit_bytes: int = ALIGNMENT) -> int:
    return -(-num_bytes // unit_bytes) * unit_bytes


def aligned_buffer(num_bytes: int) -> memoryview:
    """Map page-aligned memory of `num_bytes`, rounded up to blocks, plus one block. The mapping uses no memory until it
    is touched.

    Memory of 2 MiB or more lies in huge pages, if the kernel has them. A disk request has at most a few hundred
    segments, each contiguous in memory. So with memory pages of 4 KiB a direct read could transfer only 1 MiB at a
    time.
    """
    length = round_up(num_bytes) + ALIGNMENT
    if length < HUGE_PAGE_BYTES:
        return memoryview(mmap.mmap(-1, length))
    length = round_up(length, HUGE_PAGE_BYTES)
    # The mapping is private, because shared anonymous memory belongs to tmpfs, which seldom has huge pages.
    memory = mmap.mmap(-1, length + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel may lack huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(memory, dtype=np.uint8).ctypes.data % HUGE_PAGE_BYTES
    return memoryview(memory)[start : start + length]


def aligned_from_heap(num_bytes: int) -> memoryview:
    """Allocate page-aligned memory from the heap, for one of many values. Heap memory that is freed and allocated again
    causes no page faults. The page faults of a new mapping would take longer than copying the value."""
    memory = np.empty(round_up(num_bytes) + ALIGNMENT, dtype=np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][: round_up(num_bytes)].data


def memory_file(name: str, num_bytes: int = 0) -> int:
    """Create a file of `num_bytes` zeros in memory and return its descriptor. If `num_bytes` is given, the file cannot
    shrink, so a process that maps the file can access every byte. Raises OSError if there is not enough memory.

    If the kernel or an old seccomp profile refuses memfd_create, the file lies in /dev/shm and is limited by the size
    of /dev/shm.
    """
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError) as error:
        _warn_of_refusal(str(error))
        return _file_without_name(num_bytes)
    try:
        if num_bytes:
            os.ftruncate(descriptor, num_bytes)
            with contextlib.suppress(OSError):  # the kernel may lack seals
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@functools.cache
def _warn_of_refusal(why: str) -> None:
    """Log one warning for each reason `why`."""
    log.warning(
        "memfd_create is refused here (%s): shared memory is taken from %s; allow it in the container's seccomp "
        "profile, or make %s as large as the host tier",
        why, _SHARED_FOLDER, _SHARED_FOLDER,
    )  # fmt: skip


def _file_without_name(num_bytes: int) -> int:
    """Create an unlinked file in /dev/shm. The memory of the file is allocated in this call. If memory were missing at
    a later access, the kernel would kill the process (SIGBUS)."""
    with contextlib.ExitStack() as undone:
        try:
            descriptor, path = tempfile.mkstemp(prefix="hicache-", dir=_SHARED_FOLDER)
            undone.callback(os.close, descriptor)
            os.unlink(path)
            for start in range(0, num_bytes, HUGE_PAGE_BYTES):
                os.pwrite(descriptor, bytes(min(HUGE_PAGE_BYTES, num_bytes - start)), start)
        except OSError as error:
            what = f"memfd_create is refused, and {_SHARED_FOLDER} has less than {num_bytes} bytes free"
            raise OSError(
                error.errno, f"{error.strerror}: {what}; allow memfd_create, or raise docker run --shm-size"
            ) from error
        undone.pop_all()
    return descriptor


def usable_cpus() -> set[int]:
    """Return the CPUs that this process may run on; all CPUs if the kernel does not report them."""
    try:
        return os.sched_getaffinity(0)
    except OSError:
        return set(range(os.cpu_count() or 1))


class _Buffer:
    """A reusable buffer for one value at a time."""

    def __init__(self) -> None:
        self._kept: memoryview = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        """Return a buffer of at least `num_bytes`, aligned as by `aligned_buffer`; its content is undefined."""
        if num_bytes > MAX_KEPT_BYTES:
            return aligned_buffer(num_bytes)
        if len(self._kept) < num_bytes + ALIGNMENT:
            self._kept = aligned_buffer(num_bytes)
        return self._kept

    def take_page(self, num_bytes: int) -> PageBuffer:
        """Return a buffer as uint8 `[num_bytes]`; its content is undefined."""
        return np.frombuffer(self.take(num_bytes), dtype=np.uint8, count=num_bytes)


class Scratch(_Buffer, threading.local):
    """One buffer per thread. The result of `take` is valid until the same thread calls `take` again."""


class CoreScratch:
    """One buffer per core, for compute-bound work. No more threads than cores do this work, because more threads would
    slow each other down. A thread gets the buffer that was used last, because it is still in the CPU caches."""

    def __init__(self) -> None:
        self._free: queue.LifoQueue[_Buffer] = queue.LifoQueue()
        for _ in usable_cpus():
            self._free.put(_Buffer())

    @contextlib.contextmanager
    def page(self, num_bytes: int) -> Iterator[PageBuffer]:
        """Wait until a buffer is free, and yield it as uint8 `[num_bytes]` with undefined content for the `with`
        block."""
        buffer = self._free.get()
        try:
            yield buffer.take_page(num_bytes)
        finally:
            self._free.put(buffer)
