"""Allocates device memory for pools and tables, from torch's allocator, in the memory saver's region, or from a custom
memory pool.

The module owns the process's NVLink memory pools, one per device. This is the only module that uses
`torch_memory_saver` and Mooncake's allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, overload

import torch

from hicache.config.environment import CUSTOM_MEM_POOL, custom_mem_pool
from hicache.errors import ConfigError, OutOfMemory


@contextmanager
def allocation_region(enable_memory_saver: bool) -> Iterator[None]:
    """If `enable_memory_saver`, make allocations within the `with` block in the memory saver's region. The memory saver
    can pause its region, which releases the region's memory."""
    if not enable_memory_saver:
        yield
        return
    try:
        from torch_memory_saver import torch_memory_saver
    except ImportError as error:
        raise ConfigError(
            "enable_memory_saver needs the package torch_memory_saver; install it, or set enable_memory_saver=False"
        ) from error
    with torch_memory_saver.region(tag="kv_cache"):
        yield


@contextmanager
def custom_pool_region(device: torch.device) -> Iterator[None]:
    """Allocate GPU memory within the `with` block from the memory pool that `HICACHE_CUSTOM_MEM_POOL` names. Has no
    effect if `device` is no GPU."""
    if device.type != "cuda" or custom_mem_pool() is None:
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.use_mem_pool(nvlink_pool(device), device=torch.device("cuda", index)):
        yield


@cache
def nvlink_pool(device: torch.device) -> Any:
    """Return the `torch.cuda.MemPool` over Mooncake's NVLink allocator. The pool is built once and kept until the
    process ends, because it must outlive its tensors."""
    try:
        from mooncake.allocator import NVLinkAllocator
    except ImportError as error:
        raise ConfigError(
            f"{' or '.join(CUSTOM_MEM_POOL.names)} is set, which needs mooncake.allocator of the package "
            "mooncake-transfer-engine; install it, or unset the variable"
        ) from error
    return torch.cuda.MemPool(NVLinkAllocator.get_allocator(device).allocator())


def allocate_zeros(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device, setting: str = "device_tokens"
) -> list[torch.Tensor]:
    """Allocate zero-filled tensors of all `shapes`, or none. Raises OutOfMemory with the needed bytes, the free bytes,
    and `setting` as the setting to lower."""
    needed = sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize
    free = None
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
        if needed > free:
            raise _out_of_memory(needed, free, device, setting)
    with custom_pool_region(device):
        try:
            return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        except RuntimeError as error:
            raise _out_of_memory(needed, free, device, setting) from error


class LazyLayers:
    """The buffers of each layer, allocated by `allocate` when the layer is first indexed.

    Not thread-safe: two threads must not use a layer for the first time simultaneously.
    """

    def __init__(self, num_layers: int, device: torch.device, allocate: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        self._device = device
        self._allocate = allocate
        self._layers: list[tuple[torch.Tensor, ...] | None] = [None] * num_layers

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        """Return the buffers of a layer. Raises ConfigError if the first use of the layer is within a CUDA graph
        capture. Raises OutOfMemory if the layer does not fit."""
        buffers = self._layers[index]
        if buffers is None:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ConfigError(
                    f"layer {index} of a lazy pool is first used in a CUDA graph, whose replays would clear it; "
                    f"run one step before the capture, or build the pool with lazy=False"
                )
            buffers = self._layers[index] = self._allocate()
        return buffers


class LazyColumn(Sequence[torch.Tensor]):
    """For each layer of a `LazyLayers`, its buffer at the index `kind`, such as the keys. Indexing a layer allocates
    all buffers of this layer."""

    def __init__(self, layers: LazyLayers, kind: int) -> None:
        self._layers = layers
        self._kind = kind

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._layers[index][self._kind]


def _out_of_memory(needed: int, free: int | None, device: torch.device, setting: str) -> OutOfMemory:
    known = "" if free is None else f", {free} bytes are free"
    return OutOfMemory(f"the device pool needs {needed} bytes on {device}{known}; lower {setting}")
