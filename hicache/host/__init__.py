"""Tier 2: pinned CPU memory in pages."""

from hicache.host.arena import CudaRegistry, PinnedArena, PinnedRows, allocate_pinned
from hicache.host.pool import HostPagePool

__all__ = ["CudaRegistry", "HostPagePool", "PinnedArena", "PinnedRows", "allocate_pinned"]
