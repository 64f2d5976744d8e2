"""Which slots are free: the allocators over the device tier's slot space. Never touches the bytes in the slots."""

from hicache.alloc.base import BaseTokenToKVPoolAllocator
from hicache.alloc.batch import (
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
from hicache.alloc.paged import PagedTokenToKVPoolAllocator
from hicache.alloc.swa import SWATokenToKVPoolAllocator
from hicache.alloc.token import TokenToKVPoolAllocator

__all__ = [
    "BaseTokenToKVPoolAllocator",
    "PagedTokenToKVPoolAllocator",
    "SWATokenToKVPoolAllocator",
    "TokenToKVPoolAllocator",
    "alloc_for_decode",
    "alloc_for_extend",
    "alloc_paged_token_slots_decode",
    "alloc_paged_token_slots_extend",
    "alloc_req_slots",
    "alloc_token_slots",
    "available_and_evictable_str",
    "evict_from_tree_cache",
    "get_last_loc",
    "get_last_loc_torch",
    "get_last_loc_triton",
    "release_kv_cache",
    "write_cache_indices",
    "write_req_to_token_pool_triton",
]
