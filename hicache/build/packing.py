"""Which components keep packed pages, and how large these are.

    kv_packing=auto   4 bits on CUDA, for full attention and windows whose pools `PagePacker` takes; others stay raw
    kv_packing=3, 4   everywhere, on a CPU with torch; ConfigError where such a pool cannot be packed

States, and pools of other dtypes than bfloat16, stay raw: float16 has 5 bits of exponent, of which packing saves none.
So do pools that have more than rows of one size, a token each: values of another size than keys, sparse latent
attention (NSA), whose index keys are bytes by device page, and labels (DoubleSparse).
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


def wanted_format(config: EngineConfig) -> PackFormat | None:
    """What the settings ask for, where a pool can be packed."""
    if config.kv_packing == "auto":
        return FOUR_BITS if config.device.startswith("cuda") else None
    return _FORMATS.get(config.kv_packing)


def packer_of(config: EngineConfig, name: Component, space: SlotSpace, page_tokens: int) -> PagePacker | None:
    """What packs the host pages of a component; None: they stay raw. ConfigError where the settings forbid that."""
    wanted = wanted_format(config)
    if wanted is None or name not in (FULL, SWA):
        return None
    layout = space.layout
    try:
        if shared := [spec.name for spec in layout.buffers if spec.per == "page" and layout.device_page_size > 1]:
            raise ValueError(f"rows of its buffer {shared[0]} belong to several tokens")
        buffers = [space.layer_buffers(layer) for layer in layout.layers]
        packer = PagePacker(buffers, page_tokens, kernel_choice(space.device), wanted)
        if place_bytes(packer) > layout.page_bytes(page_tokens):
            raise ValueError(f"its pages of {layout.page_bytes(page_tokens)} bytes would get larger")
    except ValueError as error:
        if config.kv_packing == "auto":
            log.info("host pages of component %s stay raw: %s", name, error)
            return None
        raise ConfigError(
            f"kv_packing={config.kv_packing} cannot pack the pages of component {name}: {error}; set kv_packing to auto"
        ) from error
    return packer


def place_bytes(packer: PagePacker) -> int:
    """Bytes of a host page."""
    return _aligned(packer.page_bytes)


def _aligned(num_bytes: int) -> int:
    """Rounded up to a power of two, of at most a memory page, that costs less than 1/256: where pages begin at any
    multiple of 16, the copy engine loses 1.5 % of the link."""
    alignment = min(1 << max(16, num_bytes // 256).bit_length() - 1, mmap.PAGESIZE)
    return -(-num_bytes // alignment) * alignment


def page_bytes(config: EngineConfig, row_dims: Sequence[int], num_layers: int) -> int:
    """Bytes of a host page of an engine that is not built. `row_dims`: a token's elements in each buffer of a layer."""
    tokens, wanted, dtype = config.host_page_size, wanted_format(config), config.torch_dtype
    raw_bytes = num_layers * tokens * sum(row_dims) * dtype.itemsize
    is_power = tokens & (tokens - 1) == 0 and tokens >= PagePacker.LEAST_TOKENS
    is_even = len({*row_dims}) == 1 and row_dims[0] % PagePacker.LEAST_CHANNELS == 0
    if wanted is None or dtype != torch.bfloat16 or not is_even or not is_power:
        return raw_bytes
    layer_bytes = sum(wanted.buffer_bytes(buffer, tokens, dims) for buffer, dims in enumerate(row_dims))
    return min(raw_bytes, _aligned(num_layers * layer_bytes))
