"""The consistency check of a store: every page, the index and the slots, compared with one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from hicache.storage.index import Entry, Index, NotedSlots
from hicache.storage.store_files import OpenPages


@dataclass(frozen=True)
class StoredPages:
    """The pages of an open store as they are stored. `read`: the value of a page, or why it cannot be read; `verify`:
    why a value is not what was stored under the key, "" if it is."""

    reading: Callable[[], AbstractContextManager[OpenPages]]
    read: Callable[[OpenPages, bytes, Entry], bytes | str]
    verify: Callable[[bytes, bytes], str]

    def value(self, pages: OpenPages, key: bytes, entry: Entry) -> bytes | str:
        """The value of a page, or why it is refused."""
        value = self.read(pages, key, entry)
        return value if isinstance(value, str) else self.verify(key, value) or value


@dataclass(frozen=True)
class Violation:
    """Something that is not consistent. `key`: the page that is refused. None: the index or the slots."""

    reason: str
    key: bytes | None = None

    def __str__(self) -> str:
        return self.reason if self.key is None else f"page {self.key.hex()}: {self.reason}"


def violations(
    pages: OpenPages, slots: Sequence[NotedSlots], stored: StoredPages, progress: Callable[[int], None] = lambda _: None
) -> Iterator[Violation]:
    """Every violation, while nobody writes. Reads every byte. `progress` is called with the length of each value.

    Passes on what LMDB raises.
    """
    entries = pages.index.entries()
    for key, entry in entries:
        progress(entry.value_bytes)
        value = stored.value(pages, key, entry)
        if isinstance(value, str):
            yield Violation(value, key)
    yield from _index_violations(pages.index, entries)
    for noted in slots:
        used = [entry for _, entry in entries if entry.page_bytes == noted.page_bytes]
        file = pages.files[noted.page_bytes]
        used_bytes = sum(file.space_of(entry.payload_bytes) for entry in used)
        if used_bytes != noted.used_bytes:
            yield Violation(f"slots in use are counted with {noted.used_bytes} bytes, they have {used_bytes}")
        each = sorted([*(entry.slot for entry in used), *noted.free])
        if each != sorted(set(each)) or (each and each[-1] >= noted.num_slots):
            yield Violation(f"of {noted.num_slots} slots for pages of {noted.page_bytes} bytes some are used twice")


def _index_violations(index: Index, entries: Sequence[tuple[bytes, Entry]]) -> Iterator[Violation]:
    """Each tick leads to the page that has it, and the totals are right."""
    totals, uses = index.totals(), index.by_use()
    if sorted(uses) != sorted((entry.tick, key) for key, entry in entries):
        yield Violation(f"the use order names {len(uses)} pages, and not what the index says of its {len(entries)}")
    if uses and uses[-1][0] >= totals.next_tick:
        yield Violation(f"tick {uses[-1][0]} is not below the next tick {totals.next_tick}")
    live_bytes = sum(entry.value_bytes for _, entry in entries)
    raw_bytes = sum(entry.page_bytes for _, entry in entries)
    if (totals.live_bytes, totals.raw_bytes) != (live_bytes, raw_bytes):
        recorded = f"live_bytes is {totals.live_bytes}, raw_bytes {totals.raw_bytes}"
        yield Violation(f"{recorded}; the values have {live_bytes}, their pages {raw_bytes}")
