"""Page stores: keys and bytes on disk or elsewhere, without a tensor in sight.

    base          the contract of a page store, and its errors
    lmdb_store    the embedded one, for the process that writes it; lmdb_reader: for others; lookup: reading, for both
    lmdb_writer   commits and the budget; packer: packing beside them; lru: use order; slots, slot_file: long values
    lmdb_env      the open store; lmdb_file: its files; lmdb_record: what it says of itself
    directory     who may write to it, and who else may read it: nobody; reader_table: where readers are noted
    codec         a page and its value: header, filters, cipher
    check         what must hold, value by value; operate: what operators do
    tree_check    whether lmdb may walk its file (lmdb_meta, lmdb_tree: the format); rescue: building it anew

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
    StoreTreesDamaged,
)
from hicache.storage.cipher import PageCipher
from hicache.storage.codec import choose_filter
from hicache.storage.filters import PageFilter, PageFormat
from hicache.storage.lmdb_reader import LmdbPageReader
from hicache.storage.lmdb_store import LmdbPageStore
from hicache.storage.operate import (
    Fault,
    StoreDescription,
    VerifyReport,
    describe,
    evict,
    open_existing,
    pages,
    put_values,
    verify,
)
from hicache.storage.rescue import rescue

__all__ = [
    "Durability",
    "Fault",
    "LmdbPageReader",
    "LmdbPageStore",
    "PageBuffer",
    "PageCipher",
    "PageFilter",
    "PageFormat",
    "PageStore",
    "StoreCorrupt",
    "StoreDescription",
    "StoreError",
    "StoreLocked",
    "StoreMismatch",
    "StoreStats",
    "StoreTreesDamaged",
    "VerifyReport",
    "choose_filter",
    "describe",
    "evict",
    "open_existing",
    "pages",
    "put_values",
    "rescue",
    "verify",
]
