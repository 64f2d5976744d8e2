"""Tier 2: pinned CPU memory in pages."""

from hicache.host.arena import PinnedArena, PinnedRows
from hicache.host.pool import HostPagePool

__all__ = ["HostPagePool", "PinnedArena", "PinnedRows"]
