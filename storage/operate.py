"""What an operator does to a store: look at it, verify and mend it, shrink it, carry its pages elsewhere.

Needs no engine: a store's own record says what it is. Values pass as they are stored, so an encrypted store can be
verified and copied without its key. Owns nothing. May import the standard library and its siblings.
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
from hicache.storage.directory import writer_of
from hicache.storage.filters import PageFormat
from hicache.storage.header import page_bytes_of
from hicache.storage.lmdb_reader import LmdbPageReader, ReaderEnv
from hicache.storage.lmdb_record import FORMAT, KEY_ID_FIELD
from hicache.storage.lmdb_store import LmdbPageStore
from hicache.storage.lmdb_writer import GroupWriter
from hicache.storage.lookup import check_keys, sizes_of
from hicache.storage.lru import TICK, Ledger, Tables, Totals, entry_bytes
from hicache.storage.memory import aligned_buffer
from hicache.storage.packages import require_packages

_PAGES_AT_ONCE, _BYTES_AT_ONCE = 8, 64 << 20  # or one page
_INDEX_RECORDS_AT_ONCE = 4096


@dataclass(frozen=True)
class StoreDescription:
    """What a store says of itself, and its sizes now. `key_id` is "" where pages are not encrypted."""

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
class Fault:
    """Something that did not hold. `key` None: an index or a counter. `action`: "" without repair, "dropped", "index
    rebuilt", or "kept" when the store could not be changed; "tables rebuilt" where they had to be before all else."""

    key: bytes | None
    reason: str
    action: str


@dataclass(frozen=True)
class VerifyReport:
    """How many pages were looked at, the sum of their sizes as stored, and what was wrong."""

    pages: int
    bytes: int
    faults: tuple[Fault, ...]


def describe(path: str | os.PathLike[str]) -> StoreDescription:
    """Look at a store, which another process may be writing. Raises `StoreError` and its kinds."""
    require_packages()
    env = ReaderEnv(Path(path), 1, Counters())
    try:
        sizes = env.read(sizes_of, None)
        if sizes is None:
            raise StoreError(f"cannot read the store {path}; verify it")
        stored, settings = env.identity, env.settings
        return StoreDescription(
            path=Path(path),
            format=FORMAT,
            identity={name: value for name, value in stored.identity.items() if name != KEY_ID_FIELD},
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


def open_existing(path: str | os.PathLike[str], *, cipher: PageCipher | None = None) -> LmdbPageStore:
    """Open a store for writing with what it says of itself. Raises `StoreError` and its kinds.

    An encrypted one opens without `cipher` too: then its pages cannot be put or read, all else here works.
    """
    require_packages()
    env = ReaderEnv(Path(path), 1, Counters())
    stored, settings = env.identity, env.settings
    env.close()
    if cipher is not None:
        identity = {**stored.identity, KEY_ID_FIELD: cipher.key_id}
        stored.require(Path(path), replace(stored, identity=identity))
    return LmdbPageStore.of_record(Path(path), stored, settings, cipher)


def verify(
    store: LmdbPageStore, progress: Callable[[int, int], None] | None = None, *, repair: bool = False
) -> VerifyReport:
    """Look at every value, index record and counter. `progress` is told pages done and pages in all.

    With `repair` values that do not verify are dropped, and indexes and counters that disagree are built anew from the
    pages that are left; their use order is kept as far as it is known. Raises `StoreTreesDamaged` for tables that must
    not be walked: then close the store and `rescue` it.
    """
    parts = store.parts
    sizes: list[int] = []
    with parts.writing:
        total = parts.env.sizes().entries

        def seen(value_bytes: int) -> None:
            sizes.append(value_bytes)
            if progress is not None:
                progress(len(sizes), max(total, len(sizes)))

        found = parts.env.faults(store.sealed.verifier, seen)
        actions = _mend(parts.writer, found) if repair else [""] * len(found)
    faults = (Fault(fault.key, fault.reason, action) for fault, action in zip(found, actions, strict=True))
    return VerifyReport(len(sizes), sum(sizes), tuple(faults))


def pages(store: LmdbPageStore | LmdbPageReader) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values as they are stored, least recently used first; only values that verify.

    Of a store that is in use, pages that are used meanwhile may come twice, and ones stored meanwhile not at all.
    """
    sealed = store.sealed
    room = aligned_buffer(sealed.verifier.max_value_bytes)
    tick = 0
    nothing: list[tuple[bytes, bytes]] = []
    for _ in range(2):  # what was used during the first round has come behind its end
        end = sealed.env.read(_next_tick, 0)
        while tick < end:
            some = partial(_some_pages, tick=tick, verifier=sealed.verifier, room=room)
            tick, batch = sealed.env.read(some, (end, nothing))
            yield from batch


def put_values(store: LmdbPageStore, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
    """Store values as `pages` gave them, from a store of the same identity; the last is the most recently used.

    True: stored, as `put` does. False: the value does not verify here, or the medium refused it. A key that is present
    keeps its value and counts as used.
    """
    check_keys([key for key, _ in items])
    parts = store.parts
    kept: set[bytes] = set()
    with parts.writing:
        sound = {key: value for key, value in items if not parts.codecs.verify_stored(key, value)}
        present = [k for k, held in zip(sound, store.contains(list(sound)), strict=True) if held]
        parts.writer.change(lambda ledger: _touch(ledger, present))
        kept.update(present)
        group: list[tuple[bytes, bytes]] = []
        for key, value in sound.items():
            if key in kept:
                continue
            if group and sum(len(v) for _, v in group) + len(value) > parts.budget.commit_bytes:
                kept.update(_put_group(store, group))
                group = []
            group.append((key, value))
        kept.update(_put_group(store, group))
        kept = {k for k, held in zip(sound, store.contains(list(sound)), strict=True) if held and k in kept}
    return [key in kept for key, _ in items]


def evict(store: LmdbPageStore, to_bytes: int) -> int:
    """Drop the least recently used pages until the store needs no more than `to_bytes`, then give the rest back to the
    file system; returns how many pages were dropped."""
    if to_bytes < 0:
        raise StoreError(f"{to_bytes=}: a store cannot need less than nothing; use 0 to empty it")
    parts = store.parts
    with parts.writing:
        parts.writer.fold()
        num_evicted = parts.writer.evict_to(to_bytes)
        parts.writer.compact()
    return num_evicted


def _next_tick(txn: Any, tables: Tables) -> int:
    return Totals.read(txn, tables.meta).next_tick


def _some_pages(
    txn: Any, tables: Tables, *, tick: int, verifier: Verifier, room: memoryview
) -> tuple[int, list[tuple[bytes, bytes]]]:
    """The pages of the next few ticks from `tick` on, and the tick to go on from."""
    with txn.cursor(db=tables.recency) as cursor:
        if not cursor.set_range(TICK.pack(tick)):
            return _next_tick(txn, tables), []
        records = [(TICK.unpack(packed)[0], bytes(key)) for packed, key in islice(cursor, _PAGES_AT_ONCE)]
    found, found_bytes = list[tuple[bytes, bytes]](), 0
    for (this, key), place in zip(records, tables.places(txn, [key for _, key in records]), strict=True):
        value = verifier.value(tables, key, place, room)
        if isinstance(value, str):
            continue
        if found and found_bytes + len(value) > _BYTES_AT_ONCE:
            return this, found
        found.append((key, bytes(value)))
        found_bytes += len(value)
    return records[-1][0] + 1, found


def _touch(ledger: Ledger, keys: Sequence[bytes]) -> bool:
    for key in keys:
        ledger.touch(key)
    return True


def _put_group(store: LmdbPageStore, group: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    parts = store.parts
    most_bytes = sum(entry_bytes(len(value), parts.budget.psize) for _, value in group)
    if not group or not parts.writer.put(group, most_bytes):
        return []
    stored_bytes = sum(len(value) for _, value in group)
    raw_bytes = sum(page_bytes_of(value) for _, value in group)
    parts.counters.add(Counts(puts=len(group), put_bytes_raw=raw_bytes, put_bytes_stored=stored_bytes))
    return [key for key, _ in group]


def _mend(writer: GroupWriter, found: Sequence[Violation]) -> list[str]:
    """Drop and rebuild in one commit; what was done about each violation."""
    bad = [fault.key for fault in found if fault.key is not None]
    if len(bad) < len(found):
        done = writer.change(lambda ledger: ledger.rebuild(bad))
    else:
        done = writer.change(lambda ledger: _drop(ledger, bad))
    return ["kept" if done is None else "index rebuilt" if fault.key is None else "dropped" for fault in found]


def _drop(ledger: Ledger, keys: Sequence[bytes]) -> bool:
    for key in keys:
        ledger.remove(key)
    return True


__all__ = [
    "Fault",
    "StoreDescription",
    "VerifyReport",
    "describe",
    "evict",
    "open_existing",
    "pages",
    "put_values",
    "verify",
]
