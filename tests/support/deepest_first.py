"""A custom eviction policy for host pages, in one file: it evicts the page deepest in its prompt first.

To use it, add an entry for it to `RANK_POLICIES` of `hicache.pages.order`.
"""

from __future__ import annotations

import numpy as np

from hicache.pages.policy import RankPolicy, Ranks, Uses
from hicache.pages.table import Rows


class DeepestFirst(RankPolicy):
    """The page with the most pages before it is evicted first; of equals, the one with the youngest row."""

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        return -at.table.index[rows].astype(np.float64)
