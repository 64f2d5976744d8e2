"""One block of CPU memory, pinned once, that is divided into all host pages.

The arena owns the mapping and its registration with CUDA. Threads near the GPU touch the memory in parallel before the
memory is pinned: the slow part is to allocate and clear memory pages, and the driver would do this with a single
thread. Memory is pinned in chunks of complete rows. A copy must not cross the end of a chunk, because CUDA registers
each chunk separately.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import math
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import OutOfMemory
from hicache.host.memory import require
from hicache.host.numa import cpus_near, pci_address, run_near
from hicache.storage.memory import memory_file, usable_cpus

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 30
_MADV_POPULATE_WRITE = 23  # the value since Linux 5.14
TOUCH_BYTES = 32 << 20  # bytes that a thread touches at a time: complete huge pages, and a small part of the memory


class CudaRegistry:
    """Page-locks memory for every GPU of the process. `device`: the GPU near which the memory lies; None: the current
    GPU."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        self._cudart: Any = torch.cuda.cudart()

    def near(self) -> frozenset[int]:
        """Return the CPUs that should touch the memory first; empty for no preference."""
        return cpus_near(pci_address(self._device), usable_cpus())

    def register(self, address: int, num_bytes: int) -> str | None:
        """Page-lock `[address, address + num_bytes)`. Returns None, or the reason for a failure."""
        return self._call(self._cudart.cudaHostRegister, address, num_bytes, 0)

    def unregister(self, address: int) -> str | None:
        """Undo the registration that began at `address`. Returns None, or the reason for a failure."""
        return self._call(self._cudart.cudaHostUnregister, address)

    def allocate(self, num_bytes: int) -> int:
        """Allocate page-locked memory. Returns the address, which the caller passes to `free`, or 0 if CUDA cannot
        allocate the memory."""
        address = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            # torch is not used here, because it allocates pinned memory only in powers of two.
            ctypes.CDLL("libcuda.so.1").cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(num_bytes), 0)
        return address.value or 0

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned."""
        with torch.cuda.device(self._device):
            ctypes.CDLL("libcuda.so.1").cuMemFreeHost(ctypes.c_void_p(address))

    def _call(self, function: Callable[..., Any], *arguments: int) -> str | None:
        # Make the engine's device current: a call while another device is current would create a context on that
        # device, which takes memory.
        with torch.cuda.device(self._device):
            status = function(*arguments)
            if int(status) == 0:
                return None
            # CUDA reports the error of a failed call again at this thread's next kernel launch. Therefore launch a
            # kernel here.
            try:
                torch.ones(1, device=self._device)
            except RuntimeError as error:
                log.debug("left behind by a failed registration: %s", error)
        return f"CUDA error {int(status)}, {self._cudart.cudaGetErrorString(status)}"


class PinnedRows:
    """Page-locks `data`, contiguous uint8 [rows, row_bytes], in chunks of `rows_per_chunk` complete rows.

    The caller owns the memory, which is private or shared with other processes; each process locks the memory for its
    own GPUs. Call `close` before the memory is unmapped. An OutOfMemory names `setting`.
    """

    def __init__(
        self,
        data: torch.Tensor,
        *,
        setting: str,
        device: torch.device | None = None,
        registry: CudaRegistry | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        rows, row_bytes = data.shape
        self.rows_per_chunk = _rows_per_chunk(row_bytes, chunk_bytes)
        registry = CudaRegistry(device) if registry is None else registry
        pinned: list[int] = []
        self._data = data
        # The finalizer also unpins if the object is freed without `close`: addresses that are unmapped while they are
        # registered cannot be used again.
        self._unpin = weakref.finalize(self, _unregister, registry, pinned)
        self._unpin.atexit = False  # at exit, the driver unpins faster than this process
        try:
            for first in range(0, rows, self.rows_per_chunk):
                start = data.data_ptr() + first * row_bytes
                length = min(self.rows_per_chunk, rows - first) * row_bytes
                failed = registry.register(start, length)
                if failed is not None:
                    raise OutOfMemory(
                        f"cannot pin {length} of {rows * row_bytes} bytes of CPU memory ({failed}); "
                        f"lower {setting} or raise ulimit -l"
                    )
                pinned.append(start)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unpin the memory. May be called again."""
        self._unpin()


class PinnedArena:
    """CPU memory for `rows` rows of `row_bytes` bytes: `data` is uint8 [rows, row_bytes], zeros, page-locked if `pin`.

    Row r lies in chunk r // `rows_per_chunk`. Without `pin`, the system allocates memory when it is first written. With
    `pin`, all memory is allocated when the constructor returns, and a forked child cannot access the memory. The
    engine's thread builds and closes an arena; transfer streams and disk readers copy into it. OutOfMemory errors name
    `setting`.

    `shared`: a store process may map the memory too, by the file `descriptor` (-1 if not shared), which `close` closes.
    """

    def __init__(
        self,
        rows: int,
        row_bytes: int,
        *,
        pin: bool,
        setting: str = "host_bytes",
        device: torch.device | None = None,
        registry: CudaRegistry | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        shared: bool = False,
    ) -> None:
        total = rows * row_bytes
        require(total, setting)
        self.rows_per_chunk = _rows_per_chunk(row_bytes, chunk_bytes)
        self.descriptor = _memory_file(total, setting) if shared else -1
        # The finalizer also closes the file if the object is freed without `close`, for example because building the
        # engine failed. Otherwise the memory would stay allocated.
        self._forget = weakref.finalize(self, _close_file, self.descriptor)
        mapping = _map(total, setting, self.descriptor)
        self.data = torch.frombuffer(mapping, dtype=torch.uint8)[:total].view(rows, row_bytes)
        self._pins: PinnedRows | None = None
        if pin:
            # After a fork, the next write to a memory page would copy the page, and the GPU would continue to use the
            # old page.
            mapping.madvise(mmap.MADV_DONTFORK)
            registry = CudaRegistry(device) if registry is None else registry
            touch(self.data.numpy(), registry.near(), setting)
            self._pins = PinnedRows(self.data, setting=setting, registry=registry, chunk_bytes=chunk_bytes)

    def close(self) -> None:
        """Unpin the memory. May be called again. The memory is released when the last tensor that refers to it is
        freed."""
        if self._pins is not None:
            self._pins.close()
        self._forget()
        self.descriptor = -1


def allocate_pinned(rows: int, row_bytes: int, *, setting: str, registry: CudaRegistry) -> torch.Tensor:
    """Allocate uint8 [rows, row_bytes] that is page-locked by CUDA, for systems where CUDA cannot lock existing memory.
    No other process can map the memory. It is released when the last tensor that refers to the memory is freed. An
    OutOfMemory names `setting`."""
    num_bytes = rows * row_bytes
    require(num_bytes, setting)
    address = registry.allocate(num_bytes)
    if not address:
        raise OutOfMemory(f"CUDA cannot allocate {num_bytes} bytes of CPU memory; lower {setting}")
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    # at exit, the driver frees faster than this process
    weakref.finalize(memory, registry.free, address).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8).view(rows, row_bytes)


def touch(memory: npt.NDArray[np.uint8], cpus: frozenset[int], setting: str) -> None:
    """Allocate every memory page of `memory`, uint8 [rows, bytes], by threads on `cpus` (empty: on any CPU). There may
    be gaps between rows. The bytes of `memory` do not change. An OutOfMemory names `setting`."""
    start, (num_rows, row_bytes) = memory.ctypes.data, memory.shape
    if memory.flags.c_contiguous:
        num_rows, row_bytes = 1, memory.nbytes
    step = max(1, TOUCH_BYTES // max(1, row_bytes))  # rows
    pieces = [
        [(start + row * memory.strides[0] + at, min(TOUCH_BYTES, row_bytes - at)) for row in range(first, last)]
        for first, last in ((first, min(first + step, num_rows)) for first in range(0, num_rows, step))
        for at in range(0, row_bytes, TOUCH_BYTES)
    ]
    try:
        run_near(_touch_spans, pieces, cpus)
    except OSError as error:
        raise OutOfMemory(f"cannot allocate {memory.nbytes} bytes of CPU memory ({error}); lower {setting}") from None


def _touch_spans(spans: list[tuple[int, int]]) -> None:
    """Allocate the memory pages of spans, each an address and a number of bytes."""
    libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL, unlike mmap.madvise
    for address, num_bytes in spans:
        first = address - address % mmap.PAGESIZE
        length = address + num_bytes - first
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
            error = ctypes.get_errno()
            if error != errno.EINVAL:
                raise OSError(error, os.strerror(error))
            pages = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(first))
            pages[:: mmap.PAGESIZE] |= 0  # for kernels before 5.14; numpy releases the GIL


def _map(num_bytes: int, setting: str, descriptor: int) -> mmap.mmap:
    """Map zero-filled memory. Without a descriptor the memory is private, because shared memory seldom has huge
    pages."""
    flags = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapping = mmap.mmap(descriptor, max(num_bytes, 1), flags=flags)
    except OSError as error:  # overcommit is off, or the address space is limited
        raise OutOfMemory(f"cannot map {num_bytes} bytes of CPU memory ({error}); lower {setting}") from None
    with contextlib.suppress(OSError):  # the kernel may lack huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _memory_file(num_bytes: int, setting: str) -> int:
    """Create a file in memory and return its descriptor. An OutOfMemory names `setting`."""
    try:
        return memory_file("hicache-host", max(num_bytes, 1))
    except OSError as error:
        raise OutOfMemory(f"cannot take {num_bytes} bytes of shared memory ({error}); lower {setting}") from None


def _close_file(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _rows_per_chunk(row_bytes: int, chunk_bytes: int) -> int:
    """Return the number of rows of a chunk of `chunk_bytes`, rounded so that a chunk ends at the end of a memory page.
    CUDA locks complete memory pages and refuses a page that another chunk has locked."""
    step_rows = mmap.PAGESIZE // math.gcd(row_bytes, mmap.PAGESIZE)
    return max(1, chunk_bytes // (row_bytes * step_rows)) * step_rows


def _unregister(registry: CudaRegistry, pinned: list[int]) -> None:
    while pinned:
        failed = registry.unregister(pinned.pop())
        if failed is not None:
            log.warning("cannot unpin a chunk of CPU memory: %s", failed)
