"""Tier 2: pinned CPU memory in pages."""

from hicache.host.arena import CudaRegistry, PinnedArena, PinnedRows, allocate_pinned
from hicache.host.exclusive import ExclusiveIndex
from hicache.host.index import PageIndex
from hicache.host.pool import HostPagePool
from hicache.host.run import (
    RUN_TOKENS,
    HostRun,
    NewPages,
    RunPart,
    end_of,
    held_by,
    ids_of,
    pages_of,
    path_of,
    second_pages_of,
    spans,
    used_alike,
    within,
)
from hicache.host.write_ahead import ROUND_SHARE, WriteAhead, WrittenIndex

__all__ = [
    "ROUND_SHARE",
    "RUN_TOKENS",
    "CudaRegistry",
    "ExclusiveIndex",
    "HostPagePool",
    "HostRun",
    "NewPages",
    "PageIndex",
    "PinnedArena",
    "PinnedRows",
    "RunPart",
    "WriteAhead",
    "WrittenIndex",
    "allocate_pinned",
    "end_of",
    "held_by",
    "ids_of",
    "pages_of",
    "path_of",
    "second_pages_of",
    "spans",
    "used_alike",
    "within",
]
