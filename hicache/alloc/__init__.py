"""Which slots are free: the allocators over the device tier's slot space. Never touches the bytes in the slots."""

from hicache.alloc.base import BaseTokenToKVPoolAllocator
from hicache.alloc.paged import PagedTokenToKVPoolAllocator
from hicache.alloc.token import TokenToKVPoolAllocator

__all__ = ["BaseTokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator", "TokenToKVPoolAllocator"]
