"""The commands of an operator for a store: describe, list, verify, repair, evict.

These functions need no engine, because each store has a record of its identity and settings. The checksum covers the
encrypted bytes, so an encrypted store can be verified without its key.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hicache.storage.base import Durability, StoreError, StoreLocked
from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFormat
from hicache.storage.lmdb_store import Fault, LmdbPageStore
from hicache.storage.lmdb_writer import GroupWriter
from hicache.storage.records import FORMAT, KEY_ID_FIELD
from hicache.storage.store_files import Progress, read_record
from hicache.storage.store_folder import disk_bytes, is_store_name, last_use_s, store_at, store_folders


@dataclass(frozen=True)
class StoreDescription:
    """Identity, settings and present sizes of a store. `key_id` is "" if pages are not encrypted.

    `writer_pid`: the id of the process that has the store open, 0 if the id is unknown, None if no process has the
    store open. If a process has the store open, `entries`, `live_bytes` and `raw_bytes` are None, and `file_bytes` does
    not include the index. `last_use_s`: see `store_folder`.
    """

    path: Path
    format: int
    identity: Mapping[str, str | int]
    formats: tuple[PageFormat, ...]
    level: int
    durability: Durability
    budget_bytes: int
    key_id: str
    entries: int | None
    live_bytes: int | None
    raw_bytes: int | None
    file_bytes: int
    writer_pid: int | None
    last_use_s: float

    @property
    def encrypted(self) -> bool:
        return bool(self.key_id)


@dataclass(frozen=True)
class PageEntry:
    """A page according to the index; sizes in bytes. `codec`: "raw" or "zstd"."""

    key: bytes
    page_bytes: int
    stored_bytes: int
    codec: str


@dataclass(frozen=True)
class VerifyReport:
    """Number of verified pages, the sum of their stored sizes in bytes, and the faults found."""

    pages: int
    bytes: int
    faults: tuple[Fault, ...]


def describe(path: str | os.PathLike[str]) -> StoreDescription:
    """Describe a store, or the only store in a folder; another process may have it open. Raises `StoreError` and its
    subclasses."""
    path = store_at(path)
    record, writer_pid, used_s = read_record(path), None, last_use_s(path)
    sizes: dict[str, Any] = dict.fromkeys(("entries", "live_bytes", "raw_bytes"))
    try:
        with contextlib.closing(open_existing(path, keeps_index=True)) as store:
            now = store.stats()
        sizes, file_bytes = {name: getattr(now, name) for name in sizes}, now.file_bytes
    except StoreLocked as error:
        writer_pid = error.pid
        file_bytes = disk_bytes(path)
    settings = dict(vars(record))
    identity = {name: value for name, value in settings.pop("identity").items() if name != KEY_ID_FIELD}
    return StoreDescription(
        path=path,
        format=FORMAT,
        identity=identity,
        **settings,
        key_id=record.key_id,
        **sizes,
        file_bytes=file_bytes,
        writer_pid=writer_pid,
        last_use_s=used_s,
    )


def bytes_to_evict(path: str | os.PathLike[str], budget_bytes: int) -> int:
    """Return the number of bytes by which the stores of a path exceed `budget_bytes`. Returns 0 unless one of the
    stores was last opened with more than twice this budget."""
    stores = [folder for folder in store_folders(path) if is_store_name(folder.name)]
    budgets = [0]
    for folder in stores:
        with contextlib.suppress(StoreError):  # a damaged record
            budgets.append(read_record(folder).budget_bytes)
    return max(0, sum(map(disk_bytes, stores)) - budget_bytes) if 2 * budget_bytes < max(budgets) else 0


def open_existing(
    path: str | os.PathLike[str],
    *,
    cipher: PageCipher | None = None,
    progress: Progress | None = None,
    keeps_index: bool = False,
) -> LmdbPageStore:
    """Open a store, or the only store in a folder, for writing, with its recorded identity and settings. Raises
    `StoreError` and its subclasses.

    An encrypted store can be opened without `cipher`. Then pages cannot be put or read, but all functions of this
    module work. `progress`, `keeps_index`: see `LmdbPageStore`.
    """
    path = store_at(path)
    record = read_record(path)
    return LmdbPageStore(path, cipher=cipher, progress=progress, keeps_index=keeps_index, **vars(record))


def list_pages(store: LmdbPageStore, *, newest: bool = False, limit: int | None = None) -> Iterator[PageEntry]:
    """Yield the pages, least recently used first, or `newest` first; at most `limit`."""
    with store.reading() as pages:
        keys = pages.index.by_use(newest=newest, limit=limit)
        entries = pages.index.locate(keys)
    for key, entry in zip(keys, entries, strict=True):
        if entry is not None:
            codec = "raw" if entry.payload_bytes >= entry.page_bytes else "zstd"
            yield PageEntry(key, entry.page_bytes, entry.value_bytes, codec)


def verify(
    store: LmdbPageStore, progress: Callable[[int, int], None] | None = None, *, repair: bool = False
) -> VerifyReport:
    """Verify every page, the index and the slots. `progress` is called with the number of pages verified so far and the
    number of all pages.

    With `repair` a wrong index is rebuilt from the slots, and pages that still do not verify are deleted.
    """
    sizes: list[int] = []
    with store.writing() as writer:
        with store.reading() as pages:
            total = pages.index.num_pages()

            def note(value_bytes: int) -> None:
                sizes.append(value_bytes)
                if progress is not None:
                    progress(len(sizes), max(total, len(sizes)))

            faults = list(store.faults(pages, note))
        if repair and faults:
            faults = _repaired(store, writer, faults)
    return VerifyReport(len(sizes), sum(sizes), tuple(faults))


def evict(store: LmdbPageStore, to_bytes: int) -> int:
    """Evict the least recently used pages until the store needs at most `to_bytes`, and return the freed space to the
    file system. Returns the number of evicted pages."""
    if to_bytes < 0:
        raise StoreError(f"{to_bytes=}: a store cannot need less than nothing; use 0 to empty it")
    with store.writing() as writer:
        return writer.evict_to(to_bytes)


def _repaired(store: LmdbPageStore, writer: GroupWriter, faults: Sequence[Fault]) -> list[Fault]:
    """Rebuild a wrong index, and delete pages that still fail verification. Returns each fault with the action that was
    taken."""
    left = faults
    if any(fault.key is None for fault in faults):
        writer.rebuild()
        with store.reading() as pages:
            left = list(store.faults(pages))
    writer.delete([fault.key for fault in left if fault.key is not None])
    if writer.read_only:
        return [replace(fault, action="kept") for fault in faults]
    lost = {fault.key for fault in faults if fault.key is not None and store.contains([fault.key]) == [False]}
    return [replace(fault, action="dropped" if fault.key in lost else "index rebuilt") for fault in faults]
