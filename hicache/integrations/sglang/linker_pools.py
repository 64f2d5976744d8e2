"""SGLang's device pools as hicache sees pools: for each set of slots a layout, and the tensors of each layer.

Layers are those of this pipeline stage, counted from 0, as SGLang's getters name them to a layer counter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _stage_local_layer_mapping, _swa_layer_mappings
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    _mamba_device_pool_entry,
    _mha_device_pool_entry,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from hicache.errors import ConfigError
from hicache.layout import BufferSpec, Per, PoolLayout


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


def _entries(kvcache: Any, params: CacheInitParams, components: set[ComponentType]) -> list[DevicePoolEntry]:
    """The rows of each pool. SGLang's own linkers know the rarer families; the plain ones are described here."""
    page = params.page_size
    if type(kvcache) is SWAKVPool:
        full, swa = _swa_layer_mappings(kvcache)
        found = [
            _attention(PoolName.KV, kvcache.full_kv_pool, full, page),
            _attention(PoolName.SWA, kvcache.swa_kv_pool, swa, page),
        ]
    elif type(kvcache) is HybridLinearKVPool:
        layers = _stage_local_layer_mapping(kvcache.full_attention_layer_id_mapping, kvcache.start_layer)
        found = [_attention(PoolName.KV, kvcache.full_kv_pool, layers, page)]
    elif type(kvcache) in (MHATokenToKVPool, MLATokenToKVPool):
        found = [_attention(PoolName.KV, kvcache, {layer: layer for layer in range(kvcache.layer_num)}, page)]
    else:
        group = resolve_hybrid_device_pool_group(kvcache=kvcache, page_size=page, params=params, components=components)
        return list(group.entries)
    if params.sidecar_draft_device_pools or params.mtp_draft_device_pools:
        raise ValueError("the keys and values of a draft model are not covered")
    if ComponentType.MAMBA in components:
        found.append(_mamba_device_pool_entry(params.req_to_token_pool, kvcache.start_layer))
    return found


def _attention(name: PoolName, pool: Any, layers: dict[int, int], page_size: int) -> DevicePoolEntry:
    if type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd":
        return _mha_device_pool_entry(name, pool, layers, page_size)
    if type(pool) is MLATokenToKVPool:
        return DevicePoolEntry(
            name=name,
            indices_from_pool=name,
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
    kinds: dict[tuple[str, torch.dtype, tuple[int, ...], Per], list[int]] = defaultdict(list)
    for entry in entries:
        if entry._index_mapper is not None:
            raise ValueError(f"the slots of {entry.name} are mapped")
        per: Per = "page" if entry._row_span < entry.page_size else "token"
        for layer, mapped in sorted(entry.layer_mapping.items()):
            indices = (mapped,) if isinstance(mapped, int) else tuple(mapped)
            tensors = [component[index] for component in entry.components for index in indices]
            for position, tensor in enumerate(tensors):
                row = tensor.view(tensor.shape[0], -1)
                name = f"{PoolName(entry.name).value}.{position}"
                kinds[name, row.dtype, (row.shape[1],), per].append(layer)
                rows[layer].append(row)
    specs = [BufferSpec(*kind, layers=tuple(layers)) for kind, layers in kinds.items()]
    page_tokens = 1 if source == PoolName.MAMBA else page_size
    layout = PoolLayout(tuple(specs), page_tokens)
    return LinkedPool(source, layout, {layer: tuple(found) for layer, found in rows.items()}, page_tokens)
