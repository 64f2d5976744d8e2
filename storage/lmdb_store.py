"""The embedded page store: verified, compressed pages in slot files, an index in LMDB, bounded from the first write.

Combines the open files (store_files.py), reading (lookup.py), commits and budget (lmdb_writer.py), and encoding
(codec.py, compressor.py).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hicache.storage.access_log import AccessLog
from hicache.storage.base import Durability, PageBuffer, StoreCorrupt, StoreError, StoreStats
from hicache.storage.check import StoredPages, violations
from hicache.storage.cipher import PageCipher
from hicache.storage.codec import PageCodecs
from hicache.storage.compressor import PageCompressor
from hicache.storage.counters import Counters, Counts
from hicache.storage.filters import PageFormat
from hicache.storage.header import HeaderAndPayload, page_bytes_of
from hicache.storage.index import NotedSlots, io_errors
from hicache.storage.lmdb_writer import Budget, GroupWriter
from hicache.storage.lookup import Lookup, check_keys, check_page
from hicache.storage.rebuild import Progress, log_progress
from hicache.storage.records import IdentityRecord, Settings, identity_with_key, sorted_formats
from hicache.storage.store_files import StoreFiles, slot_bytes

_DELETES_PER_COMMIT = 4096


class LmdbPageStore:
    """A `PageStore` in one directory; see there for the methods, their threads and the order of keys.

    `identity` names, in readable fields, everything that decides what a page means; a store made for another one is
    refused. `formats`: the sizes that pages may have, which are part of the identity, each with the filter that
    reorders such a page for compression only. All sizes share the budget and one use order. `durability`: with "commit"
    pages are on disk before `put` returns; with "relaxed" a power failure may cost those of the last two commits, up to
    1/32 of the budget or 128 MiB. Neither loses anything when the process dies. `level` 0 stores raw, 1 to 22 are
    zstd's. With `cipher` pages are encrypted, and its key id is part of the identity. Opening with a smaller budget
    than before evicts at once. `on_removed` is called by the thread that writes, after each commit that removed pages,
    with their keys: evicted, deleted, or not to be verified. `progress`: called with slots done and in all while the
    index is rebuilt, which a store needs that was not closed; by default that is logged.

    A failed write makes the store read-only until `reopen` succeeds. Other processes may read meanwhile
    (`LmdbPageReader`). Raises `StoreError` or a subclass when it cannot be opened or is called wrongly. Not to be used
    after a fork.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        identity: Mapping[str, str | int],
        formats: Sequence[PageFormat],
        budget_bytes: int,
        durability: Durability = "relaxed",
        level: int = 1,
        cipher: PageCipher | None = None,
        on_removed: Callable[[Sequence[bytes]], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        if not identity:
            raise StoreError("a store needs an identity; name the model, the dtype and the layout of its pages")
        settings = Settings(budget_bytes, sorted_formats(formats), durability, level)
        page_sizes = tuple(format.page_bytes for format in settings.formats)
        record = IdentityRecord(identity_with_key(identity, cipher), page_sizes)
        self._open(Path(path), record, settings, cipher, on_removed, progress)

    @classmethod
    def of_record(
        cls,
        path: Path,
        record: IdentityRecord,
        settings: Settings,
        cipher: PageCipher | None,
        progress: Progress | None = None,
    ) -> LmdbPageStore:
        """The store that `record` and `settings` describe. Without the cipher of an encrypted store, pages cannot be
        put or read; everything else works."""
        store = cls.__new__(cls)
        store._open(path, record, settings, cipher, None, progress)
        return store

    def _open(
        self,
        path: Path,
        record: IdentityRecord,
        settings: Settings,
        cipher: PageCipher | None,
        on_removed: Callable[[Sequence[bytes]], None] | None,
        progress: Progress | None,
    ) -> None:
        if settings.durability not in ("relaxed", "commit"):
            raise StoreError(f"durability={settings.durability!r}: choose relaxed or commit")
        self._codecs = PageCodecs(settings.formats, record.namespace, settings.level, cipher)
        self._budget = budget = Budget(settings.budget_bytes, slot_bytes(record.page_sizes[-1], record.key_id))
        if settings.budget_bytes < budget.min_bytes:
            raise StoreError(
                f"budget_bytes={settings.budget_bytes} is too small for pages of {record.page_sizes[-1]} bytes; raise "
                f"it to {budget.min_bytes}"
            )
        self._path, self._missing_key_id = path, "" if cipher else record.key_id
        self._counters, self._access_log = Counters(), AccessLog()
        self.writing = threading.Lock()
        self._files = StoreFiles(path, record, settings, progress or log_progress(str(path)))
        try:
            self._set_up(settings, str(path), on_removed)
        except BaseException:
            self._files.close(is_whole=False)
            raise

    def _set_up(self, settings: Settings, name: str, on_removed: Callable[[Sequence[bytes]], None] | None) -> None:
        """What works on the open files."""
        self.rebuilt_pages = self._files.rebuilt_pages
        self._writer = GroupWriter(
            self._files, self._access_log, self._counters, self._budget, settings.durability, name, on_removed
        )
        self._lookup = Lookup(self._files.reading, self._codecs, self._access_log, self._counters, name)
        self._compressor = PageCompressor(self._codecs, self._budget.commit_bytes)
        if self._writer.sizes.file_bytes > settings.budget_bytes:
            self._writer.evict_to(settings.budget_bytes)

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """The sizes that pages may have, in bytes, ascending."""
        return tuple(self._codecs)

    @property
    def stored(self) -> StoredPages:
        """The pages as they are stored, for maintenance.py; nobody may write meanwhile."""
        self._require_open()
        return StoredPages(self._files.reading, self._lookup.read_value, self._codecs.verify_stored)

    @property
    def writer(self) -> GroupWriter:
        """For maintenance.py, which holds `writing`."""
        self._require_open()
        return self._writer

    @property
    def slots(self) -> list[NotedSlots]:
        """Which slots are in use; for who holds `writing`."""
        return self._files.slots.now()

    def put_value(self, key: bytes, value: HeaderAndPayload) -> bool:
        """Store an absent page as it was stored elsewhere; for who holds `writing`."""
        page_bytes = page_bytes_of(value.header)
        needed_bytes = self._writer.needed_bytes(key, page_bytes, len(value.payload))
        num_bytes = self._writer.put([(key, value)], needed_bytes)
        if num_bytes:
            self._counters.add(Counts(puts=1, put_bytes_raw=page_bytes, put_bytes_stored=num_bytes))
        return bool(num_bytes)

    def register_memory(self, memory: PageBuffer) -> None:
        """Reads and writes files from and to any memory."""

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        return self._lookup.contains(keys)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        self._require_cipher()
        return self._lookup.get_into(keys, buffers, deadline_s)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._require_open()
        check_keys(keys)
        self._access_log.add_used(reversed(keys))  # oldest first: the first key is to become the most recently used

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        check_keys([key for key, _ in items])
        for _, page in items:
            check_page(page, self._codecs, writeable=False)
        self._require_cipher()
        with self.writing:
            self._require_open()
            if self._writer.read_only:
                return [False] * len(items)
            # Last first, so that the first key of the call becomes the most recently used.
            pages = dict(reversed(items))
            present = self._present(list(pages))
            absent = [key for key in pages if key not in present]
            if absent:
                stored = self._put_absent(absent, pages, [key for key in pages if key in present], lag, deadline_s)
            else:
                stored = []
                self._access_log.add_used(pages)
            if self._access_log.any_quarantined:
                self._writer.apply_access_log()
            # A call larger than the budget evicts its own last keys.
            kept = self._present([*present, *stored])
            return [key in kept for key, _ in items]

    def delete(self, keys: Sequence[bytes]) -> int:
        check_keys(keys)
        with self.writing:
            self._require_open()
            starts = range(0, len(keys), _DELETES_PER_COMMIT)
            return sum(self._writer.delete(keys[start : start + _DELETES_PER_COMMIT]) for start in starts)

    def stats(self) -> StoreStats:
        return self._lookup.stats(self._writer.sizes, self._budget.budget_bytes, read_only=self._writer.read_only)

    def thread_read_errors(self) -> int:
        return self._counters.thread_read_errors

    def check(self) -> None:
        try:
            with self._files.reading() as pages:
                found = [str(violation) for violation in violations(pages, self.slots, self.stored)]
        except io_errors as error:
            found = [f"the index cannot be read: {error}"]
        if found:
            raise StoreCorrupt(f"the store {self._path} has {len(found)} violation(s): " + "; ".join(found), found)

    def compact(self) -> int:
        with self.writing:
            self._require_open()
            return self._writer.compact()

    def sync(self) -> None:
        with self.writing:
            self._require_open()
            self._writer.sync()

    def reopen(self) -> bool:
        with self.writing:
            self._require_open()
            return self._writer.reopen()

    def close(self) -> None:
        with self.writing:
            if not self._files.closed:
                self._compressor.close()
                self._writer.close()

    def _put_absent(
        self,
        keys: Sequence[bytes],
        pages: Mapping[bytes, PageBuffer],
        used: Sequence[bytes],
        lag: float,
        deadline_s: float,
    ) -> list[bytes]:
        """Encode and commit in groups, in the order given; returns the keys whose commit succeeded."""
        stored: list[bytes] = []
        values = self._compressor.values(keys, pages, lag)
        try:
            for part, max_bytes in self._groups(keys, pages):
                if time.monotonic() >= deadline_s:
                    break
                # Encoded while it is written.
                num_bytes = self._writer.put(zip(part, values, strict=False), max_bytes, None if stored else used)
                if not num_bytes:
                    break
                raw_bytes = sum(len(pages[key]) for key in part)
                self._counters.add(Counts(puts=len(part), put_bytes_raw=raw_bytes, put_bytes_stored=num_bytes))
                stored += part
                self._compressor.release()
        finally:
            values.close()
            self._compressor.release()
        return stored

    def _groups(self, keys: Sequence[bytes], pages: Mapping[bytes, PageBuffer]) -> Iterator[tuple[list[bytes], int]]:
        """The keys in groups of one commit each, with the bytes that a group needs at most: values of `commit_bytes`,
        or a single larger one."""
        group, group_bytes, max_bytes = list[bytes](), 0, 0
        for key in keys:
            page_bytes = len(pages[key])
            if group and group_bytes + page_bytes > self._budget.commit_bytes:
                yield group, max_bytes
                group, group_bytes, max_bytes = [], 0, 0
            group.append(key)
            group_bytes += page_bytes
            max_bytes += self._writer.needed_bytes(key, page_bytes, self._codecs[page_bytes].max_payload_bytes)
        if group:
            yield group, max_bytes

    def _present(self, keys: Sequence[bytes]) -> set[bytes]:
        return {key for key, present in zip(keys, self.contains(keys), strict=True) if present}

    def _require_open(self) -> None:
        if self._files.closed:
            raise StoreError("the store is closed; open it again")

    def _require_cipher(self) -> None:
        if self._missing_key_id:
            raise StoreError(
                f"the store {self._path} is encrypted with the key {self._missing_key_id}; open it with its cipher"
            )
