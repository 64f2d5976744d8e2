"""Page stores: keys and bytes on disk or elsewhere, without tensors.

base               the contract of a page store, and its errors
lmdb_store         the embedded store; calls: argument checks and counters that all stores share
lmdb_writer        commits and the budget; compressor: encodes pages in threads concurrently with commits
store_files        the open files of a store; directory: file names and the writer lock; records: identity, settings
index              the slot of each page, in LMDB, and the time of its last use
slots              which slots are free; slot_file: reads and writes slots and the block that names the page of a slot
codec              encodes a page as a value and decodes it: header, filters, cipher
urls               opens a store by its URL; store_url: parts of a URL; conformance: the tests that every store passes
remote             code that stores on other machines share; s3_store: pages in an S3 bucket
mooncake_store     pages in Mooncake; mooncake_client: a client of its library
store_folder       the stores of a path, and their common budget
maintenance        the commands of an operator: describe, list, verify, repair, evict
backup             copies of stores, and stores with another encryption key
disk_rate          measures how fast a file system reads and writes
process/           the process that owns stores
"""

from __future__ import annotations

from hicache.storage.backup import copy_store as copy_store
from hicache.storage.backup import rekey_store as rekey_store
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
from hicache.storage.maintenance import bytes_to_evict as bytes_to_evict
from hicache.storage.maintenance import describe as describe
from hicache.storage.maintenance import evict as evict
from hicache.storage.maintenance import list_pages as list_pages
from hicache.storage.maintenance import open_existing as open_existing
from hicache.storage.maintenance import verify as verify
from hicache.storage.store_folder import store_at as store_at
from hicache.storage.store_folder import store_folders as store_folders
from hicache.storage.store_url import StoreUrl as StoreUrl
from hicache.storage.urls import open_store as open_store
