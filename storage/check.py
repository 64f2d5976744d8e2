"""What must hold in an lmdb page store, as one walk over all of it.

Owns nothing; reads in one transaction. May import the standard library, direct_read, lmdb_tree and lru.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from hicache.storage.header import page_bytes_of
from hicache.storage.lmdb_tree import Place
from hicache.storage.lru import TICK, Age, Tables, Totals
from hicache.storage.memory import aligned_buffer

_KEYS_AT_ONCE = 8


class Values(Protocol):
    """Where values are read from."""

    def read(self, place: Place, room: memoryview) -> memoryview: ...


@dataclass(frozen=True)
class Verifier:
    """`verify(key, value)` says why a value is not to be trusted, "" if it is; no value is longer than the bound."""

    verify: Callable[[bytes, memoryview], str]
    max_value_bytes: int

    def reason(self, values: Values, key: bytes, place: Place | None, room: memoryview) -> str:
        found = self.value(values, key, place, room)
        return found if isinstance(found, str) else ""

    def value(self, values: Values, key: bytes, place: Place | None, room: memoryview) -> memoryview | str:
        """The value, within `room` of `aligned_buffer`, or why it is not what was stored."""
        if place is None:
            return "not found in its tree"
        if place.length > self.max_value_bytes:
            return f"value of {place.length} bytes, longer than a page's"
        try:
            value = values.read(place, room)
        except OSError as error:
            return f"cannot be read: {error}"
        return self.verify(key, value) or value


@dataclass(frozen=True)
class Violation:
    """Something that does not hold. `key`: the page whose value is not to be trusted. None: an index or counter."""

    reason: str
    key: bytes | None = None

    def __str__(self) -> str:
        return self.reason if self.key is None else f"page {self.key.hex()}: {self.reason}"


def faults(tables: Tables, verifier: Verifier, seen: Callable[[int], None] = lambda _: None) -> Iterator[Violation]:
    """Every violation: values that do not verify, indexes or counters that disagree. Reads every byte.

    `seen` is told the size of each value. What lmdb raises, and OSError for a tree that cannot be read, pass through.
    """
    room = aligned_buffer(verifier.max_value_bytes)
    with tables.env.begin(buffers=True) as txn:
        live_bytes, raw_bytes, found_places = 0, 0, list[Place]()
        with txn.cursor(db=tables.pages) as cursor:
            keys = (bytes(view) for view in cursor.iternext(keys=True, values=False))
            while batch := list(islice(keys, _KEYS_AT_ONCE)):
                for key, place in zip(batch, tables.places(txn, batch), strict=True):
                    value_bytes = 0 if place is None else place.length
                    header = None if place is None else _header(tables, place)
                    page_bytes = 0 if header is None else page_bytes_of(header)
                    live_bytes, raw_bytes = live_bytes + value_bytes, raw_bytes + page_bytes
                    if place is not None and tables.slots is not None:
                        found_places.append(place)
                    seen(value_bytes)
                    reason = verifier.reason(tables, key, place, room)
                    if reason:
                        yield Violation(reason, key)
                    yield from _age_faults(txn, tables, key, value_bytes, page_bytes)
        yield from _recency_faults(txn, tables)
        stated = Totals.read(txn, tables.meta)
        if (stated.live_bytes, stated.raw_bytes) != (live_bytes, raw_bytes):
            recorded = f"live_bytes is {stated.live_bytes}, raw_bytes {stated.raw_bytes}"
            yield Violation(f"{recorded}; the values have {live_bytes}, their pages {raw_bytes}")
        if tables.slots is not None:
            yield from map(Violation, tables.slots.faults(txn, tables.meta, found_places))


def _header(tables: Tables, place: Place) -> bytes | memoryview | None:
    try:
        return tables.header(place)
    except OSError:
        return None


def _age_faults(txn: Any, tables: Tables, key: bytes, value_bytes: int, page_bytes: int) -> Iterator[Violation]:
    """The age record of a page states the lengths of its value and of the page."""
    age = Age.unpack(txn.get(key, db=tables.ages))
    if age is None:
        yield Violation(f"page {key.hex()}: no age record")
    elif age.value_bytes != value_bytes:
        yield Violation(f"page {key.hex()}: recorded {age.value_bytes} bytes, stored {value_bytes}")
    elif age.page_bytes != page_bytes:
        yield Violation(f"page {key.hex()}: recorded a page of {age.page_bytes} bytes, stored one of {page_bytes}")


def _recency_faults(txn: Any, tables: Tables) -> Iterator[Violation]:
    """pages, ages and recency hold the same keys; each tick leads to the key whose age record has it."""
    indexes = {"pages": tables.pages, "ages": tables.ages, "recency": tables.recency}
    counts = {name: txn.stat(table)["entries"] for name, table in indexes.items()}
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{name} {count}" for name, count in counts.items())
        yield Violation(f"tables differ in size: {sizes}")
    next_tick = Totals.read(txn, tables.meta).next_tick
    with txn.cursor(db=tables.recency) as cursor, txn.cursor(db=tables.pages) as pages:
        for packed, key in cursor:
            tick = TICK.unpack(packed)[0] if len(packed) == TICK.size else -1
            age = Age.unpack(txn.get(key, db=tables.ages))
            if age is None or age.tick != tick:
                yield Violation(f"tick {tick} leads to {bytes(key).hex()}, whose age record differs")
            if not 0 < tick < next_tick:
                yield Violation(f"tick {tick} is not below the next tick {next_tick}")
            if not pages.set_key(key):  # unlike get, this does not touch the value
                yield Violation(f"tick {tick} leads to {bytes(key).hex()}, which is no page")
