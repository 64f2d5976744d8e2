"""Faults to be planted in a closed store with slots, and what each may cost.

The store: 70 pages that do not compress, 20 that do, 3 slots freed and 6 free, 99 in all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache.storage import PageFilter
from slot_case import (
    RECORD,
    SLOT_BYTES,
    SPACE,
    Record,
    Slots,
    change,
    closed_slots,
    open_slots,
    read_slots,
    slots_file,
    space_key,
)
from storage_pages import key_of, put_numbers, slots_path

NUM_RANDOM, NUM_PAGES = 70, 90
ALL = frozenset(range(NUM_PAGES))
SETTINGS = {"filter": PageFilter("byte_shuffle", 2)}
NOT_ONCE, IN_USE, FREED = "slots is recorded once", "slots in use are recorded", "slots freed are recorded"
Tables = dict[bytes, Any]
CUT_AT = 30 * SLOT_BYTES + 5000


@dataclass(frozen=True)
class Fault:
    """`lost`: the pages that it costs, or a rule for them. `named`: what verification says beside the pages.

    `refused`: the error of opening. `stops_writing`: nothing is put until it is repaired. `costs_later`: how many pages
    may go besides when a page is put before it is repaired.
    """

    plant: Callable[[Path], None]
    lost: frozenset[int] | Callable[[Slots], set[int]] = frozenset()
    named: str = ""
    refused: str = ""
    stops_writing: bool = False
    costs_later: int = 0


def make(path: Path) -> None:
    store = open_slots(path, **SETTINGS)
    put_numbers(store, range(200, 206))
    put_numbers(store, range(NUM_RANDOM))
    put_numbers(store, range(206, 209))
    put_numbers(store, range(NUM_RANDOM, NUM_PAGES), kind="normal")
    store.delete([key_of(number) for number in range(200, 206)])
    for _ in range(2):
        store.delete([b"another"])
    store.delete([key_of(number) for number in range(206, 209)])
    store.close()
    slots = closed_slots(path)
    assert (len(slots.used), len(slots.freed), len(slots.free), slots.num_slots) == (NUM_PAGES, 3, 6, 99)


def behind(end: int) -> Callable[[Slots], set[int]]:
    """The pages of which the file has nothing, or not all, behind byte `end`."""

    def lost(slots: Slots) -> set[int]:
        records = {number: slots.used[key_of(number)] for number in range(NUM_PAGES)}
        return {n for n, record in records.items() if record.slot * SLOT_BYTES + record.num_bytes > end}

    return lost


def on_records(body: Callable[[dict[bytes, bytes]], None]) -> Callable[[Path], None]:
    """A change of the records of pages."""

    def records(txn: Any, tables: Tables) -> None:
        before = {bytes(key): bytes(raw) for key, raw in txn.cursor(db=tables[b"pages"])}
        after = dict(before)
        body(after)
        changed = {key: raw for key, raw in after.items() if raw != before[key]}
        assert changed
        for key, raw in changed.items():
            txn.put(key, raw, db=tables[b"pages"])

    return lambda path: change(path, records)


def flip_records(records: dict[bytes, bytes]) -> None:
    """Every byte of a record, one in each page's."""
    for at in range(64):
        raw = bytearray(records[key_of(at)])
        raw[at] ^= 1 << at % 8
        records[key_of(at)] = bytes(raw)


def cut_records(records: dict[bytes, bytes]) -> None:
    for length in range(64):
        records[key_of(length)] = records[key_of(length)][:length]
    records[key_of(64)] += b"\0"


def swap_records(records: dict[bytes, bytes]) -> None:
    records[key_of(7)], records[key_of(80)] = records[key_of(80)], records[key_of(7)]


def share_slot(records: dict[bytes, bytes]) -> None:
    """The record of page 7, with a right checksum, names the slot of page 8."""
    slot = RECORD.unpack_from(records[key_of(8)])[0]
    records[key_of(7)] = Record(*RECORD.unpack_from(records[key_of(7)]))._replace(slot=slot).pack(key_of(7))


def forged(**fields: int) -> Callable[[Path], None]:
    """The record of page 7 has other fields and the checksum that belongs to them."""

    def body(records: dict[bytes, bytes]) -> None:
        record = Record(*RECORD.unpack_from(records[key_of(7)]))
        records[key_of(7)] = record._replace(**fields).pack(key_of(7))

    return on_records(body)


def counters(**fields: int) -> Callable[[Path], None]:
    """The counters of slots are wrong by that much."""

    def body(txn: Any, tables: Tables) -> None:
        slots = read_slots(txn, tables)
        names = ("num_slots", "used_bytes", "freed_bytes")
        raw = SPACE.pack(*(getattr(slots, name) + fields.get(name, 0) for name in names))
        txn.put(space_key(txn, tables), raw, db=tables[b"meta"])

    return lambda path: change(path, body)


def in_meta(key: bytes, body: Callable[[bytes], bytes | None]) -> Callable[[Path], None]:
    """Another record of the store, or none."""

    def replace(txn: Any, tables: Tables) -> None:
        before = txn.get(key, db=tables[b"meta"])
        after = body(before)
        assert after != before
        txn.delete(key, db=tables[b"meta"])
        if after is not None:
            txn.put(key, after, db=tables[b"meta"])

    return lambda path: change(path, replace)


def identity(old: bytes, new: bytes) -> Callable[[Path], None]:
    """The identity record says something else."""
    return in_meta(b"store", lambda raw: raw.replace(old, new))


def entry(table: bytes, key: Callable[[Slots], bytes], value: bytes | None) -> Callable[[Path], None]:
    """A record of `free` or `freed` that is wrong, or, without a value, not there."""

    def body(txn: Any, tables: Tables) -> None:
        raw = key(read_slots(txn, tables))
        if value is None:
            assert txn.delete(raw, db=tables[table])
        else:
            txn.put(raw, value, db=tables[table])

    return lambda path: change(path, body)


def u64(value: int) -> bytes:
    return value.to_bytes(8, "big")


def first_freed(slots: Slots) -> bytes:
    slot, (commit, _) = min(slots.freed.items())
    return u64(commit) + u64(slot)


def on_file(body: Callable[[Path], object]) -> Callable[[Path], None]:
    """A change of the file of slots."""

    def plant(path: Path) -> None:
        body(slots_path(path))

    return plant


def on_payloads(body: Callable[[int, dict[int, Record]], None]) -> Callable[[Path], None]:
    """A change within the file of slots, given its descriptor and the records by number."""

    def plant(path: Path) -> None:
        used = closed_slots(path).used
        with slots_file(path) as descriptor:
            body(descriptor, {number: used[key_of(number)] for number in range(NUM_PAGES)})

    return plant


def flip_payloads(descriptor: int, records: dict[int, Record]) -> None:
    """One bit of every page: the first bytes and the last, and places in between."""
    for number, record in records.items():
        from_ends = (0, 1, 2, 3, record.num_bytes - 1, record.num_bytes - 2, record.num_bytes - 5)
        first = number % NUM_RANDOM
        at = record.slot * SLOT_BYTES + (from_ends[first] if first < 7 else record.num_bytes * number // NUM_PAGES)
        changed = os.pread(descriptor, 1, at)[0] ^ 1 << number % 8
        os.pwrite(descriptor, bytes([changed]), at)


def swap_payloads(descriptor: int, records: dict[int, Record]) -> None:
    for one, other in ((3, 4), (75, 76)):
        starts = [records[number].slot * SLOT_BYTES for number in (one, other)]
        parts = [os.pread(descriptor, SLOT_BYTES, start) for start in starts]
        os.pwrite(descriptor, parts[0], starts[1])
        os.pwrite(descriptor, parts[1], starts[0])


def zero_payloads(descriptor: int, records: dict[int, Record]) -> None:
    for number in (3, 75):
        os.pwrite(descriptor, bytes(records[number].num_bytes), records[number].slot * SLOT_BYTES)


def overwrite(data: Path) -> None:
    data.write_bytes(random.Random(1).randbytes(data.stat().st_size))


def lengthen(data: Path) -> None:
    with data.open("ab") as file:
        file.write(random.Random(2).randbytes(100_000))


def as_directory(data: Path) -> None:
    data.unlink()
    data.mkdir()


SEVEN = frozenset({7})
FAULTS: dict[str, Fault] = {
    "records flipped": Fault(on_records(flip_records), frozenset(range(64)), NOT_ONCE),
    "records cut": Fault(on_records(cut_records), frozenset(range(65)), NOT_ONCE),
    "records swapped": Fault(on_records(swap_records), frozenset({7, 80}), NOT_ONCE),
    "another's slot": Fault(on_records(share_slot), SEVEN, NOT_ONCE),
    "slot beyond": Fault(forged(slot=103), SEVEN, NOT_ONCE),
    "slot far beyond": Fault(forged(slot=1 << 61), SEVEN, NOT_ONCE),
    "slot at the end": Fault(forged(slot=(1 << 64) - 1), SEVEN, NOT_ONCE),
    "length of more than a page": Fault(forged(num_bytes=16384), SEVEN),
    "length of more than a slot": Fault(forged(num_bytes=16385), SEVEN, IN_USE),
    "length of 4 GB": Fault(forged(num_bytes=(1 << 32) - 1), SEVEN, IN_USE),
    "length of nothing": Fault(forged(num_bytes=0), SEVEN, IN_USE),
    "free and in use": Fault(entry(b"free", lambda slots: u64(slots.used[key_of(7)].slot), b""), SEVEN, NOT_ONCE),
    "freed and in use": Fault(
        entry(b"freed", lambda slots: u64(1) + u64(slots.used[key_of(7)].slot), bytes(8)), named=NOT_ONCE, costs_later=1
    ),
    "free leaked": Fault(entry(b"free", lambda slots: u64(min(slots.free)), None), named=NOT_ONCE),
    "freed leaked": Fault(entry(b"freed", first_freed, None), named=NOT_ONCE),
    "free beyond": Fault(entry(b"free", lambda slots: u64(slots.num_slots + 3), b""), named=NOT_ONCE),
    "free far beyond": Fault(entry(b"free", lambda _: u64((1 << 64) - 1), b""), refused="cannot open the slots"),
    "free short": Fault(entry(b"free", lambda _: b"\0\0", b""), named="a slot record is damaged"),
    "freed short": Fault(
        entry(b"freed", lambda _: b"\0\0", bytes(8)), named="a slot record is damaged", stops_writing=True
    ),
    "freed value short": Fault(
        entry(b"freed", first_freed, b"\0"), named="a slot record is damaged", stops_writing=True
    ),
    "freed value wrong": Fault(entry(b"freed", first_freed, (1 << 40).to_bytes(8, "little")), named=FREED),
    "used too low": Fault(counters(used_bytes=-8 * SLOT_BYTES), named=IN_USE),
    "used too high": Fault(counters(used_bytes=1 << 62), named=IN_USE, stops_writing=True, costs_later=30),
    "freed too low": Fault(counters(freed_bytes=-SLOT_BYTES), named=FREED),
    "freed too high": Fault(counters(freed_bytes=1 << 62), named=FREED, stops_writing=True),
    "slots too few": Fault(counters(num_slots=-60), behind(39 * SLOT_BYTES), NOT_ONCE, stops_writing=True),
    "slots too many": Fault(counters(num_slots=100), named=NOT_ONCE),
    "slots far too many": Fault(counters(num_slots=1 << 62), named=NOT_ONCE),
    "no counters": Fault(in_meta(b"slots-16320", lambda _: None), refused="the slot counters are damaged"),
    "counters cut": Fault(in_meta(b"slots-16320", lambda raw: raw[:23]), refused="the slot counters are damaged"),
    "payloads flipped": Fault(on_payloads(flip_payloads), ALL),
    "payloads swapped": Fault(on_payloads(swap_payloads), frozenset({3, 4, 75, 76})),
    "payloads zero": Fault(on_payloads(zero_payloads), frozenset({3, 75})),
    "file overwritten": Fault(on_file(overwrite), ALL),
    "file lengthened": Fault(on_file(lengthen)),
    "file missing": Fault(on_file(lambda data: data.unlink()), refused="is not a page store"),
    "file a directory": Fault(on_file(as_directory), refused="is not a page store"),
    "file empty": Fault(on_file(lambda data: os.truncate(data, 0)), ALL),
    "file cut": Fault(on_file(lambda data: os.truncate(data, CUT_AT)), behind(CUT_AT)),
    "slots in tables": Fault(identity(b"true", b"false"), refused="has slots, its identity record has none"),
    "slots no flag": Fault(identity(b"true", b"1"), refused="unreadable identity record"),
    "no sizes": Fault(identity(b"[16320]", b"[]"), refused="unreadable identity record"),
}
