"""The read path of a store, for the process that writes it and for those that only read it.

The index says where a page was a moment ago; its slot may hold another one by now. So what does not verify is looked up
again, once, and only a page that is still at the same place is damaged.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import numpy as np

from hicache.storage.access_log import AccessLog
from hicache.storage.base import PageBuffer, StoreError, StoreStats
from hicache.storage.codec import PageCodecs
from hicache.storage.counters import Counters, Counts
from hicache.storage.index import Entry, io_errors
from hicache.storage.memory import Scratch, round_up
from hicache.storage.slot_block import BLOCK_BYTES, MAX_KEY_BYTES, SlotBlock
from hicache.storage.slot_file import is_aligned
from hicache.storage.store_files import OpenPages, Sizes

log = logging.getLogger("hicache.storage")

_KEYS_PER_LOOKUP = 64


class Lookup:
    """`contains`, `get_into` and `stats` of a store; any thread. Notes uses and bad pages in the access log."""

    def __init__(
        self,
        reading: Callable[[], AbstractContextManager[OpenPages]],
        codecs: PageCodecs,
        access_log: AccessLog,
        counters: Counters,
        name: str,
    ) -> None:
        self._reading, self._codecs = reading, codecs
        self._access_log, self._counters, self._name = access_log, counters, name
        self._scratch, self._blocks = Scratch(), Scratch()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        check_keys(keys)
        try:
            with self._reading() as pages:
                found = pages.index.contains(keys)
        except io_errors as error:
            self._note_failed(error)
            return [False] * len(keys)
        if self._access_log.any_quarantined:
            return [held and not self._access_log.is_quarantined(key) for key, held in zip(keys, found, strict=True)]
        return found

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], deadline_s: float) -> list[bool]:
        check_keys(keys)
        if len(keys) != len(buffers):
            raise StoreError(f"{len(keys)} keys but {len(buffers)} buffers")
        for buffer in buffers:
            check_page(buffer, self._codecs, writeable=True)
        found: list[bool] = []
        while len(found) < len(keys) and time.monotonic() < deadline_s:
            part = slice(len(found), len(found) + _KEYS_PER_LOOKUP)
            found += self._get_part(keys[part], buffers[part], deadline_s)
        found += [False] * (len(keys) - len(found))
        # Oldest first: the first key of the call is to become the most recently used.
        self._access_log.add_used(key for key, hit in zip(reversed(keys), reversed(found), strict=True) if hit)
        self._counters.add(Counts(hits=sum(found), misses=len(found) - sum(found)))
        return found

    def read_value(self, pages: OpenPages, key: bytes, entry: Entry) -> bytes | str:
        """The value as it is stored, or why it cannot be read. Not verified."""
        payload = self._scratch.take(round_up(entry.payload_bytes))
        try:
            header = self._fetch(pages, key, entry, payload)
        except OSError as error:
            return f"cannot be read: {error}"
        return header if isinstance(header, str) else header + bytes(payload[: entry.payload_bytes])

    def stats(self, sizes: Sizes, budget_bytes: int, *, read_only: bool) -> StoreStats:
        counts = dataclasses.asdict(self._counters.now)
        return StoreStats(**sizes._asdict(), budget_bytes=budget_bytes, read_only=read_only, **counts)

    def _get_part(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], deadline_s: float) -> list[bool]:
        """`get_into` for keys that are looked up together."""
        found = [False] * len(keys)
        try:
            with self._reading() as pages:
                for i, entry in enumerate(pages.index.locate(keys)):
                    if entry is None or self._access_log.is_quarantined(keys[i]) or time.monotonic() >= deadline_s:
                        continue
                    try:
                        found[i] = self._get(pages, keys[i], entry, buffers[i])
                    except OSError as error:
                        self._note_failed(error)
        except io_errors as error:
            self._note_failed(error)
        return found

    def _get(self, pages: OpenPages, key: bytes, entry: Entry, buffer: PageBuffer) -> bool:
        reason = ""
        for _ in range(2):
            if entry.page_bytes != len(buffer):
                return False
            reason = self._decode(pages, key, entry, buffer)
            if not reason:
                return True
            (now,) = pages.index.locate([key])
            if now is None:
                return False
            entry, before = now, entry
        if entry.place == before.place and pages.is_current():
            log.warning("deleting a page of the store %s that does not verify: %s", self._name, reason)
            self._access_log.quarantine([key])
            self._counters.add(Counts(corrupt=1))
        return False

    def _decode(self, pages: OpenPages, key: bytes, entry: Entry, buffer: PageBuffer) -> str:
        """Why the buffer does not hold the page now, "" if it does. OSError if the disk fails."""
        codec = self._codecs[len(buffer)]
        if entry.payload_bytes == len(buffer) and is_aligned(buffer):  # read in place, without a copy
            payload = buffer.data
        else:
            payload = self._scratch.take(round_up(entry.payload_bytes))
        header = self._fetch(pages, key, entry, payload)
        if isinstance(header, str):
            return header
        return codec.decode_split(key, header, payload[: entry.payload_bytes], buffer)

    def _fetch(self, pages: OpenPages, key: bytes, entry: Entry, payload: memoryview) -> bytes | str:
        """Read the payload to the start of `payload`; the header of its value, or why the slot does not hold it."""
        file = pages.files.get(entry.page_bytes)
        if file is None or entry.payload_bytes > file.slot_bytes - BLOCK_BYTES:
            return f"no slot holds {entry.payload_bytes} bytes of a page of {entry.page_bytes}"
        block = self._blocks.take(BLOCK_BYTES)[:BLOCK_BYTES]
        if not file.read(entry.slot, entry.payload_bytes, block, payload):
            return "its slot is cut short"
        found = SlotBlock.unpack(block)
        if found is None:
            return "its slot holds no page"
        return found.header if found.key == key else "its slot holds another page"

    def _note_failed(self, error: Exception) -> None:
        log.warning("cannot read the store %s: %s", self._name, error)
        self._counters.add(Counts(read_errors=1))


def check_keys(keys: Sequence[bytes]) -> None:
    """`StoreError` unless every key has 1 to 511 bytes."""
    for key in keys:
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise StoreError(f"a key has 1 to {MAX_KEY_BYTES} bytes, this one {len(key)}")


def check_page(page: PageBuffer, page_sizes: Collection[int], *, writeable: bool) -> None:
    """`StoreError` unless it is contiguous uint8 of one of the sizes."""
    fits = page.dtype == np.uint8 and page.ndim == 1 and len(page) in page_sizes and page.flags.c_contiguous
    if not fits or (writeable and not page.flags.writeable):
        kind = "writable contiguous" if writeable else "contiguous"
        sizes = " or ".join(map(str, page_sizes))
        raise StoreError(f"a page is {kind} uint8 [{sizes}], got {page.dtype} {list(page.shape)}")
