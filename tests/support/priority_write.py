"""A write policy of one's own: pages reach the host if requests of high priority use them.

It is a policy where a name has an entry for it in `hicache.flow.write_policy.POLICIES`:
`{"write_through_priority": lambda config: PriorityWriteThrough(minimum=1)}`.
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
