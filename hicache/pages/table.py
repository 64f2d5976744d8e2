"""The page table: one row for each page that is in memory or in a transfer.

A row keeps its number from the first request for the page until no part of the engine refers to the row. So leases,
copies, reads and waiting requests refer to pages by arrays of row numbers. Columns are numpy arrays. Each class that
stores a property of pages has its own columns, which grow with the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Index = Rows | slice
"""Rows as an index of columns, see `PageTable.span`."""
Mask = npt.NDArray[np.bool_]
Names = npt.NDArray[np.uint64]

NO_ROW = -1
NO_ROWS: Rows = np.empty(0, np.int64)
_LEAST_ROWS = 64
_RUN_ROWS = 256  # number of rows of a path that are examined in one numpy call
_NAME = "S8"  # numpy type of the first bytes of a key, the name of the page


def names_of(keys: Sequence[bytes]) -> Names:
    """Return the first eight bytes of each key as a number, uint64 `[keys]`. If two pages have the same name, only the
    estimated uses of these pages are wrong."""
    return np.array(keys, _NAME).view(">u8").astype(np.uint64)


class Columns:
    """Arrays with one entry per row. `fields`: the type of each column, and its value in free rows. `unclean`: columns
    that `clear` does not reset, because their owner resets them, or sets them for each new page."""

    fields: ClassVar[dict[str, tuple[Any, Any]]]
    unclean: ClassVar[frozenset[str]] = frozenset()

    def grow(self, num_rows: int) -> None:
        """Grow the columns to at least `num_rows` rows."""
        self._to_clear = list[tuple[npt.NDArray[Any], Any]]()
        for name, (dtype, empty) in self.fields.items():
            # The operating system allocates the memory of zeros only when it is written.
            column = np.zeros(num_rows, dtype) if empty == 0 else np.full(num_rows, empty, dtype)
            before = vars(self).get(name)
            if before is not None:
                column[: len(before)] = before
            setattr(self, name, column)
            if name not in self.unclean:
                self._to_clear.append((column, empty))

    def linked(self, rows: Rows) -> None:
        """Record that `PageTable.link` has linked the rows to their previous rows."""

    def clear(self, rows: Index) -> None:
        """Reset the columns of free rows."""
        for column, empty in self._to_clear:
            column[rows] = empty


class Seen(Columns):
    """Marks the rows that a walk has seen. `age`: the age of a row that was seen; for other rows 0, or the age of an
    earlier page in the row."""

    fields: ClassVar = {"age": (np.int64, 0)}
    age: npt.NDArray[np.int64]


class PageTable(Columns):
    """The rows of pages, by page key if the page has a key. Owned by the scheduler thread.

    `index`          index of the page in its prompts, from 0
    `previous`       row of the previous page in its prompts, if a request named both pages
    `age`            a number that no other row has or had; the newest row has the highest number
    `name` the first eight bytes of the page key, see `names_of`
    `keys`           the page key; None until a host tier, store or event needs it
    `hits`           requests that used the page in memory
    `priority`       the highest priority of a request that used the page
    `refs`           references to the row: tiers that have the page or to which the page is in flight, calls of
                     `hold`, and rows that follow the row

    Each column has one additional entry for `NO_ROW`, which reads as a free row. `num_rows`: initial capacity, for
    example the pages of all tiers; the table doubles when it is full.
    """

    fields: ClassVar = {
        "index": (np.int32, 0),
        "previous": (np.int64, NO_ROW),
        "age": (np.int64, 0),
        "name": (np.uint64, 0),
        "hits": (np.int32, 0),
        "priority": (np.int32, 0),
        "refs": (np.int32, 0),
        "keys": (np.object_, None),
    }
    unclean: ClassVar = frozenset({"index", "name", "keys"})
    many: ClassVar[int] = 4096  # rows from which on a slice is faster than an index, including the search for the slice
    index: npt.NDArray[np.int32]
    previous: Rows
    age: npt.NDArray[np.int64]
    name: npt.NDArray[np.uint64]
    hits: npt.NDArray[np.int32]
    priority: npt.NDArray[np.int32]
    refs: npt.NDArray[np.int32]
    keys: npt.NDArray[np.object_]

    def __init__(self, num_rows: int = _LEAST_ROWS) -> None:
        self._parts: list[Columns] = [self]
        self._row_of: dict[bytes, int] = {}
        self.numbers = NO_ROWS  # 0, 1, 2, ...: a slice of this array holds consecutive rows
        self._free, self._first_free = NO_ROWS, 0  # a stack: free rows from an index to the end
        self._num_rows = self._last_age = 0
        self._grow_to(num_rows)

    def __len__(self) -> int:
        """The number of rows in use, including rows of pages that no tier has."""
        return self._first_free

    def __contains__(self, key: bytes) -> bool:
        return key in self._row_of

    def add_columns(self, part: Columns) -> None:
        """Grow the columns of `part` with the table."""
        part.grow(self._num_rows + 1)
        self._parts.append(part)

    def span(self, rows: Rows) -> Index:
        """Return the rows as a numpy index. If the rows are consecutive, the index is a slice, which is several times
        as fast."""
        num_rows = len(rows)
        if num_rows < self.many:
            return rows
        first, last = int(rows[0]), int(rows[-1])
        if last - first != num_rows - 1 or not 0 <= first <= last < self._num_rows:
            return rows
        if rows.base is not self.numbers and not (rows == self.numbers[first : last + 1]).all():
            return rows
        return slice(first, last + 1)

    def find(self, keys: Sequence[bytes]) -> Rows:
        """Return the rows of pages, int64 `[keys]`; `NO_ROW` for a page without a row."""
        return np.array([*map(self._row_of.get, keys, repeat(NO_ROW))], np.int64)

    def known(self, keys: Sequence[bytes]) -> Rows:
        """Return the rows of the pages in `keys` that have a row."""
        rows = self.find(keys)
        return rows[rows >= 0]

    def row(self, key: bytes) -> int:
        return self._row_of.get(key, NO_ROW)

    def keys_of(self, rows: Rows) -> list[bytes]:
        found: list[bytes] = self.keys[rows].tolist()
        return found

    def add(
        self, keys: Sequence[bytes], index: int = 0, previous_key: bytes | None = None, previous: int = NO_ROW
    ) -> Rows:
        """Return the rows of consecutive pages of a prompt, and add missing rows. The first page has the index `index`
        and follows the page with key `previous_key` or row `previous`. The caller calls `hold` or `forget` for the
        rows."""
        rows = self.find(keys)
        missing = (rows < 0).nonzero()[0]
        is_new = 0 < len(missing) == len(keys)
        if is_new:
            rows = self.add_unnamed(len(keys), index)
            self.set_keys(rows, keys)
            self.name[rows] = names_of(keys)
        elif len(missing):
            new_keys = [keys[at] for at in missing.tolist()]
            new = rows[missing] = self._new(index + missing)
            self.set_keys(new, new_keys)
            self.name[new] = names_of(new_keys)
        if previous_key is not None:
            previous = self._row_of.get(previous_key, NO_ROW)
            if previous == NO_ROW:
                previous = int(self.add([previous_key], index - 1)[0])
        if is_new:
            self.link_new(rows, previous)
        else:
            self.link(rows, previous)
        return rows

    def add_unnamed(self, num_pages: int, index: int) -> Rows:
        """Add rows for consecutive pages of a prompt, the first at `index`, without keys and links."""
        is_short = index + num_pages <= self._num_rows
        return self._new(self.numbers[index : index + num_pages] if is_short else np.arange(index, index + num_pages))

    def set_keys(self, rows: Rows, keys: Sequence[bytes]) -> None:
        """Set the keys of rows that have no key."""
        self.keys[rows] = keys
        self._row_of.update(zip(keys, rows.tolist(), strict=True))

    def link(self, rows: Rows, previous: int = NO_ROW) -> None:
        """Record that the pages `rows` are consecutive in a prompt, and that the first one follows the page
        `previous`."""
        if not len(rows):
            return
        before = np.empty_like(rows)
        before[0], before[1:] = previous, rows[:-1]
        unknown = ((self.previous[rows] < 0) & (before >= 0) & (rows >= 0)).nonzero()[0]
        if len(unknown):
            self.previous[rows[unknown]] = before[unknown]
            self.refs[before[unknown]] += 1  # each row occurs once
            for part in self._parts:
                part.linked(rows[unknown])

    def link_new(self, rows: Rows, previous: int = NO_ROW) -> None:
        """Link rows as `link` does, if the rows are new: without links and references."""
        at = self.span(rows) if len(rows) >= self.many else rows
        if isinstance(at, slice):
            self.previous[at.start + 1 : at.stop] = rows[:-1]
            self.refs[at.start : at.stop - 1] = 1
        else:
            self.previous[rows[1:]] = rows[:-1]
            self.refs[rows[:-1]] = 1
        if previous >= 0:
            self.previous[rows[0]] = previous
            self.refs[previous] += 1

    def with_paths(self, rows: Rows, seen: Seen) -> Rows:
        """Return `rows` and the rows of all known pages before them in their prompts, in the order of each prompt. Rows
        that are in `seen` are left out."""
        new = rows[seen.age[rows] != self.age[rows]]
        is_path = bool((self.previous[new[1:]] == new[:-1]).all())  # then only the first row has other rows before it
        if not is_path:  # a walk from a row covers the next row of `new` if this row is the previous page
            new = new[np.concatenate(((True,), self.previous[new[:-1]] != new[1:]))]
        num_walked = min(1, len(new)) if is_path else len(new)
        found, previous_of, age_of, seen_of = list[Rows](), self.previous.item, self.age.item, seen.age.item
        for last in new[:num_walked].tolist():
            path, row = list[Rows](), last
            while row >= 0 and age_of(row) != seen_of(row):
                first = row
                if previous_of(row) == row - 1 >= 0:  # a run of rows, each after the row with the previous number
                    first = max(0, row - _RUN_ROWS)
                    has_end = self.previous[first + 1 : row + 1] != self.numbers[first:row]
                    has_end |= seen.age[first:row] == self.age[first:row]
                    ends = has_end.nonzero()[0]
                    first += int(ends[-1]) + 1 if len(ends) else 0
                path.append(self.numbers[first : row + 1])
                seen.age[first : row + 1] = self.age[first : row + 1]
                row = previous_of(first)
            found += path[::-1]
        rest = new[num_walked:]
        seen.age[rest] = self.age[rest]
        return np.concatenate((*found, rest))

    def hold(self, rows: Rows) -> None:
        """Keep `rows` until `drop`, even if all tiers lose the pages of these rows."""
        self.refs[self.span(rows) if len(rows) >= self.many else rows] += 1

    def drop(self, rows: Rows) -> None:
        """Undo one call of `hold` for `rows`, and free the rows that have no references now."""
        at = self.span(rows) if len(rows) >= self.many else rows
        refs = self.refs[at] - 1
        self.refs[at] = refs
        if not refs.all():
            self.forget(rows)

    def forget(self, rows: Rows) -> None:
        """Free the rows of `rows` that have no references."""
        if self.refs[self.span(rows)].all():
            return
        needless = self._needless(rows)
        at = self.span(needless)
        cut = self.previous[at]
        is_start = np.ones(len(needless), np.bool_)
        is_start[1:] = cut[1:] != needless[:-1]
        cut = cut[is_start]  # the only row that follows a needless row is the next row of `needless`
        unneeded = list[int]()
        for last in cut[cut >= 0].tolist():
            before = last
            self.refs[before] -= 1
            while not self.refs[before]:  # a row to which only rows after it referred
                unneeded.append(before)
                before = int(self.previous[before])
                if before < 0:
                    break
                self.refs[before] -= 1
        freed = needless
        if unneeded:
            freed = np.concatenate((needless, np.array(unneeded, np.int64)))
            at = self.span(freed)
        if self._row_of:
            for key in self.keys[at].tolist():
                if key is not None:
                    del self._row_of[key]
            self.keys[at] = None
        for part in self._parts:
            part.clear(at)
        self._first_free -= len(freed)
        self._free[self._first_free : self._first_free + len(freed)] = freed

    def _needless(self, rows: Rows) -> Rows:
        """Return the rows without references. The reference from the next row of `rows` does not count if this next row
        has no references."""
        at = self.span(rows) if len(rows) >= self.many else rows
        if not (ages := self.age[at]).all():
            at = rows = rows[ages > 0]
        is_link, refs = np.zeros(len(rows), np.bool_), self.refs[at]
        is_link[:-1] = self.previous[at][1:] == rows[:-1]
        if (refs == is_link).all():
            return rows
        number = np.arange(len(rows))
        needed = np.where(refs != is_link, number, len(rows))
        end = np.where(is_link, len(rows), number)
        is_needless = np.minimum.accumulate(needed[::-1])[::-1] > np.minimum.accumulate(end[::-1])[::-1]
        return rows[is_needless]

    def sweep(self) -> None:
        """Free all rows without references, which a call that raised may have left."""
        self.forget(np.flatnonzero(self.refs == 0))

    def violations(self) -> list[str]:
        """Return the contradictions between rows, keys and free rows."""
        used = np.flatnonzero(self.age)
        found = [
            f"free rows have {name}"
            for part in self._parts
            for name, (_, empty) in part.fields.items()
            if name not in part.unclean and (vars(part)[name][self.age == 0] != empty).any()
        ]
        row_of = {key: row for row in used.tolist() if (key := self.keys[row]) is not None}
        if len(used) != len(self) or np.isin(self._free[self._first_free :], used).any():
            found.append(f"{len(used)} rows are used, {len(self)} were counted")
        if row_of != self._row_of:
            found.append("a key belongs to a row that has another key")
        if (self.refs[used] < 1).any():
            found.append("a row without references is not free")
        return found

    def _new(self, indices: Rows) -> Rows:
        """Return new rows for pages at `indices` of their prompts. The last row is the youngest."""
        num_rows = len(indices)
        if self._first_free + num_rows > self._num_rows:
            self._grow_to(max(self._num_rows + num_rows, 2 * self._num_rows))
        new = self._free[self._first_free : self._first_free + num_rows]
        self._first_free += num_rows
        at = self.span(new) if num_rows >= self.many else new
        self.index[at] = indices
        if isinstance(at, slice):
            np.add(self.numbers[:num_rows], self._last_age + 1, out=self.age[at])
            new = self.numbers[at]
        else:
            self.age[at] = np.arange(self._last_age + 1, self._last_age + 1 + num_rows)
            new = new.copy()
        self._last_age += num_rows
        return new

    def _grow_to(self, num_rows: int) -> None:
        free = np.concatenate((self._free[self._first_free :], np.arange(self._num_rows, num_rows)))
        self._free, self._first_free = np.empty(num_rows, np.int64), num_rows - len(free)
        self._free[self._first_free :] = free
        self._num_rows, self.numbers = num_rows, np.arange(num_rows)
        for part in self._parts:
            part.grow(num_rows + 1)
