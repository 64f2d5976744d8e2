"""What an engine is made of, for tests and tools."""

from __future__ import annotations

from typing import NamedTuple

from hicache.flow.backup import Backup
from hicache.flow.context import EngineContext
from hicache.flow.persist import Persist
from hicache.flow.prefetch import Prefetcher
from hicache.flow.restore import Restore


class Inspection(NamedTuple):
    """The movements of an engine, and what they work on. None: the engine lacks that tier."""

    context: EngineContext
    backup: Backup | None
    restore: Restore
    persists: tuple[Persist, ...]
    prefetcher: Prefetcher | None
