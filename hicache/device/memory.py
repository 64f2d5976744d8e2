"""How pools and tables get their device memory: within the memory saver's region or plainly, whole or not at all.

Owns nothing. The only module that knows `torch_memory_saver`. May import errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hicache.errors import ConfigError, OutOfMemory

try:
    import torch_memory_saver as _memory_saver
except ImportError:
    _memory_saver = None


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


def allocate_zeros(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Zero-filled tensors, all or none. OutOfMemory says bytes asked, bytes free, and the knob."""
    asked = sum(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize
    free = None
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
        if asked > free:
            raise _out_of_memory(asked, free, device)
    try:
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    except RuntimeError as error:
        raise _out_of_memory(asked, free, device) from error


def _out_of_memory(asked: int, free: int | None, device: torch.device) -> OutOfMemory:
    known = "" if free is None else f", {free} bytes are free"
    return OutOfMemory(f"the device pool needs {asked} bytes on {device}{known}; lower device_tokens")
