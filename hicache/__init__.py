"""hicache: GPU memory, pinned CPU memory and disk as one cache for the attention state (KV) of language models.

The names of the public surface, wherever they live. Importing needs neither a GPU nor Triton nor lmdb.
"""

from hicache.alloc import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    alloc_for_decode,
    alloc_for_extend,
    alloc_paged_token_slots_decode,
    alloc_paged_token_slots_extend,
    alloc_req_slots,
    alloc_token_slots,
    available_and_evictable_str,
    evict_from_tree_cache,
    get_last_loc,
    get_last_loc_torch,
    get_last_loc_triton,
    release_kv_cache,
    write_cache_indices,
    write_req_to_token_pool_triton,
)
from hicache.config import DiskConfig, EngineConfig
from hicache.device import (
    AscendMLAPagedTokenToKVPool,
    AscendTokenToKVPool,
    DoubleSparseTokenToKVPool,
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    KVCache,
    Mamba2CacheParams,
    Mamba2StateShape,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    NSATokenToKVPool,
    QuantizedKVCache,
    ReqToTokenPool,
    SWAKVPool,
    plan_capacity,
)
from hicache.engine import CacheEngine, CacheRequest, Held, Hit, Lease, Prefetch
from hicache.errors import HiCacheError
from hicache.factory import build_engine
from hicache.kernels.alloc_extend import alloc_extend_naive
from hicache.kernels.paged_attention import contiguous_to_paged, paged_attention_forward, paged_to_contiguous
from hicache.layout import BufferSpec, ModelGeometry, PoolLayout
from hicache.tensor_cache import HiCache, TensorCacheStats
from hicache.transfer import LayerTransferCounter

__version__ = "0.1.0"

__all__ = [
    "AscendMLAPagedTokenToKVPool",
    "AscendTokenToKVPool",
    "BaseTokenToKVPoolAllocator",
    "BufferSpec",
    "CacheEngine",
    "CacheRequest",
    "DSATokenToKVPool",
    "DiskConfig",
    "DoubleSparseTokenToKVPool",
    "EngineConfig",
    "Held",
    "HiCache",
    "HiCacheError",
    "Hit",
    "HybridLinearKVPool",
    "HybridReqToTokenPool",
    "KVCache",
    "LayerTransferCounter",
    "Lease",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "Mamba2CacheParams",
    "Mamba2StateShape",
    "MambaPool",
    "ModelGeometry",
    "NSATokenToKVPool",
    "PagedTokenToKVPoolAllocator",
    "PoolLayout",
    "Prefetch",
    "QuantizedKVCache",
    "ReqToTokenPool",
    "SWAKVPool",
    "SWATokenToKVPoolAllocator",
    "TensorCacheStats",
    "TokenToKVPoolAllocator",
    "alloc_extend_naive",
    "alloc_for_decode",
    "alloc_for_extend",
    "alloc_paged_token_slots_decode",
    "alloc_paged_token_slots_extend",
    "alloc_req_slots",
    "alloc_token_slots",
    "available_and_evictable_str",
    "build_engine",
    "contiguous_to_paged",
    "evict_from_tree_cache",
    "get_last_loc",
    "get_last_loc_torch",
    "get_last_loc_triton",
    "paged_attention_forward",
    "paged_to_contiguous",
    "plan_capacity",
    "release_kv_cache",
    "write_cache_indices",
    "write_req_to_token_pool_triton",
]
