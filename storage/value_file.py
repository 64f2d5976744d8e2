"""Reads values of an LMDB file with `pread`: finds where a value lies without accessing it, and reads it from there.

LMDB returns addresses in its memory map, and its Python binding accesses every page of a value to find it. A page that
cannot be read, because the disk fails or the file was cut, is then a SIGBUS, which ends the process; a lookup reads the
whole value; and the reads of a batch happen one after the other. `pread` reports errors instead, and the kernel is told
of the whole batch first. lmdb_pages.py describes the format.
"""

from __future__ import annotations

import errno
import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hicache.storage.lmdb_pages import (
    BRANCH_PAGE,
    LEAF_PAGE,
    NODE,
    NUM_META_PAGES,
    OVERFLOW_NODE,
    PAGE_HEADER,
    PAGE_NUMBER,
    TreeRoot,
)


class ValueLocation(NamedTuple):
    """A value of `length` bytes, at [offset, offset + length) of the file. With a `header` the value starts with that,
    and the rest is in a slot file, from `offset` on."""

    offset: int
    length: int
    header: bytes = b""


class ValueFile:
    """Reads the values of one data file; any thread. Valid for a snapshot while its read transaction is open.

    Raises OSError for what cannot be read and for damaged B-tree pages.
    """

    def __init__(self, data: Path, psize: int, *, writable: bool = False) -> None:
        self._data, self._psize = data, psize
        self._descriptor = os.open(data, os.O_RDWR if writable else os.O_RDONLY)

    def close(self) -> None:
        os.close(self._descriptor)

    def file_bytes(self) -> int:
        """Length of the open file, whatever its path leads to now."""
        return os.fstat(self._descriptor).st_size

    def extend(self, file_bytes: int) -> None:
        """Make a shorter file `file_bytes` long, by a hole."""
        if self.file_bytes() < file_bytes:
            os.ftruncate(self._descriptor, file_bytes)

    def preload_meta(self) -> None:
        """Have the kernel cache the two meta pages. LMDB reads them while it holds Python's interpreter lock; here a
        hanging disk is waited for without it."""
        os.pread(self._descriptor, NUM_META_PAGES * self._psize, 0)

    def locate(self, root: TreeRoot, keys: Sequence[bytes]) -> list[ValueLocation | None]:
        """Where the values of `keys` are in the B-tree of a snapshot, None for absent keys.

        For more than one key, the kernel starts to read the values.
        """
        found = [self._locate(root, key) for key in keys]
        if len(found) > 1:
            for location in found:
                if location is not None and location.length > self._psize:
                    os.posix_fadvise(self._descriptor, location.offset, location.length, os.POSIX_FADV_WILLNEED)
        return found

    def read(self, location: ValueLocation, buffer: memoryview) -> memoryview:
        """The value, at the start of `buffer`."""
        value, done = buffer[: location.length], 0
        if len(value) < location.length:
            raise self._damaged(f"a value of {location.length} bytes")
        while done < location.length:
            got = os.preadv(self._descriptor, [value[done:]], location.offset + done)
            if not got:
                raise self._damaged(f"it ends before {location.offset + location.length}")
            done += got
        return value

    def _locate(self, root: TreeRoot, key: bytes) -> ValueLocation | None:
        number, last_page = root.root, root.last_page
        for level in range(root.depth):
            page = self._page(number, LEAF_PAGE if level == root.depth - 1 else BRANCH_PAGE, last_page)
            nodes = self._nodes(page)
            if level < root.depth - 1:
                # The first node stands for all keys below the second.
                index = bisect_right(nodes, key, lo=1, key=lambda node: _key_of(page, node)) - 1
                low, high, flags, _ = NODE.unpack_from(page, nodes[index])
                number = low | high << 16 | flags << 32
                continue
            index = bisect_right(nodes, key, key=lambda node: _key_of(page, node)) - 1
            if index < 0 or _key_of(page, nodes[index]) != key:
                return None
            return self._data_location(page, number, nodes[index], last_page)
        return None

    def _data_location(self, page: bytes, number: int, node: int, last_page: int) -> ValueLocation:
        low, high, flags, key_bytes = NODE.unpack_from(page, node)
        length, start = low | high << 16, node + NODE.size + key_bytes
        if not flags & OVERFLOW_NODE:
            if start + length > self._psize:
                raise self._damaged(f"a value that leaves page {number}")
            return ValueLocation(number * self._psize + start, length)
        if start + PAGE_NUMBER.size > self._psize:
            raise self._damaged(f"a node that leaves page {number}")
        first = PAGE_NUMBER.unpack_from(page, start)[0]
        offset = first * self._psize + PAGE_HEADER.size
        if first < NUM_META_PAGES or offset + length > (last_page + 1) * self._psize:
            raise self._damaged(f"a value at page {first}")
        return ValueLocation(offset, length)

    def _page(self, number: int, kind: int, last_page: int) -> bytes:
        if not NUM_META_PAGES <= number <= last_page:
            raise self._damaged(f"a B-tree that leads to page {number}")
        page = os.pread(self._descriptor, self._psize, number * self._psize)
        if len(page) < self._psize:
            raise self._damaged(f"it ends in page {number}")
        stated, _, flags, _, _ = PAGE_HEADER.unpack_from(page)
        if stated != number or flags != kind:
            raise self._damaged(f"page {number} is of kind {flags} and says it is {stated}")
        return page

    def _nodes(self, page: bytes) -> tuple[int, ...]:
        """Offsets of the nodes, each with its key inside the page."""
        end = PAGE_HEADER.unpack_from(page)[3]
        if not PAGE_HEADER.size < end <= self._psize or end & 1:
            raise self._damaged("a list of nodes that leaves its page")
        nodes = struct.unpack_from(f"<{(end - PAGE_HEADER.size) // 2}H", page, PAGE_HEADER.size)
        if max(nodes) + NODE.size > self._psize:
            raise self._damaged("a node that leaves its page")
        return nodes

    def _damaged(self, what: str) -> OSError:
        return OSError(errno.EIO, f"{self._data} is damaged: {what}")


def _key_of(page: bytes, node: int) -> bytes:
    start = node + NODE.size
    return page[start : start + (page[node + 6] | page[node + 7] << 8)]
