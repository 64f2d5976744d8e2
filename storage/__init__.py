"""Page stores: keys and bytes on disk or elsewhere, without a tensor in sight.

Importing this package needs neither lmdb nor zstandard; building an `LmdbPageStore` does. May import numpy, lmdb,
zstandard and the standard library.
"""

from __future__ import annotations

from hicache.storage.base import (
    Durability,
    PageBuffer,
    PageStore,
    StoreCorrupt,
    StoreError,
    StoreLocked,
    StoreMismatch,
    StoreStats,
)
from hicache.storage.lmdb_store import LmdbPageStore

__all__ = [
    "Durability",
    "LmdbPageStore",
    "PageBuffer",
    "PageStore",
    "StoreCorrupt",
    "StoreError",
    "StoreLocked",
    "StoreMismatch",
    "StoreStats",
]
