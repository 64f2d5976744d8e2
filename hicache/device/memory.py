"""How pools and tables get their device memory: from the memory saver's region, a custom pool or plainly, all or none.

Owns the process's NVLink pools, one a device. The only module that knows `torch_memory_saver` and Mooncake's
allocator. May import config and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, overload

import torch

from hicache.config import custom_mem_pool
from hicache.errors import ConfigError, OutOfMemory

try:
    import torch_memory_saver as _memory_saver
except ImportError:
    _memory_saver = None

try:
    from mooncake.allocator import NVLinkAllocator as _NVLinkAllocator
except ImportError:
    _NVLinkAllocator = None


@contextmanager
def allocation_region(enable_memory_saver: bool) -> Iterator[None]:
    """Where a pool allocates: the memory saver's region, whose memory can be paused, or plainly."""
    if not enable_memory_saver:
        yield
        return
    if _memory_saver is None:
        raise ConfigError(
            "enable_memory_saver needs the package torch_memory_saver; install it, or set enable_memory_saver=False"
        )
    with _memory_saver.torch_memory_saver.region(tag="kv_cache"):
        yield


@contextmanager
def custom_pool_region(device: torch.device) -> Iterator[None]:
    """Take GPU memory from the pool that `HICACHE_CUSTOM_MEM_POOL` names; it has no effect on other devices."""
    if device.type != "cuda" or custom_mem_pool() is None:
        yield
        return
    with torch.cuda.use_mem_pool(nvlink_pool(device), device=device):
        yield


@cache
def nvlink_pool(device: torch.device) -> Any:
    """A `torch.cuda.MemPool` over Mooncake's NVLink allocator, made once: it must outlive the tensors in it."""
    if _NVLinkAllocator is None:
        raise ConfigError(
            "HICACHE_CUSTOM_MEM_POOL=nvlink needs mooncake.allocator of the package mooncake-transfer-engine; "
            "install it, or unset HICACHE_CUSTOM_MEM_POOL"
        )
    return torch.cuda.MemPool(_NVLinkAllocator.get_allocator(device).allocator())


def allocate_zeros(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device, knob: str = "device_tokens"
) -> list[torch.Tensor]:
    """Zero-filled tensors, all or none. OutOfMemory says bytes asked, bytes free, and the knob."""
    asked = sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize
    free = None
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
        if asked > free:
            raise _out_of_memory(asked, free, device, knob)
    with custom_pool_region(device):
        try:
            return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        except RuntimeError as error:
            raise _out_of_memory(asked, free, device, knob) from error


class LazyLayers:
    """The buffers of each layer, allocated together when the layer is first used. Owns the tensors.

    Used by whoever uses the pool; the first use of a layer is the scheduler thread's or the forward's, not both at
    once. `on_allocated` is told the bytes of each new layer.
    """

    def __init__(
        self,
        num_layers: int,
        shapes: list[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        enable_memory_saver: bool,
        on_allocated: Callable[[int], None],
    ) -> None:
        self._shapes, self._dtype, self._device = shapes, dtype, device
        self._enable_memory_saver = enable_memory_saver
        self._on_allocated = on_allocated
        self._layers: list[list[torch.Tensor] | None] = [None] * num_layers
        with allocation_region(enable_memory_saver):
            pass  # a missing package is told now, not at the first store

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def allocated(self) -> frozenset[int]:
        """Dense indices of the layers that have been used."""
        return frozenset(index for index, layer in enumerate(self._layers) if layer is not None)

    def layer(self, index: int) -> list[torch.Tensor]:
        """The buffers of a layer. ConfigError where the first use is within a CUDA graph, OutOfMemory when full."""
        buffers = self._layers[index]
        if buffers is None:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ConfigError(
                    f"layer {index} of a lazy pool is first used in a CUDA graph, whose replays would clear it; "
                    f"run one step before the capture, or build the pool with lazy=False"
                )
            with allocation_region(self._enable_memory_saver):
                buffers = allocate_zeros(self._shapes, self._dtype, self._device)
            self._layers[index] = buffers
            self._on_allocated(sum(buffer.nbytes for buffer in buffers))
        return buffers

    def column(self, kind: int) -> LazyColumn:
        """The `kind`-th buffer of every layer, as a sequence that allocates what it is asked for."""
        return LazyColumn(self, kind)


class LazyColumn(Sequence[torch.Tensor]):
    """One kind of buffer over all layers of a `LazyLayers`: indexing a layer allocates it."""

    def __init__(self, layers: LazyLayers, kind: int) -> None:
        self._layers, self._kind = layers, kind

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self._layers.layer(i)[self._kind] for i in range(*index.indices(len(self)))]
        return self._layers.layer(index)[self._kind]


def _out_of_memory(asked: int, free: int | None, device: torch.device, knob: str) -> OutOfMemory:
    known = "" if free is None else f", {free} bytes are free"
    return OutOfMemory(f"the device pool needs {asked} bytes on {device}{known}; lower {knob}")
