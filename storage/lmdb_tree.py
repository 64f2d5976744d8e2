"""Where a value lies in an lmdb file, found without touching the value, and reading it from there.

lmdb hands out addresses in its memory map, and its binding touches every page of a value to find it. A page that
cannot be read, because the medium fails or the file was cut short, is then a SIGBUS, which ends the process; looking a
key up reads the whole value; and the reads of a batch happen one after the other. So values are looked up in the tree
of a snapshot here and read with `pread`, which reports errors, after the kernel was asked for the whole batch.

Owns the layout of tree pages and a descriptor of the file. Integers are little-endian, a page number counts file pages:

    page   [0, 8) u64 number  [8, 10) u16  [10, 12) u16 flags: 1 branch, 2 leaf  [12, 14) u16 end of the list of nodes
           [14, 16) u16       [16, end) u16 offset of each node, by key
    node   [0, 2) u16 low  [2, 4) u16 high  [4, 6) u16 flags  [6, 8) u16 key length  [8, ..) key, then data
           branch: the child's number is low + 2^16 high + 2^32 flags; the first key counts as the lowest
           leaf: low + 2^16 high bytes of data; flags 1: the data is the u64 number of the first of a run of pages

May import the standard library and lmdb_meta.
"""

from __future__ import annotations

import errno
import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hicache.storage.lmdb_meta import TreeRoot

_HEAD = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_NUMBER = struct.Struct("<Q")
_BRANCH, _LEAF, _IN_A_RUN = 1, 2, 1
_META_PAGES = 2


class Place(NamedTuple):
    """A value of `length` bytes, at [offset, offset + length) of the file. With a `head` it begins with that, and the
    rest is in the file of slots, from `offset` on."""

    offset: int
    length: int
    head: bytes = b""


class ValueFile:
    """Reads the values of one data file; any thread. Valid for a snapshot while its read transaction is open.

    Raises OSError for what cannot be read and for tree pages that make no sense.
    """

    def __init__(self, data: Path, psize: int, *, writable: bool = False) -> None:
        self._data, self._psize = data, psize
        self._descriptor = os.open(data, os.O_RDWR if writable else os.O_RDONLY)

    def close(self) -> None:
        os.close(self._descriptor)

    def file_bytes(self) -> int:
        """Length of the file that is open, whatever its path leads to now."""
        return os.fstat(self._descriptor).st_size

    def lengthen(self, file_bytes: int) -> None:
        """Make a file that is shorter `file_bytes` long, by a hole."""
        if self.file_bytes() < file_bytes:
            os.ftruncate(self._descriptor, file_bytes)

    def warm_head(self) -> None:
        """Have the kernel hold the two meta pages. lmdb looks at them while it keeps Python's interpreter lock: where
        the medium hangs, they are waited for here, without it."""
        os.pread(self._descriptor, _META_PAGES * self._psize, 0)

    def places(self, root: TreeRoot, keys: Sequence[bytes]) -> list[Place | None]:
        """Where the values of `keys` are in the tree of a snapshot, None for keys that it does not have.

        With more than one, the kernel starts to read them.
        """
        found = [self._place(root, key) for key in keys]
        if len(found) > 1:
            for place in found:
                if place is not None and place.length > self._psize:
                    os.posix_fadvise(self._descriptor, place.offset, place.length, os.POSIX_FADV_WILLNEED)
        return found

    def read(self, place: Place, room: memoryview) -> memoryview:
        """The value, at the start of `room`."""
        value, done = room[: place.length], 0
        if len(value) < place.length:
            raise self._damaged(f"a value of {place.length} bytes")
        while done < place.length:
            got = os.preadv(self._descriptor, [value[done:]], place.offset + done)
            if not got:
                raise self._damaged(f"it ends before {place.offset + place.length}")
            done += got
        return value

    def _place(self, root: TreeRoot, key: bytes) -> Place | None:
        number, last_page = root.root, root.last_page
        for level in range(root.depth):
            page = self._page(number, _LEAF if level == root.depth - 1 else _BRANCH, last_page)
            nodes = self._nodes(page)
            if level < root.depth - 1:
                # The first node stands for all keys below the second.
                at = bisect_right(nodes, key, lo=1, key=lambda node: _key_of(page, node)) - 1
                low, high, flags, _ = _NODE.unpack_from(page, nodes[at])
                number = low | high << 16 | flags << 32
                continue
            at = bisect_right(nodes, key, key=lambda node: _key_of(page, node)) - 1
            if at < 0 or _key_of(page, nodes[at]) != key:
                return None
            return self._data_place(page, number, nodes[at], last_page)
        return None

    def _data_place(self, page: bytes, number: int, node: int, last_page: int) -> Place:
        low, high, flags, key_bytes = _NODE.unpack_from(page, node)
        length, start = low | high << 16, node + _NODE.size + key_bytes
        if not flags & _IN_A_RUN:
            if start + length > self._psize:
                raise self._damaged(f"a value that leaves page {number}")
            return Place(number * self._psize + start, length)
        if start + _NUMBER.size > self._psize:
            raise self._damaged(f"a node that leaves page {number}")
        first = _NUMBER.unpack_from(page, start)[0]
        offset = first * self._psize + _HEAD.size
        if first < 2 or offset + length > (last_page + 1) * self._psize:
            raise self._damaged(f"a value at page {first}")
        return Place(offset, length)

    def _page(self, number: int, kind: int, last_page: int) -> bytes:
        if not 2 <= number <= last_page:
            raise self._damaged(f"a tree that leads to page {number}")
        page = os.pread(self._descriptor, self._psize, number * self._psize)
        if len(page) < self._psize:
            raise self._damaged(f"it ends in page {number}")
        stated, _, flags, _, _ = _HEAD.unpack_from(page)
        if stated != number or flags != kind:
            raise self._damaged(f"page {number} is of kind {flags} and says it is {stated}")
        return page

    def _nodes(self, page: bytes) -> tuple[int, ...]:
        """Offsets of the nodes, each with its key inside the page."""
        end = _HEAD.unpack_from(page)[3]
        if not _HEAD.size < end <= self._psize or end & 1:
            raise self._damaged("a list of nodes that leaves its page")
        nodes = struct.unpack_from(f"<{(end - _HEAD.size) // 2}H", page, _HEAD.size)
        if max(nodes) + _NODE.size > self._psize:
            raise self._damaged("a node that leaves its page")
        return nodes

    def _damaged(self, what: str) -> OSError:
        return OSError(errno.EIO, f"{self._data} is damaged: {what}")


def _key_of(page: bytes, node: int) -> bytes:
    start = node + _NODE.size
    return page[start : start + (page[node + 6] | page[node + 7] << 8)]
