"""What an operator does to a store: describe it, list, verify and repair it, shrink it, carry its pages elsewhere.

Needs no engine: a store's own records say what it is. Values pass as they are stored, so an encrypted store can be
verified and copied without its key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from hicache.storage.base import Durability, StoreError
from hicache.storage.check import Verifier, Violation
from hicache.storage.cipher import PageCipher
from hicache.storage.counters import Counters, Counts
from hicache.storage.directory import DATA_FILE, writer_of
from hicache.storage.filters import PageFormat
from hicache.storage.header import MAGIC, is_compressed, page_bytes_of
from hicache.storage.lmdb_reader import LmdbPageReader, ReaderEnv
from hicache.storage.lmdb_store import LmdbPageStore
from hicache.storage.lmdb_writer import GroupWriter
from hicache.storage.lookup import check_keys
from hicache.storage.memory import aligned_buffer
from hicache.storage.optional_packages import require_packages
from hicache.storage.records import FORMAT, KEY_ID_FIELD, identity_without_key
from hicache.storage.tables import TICK, Age, Tables, Totals, entry_bytes
from hicache.storage.value_file import ValueLocation
from hicache.storage.write_transaction import WriteTransaction

_PAGES_AT_ONCE, _BYTES_AT_ONCE = 8, 64 << 20  # of values in memory, or a single larger one
_KEYS_AT_ONCE = 64


@dataclass(frozen=True)
class StoreDescription:
    """What a store says of itself, and its sizes now. `has_slots`: values are in slot files. `key_id` is "" if pages
    are not encrypted. `writer_pid`: see `writer_of`."""

    path: Path
    format: int
    identity: Mapping[str, str | int]
    formats: tuple[PageFormat, ...]
    has_slots: bool
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
    """A page of `page_bytes`, as the index says. `codec`: "raw" or "zstd"; "unreadable" for what is no page's value;
    "gone" if it was removed meanwhile."""

    key: bytes
    page_bytes: int
    stored_bytes: int
    codec: str


@dataclass(frozen=True)
class Fault:
    """A violation. `key` None: an index record or a counter. `action`: "" without repair, "dropped", "index rebuilt",
    "kept" if the store could not be changed; "index rescued" after `rescue` had to rebuild it."""

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
    require_packages()
    env = ReaderEnv(Path(path), 1, Counters())
    try:
        sizes = env.read(lambda txn, tables: tables.sizes(txn), None)
        if sizes is None:
            raise StoreError(f"cannot read the store {path}; verify it")
        stored, settings = env.identity, env.settings
        return StoreDescription(
            path=Path(path),
            format=FORMAT,
            identity=identity_without_key(stored.identity),
            formats=settings.formats,
            has_slots=stored.has_slots,
            level=settings.level,
            durability=settings.durability,
            budget_bytes=settings.budget_bytes,
            key_id=stored.key_id,
            **sizes._asdict(),
            writer_pid=writer_of(Path(path)),
        )
    finally:
        env.close()


def store_folders(path: str | os.PathLike[str]) -> list[Path]:
    """The directories in `path` that hold a store, by name; none where `path` holds one itself, or cannot be read."""
    try:
        folders = [] if (Path(path) / DATA_FILE).exists() else sorted(Path(path).iterdir())
        return [folder for folder in folders if (folder / DATA_FILE).is_file()]
    except OSError:
        return []


def open_existing(path: str | os.PathLike[str], *, cipher: PageCipher | None = None) -> LmdbPageStore:
    """Open a store for writing by what it says of itself. Raises `StoreError` and its subclasses.

    An encrypted store opens without `cipher` too: then its pages cannot be put or read; everything else here works.
    """
    require_packages()
    env = ReaderEnv(Path(path), 1, Counters())
    stored, settings = env.identity, env.settings
    env.close()
    if cipher is not None:
        stored.require(Path(path), replace(stored, identity={**stored.identity, KEY_ID_FIELD: cipher.key_id}))
    return LmdbPageStore.of_record(Path(path), stored, settings, cipher)


def list_pages(store: LmdbPageStore | LmdbPageReader, *, newest: bool, limit: int | None) -> Iterator[PageEntry]:
    """Least recently used first, or `newest` first; at most `limit`. `StoreError` when the store cannot be read."""
    env = store.stored_values.env
    listed: list[tuple[bytes, Age]] | None = env.read(partial(_in_use_order, newest=newest, limit=limit), None)
    if listed is None:
        raise StoreError("the store cannot be read")
    for start in range(0, len(listed), _KEYS_AT_ONCE):
        part = listed[start : start + _KEYS_AT_ONCE]
        codecs = env.read(partial(_codecs, keys=[key for key, _ in part]), ["unreadable"] * len(part))
        for (key, age), codec in zip(part, codecs, strict=True):
            yield PageEntry(key, age.page_bytes, age.value_bytes, codec)


def verify(
    store: LmdbPageStore, progress: Callable[[int, int], None] | None = None, *, repair: bool = False
) -> VerifyReport:
    """Verify every value, index record and counter. `progress` is called with pages done and pages in all.

    With `repair` values that do not verify are deleted, and indexes and counters that disagree are rebuilt from the
    remaining pages, in their use order as far as it is known. Raises `StoreIndexDamaged` for an index that must not be
    used: then close the store and `rescue` it.
    """
    parts = store.parts
    sizes: list[int] = []
    with parts.writing:
        total = parts.env.sizes().entries

        def note(value_bytes: int) -> None:
            sizes.append(value_bytes)
            if progress is not None:
                progress(len(sizes), max(total, len(sizes)))

        found = parts.env.violations(store.stored_values.verifier, note)
        actions = _repair(parts.writer, found) if repair else [""] * len(found)
    faults = (Fault(fault.key, fault.reason, action) for fault, action in zip(found, actions, strict=True))
    return VerifyReport(len(sizes), sum(sizes), tuple(faults))


def pages(store: LmdbPageStore | LmdbPageReader) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values as they are stored, least recently used first; only values that verify.

    Of a store in use, pages that are used meanwhile may come twice, and pages stored meanwhile not at all.
    """
    stored = store.stored_values
    buffer = aligned_buffer(stored.verifier.max_value_bytes)
    tick = 0
    nothing: list[tuple[bytes, bytes]] = []
    for _ in range(2):  # pages used during the first round moved behind its end
        end = stored.env.read(_next_tick, 0)
        while tick < end:
            read_some = partial(_some_pages, tick=tick, verifier=stored.verifier, buffer=buffer)
            tick, batch = stored.env.read(read_some, (end, nothing))
            yield from batch


def put_values(store: LmdbPageStore, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
    """Store values as `pages` gave them, from a store of the same identity; the last is the most recently used.

    True: stored, as `put` does. False: the value does not verify here, or a write failed. A key that is present keeps
    its value and counts as used.
    """
    check_keys([key for key, _ in items])
    parts = store.parts
    kept: set[bytes] = set()
    with parts.writing:
        valid = {key: value for key, value in items if not parts.codecs.verify_stored(key, value)}
        present = [k for k, held in zip(valid, store.contains(list(valid)), strict=True) if held]
        parts.writer.change(lambda transaction: _touch(transaction, present))
        kept.update(present)
        group: list[tuple[bytes, bytes]] = []
        for key, value in valid.items():
            if key in kept:
                continue
            if group and sum(len(v) for _, v in group) + len(value) > parts.budget.commit_bytes:
                kept.update(_put_group(store, group))
                group = []
            group.append((key, value))
        kept.update(_put_group(store, group))
        kept = {k for k, held in zip(valid, store.contains(list(valid)), strict=True) if held and k in kept}
    return [key in kept for key, _ in items]


def evict(store: LmdbPageStore, to_bytes: int) -> int:
    """Evict the least recently used pages until the store needs at most `to_bytes`, then return the rest to the file
    system; returns how many pages were evicted."""
    if to_bytes < 0:
        raise StoreError(f"{to_bytes=}: a store cannot need less than nothing; use 0 to empty it")
    parts = store.parts
    with parts.writing:
        parts.writer.apply_access_log()
        num_evicted = parts.writer.evict_to(to_bytes)
        parts.writer.compact()
    return num_evicted


def _in_use_order(txn: Any, tables: Tables, *, newest: bool, limit: int | None) -> list[tuple[bytes, Age]] | None:
    with txn.cursor(db=tables.recency) as cursor:
        steps = cursor.iterprev(keys=False) if newest else cursor.iternext(keys=False)
        keys = [bytes(key) for key in islice(steps, limit)]
    return [(key, Age.unpack(txn.get(key, db=tables.ages)) or Age(0, 0, 0)) for key in keys]


def _codecs(txn: Any, tables: Tables, *, keys: list[bytes]) -> list[str]:
    # One key at a time: for several, `locate` has the kernel read the values.
    return [_codec(tables, tables.locate(txn, [key])[0]) for key in keys]


def _codec(tables: Tables, location: ValueLocation | None) -> str:
    if location is None:
        return "gone"
    try:
        header = tables.header(location)
    except OSError:
        return "unreadable"
    if header is None or header[: len(MAGIC)] != MAGIC:
        return "unreadable"
    return "zstd" if is_compressed(header) else "raw"


def _next_tick(txn: Any, tables: Tables) -> int:
    return Totals.read(txn, tables.meta).next_tick


def _some_pages(
    txn: Any, tables: Tables, *, tick: int, verifier: Verifier, buffer: memoryview
) -> tuple[int, list[tuple[bytes, bytes]]]:
    """The pages of the next few ticks from `tick` on, and the tick to go on from."""
    with txn.cursor(db=tables.recency) as cursor:
        if not cursor.set_range(TICK.pack(tick)):
            return _next_tick(txn, tables), []
        records = [(TICK.unpack(packed)[0], bytes(key)) for packed, key in islice(cursor, _PAGES_AT_ONCE)]
    found, found_bytes = list[tuple[bytes, bytes]](), 0
    for (this, key), location in zip(records, tables.locate(txn, [key for _, key in records]), strict=True):
        value = verifier.read(tables, key, location, buffer)
        if isinstance(value, str):
            continue
        if found and found_bytes + len(value) > _BYTES_AT_ONCE:
            return this, found
        found.append((key, bytes(value)))
        found_bytes += len(value)
    return records[-1][0] + 1, found


def _touch(transaction: WriteTransaction, keys: Sequence[bytes]) -> bool:
    for key in keys:
        transaction.touch(key)
    return True


def _put_group(store: LmdbPageStore, group: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    parts = store.parts
    max_bytes = sum(entry_bytes(len(value), parts.budget.psize) for _, value in group)
    if not group or not parts.writer.put(group, max_bytes):
        return []
    stored_bytes = sum(len(value) for _, value in group)
    raw_bytes = sum(page_bytes_of(value) for _, value in group)
    parts.counters.add(Counts(puts=len(group), put_bytes_raw=raw_bytes, put_bytes_stored=stored_bytes))
    return [key for key, _ in group]


def _repair(writer: GroupWriter, found: Sequence[Violation]) -> list[str]:
    """Delete and rebuild in one commit; what was done about each violation."""
    bad = [violation.key for violation in found if violation.key is not None]
    if len(bad) < len(found):
        done = writer.change(lambda transaction: transaction.rebuild(bad))
    else:
        done = writer.change(lambda transaction: _delete(transaction, bad))
    return ["kept" if done is None else "index rebuilt" if v.key is None else "dropped" for v in found]


def _delete(transaction: WriteTransaction, keys: Sequence[bytes]) -> bool:
    for key in keys:
        transaction.delete(key)
    return True
