"""Builds an engine from its configuration: the one place where tiers are sized, wired and checked against each other.

May import flow and everything below it, and the engine.
"""

from __future__ import annotations

import torch

from hicache.alloc import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from hicache.config import EngineConfig, kernel_choice
from hicache.device import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    KVCache,
    Mamba2CacheParams,
    Mamba2StateShape,
    MHATokenToKVPool,
    ReqToTokenPool,
    SWAKVPool,
)
from hicache.device.base import SlotSpace
from hicache.disk import DiskTier, Limits, cipher_of, identity_of, namespace_digest, page_filter
from hicache.engine import CacheEngine
from hicache.errors import ConfigError
from hicache.flow.base import Parts, States, Windows
from hicache.host import HostPagePool
from hicache.host.memory import available_bytes, host_budget
from hicache.kernels.page_copy import PageMover
from hicache.layout import ModelGeometry, PoolLayout
from hicache.metrics import Metrics
from hicache.storage import LmdbPageStore
from hicache.transfer import CpuTransfer, CudaTransfer, LayerTransferCounter, TransferBackend
from hicache.transfer.counter import CpuLayerEvents, CudaLayerEvents, LayerRoutes
from hicache.tree import MambaRules, PageHasher, RadixTree, SwaRules
from hicache.tree.components import Rules

_STATES_PER_REQUEST = 4
_HOST_SHARE_OF_STATES = 4


def build_engine(config: EngineConfig, model: ModelGeometry | KVCache) -> CacheEngine:
    """An engine for `model`; start it before use.

    `model`: the geometry of attention with grouped heads, with windows or recurrent layers among it where the model has
    them, whose pools are built here; or a pool of another kind (MLA, NSA, quantised, …) with one set of slots. Raises
    `ConfigError`, `OutOfMemory`, and what the store raises when it was made for another model or layout.
    """
    device = _device(config.device)
    table = _table(config, model, device)
    pool = _pool(config, model, device, table) if isinstance(model, ModelGeometry) else _fitting(config, model, device)
    spaces = pool.slot_spaces  # the first is of full attention
    if config.disk is not None and len(spaces) > 1:
        raise ConfigError("the disk tier keeps pages of full attention alone; leave disk out for this model")
    hosts = _hosts(config, spaces)
    tiers = [(host, *build_transfer(config, space, host)) for space, host in zip(spaces, hosts, strict=True)]
    host, transfer, counter = tiers[0]
    allocator = _allocator(config, pool, device)
    windows = states = None
    rules: list[Rules] = []
    if isinstance(pool, SWAKVPool) and isinstance(model, ModelGeometry):
        assert isinstance(allocator, SWATokenToKVPoolAllocator)
        window_rules = SwaRules(model.window, config.cache_page_size)
        windows = Windows(allocator, window_rules, config.cache_page_size, tiers[1][2], tiers[1][0], tiers[1][1])
        rules.append(window_rules)
        sides = [pool.layers_mapping[layer_id] for layer_id in pool.layer_ids]
        pool.register_layer_transfer_counter(LayerRoutes([(tiers[is_window][2], at) for at, is_window in sides]))
    else:
        pool.register_layer_transfer_counter(counter)
    if isinstance(table, HybridReqToTokenPool):
        states = States(table, tiers[1][2], tiers[1][0], tiers[1][1])
        rules.append(MambaRules())
        table.mamba_pool.register_layer_transfer_counter(tiers[1][2])
    page, layout, metrics = config.cache_page_size, spaces[0].layout, Metrics()
    return CacheEngine(
        Parts(
            config=config,
            pool=pool,
            req_to_token=table,
            allocator=allocator,
            tree=RadixTree(page, PageHasher(namespace_digest(config, layout), page), rules, config.eviction_policy),
            counter=counter,
            metrics=metrics,
            host=host,
            transfer=transfer,
            disk=None if host is None else _disk(config, layout, host, metrics),
            windows=windows,
            states=states,
        )
    )


def _table(config: EngineConfig, model: ModelGeometry | KVCache, device: torch.device) -> ReqToTokenPool:
    """Rows for requests, with states where the model has recurrent layers."""
    row_len = -(-config.max_context_len // config.page_size) * config.page_size
    state = model.state if isinstance(model, ModelGeometry) else None
    if state is None or not isinstance(model, ModelGeometry):
        return ReqToTokenPool(config.max_requests, row_len, device, enable_memory_saver=False)
    shape = Mamba2StateShape(conv=state.conv, temporal=state.temporal)
    params = Mamba2CacheParams(shape, model.recurrent_layers, state.temporal_dtype, state.conv_dtype)
    return HybridReqToTokenPool(
        size=config.max_requests,
        mamba_size=config.mamba_size or _STATES_PER_REQUEST * config.max_requests,
        max_context_len=row_len,
        device=device,
        enable_memory_saver=False,
        cache_params=params,
        enable_mamba_extra_buffer=True,
    )


def _pool(config: EngineConfig, geometry: ModelGeometry, device: torch.device, table: ReqToTokenPool) -> KVCache:
    size = config.device_tokens // config.page_size * config.page_size
    uneven = geometry.v_head_dim not in (None, geometry.head_dim)
    if uneven and (geometry.window_layers or geometry.recurrent_layers):
        raise ConfigError("keys and values of different sizes are not supported beside windows or recurrent layers")
    if geometry.window_layers:
        # The tree's pages are of full attention: a model that has windows in every layer keeps its first layer whole.
        full = geometry.full_layers or geometry.window_layers[:1]
        window_tokens = (config.window_tokens or size) // config.page_size * config.page_size
        least = 2 * (geometry.window + config.cache_page_size)
        if window_tokens < least:
            raise ConfigError(
                f"window_tokens={window_tokens} cannot hold the windows of {geometry.window} tokens of two requests; "
                f"raise window_tokens to at least {least}"
            )
        return SWAKVPool(
            size,
            window_tokens,
            config.page_size,
            config.torch_dtype,
            geometry.head_num,
            geometry.head_dim,
            swa_attention_layer_ids=[at for at in geometry.window_layers if at not in full],
            full_attention_layer_ids=full,
            device=device,
        )
    if isinstance(table, HybridReqToTokenPool):
        return HybridLinearKVPool(
            size,
            config.torch_dtype,
            config.page_size,
            geometry.head_num,
            geometry.head_dim,
            geometry.full_layers,
            device,
            table.mamba_pool,
        )
    return MHATokenToKVPool(
        size=size,
        page_size=config.page_size,
        dtype=config.torch_dtype,
        layer_num=geometry.layer_num,
        device=device,
        enable_memory_saver=False,
        head_num=geometry.head_num,
        head_dim=geometry.head_dim,
        v_head_dim=geometry.v_head_dim,
    )


def _hosts(config: EngineConfig, spaces: tuple[SlotSpace, ...]) -> list[HostPagePool | None]:
    """A host pool for each set of slots, out of the tier's budget: as many window pages as full ones; states as set."""
    if not config.has_host:
        return [None] * len(spaces)
    device_bytes = sum(buffer.nbytes for s in spaces for at in s.layout.layers for buffer in s.layer_buffers(at))
    total = host_budget(config.host_bytes, config.host_ratio, device_bytes, available_bytes())
    page_tokens = [_page_tokens(config, space) for space in spaces]
    page_bytes = [space.layout.page_bytes(n) for space, n in zip(spaces, page_tokens, strict=True)]
    shares = [total]
    if spaces[-1].name == "mamba":
        num_states = config.host_states + 1 if config.host_states else None
        of_states = num_states * page_bytes[1] if num_states else total // _HOST_SHARE_OF_STATES
        shares = [total - of_states, of_states]
    elif len(spaces) > 1:
        num_pages = total // sum(page_bytes)
        shares = [num_pages * at for at in page_bytes]
    pin, knob = spaces[0].device.type == "cuda", "host_bytes" if config.host_bytes else "host_ratio"
    return [
        HostPagePool(space.layout, tokens, share, pin=pin, device=space.device, knob=knob)
        for space, tokens, share in zip(spaces, page_tokens, shares, strict=True)
    ]


def _page_tokens(config: EngineConfig, space: SlotSpace) -> int:
    return 1 if space.name == "mamba" else config.host_page_size


def _fitting(config: EngineConfig, pool: KVCache, device: torch.device) -> KVCache:
    """The caller's pool, when the settings say the same of it."""
    if len(pool.slot_spaces) > 1:
        raise ConfigError(
            f"{type(pool).__name__} needs to be wired at both its ends; pass the model's ModelGeometry instead"
        )
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
    """Slots are chosen on the host, so that copies know which of them are runs; window slots, where their peers are."""
    if isinstance(pool, SWAKVPool):
        sizes = (pool.size, pool.size_swa, config.page_size)
        return SWATokenToKVPoolAllocator(*sizes, pool.dtype, device, pool, need_sort=True)
    if config.page_size == 1:
        return TokenToKVPoolAllocator(pool.size, pool.dtype, "cpu", pool, need_sort=True)
    return PagedTokenToKVPoolAllocator(pool.size, config.page_size, pool.dtype, "cpu", pool, need_sort=True)


def build_transfer(
    config: EngineConfig, pool: KVCache | SlotSpace, host: HostPagePool | None
) -> tuple[TransferBackend | None, LayerTransferCounter]:
    """The backend for the pool's device, and the layer counter it reports to; no backend without a host tier."""
    layers, on_cuda = pool.layout.layers, pool.device.type == "cuda"
    counter = LayerTransferCounter(len(layers), CudaLayerEvents if on_cuda else CpuLayerEvents)
    if host is None:
        return None, counter
    kernels, page_tokens = kernel_choice(pool.device), host.page_tokens
    mover = PageMover(
        [pool.layer_buffers(layer) for layer in layers],
        page_tokens,
        kernels,
        [pool.layout.spans_of(layer) for layer in layers],
    )
    if not on_cuda:
        return CpuTransfer(host.bytes_of, mover, len(layers), counter), counter
    backend = CudaTransfer(
        host.bytes_of,
        mover,
        [pool.layout.layer_bytes(layer, page_tokens) for layer in layers],
        counter,
        device=pool.device,
        rows_per_chunk=host.arena.rows_per_chunk,
        page_tokens=page_tokens,
        device_page_tokens=pool.layout.device_page_size,
        staging_bytes=config.staging_bytes,
        chunk_tokens=config.transfer_chunk_tokens,
    )
    return backend, counter


def _disk(config: EngineConfig, layout: PoolLayout, host: HostPagePool, metrics: Metrics) -> DiskTier | None:
    disk = config.disk
    if disk is None:
        return None
    store = LmdbPageStore(
        disk.path,
        identity=identity_of(config, layout),
        page_bytes=host.page_bytes,
        budget_bytes=disk.budget_bytes,
        durability=disk.durability,
        level=disk.level,
        filter=page_filter(disk.filter, layout, host.page_tokens),
        cipher=cipher_of(disk),
    )
    tier = DiskTier(
        store,
        readers=disk.readers,
        queue_jobs=disk.queue_jobs,
        full_bytes=host.page_bytes * host.num_pages // 2,  # what may be locked on its way to the store
        limits=Limits(disk.hang_s, disk.retry_s, disk.max_retry_s, close_s=disk.hang_s),
    )
    tier.add_gauges(metrics)
    return tier
