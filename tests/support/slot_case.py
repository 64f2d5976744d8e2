"""The slots of a page store, read and changed from outside: by lmdb and the file itself, as the format says."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from hicache.storage import LmdbPageStore
from storage_pages import open_store, slots_path

SLOT_BYTES, BLOCK_BYTES = 16384, 4096  # of the tests' page; what a payload takes is whole blocks
EXTENT_BYTES = 2 * BLOCK_BYTES  # of the file system, to say where a file with many holes lies
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # commits wait for no disk there
RECORD = struct.Struct("<QI52s")
SPACE = struct.Struct("<QQQ")
_FREED = struct.Struct(">QQ")


class Record(NamedTuple):
    """Where the payload of a page is."""

    slot: int
    num_bytes: int
    header: bytes

    def pack(self, key: bytes) -> bytes:
        fields = RECORD.pack(*self)
        return fields + struct.pack("<I", zlib.crc32(key + fields))


@dataclass(frozen=True)
class Slots:
    """What the tables say of slots: by key; freed ones with commit and bytes; free ones; the counters."""

    used: dict[bytes, Record]
    freed: dict[int, tuple[int, int]]
    free: set[int]
    num_slots: int
    used_bytes: int
    freed_bytes: int

    def require_whole(self) -> None:
        """Every slot is in one place, and the counters are their sums."""
        slots = [*(record.slot for record in self.used.values()), *self.freed, *self.free]
        assert sorted(slots) == list(range(self.num_slots))
        assert self.used_bytes == sum(blocks_for(record.num_bytes) for record in self.used.values())
        assert self.freed_bytes == sum(num_bytes for _, num_bytes in self.freed.values())


def blocks_for(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def open_slots(path: Any, **changes: Any) -> LmdbPageStore:
    return open_store(path, **{"slots_from_bytes": 1, **changes})


def slots_of(store: LmdbPageStore) -> Slots:
    env = store.parts.env.tables.env
    with env.begin() as txn:
        return read_slots(txn, tables_of(env, txn))


def read_slots(txn: Any, tables: dict[bytes, Any]) -> Slots:
    records = {bytes(key): bytes(raw) for key, raw in txn.cursor(db=tables[b"pages"])}
    freed = [(_FREED.unpack(key), raw) for key, raw in txn.cursor(db=tables[b"freed"])]
    free = [int.from_bytes(key, "big") for key, _ in txn.cursor(db=tables[b"free"])]
    assert all(Record(*RECORD.unpack_from(raw)).pack(key) == raw for key, raw in records.items())
    assert len({slot for (_, slot), _ in freed}) == len(freed)
    return Slots(
        {key: Record(*RECORD.unpack_from(raw)) for key, raw in records.items()},
        {slot: (commit, int.from_bytes(raw, "little")) for (commit, slot), raw in freed},
        set(free),
        *SPACE.unpack(txn.get(space_key(txn, tables), db=tables[b"meta"])),
    )


def tables_of(env: Any, txn: Any) -> dict[bytes, Any]:
    """The tables by name; `free` and `freed` are those of the one page size that the store has."""
    names = [bytes(name) for name, _ in txn.cursor()]
    return {name.split(b"-")[0]: env.open_db(name, txn, create=False) for name in names}


def space_key(txn: Any, tables: dict[bytes, Any]) -> bytes:
    """The key in `meta` of the counters of slots, of the one page size that the store has."""
    [key] = [bytes(key) for key, _ in txn.cursor(db=tables[b"meta"]) if key.startswith(b"slots")]
    return key


def change(path: Path, body: Callable[[Any, dict[bytes, Any]], None]) -> None:
    """Change the tables of a closed store, behind its back."""
    with lmdb.open(str(path), max_dbs=8, map_size=1 << 27) as env, env.begin(write=True) as txn:
        body(txn, tables_of(env, txn))


def closed_slots(path: Path) -> Slots:
    """`slots_of` a store that is closed."""
    found: list[Slots] = []
    change(path, lambda txn, tables: found.append(read_slots(txn, tables)))
    return found[0]


def taken_bytes(path: Path) -> int:
    """What the file of slots takes of the disk."""
    return os.stat(slots_path(path)).st_blocks * 512


@contextmanager
def slots_file(path: Path) -> Iterator[int]:
    """A descriptor of the file of slots."""
    descriptor = os.open(slots_path(path), os.O_RDWR)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def payloads(path: Path, slots: Slots, slot_bytes: int = SLOT_BYTES) -> dict[bytes, bytes]:
    """The payload of every key, as the file has it now."""
    with slots_file(path) as descriptor:
        return {
            key: os.pread(descriptor, record.num_bytes, record.slot * slot_bytes) for key, record in slots.used.items()
        }
