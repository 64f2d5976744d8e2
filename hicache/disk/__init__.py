"""Tier 3 as the engine sees it: identity and byte order of its pages, and the threads between them and the store."""

from hicache.disk.health import Limits, State
from hicache.disk.jobs import FindDone, FindJob, ReadClass, ReadDone, ReadJob, Stalled, WriteDone, WriteJob
from hicache.disk.page_format import identity_of, namespace_digest, page_filter
from hicache.disk.secret import cipher_of
from hicache.disk.workers import DiskTier

__all__ = [
    "DiskTier",
    "FindDone",
    "FindJob",
    "Limits",
    "ReadClass",
    "ReadDone",
    "ReadJob",
    "Stalled",
    "State",
    "WriteDone",
    "WriteJob",
    "cipher_of",
    "identity_of",
    "namespace_digest",
    "page_filter",
]
