"""Whether the trees of an lmdb file are ones that lmdb may walk and change.

lmdb believes every number in its pages: a damaged one ends the process, by an address outside the map or an assertion,
or hands a page out twice. So whatever lmdb would follow is held against the rules of the format (see lmdb_tree and
lmdb_meta for the layout), with plain reads, which report errors:

    a page        says its own number and kind; its nodes fill [upper, end) without gap or overlap; its keys ascend,
                  from what the branch above says they begin with to what it says of the next page
    a tree        is as deep, and has as many pages and entries, as the record of its table says
    a page number leads to one page of the file, and no page is reached twice, nor is one that is in use a free one

What data means is not looked at: it is verified where it is read. May import numpy, the standard library,
lmdb_meta.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.storage.lmdb_meta import Meta, TableRecord

_BRANCH, _LEAF, _RUN_PAGE = 1, 2, 4  # flags of pages
_IN_A_RUN, _IS_TABLE = 1, 2  # flags of nodes in leaves
_HEAD_BYTES, _NODE_BYTES, _NUMBER_BYTES, _MAX_KEY_BYTES = 16, 8, 8, 511
_PAGES_AT_ONCE = 2048
_MOST_BETWEEN = 16  # pages between two that are wanted, which are read with them
_COMPARED_BYTES = 64  # of a key; what comes behind is taken to be in order

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class _Damaged(Exception):
    """Says what is wrong."""


def trees_fault(data: Path, meta: Meta, *, most_bytes: int | None = None, heads: bool = False) -> str:
    """The first thing that is wrong with the trees of the snapshot `meta`, "" for nothing. OSError: the medium fails.

    The snapshot must be held, or nobody write. Trees of more than `most_bytes` in all are left out, but for their roots
    and the table of tables. `heads`: look also at the page with which each long value begins, as lmdb does before it
    frees one.
    """
    descriptor = os.open(data, os.O_RDONLY)
    try:
        _Walk(descriptor, meta).run(most_bytes, heads)
    except _Damaged as damage:
        return str(damage)
    finally:
        os.close(descriptor)
    return ""


class _Keys(NamedTuple):
    """Keys as numbers that compare like them: u64 [keys, 8], and int64 [keys] bytes that each has."""

    words: npt.NDArray[np.uint64]
    lengths: Ints

    def at(self, index: Any) -> _Keys:
        return _Keys(self.words[index], self.lengths[index])

    def are_below(self, others: _Keys, *, or_same: bool = False) -> npt.NDArray[np.bool_]:
        """Key by key."""
        below = np.zeros(len(self.words), dtype=bool)
        same = np.ones(len(self.words), dtype=bool)
        for ours, theirs in zip(self.words.T, others.words.T, strict=True):
            below |= same & (ours < theirs)
            same &= ours == theirs
        shorter = self.lengths <= others.lengths if or_same else self.lengths < others.lengths
        below |= same & (shorter | (others.lengths > _COMPARED_BYTES))
        return below


class _Nodes:
    """The nodes of some pages of one kind, `page` [nodes] counting from the first of these pages.

    Raises `_Damaged`. `size` is what a node takes of its page, `data_at` where its data begins in `flat`.
    """

    def __init__(self, numbers: Ints, pages: Bytes, kind: int, name: str) -> None:
        self.psize, self.flat = pages.shape[1], pages.reshape(-1)
        words = pages.view("<u2").astype(np.int64)
        stated = np.ascontiguousarray(pages[:, :8]).view("<u8")[:, 0].astype(np.int64)
        lower, upper = words[:, 6], words[:, 7]
        least = _HEAD_BYTES + 2 * (2 if kind == _BRANCH else 1)
        good = (stated == numbers) & (words[:, 5] == kind) & (lower >= least) & (lower % 2 == 0)
        _require(good & (lower <= upper) & (upper <= self.psize), numbers, f"a page of {name} has a damaged head")
        counts = (lower - _HEAD_BYTES) // 2
        self.page = np.repeat(np.arange(len(pages)), counts)
        index = np.arange(len(self.page)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = words[self.page, _HEAD_BYTES // 2 + index]
        owner = numbers[self.page]
        good = (at >= upper[self.page]) & (at <= self.psize - _NODE_BYTES) & (at % 2 == 0)
        _require(good, owner, f"a node of {name} lies outside its page")
        self.low, self.high, self.flags, self.key_bytes = (words[self.page, at // 2 + n] for n in range(4))
        self.start = self.page * self.psize + at
        self.data_at = self.start + _NODE_BYTES + self.key_bytes
        self.data_bytes = self.low | self.high << 16
        stored = np.zeros_like(at) if kind == _BRANCH else np.where(self.in_run, _NUMBER_BYTES, self.data_bytes)
        self.size = _NODE_BYTES + self.key_bytes + stored
        _require(self.key_bytes <= _MAX_KEY_BYTES, owner, f"a key of {name} is too long")
        self._require_tiled(numbers, upper, counts, name)

    @property
    def in_run(self) -> npt.NDArray[np.bool_]:
        return (self.flags & _IN_A_RUN).astype(bool)

    def numbers_at(self, places: Ints) -> Ints:
        """The u64 at each place of `flat`; what is larger than any page number counts as -1."""
        found = np.ascontiguousarray(self.flat[places[:, None] + np.arange(_NUMBER_BYTES)]).view("<u8")[:, 0]
        return np.where(found < 1 << 62, found, np.uint64(0)).astype(np.int64) - (found >= 1 << 62)

    def keys(self, numbers: bool) -> _Keys:
        """`numbers`: keys are u64, compared as such."""
        width = min(-(-max(int(self.key_bytes.max()), 1) // 8) * 8, _COMPARED_BYTES)
        padded = np.append(self.flat, np.zeros(width, dtype=np.uint8))
        found = np.lib.stride_tricks.sliding_window_view(padded, width)[self.start + _NODE_BYTES]
        if int(self.key_bytes.min()) < width:
            found[np.arange(width) >= self.key_bytes[:, None]] = 0
        words = np.zeros((len(found), _COMPARED_BYTES // 8), dtype=np.uint64)
        words[:, : width // 8] = found.view("<u8" if numbers else ">u8")
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


class _Order:
    """Whether the keys of a table ascend, level by level. `add` a level's pages from left to right, then `descend`.

    `_least` [pages of the level]: the keys that the level above says these begin with; the first is the lowest of all.
    """

    def __init__(self, name: str, numbers: bool) -> None:
        self._name, self._numbers = name, numbers
        self._least = _Keys(np.zeros((1, _COMPARED_BYTES // 8), dtype=np.uint64), np.zeros(1, dtype=np.int64))
        self._below: list[_Keys] = []
        self._last: _Keys | None = None
        self._done = 0

    def add(self, nodes: _Nodes, numbers: Ints, is_leaf: bool) -> None:
        keys = nodes.keys(self._numbers)
        first = np.flatnonzero(np.append(True, nodes.page[1:] != nodes.page[:-1]))
        least = self._least.at(slice(self._done, self._done + len(numbers)))
        what = f"keys of {self._name} are out of order"
        if is_leaf:
            _require(least.are_below(keys.at(first), or_same=True), numbers, what)
        else:  # the first key of a branch counts as the lowest, whatever it is
            keys.words[first], keys.lengths[first] = least
        later = np.flatnonzero(nodes.page[1:] == nodes.page[:-1]) + 1
        _require(keys.at(later - 1).are_below(keys.at(later)), numbers[nodes.page[later]], what)
        last = keys.at(np.append(first[1:], len(nodes.page)) - 1)
        before = last.at(slice(None, -1)) if self._last is None else _joined([self._last, last.at(slice(None, -1))])
        next_pages = slice(1 if self._last is None else 0, None)
        _require(before.are_below(least.at(next_pages)), numbers[next_pages], what)
        if not is_leaf:
            self._below.append(keys)
        self._last = last.at(slice(-1, None))
        self._done += len(numbers)

    def descend(self) -> None:
        """From a level of branches."""
        self._least = _joined(self._below)
        self._below, self._last, self._done = [], None, 0


def _joined(parts: list[_Keys]) -> _Keys:
    return _Keys(np.concatenate([part.words for part in parts]), np.concatenate([part.lengths for part in parts]))


class _Walk:
    """One look at all trees of a snapshot. `run` raises `_Damaged` at the first thing that is wrong."""

    def __init__(self, descriptor: int, meta: Meta) -> None:
        self._descriptor, self._meta, self._psize = descriptor, meta, meta.psize
        nothing = np.empty(0, dtype=np.int64)
        self._first: list[Ints] = [nothing]  # of each run of pages that is in use, or free
        self._count: list[Ints] = [nothing]
        self._tables: list[tuple[str, TableRecord]] = []

    def run(self, most_bytes: int | None, heads: bool) -> None:
        self._walk("the tables", self._meta.main, nodes_may_be=_IS_TABLE | _IN_A_RUN, heads=heads)
        for name, table in self._tables:
            if table.flags or not table.fits(self._meta.last_page):
                raise _Damaged(f"the record of the table {name} cannot be right")
        tables = [*self._tables, ("free pages", self._meta.free)]
        for name, table in tables:
            if table.depth:
                root, is_leaf = np.array([table.root]), table.depth == 1
                _Nodes(root, next(self._batches(root))[1], _LEAF if is_leaf else _BRANCH, name)
        tree_pages = sum(table.branch_pages + table.leaf_pages for _, table in tables)
        if most_bytes is not None and tree_pages * self._psize > most_bytes:
            return
        for name, table in self._tables:
            self._walk(name, table, nodes_may_be=_IN_A_RUN, heads=heads)
        self._walk("free pages", self._meta.free, nodes_may_be=_IN_A_RUN, heads=heads, is_free_list=True)
        self._require_once()

    def _walk(
        self, name: str, table: TableRecord, *, nodes_may_be: int, heads: bool = False, is_free_list: bool = False
    ) -> None:
        """Level by level, a batch of pages at a time."""
        level = np.array([table.root] if table.depth else [], dtype=np.int64)
        order = _Order(name, is_free_list)
        counted = [0, 0, 0, 0]  # branch pages, leaf pages, pages of runs, entries
        for depth in range(table.depth):
            is_leaf, below = depth == table.depth - 1, list[Ints]()
            counted[is_leaf] += len(level)
            if sum(counted[:2]) > table.branch_pages + table.leaf_pages:
                raise _Damaged(f"{name} has more pages than its record says")
            for numbers, pages in self._batches(level):
                nodes = _Nodes(numbers, pages, _LEAF if is_leaf else _BRANCH, name)
                order.add(nodes, numbers, is_leaf)
                if not is_leaf:
                    below.append(nodes.data_bytes | nodes.flags << 32)
                    self._require_inside(below[-1], np.ones_like(below[-1]), name)
                    continue
                _require((nodes.flags & ~nodes_may_be) == 0, numbers[nodes.page], f"an entry of {name} is of no kind")
                counted[2] += self._runs(nodes, name, heads)
                counted[3] += len(nodes.page)
                if nodes_may_be & _IS_TABLE:
                    self._note_tables(nodes)
                if is_free_list:
                    self._note_free(nodes)
            self._note(level, np.ones_like(level))
            if not is_leaf:
                level = np.concatenate(below)
                order.descend()
        if counted != [table.branch_pages, table.leaf_pages, table.overflow_pages, table.entries]:
            raise _Damaged(f"{name} has other pages or entries than its record says")

    def _batches(self, numbers: Ints) -> Iterator[tuple[Ints, Bytes]]:
        for start in range(0, len(numbers), _PAGES_AT_ONCE):
            part = numbers[start : start + _PAGES_AT_ONCE]
            self._announce(part)
            pages = np.empty((len(part), self._psize), dtype=np.uint8)
            for number, page in zip(part.tolist(), pages, strict=True):
                self._read(page, number * self._psize)
            yield part, pages

    def _announce(self, numbers: Ints) -> None:
        """Have the kernel begin to read these pages, and what little lies between them."""
        pages = np.sort(numbers)
        ends = np.flatnonzero(np.append(np.diff(pages) > _MOST_BETWEEN, True))
        for first, last in zip(pages[np.append(0, ends[:-1] + 1)].tolist(), pages[ends].tolist(), strict=True):
            length = (last + 1 - first) * self._psize
            os.posix_fadvise(self._descriptor, first * self._psize, length, os.POSIX_FADV_WILLNEED)

    def _read(self, room: Bytes, offset: int) -> None:
        done, view = 0, room.data
        while done < len(view):
            got = os.preadv(self._descriptor, [view[done:]], offset + done)
            if not got:
                raise OSError(errno.EIO, f"it ends before {offset + len(view)}")
            done += got

    def _runs(self, nodes: _Nodes, name: str, heads: bool) -> int:
        """Note the pages of values that have their own; returns how many there are."""
        chosen = np.flatnonzero(nodes.in_run)
        first = nodes.numbers_at(nodes.data_at[chosen])
        count = (_HEAD_BYTES - 1 + nodes.data_bytes[chosen]) // self._psize + 1
        self._require_inside(first, count, name)
        self._note(first, count)
        for number, pages in zip(first.tolist(), count.tolist(), strict=True) if heads else ():
            head = np.empty(_HEAD_BYTES, dtype=np.uint8)
            self._read(head, number * self._psize)
            stated, flags, stated_pages = head.view("<u8")[0], head.view("<u2")[5], head.view("<u4")[3]
            if (stated, flags, stated_pages) != (number, _RUN_PAGE, pages):
                raise _Damaged(f"page {number} is not the first of {pages} with a value of {name}")
        return int(count.sum())

    def _note_tables(self, nodes: _Nodes) -> None:
        """What else is there is not a store's; whoever opens the file finds tables missing."""
        for index in np.flatnonzero(nodes.flags & _IS_TABLE):
            at, key_bytes, length = nodes.data_at[index], nodes.key_bytes[index], nodes.data_bytes[index]
            name, record = bytes(nodes.flat[at - key_bytes : at]), bytes(nodes.flat[at : at + length])
            if len(record) != TableRecord.num_bytes():
                raise _Damaged("the record of a table has another length")
            self._tables.append((name.decode("ascii", "replace"), TableRecord.unpack(record)))

    def _note_free(self, nodes: _Nodes) -> None:
        """An entry: u64 number of free pages, then their u64 numbers, the highest first."""
        for at, length, in_run in zip(nodes.data_at, nodes.data_bytes, nodes.in_run, strict=True):
            raw = nodes.flat[at : at + length]
            if in_run:
                raw = np.empty(length, dtype=np.uint8)
                self._read(raw, int(nodes.numbers_at(np.array([at]))[0]) * self._psize + _HEAD_BYTES)
            if length < _NUMBER_BYTES or length % _NUMBER_BYTES:
                raise _Damaged("a list of free pages is of no length")
            listed = np.ascontiguousarray(raw).view("<u8")
            if listed[0] != len(listed) - 1 or (listed[1:-1] <= listed[2:]).any():
                raise _Damaged("a list of free pages is out of order")
            if len(listed) > 1 and not 2 <= listed[-1] <= listed[1] <= self._meta.last_page:
                raise _Damaged("a free page is outside the file")
            free = listed[1:].astype(np.int64)
            self._note(free, np.ones_like(free))

    def _note(self, first: Ints, count: Ints) -> None:
        self._first.append(first)
        self._count.append(count)

    def _require_inside(self, first: Ints, count: Ints, name: str) -> None:
        good = (first >= 2) & (first + count - 1 <= self._meta.last_page)
        _require(good, first, f"{name} leads outside the file")

    def _require_once(self) -> None:
        first, count = np.concatenate(self._first), np.concatenate(self._count)
        order = np.argsort(first)
        first, count = first[order], count[order]
        _require(first[1:] >= (first + count)[:-1], first[1:], "a page has two owners")


def _require(good: npt.NDArray[np.bool_], numbers: Ints, what: str) -> None:
    """`_Damaged`, with the page of the first that is not good."""
    if not good.all():
        raise _Damaged(f"{what}: page {int(numbers[int(np.argmin(good))])}")
