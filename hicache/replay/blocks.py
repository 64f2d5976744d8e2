"""Blocks of a trace as rows of a page table, and the pool that counts their slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache.pages.key import Tokens
from hicache.pages.table import PageTable, Rows

UNLIMITED = 1 << 62


class BlockTable(PageTable):
    """Rows of blocks: each has its id, and keeps it."""

    def find(self, keys: Sequence[bytes] | Tokens) -> Rows:
        return np.asarray(keys)

    def name_blocks(self, blocks: Tokens) -> None:
        """These follow each other in a prompt, from its beginning on."""
        if len(blocks) and (most := int(blocks.max())) >= self._num_rows:
            self._grow_to(max(most + 1, 2 * self._num_rows))
        new = blocks[self.age[blocks] == 0]
        self.age[new], self.name[new] = new + 1, new
        self.index[blocks] = np.arange(len(blocks))
        self.link(blocks)

    def forget(self, rows: Rows) -> None:
        """A block has its row for good."""

    def violations(self) -> list[str]:
        """No row is free, and none has a key."""
        return []


class BlockPool:
    """Counts pages of a tier, where there are no bytes: see `HostPagePool`. `num_pages`: None for no limit."""

    def __init__(self, num_pages: int | None) -> None:
        self.num_pages = UNLIMITED if num_pages is None else num_pages
        self._used = 0
        self._next_id = 1

    def available(self) -> int:
        return self.num_pages - self._used

    def alloc(self, num_pages: int) -> Sequence[int]:
        self._used += num_pages
        self._next_id += num_pages
        return range(self._next_id - num_pages, self._next_id)

    def free(self, pages: Sequence[int]) -> None:
        self._used -= len(pages)

    def check(self) -> None:
        """The tier counts what is used."""
