"""The format of an LMDB data file: the two meta pages, which are validated before LMDB maps the file, and the B-tree
pages.

LMDB maps its file and trusts every number in it: a wrong root or length ends the process on first access. So the meta
pages are validated here, against rules and against the file.

LMDB 0.9 on a little-endian 64-bit machine. A page number counts pages of the file; pages 0 and 1 are the meta pages, of
which the one with the higher transaction is valid:

    [  0,  16)  page header: u64 page number, u16, u16 flags, u32
    [ 16,  40)  u32 magic, u32 version, u64 address, u64 map size
    [ 40,  88)  the table of free pages; its first u32 is the page size
    [ 88, 136)  the table of tables
    [136, 152)  u64 last page of the file, u64 transaction

A table: u32, u16 flags, u16 depth, u64 branch pages, u64 leaf pages, u64 overflow pages, u64 entries, u64 root. Any
other page, and the nodes in it:

    page   [0, 8) u64 number  [8, 10) u16  [10, 12) u16 flags: 1 branch, 2 leaf, 4 overflow
           [12, 14) u16 end of the list of nodes  [14, 16) u16 start of the nodes  [16, end) u16 offset of each, by key
    node   [0, 2) u16 low  [2, 4) u16 high  [4, 6) u16 flags  [6, 8) u16 key length  [8, ..) key, then data
           branch: the child's number is low + 2^16 high + 2^32 flags; the first key counts as the lowest
           leaf: low + 2^16 high bytes of data; flags 1: the data is the u64 number of the first overflow page, whose
           header of 16 bytes precedes the data; flags 2: the data is the record of a table
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hicache.storage.base import StoreCorrupt

PAGE_HEADER, NODE, PAGE_NUMBER = struct.Struct("<QHHHH"), struct.Struct("<HHHH"), struct.Struct("<Q")
BRANCH_PAGE, LEAF_PAGE, OVERFLOW_PAGE = 1, 2, 4  # flags of pages
OVERFLOW_NODE, TABLE_NODE = 1, 2  # flags of nodes in leaf pages
NUM_META_PAGES, MAX_KEY_BYTES = 2, 511
_META = struct.Struct("<QHHI II8xQ IHHQQQQQ IHHQQQQQ QQ".replace(" ", ""))
_TABLE = struct.Struct("<IHHQQQQQ")
_TRANSACTION_OFFSET = 144
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META_PAGE = 8
_INTEGER_KEYS, _NO_ROOT, _MAX_DEPTH = 8, (1 << 64) - 1, 32


class TableRecord(NamedTuple):
    """The B-tree of one table, as a meta page or the table of tables describes it."""

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int

    @staticmethod
    def num_bytes() -> int:
        return _TABLE.size

    @classmethod
    def unpack(cls, record: bytes | memoryview | None) -> TableRecord:
        """OSError for a record of another length."""
        if record is None or len(record) != _TABLE.size:
            raise OSError(errno.EIO, "the record of a table is damaged")
        return cls(*_TABLE.unpack(record))

    def fits(self, last_page: int) -> bool:
        """Whether root, depth and page counts are possible in a file that ends with `last_page`."""
        if self.root == _NO_ROOT:
            return self.depth == self.entries == 0
        pages = self.branch_pages + self.leaf_pages + self.overflow_pages
        return NUM_META_PAGES <= self.root <= last_page and 0 < self.depth <= _MAX_DEPTH and 0 < pages <= last_page + 1


class TreeRoot(NamedTuple):
    """The B-tree of one table in one snapshot; `depth` 0: it is empty. None of its pages is beyond `last_page`."""

    root: int
    depth: int
    last_page: int

    @classmethod
    def unpack(cls, record: bytes | memoryview | None, last_page: int) -> TreeRoot:
        """From the record in the table of tables. OSError for an impossible one."""
        table = TableRecord.unpack(record)
        if not table.fits(last_page):
            raise OSError(errno.EIO, "the record of a table is damaged")
        return cls(table.root, table.depth, last_page)


class Meta(NamedTuple):
    """The fields of one meta page that are used."""

    number: int
    page_flags: int
    magic: int
    version: int
    map_bytes: int
    free: TableRecord
    main: TableRecord
    last_page: int
    transaction: int

    @property
    def psize(self) -> int:
        """Bytes of a page of the file."""
        return self.free.pad

    @property
    def file_bytes(self) -> int:
        """The length that LMDB assumes the file to have."""
        return (self.last_page + 1) * self.psize

    @classmethod
    def unpack(cls, raw: bytes) -> Meta:
        number, _, flags, _, magic, version, map_bytes, *rest = _META.unpack_from(raw)
        return cls(
            number, flags, magic, version, map_bytes, TableRecord(*rest[:8]), TableRecord(*rest[8:16]), *rest[16:]
        )


def read_meta(data: Path, transaction: int | None = None) -> Meta | None:
    """The valid meta page, or that of `transaction`; None if there is none, and for a file without bytes.

    Raises `StoreCorrupt` for a file that is not LMDB's, is of another version, or whose meta pages are impossible.
    """
    size = data.stat().st_size if data.exists() else 0
    if not size:
        return None
    foreign = StoreCorrupt(f"{data} is not the data of a page store; move it away or choose another disk path")
    if not data.is_file():
        raise foreign
    with data.open("rb") as file:
        first = file.read(_META.size)
        if len(first) < _META.size:
            raise foreign
        metas = [Meta.unpack(first)]
        if metas[0].magic != _MAGIC or not 256 <= metas[0].psize <= 1 << 16:
            raise foreign
        file.seek(metas[0].psize)
        second = file.read(_META.size)
        if len(second) < _META.size or Meta.unpack(second).magic != _MAGIC:
            raise foreign
        metas.append(Meta.unpack(second))
        for meta in metas:
            if meta.version != _VERSION:
                raise StoreCorrupt(
                    f"{data} has lmdb's file format {meta.version}, this version reads {_VERSION}; "
                    "update lmdb or choose another disk path"
                )
    reason = next(_meta_faults(metas), "")
    if reason:
        raise StoreCorrupt(
            f"the meta pages of {data} are damaged ({reason}); remove the directory or restore it from a copy"
        )
    if transaction is not None:
        return next((meta for meta in metas if meta.transaction == transaction), None)
    return max(metas, key=lambda meta: meta.transaction)


def renumber(data: Path, transaction: int) -> None:
    """Make both meta pages of a compacted copy describe the same tables, as of `transaction` and the one before.

    A copy counts transactions from 1. Readers in other processes keep the table of readers, which names the current
    transaction, and LMDB reads the meta page of that number's parity: in the copy it may be the empty one.
    """
    with data.open("r+b") as file:
        newest = read_meta(data)
        if newest is None:
            raise StoreCorrupt(f"{data} is empty; it was to be a copy of the store")
        file.seek((newest.transaction & 1) * newest.psize)
        content = bytearray(file.read(_META.size))
        for number in (0, 1):
            PAGE_NUMBER.pack_into(content, 0, number)
            turn = transaction if transaction & 1 == number else transaction - 1
            PAGE_NUMBER.pack_into(content, _TRANSACTION_OFFSET, turn)
            file.seek(number * newest.psize)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _meta_faults(metas: list[Meta]) -> Iterator[str]:
    """Why LMDB must not open this file."""
    for index, meta in enumerate(metas):
        if meta.number != index or not meta.page_flags & _META_PAGE:
            yield f"page {index} is no meta page"
        if meta.psize != metas[0].psize or meta.psize & (meta.psize - 1):
            yield f"page size {meta.psize}"
        if meta.transaction and meta.transaction & 1 != index:
            yield f"transaction {meta.transaction} on page {index}"
    if abs(metas[0].transaction - metas[1].transaction) > 1:
        yield f"transactions {metas[0].transaction} and {metas[1].transaction}"
    # Only the newest is used; LMDB leaves the other one incomplete when a write of it fails.
    newest = max(metas, key=lambda meta: meta.transaction)
    if newest.file_bytes > newest.map_bytes:
        yield f"{newest.file_bytes} bytes in a map of {newest.map_bytes}"
    if newest.free.flags != _INTEGER_KEYS or newest.main.flags:
        yield "flags of tables"
    if not newest.free.fits(newest.last_page) or not newest.main.fits(newest.last_page):
        yield "tables beyond the file"
