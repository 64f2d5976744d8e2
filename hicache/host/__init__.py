"""Tier 2: pinned CPU memory in pages."""

from hicache.host.arena import CudaRegistry, PinnedArena, PinnedRows, allocate_pinned
from hicache.host.index import PageIndex
from hicache.host.pool import HostPagePool
from hicache.host.run import HostRun, NewPages, pages_of

__all__ = [
    "CudaRegistry",
    "HostPagePool",
    "HostRun",
    "NewPages",
    "PageIndex",
    "PinnedArena",
    "PinnedRows",
    "allocate_pinned",
    "pages_of",
]
