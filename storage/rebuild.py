"""Building the index of a store anew, from the first block of every slot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from hicache.storage.header import parse_header
from hicache.storage.index import Entry, Index
from hicache.storage.slot_file import SlotFile

log = logging.getLogger("hicache.storage")
Progress = Callable[[int, int], None]  # slots done, and in all

_THREADS, _SLOTS_AT_ONCE = 8, 256


class _Found(NamedTuple):
    """A page that a block names."""

    sequence: int
    slot: int
    page_bytes: int
    key: bytes
    payload_bytes: int


def rebuild(index: Index, files: Mapping[int, SlotFile], namespace: bytes, progress: Progress) -> None:
    """Fill an empty index. The use order is that of the sequence. All other slots become holes, those that cannot be
    read too. OSError if the disk fails."""

    def read(page_bytes: int, slots: range) -> list[_Found]:
        return [found for slot in slots if (found := _page_of(files[page_bytes], slot, page_bytes, namespace))]

    all_slots = {page_bytes: range(file.num_slots()) for page_bytes, file in files.items()}
    total, done = sum(map(len, all_slots.values())), 0
    newest: dict[bytes, _Found] = {}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hicache-disk-rebuild") as threads:
        for page_bytes, slots in all_slots.items():
            parts = [slots[start : start + _SLOTS_AT_ONCE] for start in range(0, len(slots), _SLOTS_AT_ONCE)]
            for part, found in zip(parts, threads.map(read, [page_bytes] * len(parts), parts), strict=True):
                for one in found:
                    if one.key not in newest or newest[one.key] < one:
                        newest[one.key] = one
                done += len(part)
                progress(done, total)
    pages = list(newest.values())
    with index.changes() as changes:
        for one in pages:
            changes.put(one.key, Entry(one.slot, one.payload_bytes, one.page_bytes), max(1, one.sequence))
    index.uses.restart_clock()  # so that later sequences are higher
    for page_bytes, file in files.items():
        used = {one.slot for one in pages if one.page_bytes == page_bytes}
        file.truncate(max(used, default=-1) + 1)
        file.punch(set(range(file.num_slots())) - used)


def _page_of(file: SlotFile, slot: int, page_bytes: int, namespace: bytes) -> _Found | None:
    try:
        block = file.read_block(slot)
    except OSError as error:
        log.warning("slot %d of pages of %d bytes is lost: %s", slot, page_bytes, error)
        return None
    fields = None if block is None else parse_header(block.header)
    if block is None or fields is None or isinstance(fields, str):
        return None
    if fields.contradiction(fields.stored_bytes, page_bytes, namespace):
        return None
    return _Found(block.sequence, slot, page_bytes, block.key, fields.stored_bytes)
