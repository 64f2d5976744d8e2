"""The consistency check of a store: one walk over all values, index records and counters, in one read transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from hicache.storage.header import page_bytes_of
from hicache.storage.memory import aligned_buffer
from hicache.storage.tables import TICK, Age, Tables, Totals
from hicache.storage.value_file import ValueLocation

_KEYS_AT_ONCE = 8


class Values(Protocol):
    """Where values are read from."""

    def read(self, location: ValueLocation, buffer: memoryview) -> memoryview: ...


@dataclass(frozen=True)
class Verifier:
    """`verify(key, value)` says why a value is refused, "" if it is valid; no valid value is longer than
    `max_value_bytes`."""

    verify: Callable[[bytes, memoryview], str]
    max_value_bytes: int

    def reason(self, values: Values, key: bytes, location: ValueLocation | None, buffer: memoryview) -> str:
        """Why the value at `location` is refused; "" if it is valid."""
        found = self.read(values, key, location, buffer)
        return found if isinstance(found, str) else ""

    def read(self, values: Values, key: bytes, location: ValueLocation | None, buffer: memoryview) -> memoryview | str:
        """The value, within `buffer`, from `aligned_buffer`, or why it is refused."""
        if location is None:
            return "not found in the index"
        if location.length > self.max_value_bytes:
            return f"value of {location.length} bytes, longer than a page's"
        try:
            value = values.read(location, buffer)
        except OSError as error:
            return f"cannot be read: {error}"
        return self.verify(key, value) or value


@dataclass(frozen=True)
class Violation:
    """Something that is not consistent. `key`: the page whose value is refused. None: an index record or a counter."""

    reason: str
    key: bytes | None = None

    def __str__(self) -> str:
        return self.reason if self.key is None else f"page {self.key.hex()}: {self.reason}"


def violations(
    tables: Tables, verifier: Verifier, progress: Callable[[int], None] = lambda _: None
) -> Iterator[Violation]:
    """Every violation: values that do not verify, indexes or counters that disagree. Reads every byte.

    `progress` is called with the length of each value. Passes on what LMDB raises, and OSError for an index that cannot
    be read.
    """
    buffer = aligned_buffer(verifier.max_value_bytes)
    with tables.env.begin(buffers=True) as txn:
        live_bytes, raw_bytes, locations = 0, 0, list[ValueLocation]()
        with txn.cursor(db=tables.pages) as cursor:
            keys = (bytes(view) for view in cursor.iternext(keys=True, values=False))
            while batch := list(islice(keys, _KEYS_AT_ONCE)):
                for key, location in zip(batch, tables.locate(txn, batch), strict=True):
                    value_bytes = 0 if location is None else location.length
                    page_bytes = _page_bytes(tables, location)
                    live_bytes, raw_bytes = live_bytes + value_bytes, raw_bytes + page_bytes
                    if location is not None and tables.slots is not None:
                        locations.append(location)
                    progress(value_bytes)
                    reason = verifier.reason(tables, key, location, buffer)
                    if reason:
                        yield Violation(reason, key)
                    yield from _age_violations(txn, tables, key, value_bytes, page_bytes)
        yield from _recency_violations(txn, tables)
        stated = Totals.read(txn, tables.meta)
        if (stated.live_bytes, stated.raw_bytes) != (live_bytes, raw_bytes):
            recorded = f"live_bytes is {stated.live_bytes}, raw_bytes {stated.raw_bytes}"
            yield Violation(f"{recorded}; the values have {live_bytes}, their pages {raw_bytes}")
        if tables.slots is not None:
            yield from map(Violation, tables.slots.faults(txn, tables.meta, locations))


def _page_bytes(tables: Tables, location: ValueLocation | None) -> int:
    """The length of the page that a value states, 0 if that cannot be read."""
    try:
        header = None if location is None else tables.header(location)
    except OSError:
        return 0
    return 0 if header is None else page_bytes_of(header)


def _age_violations(txn: Any, tables: Tables, key: bytes, value_bytes: int, page_bytes: int) -> Iterator[Violation]:
    """The age record of a page states the lengths of its value and of the page."""
    age = Age.unpack(txn.get(key, db=tables.ages))
    if age is None:
        yield Violation(f"page {key.hex()}: no age record")
    elif age.value_bytes != value_bytes:
        yield Violation(f"page {key.hex()}: recorded {age.value_bytes} bytes, stored {value_bytes}")
    elif age.page_bytes != page_bytes:
        yield Violation(f"page {key.hex()}: recorded a page of {age.page_bytes} bytes, stored one of {page_bytes}")


def _recency_violations(txn: Any, tables: Tables) -> Iterator[Violation]:
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
            if not pages.set_key(key):  # unlike get, this does not read the value
                yield Violation(f"tick {tick} leads to {bytes(key).hex()}, which is no page")
