"""Tier 3 as the engine sees it: identity, packing and key of its pages, and the threads between them and the store."""

from hicache.disk.health import Limits, State
from hicache.disk.identity import identity_of, namespace_digest
from hicache.disk.jobs import FindDone, FindJob, Hung, ReadDone, ReadJob, WriteDone, WriteJob
from hicache.disk.packing import page_filter
from hicache.disk.secret import cipher_of
from hicache.disk.workers import DiskTier

__all__ = [
    "DiskTier",
    "FindDone",
    "FindJob",
    "Hung",
    "Limits",
    "ReadDone",
    "ReadJob",
    "State",
    "WriteDone",
    "WriteJob",
    "cipher_of",
    "identity_of",
    "namespace_digest",
    "page_filter",
]
