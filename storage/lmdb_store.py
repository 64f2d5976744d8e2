"""The embedded page store: one lmdb file with verified, packed values, bounded in size from its first write.

Ties together the environment (lmdb_env), the write path and budget (lmdb_writer), the use order (lru) and the value
format (codec). May import numpy, the standard library and its siblings.
"""

from __future__ import annotations

import dataclasses
import logging
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hicache.storage import check
from hicache.storage.base import Durability, PageBuffer, StoreCorrupt, StoreError, StoreStats
from hicache.storage.codec import NAMESPACE_BYTES, PageCodec
from hicache.storage.counters import Counters, Counts
from hicache.storage.lmdb_env import StoreEnv
from hicache.storage.lmdb_file import FileSpec, canonical, namespace_digest
from hicache.storage.lmdb_writer import Budget, GroupWriter
from hicache.storage.lru import AccessLog
from hicache.storage.packages import lmdb, zstandard

log = logging.getLogger("hicache.storage")

_KEYS_PER_READ = 8  # a read transaction pins freed pages: short ones let the writer reuse them
_DELETES_PER_COMMIT = 4096


class LmdbPageStore:
    """A `PageStore` in one directory; see there for the verbs, their threads and the order of keys.

    `identity` names, in readable fields, everything that decides what a page means; a store made for another one is
    refused. `durability`: "relaxed" syncs the data of each commit, and a power cut may undo the last commit but
    never tears one; "commit" syncs everything before `put` returns. Neither loses anything to the death of the process.
    `level` 0 stores raw, 1 to 22 are zstd's; `element_bytes` (1, 2, 4, 8) is the width of the numbers in a page, for
    packing alone. Opening with a smaller budget than before evicts and compacts at once.

    A medium that refuses a write turns the store read-only until it is opened again. Raises `StoreError` or one of
    its kinds when it cannot be opened or is called wrongly. Not to be used across a fork.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        identity: Mapping[str, str | int],
        page_bytes: int,
        budget_bytes: int,
        durability: Durability = "relaxed",
        level: int = 1,
        element_bytes: int = 1,
        max_readers: int = 126,
    ) -> None:
        if lmdb is None or zstandard is None:
            raise StoreError("the disk tier needs two packages: pip install lmdb zstandard")
        if not identity:
            raise StoreError("a store needs an identity; name the model, the dtype and the layout of its pages")
        if page_bytes < 1 or durability not in ("relaxed", "commit") or not 1 <= max_readers <= 900:
            raise StoreError(f"{page_bytes=}, {durability=}, {max_readers=}: one of them is out of range")
        namespace = namespace_digest(identity)[:NAMESPACE_BYTES]
        self._codec = PageCodec(page_bytes=page_bytes, namespace=namespace, level=level, element_bytes=element_bytes)
        budget = Budget(budget_bytes, self._codec.max_value_bytes + mmap.PAGESIZE, mmap.PAGESIZE)
        least_bytes = budget.least_bytes
        if budget_bytes < least_bytes:
            raise StoreError(f"{budget_bytes=} is too small for pages of {page_bytes} bytes; raise it to {least_bytes}")
        self._path, self._page_bytes, self._budget = Path(path), page_bytes, budget
        self._counters, self._accesses = Counters(), AccessLog()
        self._writing = threading.Lock()
        spec = FileSpec(
            path=self._path,
            page_bytes=page_bytes,
            map_bytes=budget.map_bytes,
            durability=durability,
            max_readers=max_readers,
            record=canonical(identity, page_bytes),
        )
        self._env = StoreEnv(spec, self._codec, self._counters)
        self._writer = GroupWriter(self._env, self._accesses, self._counters, budget, str(path))
        self._shrink_to(budget.map_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        _check_keys(keys)

        def look(txn: Any) -> list[bool]:
            pages = self._env.tables.pages
            return [txn.get(key, db=pages) is not None and not self._accesses.is_doomed(key) for key in keys]

        return self._env.read(look, [False] * len(keys))

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer]) -> list[bool]:
        _check_keys(keys)
        if len(keys) != len(buffers):
            raise StoreError(f"{len(keys)} keys but {len(buffers)} buffers")
        for buffer in buffers:
            self._check_page(buffer, writeable=True)
        found: list[bool] = []
        for start in range(0, len(keys), _KEYS_PER_READ):
            part = slice(start, start + _KEYS_PER_READ)
            found += self._get_part(keys[part], buffers[part])
        # Oldest first: the first key of the call is to end up as the most recently used.
        self._accesses.used(key for key, hit in zip(reversed(keys), reversed(found), strict=True) if hit)
        self._counters.add(Counts(hits=sum(found), misses=len(found) - sum(found)))
        return found

    def put(self, items: Sequence[tuple[bytes, PageBuffer]]) -> list[bool]:
        _check_keys([key for key, _ in items])
        for _, page in items:
            self._check_page(page, writeable=False)
        with self._writing:
            self._require_open()
            if self._writer.read_only:
                return [False] * len(items)
            # Last first, so that the first key of the call ends up as the most recently used.
            pages = dict(reversed(items))
            present = self._present(list(pages))
            absent = [key for key in pages if key not in present]
            if absent:
                stored = self._put_absent(absent, pages, [key for key in pages if key in present])
            else:
                stored = []
                self._accesses.used(pages)
            if self._accesses.any_doomed:
                self._writer.fold()
            # A call larger than the budget evicts its own last keys.
            kept = self._present([*present, *stored])
            return [key in kept for key, _ in items]

    def delete(self, keys: Sequence[bytes]) -> int:
        _check_keys(keys)
        with self._writing:
            self._require_open()
            starts = range(0, len(keys), _DELETES_PER_COMMIT)
            return sum(self._writer.remove(keys[start : start + _DELETES_PER_COMMIT]) for start in starts)

    def stats(self) -> StoreStats:
        def sizes(txn: Any) -> tuple[int, int]:
            tables = self._env.tables
            return txn.stat(tables.pages)["entries"], check.live_bytes(txn, tables)

        entries, live_bytes = self._env.read(sizes, (0, 0))
        return StoreStats(
            entries=entries,
            live_bytes=live_bytes,
            file_bytes=self._env.file_bytes(),
            budget_bytes=self._budget.budget_bytes,
            read_only=self._writer.read_only,
            **dataclasses.asdict(self._counters.now),
        )

    def check(self) -> None:
        found = self._env.violations()
        if found:
            raise StoreCorrupt(f"the store {self._path} has {len(found)} violation(s): " + "; ".join(found), found)

    def compact(self) -> int:
        with self._writing:
            self._require_open()
            return 0 if self._writer.read_only else self._env.compact()

    def sync(self) -> None:
        with self._writing:
            self._require_open()
            self._writer.sync()

    def close(self) -> None:
        with self._writing:
            if not self._env.closed:
                self._writer.sync()
                self._env.close()

    def _get_part(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer]) -> list[bool]:
        """`get_into` for the keys of one read transaction."""
        found = [False] * len(keys)
        doomed: list[bytes] = []

        def decode(txn: Any) -> None:
            for i, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
                value = txn.get(key, db=self._env.tables.pages)
                reason = "absent" if value is None else self._codec.decode_into(key, value, buffer)
                found[i] = not reason
                if reason and value is not None:
                    log.warning("dropping a page of the store %s that does not verify: %s", self._path, reason)
                    doomed.append(key)

        self._env.read(decode, None)
        if doomed:
            self._accesses.doom(doomed)
            self._counters.add(Counts(corrupt=len(doomed)))
        return found

    def _put_absent(
        self, keys: Sequence[bytes], pages: Mapping[bytes, PageBuffer], used: Sequence[bytes]
    ) -> list[bytes]:
        """Encode and commit in groups, in the order given; returns the keys whose commit returned."""
        stored: list[bytes] = []
        group: list[tuple[bytes, bytes]] = []
        group_bytes = 0
        for i, key in enumerate(keys):
            group.append((key, self._codec.encode(key, pages[key])))
            group_bytes += len(group[-1][1])
            if i + 1 < len(keys) and group_bytes + self._codec.max_value_bytes <= self._budget.group_bytes:
                continue
            if not self._writer.put(group, None if stored else used):
                break
            self._counters.add(
                Counts(puts=len(group), put_bytes_raw=len(group) * self._page_bytes, put_bytes_stored=group_bytes)
            )
            stored += [key for key, _ in group]
            group, group_bytes = [], 0
        return stored

    def _present(self, keys: Sequence[bytes]) -> set[bytes]:
        return {key for key, present in zip(keys, self.contains(keys), strict=True) if present}

    def _shrink_to(self, map_bytes: int) -> None:
        """Bring a store made with a larger budget down to this one, or refuse it."""
        if self._env.file_bytes() <= map_bytes:
            return
        self._writer.shrink()
        self._env.compact()
        file_bytes = self._env.file_bytes()
        if file_bytes > map_bytes:
            self._env.close()
            raise StoreError(
                f"cannot shrink the store {self._path} from {file_bytes} bytes to "
                f"budget_bytes={self._budget.budget_bytes}; free disk space, raise the budget, or remove the directory"
            )

    def _require_open(self) -> None:
        if self._env.closed:
            raise StoreError("the store is closed; open it again")

    def _check_page(self, page: PageBuffer, *, writeable: bool) -> None:
        fits = page.dtype == np.uint8 and page.shape == (self._page_bytes,) and page.flags.c_contiguous
        if not fits or (writeable and not page.flags.writeable):
            kind = "writable contiguous" if writeable else "contiguous"
            raise StoreError(f"a page is {kind} uint8 [{self._page_bytes}], got {page.dtype} {list(page.shape)}")


def _check_keys(keys: Sequence[bytes]) -> None:
    for key in keys:
        if not 1 <= len(key) <= 511:
            raise StoreError(f"a key has 1 to 511 bytes, this one {len(key)}")
