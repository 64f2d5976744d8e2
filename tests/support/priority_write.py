"""A custom write policy: it copies pages to the host if requests of high priority use them.

To use it, add an entry for it to `hicache.flow.write_policy.POLICIES`: `{"write_through_priority": lambda config:
PriorityWriteThrough(minimum=1)}`.
"""

from __future__ import annotations

from hicache.flow.write_policy import OnEviction
from hicache.pages.table import Mask, PageTable, Rows


class PriorityWriteThrough:
    """Copy pages at once that requests of at least priority `minimum` use. A page has the highest priority of its
    requests, and no page ranks below the next one, so the copied pages are always a prefix."""

    on_eviction = OnEviction.DROP

    def __init__(self, minimum: int) -> None:
        self._minimum = minimum

    def selects(self, table: PageTable, rows: Rows) -> Mask:
        is_selected: Mask = table.priority[rows] >= self._minimum
        return is_selected
