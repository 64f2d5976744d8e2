"""Page stores: keys and bytes on disk or elsewhere, without tensors.

    base               the contract of a page store, and its errors
    lmdb_store         the embedded store, for the process that writes it; lmdb_reader: for other processes
    lookup             reading, for both; access_log: what it tells the writer
    lmdb_writer        commits and the budget; compressor: encoding beside them
    store_files        the open files of a writer; directory: names and the writer lock; records: identity, settings
    index              where pages are, in LMDB; live_index: where that lies, and its seal; rebuild: from the slots
    slots              which slots are free; slot_file: reading and writing them; slot_block: what names a page
    codec              a page and its value: header, filters, cipher
    urls               opening a store by its URL; store_url: its parts; conformance: the tests that every store passes
    remote             what stores on other machines do alike; redis_store, with resp, its protocol; s3_store
    mooncake_store     pages in Mooncake; mooncake_client: a client of its library
    chain              several stores as one
    check              the consistency check; maintenance: what operators do

Importing this package needs neither lmdb nor zstandard; building an `LmdbPageStore` does.
"""

from __future__ import annotations

from hicache.storage.base import (
    Durability,
    EmbeddedStore,
    PageBuffer,
    PageStore,
    StoreCorrupt,
    StoreError,
    StoreLocked,
    StoreMismatch,
    StoreStats,
)
from hicache.storage.chain import ChainStore
from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFilter, PageFormat
from hicache.storage.lmdb_reader import LmdbPageReader
from hicache.storage.lmdb_store import LmdbPageStore
from hicache.storage.maintenance import (
    Fault,
    PageEntry,
    StoreDescription,
    VerifyReport,
    describe,
    evict,
    list_pages,
    open_existing,
    pages,
    put_values,
    store_folders,
    verify,
)
from hicache.storage.mooncake_client import MooncakeAddress
from hicache.storage.mooncake_store import MooncakePageStore
from hicache.storage.redis_store import RedisPageStore
from hicache.storage.s3_store import S3PageStore
from hicache.storage.store_url import StoreUrl
from hicache.storage.urls import StoreOpener, open_store

__all__ = [
    "ChainStore",
    "Durability",
    "EmbeddedStore",
    "Fault",
    "LmdbPageReader",
    "LmdbPageStore",
    "MooncakeAddress",
    "MooncakePageStore",
    "PageBuffer",
    "PageCipher",
    "PageEntry",
    "PageFilter",
    "PageFormat",
    "PageStore",
    "RedisPageStore",
    "S3PageStore",
    "StoreCorrupt",
    "StoreDescription",
    "StoreError",
    "StoreLocked",
    "StoreMismatch",
    "StoreOpener",
    "StoreStats",
    "StoreUrl",
    "VerifyReport",
    "describe",
    "evict",
    "list_pages",
    "open_existing",
    "open_store",
    "pages",
    "put_values",
    "store_folders",
    "verify",
]
