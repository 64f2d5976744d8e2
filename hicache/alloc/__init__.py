"""The allocators of the device tier track which slots are free. Allocators never read or write the bytes in the
slots."""

from hicache.alloc.base import BaseTokenToKVPoolAllocator
from hicache.alloc.paged import PagedTokenToKVPoolAllocator
from hicache.alloc.swa import SWATokenToKVPoolAllocator
from hicache.alloc.token import TokenToKVPoolAllocator

__all__ = [
    "BaseTokenToKVPoolAllocator",
    "PagedTokenToKVPoolAllocator",
    "SWATokenToKVPoolAllocator",
    "TokenToKVPoolAllocator",
]
