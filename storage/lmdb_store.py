"""The embedded page store: one lmdb file with verified, packed values, bounded in size from its first write.

Ties together the environment (lmdb_env), reading (lookup), the write path and budget (lmdb_writer), the use order (lru)
and the value format (codec). May import numpy, the standard library and its siblings.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hicache.storage.base import Durability, PageBuffer, StoreCorrupt, StoreError, StoreStats
from hicache.storage.check import Verifier
from hicache.storage.cipher import SEAL_BYTES, PageCipher
from hicache.storage.codec import NAMESPACE_BYTES, PageCodecs
from hicache.storage.counters import Counters, Counts
from hicache.storage.filters import PageFormat
from hicache.storage.lmdb_env import StoreEnv
from hicache.storage.lmdb_file import FileSpec
from hicache.storage.lmdb_record import IdentityRecord, Settings, formats_of, namespace_digest, sealed_identity
from hicache.storage.lmdb_writer import Budget, GroupWriter
from hicache.storage.lookup import Lookup, SealedValues, check_keys, check_page
from hicache.storage.lru import AccessLog, entry_bytes
from hicache.storage.memory import keep_freed_memory
from hicache.storage.packages import require_packages
from hicache.storage.packer import Packer, Replay
from hicache.storage.reader_table import READER_SLOTS

SLOTS_FROM_BYTES = 256 << 10  # of the largest page: for shorter ones the calls for slots cost more than copies
_DELETES_PER_COMMIT = 4096


@dataclass(frozen=True)
class StoreParts:
    """What a store is made of, for `hicache.storage.operate`. Whoever changes something holds `writing`."""

    codecs: PageCodecs
    env: StoreEnv
    writer: GroupWriter
    counters: Counters
    budget: Budget
    writing: threading.Lock


class LmdbPageStore:
    """A `PageStore` in one directory; see there for the verbs, their threads and the order of keys.

    `identity` names, in readable fields, everything that decides what a page means; a store made for another one is
    refused. `formats`: the sizes that its pages may have, which are part of that, each with the filter that arranges
    the numbers in such a page, for packing alone. All sizes share the budget and one use order. `durability`: "relaxed"
    syncs the data of each commit, and a power cut may undo the last commit but never tears one; "commit" syncs
    everything before `put` returns. Neither loses anything to the death of the process. `level` 0 stores raw, 1 to 22
    are zstd's. With `cipher` pages are encrypted, and its key id is part of the identity. Opening with a smaller budget
    than before evicts and compacts at once. A new store whose largest pages have `slots_from_bytes` or more keeps all
    pages in slots, in a file for each size, where long ones are read past the kernel's memory; another one keeps them
    in its tables. An existing store stays as it was made.

    A medium that refuses a write turns the store read-only until `revive`. Other processes may read beside it
    (`LmdbPageReader`). Raises `StoreError` or one of its kinds when it cannot be opened or is called wrongly. Not to be
    used across a fork.
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
        max_readers: int = 126,
        slots_from_bytes: int = SLOTS_FROM_BYTES,
    ) -> None:
        if not identity:
            raise StoreError("a store needs an identity; name the model, the dtype and the layout of its pages")
        settings = Settings(budget_bytes, formats_of(formats), durability, level)
        page_sizes = tuple(one.page_bytes for one in settings.formats)
        record = IdentityRecord(sealed_identity(identity, cipher), page_sizes)
        self._build(Path(path), record, settings, cipher, max_readers, slots_from_bytes)

    @classmethod
    def of_record(
        cls, path: Path, record: IdentityRecord, settings: Settings, cipher: PageCipher | None
    ) -> LmdbPageStore:
        """The store that `record` and `settings` describe. Without the cipher of an encrypted one, pages cannot be put
        or read, all else can be done."""
        store = cls.__new__(cls)
        store._build(path, record, settings, cipher, 126, SLOTS_FROM_BYTES)
        return store

    def _build(
        self,
        path: Path,
        record: IdentityRecord,
        settings: Settings,
        cipher: PageCipher | None,
        max_readers: int,
        slots_from_bytes: int,
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
        least_bytes = budget.least_bytes
        if budget_bytes < least_bytes:
            raise StoreError(
                f"{budget_bytes=} is too small for pages of {page_sizes[-1]} bytes; raise it to {least_bytes}"
            )
        self._path = path
        self._sealed_with = "" if cipher else record.key_id
        self._max_value_bytes = self._codecs.max_value_bytes + (SEAL_BYTES if self._sealed_with else 0)
        self._counters, self._accesses = Counters(), AccessLog()
        self._writing = threading.Lock()
        spec = FileSpec(path, budget.map_bytes, budget.index_bytes, max_readers, record, settings, slots_from_bytes)
        self._env = StoreEnv(spec, self._verifier(), self._counters)
        try:
            self._set_up(budget, path)
        except BaseException:
            self._env.close()
            raise

    def _set_up(self, budget: Budget, path: Path) -> None:
        """What works on the open environment."""
        has_slots = self._env.tables.slots is not None
        self._budget = budget = replace(budget, has_slots=has_slots)
        self._writer = GroupWriter(self._env, self._accesses, self._counters, budget, str(path))
        self._lookup = Lookup(self._env, self._codecs, self._accesses, self._counters, str(path))
        self._packer = Packer(self._codecs, budget.commit_bytes, apart=has_slots)
        self._shrink_to(budget.map_bytes)

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """The sizes that pages may have, in bytes, ascending."""
        return tuple(self._codecs)

    @property
    def parts(self) -> StoreParts:
        self._require_open()
        return StoreParts(self._codecs, self._env, self._writer, self._counters, self._budget, self._writing)

    @property
    def sealed(self) -> SealedValues:
        self._require_open()
        return SealedValues(self._env, Verifier(self._codecs.verify_stored, self._max_value_bytes))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._lookup.contains(keys)

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer]) -> list[bool]:
        self._require_cipher()
        return self._lookup.get_into(keys, buffers)

    def touch(self, keys: Sequence[bytes]) -> None:
        check_keys(keys)
        self._accesses.used(reversed(keys))  # oldest first: the first key is to end up as the most recently used

    def put(self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0) -> list[bool]:
        check_keys([key for key, _ in items])
        for _, page in items:
            check_page(page, self._codecs, writeable=False)
        self._require_cipher()
        with self._writing:
            self._require_open()
            if self._writer.read_only:
                return [False] * len(items)
            # Last first, so that the first key of the call ends up as the most recently used.
            pages = dict(reversed(items))
            present = self._present(list(pages))
            absent = [key for key in pages if key not in present]
            if absent:
                stored = self._put_absent(absent, pages, [key for key in pages if key in present], lag)
            else:
                stored = []
                self._accesses.used(pages)
            if self._accesses.any_doomed:
                self._writer.fold()
            # A call larger than the budget evicts its own last keys.
            kept = self._present([*present, *stored])
            return [key in kept for key, _ in items]

    def delete(self, keys: Sequence[bytes]) -> int:
        check_keys(keys)
        with self._writing:
            self._require_open()
            starts = range(0, len(keys), _DELETES_PER_COMMIT)
            return sum(self._writer.remove(keys[start : start + _DELETES_PER_COMMIT]) for start in starts)

    def stats(self) -> StoreStats:
        return self._lookup.stats(self._budget.budget_bytes, read_only=self._writer.read_only)

    def thread_read_errors(self) -> int:
        return self._counters.thread_read_errors

    def check(self) -> None:
        found = [str(fault) for fault in self._env.faults(self._verifier())]
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

    def revive(self) -> bool:
        with self._writing:
            self._require_open()
            return self._writer.revive(self._codecs.max_value_bytes)

    def close(self) -> None:
        with self._writing:
            if not self._env.closed:
                self._packer.close()
                self._writer.sync()
                self._env.close()

    def _put_absent(
        self, keys: Sequence[bytes], pages: Mapping[bytes, PageBuffer], used: Sequence[bytes], lag: float
    ) -> list[bytes]:
        """Encode and commit in groups, in the order given; returns the keys whose commit returned."""
        stored: list[bytes] = []
        values = self._packer.values(keys, pages, lag)
        try:
            for part in self._groups(keys, pages):
                # Packed while it is written; kept for a commit that has to be repeated.
                group = Replay(zip(part, values, strict=False))
                max_values = (self._codecs[len(pages[key])].max_value_bytes for key in part)
                most_bytes = sum(entry_bytes(value_bytes, self._budget.psize) for value_bytes in max_values)
                if not self._writer.put(group, most_bytes, None if stored else used):
                    break
                lengths = [len(value) for _, value in group]
                raw_bytes = sum(len(pages[key]) for key in part)
                self._counters.add(Counts(puts=len(lengths), put_bytes_raw=raw_bytes, put_bytes_stored=sum(lengths)))
                stored += part
                self._packer.release()
        finally:
            values.close()
            self._packer.release()
        return stored

    def _groups(self, keys: Sequence[bytes], pages: Mapping[bytes, PageBuffer]) -> Iterator[list[bytes]]:
        """The keys in runs of one commit each: of `commit_bytes` at most, or of a single page."""
        group, group_bytes = list[bytes](), 0
        for key in keys:
            value_bytes = self._codecs[len(pages[key])].max_value_bytes
            if group and group_bytes + value_bytes > self._budget.commit_bytes:
                yield group
                group, group_bytes = [], 0
            group.append(key)
            group_bytes += value_bytes
        if group:
            yield group

    def _present(self, keys: Sequence[bytes]) -> set[bytes]:
        return {key for key, present in zip(keys, self.contains(keys), strict=True) if present}

    def _shrink_to(self, map_bytes: int) -> None:
        """Bring a store made with a larger budget down to this one, or refuse it."""
        if self._env.file_bytes() <= map_bytes:
            return
        self._writer.evict_to(self._budget.limit_bytes)
        self._writer.compact()
        file_bytes = self._env.file_bytes()
        if file_bytes > map_bytes:
            raise StoreError(
                f"cannot shrink the store {self._path} from {file_bytes} bytes to "
                f"budget_bytes={self._budget.budget_bytes}; free disk space, raise the budget, or remove the directory"
            )

    def _verifier(self) -> Verifier:
        """Verification of all that can be verified: without its cipher a value is not decrypted."""
        if self._sealed_with:
            return Verifier(self._codecs.verify_stored, self._max_value_bytes)
        return Verifier(self._codecs.verify, self._max_value_bytes)

    def _require_open(self) -> None:
        if self._env.closed:
            raise StoreError("the store is closed; open it again")

    def _require_cipher(self) -> None:
        if self._sealed_with:
            raise StoreError(
                f"the store {self._path} is encrypted with the key {self._sealed_with}; open it with its cipher"
            )


def codecs_of(record: IdentityRecord, settings: Settings, cipher: PageCipher | None) -> PageCodecs:
    """The codecs of a store's values."""
    namespace = namespace_digest(record.identity)[:NAMESPACE_BYTES]
    return PageCodecs(settings.formats, namespace, settings.level, cipher)
