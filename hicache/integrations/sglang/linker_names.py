"""The names of SGLang that the linker uses, from the one release that has them. Importing this raises `ConfigError`
under another release, before a name that moved is missed."""

from __future__ import annotations

from importlib.metadata import version

from hicache.integrations.versions import require_version

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
    "DevicePoolEntry",
    "HybridLinearKVPool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "SWAKVPool",
    "UnifiedCacheLinker",
    "mamba_entry",
    "mha_entry",
    "resolve_hybrid_device_pool_group",
    "stage_layers",
    "swa_layers",
]
