"""Tier 2: pinned CPU memory in pages."""

from hicache.host.arena import PinnedArena
from hicache.host.pool import HostPagePool

__all__ = ["HostPagePool", "PinnedArena"]
