"""The consistency check of a store: every page, the index and the slots, compared with one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hicache.storage.lookup import PageReads
from hicache.storage.slots import Slots
from hicache.storage.store_files import OpenPages


@dataclass(frozen=True)
class Fault:
    """Something that is not consistent. `key`: the page that is refused; None: the index or the slots. `action`: ""
    without repair, "dropped", "index rebuilt", "kept" if the store could not be changed."""

    key: bytes | None
    reason: str
    action: str = ""

    def __str__(self) -> str:
        return self.reason if self.key is None else f"page {self.key.hex()}: {self.reason}"


def violations(
    store: PageReads, pages: OpenPages, slots: Slots, progress: Callable[[int], None] = lambda _: None
) -> Iterator[Fault]:
    """Every violation, while nobody writes. Reads every byte. `progress` is called with the length of each value.

    Passes on what LMDB raises.
    """
    entries, held = pages.index.entries(), pages.index.slot_keys()
    for key, entry in entries:
        progress(entry.value_bytes)
        value = store.verified_value(pages, key, entry)
        if isinstance(value, str):
            yield Fault(key, value)
    of_entries = {(*entry.length, entry.slot): key for key, entry in entries}
    if held != of_entries or sorted(pages.index.by_use()) != sorted(of_entries.values()):
        said = f"the use order and the slots name {len(held)} pages"
        yield Fault(None, f"{said}, and not what the index says of its {len(entries)}")
    found = Slots(pages.files, pages.index.records())
    if found.num_misplaced:
        yield Fault(None, f"{found.num_misplaced} of {len(entries)} pages have no slot of their own in their file")
    if (found.sizes, found.used) != (slots.sizes, slots.used):
        yield Fault(None, f"counted are {slots.sizes}, and there are {found.sizes}, or slots of others are in use")
