"""Eviction policies over rows: a policy is a function from rows to ranks, and the lowest rank leaves first.

A policy of one's own is a `RankPolicy` in a file that imports this one, and an entry in `RANK_POLICIES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hicache.pages.table import Columns, PageTable, Rows

Ranks = npt.NDArray[np.floating[Any]]
_LEVEL = float(1 << 40)  # more uses than any tier sees: what counts before the time of the last use is a multiple


class Uses(Columns):
    """How the pages of one tier were used, as far as the table does not say it for all tiers.

    `last_use`, `created`: ticks of a clock of this tier. `uses`, `used_at`, `counted`: of the policy `auto`, see
    `hicache.pages.frequency`; `counted` are the hits of the table that it has counted.
    """

    fields: ClassVar = {
        "last_use": (np.int64, 0),
        "created": (np.int64, 0),
        "uses": (np.float64, 0.0),
        "used_at": (np.int64, 0),
        "counted": (np.int32, 0),
    }
    last_use: npt.NDArray[np.int64]
    created: npt.NDArray[np.int64]
    uses: npt.NDArray[np.float64]
    used_at: npt.NDArray[np.int64]
    counted: npt.NDArray[np.int32]

    def __init__(self, table: PageTable) -> None:
        self.table, self._now = table, 0
        table.add_columns(self)

    def note_created(self, rows: Rows) -> None:
        """Pages that follow each other are new to the tier, the first one first."""
        self.created[rows] = np.arange(self._now + 1, self._now + 1 + len(rows))
        self._now += len(rows)

    def note_use(self, rows: Rows) -> None:
        """Pages that follow each other were used, the first one last: of a prompt the end leaves first."""
        self._now += len(rows)
        self.last_use[rows] = np.arange(self._now, self._now - len(rows), -1)


class RankPolicy(ABC):
    """How the pages of one tier rank. The order tells it of each event before it asks for ranks. `generation`: another
    number once all ranks have changed."""

    generation = 0
    reads_names = False  # whether it knows pages by `PageTable.name`

    @abstractmethod
    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        """Of each row; pages with the lowest are evicted first."""

    def enter(self, at: Uses, rows: Rows) -> None:  # noqa: B027
        """The tier has these, the first pages of a prompt first, and nobody has locked them."""

    def lock(self, num_rows: int) -> None:  # noqa: B027
        """So many pages of the tier got their first lock."""

    def use(self, at: Uses, rows: Rows) -> None:  # noqa: B027
        """A request used these, the first pages of a prompt first, while nobody had locked them."""

    def forget(self, at: Uses, rows: Rows) -> None:  # noqa: B027
        """The tier has these no more."""

    def expect_uses(self, at: Uses, rows: Rows, num_uses: npt.NDArray[np.float64] | float) -> None:  # noqa: B027
        """These will be used so often, 1 at least."""

    def uses_of(self, at: Uses, rows: Rows) -> Ranks:
        """How often each was used, as far as that counts; 1 at least."""
        return np.ones(len(rows))


class Lru(RankPolicy):
    """The least recently used page leaves first."""

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        return at.last_use[rows].astype(np.float64)


class Lfu(RankPolicy):
    """The least often used page leaves first; of equals, the least recently used."""

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        ranks: Ranks = at.table.hits[rows] * _LEVEL + at.last_use[rows]
        return ranks


class Fifo(RankPolicy):
    """The oldest page leaves first."""

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        return at.created[rows].astype(np.float64)


class Mru(RankPolicy):
    """The most recently used page leaves first."""

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        return -at.last_use[rows].astype(np.float64)


class Filo(RankPolicy):
    """The youngest page leaves first."""

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        return -at.created[rows].astype(np.float64)


class Priority(RankPolicy):
    """The lowest priority that requests gave leaves first; of equals, the least recently used page."""

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        ranks: Ranks = at.table.priority[rows] * _LEVEL + at.last_use[rows]
        return ranks


class Slru(RankPolicy):
    """Pages that one request has used leave before those that several have; of both, the least recently used."""

    protected_threshold: ClassVar[int] = 2

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        is_protected = at.table.hits[rows] >= self.protected_threshold
        ranks: Ranks = is_protected * _LEVEL + at.last_use[rows]
        return ranks
