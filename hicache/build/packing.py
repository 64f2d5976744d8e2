"""Decides which components have packed host pages, and computes the size of packed pages.

    kv_packing=auto   4 bits on CUDA, for pools of full attention and windows that `PagePacker` supports; others: raw
    kv_packing=3, 4   on every device, on a CPU with torch; ConfigError if full attention or windows cannot be packed

States, and pools of other dtypes than bfloat16, stay raw: the 5 exponent bits of float16 cannot be packed into fewer
bits. Pools also stay raw if they store more than rows of equal size for each token: values of another size than keys,
sparse latent attention (NSA), whose index keys are bytes by device page, and labels (DoubleSparse).
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence

import torch

from hicache.config import EngineConfig
from hicache.config.environment import kernel_choice
from hicache.device.base import SlotSpace
from hicache.errors import ConfigError
from hicache.kernels.pack import FOUR_BITS, THREE_BITS, PackFormat, PagePacker
from hicache.tiers import FULL, SWA, Component

log = logging.getLogger(__name__)

_FORMATS = {"3": THREE_BITS, "4": FOUR_BITS}


def configured_format(config: EngineConfig) -> PackFormat | None:
    """Return the format that the settings request for pools that can be packed; None: raw."""
    if config.kv_packing == "auto":
        return FOUR_BITS if config.device.startswith("cuda") else None
    return _FORMATS.get(config.kv_packing)


def packer_of(config: EngineConfig, name: Component, space: SlotSpace, page_tokens: int) -> PagePacker | None:
    """Return the packer of a component's host pages; None if the pages stay raw. Raises ConfigError if the settings
    request packing and the pages cannot be packed."""
    pack_format = configured_format(config)
    if pack_format is None or name not in (FULL, SWA):
        return None
    layout = space.layout
    try:
        if shared := [spec.name for spec in layout.buffers if spec.per == "page" and layout.device_page_size > 1]:
            raise ValueError(f"a row of its buffer {shared[0]} belongs to several tokens")
        buffers = [space.layer_buffers(layer) for layer in layout.layers]
        packer = PagePacker(buffers, page_tokens, kernel_choice(space.device), pack_format)
        if pool_page_bytes(packer) > layout.page_bytes(page_tokens):
            raise ValueError(f"its pages of {layout.page_bytes(page_tokens)} bytes would get larger")
    except ValueError as error:
        if config.kv_packing == "auto":
            log.info("host pages of component %s stay raw: %s", name, error)
            return None
        raise ConfigError(
            f"kv_packing={config.kv_packing} cannot pack the pages of component {name}: {error}; set kv_packing to auto"
        ) from error
    return packer


def pool_page_bytes(packer: PagePacker) -> int:
    """Return the bytes of a packed host page, aligned."""
    return _aligned(packer.page_bytes)


def _aligned(num_bytes: int) -> int:
    """Round `num_bytes` up to a multiple of a power of two. The power is at most a memory page, and rounding adds less
    than 1/256. With pages at arbitrary multiples of 16 bytes, the copy engine loses 1.5 % of the link's rate."""
    alignment = min(1 << max(16, num_bytes // 256).bit_length() - 1, mmap.PAGESIZE)
    return -(-num_bytes // alignment) * alignment


def page_bytes(config: EngineConfig, row_dims: Sequence[int], num_layers: int) -> int:
    """Return the bytes of a host page of an engine before it is built. `row_dims`: elements of a token in each buffer
    of a layer."""
    tokens, pack_format, dtype = config.host_page_size, configured_format(config), config.torch_dtype
    raw_bytes = num_layers * tokens * sum(row_dims) * dtype.itemsize
    is_power = tokens & (tokens - 1) == 0 and tokens >= PagePacker.LEAST_TOKENS
    is_even = len({*row_dims}) == 1 and row_dims[0] % PagePacker.LEAST_CHANNELS == 0
    if pack_format is None or dtype != torch.bfloat16 or not is_even or not is_power:
        return raw_bytes
    layer_bytes = sum(pack_format.buffer_bytes(buffer, tokens, dims) for buffer, dims in enumerate(row_dims))
    return min(raw_bytes, _aligned(num_layers * layer_bytes))
