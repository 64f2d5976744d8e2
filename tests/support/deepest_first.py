"""An eviction policy of one's own for the pages of the host, in one file: the page deepest in its prompt first.

It is a policy where a name has an entry for it in `RANK_POLICIES` of `hicache.pages.order`.
"""

from __future__ import annotations

import numpy as np

from hicache.pages.policy import RankPolicy, Ranks, Uses
from hicache.pages.table import Rows


class DeepestFirst(RankPolicy):
    """The page with the most pages before it is evicted first; of equals, the one with the youngest row."""

    def ranks(self, at: Uses, rows: Rows) -> Ranks:
        return -at.table.index[rows].astype(np.float64)
