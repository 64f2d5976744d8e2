"""Validates the index of a store: the B-tree pages of an LMDB file, before LMDB follows them.

LMDB does not validate its B-tree pages: a damaged one ends the process, by an address outside the map or an assertion,
or allocates a page twice. So everything that LMDB would follow is compared with the rules of the format
(lmdb_pages.py), by plain reads, which report errors:

    a page         states its own number and kind; its nodes fill [start, end) without gap or overlap; its keys ascend,
                   from what the branch above states as its first key to what it states of the next page
    a B-tree       has the depth, pages and entries that the record of its table states
    a page number  leads to a page of the file; no page is reached twice, and none in use is listed as free

The data of a node is not validated here but where it is read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.storage.lmdb_pages import (
    BRANCH_PAGE,
    LEAF_PAGE,
    MAX_KEY_BYTES,
    NODE,
    NUM_META_PAGES,
    OVERFLOW_NODE,
    OVERFLOW_PAGE,
    PAGE_HEADER,
    PAGE_NUMBER,
    TABLE_NODE,
    Meta,
    TableRecord,
)

_PAGES_AT_ONCE = 2048
_MAX_GAP_PAGES = 16  # between two wanted pages: the gap is read ahead with them
_COMPARED_BYTES = 64  # of a key; longer keys with the same prefix count as ordered

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class _Damaged(Exception):
    """Says what is wrong."""


def index_fault(data: Path, meta: Meta, *, max_bytes: int | None = None, overflow: bool = False) -> str:
    """The first fault in the B-trees of the snapshot `meta`, "" for none. OSError if the file cannot be read.

    The snapshot must be held by a read transaction, or nobody write. Of B-trees of more than `max_bytes` in all, only
    the roots and the table of tables are validated. `overflow`: validate the first overflow page of each long value
    too, which LMDB reads before it frees one.
    """
    descriptor = os.open(data, os.O_RDONLY)
    try:
        _Validation(descriptor, meta).run(max_bytes, overflow)
    except _Damaged as damage:
        return str(damage)
    finally:
        os.close(descriptor)
    return ""


class _Keys(NamedTuple):
    """Keys as numbers that compare as they do: u64 [keys, 8], and int64 [keys] lengths."""

    words: npt.NDArray[np.uint64]
    lengths: Ints

    def select(self, index: Any) -> _Keys:
        return _Keys(self.words[index], self.lengths[index])

    def are_below(self, others: _Keys, *, or_same: bool = False) -> npt.NDArray[np.bool_]:
        """Compares key by key."""
        below = np.zeros(len(self.words), dtype=bool)
        same = np.ones(len(self.words), dtype=bool)
        for ours, theirs in zip(self.words.T, others.words.T, strict=True):
            below |= same & (ours < theirs)
            same &= ours == theirs
        shorter = self.lengths <= others.lengths if or_same else self.lengths < others.lengths
        below |= same & (shorter | (others.lengths > _COMPARED_BYTES))
        return below


class _Nodes:
    """The nodes of pages of one kind. `page` [nodes]: the index of a node's page among these pages.

    Raises `_Damaged`. `size`: bytes that a node takes of its page; `data_offset`: where its data starts in `flat`, the
    bytes of all pages.
    """

    def __init__(self, numbers: Ints, pages: Bytes, kind: int, name: str) -> None:
        self.psize, self.flat = pages.shape[1], pages.reshape(-1)
        words = pages.view("<u2").astype(np.int64)
        stated = np.ascontiguousarray(pages[:, :8]).view("<u8")[:, 0].astype(np.int64)
        lower, upper = words[:, 6], words[:, 7]
        min_lower = PAGE_HEADER.size + 2 * (2 if kind == BRANCH_PAGE else 1)
        good = (stated == numbers) & (words[:, 5] == kind) & (lower >= min_lower) & (lower % 2 == 0)
        _require(good & (lower <= upper) & (upper <= self.psize), numbers, f"a page of {name} has a damaged header")
        counts = (lower - PAGE_HEADER.size) // 2
        self.page = np.repeat(np.arange(len(pages)), counts)
        index = np.arange(len(self.page)) - np.repeat(np.cumsum(counts) - counts, counts)
        offset = words[self.page, PAGE_HEADER.size // 2 + index]
        owner = numbers[self.page]
        good = (offset >= upper[self.page]) & (offset <= self.psize - NODE.size) & (offset % 2 == 0)
        _require(good, owner, f"a node of {name} lies outside its page")
        self.low, self.high, self.flags, self.key_bytes = (words[self.page, offset // 2 + n] for n in range(4))
        self.start = self.page * self.psize + offset
        self.data_offset = self.start + NODE.size + self.key_bytes
        self.data_bytes = self.low | self.high << 16
        in_leaf = np.where(self.in_overflow, PAGE_NUMBER.size, self.data_bytes)
        self.size = NODE.size + self.key_bytes + (np.zeros_like(offset) if kind == BRANCH_PAGE else in_leaf)
        _require(self.key_bytes <= MAX_KEY_BYTES, owner, f"a key of {name} is too long")
        self._require_tiled(numbers, upper, counts, name)

    @property
    def in_overflow(self) -> npt.NDArray[np.bool_]:
        """Whether the data of a node is in overflow pages."""
        return (self.flags & OVERFLOW_NODE).astype(bool)

    def page_numbers(self, offsets: Ints) -> Ints:
        """The u64 at each offset of `flat`; one that is larger than any page number counts as -1."""
        found = np.ascontiguousarray(self.flat[offsets[:, None] + np.arange(PAGE_NUMBER.size)]).view("<u8")[:, 0]
        return np.where(found < 1 << 62, found, np.uint64(0)).astype(np.int64) - (found >= 1 << 62)

    def keys(self, as_numbers: bool) -> _Keys:
        """`as_numbers`: keys are u64, compared as such."""
        width = min(-(-max(int(self.key_bytes.max()), 1) // 8) * 8, _COMPARED_BYTES)
        padded = np.append(self.flat, np.zeros(width, dtype=np.uint8))
        found = np.lib.stride_tricks.sliding_window_view(padded, width)[self.start + NODE.size]
        if int(self.key_bytes.min()) < width:
            found[np.arange(width) >= self.key_bytes[:, None]] = 0
        words = np.zeros((len(found), _COMPARED_BYTES // 8), dtype=np.uint64)
        words[:, : width // 8] = found.view("<u8" if as_numbers else ">u8")
        return _Keys(words, self.key_bytes.copy())

    def _require_tiled(self, numbers: Ints, upper: Ints, counts: Ints, name: str) -> None:
        """Nodes, each of an even number of bytes, fill their page from `upper` to its end."""
        order = np.argsort(self.start)
        start, end = self.start[order], (self.start + self.size + (self.size & 1))[order]
        bases = np.arange(len(numbers)) * self.psize
        last = np.cumsum(counts) - 1  # of each page, in this order
        follows = np.append(start[1:], 0)
        follows[last] = bases + self.psize
        first = np.append(0, last[:-1] + 1)
        good = end == follows
        good[first] &= start[first] == bases + upper
        _require(good, numbers[self.page[order]], f"nodes of {name} overlap or leave gaps")


class _KeyOrder:
    """Validates that the keys of a B-tree ascend, level by level: `add` the pages of a level from left to right, then
    `descend`.

    `_first_keys` [pages of the level]: the first keys as the level above states them; the very first is the lowest of
    all.
    """

    def __init__(self, name: str, as_numbers: bool) -> None:
        self._name, self._as_numbers = name, as_numbers
        self._first_keys = _Keys(np.zeros((1, _COMPARED_BYTES // 8), dtype=np.uint64), np.zeros(1, dtype=np.int64))
        self._below: list[_Keys] = []
        self._last: _Keys | None = None
        self._done = 0

    def add(self, nodes: _Nodes, numbers: Ints, is_leaf: bool) -> None:
        keys = nodes.keys(self._as_numbers)
        first = np.flatnonzero(np.append(True, nodes.page[1:] != nodes.page[:-1]))
        stated = self._first_keys.select(slice(self._done, self._done + len(numbers)))
        what = f"keys of {self._name} are out of order"
        if is_leaf:
            _require(stated.are_below(keys.select(first), or_same=True), numbers, what)
        else:  # the first key of a branch counts as the lowest, whatever it is
            keys.words[first], keys.lengths[first] = stated
        later = np.flatnonzero(nodes.page[1:] == nodes.page[:-1]) + 1
        _require(keys.select(later - 1).are_below(keys.select(later)), numbers[nodes.page[later]], what)
        last = keys.select(np.append(first[1:], len(nodes.page)) - 1)
        before = last.select(slice(None, -1))
        if self._last is not None:
            before = _concatenate([self._last, before])
        next_pages = slice(1 if self._last is None else 0, None)
        _require(before.are_below(stated.select(next_pages)), numbers[next_pages], what)
        if not is_leaf:
            self._below.append(keys)
        self._last = last.select(slice(-1, None))
        self._done += len(numbers)

    def descend(self) -> None:
        """Go on with the level below, after a level of branches."""
        self._first_keys = _concatenate(self._below)
        self._below, self._last, self._done = [], None, 0


def _concatenate(parts: list[_Keys]) -> _Keys:
    return _Keys(np.concatenate([part.words for part in parts]), np.concatenate([part.lengths for part in parts]))


class _Validation:
    """One validation of all B-trees of a snapshot. `run` raises `_Damaged` at the first fault."""

    def __init__(self, descriptor: int, meta: Meta) -> None:
        self._descriptor, self._meta, self._psize = descriptor, meta, meta.psize
        nothing = np.empty(0, dtype=np.int64)
        self._first: list[Ints] = [nothing]  # first page of each run of pages that is in use, or free
        self._count: list[Ints] = [nothing]  # pages of each run
        self._tables: list[tuple[str, TableRecord]] = []

    def run(self, max_bytes: int | None, overflow: bool) -> None:
        self._walk("the tables", self._meta.main, allowed_flags=TABLE_NODE | OVERFLOW_NODE, overflow=overflow)
        for name, table in self._tables:
            if table.flags or not table.fits(self._meta.last_page):
                raise _Damaged(f"the record of the table {name} cannot be right")
        tables = [*self._tables, ("free pages", self._meta.free)]
        for name, table in tables:
            if table.depth:
                root, is_leaf = np.array([table.root]), table.depth == 1
                _Nodes(root, next(self._batches(root))[1], LEAF_PAGE if is_leaf else BRANCH_PAGE, name)
        index_pages = sum(table.branch_pages + table.leaf_pages for _, table in tables)
        if max_bytes is not None and index_pages * self._psize > max_bytes:
            return
        for name, table in self._tables:
            self._walk(name, table, allowed_flags=OVERFLOW_NODE, overflow=overflow)
        self._walk("free pages", self._meta.free, allowed_flags=OVERFLOW_NODE, overflow=overflow, is_free_list=True)
        self._require_unique()

    def _walk(
        self, name: str, table: TableRecord, *, allowed_flags: int, overflow: bool, is_free_list: bool = False
    ) -> None:
        """Level by level, a batch of pages at a time."""
        level = np.array([table.root] if table.depth else [], dtype=np.int64)
        order = _KeyOrder(name, is_free_list)
        counted = [0, 0, 0, 0]  # branch pages, leaf pages, overflow pages, entries
        for depth in range(table.depth):
            is_leaf, below = depth == table.depth - 1, list[Ints]()
            counted[is_leaf] += len(level)
            if sum(counted[:2]) > table.branch_pages + table.leaf_pages:
                raise _Damaged(f"{name} has more pages than its record says")
            for numbers, pages in self._batches(level):
                nodes = _Nodes(numbers, pages, LEAF_PAGE if is_leaf else BRANCH_PAGE, name)
                order.add(nodes, numbers, is_leaf)
                if not is_leaf:
                    below.append(nodes.data_bytes | nodes.flags << 32)
                    self._require_inside(below[-1], np.ones_like(below[-1]), name)
                    continue
                known = (nodes.flags & ~allowed_flags) == 0
                _require(known, numbers[nodes.page], f"an entry of {name} is of an unknown kind")
                counted[2] += self._add_overflow_pages(nodes, name, overflow)
                counted[3] += len(nodes.page)
                if allowed_flags & TABLE_NODE:
                    self._add_tables(nodes)
                if is_free_list:
                    self._add_free_pages(nodes)
            self._add_run(level, np.ones_like(level))
            if not is_leaf:
                level = np.concatenate(below)
                order.descend()
        if counted != [table.branch_pages, table.leaf_pages, table.overflow_pages, table.entries]:
            raise _Damaged(f"{name} has other pages or entries than its record says")

    def _batches(self, numbers: Ints) -> Iterator[tuple[Ints, Bytes]]:
        for start in range(0, len(numbers), _PAGES_AT_ONCE):
            part = numbers[start : start + _PAGES_AT_ONCE]
            self._read_ahead(part)
            pages = np.empty((len(part), self._psize), dtype=np.uint8)
            for number, page in zip(part.tolist(), pages, strict=True):
                self._read(page, number * self._psize)
            yield part, pages

    def _read_ahead(self, numbers: Ints) -> None:
        """Have the kernel start to read these pages, small gaps included."""
        pages = np.sort(numbers)
        ends = np.flatnonzero(np.append(np.diff(pages) > _MAX_GAP_PAGES, True))
        for first, last in zip(pages[np.append(0, ends[:-1] + 1)].tolist(), pages[ends].tolist(), strict=True):
            length = (last + 1 - first) * self._psize
            os.posix_fadvise(self._descriptor, first * self._psize, length, os.POSIX_FADV_WILLNEED)

    def _read(self, buffer: Bytes, offset: int) -> None:
        done, view = 0, buffer.data
        while done < len(view):
            got = os.preadv(self._descriptor, [view[done:]], offset + done)
            if not got:
                raise OSError(errno.EIO, f"it ends before {offset + len(view)}")
            done += got

    def _add_overflow_pages(self, nodes: _Nodes, name: str, validate_first: bool) -> int:
        """Record the overflow pages of values; returns how many there are."""
        chosen = np.flatnonzero(nodes.in_overflow)
        first = nodes.page_numbers(nodes.data_offset[chosen])
        count = (PAGE_HEADER.size - 1 + nodes.data_bytes[chosen]) // self._psize + 1
        self._require_inside(first, count, name)
        self._add_run(first, count)
        for number, pages in zip(first.tolist(), count.tolist(), strict=True) if validate_first else ():
            header = np.empty(PAGE_HEADER.size, dtype=np.uint8)
            self._read(header, number * self._psize)
            stated, flags, stated_pages = header.view("<u8")[0], header.view("<u2")[5], header.view("<u4")[3]
            if (stated, flags, stated_pages) != (number, OVERFLOW_PAGE, pages):
                raise _Damaged(f"page {number} is not the first of {pages} with a value of {name}")
        return int(count.sum())

    def _add_tables(self, nodes: _Nodes) -> None:
        """Record the tables; other entries there are not a store's, and whoever opens the file misses its tables."""
        for index in np.flatnonzero(nodes.flags & TABLE_NODE):
            start, key_bytes, length = nodes.data_offset[index], nodes.key_bytes[index], nodes.data_bytes[index]
            name, record = bytes(nodes.flat[start - key_bytes : start]), bytes(nodes.flat[start : start + length])
            if len(record) != TableRecord.num_bytes():
                raise _Damaged("the record of a table has another length")
            self._tables.append((name.decode("ascii", "replace"), TableRecord.unpack(record)))

    def _add_free_pages(self, nodes: _Nodes) -> None:
        """Record free pages. An entry: u64 number of free pages, then their u64 numbers, the highest first."""
        for start, length, in_overflow in zip(nodes.data_offset, nodes.data_bytes, nodes.in_overflow, strict=True):
            raw = nodes.flat[start : start + length]
            if in_overflow:
                raw = np.empty(length, dtype=np.uint8)
                self._read(raw, int(nodes.page_numbers(np.array([start]))[0]) * self._psize + PAGE_HEADER.size)
            if length < PAGE_NUMBER.size or length % PAGE_NUMBER.size:
                raise _Damaged("a list of free pages has an impossible length")
            listed = np.ascontiguousarray(raw).view("<u8")
            if listed[0] != len(listed) - 1 or (listed[1:-1] <= listed[2:]).any():
                raise _Damaged("a list of free pages is out of order")
            if len(listed) > 1 and not NUM_META_PAGES <= listed[-1] <= listed[1] <= self._meta.last_page:
                raise _Damaged("a free page is outside the file")
            free = listed[1:].astype(np.int64)
            self._add_run(free, np.ones_like(free))

    def _add_run(self, first: Ints, count: Ints) -> None:
        self._first.append(first)
        self._count.append(count)

    def _require_inside(self, first: Ints, count: Ints, name: str) -> None:
        good = (first >= NUM_META_PAGES) & (first + count - 1 <= self._meta.last_page)
        _require(good, first, f"{name} leads outside the file")

    def _require_unique(self) -> None:
        first, count = np.concatenate(self._first), np.concatenate(self._count)
        order = np.argsort(first)
        first, count = first[order], count[order]
        _require(first[1:] >= (first + count)[:-1], first[1:], "a page has two owners")


def _require(good: npt.NDArray[np.bool_], numbers: Ints, what: str) -> None:
    """Raises `_Damaged` with the number of the first page that is not good."""
    if not good.all():
        raise _Damaged(f"{what}: page {int(numbers[int(np.argmin(good))])}")
