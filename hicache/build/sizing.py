"""Computes sizes that the configuration leaves open from the model and the available memory, before anything is built.

    dtype            the dtype of the model or the pool; bfloat16 if neither has a dtype
    max_context_len  at most the longest sequence that the model's keys allow
    window_tokens    a window for each of max_requests, one prefill chunk, and cached windows; at most device_tokens
    mamba_size       two states for each of max_requests (running and checkpoint), and cached states
    host_bytes       twice the device tier; at most half of the available memory, and 32 GiB if it is pinned for CUDA
                     "free": the available memory, less the device tier on a CPU, and less an eighth
    host_states      cached states

Cached windows and cached states take at most half of the bytes of the KV of full attention on the same tier. There is
at most one state per page. If a host tier would be smaller than an eighth of the device tier, the engine has no host
tier, because it could store too few of the pages that the device evicts. Pinning takes about half a second per GiB; the
limit of 32 GiB bounds this time.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hicache.build import packing
from hicache.config import EngineConfig
from hicache.console import rounded, sized
from hicache.device.base import KVCache
from hicache.errors import ConfigError, OutOfMemory
from hicache.host.memory import RESERVE_BYTES, free_bytes, require
from hicache.layout import ModelGeometry
from hicache.tiers import FULL, MAMBA, SWA, Component

STATES_PER_REQUEST = 2
HOST_RATIO = 2
MAX_PINNED_BYTES = 32 << 30
_KV_PER_CACHED = 2  # bytes of full attention per byte of cached windows or states
_MEMORY_SHARE = 2  # divisor: the host tier takes at most 1/2 of the available memory
_MIN_HOST_SHARE = 8  # divisor: a host tier smaller than 1/8 of the device tier is not created

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowBytes:
    """Bytes over all layers. `full`: bytes of a token in layers that keep all tokens; `window`: bytes of a token in
    window layers; `state`: bytes of a recurrent state."""

    full: int
    window: int = 0
    state: int = 0


def row_bytes(geometry: ModelGeometry, dtype: torch.dtype) -> RowBytes:
    """Return the bytes that the pools of a model store for a token or a state, in `dtype`. If every layer has a window,
    the first layer keeps all tokens."""
    (full_dims, num_full), (window_dims, num_window) = _rows_of(geometry)
    state_bytes = 0
    if (state := geometry.state) is not None:
        conv = sum(math.prod(shape) for shape in state.conv) * state.conv_dtype.itemsize
        state_bytes = conv + math.prod(state.temporal) * state.temporal_dtype.itemsize
    return RowBytes(
        num_full * sum(full_dims) * dtype.itemsize,
        num_window * sum(window_dims) * dtype.itemsize,
        len(geometry.recurrent_layers) * state_bytes,
    )


def host_page_bytes(config: EngineConfig, geometry: ModelGeometry) -> dict[Component, int]:
    """Return the bytes of a host page of each component of a model, packed if the settings request packing, and of a
    state. The configuration must have a dtype."""
    full, window = _rows_of(geometry)
    found = {FULL: packing.page_bytes(config, *full)}
    if geometry.window_layers and window[1]:
        found[SWA] = packing.page_bytes(config, *window)
    if state_bytes := row_bytes(geometry, config.torch_dtype).state:
        found[MAMBA] = state_bytes
    return found


def resolve(config: EngineConfig, model: ModelGeometry | KVCache, available: int) -> EngineConfig:
    """Return the configuration with a number for every size. `available`: bytes of memory that this process may
    allocate.

    Raises `ConfigError` and `OutOfMemory` if a given size does not fit, or if a disk tier would have no host tier.
    """
    if config.dtype == "auto":
        config = dataclasses.replace(config, dtype=str(model.dtype or torch.bfloat16).removeprefix("torch."))
    if isinstance(model, KVCache):
        spaces = model.slot_spaces
        pool_bytes = sum(
            buffer.nbytes for s in spaces for layer in s.layout.layers for buffer in s.layer_buffers(layer)
        )
        page_bytes = [space.layout.page_bytes(config.host_page_size) for space in spaces] if config.has_host else []
        return _with_host(config, pool_bytes, page_bytes, 0, available)
    if model.max_context_len and config.max_context_len > model.max_context_len:
        log.info("max_context_len=%d: beyond that, the keys of a prefix change", model.max_context_len)
        config = dataclasses.replace(config, max_context_len=model.max_context_len)
    rows = row_bytes(model, config.torch_dtype)
    if model.window_layers:
        config = dataclasses.replace(config, window_tokens=window_tokens(config, model.window, rows))
    if rows.state:
        config = dataclasses.replace(config, mamba_size=mamba_size(config, rows))
    page_bytes = [num_bytes for name, num_bytes in host_page_bytes(config, model).items() if name != MAMBA]
    return _with_host(config, device_bytes(config, rows), page_bytes, rows.state, available)


def window_tokens(config: EngineConfig, window: int, rows: RowBytes) -> int:
    """Return the slots of the window layers, in complete device pages. Raises `ConfigError` if the configured number is
    too small."""
    size, page = _full_pages(config.device_tokens, config.page_size), config.cache_page_size
    minimum = min(size, 2 * (window + page))
    if config.window_tokens:
        if config.window_tokens < minimum:
            raise ConfigError(
                f"window_tokens={config.window_tokens} cannot hold the windows of {window} tokens of two requests; "
                f"raise window_tokens to at least {minimum}"
            )
        return _full_pages(config.window_tokens, config.page_size)
    running = config.max_requests * (_pages(window, page) + 1) * page
    chunk = _pages(config.prefill_chunk_tokens, page) * page
    cached = size * rows.full // (_KV_PER_CACHED * rows.window) if rows.window else size
    return _full_pages(min(size, max(minimum, running + chunk + cached)), config.page_size)


def mamba_size(config: EngineConfig, rows: RowBytes) -> int:
    """Return the number of recurrent states of the device tier."""
    if config.mamba_size:
        return config.mamba_size
    kv_bytes = config.device_tokens * rows.full
    cached = min(kv_bytes // _KV_PER_CACHED // rows.state, config.device_tokens // config.cache_page_size)
    return STATES_PER_REQUEST * config.max_requests + max(STATES_PER_REQUEST, cached)


def device_bytes(config: EngineConfig, rows: RowBytes) -> int:
    """Return the bytes of the device tier. Every pool has an additional page, or state, for padding."""
    tokens, page = _full_pages(config.device_tokens, config.page_size), config.page_size
    window = (config.window_tokens + page) * rows.window
    return (tokens + page) * rows.full + window + (config.mamba_size + 1) * rows.state


def host_bytes(config: EngineConfig, device_bytes: int, minimum: int, available: int) -> int:
    """Return the bytes of the host tier; 0: no host tier. `minimum`: bytes of one page and one padding page of each
    pool."""
    on_cuda = config.device.startswith("cuda")
    if config.host_bytes == "free":
        return free_bytes("host_bytes", max(0, available - (0 if on_cuda else device_bytes)), minimum)
    if config.host_bytes != "auto":
        if config.host_bytes:
            require(config.host_bytes, "host_bytes", available)
        return config.host_bytes
    free = max(0, available - RESERVE_BYTES - (0 if on_cuda else device_bytes))
    auto_bytes = min(max(HOST_RATIO * device_bytes, minimum), free // _MEMORY_SHARE)
    auto_bytes = min(auto_bytes, MAX_PINNED_BYTES) if on_cuda else auto_bytes
    needed = max(minimum, device_bytes // _MIN_HOST_SHARE)
    if auto_bytes >= needed:
        log.info("host_bytes=auto: %d bytes for a device tier of %d, %d available", auto_bytes, device_bytes, available)
        return auto_bytes
    reason = f"host_bytes=auto finds too little memory: {rounded(available)} are available, "
    reason += f"{rounded(_MEMORY_SHARE * needed)} more than the reserve of {rounded(RESERVE_BYTES)} are needed"
    if config.disk is not None:
        raise OutOfMemory(
            f"{reason}; the disk tier needs a host tier: free memory, or set host_bytes to at least {sized(minimum)}"
        )
    log.warning("there is no host tier: %s; free memory, or set host_bytes", reason)
    return 0


def host_states(config: EngineConfig, total: int, page_bytes: int, state_bytes: int) -> int:
    """Return the number of recurrent states of a host tier of `total` bytes that also holds pages of `page_bytes`."""
    if config.host_states:
        return config.host_states
    by_bytes, by_pages = total // (1 + _KV_PER_CACHED) // state_bytes, total // (page_bytes + state_bytes)
    return max(1, min(by_bytes, by_pages) - 1)  # one state is for padding


def host_shares(config: EngineConfig, page_bytes: Mapping[str, int], num_states: int | None) -> dict[str, int]:
    """Return the bytes of each host pool, by component: the configured states, and the same number of pages for all
    other components. The configuration is resolved.

    `page_bytes`: the bytes of a page of each pool. `num_states`: the number of recurrent states; None without a pool of
    states.
    """
    total = config.host_bytes
    assert isinstance(total, int), "the configuration is resolved"
    shares = {} if num_states is None else {MAMBA: (num_states + 1) * page_bytes[MAMBA]}
    others = {name: num_bytes for name, num_bytes in page_bytes.items() if name not in shares}
    num_pages = (total - sum(shares.values())) // sum(others.values())
    return {**{name: num_pages * num_bytes for name, num_bytes in others.items()}, **shares}


def _rows_of(geometry: ModelGeometry) -> tuple[tuple[tuple[int, ...], int], tuple[tuple[int, ...], int]]:
    """Return, first for layers that keep all tokens and then for window layers, the elements of a token in each buffer
    of a layer, and the number of layers. If every layer has a window, the first layer keeps all tokens."""
    full, window = ((at.head_num * at.head_dim, at.head_num * at.v_head_dim)
                    for at in (geometry.full_heads, geometry.window_heads))  # fmt: skip
    if not geometry.full_layers:
        full = window
    num_full = len(geometry.full_layers) or min(1, len(geometry.window_layers))
    num_window = len(geometry.full_layers) + len(geometry.window_layers) - num_full
    return (full if geometry.latent is None else (geometry.latent.row_dim,), num_full), (window, num_window)


def _with_host(
    config: EngineConfig, device_bytes: int, page_bytes: Sequence[int], state_bytes: int, available: int
) -> EngineConfig:
    if not config.has_host:
        return config
    total = host_bytes(config, device_bytes, 2 * (sum(page_bytes) + state_bytes), available)
    states = host_states(config, total, page_bytes[0], state_bytes) if total and state_bytes else config.host_states
    return dataclasses.replace(config, host_bytes=total, host_states=states)


def _pages(tokens: int, page: int) -> int:
    return -(-tokens // page)


def _full_pages(tokens: int, page: int) -> int:
    return tokens // page * page
