"""Building the index of a store anew, from the first block of every slot."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from hicache.storage.header import parse_header
from hicache.storage.index import Index, NotedSlots
from hicache.storage.slot_file import SlotFile

log = logging.getLogger("hicache.storage")
Progress = Callable[[int, int], None]  # slots done, and in all

_THREADS, _SLOTS_AT_ONCE = 8, 256
_LOG_EVERY_S = 5.0


class _Found(NamedTuple):
    """A page that a block names. One without a key is a slot that cannot be read, and is left as it is."""

    sequence: int
    slot: int
    page_bytes: int
    key: bytes = b""
    payload_bytes: int = 0


def rebuild(index: Index, files: Mapping[int, SlotFile], namespace: bytes, progress: Progress) -> list[NotedSlots]:
    """Fill an empty index; returns which slots are in use. The use order is that of the sequence. All other slots
    become holes. OSError if the disk fails."""
    newest: dict[bytes, _Found] = {}
    unreadable: list[_Found] = []
    total, done = sum(file.num_slots() for file in files.values()), 0
    for page_bytes, file in files.items():
        for found, num_done in _scan(file, page_bytes, namespace):
            for one in found:
                if not one.key:
                    unreadable.append(one)
                elif one.key not in newest or newest[one.key] < one:
                    newest[one.key] = one
            done += num_done
            progress(done, total)
    pages = sorted(newest.values())
    with index.changes() as changes:
        for one in pages:
            changes.put(one.key, one.slot, one.payload_bytes, one.page_bytes)
        last = pages[-1].sequence if pages else 0
        changes.totals = changes.totals._replace(next_tick=max(last + 1, changes.totals.next_tick))
    return [
        _noted(file, page_bytes, [one for one in [*pages, *unreadable] if one.page_bytes == page_bytes])
        for page_bytes, file in files.items()
    ]


def log_progress(name: str) -> Progress:
    """A progress callback that logs from time to time."""
    last_s = [time.monotonic()]

    def progress(done: int, total: int) -> None:
        if time.monotonic() - last_s[0] > _LOG_EVERY_S:
            last_s[0] = time.monotonic()
            log.info("rebuilding the index of the store %s: %d of %d slots", name, done, total)

    return progress


def _scan(file: SlotFile, page_bytes: int, namespace: bytes) -> Iterator[tuple[list[_Found], int]]:
    """What the blocks of a file name, some slots at a time, and of how many slots."""

    def read(start: int) -> tuple[list[_Found], int]:
        slots = range(start, min(start + _SLOTS_AT_ONCE, num_slots))
        return [found for slot in slots if (found := _page_of(file, slot, page_bytes, namespace))], len(slots)

    num_slots = file.num_slots()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hicache-disk-rebuild") as threads:
        yield from threads.map(read, range(0, num_slots, _SLOTS_AT_ONCE))


def _page_of(file: SlotFile, slot: int, page_bytes: int, namespace: bytes) -> _Found | None:
    try:
        block = file.read_block(slot)
    except OSError as error:
        log.warning("slot %d of pages of %d bytes is skipped: %s", slot, page_bytes, error)
        return _Found(0, slot, page_bytes)
    fields = None if block is None else parse_header(block.header)
    if block is None or fields is None or isinstance(fields, str):
        return None
    if fields.contradiction(fields.stored_bytes, page_bytes, namespace):
        return None
    return _Found(block.sequence, slot, page_bytes, block.key, fields.stored_bytes)


def _noted(file: SlotFile, page_bytes: int, used: list[_Found]) -> NotedSlots:
    slots = {one.slot for one in used}
    num_slots = max(slots, default=-1) + 1
    free = [slot for slot in range(num_slots) if slot not in slots]
    for slot in free:
        file.punch(slot)
    file.truncate(num_slots)
    return NotedSlots(page_bytes, num_slots, sum(file.space_of(one.payload_bytes) for one in used), free)
