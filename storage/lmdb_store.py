"""The embedded page store: verified, compressed values in LMDB and slot files, bounded in size from the first write.

Combines the open files (lmdb_env.py), reading (lookup.py), commits and budget (lmdb_writer.py), and encoding (codec.py,
compressor.py).
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hicache.storage.base import Durability, PageBuffer, StoreCorrupt, StoreError, StoreStats
from hicache.storage.check import Verifier
from hicache.storage.cipher import ENCRYPTION_BYTES, PageCipher
from hicache.storage.codec import PageCodecs
from hicache.storage.compressor import PageCompressor, Replay
from hicache.storage.counters import Counters, Counts
from hicache.storage.filters import PageFormat
from hicache.storage.header import NAMESPACE_BYTES
from hicache.storage.lmdb_env import StoreEnv
from hicache.storage.lmdb_file import FileSpec
from hicache.storage.lmdb_writer import Budget, GroupWriter
from hicache.storage.lookup import Lookup, StoredValues, check_keys, check_page
from hicache.storage.memory import keep_freed_memory
from hicache.storage.optional_packages import require_packages
from hicache.storage.reader_table import READER_SLOTS
from hicache.storage.records import IdentityRecord, Settings, identity_with_key, namespace_digest, sorted_formats
from hicache.storage.tables import entry_bytes
from hicache.storage.write_transaction import AccessLog

SLOTS_FROM_BYTES = 256 << 10  # of the largest page: below, the system calls for slots cost more than copies
_MAX_READERS = 126
_DELETES_PER_COMMIT = 4096


@dataclass(frozen=True)
class StoreParts:
    """What a store consists of, for maintenance.py. Whoever changes something holds `writing`."""

    codecs: PageCodecs
    env: StoreEnv
    writer: GroupWriter
    counters: Counters
    budget: Budget
    writing: threading.Lock


class LmdbPageStore:
    """A `PageStore` in one directory; see there for the methods, their threads and the order of keys.

    `identity` names, in readable fields, everything that decides what a page means; a store made for another one is
    refused. `formats`: the sizes that pages may have, which are part of the identity, each with the filter that
    reorders such a page for compression only. All sizes share the budget and one use order. `durability`: "relaxed"
    syncs the data of each commit, and a power failure may undo the last commit but never damages one; "commit" syncs
    everything before `put` returns. Neither loses anything when the process dies. `level` 0 stores raw, 1 to 22 are
    zstd's. With `cipher` pages are encrypted, and its key id is part of the identity. Opening with a smaller budget
    than before evicts and compacts at once. A new store whose largest pages have `slots_from_bytes` or more keeps all
    pages in slots, in a file for each size; another one keeps them in its tables. An existing store stays as it was
    created. `on_removed` is called by the thread that writes, after each commit that removed pages, with their keys:
    evicted, deleted, or not to be verified.

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
        max_readers: int = _MAX_READERS,
        slots_from_bytes: int = SLOTS_FROM_BYTES,
        on_removed: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        if not identity:
            raise StoreError("a store needs an identity; name the model, the dtype and the layout of its pages")
        settings = Settings(budget_bytes, sorted_formats(formats), durability, level)
        page_sizes = tuple(format.page_bytes for format in settings.formats)
        record = IdentityRecord(identity_with_key(identity, cipher), page_sizes)
        self._open(Path(path), record, settings, cipher, max_readers, slots_from_bytes, on_removed)

    @classmethod
    def of_record(
        cls, path: Path, record: IdentityRecord, settings: Settings, cipher: PageCipher | None
    ) -> LmdbPageStore:
        """The store that `record` and `settings` describe. Without the cipher of an encrypted store, pages cannot be
        put or read; everything else works."""
        store = cls.__new__(cls)
        store._open(path, record, settings, cipher, _MAX_READERS, SLOTS_FROM_BYTES)
        return store

    def _open(
        self,
        path: Path,
        record: IdentityRecord,
        settings: Settings,
        cipher: PageCipher | None,
        max_readers: int,
        slots_from_bytes: int,
        on_removed: Callable[[Sequence[bytes]], None] | None = None,
    ) -> None:
        require_packages()
        keep_freed_memory()
        page_sizes, budget_bytes = record.page_sizes, settings.budget_bytes
        if settings.durability not in ("relaxed", "commit") or not 1 <= max_readers < READER_SLOTS:
            raise StoreError(f"durability={settings.durability!r}, {max_readers=}: one of them is out of range")
        self._codecs = codecs_of(record, settings, cipher)
        value_bytes = self._codecs.max_value_bytes + mmap.PAGESIZE
        has_slots = page_sizes[-1] >= slots_from_bytes
        budget = Budget(budget_bytes, value_bytes, page_sizes[0], len(page_sizes), mmap.PAGESIZE, has_slots)
        min_bytes = budget.min_bytes
        if budget_bytes < min_bytes:
            raise StoreError(
                f"{budget_bytes=} is too small for pages of {page_sizes[-1]} bytes; raise it to {min_bytes}"
            )
        self._path = path
        self._missing_key_id = "" if cipher else record.key_id
        self._max_value_bytes = self._codecs.max_value_bytes + (ENCRYPTION_BYTES if self._missing_key_id else 0)
        self._counters, self._access_log = Counters(), AccessLog()
        self._writing = threading.Lock()
        file_bytes = budget.max_file_bytes
        spec = FileSpec(path, file_bytes, budget.index_bytes, max_readers, record, settings, slots_from_bytes)
        self._env = StoreEnv(spec, self._verifier(), self._counters)
        try:
            self._set_up(budget, path, on_removed)
        except BaseException:
            self._env.close()
            raise

    def _set_up(self, budget: Budget, path: Path, on_removed: Callable[[Sequence[bytes]], None] | None) -> None:
        """What works on the open files."""
        has_slots = self._env.tables.slots is not None
        self._budget = budget = replace(budget, has_slots=has_slots)
        self._writer = GroupWriter(self._env, self._access_log, self._counters, budget, str(path), on_removed)
        self._lookup = Lookup(self._env, self._codecs, self._access_log, self._counters, str(path))
        self._compressor = PageCompressor(self._codecs, budget.commit_bytes, split=has_slots)
        self._shrink_to(budget.max_file_bytes)

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """The sizes that pages may have, in bytes, ascending."""
        return tuple(self._codecs)

    @property
    def parts(self) -> StoreParts:
        self._require_open()
        return StoreParts(self._codecs, self._env, self._writer, self._counters, self._budget, self._writing)

    @property
    def stored_values(self) -> StoredValues:
        self._require_open()
        return StoredValues(self._env, Verifier(self._codecs.verify_stored, self._max_value_bytes))

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
        with self._writing:
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
        with self._writing:
            self._require_open()
            starts = range(0, len(keys), _DELETES_PER_COMMIT)
            return sum(self._writer.delete(keys[start : start + _DELETES_PER_COMMIT]) for start in starts)

    def stats(self) -> StoreStats:
        return self._lookup.stats(self._budget.budget_bytes, read_only=self._writer.read_only)

    def thread_read_errors(self) -> int:
        return self._counters.thread_read_errors

    def check(self) -> None:
        found = [str(violation) for violation in self._env.violations(self._verifier())]
        if found:
            raise StoreCorrupt(f"the store {self._path} has {len(found)} violation(s): " + "; ".join(found), found)

    def compact(self) -> int:
        with self._writing:
            self._require_open()
            return self._writer.compact()

    def sync(self) -> None:
        with self._writing:
            self._require_open()
            self._writer.sync()

    def reopen(self) -> bool:
        with self._writing:
            self._require_open()
            return self._writer.reopen(self._codecs.max_value_bytes)

    def close(self) -> None:
        with self._writing:
            if not self._env.closed:
                self._compressor.close()
                self._writer.sync()
                self._env.close()

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
                # Encoded while it is written, and kept in case the commit is repeated.
                group = Replay(zip(part, values, strict=False))
                if not self._writer.put(group, max_bytes, None if stored else used):
                    break
                lengths = [len(value) for _, value in group]
                raw_bytes = sum(len(pages[key]) for key in part)
                self._counters.add(Counts(puts=len(lengths), put_bytes_raw=raw_bytes, put_bytes_stored=sum(lengths)))
                stored += part
                self._compressor.release()
        finally:
            values.close()
            self._compressor.release()
        return stored

    def _groups(self, keys: Sequence[bytes], pages: Mapping[bytes, PageBuffer]) -> Iterator[tuple[list[bytes], int]]:
        """The keys in groups of one commit each, with the bytes that a group needs at most: values of `commit_bytes`,
        or a single larger one."""
        value_bytes = {page_bytes: codec.max_value_bytes for page_bytes, codec in self._codecs.items()}
        needed_bytes = {
            page_bytes: entry_bytes(length, self._budget.psize) for page_bytes, length in value_bytes.items()
        }
        group, group_bytes, max_bytes = list[bytes](), 0, 0
        for key in keys:
            page_bytes = len(pages[key])
            if group and group_bytes + value_bytes[page_bytes] > self._budget.commit_bytes:
                yield group, max_bytes
                group, group_bytes, max_bytes = [], 0, 0
            group.append(key)
            group_bytes += value_bytes[page_bytes]
            max_bytes += needed_bytes[page_bytes]
        if group:
            yield group, max_bytes

    def _present(self, keys: Sequence[bytes]) -> set[bytes]:
        return {key for key, present in zip(keys, self.contains(keys), strict=True) if present}

    def _shrink_to(self, max_bytes: int) -> None:
        """Shrink a store that was made with a larger budget, or refuse it."""
        if self._env.file_bytes() <= max_bytes:
            return
        self._writer.evict_to(self._budget.limit_bytes)
        self._writer.compact()
        file_bytes = self._env.file_bytes()
        if file_bytes > max_bytes:
            raise StoreError(
                f"cannot shrink the store {self._path} from {file_bytes} bytes to "
                f"budget_bytes={self._budget.budget_bytes}; free disk space, raise the budget, or remove the directory"
            )

    def _verifier(self) -> Verifier:
        """Verifies everything that can be verified: without its cipher a value is not decrypted."""
        verify = self._codecs.verify_stored if self._missing_key_id else self._codecs.verify
        return Verifier(verify, self._max_value_bytes)

    def _require_open(self) -> None:
        if self._env.closed:
            raise StoreError("the store is closed; open it again")

    def _require_cipher(self) -> None:
        if self._missing_key_id:
            raise StoreError(
                f"the store {self._path} is encrypted with the key {self._missing_key_id}; open it with its cipher"
            )


def codecs_of(record: IdentityRecord, settings: Settings, cipher: PageCipher | None) -> PageCodecs:
    """The codecs of a store's values."""
    namespace = namespace_digest(record.identity)[:NAMESPACE_BYTES]
    return PageCodecs(settings.formats, namespace, settings.level, cipher)
