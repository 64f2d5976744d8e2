"""The embedded page store: compressed pages with checksums in slot files, an index in LMDB, and a budget that is never
exceeded.

`get_into` reads pages that are in neighbouring slots with one read. Between the look-up of a page in the index and the
read, a writer may store another page in the slot. So if the verification of a page fails, the store looks up the page
again. Only a page that is still in the same slot counts as damaged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

from hicache.storage.base import DiskPages, Durability, PageBuffer, StoreCorrupt, StoreError, StoreStats
from hicache.storage.calls import Counters, check_keys, check_pages
from hicache.storage.cipher import PageCipher
from hicache.storage.codec import PageCodecs
from hicache.storage.compressor import PageCompressor
from hicache.storage.filters import PageFormat
from hicache.storage.header import HeaderAndPayload, page_bytes_of
from hicache.storage.index import Entry, io_errors
from hicache.storage.lmdb_writer import GroupWriter, commit_bytes, require_budget
from hicache.storage.memory import Scratch
from hicache.storage.records import StoreRecord, identity_with_key, sorted_formats
from hicache.storage.slot_file import MAX_RUN, SlotBlock, SlotLength, SlotRead, is_aligned, runs
from hicache.storage.slots import Slots
from hicache.storage.store_files import Progress, StoreFiles

log = logging.getLogger("hicache.storage")
T = TypeVar("T")

_DELETES_PER_COMMIT = 4096
_WINDOW_BYTES = 8 << 20  # bytes of pages that are sorted together to find neighbouring slots
_Read: TypeAlias = tuple[bytes, Entry, memoryview]  # key of a page, its entry, buffer of its payload


@dataclass(frozen=True)
class Fault:
    """An inconsistency of a store. `key`: the key of the damaged page; None if the index or the slots are inconsistent.
    `action`: "" without repair, "dropped", "index rebuilt", or "kept" if the store could not be changed."""

    key: bytes | None
    reason: str
    action: str = ""

    def __str__(self) -> str:
        return self.reason if self.key is None else f"page {self.key.hex()}: {self.reason}"


class _PendingRead(NamedTuple):
    """One page to be read: its position in the call, its key, its entry in the index, and its buffer."""

    number: int
    key: bytes
    entry: Entry
    buffer: PageBuffer


class LmdbPageStore(DiskPages):
    """A `PageStore` in one directory; `PageStore` describes the methods, their threads and the order of keys.

    `identity`: readable fields that determine the content of a page, for example model, dtype and layout. Opening a
    store with another identity raises. `formats`: the page sizes, which are part of the identity, each with the filter
    that reorders pages of this size for compression. All sizes share the budget and one use order. `durability`: with
    "commit" pages are on disk before `put` returns. With "relaxed" a power failure may lose the pages of the last two
    commits, up to 1/32 of the budget or 128 MiB. With either durability, a killed process loses no page. `level` 0
    stores raw, 1 to 22 are zstd levels. `cipher`: if given, pages are encrypted, and its key id is part of the
    identity, as `cipher_key`. If the identity has `cipher_key` but no cipher is given, only the methods that put and
    get pages raise. `budget_bytes`: maximum disk space; opening a store with a smaller budget evicts pages immediately.
    `on_removed`: called by the writing thread after each commit that removed pages, with the keys of the pages that
    were evicted, deleted, or could not be verified. `progress`: if the store was not closed, called during the rebuild
    of the index with the number of slots read so far and the number of all slots. `rebuilt_pages`: number of pages
    found by the rebuild; None if no rebuild was needed. `keeps_index`: keep the index even if it names pages that the
    files have lost; `verify` needs this. If `keeps_index` is False, the number of lost pages is logged and the index is
    rebuilt. `shares_budget`: all stores in the folder of this one share the budget (`store_folder`).

    A failed write makes the store read-only until `reopen` succeeds. Raises `StoreError` or a subclass if the store
    cannot be opened or a caller passes wrong arguments, and NotRunning in a forked process.
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
        keeps_index: bool = False,
        shares_budget: bool = False,
    ) -> None:
        if not identity:
            raise StoreError("a store needs an identity; name the model, the dtype and the layout of its pages")
        if durability not in ("relaxed", "commit"):
            raise StoreError(f"durability={durability!r}: choose relaxed or commit")
        named = identity_with_key(identity, cipher)
        record = StoreRecord(named, sorted_formats(formats), budget_bytes, durability, level)
        codecs = PageCodecs(record.formats, record.namespace, level, cipher)
        require_budget(record)
        files = StoreFiles(Path(path), record, progress, keeps_index=keeps_index)
        self.rebuilt_pages = files.rebuilt_pages
        self._files = files
        self._codecs = codecs
        self._missing_key_id = "" if cipher else files.record.key_id
        self._counters = Counters()
        # keys of pages that failed verification; these pages are misses until the writer thread has deleted them
        self._corrupt = dict[bytes, None]()
        self._scratch = Scratch()
        self._writing = threading.Lock()
        self._on_removed = on_removed
        self._kept = set[bytes]()  # keys of the running `put` that are already stored
        self._opened_s = time.monotonic()
        try:
            self._writer = GroupWriter(
                files, self._corrupt, self._counters, self._note_removed, shares_budget=shares_budget
            )
            files.record_settings()
            self._compressor = PageCompressor(codecs, commit_bytes(budget_bytes))
        except BaseException:
            files.close(is_complete=False)
            raise

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return self._files.record.page_sizes

    @property
    def note(self) -> bytes:
        """Return the note: bytes that a client stores in the index of the store. A new store has the note b"". The note
        is lost if the process ends without closing the store."""
        return self._files.index.note

    @note.setter
    def note(self, note: bytes) -> None:
        self._files.index.note = note

    @contextlib.contextmanager
    def writing(self) -> Iterator[GroupWriter]:
        """Yield the writer; other threads wait until the `with` block ends. Raises `StoreError` if the store is
        closed."""
        # checked first, because in a forked process another thread may hold the lock forever
        self._files.owner.require_here()
        with self._writing:
            self._files.require_open()
            yield self._writer

    def register_memory(self, memory: PageBuffer) -> None:
        """Do nothing, because files are read to and written from any memory."""

    def announce_close(self) -> None:
        """Announce that the store will be closed soon. A process that opens the store then waits instead of failing."""
        self._files.lock.announce_close()

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
                pending = self._pending_reads(pages, keys, buffers)
                for window in _windows(pending):
                    if time.monotonic() >= deadline_s:
                        break
                    for _, of_file in groupby(window, key=lambda one: one.entry.length):
                        for run in runs(of_file, lambda one: one.entry.slot):
                            for one in self._get(pages, run):
                                found[one.number] = True
                # The last key is noted first, so that the first key of the call becomes the most recently used.
                for one in reversed(pending):
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
                pages.index.touch(reversed(keys))  # reversed, so that the first key becomes the most recently used
        except io_errors as error:
            self._note_failed(error)

    def keep_until(self, keys: Sequence[bytes], until_s: float) -> None:
        """Count pages as used. Until `until_s`, a time of `time.monotonic`, the store evicts these pages only after all
        other pages. Absent keys are ignored. At most nine tenths of the stored bytes are protected in this way; see
        `UseOrder`."""
        check_keys(keys)
        try:
            with self.reading() as pages:
                pages.index.keep_until(reversed(keys), until_s)
        except io_errors as error:
            self._note_failed(error)

    def thread_read_errors(self) -> int:
        return self._counters.thread_read_errors

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        self._require_cipher()
        check_pages([key for key, _ in items], [page for _, page in items], self._codecs, writeable=False)
        return self._put(items, len, lambda absent: self._compressor.values(absent, lag), deadline_s)

    def get_value(self, key: bytes) -> bytes | None:
        self._require_cipher()
        check_keys([key])
        try:
            with self.reading() as pages:
                (entry,) = pages.index.locate([key])
                while entry is not None and key not in self._corrupt:
                    value = self._stored_value(pages, key, entry)
                    reason = value if isinstance(value, str) else self._codecs.value_fault(key, value)
                    if isinstance(value, bytes) and not reason:
                        return value
                    (now,) = pages.index.locate([key])
                    if now == entry:
                        self._note_corrupt(key, reason)
                    entry = now  # the slot was freed and used again during the read
        except io_errors as error:
            self._note_failed(error)
        return None

    def put_values(self, items: Sequence[tuple[bytes, bytes | memoryview]]) -> list[bool]:
        self._require_cipher()
        check_keys([key for key, _ in items])
        sound = list[tuple[bytes, HeaderAndPayload]]()
        for key, value in items:
            if reason := self._codecs.value_fault(key, value):
                log.warning("the store %s refuses a value: %s", self._files.path, reason)
                self._counters.add(corrupt=1)
            else:
                sound.append((key, HeaderAndPayload.of(value)))
        answers = self._put(sound, lambda value: page_bytes_of(value.header), _in_order, math.inf)
        stored = {key for (key, _), ok in zip(sound, answers, strict=True) if ok}
        return [key in stored for key, _ in items]

    def delete(self, keys: Sequence[bytes]) -> int:
        check_keys(keys)
        with self.writing() as writer:
            starts = range(0, len(keys), _DELETES_PER_COMMIT)
            return sum(writer.delete(keys[start : start + _DELETES_PER_COMMIT]) for start in starts)

    def stats(self) -> StoreStats:
        writer, budget_bytes = self._writer, self._files.record.budget_bytes
        now = {**writer.sizes._asdict(), "file_bytes": writer.file_bytes, "others_bytes": writer.others_bytes}
        now |= {"drive_bytes": self._files.drive_bytes, "open_seconds": int(time.monotonic() - self._opened_s)}
        now["read_only"] = writer.read_only
        return dataclasses.replace(self._counters.now, budget_bytes=budget_bytes, **now)

    def reading(self) -> AbstractContextManager[StoreFiles]:
        return self._files.reading()

    def verified_value(self, pages: StoreFiles, key: bytes, entry: Entry) -> bytes | str:
        """Return the stored value of a page, or the reason why it cannot be read or does not verify."""
        try:
            value = self._stored_value(pages, key, entry)
        except OSError as error:
            return f"cannot be read: {error}"
        return (isinstance(value, bytes) and self._codecs.verify_stored(key, value)) or value

    def faults(self, pages: StoreFiles, progress: Callable[[int], None] = lambda _: None) -> Iterator[Fault]:
        """Yield all inconsistencies. No thread may write during the call. Reads every byte, and compares pages, index
        and slots. `progress` is called with the length of each value. Raises `io_errors`.
        """
        entries, held = pages.index.entries(), pages.index.slot_keys()
        for key, entry in entries:
            progress(entry.value_bytes)
            value = self.verified_value(pages, key, entry)
            if isinstance(value, str):
                yield Fault(key, value)
        of_entries = {(*entry.length, entry.slot): key for key, entry in entries}
        if held != of_entries or sorted(pages.index.by_use()) != sorted(of_entries.values()):
            description = f"the use order and the slots name {len(held)} pages"
            yield Fault(None, f"{description}, but the index has {len(entries)}")
        found, slots = Slots(pages.slot_files, pages.record, pages.index.records()), pages.slots
        if found.num_misplaced:
            yield Fault(None, f"{found.num_misplaced} of {len(entries)} pages have no slot of their own in their file")
        if (found.sizes, found.used) != (slots.sizes, slots.used):
            yield Fault(None, f"counters {slots.sizes} differ from the index ({found.sizes}), or the used slots differ")

    def check(self) -> None:
        """Verify all values, the index and the counters. No thread may write during the call. Raises one `StoreCorrupt`
        with all violations."""
        try:
            with self.reading() as pages:
                found = [str(fault) for fault in self.faults(pages)]
        except io_errors as error:
            found = [f"the index cannot be read: {error}"]
        if found:
            raise StoreCorrupt(f"the store {self._files.path} has {len(found)} violation(s): {'; '.join(found)}", found)

    def keep_budget(self) -> None:
        """Evict pages until the other stores of the folder have their share of the common budget. Each `put` does this
        too."""
        with self.writing() as writer:
            writer.keep_budget()

    def evict_all(self) -> bool:
        with self.writing() as writer:
            writer.evict_to(0)
        return self.stats().entries == 0

    def compact(self) -> int:
        """Give free slots back to the file system. Returns the number of bytes by which the files became smaller."""
        with self.writing() as writer:
            before_bytes = writer.file_bytes
            writer.evict_to(self._files.record.budget_bytes)
            return max(0, before_bytes - writer.file_bytes)

    def sync(self) -> None:
        with self.writing() as writer:
            writer.sync()

    def reopen(self) -> bool:
        with self.writing() as writer:
            return writer.reopen()

    def close(self) -> None:
        if not self._files.owner.is_here:
            return
        with self._writing:
            if not self._files.closed:
                self._compressor.close()
                self._writer.close()

    def _stored_value(self, pages: StoreFiles, key: bytes, entry: Entry) -> bytes | str:
        """Return the unverified bytes of a value, or the reason why the slot does not have the value. Raises OSError if
        the disk fails."""
        payload = self._scratch.take(entry.length.slot_bytes)
        (header,) = self._read(pages, [(key, entry, payload)])
        return header if isinstance(header, str) else header + bytes(payload[: entry.payload_bytes])

    def _put(
        self,
        items: Sequence[tuple[bytes, T]],
        page_bytes: Callable[[T], int],
        encode: Callable[[Mapping[bytes, T]], Generator[HeaderAndPayload, None, None]],
        deadline_s: float,
    ) -> list[bool]:
        """Store the absent pages of `items`; `encode` yields their values, in order. Pages are committed in groups, the
        last keys first. If a call exceeds the budget, its later groups evict the pages of its first groups."""
        with self.writing() as writer:
            if writer.read_only:
                return [False] * len(items)
            # The last key is stored first, so that the first key of the call becomes the most recently used.
            pages = dict(reversed(items))
            present = dict(zip(pages, self.contains(list(pages)), strict=True))
            self._kept = {key for key, held in present.items() if held}
            self.touch([key for key in reversed(present) if present[key]])
            writer.delete_corrupt()  # `contains` already hides these pages, but the index still has them
            writer.begin_call()
            absent = {key: page for key, page in pages.items() if not present[key]}
            with contextlib.closing(encode(absent)) as values:
                for group in self._groups({key: page_bytes(page) for key, page in absent.items()}):
                    # Threads encode the next group while the current group is written.
                    if time.monotonic() >= deadline_s or not writer.put(group, values):
                        break
                    self._kept.update(group)
            return [key in self._kept for key, _ in items]

    def _groups(self, sizes: Mapping[bytes, int]) -> Iterator[list[bytes]]:
        """Divide keys, each with the bytes of its page, into groups, one for each commit."""
        max_bytes = commit_bytes(self._files.record.budget_bytes)
        group, group_bytes = list[bytes](), 0
        for key, page_bytes in sizes.items():
            slot_bytes = self._files.record.max_slot_bytes(page_bytes)
            if group and group_bytes + slot_bytes > max_bytes:
                yield group
                group, group_bytes = [], 0
            group.append(key)
            group_bytes += slot_bytes
        if group:
            yield group

    def _note_removed(self, keys: Sequence[bytes]) -> None:
        self._kept.difference_update(keys)
        if self._on_removed is not None:
            self._on_removed(keys)

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

    def _pending_reads(
        self, pages: StoreFiles, keys: Sequence[bytes], buffers: Sequence[PageBuffer]
    ) -> list[_PendingRead]:
        """Look up the pages. Leave out absent pages, corrupt pages, and pages whose size differs from that of their
        buffer."""
        return [
            _PendingRead(number, key, entry, buffer)
            for number, (key, entry, buffer) in enumerate(zip(keys, pages.index.locate(keys), buffers, strict=True))
            if entry is not None and entry.page_bytes == len(buffer) and key not in self._corrupt
        ]

    def _get(self, pages: StoreFiles, run: Sequence[_PendingRead]) -> Iterator[_PendingRead]:
        """Fill the buffers of pages in consecutive slots; yields the pages whose buffer holds verified bytes."""
        try:
            for one, reason in zip(run, self._decode(pages, run), strict=True):
                if not reason or self._retry_read(pages, one):
                    yield one
        except OSError as error:
            if len(run) == 1:
                self._note_failed(error)
            else:
                for one in run:
                    yield from self._get(pages, [one])

    def _retry_read(self, pages: StoreFiles, before: _PendingRead) -> bool:
        """Look up and read a second time a page whose verification failed. Returns whether its buffer has the page. The
        page is recorded as corrupt if it is still in the same slot. Raises OSError if the disk fails."""
        for now in self._pending_reads(pages, [before.key], [before.buffer]):
            (reason,) = self._decode(pages, [now])
            if not reason:
                return True
            if pages.index.locate([now.key]) == [now.entry]:
                self._note_corrupt(now.key, reason)
        return False

    def _decode(self, pages: StoreFiles, run: Sequence[_PendingRead]) -> list[str]:
        """Read and decode pages in consecutive slots. Returns for each page "" if the buffer has the verified page,
        otherwise the reason. Raises OSError if the disk fails."""
        scratch, reads = self._scratch.take(len(run) * run[0].entry.length.slot_bytes), list[_Read]()
        for _, key, entry, buffer in run:
            payload = buffer.data
            # A raw page with an aligned buffer is read directly into this buffer; any other payload is read into
            # scratch memory.
            if entry.payload_bytes != len(buffer) or not is_aligned(buffer):
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
        """Read payloads in consecutive slots. Returns for each page the header of its value, or the reason why the slot
        does not have the page. Raises OSError if the disk fails."""
        file = pages.slot_files.get(run[0][1].length)
        if file is None:
            return ["there are no slots for such pages"] * len(run)
        blocks = file.read([SlotRead(entry.slot, payload, entry.payload_bytes) for _, entry, payload in run])
        return [_header(block, key) for (key, _, _), block in zip(run, blocks, strict=True)]


def _in_order(values: Mapping[bytes, HeaderAndPayload]) -> Generator[HeaderAndPayload, None, None]:
    yield from values.values()


def _header(block: memoryview | None, key: bytes) -> bytes | str:
    """Return the header of the value in a slot, or the reason why the slot does not have the page of `key`."""
    if block is None:
        return "its slot is cut short"
    found = SlotBlock.unpack(block)
    if found is None:
        return "its slot holds no page"
    return found.header if found.key == key else "its slot holds another page"


def _windows(pending: Sequence[_PendingRead]) -> Iterator[list[_PendingRead]]:
    """Divide pages, in the order given, into windows. The pages of a window are read together, sorted by file and
    slot."""
    window, window_bytes = list[_PendingRead](), 0
    for one in pending:
        if window and (window_bytes + len(one.buffer) > _WINDOW_BYTES or len(window) == MAX_RUN):
            yield sorted(window, key=_by_slot)
            window, window_bytes = [], 0
        window.append(one)
        window_bytes += len(one.buffer)
    if window:
        yield sorted(window, key=_by_slot)


def _by_slot(pending: _PendingRead) -> tuple[SlotLength, int]:
    return pending.entry.length, pending.entry.slot
