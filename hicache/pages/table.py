"""The page table: one row for each page that memory holds or that a transfer brings.

A row keeps its number from the moment a request names the page until nothing needs it, so whatever refers to pages (a
lease, a copy, a read, a waiting request) holds an array of row numbers. Columns are numpy arrays; each part that keeps
something of a page has columns of its own, which grow with the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Names = npt.NDArray[np.uint64]

NO_ROW = -1
NO_ROWS: Rows = np.empty(0, np.int64)
_LEAST_ROWS = 64
_NAME = "S8"  # numpy type of the bytes of a key in its name; a key has more bytes


def names_of(keys: Sequence[bytes]) -> Names:
    """The first eight bytes of each key as a number, uint64 `[keys]`. If pages share a name, only their uses are
    estimated wrongly."""
    return np.array(keys, _NAME).view(">u8").astype(np.uint64)


class Columns:
    """Arrays with an entry for each row. `fields`: of each its type, and what it holds of a row that nothing needs."""

    fields: ClassVar[dict[str, tuple[Any, Any]]]

    def grow(self, num_rows: int) -> None:
        """Have `num_rows` rows, at least as many as now."""
        for name, (dtype, empty) in self.fields.items():
            column = np.full(num_rows, empty, dtype)
            before = vars(self).get(name)
            if before is not None:
                column[: len(before)] = before
            setattr(self, name, column)

    def clear(self, rows: Rows) -> None:
        """Nothing needs these rows any more."""
        for name, (_, empty) in self.fields.items():
            vars(self)[name][rows] = empty


class Seen(Columns):
    """The rows that a walk has seen: `age` is theirs; of all other rows it is 0, or that of an earlier page."""

    fields: ClassVar = {"age": (np.int64, 0)}
    age: npt.NDArray[np.int64]


class PageTable(Columns):
    """The rows of pages, by page key if they have one. Owned by the scheduler thread.

    `index`          of the page in its prompts, from 0
    `previous`       the row of the page before it, if a request named both
    `age`            a number that no other row has or had; the row made last has the highest
    `name`           see `names_of`
    `keys`           the page key; None until a host tier, store or event needs it
    `hits`           requests that used the page since memory has it
    `priority`       the highest of a request that used it
    `refs`           what needs the row: tiers that have the page or get it, holders of `hold`, and rows that follow it

    Each column has one more entry, which no page gets: `NO_ROW` reads it as a page that nothing needs.
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
        self._free, self._num_free = NO_ROWS, 0  # a stack
        self._num_rows = self._last_age = 0
        self._grow_to(num_rows)

    def __len__(self) -> int:
        """Rows that something needs, or that were just named."""
        return self._num_rows - self._num_free

    def __contains__(self, key: bytes) -> bool:
        return key in self._row_of

    def add_columns(self, part: Columns) -> None:
        """Have the columns of `part` grow with the table."""
        part.grow(self._num_rows + 1)
        self._parts.append(part)

    def find(self, keys: Sequence[bytes]) -> Rows:
        """The rows of pages, int64 `[keys]`; `NO_ROW` for those without."""
        return np.array([*map(self._row_of.get, keys, repeat(NO_ROW))], np.int64)

    def known(self, keys: Sequence[bytes]) -> Rows:
        """The rows of those pages that have one."""
        rows = self.find(keys)
        return rows[rows >= 0]

    def row(self, key: bytes) -> int:
        return self._row_of.get(key, NO_ROW)

    def keys_of(self, rows: Rows) -> list[bytes]:
        found: list[bytes] = self.keys[rows].tolist()
        return found

    def add(self, keys: Sequence[bytes], index: int = 0, previous_key: bytes | None = None) -> Rows:
        """The rows of pages that follow each other in a prompt, the first at `index`, behind the page `previous_key`.
        Pages without a row get one, which the caller has something need, or gives back by `forget`."""
        rows = self.find(keys)
        missing = (rows < 0).nonzero()[0]
        if len(missing):
            new_keys = keys if len(missing) == len(keys) else [keys[at] for at in missing.tolist()]
            names = names_of(new_keys)
            new = rows[missing] = self._new(index + missing)
            self.set_keys(new, new_keys)
            self.name[new] = names
        previous = NO_ROW if previous_key is None else self.row(previous_key)
        if previous == NO_ROW and previous_key is not None:
            previous = int(self.add([previous_key], index - 1)[0])
        self.link(rows, previous)
        return rows

    def add_unnamed(self, num_pages: int, index: int) -> Rows:
        """New rows of pages that follow each other in a prompt, the first at `index`; they have no keys yet."""
        return self._new(np.arange(index, index + num_pages))

    def set_keys(self, rows: Rows, keys: Sequence[bytes]) -> None:
        """Give these rows, which have none, the keys of their pages."""
        self.keys[rows] = keys
        self._row_of.update(zip(keys, rows.tolist(), strict=True))

    def link(self, rows: Rows, previous: int = NO_ROW) -> None:
        """Pages of these rows follow each other in a prompt, the first behind that of `previous`."""
        if not len(rows):
            return
        before = np.empty_like(rows)
        before[0], before[1:] = previous, rows[:-1]
        unknown = ((self.previous[rows] < 0) & (before >= 0) & (rows >= 0)).nonzero()[0]
        if len(unknown):
            self.previous[rows[unknown]] = before[unknown]
            self.refs[before[unknown]] += 1  # each row occurs once

    def with_paths(self, rows: Rows, seen: Seen) -> Rows:
        """Each of `rows` behind the rows of the pages before it, as far as they are known, the first one first; only
        those that are not `seen` yet."""
        new = rows[seen.age[rows] != self.age[rows]]
        is_path = bool((self.previous[new[1:]] == new[:-1]).all())  # then only the first has others before it
        num_walked = min(1, len(new)) if is_path else len(new)
        found, previous_of, age_of, seen_of = list[int](), self.previous.item, self.age.item, seen.age.item
        for last in new[:num_walked].tolist():
            start, row = len(found), last
            while row >= 0 and (age := age_of(row)) != seen_of(row):
                found.append(row)
                seen.age[row] = age
                row = previous_of(row)
            found[start:] = found[start:][::-1]
        rest = new[num_walked:]
        seen.age[rest] = self.age[rest]
        return np.concatenate((np.array(found, np.int64), rest))

    def hold(self, rows: Rows) -> None:
        """Somebody needs these rows, whatever becomes of their pages, until `drop`."""
        self.refs[rows] += 1

    def drop(self, rows: Rows) -> None:
        """Undo one `hold`."""
        self.refs[rows] -= 1
        self.forget(rows)

    def forget(self, rows: Rows) -> None:
        """Give back those of these rows that nothing needs."""
        if not (self.refs[rows] == 0).any():
            return
        needless = self._needless(rows)
        cut = self.previous[needless]
        unneeded = list[int]()
        for last in cut[(cut >= 0) & ~np.isin(cut, needless)].tolist():
            before = last
            self.refs[before] -= 1
            while not self.refs[before]:  # before them those that only they needed
                unneeded.append(before)
                before = int(self.previous[before])
                if before < 0:
                    break
                self.refs[before] -= 1
        gone = np.concatenate((needless, np.array(unneeded, np.int64)))
        for key in self.keys[gone].tolist():
            if key is not None:
                del self._row_of[key]
        for part in self._parts:
            part.clear(gone)
        self._give(gone)

    def _needless(self, rows: Rows) -> Rows:
        """Those of these rows that nothing needs, or only the next one of `rows`, which nothing needs either."""
        rows = rows[self.age[rows] > 0]
        is_link = np.append(self.previous[rows[1:]] == rows[:-1], False)
        at = np.arange(len(rows))
        needed = np.where(self.refs[rows] != is_link, at, len(rows))
        end = np.where(is_link, len(rows), at)
        is_needless = np.minimum.accumulate(needed[::-1])[::-1] > np.minimum.accumulate(end[::-1])[::-1]
        return rows[is_needless]

    def sweep(self) -> None:
        """Give back all rows that nothing needs: a call that raised may have named pages, and no more."""
        self.forget(np.flatnonzero(self.refs == 0))

    def violations(self) -> list[str]:
        """Where the rows, their keys and the free ones disagree."""
        used = np.flatnonzero(self.age)
        found = []
        row_of = {key: row for row in used.tolist() if (key := self.keys[row]) is not None}
        if len(used) != len(self) or np.isin(self._free[: self._num_free], used).any():
            found.append(f"{len(used)} rows are used, {len(self)} were counted")
        if row_of != self._row_of:
            found.append("a key has another row than the row says")
        if (self.refs[used] < 1).any():
            found.append("a row is kept that nothing needs")
        return found

    def _new(self, indices: Rows) -> Rows:
        """Rows of pages at `indices` of their prompts, the last one the youngest."""
        new = self._take(len(indices))
        self.index[new] = indices
        self.age[new] = np.arange(self._last_age + 1, self._last_age + 1 + len(new))
        self._last_age += len(new)
        return new

    def _take(self, num_rows: int) -> Rows:
        if num_rows > self._num_free:
            self._grow_to(max(self._num_rows + num_rows, 2 * self._num_rows))
        self._num_free -= num_rows
        return self._free[self._num_free : self._num_free + num_rows][::-1].copy()

    def _give(self, rows: Rows) -> None:
        self._free[self._num_free : self._num_free + len(rows)] = rows[::-1]
        self._num_free += len(rows)

    def _grow_to(self, num_rows: int) -> None:
        new, old = np.arange(num_rows - 1, self._num_rows - 1, -1), self._free[: self._num_free]
        self._free = np.empty(num_rows, np.int64)
        self._num_free, self._num_rows = 0, num_rows
        self._give(np.concatenate((new, old))[::-1])
        for part in self._parts:
            part.grow(num_rows + 1)
