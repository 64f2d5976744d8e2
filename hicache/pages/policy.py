"""Eviction policies over rows: a policy is a function from rows to ranks; the page with the lowest rank is evicted
first.

A custom policy is a subclass of `RankPolicy` in a new file, and an entry in `RANK_POLICIES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hicache.pages.table import Columns, Index, PageTable, Rows

Ranks = npt.NDArray[np.floating[Any]]
_LEVEL = float(1 << 40)  # larger than every tick, so that a hit or a level of priority counts more than the last use


class Uses(Columns):
    """Uses of the pages of one tier. The page table has the hits and priorities, which are the same on all tiers.

    `last_use`, `created`: ticks of this tier's clock, `created` only if the policy reads it. `uses`, `used_at`,
    `counted`: columns of the policy `auto`, see `hicache.pages.frequency`; `counted`: the number of hits that the
    policy has counted.
    """

    fields: ClassVar = {
        "last_use": (np.float64, 0.0),
        "created": (np.float64, 0.0),
        "uses": (np.float64, 0.0),
        "used_at": (np.int64, 0),
        "counted": (np.int32, 0),
    }
    unclean: ClassVar = frozenset({"last_use", "created", "used_at", "counted"})
    last_use: npt.NDArray[np.float64]
    created: npt.NDArray[np.float64]
    uses: npt.NDArray[np.float64]
    used_at: npt.NDArray[np.int64]
    counted: npt.NDArray[np.int32]

    def __init__(self, table: PageTable) -> None:
        self.table, self._now = table, 0
        table.add_columns(self)

    @property
    def now(self) -> int:
        """The tick of the last use."""
        return self._now

    def note_created(self, rows: Rows) -> None:
        """Record that consecutive pages are new to the tier, the first page of the prompt first."""
        self.created[self.table.span(rows)] = np.arange(self._now + 1, self._now + 1 + len(rows))
        self._now += len(rows)

    def note_use(self, at: Index, num_rows: int) -> None:
        """Record a use of consecutive pages. The first page gets the latest tick, so that the end of a prompt is
        evicted first."""
        self._now += num_rows
        self.last_use[at] = np.arange(self._now, self._now - num_rows, -1.0)


class RankPolicy(ABC):
    """Ranks the pages of one tier. The eviction order reports each event before it calls `ranks`. `generation`: a
    number that changes when all ranks have changed."""

    generation = 0
    reads_names = False  # whether the policy identifies pages by `PageTable.name`
    reads_created = True  # whether the policy ranks pages by `Uses.created`
    counts_announced = False  # whether the policy counts the uses that `expect_uses` announces

    @abstractmethod
    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        """Return the rank of each row. The page with the lowest rank is evicted first."""

    def enter(self, at: Uses, rows: Rows) -> None:  # noqa: B027
        """Record that the tier has the unlocked pages `rows`, the first pages of a prompt first."""

    def use(self, at: Uses, rows: Rows) -> None:  # noqa: B027
        """Record that a request used the unlocked pages `rows`, the first pages of a prompt first."""

    def forget(self, at: Uses, rows: Rows, num_evictable: int) -> None:  # noqa: B027
        """Record that the tier loses the pages `rows`, which are among its `num_evictable` unlocked pages."""

    def expect_uses(self, at: Uses, rows: Rows, num_uses: npt.NDArray[np.float64] | float) -> None:  # noqa: B027
        """Record that requests will use the pages `rows` `num_uses` times, at least once."""

    def uses_of(self, at: Uses, rows: Rows) -> Ranks:
        """Return the counted uses of each page, at least 1."""
        return np.ones(len(rows))


class Lru(RankPolicy):
    """Evict the least recently used page first."""

    reads_created = False

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        return at.last_use[at.table.span(rows)]


class Lfu(RankPolicy):
    """Evict the least often used page first; of pages with equal hits, the least recently used page."""

    reads_created = False

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        index = at.table.span(rows)
        ranks: Ranks = at.table.hits[index] * _LEVEL + at.last_use[index]
        return ranks


class Fifo(RankPolicy):
    """Evict the oldest page first."""

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        return at.created[at.table.span(rows)]


class Mru(RankPolicy):
    """Evict the most recently used page first."""

    reads_created = False

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        return -at.last_use[at.table.span(rows)]


class Filo(RankPolicy):
    """Evict the youngest page first."""

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        return -at.created[at.table.span(rows)]


class Priority(RankPolicy):
    """Evict the page with the lowest priority first; of pages with equal priority, the least recently used page."""

    reads_created = False

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        index = at.table.span(rows)
        ranks: Ranks = at.table.priority[index] * _LEVEL + at.last_use[index]
        return ranks


class Slru(RankPolicy):
    """Evict pages with one use before pages with several uses; in each group, the least recently used page first."""

    reads_created = False
    protected_threshold: ClassVar[int] = 2

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        index = at.table.span(rows)
        is_protected = at.table.hits[index] >= self.protected_threshold
        ranks: Ranks = is_protected * _LEVEL + at.last_use[index]
        return ranks
