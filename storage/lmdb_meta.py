"""The head of an lmdb data file, read before lmdb trusts it, and the one change that is made to it.

lmdb maps its file and believes every number in it: a wrong root or length kills the process on first touch. So the two
meta pages are held against rules here, and against the file. Owns their layout. May import the standard library, base.

lmdb 0.9 on a little-endian 64-bit machine, pages 0 and 1 of the file; the one with the higher transaction counts:

    [  0,  16)  page header: u64 page number, u16, u16 flags, u32
    [ 16,  40)  u32 magic, u32 version, u64 address, u64 map size
    [ 40,  88)  the table of free pages; its first u32 is the page size
    [ 88, 136)  the table of tables
    [136, 152)  u64 last page of the file, u64 transaction

A table: u32, u16 flags, u16 depth, u64 branch pages, u64 leaf pages, u64 overflow pages, u64 entries, u64 root.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hicache.storage.base import StoreCorrupt

_META = struct.Struct("<QHHI II8xQ IHHQQQQQ IHHQQQQQ QQ".replace(" ", ""))
_TABLE = struct.Struct("<IHHQQQQQ")
_NUMBERS = struct.Struct("<Q")
_TRANSACTION_AT = 144
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META_PAGE = 8
_INTEGER_KEYS, _NO_ROOT, _MAX_DEPTH = 8, (1 << 64) - 1, 32


class TableRecord(NamedTuple):
    """The tree of one table, as a meta page or the table of tables has it."""

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
        """OSError for one of another length."""
        if record is None or len(record) != _TABLE.size:
            raise OSError(errno.EIO, "the record of a table is damaged")
        return cls(*_TABLE.unpack(record))

    def fits(self, last_page: int) -> bool:
        if self.root == _NO_ROOT:
            return self.depth == self.entries == 0
        pages = self.branch_pages + self.leaf_pages + self.overflow_pages
        return 2 <= self.root <= last_page and 0 < self.depth <= _MAX_DEPTH and 0 < pages <= last_page + 1


class TreeRoot(NamedTuple):
    """The tree of one table in one snapshot; `depth` 0: it is empty. No page of it is beyond `last_page`."""

    root: int
    depth: int
    last_page: int

    @classmethod
    def unpack(cls, record: bytes | memoryview | None, last_page: int) -> TreeRoot:
        """From the record that the table of tables holds. OSError for one that cannot be right."""
        table = TableRecord.unpack(record)
        if not table.fits(last_page):
            raise OSError(errno.EIO, "the record of a table is damaged")
        return cls(table.root, table.depth, last_page)


class Meta(NamedTuple):
    """What is used of one meta page."""

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
        return self.free.pad

    @property
    def file_bytes(self) -> int:
        """The length that lmdb takes the file to have."""
        return (self.last_page + 1) * self.psize

    @classmethod
    def unpack(cls, raw: bytes) -> Meta:
        number, _, flags, _, magic, version, map_bytes, *rest = _META.unpack_from(raw)
        return cls(
            number, flags, magic, version, map_bytes, TableRecord(*rest[:8]), TableRecord(*rest[8:16]), *rest[16:]
        )


def read_meta(data: Path, transaction: int | None = None) -> Meta | None:
    """The meta page that counts, or that of `transaction`; None where there is none, and for a file without bytes.

    Raises `StoreCorrupt` for what is no lmdb file, is of another version, or has a head that cannot be right.
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
    reason = next(_faults(metas), "")
    if reason:
        raise StoreCorrupt(f"the head of {data} is damaged ({reason}); remove the directory or restore it from a copy")
    if transaction is not None:
        return next((meta for meta in metas if meta.transaction == transaction), None)
    return max(metas, key=lambda meta: meta.transaction)


def renumber(data: Path, transaction: int) -> None:
    """Make both meta pages of a compacted copy name the same tables, as of `transaction` and the one before.

    A copy counts from 1 again. Readers in other processes keep the table of readers alive, which names the current
    transaction, and lmdb takes the meta page of that number's parity: in the copy it may be the empty one.
    """
    with data.open("r+b") as file:
        newest = read_meta(data)
        if newest is None:
            raise StoreCorrupt(f"{data} is empty; it was to be a copy of the store")
        file.seek((newest.transaction & 1) * newest.psize)
        content = bytearray(file.read(_META.size))
        for number in (0, 1):
            _NUMBERS.pack_into(content, 0, number)
            turn = transaction if transaction & 1 == number else transaction - 1
            _NUMBERS.pack_into(content, _TRANSACTION_AT, turn)
            file.seek(number * newest.psize)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _faults(metas: list[Meta]) -> Iterator[str]:
    """Why lmdb must not be given this file."""
    for index, meta in enumerate(metas):
        if meta.number != index or not meta.page_flags & _META_PAGE:
            yield f"page {index} is no meta page"
        if meta.psize != metas[0].psize or meta.psize & (meta.psize - 1):
            yield f"page size {meta.psize}"
        if meta.transaction and meta.transaction & 1 != index:
            yield f"transaction {meta.transaction} on page {index}"
    if abs(metas[0].transaction - metas[1].transaction) > 1:
        yield f"transactions {metas[0].transaction} and {metas[1].transaction}"
    # Only the newest counts; lmdb leaves the other one half as it was when a write of it fails.
    newest = max(metas, key=lambda meta: meta.transaction)
    if newest.file_bytes > newest.map_bytes:
        yield f"{newest.file_bytes} bytes in a map of {newest.map_bytes}"
    if newest.free.flags != _INTEGER_KEYS or newest.main.flags:
        yield "flags of tables"
    if not newest.free.fits(newest.last_page) or not newest.main.fits(newest.last_page):
        yield "tables beyond the file"
