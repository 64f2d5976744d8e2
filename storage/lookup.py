"""The read path of a store.

The index says where a page was a moment ago; its slot may hold another one by now. So what does not verify is looked up
again, once, and only a page that is still at the same place is damaged.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

import numpy as np

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.cipher import PageCipher
from hicache.storage.codec import PageCodecs
from hicache.storage.counters import Counters
from hicache.storage.index import Entry, io_errors
from hicache.storage.memory import Scratch, round_up
from hicache.storage.slot_file import BLOCK_BYTES, MAX_KEY_BYTES, SlotBlock, is_aligned
from hicache.storage.store_files import OpenPages, StoreFiles

log = logging.getLogger("hicache.storage")


class PageReads:
    """What a store does that changes nothing, as `PageStore` says; any thread. Counts what it meets, and logs it.

    `_corrupt`: keys whose page does not verify, which count as absent until the writer has deleted them.
    """

    def __init__(self, files: StoreFiles, codecs: PageCodecs, cipher: PageCipher | None) -> None:
        self._files, self._codecs = files, codecs
        self._missing_key_id = "" if cipher else files.record.key_id
        self._counters, self._corrupt = Counters(), dict[bytes, None]()
        self._scratch, self._blocks = Scratch(), Scratch()

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """The sizes that pages may have, in bytes, ascending."""
        return self._files.record.page_sizes

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        check_keys(keys)
        try:
            with self.reading() as pages:
                found = pages.index.contains(keys)
        except io_errors as error:
            self._note_failed(error)
            return [False] * len(keys)
        corrupt = self._corrupt
        return [held and key not in corrupt for key, held in zip(keys, found, strict=True)] if corrupt else found

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        self._require_cipher()
        check_keys(keys)
        if len(keys) != len(buffers):
            raise StoreError(f"{len(keys)} keys but {len(buffers)} buffers")
        for buffer in buffers:
            check_page(buffer, self._codecs, writeable=True)
        found = [False] * len(keys)
        try:
            with self.reading() as pages:
                entries = pages.index.locate(keys)
                for i, entry in enumerate(entries):
                    if time.monotonic() >= deadline_s:
                        break
                    if entry is None or keys[i] in self._corrupt:
                        continue
                    try:
                        found[i] = self._get(pages, keys[i], entry, buffers[i])
                    except OSError as error:
                        self._note_failed(error)
                # Oldest first: the first key of the call is to become the most recently used.
                for entry, hit in zip(reversed(entries), reversed(found), strict=True):
                    if hit and entry is not None:
                        pages.index.uses.note(entry.page_bytes, entry.slot)
        except io_errors as error:
            self._note_failed(error)
        self._counters.add(hits=sum(found), misses=len(found) - sum(found))
        return found

    def touch(self, keys: Sequence[bytes]) -> None:
        check_keys(keys)
        try:
            with self.reading() as pages:
                pages.index.touch(reversed(keys))  # the first key is to become the most recently used
        except io_errors as error:
            self._note_failed(error)

    def thread_read_errors(self) -> int:
        return self._counters.thread_read_errors

    def reading(self) -> AbstractContextManager[OpenPages]:
        """What to read from, as long as the block lasts. `StoreError` when the store is closed, OSError when it cannot
        be read."""
        return self._files.reading()

    def verified_value(self, pages: OpenPages, key: bytes, entry: Entry) -> bytes | str:
        """The value of a page as it is stored, or why it cannot be read or does not verify."""
        payload = self._scratch.take(round_up(entry.payload_bytes))
        try:
            header = self._fetch(pages, key, entry, payload)
        except OSError as error:
            return f"cannot be read: {error}"
        if isinstance(header, str):
            return header
        value = header + bytes(payload[: entry.payload_bytes])
        return self.verify_value(key, value) or value

    def verify_value(self, key: bytes, value: bytes) -> str:
        """Why this is not the value of a page of this store; "" if it is. Decrypts where the store has its key."""
        return self._codecs.verify_stored(key, value)

    def _note_corrupt(self, key: bytes, reason: str) -> None:
        log.warning("a page of the store %s does not verify: %s", self._files.path, reason)
        self._counters.add(corrupt=1)
        self._corrupt[key] = None

    def _note_failed(self, error: Exception) -> None:
        log.warning("cannot read the store %s: %s", self._files.path, error)
        self._counters.add(read_errors=1)

    def _require_cipher(self) -> None:
        if self._missing_key_id:
            raise StoreError(
                f"the store {self._files.path} is encrypted with the key {self._missing_key_id}; open it with its key"
            )

    def _get(self, pages: OpenPages, key: bytes, entry: Entry, buffer: PageBuffer) -> bool:
        for _ in range(2):
            if entry.page_bytes != len(buffer):
                return False
            reason = self._decode(pages, key, entry, buffer)
            if not reason:
                return True
            (now,) = pages.index.locate([key])
            if now is None:
                return False
            has_moved, entry = now != entry, now
        if not has_moved:
            self._note_corrupt(key, reason)
        return False

    def _decode(self, pages: OpenPages, key: bytes, entry: Entry, buffer: PageBuffer) -> str:
        """Why the buffer does not hold the page now, "" if it does. OSError if the disk fails."""
        if entry.payload_bytes == len(buffer) and is_aligned(buffer):  # read in place, without a copy
            payload = buffer.data
        else:
            payload = self._scratch.take(round_up(entry.payload_bytes))
        header = self._fetch(pages, key, entry, payload)
        if isinstance(header, str):
            return header
        return self._codecs[len(buffer)].decode_split(key, header, payload[: entry.payload_bytes], buffer)

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
