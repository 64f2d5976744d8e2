"""Blocks of a trace as rows of a page table, and the pool that counts their slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache.pages.key import Tokens
from hicache.pages.table import PageTable, Rows

UNLIMITED = 1 << 62


class BlockTable(PageTable):
    """A page table in which the row of each block is always the block's id."""

    def find(self, keys: Sequence[bytes] | Tokens) -> Rows:
        return np.asarray(keys)

    def name_blocks(self, blocks: Tokens) -> None:
        """Create the rows of `blocks`, and link each block to the block before it. `blocks`: the first blocks of a
        prompt, in order."""
        if len(blocks) and (most := int(blocks.max())) >= self._num_rows:
            self._grow_to(max(most + 1, 2 * self._num_rows))
        num_known = np.count_nonzero(self.age[blocks])  # the first blocks of a prompt are known first
        new = blocks[num_known:]
        self.age[new], self.name[new] = new + 1, new
        self.index[new] = np.arange(num_known, len(blocks))
        self.link(blocks[max(0, num_known - 1) :])

    def hold(self, rows: Rows) -> None:
        """Do nothing, because the row of a block never changes."""

    def drop(self, rows: Rows) -> None:
        """Do nothing, see `hold`."""

    def violations(self) -> list[str]:
        """Return no violation: this table has no free rows and no keys to check."""
        return []


class BlockPool:
    """A page pool that counts pages and has no memory (see `HostPagePool`). `num_pages`: capacity in blocks; None: no
    limit."""

    def __init__(self, num_pages: int | None) -> None:
        self.num_pages = UNLIMITED if num_pages is None else num_pages
        self._used = 0
        self._next_id = 1

    def available(self) -> int:
        return self.num_pages - self._used

    def alloc(self, num_pages: int) -> Rows:
        self._used += num_pages
        self._next_id += num_pages
        return np.arange(self._next_id - num_pages, self._next_id)

    def free(self, pages: Sequence[int]) -> None:
        self._used -= len(pages)

    def check(self) -> None:
        """Do nothing, because the tier itself checks the number of its used pages."""
