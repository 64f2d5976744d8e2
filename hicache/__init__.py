"""hicache: GPU memory, pinned CPU memory and disk as one cache for the attention state (KV) of language models.

The names of the public surface, wherever they live. Importing needs neither a GPU nor Triton nor lmdb.
"""

from hicache.alloc import BaseTokenToKVPoolAllocator, PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from hicache.config import DiskConfig, EngineConfig
from hicache.device import KVCache, MHATokenToKVPool, ReqToTokenPool
from hicache.engine import CacheEngine, CacheRequest, Held, Hit, Lease, Prefetch
from hicache.errors import HiCacheError
from hicache.factory import build_engine
from hicache.layout import BufferSpec, ModelGeometry, PoolLayout
from hicache.transfer import LayerTransferCounter

__version__ = "0.1.0"

__all__ = [
    "BaseTokenToKVPoolAllocator",
    "BufferSpec",
    "CacheEngine",
    "CacheRequest",
    "DiskConfig",
    "EngineConfig",
    "Held",
    "HiCacheError",
    "Hit",
    "KVCache",
    "LayerTransferCounter",
    "Lease",
    "MHATokenToKVPool",
    "ModelGeometry",
    "PagedTokenToKVPoolAllocator",
    "PoolLayout",
    "Prefetch",
    "ReqToTokenPool",
    "TokenToKVPoolAllocator",
    "build_engine",
]
