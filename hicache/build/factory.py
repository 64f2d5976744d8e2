"""Builds an engine from its configuration. No other module sizes or connects the tiers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from hicache.alloc import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from hicache.build.packing import packer_of, pool_page_bytes
from hicache.build.sizing import host_shares, resolve
from hicache.build.store_tiers import build_stores, given_stores
from hicache.build.validation import device_named
from hicache.config import EngineConfig, default_write_policy
from hicache.config.environment import kernel_choice
from hicache.console import sized
from hicache.device import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    KVCache,
    Mamba2CacheParams,
    Mamba2StateShape,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
    SWAKVPool,
)
from hicache.device.base import SlotSpace
from hicache.engine import CacheEngine
from hicache.errors import ConfigError
from hicache.flow.components import COMPONENTS
from hicache.flow.components.base import CacheComponent, EngineParts, HostLink
from hicache.flow.context import EngineContext
from hicache.flow.prompt import HostWatch
from hicache.flow.write_policy import OnEviction, make_write_policy
from hicache.host.memory import available_bytes
from hicache.host.pool import HostPagePool
from hicache.kernels.pack import PagePacker
from hicache.kernels.page_copy import PageMover
from hicache.kv_events import EventPublisher, sink_of
from hicache.layout import ModelGeometry
from hicache.metrics import Metrics
from hicache.pages.components import TreeComponent
from hicache.pages.events import EventLog
from hicache.pages.key import PageHasher, component_keys
from hicache.pages.node import TreeNode
from hicache.pages.states import ABOVE, TierPages
from hicache.pages.table import PageTable, Rows
from hicache.pages.tree import RadixTree
from hicache.storage import PageStore
from hicache.stores.page_format import namespace_digest
from hicache.tiers import FULL, MAMBA, SWA, Component
from hicache.transfer import CpuTransfer, CudaTransfer, LayerTransferCounter, TransferBackend
from hicache.transfer.counter import CpuLayerEvents, CudaLayerEvents, LayerRoutes


def build_engine(
    config: EngineConfig,
    model: ModelGeometry | KVCache,
    components: Sequence[type[CacheComponent]] = (),
    store: PageStore | None = None,
    remote: PageStore | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> CacheEngine:
    """Build an engine for `model`. Start it before use.

    `model`: the geometry of a model with grouped heads or latent rows, with or without window and recurrent layers;
    this function then builds the pools. Or a pool of another kind (NSA, quantised, …) with one set of slots.
    `components`: the caller's component classes, in addition to the classes of the model's components. `store`,
    `remote`: stores of the caller, which replace the stores that `config.disk` and `config.remote` describe. The caller
    closes these stores after the engine. `clock`: returns seconds, for the deadlines of hints about next turns and for
    write budgets.

    Raises `ConfigError`, `OutOfMemory`, and errors of a store that was made for another model or layout.
    """
    device = device_named(config.device)
    config = resolve(config, model, available_bytes() if config.has_host else 0)
    given = given_stores(config, store, remote)
    present = _present(config, model, components)
    has_stores = bool(given) or config.disk is not None or config.remote is not None
    if config.write_policy == "auto":
        config = dataclasses.replace(config, write_policy=default_write_policy(has_stores=has_stores))
    write_policy = make_write_policy(config)
    table = _table(config, model, device)
    pool = _pool(config, model, device, table) if isinstance(model, ModelGeometry) else _fitting(config, model, device)
    spaces = {found.name: kind.slot_space(config, found, pool) for kind, found in present.items()}
    layouts = {name: space.layout for name, space in spaces.items()}
    page, metrics = config.cache_page_size, Metrics()
    events = EventLog() if config.kv_events else None
    watch = HostWatch(metrics, page, has_stores=has_stores, events=events) if config.has_host else None
    links = _links(config, list(present.values()), spaces, watch, write_policy.on_eviction is OnEviction.EXCHANGE)
    packed = {name: link.packing for name, link in links.items() if link.packing is not None}
    hasher = PageHasher(namespace_digest(config, layouts, packed), page)

    def is_on_host(node: TreeNode, name: Component) -> bool:
        pages = links[name].pages
        return pages is not None and component_keys(name, tree.table.keys_of(node.rows[-1:]))[0] in pages

    others = [found for found in present.values() if found.name != FULL]
    has_lower_tier = config.has_host and write_policy.on_eviction is not OnEviction.DROP
    tree = RadixTree(
        page,
        hasher,
        others,
        config.eviction_policy,
        events,
        is_below=is_on_host,
        has_lower_tier=has_lower_tier,
        below=links[FULL].pages,
    )
    parts = EngineParts(config, pool, table, _allocator(config, pool, device), tree, metrics)
    _compile(pool, table)
    built = tuple(kind(parts, found, links[found.name]) for kind, found in present.items())
    _register_counters(pool, {component.name: component.counter for component in built})
    stores = build_stores(config, given, links, metrics, reports_removed=events is not None)
    with ExitStack() as opened:  # closes the stores if the engine cannot be built, so that no store stays locked
        for tier in stores.values():
            opened.callback(tier.close)
        context = EngineContext(
            **vars(parts), components=built, write_policy=write_policy, stores=stores, watch=watch, clock=clock
        )
        engine = CacheEngine(context, events=None if events is None else _publisher(config, events, metrics))
        opened.pop_all()
    return engine


def _publisher(config: EngineConfig, events: EventLog, metrics: Metrics) -> EventPublisher:
    sink = sink_of(config.kv_events, config.kv_events_topic, config.kv_events_replay)
    return EventPublisher(events, sink, config.advanced.kv_events_queue_blocks, metrics)


def _present(
    config: EngineConfig, model: ModelGeometry | KVCache, components: Sequence[type[CacheComponent]]
) -> dict[type[CacheComponent], TreeComponent]:
    """Return the component classes of the model and of `components`, each with its counterpart in the tree."""
    of_model = {kind: kind.tree_component_for(config, model) for kind in (*COMPONENTS, *components)}
    present = {kind: found for kind, found in of_model.items() if found is not None}
    names = [found.name for found in present.values()]
    if len({*names}) < len(names):
        raise ConfigError(f"the components are named {', '.join(names)}; give each a name of its own")
    return present


def _compile(pool: KVCache, table: ReqToTokenPool) -> None:
    """Compile the kernels that admission launches. Transfers compile their own kernels when they start."""
    if isinstance(pool, SWAKVPool):
        pool.compile()
    if isinstance(table, HybridReqToTokenPool):
        table.mamba_pool.compile()


def _register_counters(pool: KVCache, counters: dict[Component, LayerTransferCounter]) -> None:
    """Register for each layer of the pool the counter of the layer's component. A forward pass waits for loads by this
    counter."""
    if isinstance(pool, SWAKVPool):
        layers = [pool.layers_mapping[layer_id] for layer_id in pool.layer_ids]
        pool.register_layer_transfer_counter(
            LayerRoutes([(counters[SWA if is_window else FULL], dense_id) for dense_id, is_window in layers])
        )
    else:
        pool.register_layer_transfer_counter(counters[FULL])


def _table(config: EngineConfig, model: ModelGeometry | KVCache, device: torch.device) -> ReqToTokenPool:
    """Return the request table, with recurrent states if the model has recurrent layers."""
    row_len = -(-config.max_context_len // config.page_size) * config.page_size
    state = model.state if isinstance(model, ModelGeometry) else None
    if state is None or not isinstance(model, ModelGeometry):
        return ReqToTokenPool(config.max_requests, row_len, device, config.enable_memory_saver)
    shape = Mamba2StateShape(conv=state.conv, temporal=state.temporal)
    params = Mamba2CacheParams(shape, model.recurrent_layers, state.temporal_dtype, state.conv_dtype)
    return HybridReqToTokenPool(
        size=config.max_requests,
        mamba_size=config.mamba_size,
        max_context_len=row_len,
        device=device,
        enable_memory_saver=config.enable_memory_saver,
        cache_params=params,
        enable_mamba_extra_buffer=True,
    )


def _pool(config: EngineConfig, geometry: ModelGeometry, device: torch.device, table: ReqToTokenPool) -> KVCache:
    size, latent = _full_page_tokens(config), geometry.latent
    if geometry.window_layers:
        return _window_pool(config, geometry, device)
    rank, rope = (latent.rank, latent.rope) if latent is not None else (None, None)
    states = table.mamba_pool if isinstance(table, HybridReqToTokenPool) else None
    if states is not None or geometry.kv_sources:
        return HybridLinearKVPool(
            size,
            config.torch_dtype,
            config.page_size,
            geometry.head_num,
            geometry.head_dim,
            geometry.full_layers,
            device,
            states,
            config.enable_memory_saver,
            use_mla=latent is not None,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            v_head_dim=geometry.v_head_dim,
        )
    common, placed = (size, config.page_size, config.torch_dtype), (device, config.enable_memory_saver)
    if latent is not None:
        return MLATokenToKVPool(*common, latent.rank, latent.rope, geometry.layer_num, *placed)
    heads = geometry.full_heads
    return MHATokenToKVPool(
        *common, heads.head_num, heads.head_dim, geometry.layer_num, *placed, v_head_dim=heads.v_head_dim
    )


def _window_pool(config: EngineConfig, geometry: ModelGeometry, device: torch.device) -> SWAKVPool:
    # Pages of the tree belong to full attention. If every layer has a window, the first layer keeps all tokens instead.
    full, heads = geometry.full_layers or geometry.window_layers[:1], geometry.window_heads
    default_heads = geometry.full_heads if geometry.full_layers else heads
    return SWAKVPool(
        _full_page_tokens(config),
        config.window_tokens,
        config.page_size,
        config.torch_dtype,
        default_heads.head_num,
        default_heads.head_dim,
        swa_attention_layer_ids=[layer for layer in geometry.window_layers if layer not in full],
        full_attention_layer_ids=full,
        device=device,
        enable_memory_saver=config.enable_memory_saver,
        v_head_dim=default_heads.v_head_dim,
        swa_head_num=heads.head_num,
        swa_head_dim=heads.head_dim,
        swa_v_head_dim=heads.v_head_dim,
    )


def _full_page_tokens(config: EngineConfig) -> int:
    """Return the tokens of the device tier, in complete device pages."""
    return config.device_tokens // config.page_size * config.page_size


def _links(
    config: EngineConfig,
    tree_components: Sequence[TreeComponent],
    spaces: dict[Component, SlotSpace],
    watch: HostWatch | None,
    is_exclusive: bool,
) -> dict[Component, HostLink]:
    """Return the link of each component between device and host. `watch`: records full pages that the host evicts.
    `is_exclusive`: the host evicts pages first that the device has."""
    hosts: dict[Component, HostPagePool] = {}
    packers: dict[Component, PagePacker | None] = {}
    if config.has_host:
        page_tokens = {
            component.name: 1 if component.at_node_end else config.host_page_size for component in tree_components
        }
        packers = {name: packer_of(config, name, spaces[name], tokens) for name, tokens in page_tokens.items()}
        page_bytes = {
            name: spaces[name].layout.page_bytes(page_tokens[name]) if packer is None else pool_page_bytes(packer)
            for name, packer in packers.items()
        }
        shares = host_shares(config, page_bytes, config.host_states if MAMBA in spaces else None)
        if any(shares[name] < 2 * num_bytes for name, num_bytes in page_bytes.items()):
            least = shares.get(MAMBA, 0) + sum(2 * page_bytes[name] for name in page_bytes if name != MAMBA)
            assert isinstance(config.host_bytes, int), "the configuration is resolved"
            raise ConfigError(
                f"host_bytes={sized(config.host_bytes)} is too little for two host pages of {config.host_page_size} "
                f"tokens; raise host_bytes to at least {sized(least)}"
            )
        for name, space in spaces.items():
            hosts[name] = HostPagePool(
                space.layout,
                page_tokens[name],
                shares[name],
                pin=space.device.type == "cuda",
                device=space.device,
                shared=config.disk is not None or config.remote is not None,
                page_bytes=page_bytes[name],
            )
    links: dict[Component, HostLink] = {}

    def left(rows: Rows) -> None:
        """Evict windows together with their full pages, because a window without its full page is useless. Windows are
        not evicted if the device has their full pages."""
        full, windows = links[FULL].pages, links[SWA].pages if SWA in links else None
        assert watch is not None and full is not None
        watch.left(full, rows)
        if windows is not None:
            keys = full.table.keys_of(rows[~full.has(rows, ABOVE)])
            windows.discard(windows.table.known(component_keys(SWA, keys)))

    for name, space in spaces.items():
        host, pages, packer = hosts.get(name), None, packers.get(name)
        if host is not None:
            is_full = name == FULL
            pages = TierPages(
                host,
                config.host_order,
                PageTable(_num_rows(config, host, has_device_pages=is_full)),
                is_exclusive=is_exclusive and is_full,
                is_linked=is_full,
                on_evict=left if is_full else None,
            )
        transfer, counter = build_transfer(config, space, host, packer)
        links[name] = HostLink(space, counter, host, transfer, pages, None if packer is None else packer.format)
    return links


def _num_rows(config: EngineConfig, host: HostPagePool, *, has_device_pages: bool) -> int:
    """Return the rows of a page table: for all pages of the host, for all pages of the device if `has_device_pages`,
    and for pages that no tier in memory has."""
    num_rows = host.num_pages + (config.device_tokens // config.cache_page_size if has_device_pages else 0)
    return num_rows + num_rows // 8


def _fitting(config: EngineConfig, pool: KVCache, device: torch.device) -> KVCache:
    """Return the caller's pool. Raises ConfigError unless the sizes and the dtype of the pool equal the settings."""
    if len(pool.slot_spaces) > 1:
        raise ConfigError(f"{type(pool).__name__} has several sets of slots; pass the model's ModelGeometry instead")
    for name, of_pool, configured in (
        ("device_tokens", pool.size, _full_page_tokens(config)),
        ("page_size", pool.page_size, config.page_size),
        ("dtype", pool.dtype, config.torch_dtype),
        ("device", device_named(pool.device), device),
        ("enable_memory_saver", pool.enable_memory_saver, config.enable_memory_saver),
    ):
        if of_pool != configured:
            raise ConfigError(
                f"the pool has {name} {of_pool}, the settings have {configured}; set {name} to the value of the pool"
            )
    return pool


def _allocator(config: EngineConfig, pool: KVCache, device: torch.device) -> BaseTokenToKVPoolAllocator:
    """Return the slot allocator. The allocator chooses slots on the CPU, so that copies know which slots are
    contiguous. For a model with windows, the allocator chooses full slots and window slots on the device."""
    if isinstance(pool, SWAKVPool):
        sizes = (pool.size, pool.size_swa, config.page_size)
        return SWATokenToKVPoolAllocator(*sizes, pool.dtype, device, pool, need_sort=True)
    if config.page_size == 1:
        return TokenToKVPoolAllocator(pool.size, pool.dtype, "cpu", pool, need_sort=True)
    return PagedTokenToKVPoolAllocator(pool.size, config.page_size, pool.dtype, "cpu", pool, need_sort=True)


def build_transfer(
    config: EngineConfig, pool: KVCache | SlotSpace, host: HostPagePool | None, packer: PagePacker | None = None
) -> tuple[TransferBackend | None, LayerTransferCounter]:
    """Return the transfer backend for the pool's device, and the layer counter to which the backend reports arrived
    layers. Without a host tier, the backend is None. `packer`: packs the pages of `host`."""
    layers, on_cuda = pool.layout.layers, pool.device.type == "cuda"
    counter = LayerTransferCounter(len(layers), CudaLayerEvents if on_cuda else CpuLayerEvents)
    if host is None:
        return None, counter
    buffers, spans = [pool.layer_buffers(i) for i in layers], [pool.layout.spans_of(i) for i in layers]
    mover = PageMover(buffers, host.page_tokens, kernel_choice(pool.device), spans)
    if not on_cuda:
        return CpuTransfer(host.bytes_of, mover, counter, packer), counter
    backend = CudaTransfer(
        host.bytes_of,
        mover,
        counter,
        rows_per_chunk=host.arena.rows_per_chunk,
        device_page_tokens=pool.layout.device_page_size,
        staging_bytes=config.advanced.staging_bytes,
        chunk_tokens=config.advanced.transfer_chunk_tokens,
        packer=packer,
    )
    return backend, counter
