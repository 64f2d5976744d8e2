"""What an operator does to a store: describe it, list, verify and repair it, shrink it, carry its pages elsewhere.

Needs no engine: a store's own records say what it is. Values pass as they are stored, so an encrypted store can be
verified and copied without its key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hicache.storage.base import Durability, StoreError
from hicache.storage.check import Violation, violations
from hicache.storage.cipher import PageCipher
from hicache.storage.directory import STORE_FILE, writer_of
from hicache.storage.filters import PageFormat
from hicache.storage.header import HeaderAndPayload
from hicache.storage.lmdb_reader import LmdbPageReader, ReaderFiles
from hicache.storage.lmdb_store import LmdbPageStore
from hicache.storage.lookup import check_keys
from hicache.storage.rebuild import Progress
from hicache.storage.records import FORMAT, KEY_ID_FIELD, identity_without_key
from hicache.storage.store_files import read_records

_PAGES_AT_ONCE = 8


@dataclass(frozen=True)
class StoreDescription:
    """What a store says of itself, and its sizes now. `key_id` is "" if pages are not encrypted. `writer_pid`: see
    `writer_of`."""

    path: Path
    format: int
    identity: Mapping[str, str | int]
    formats: tuple[PageFormat, ...]
    level: int
    durability: Durability
    budget_bytes: int
    key_id: str
    entries: int
    live_bytes: int
    raw_bytes: int
    file_bytes: int
    writer_pid: int | None

    @property
    def encrypted(self) -> bool:
        return bool(self.key_id)


@dataclass(frozen=True)
class PageEntry:
    """A page of `page_bytes`, as the index says. `codec`: "raw" or "zstd"."""

    key: bytes
    page_bytes: int
    stored_bytes: int
    codec: str


@dataclass(frozen=True)
class Fault:
    """A violation. `key` None: an index record or a counter. `action`: "" without repair, "dropped", "index rebuilt",
    "kept" if the store could not be changed."""

    key: bytes | None
    reason: str
    action: str


@dataclass(frozen=True)
class VerifyReport:
    """How many pages were verified, the sum of their stored sizes, and what was wrong."""

    pages: int
    bytes: int
    faults: tuple[Fault, ...]


def describe(path: str | os.PathLike[str]) -> StoreDescription:
    """Describe a store, which another process may be writing. Raises `StoreError` and its subclasses."""
    files = ReaderFiles(Path(path))
    try:
        stored, settings = files.identity, files.settings
        return StoreDescription(
            path=Path(path),
            format=FORMAT,
            identity=identity_without_key(stored.identity),
            formats=settings.formats,
            level=settings.level,
            durability=settings.durability,
            budget_bytes=settings.budget_bytes,
            key_id=stored.key_id,
            **files.sizes()._asdict(),
            writer_pid=writer_of(Path(path)),
        )
    finally:
        files.close()


def store_folders(path: str | os.PathLike[str]) -> list[Path]:
    """The directories in `path` that hold a store, by name; none where `path` holds one itself, or cannot be read."""
    try:
        folders = [] if (Path(path) / STORE_FILE).exists() else sorted(Path(path).iterdir())
        return [folder for folder in folders if (folder / STORE_FILE).is_file()]
    except OSError:
        return []


def open_existing(
    path: str | os.PathLike[str], *, cipher: PageCipher | None = None, progress: Progress | None = None
) -> LmdbPageStore:
    """Open a store for writing by what it says of itself. Raises `StoreError` and its subclasses.

    An encrypted store opens without `cipher` too: then its pages cannot be put or read; everything else here works.
    `progress`: see `LmdbPageStore`.
    """
    stored, settings = read_records(Path(path))
    if cipher is not None:
        stored.require(Path(path), replace(stored, identity={**stored.identity, KEY_ID_FIELD: cipher.key_id}))
    return LmdbPageStore.of_record(Path(path), stored, settings, cipher, progress)


def list_pages(store: LmdbPageStore | LmdbPageReader, *, newest: bool, limit: int | None) -> Iterator[PageEntry]:
    """Least recently used first, or `newest` first; at most `limit`."""
    with store.stored.reading() as pages:
        keys = [key for _, key in pages.index.by_use(newest=newest, limit=limit)]
        entries = pages.index.locate(keys)
    for key, entry in zip(keys, entries, strict=True):
        if entry is not None:
            codec = "raw" if entry.payload_bytes >= entry.page_bytes else "zstd"
            yield PageEntry(key, entry.page_bytes, entry.value_bytes, codec)


def verify(
    store: LmdbPageStore, progress: Callable[[int, int], None] | None = None, *, repair: bool = False
) -> VerifyReport:
    """Verify every page, the index and the slots. `progress` is called with pages done and pages in all.

    With `repair` pages that do not verify are deleted, and an index that disagrees with the slots is built anew.
    """
    sizes: list[int] = []
    with store.writing, store.stored.reading() as pages:
        total = pages.index.num_pages()

        def note(value_bytes: int) -> None:
            sizes.append(value_bytes)
            if progress is not None:
                progress(len(sizes), max(total, len(sizes)))

        found = list(violations(pages, store.slots, store.stored, note))
    actions = _repair(store, found) if repair else [""] * len(found)
    faults = (Fault(fault.key, fault.reason, action) for fault, action in zip(found, actions, strict=True))
    return VerifyReport(len(sizes), sum(sizes), tuple(faults))


def pages(store: LmdbPageStore | LmdbPageReader) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values as they are stored, least recently used first; only values that verify.

    Of a store in use, pages that are used meanwhile may come twice, and pages stored meanwhile not at all.
    """
    stored = store.stored
    tick = 0
    for _ in range(2):  # pages used during the first round moved behind its end
        with stored.reading() as opened:
            end = opened.index.totals().next_tick
        while tick < end:
            with stored.reading() as opened:
                part = opened.index.by_use(tick, limit=_PAGES_AT_ONCE)
            for _, key in part:
                with stored.reading() as opened:
                    (entry,) = opened.index.locate([key])
                    value = "" if entry is None else stored.value(opened, key, entry)
                if isinstance(value, bytes):
                    yield key, value
            tick = part[-1][0] + 1 if part else end


def put_values(store: LmdbPageStore, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
    """Store values as `pages` gave them, from a store of the same identity; the last is the most recently used.

    True: stored, though a later one may have evicted it. False: the value does not verify here, or a write failed. A
    key that is present keeps its value and counts as used.
    """
    check_keys([key for key, _ in items])
    with store.writing:
        values = {key: value for key, value in items if not store.stored.verify(key, value)}
        present = dict(zip(values, store.contains(list(values)), strict=True))
        store.touch([key for key in reversed(values) if present[key]])
        store.writer.apply_access_log()
        kept = {key for key in values if present[key] or store.put_value(key, HeaderAndPayload.of(values[key]))}
    return [key in kept for key, _ in items]


def evict(store: LmdbPageStore, to_bytes: int) -> int:
    """Evict the least recently used pages until the store needs at most `to_bytes`, and return the rest to the file
    system; returns how many pages were evicted."""
    if to_bytes < 0:
        raise StoreError(f"{to_bytes=}: a store cannot need less than nothing; use 0 to empty it")
    with store.writing:
        return store.writer.evict_to(to_bytes)


def _repair(store: LmdbPageStore, found: Sequence[Violation]) -> list[str]:
    """Rebuild an index that is wrong, and delete what does not verify then; what was done about each violation."""
    bad = [violation.key for violation in found if violation.key is not None]
    with store.writing:
        if len(bad) < len(found):
            store.writer.rebuild()
        with store.stored.reading() as pages:
            entries = zip(bad, pages.index.locate(bad), strict=True)
            left = [key for key, entry in entries if entry and isinstance(store.stored.value(pages, key, entry), str)]
        store.writer.drop(left)
        if store.writer.read_only:
            return ["kept"] * len(found)
    return ["dropped" if violation.key in left else "index rebuilt" for violation in found]
