"""Tier 2: pinned CPU memory in pages."""

from hicache.host.arena import CudaRegistry, PinnedArena, PinnedRows, allocate_pinned
from hicache.host.index import HostPage, PageIndex, page_ids
from hicache.host.pool import HostPagePool

__all__ = [
    "CudaRegistry",
    "HostPage",
    "HostPagePool",
    "PageIndex",
    "PinnedArena",
    "PinnedRows",
    "allocate_pinned",
    "page_ids",
]
