"""Finding and reading pages in an open store, the same for the process that writes it and for those that only read.

Every read is verified; what cannot be read or verified is a miss. Owns each thread's room for one value. May import
numpy, the standard library, base, codec, counters, direct_read, lru and slot_file.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from hicache.storage import check
from hicache.storage.base import PageBuffer, StoreError, StoreStats
from hicache.storage.check import Verifier
from hicache.storage.codec import HEADER_BYTES, PageCodec
from hicache.storage.counters import Counters, Counts
from hicache.storage.direct_read import aligned_room
from hicache.storage.lmdb_tree import Place
from hicache.storage.lru import AccessLog, Tables
from hicache.storage.slot_file import is_aligned

log = logging.getLogger("hicache.storage")
T = TypeVar("T")

_KEYS_PER_READ = 8  # a read transaction pins freed pages: short ones let the writer reuse them


class Sizes(NamedTuple):
    """How many values there are, the sum of their sizes, and what the files take."""

    entries: int = 0
    live_bytes: int = 0
    file_bytes: int = 0


def sizes_of(txn: Any, tables: Tables) -> Sizes:
    """Those of a snapshot, and of the files now."""
    return Sizes(txn.stat(tables.pages)["entries"], check.live_bytes(txn, tables), tables.file_bytes())


class Snapshots(Protocol):
    """An open file that can be read, one snapshot at a time."""

    def read(self, body: Callable[[Any, Tables], T], otherwise: T) -> T: ...

    def sizes(self) -> Sizes: ...


@dataclass(frozen=True)
class SealedValues:
    """A store's values as they are stored, and how they are verified without decrypting them."""

    env: Snapshots
    verifier: Verifier


class Room(threading.local):
    """One thread's memory for a value."""

    def __init__(self, max_value_bytes: int) -> None:
        self.value = aligned_room(max_value_bytes)


class Lookup:
    """`contains`, `get_into` and the sizes of a store; any thread. Notes uses and bad values in `accesses`."""

    def __init__(
        self, env: Snapshots, codec: PageCodec, page_bytes: int, accesses: AccessLog, counters: Counters, name: str
    ) -> None:
        self._env, self._codec, self._page_bytes = env, codec, page_bytes
        self._accesses, self._counters, self._name = accesses, counters, name
        self._room = Room(codec.max_value_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        check_keys(keys)

        def look(txn: Any, tables: Tables) -> list[bool]:
            get, ages = txn.get, tables.ages
            found = [get(key, None, ages) is not None for key in keys]
            if self._accesses.any_doomed:
                found = [held and not self._accesses.is_doomed(key) for key, held in zip(keys, found, strict=True)]
            return found

        return self._env.read(look, [False] * len(keys))

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer]) -> list[bool]:
        check_keys(keys)
        if len(keys) != len(buffers):
            raise StoreError(f"{len(keys)} keys but {len(buffers)} buffers")
        for buffer in buffers:
            check_page(buffer, self._page_bytes, writeable=True)
        found: list[bool] = []
        for start in range(0, len(keys), _KEYS_PER_READ):
            part = slice(start, start + _KEYS_PER_READ)
            found += self._get_part(keys[part], buffers[part])
        # Oldest first: the first key of the call is to end up as the most recently used.
        self._accesses.used(key for key, hit in zip(reversed(keys), reversed(found), strict=True) if hit)
        self._counters.add(Counts(hits=sum(found), misses=len(found) - sum(found)))
        return found

    def stats(self, budget_bytes: int, *, read_only: bool) -> StoreStats:
        sizes = self._env.sizes()._asdict()
        counts = dataclasses.asdict(self._counters.now)
        return StoreStats(**sizes, budget_bytes=budget_bytes, read_only=read_only, **counts)

    def _get_part(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer]) -> list[bool]:
        """`get_into` for the keys of one read transaction."""
        found = [False] * len(keys)
        doomed: list[bytes] = []

        def decode(txn: Any, tables: Tables) -> None:
            present = [i for i, key in enumerate(keys) if tables.has(txn, key)]
            places = tables.places(txn, [keys[i] for i in present]) if present else []
            for i, place in zip(present, places, strict=True):
                try:
                    reason = self._decode(tables, keys[i], place, buffers[i])
                except OSError as error:
                    log.warning("cannot read a page of the store %s: %s", self._name, error)
                    self._counters.add(Counts(read_errors=1))
                    continue
                found[i] = not reason
                if reason:
                    log.warning("dropping a page of the store %s that does not verify: %s", self._name, reason)
                    doomed.append(keys[i])

        self._env.read(decode, None)
        if doomed:
            self._accesses.doom(doomed)
            self._counters.add(Counts(corrupt=len(doomed)))
        return found

    def _decode(self, tables: Tables, key: bytes, place: Place | None, buffer: PageBuffer) -> str:
        """Why the buffer does not hold the page now, "" if it does. OSError where the medium fails."""
        if place is None:
            return "not found in its tree"
        if place.length > self._codec.max_value_bytes:
            return f"value of {place.length} bytes, longer than a page's"
        is_raw = place.length == HEADER_BYTES + self._page_bytes
        if tables.slots is not None and is_raw and is_aligned(buffer):  # no copy, then
            tables.slots.file.read(place.offset, self._page_bytes, buffer.data)
            return self._codec.decode_apart(key, place.head, buffer.data, buffer)
        return self._codec.decode_into(key, tables.read(place, self._room.value), buffer)


def check_keys(keys: Sequence[bytes]) -> None:
    for key in keys:
        if not 1 <= len(key) <= 511:
            raise StoreError(f"a key has 1 to 511 bytes, this one {len(key)}")


def check_page(page: PageBuffer, page_bytes: int, *, writeable: bool) -> None:
    fits = page.dtype == np.uint8 and page.shape == (page_bytes,) and page.flags.c_contiguous
    if not fits or (writeable and not page.flags.writeable):
        kind = "writable contiguous" if writeable else "contiguous"
        raise StoreError(f"a page is {kind} uint8 [{page_bytes}], got {page.dtype} {list(page.shape)}")
