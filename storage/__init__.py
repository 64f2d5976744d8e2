"""Page stores: keys and bytes on disk or elsewhere, without tensors.

base               the contract of a page store, and its errors
lmdb_store         the embedded store; calls: checks and counters of a call, of every store
lmdb_writer        commits and the budget; compressor: encoding beside them
store_files        the open files of a store; directory: names and the writer lock; records: identity, settings
index              where pages are, in LMDB, and when they were used
slots              which slots are free; slot_file: reading and writing them, and what names a page
codec              a page and its value: header, filters, cipher
urls               opening a store by its URL; store_url: its parts; conformance: the tests that every store passes
remote             what stores on other machines do alike; s3_store
mooncake_store     pages in Mooncake; mooncake_client: a client of its library
store_folder       the stores of a path, and their common budget
maintenance        what operators do
process/           the process that owns stores
"""

from __future__ import annotations

from hicache.storage.base import Durability as Durability
from hicache.storage.base import PageBuffer as PageBuffer
from hicache.storage.base import PageStore as PageStore
from hicache.storage.base import StoreCorrupt as StoreCorrupt
from hicache.storage.base import StoreError as StoreError
from hicache.storage.base import StoreLocked as StoreLocked
from hicache.storage.base import StoreMismatch as StoreMismatch
from hicache.storage.base import StoreStats as StoreStats
from hicache.storage.base import StoreUnavailable as StoreUnavailable
from hicache.storage.cipher import PageCipher as PageCipher
from hicache.storage.filters import PageFilter as PageFilter
from hicache.storage.filters import PageFormat as PageFormat
from hicache.storage.lmdb_store import Fault as Fault
from hicache.storage.lmdb_store import LmdbPageStore as LmdbPageStore
from hicache.storage.maintenance import PageEntry as PageEntry
from hicache.storage.maintenance import StoreDescription as StoreDescription
from hicache.storage.maintenance import VerifyReport as VerifyReport
from hicache.storage.maintenance import describe as describe
from hicache.storage.maintenance import evict as evict
from hicache.storage.maintenance import list_pages as list_pages
from hicache.storage.maintenance import open_existing as open_existing
from hicache.storage.maintenance import verify as verify
from hicache.storage.store_folder import store_at as store_at
from hicache.storage.store_folder import store_folders as store_folders
from hicache.storage.store_url import StoreUrl as StoreUrl
from hicache.storage.urls import open_store as open_store
