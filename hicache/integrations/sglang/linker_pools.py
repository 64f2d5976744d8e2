"""SGLang's device pools as hicache sees pools: for each set of slots a layout, and the tensors of each layer.

Layers are those of this pipeline stage, counted from 0, as SGLang's getters name them to a layer counter. The linker's
names of SGLang are imported here alone, from the one release that has them: under another release the import raises
`ConfigError`, before a name that moved is missed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from hicache.errors import ConfigError
from hicache.integrations.versions import require_version
from hicache.layout import BufferSpec, Per, PoolLayout

TESTED = ("0.5.23",)
RELEASE = require_version("SGLang", version("sglang"), TESTED)

if RELEASE in TESTED:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _stage_local_layer_mapping as stage_layers
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _swa_layer_mappings as swa_layers
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
        DevicePoolEntry,
        resolve_hybrid_device_pool_group,
    )
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import _mamba_device_pool_entry as mamba_entry
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import _mha_device_pool_entry as mha_entry
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

__all__ = [
    "RELEASE",
    "CacheInitParams",
    "ComponentType",
    "LinkedPool",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "UnifiedCacheLinker",
    "are_replicated",
    "linked_pools",
]


@dataclass(frozen=True)
class LinkedPool:
    """What one set of slots addresses. `name` is SGLang's: "kv", "swa" or "mamba".

    `buffers[layer]`: tensors `[rows, elements]` in the order of `layout.specs_of(layer)`. `page_tokens`: slots that one
    of SGLang's page keys stands for.
    """

    name: str
    layout: PoolLayout
    buffers: Mapping[int, tuple[torch.Tensor, ...]]
    page_tokens: int

    def __post_init__(self) -> None:
        for layer, found in self.buffers.items():
            described = [spec.row_bytes for spec in self.layout.specs_of(layer)]
            assert described == [rows.shape[1] * rows.element_size() for rows in found], (self.name, layer)

    @property
    def device(self) -> torch.device:
        return next(iter(self.buffers.values()))[0].device

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes(self.page_tokens)

    @property
    def device_bytes(self) -> int:
        return sum(buffer.nbytes for buffers in self.buffers.values() for buffer in buffers)


def linked_pools(params: CacheInitParams, components: set[ComponentType]) -> list[LinkedPool]:
    """The pools of a model's components. `ConfigError` for a pool whose rows SGLang does not describe."""
    kvcache, page_size = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
    try:
        entries = _entries(kvcache, params, components)
        sources = dict.fromkeys(PoolName(entry.indices_from_pool).value for entry in entries)
        return [_linked(source, [e for e in entries if e.indices_from_pool == source], page_size) for source in sources]
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the linker cannot serve a model with {type(kvcache).__name__}: {error}; "
            "use hicache as a storage backend of --enable-hierarchical-cache"
        ) from error


def are_replicated(params: CacheInitParams, components: set[ComponentType]) -> bool:
    """Whether all tensor parallel ranks hold the same rows: latent attention, with no heads or states beside it."""
    pools = (params.token_to_kv_pool_allocator.get_kvcache(), *params.sidecar_draft_device_pools)
    return components == {ComponentType.FULL} and all(type(pool) is MLATokenToKVPool for pool in pools)


def _entries(kvcache: Any, params: CacheInitParams, components: set[ComponentType]) -> list[DevicePoolEntry]:
    """The rows of each pool. SGLang's own linkers know the rarer families; the plain ones are described here."""
    page = params.page_size
    if type(kvcache) is SWAKVPool:
        full, swa = swa_layers(kvcache)
        found = [
            _attention(PoolName.KV, kvcache.full_kv_pool, full, page),
            _attention(PoolName.SWA, kvcache.swa_kv_pool, swa, page),
        ]
    elif type(kvcache) is HybridLinearKVPool:
        layers = stage_layers(kvcache.full_attention_layer_id_mapping, kvcache.start_layer)
        found = [_attention(PoolName.KV, kvcache.full_kv_pool, layers, page)]
    elif type(kvcache) in (MHATokenToKVPool, MLATokenToKVPool):
        found = [_attention(PoolName.KV, kvcache, {layer: layer for layer in range(kvcache.layer_num)}, page)]
    else:
        group = resolve_hybrid_device_pool_group(kvcache=kvcache, page_size=page, params=params, components=components)
        return list(group.entries)
    if params.mtp_draft_device_pools:
        raise ValueError("draft layers within the model's pools are not covered")
    for draft in params.sidecar_draft_device_pools:
        # They ride the transfers of the model's first layers: a draft model runs when its batch's loads have ended.
        layers = {layer: layer for layer in range(draft.layer_num)}
        found.append(_attention(PoolName.DRAFT, draft, layers, page, indices_from_pool=PoolName.KV))
    if ComponentType.MAMBA in components:
        found.append(mamba_entry(params.req_to_token_pool, kvcache.start_layer))
    return found


def _attention(
    name: PoolName, pool: Any, layers: dict[int, int], page_size: int, *, indices_from_pool: PoolName | None = None
) -> DevicePoolEntry:
    """`indices_from_pool`: whose slots these are; None: its own."""
    if pool.page_size != page_size:
        raise ValueError(f"pages of {name} have {pool.page_size} tokens and not {page_size}")
    source = name if indices_from_pool is None else indices_from_pool
    if type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd":
        return mha_entry(name, pool, layers, page_size, indices_from_pool=source)
    if type(pool) is MLATokenToKVPool:
        return DevicePoolEntry(
            name=name,
            indices_from_pool=source,
            device_pool=pool,
            components=[pool.kv_buffer],
            layer_mapping=layers,
            page_size=page_size,
            rows_are_pages=False,
        )
    raise ValueError(f"the rows of {type(pool).__name__} are not known")


def _linked(source: str, entries: Sequence[DevicePoolEntry], page_size: int) -> LinkedPool:
    """All that one set of slots addresses, as one pool."""
    rows: dict[int, list[torch.Tensor]] = defaultdict(list)
    kinds: dict[tuple[int, int, str, torch.dtype, int, Per], list[int]] = defaultdict(list)
    for order, entry in enumerate(entries):
        if entry._index_mapper is not None:
            raise ValueError(f"the slots of {entry.name} are mapped")
        per: Per = "page" if entry._row_span < entry.page_size else "token"
        for layer, mapped in sorted(entry.layer_mapping.items()):
            indices = (mapped,) if isinstance(mapped, int) else tuple(mapped)
            tensors = [component[index] for component in entry.components for index in indices]
            for position, tensor in enumerate(tensors):
                row = tensor.view(tensor.shape[0], -1)
                kinds[order, position, PoolName(entry.name).value, row.dtype, row.shape[1], per].append(layer)
                rows[layer].append(row)
    specs = [  # a layer's buffers in the order of `rows`, whatever other layers have
        BufferSpec(f"{name}.{position}", dtype, (width,), per, tuple(layers))
        for (_, position, name, dtype, width, per), layers in sorted(kinds.items(), key=lambda item: item[0][:2])
    ]
    page_tokens = 1 if source == PoolName.MAMBA else page_size
    layout = PoolLayout(tuple(specs), page_tokens)
    return LinkedPool(source, layout, {layer: tuple(found) for layer, found in rows.items()}, page_tokens)
