"""Builds an engine from its configuration: the one place where tiers are sized, wired and checked against each other.

May import flow and everything below it, and the engine.
"""

from __future__ import annotations

import torch

from hicache.alloc import BaseTokenToKVPoolAllocator, PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from hicache.config import EngineConfig, kernel_choice
from hicache.device import KVCache, MHATokenToKVPool, ReqToTokenPool
from hicache.device.base import SlotSpace
from hicache.disk import DiskTier, identity_of, namespace_digest
from hicache.engine import CacheEngine
from hicache.errors import ConfigError
from hicache.flow.base import Parts
from hicache.host import HostPagePool
from hicache.kernels.page_copy import PageMover
from hicache.layout import ModelGeometry
from hicache.metrics import Metrics
from hicache.storage import LmdbPageStore
from hicache.transfer import CpuTransfer, CudaTransfer, LayerTransferCounter, TransferBackend
from hicache.transfer.counter import CpuLayerEvents, CudaLayerEvents
from hicache.tree import PageHasher, RadixTree


def build_engine(config: EngineConfig, model: ModelGeometry | KVCache) -> CacheEngine:
    """An engine for `model`; start it before use.

    `model`: the geometry of multi-head attention with grouped heads, whose pool is built here, or a pool of another
    kind (MLA, NSA, quantised, …) with one set of slots. Raises `ConfigError`, `OutOfMemory`, and what the store raises
    when it was made for another model or layout.
    """
    device = _device(config.device)
    pool = _mha_pool(config, model, device) if isinstance(model, ModelGeometry) else _fitting(config, model, device)
    page = config.page_size
    row_len = -(-config.max_context_len // page) * page
    host = None
    if config.host_bytes:
        host = HostPagePool(pool.layout, config.host_page_size, config.host_bytes, pin=device.type == "cuda")
    transfer, counter = build_transfer(config, pool, host)
    pool.register_layer_transfer_counter(counter)
    return CacheEngine(
        Parts(
            config=config,
            pool=pool,
            req_to_token=ReqToTokenPool(config.max_requests, row_len, device, enable_memory_saver=False),
            allocator=_allocator(config, pool, device),
            tree=RadixTree(
                config.cache_page_size, PageHasher(namespace_digest(config, pool.layout), config.cache_page_size)
            ),
            counter=counter,
            metrics=Metrics(),
            host=host,
            transfer=transfer,
            disk=None if host is None else _disk(config, pool, host),
        )
    )


def _mha_pool(config: EngineConfig, geometry: ModelGeometry, device: torch.device) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=config.device_tokens // config.page_size * config.page_size,
        page_size=config.page_size,
        dtype=config.torch_dtype,
        layer_num=geometry.layer_num,
        device=device,
        enable_memory_saver=False,
        head_num=geometry.head_num,
        head_dim=geometry.head_dim,
        v_head_dim=geometry.v_head_dim,
    )


def _fitting(config: EngineConfig, pool: KVCache, device: torch.device) -> KVCache:
    """The caller's pool, when the settings say the same of it."""
    for knob, of_pool, wanted in (
        ("device_tokens", pool.size, config.device_tokens // config.page_size * config.page_size),
        ("page_size", pool.page_size, config.page_size),
        ("dtype", pool.dtype, config.torch_dtype),
        ("device", _device(pool.device), device),
    ):
        if of_pool != wanted:
            raise ConfigError(f"the pool has {knob} {of_pool}, the configuration {wanted}; set {knob} to the pool's")
    return pool


def _device(name: str | torch.device) -> torch.device:
    """The device with its index; ConfigError where torch does not see it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r}: write cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r}: this engine runs on cpu and cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"device={name!r}: torch sees {count} CUDA devices; use cpu or a lower index")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def _allocator(config: EngineConfig, pool: KVCache, device: torch.device) -> BaseTokenToKVPoolAllocator:
    if config.page_size == 1:
        return TokenToKVPoolAllocator(pool.size, pool.dtype, device, pool, need_sort=True)
    return PagedTokenToKVPoolAllocator(pool.size, config.page_size, pool.dtype, device, pool, need_sort=True)


def build_transfer(
    config: EngineConfig, pool: KVCache | SlotSpace, host: HostPagePool | None
) -> tuple[TransferBackend | None, LayerTransferCounter]:
    """The backend for the pool's device, and the layer counter it reports to; no backend without a host tier."""
    layers, on_cuda = pool.layout.layers, pool.device.type == "cuda"
    counter = LayerTransferCounter(len(layers), CudaLayerEvents if on_cuda else CpuLayerEvents)
    if host is None:
        return None, counter
    kernels = kernel_choice(pool.device)
    mover = PageMover(
        [pool.layer_buffers(layer) for layer in layers],
        config.host_page_size,
        kernels,
        [pool.layout.spans_of(layer) for layer in layers],
    )
    if not on_cuda:
        return CpuTransfer(host.bytes_of, mover, len(layers), counter), counter
    backend = CudaTransfer(
        host.bytes_of,
        mover,
        [pool.layout.layer_bytes(layer, config.host_page_size) for layer in layers],
        counter,
        device=pool.device,
        rows_per_chunk=host.arena.rows_per_chunk,
        page_tokens=config.host_page_size,
        staging_bytes=config.staging_bytes,
        chunk_tokens=config.transfer_chunk_tokens,
    )
    return backend, counter


def _disk(config: EngineConfig, pool: KVCache, host: HostPagePool) -> DiskTier | None:
    if config.disk is None:
        return None
    store = LmdbPageStore(
        config.disk.path,
        identity=identity_of(config, pool.layout),
        page_bytes=host.page_bytes,
        budget_bytes=config.disk.budget_bytes,
        durability=config.disk.durability,
        level=config.disk.level,
        element_bytes=pool.store_dtype.itemsize,
    )
    return DiskTier(store, readers=config.disk.readers, queue_jobs=config.disk.queue_jobs)
