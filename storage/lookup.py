"""The read path of a store.

Pages of one call that lie in neighbouring slots are read together. The index says where a page was a moment ago; its
slot may hold another one by now. So what does not verify is looked up again, once, and only a page that is still at the
same place is damaged.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hicache.storage.base import PageBuffer, StoreError, StoreStats
from hicache.storage.cipher import PageCipher
from hicache.storage.codec import PageCodecs
from hicache.storage.index import Entry, io_errors
from hicache.storage.memory import Scratch
from hicache.storage.slot_file import (
    MAX_KEY_BYTES,
    MAX_RUN,
    SlotBlock,
    SlotLength,
    SlotRead,
    is_aligned,
    runs,
)
from hicache.storage.store_files import StoreFiles

log = logging.getLogger("hicache.storage")

_Read: TypeAlias = tuple[bytes, Entry, memoryview]  # a key, where its page is, and what takes the payload
_WINDOW_BYTES = 8 << 20  # of pages that are looked through for neighbours


class _Wanted(NamedTuple):
    number: int
    key: bytes
    entry: Entry
    buffer: PageBuffer


class _ThreadCounts(threading.local):
    read_errors = 0


class Counters:
    """The counters among the fields of `StoreStats`, by their names; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Any] = Counter()
        self._of_thread = _ThreadCounts()

    @property
    def now(self) -> StoreStats:
        """Without the fields that are no counters."""
        with self._lock:
            return StoreStats(**self._counts)

    @property
    def thread_read_errors(self) -> int:
        """The part of `read_errors` that the calling thread added."""
        return self._of_thread.read_errors

    def add(self, *, read_errors: int = 0, **more: int) -> None:
        self._of_thread.read_errors += read_errors
        with self._lock:
            self._counts["read_errors"] += read_errors
            for name, count in more.items():
                self._counts[name] += count


class PageReads:
    """What a store does that changes nothing, as `PageStore` says; any thread. Counts what it meets, and logs it.

    `_corrupt`: keys whose page does not verify, which count as absent until the writer has deleted them.
    """

    def __init__(self, files: StoreFiles, codecs: PageCodecs, cipher: PageCipher | None) -> None:
        self._files, self._codecs = files, codecs
        self._missing_key_id = "" if cipher else files.record.key_id
        self._counters, self._corrupt = Counters(), dict[bytes, None]()
        self._scratch = Scratch()

    @property
    def page_sizes(self) -> tuple[int, ...]:
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
        check_pages(keys, buffers, self._codecs, writeable=True)
        found = [False] * len(keys)
        try:
            with self.reading() as pages:
                wanted = self._wanted(pages, keys, buffers)
                for window in _windows(wanted):
                    if time.monotonic() >= deadline_s:
                        break
                    for _, of_file in groupby(window, key=lambda one: one.entry.length):
                        for run in runs(of_file, lambda one: one.entry.slot):
                            for one in self._get(pages, run):
                                found[one.number] = True
                # Oldest first: the first key of the call is to become the most recently used.
                for one in reversed(wanted):
                    if found[one.number]:
                        pages.index.uses.note(one.entry.length, one.entry.slot)
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

    def reading(self) -> AbstractContextManager[StoreFiles]:
        return self._files.reading()

    def verified_value(self, pages: StoreFiles, key: bytes, entry: Entry) -> bytes | str:
        """The value of a page as it is stored, or why it cannot be read or does not verify."""
        payload = self._scratch.take(entry.length.slot_bytes)
        try:
            (header,) = self._read(pages, [(key, entry, payload)])
        except OSError as error:
            return f"cannot be read: {error}"
        if isinstance(header, str):
            return header
        value = header + bytes(payload[: entry.payload_bytes])
        return self._codecs.verify_stored(key, value) or value

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

    def _wanted(self, pages: StoreFiles, keys: Sequence[bytes], buffers: Sequence[PageBuffer]) -> list[_Wanted]:
        """Where the pages are that the index has, of the size of their buffers."""
        return [
            _Wanted(number, key, entry, buffer)
            for number, (key, entry, buffer) in enumerate(zip(keys, pages.index.locate(keys), buffers, strict=True))
            if entry is not None and entry.page_bytes == len(buffer) and key not in self._corrupt
        ]

    def _get(self, pages: StoreFiles, run: Sequence[_Wanted]) -> Iterator[_Wanted]:
        """Fill the buffers of pages in slots that follow one another; those that hold their page then."""
        try:
            for one, reason in zip(run, self._decode(pages, run), strict=True):
                if not reason or self._get_again(pages, one):
                    yield one
        except OSError as error:
            if len(run) == 1:
                self._note_failed(error)
            else:
                for one in run:
                    yield from self._get(pages, [one])

    def _get_again(self, pages: StoreFiles, before: _Wanted) -> bool:
        """The same for one that did not verify, wherever it is now. OSError if the disk fails."""
        for now in self._wanted(pages, [before.key], [before.buffer]):
            (reason,) = self._decode(pages, [now])
            if not reason:
                return True
            if pages.index.locate([now.key]) == [now.entry]:
                self._note_corrupt(now.key, reason)
        return False

    def _decode(self, pages: StoreFiles, run: Sequence[_Wanted]) -> list[str]:
        """Why each buffer does not hold its page now, "" if it does. OSError if the disk fails."""
        scratch, reads = self._scratch.take(len(run) * run[0].entry.length.slot_bytes), list[_Read]()
        for _, key, entry, buffer in run:
            payload = buffer.data
            if entry.payload_bytes != len(buffer) or not is_aligned(buffer):  # else read in place, without a copy
                payload, scratch = scratch[: entry.length.slot_bytes], scratch[entry.length.slot_bytes :]
            reads.append((key, entry, payload))
        reasons = list[str]()
        for one, found, (_, entry, payload) in zip(run, self._read(pages, reads), reads, strict=True):
            if isinstance(found, bytes):
                value = found, payload[: entry.payload_bytes]
                reasons.append(self._codecs[entry.page_bytes].decode_split(one.key, *value, one.buffer))
            else:
                reasons.append(found)
        return reasons

    def _read(self, pages: StoreFiles, run: Sequence[_Read]) -> list[bytes | str]:
        """Read payloads in slots that follow one another; the headers of their values, or why a slot does not hold one.
        OSError if the disk fails."""
        file = pages.slot_files.get(run[0][1].length)
        if file is None:
            return ["there are no slots for such pages"] * len(run)
        blocks = file.read([SlotRead(entry.slot, payload, entry.payload_bytes) for _, entry, payload in run])
        return [_header(block, key) for (key, _, _), block in zip(run, blocks, strict=True)]


def _header(block: memoryview | None, key: bytes) -> bytes | str:
    """The header of the value under a key in a slot, or why it holds none."""
    if block is None:
        return "its slot is cut short"
    found = SlotBlock.unpack(block)
    if found is None:
        return "its slot holds no page"
    return found.header if found.key == key else "its slot holds another page"


def _windows(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    """Pages in the order given, so many that they are read together; each window by file and slot."""
    window, window_bytes = list[_Wanted](), 0
    for one in wanted:
        if window and (window_bytes + len(one.buffer) > _WINDOW_BYTES or len(window) == MAX_RUN):
            yield sorted(window, key=_by_place)
            window, window_bytes = [], 0
        window.append(one)
        window_bytes += len(one.buffer)
    if window:
        yield sorted(window, key=_by_place)


def _by_place(wanted: _Wanted) -> tuple[SlotLength, int]:
    return wanted.entry.length, wanted.entry.slot


def check_keys(keys: Sequence[bytes]) -> None:
    """`StoreError` unless every key has 1 to 511 bytes."""
    for key in keys:
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise StoreError(f"a key has 1 to {MAX_KEY_BYTES} bytes, this one {len(key)}")


def check_pages(
    keys: Sequence[bytes], pages: Sequence[PageBuffer], page_sizes: Collection[int], *, writeable: bool
) -> None:
    """`StoreError` unless there is a page for each key, contiguous uint8 of one of the sizes."""
    check_keys(keys)
    if len(keys) != len(pages):
        raise StoreError(f"{len(keys)} keys but {len(pages)} buffers")
    for page in pages:
        fits = page.dtype == np.uint8 and page.ndim == 1 and len(page) in page_sizes and page.flags.c_contiguous
        if not fits or (writeable and not page.flags.writeable):
            kind = "writable contiguous" if writeable else "contiguous"
            sizes = " or ".join(map(str, page_sizes))
            raise StoreError(f"a page is {kind} uint8 [{sizes}], got {page.dtype} {list(page.shape)}")
