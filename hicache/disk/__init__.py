"""Tier 3 as the engine sees it: identity, and the threads between host pages and a page store."""

from hicache.disk.identity import identity_of, namespace_digest
from hicache.disk.workers import DiskTier, FindDone, ReadDone, ReadJob, WriteDone, WriteJob

__all__ = ["DiskTier", "FindDone", "ReadDone", "ReadJob", "WriteDone", "WriteJob", "identity_of", "namespace_digest"]
