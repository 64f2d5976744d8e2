"""Building the index of a store anew, from the first block of every slot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from hicache.storage.header import parse_header
from hicache.storage.index import Entry, Index
from hicache.storage.slot_file import SlotFile, SlotFiles, SlotLength

log = logging.getLogger("hicache.storage")
Progress = Callable[[int, int], None]  # slots done, and in all

_THREADS, _SLOTS_AT_ONCE = 8, 256


class _Found(NamedTuple):
    """A page that a block names."""

    sequence: int
    entry: Entry
    key: bytes


def rebuild(index: Index, files: SlotFiles, namespace: bytes, progress: Progress) -> None:
    """Fill an empty index. The use order is that of the sequence. All other slots become holes, those that cannot be
    read too. OSError if the disk fails."""

    def read(length: SlotLength, slots: range) -> list[_Found]:
        return [found for slot in slots if (found := _page_of(files[length], length, slot, namespace))]

    total, done = files.num_slots(), 0
    newest: dict[bytes, _Found] = {}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hicache-disk-rebuild") as threads:
        for length, file in sorted(files.items()):
            slots = range(file.num_slots())
            parts = [slots[start : start + _SLOTS_AT_ONCE] for start in range(0, len(slots), _SLOTS_AT_ONCE)]
            for part, found in zip(parts, threads.map(read, [length] * len(parts), parts), strict=True):
                for one in found:
                    if one.key not in newest or newest[one.key] < one:
                        newest[one.key] = one
                done += len(part)
                progress(done, total)
    with index.changes() as changes:
        for one in newest.values():
            changes.put(one.key, one.entry, max(1, one.sequence))
    index.uses.restart_clock()  # so that later sequences are higher
    for length, file in files.items():
        used = {one.entry.slot for one in newest.values() if one.entry.length == length}
        file.truncate(max(used, default=-1) + 1)
        file.punch(sorted(set(range(file.num_slots())) - used))


def _page_of(file: SlotFile, length: SlotLength, slot: int, namespace: bytes) -> _Found | None:
    try:
        block = file.read_block(slot)
    except OSError as error:
        log.warning(
            "slot %d of %d bytes for pages of %d is lost: %s", slot, length.slot_bytes, length.page_bytes, error
        )
        return None
    fields = "" if block is None else parse_header(block.header)
    if block is None or isinstance(fields, str):
        return None
    entry = Entry(slot, fields.stored_bytes, length.page_bytes)
    if entry.length != length or fields.contradiction(fields.stored_bytes, length.page_bytes, namespace):
        return None
    return _Found(block.sequence, entry, block.key)
