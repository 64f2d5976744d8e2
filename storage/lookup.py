"""The read path of a store, for the process that writes it and for those that only read it.

Every read is verified; what cannot be read or verified is a miss.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from hicache.storage.base import PageBuffer, StoreError, StoreStats
from hicache.storage.check import Verifier
from hicache.storage.codec import PageCodecs
from hicache.storage.counters import Counters, Counts
from hicache.storage.header import HEADER_BYTES, page_bytes_of
from hicache.storage.memory import Scratch
from hicache.storage.slot_file import is_aligned
from hicache.storage.tables import Sizes, Tables
from hicache.storage.value_file import ValueLocation
from hicache.storage.write_transaction import AccessLog

log = logging.getLogger("hicache.storage")
T = TypeVar("T")

_KEYS_PER_READ = 8  # a read transaction keeps freed pages from being reused: short ones let the writer reuse them


class Snapshots(Protocol):
    """An open store that is read one snapshot at a time."""

    def read(self, body: Callable[[Any, Tables], T], otherwise: T) -> T: ...

    def sizes(self) -> Sizes: ...


@dataclass(frozen=True)
class StoredValues:
    """The values of a store as they are stored, and how they are verified without decrypting them."""

    env: Snapshots
    verifier: Verifier


class Lookup:
    """`contains`, `get_into` and `stats` of a store; any thread. Notes uses and bad values in the access log."""

    def __init__(
        self, env: Snapshots, codecs: PageCodecs, access_log: AccessLog, counters: Counters, name: str
    ) -> None:
        self._env, self._codecs = env, codecs
        self._access_log, self._counters, self._name = access_log, counters, name
        self._scratch = Scratch()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        check_keys(keys)

        def look(txn: Any, tables: Tables) -> list[bool]:
            get, ages = txn.get, tables.ages
            found = [get(key, None, ages) is not None for key in keys]
            if self._access_log.any_quarantined:
                found = [
                    held and not self._access_log.is_quarantined(key) for key, held in zip(keys, found, strict=True)
                ]
            return found

        return self._env.read(look, [False] * len(keys))

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], deadline_s: float) -> list[bool]:
        check_keys(keys)
        if len(keys) != len(buffers):
            raise StoreError(f"{len(keys)} keys but {len(buffers)} buffers")
        for buffer in buffers:
            check_page(buffer, self._codecs, writeable=True)
        found: list[bool] = []
        for start in range(0, len(keys), _KEYS_PER_READ):
            if time.monotonic() >= deadline_s:
                found += [False] * (len(keys) - start)
                break
            part = slice(start, start + _KEYS_PER_READ)
            found += self._get_part(keys[part], buffers[part])
        # Oldest first: the first key of the call is to become the most recently used.
        self._access_log.add_used(key for key, hit in zip(reversed(keys), reversed(found), strict=True) if hit)
        self._counters.add(Counts(hits=sum(found), misses=len(found) - sum(found)))
        return found

    def stats(self, budget_bytes: int, *, read_only: bool) -> StoreStats:
        sizes = self._env.sizes()._asdict()
        counts = dataclasses.asdict(self._counters.now)
        return StoreStats(**sizes, budget_bytes=budget_bytes, read_only=read_only, **counts)

    def _get_part(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer]) -> list[bool]:
        """`get_into` for the keys of one read transaction."""
        found = [False] * len(keys)
        bad: list[bytes] = []

        def decode(txn: Any, tables: Tables) -> None:
            present = [i for i, key in enumerate(keys) if tables.contains(txn, key)]
            locations = tables.locate(txn, [keys[i] for i in present]) if present else []
            for i, location in zip(present, locations, strict=True):
                try:
                    reason = self._decode(tables, keys[i], location, buffers[i])
                    if reason and self._is_of_another_size(tables, keys[i], location, len(buffers[i])):
                        continue
                except OSError as error:
                    log.warning("cannot read a page of the store %s: %s", self._name, error)
                    self._counters.add(Counts(read_errors=1))
                    continue
                found[i] = not reason
                if reason:
                    log.warning("deleting a page of the store %s that does not verify: %s", self._name, reason)
                    bad.append(keys[i])

        self._env.read(decode, None)
        if bad:
            self._access_log.quarantine(bad)
            self._counters.add(Counts(corrupt=len(bad)))
        return found

    def _decode(self, tables: Tables, key: bytes, location: ValueLocation | None, buffer: PageBuffer) -> str:
        """Why the buffer does not hold the page now, "" if it does. OSError if the disk fails."""
        if location is None:
            return "not found in the index"
        codec = self._codecs[len(buffer)]
        if location.length > codec.max_value_bytes:
            return f"value of {location.length} bytes, longer than a page's"
        is_raw = location.length == HEADER_BYTES + len(buffer)
        if tables.slots is not None and is_raw and is_aligned(buffer):  # read in place, without a copy
            tables.slots.file_of(location).read(location.offset, len(buffer), buffer.data)
            return codec.decode_split(key, location.header, buffer.data, buffer)
        return codec.decode_into(key, tables.read(location, self._scratch.take(location.length)), buffer)

    def _is_of_another_size(self, tables: Tables, key: bytes, location: ValueLocation | None, page_bytes: int) -> bool:
        """Whether there is a valid value of a page of another size; verified without decrypting it."""
        header = None if location is None else tables.header(location)
        if location is None or header is None or page_bytes_of(header) == page_bytes:
            return False
        if location.length > self._codecs.max_value_bytes:
            return False
        return not self._codecs.verify_stored(key, tables.read(location, self._scratch.take(location.length)))


def check_keys(keys: Sequence[bytes]) -> None:
    """`StoreError` unless every key has 1 to 511 bytes."""
    for key in keys:
        if not 1 <= len(key) <= 511:
            raise StoreError(f"a key has 1 to 511 bytes, this one {len(key)}")


def check_page(page: PageBuffer, page_sizes: Collection[int], *, writeable: bool) -> None:
    """`StoreError` unless it is contiguous uint8 of one of the sizes."""
    fits = page.dtype == np.uint8 and page.ndim == 1 and len(page) in page_sizes and page.flags.c_contiguous
    if not fits or (writeable and not page.flags.writeable):
        kind = "writable contiguous" if writeable else "contiguous"
        sizes = " or ".join(map(str, page_sizes))
        raise StoreError(f"a page is {kind} uint8 [{sizes}], got {page.dtype} {list(page.shape)}")
