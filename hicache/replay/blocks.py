"""Blocks of a trace in place of pages: what counts them, and what names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from hicache.tree.key import PageHasher, Tokens

UNLIMITED = 1 << 62
_KEY = ">V8"


class BlockPool:
    """Counts host pages, `num_pages` of them, where there are no bytes: see `HostPagePool`."""

    def __init__(self, num_pages: int | None) -> None:
        self.num_pages = UNLIMITED if num_pages is None else num_pages
        self._used = 0
        self._next_id = 1

    def available(self) -> int:
        return self.num_pages - self._used

    def alloc(self, num_pages: int) -> list[int]:
        self._used += num_pages
        self._next_id += num_pages
        return list(range(self._next_id - num_pages, self._next_id))

    def free(self, pages: Sequence[int]) -> None:
        self._used -= len(pages)

    def check(self) -> None:
        """The index counts what is used."""


class BlockKeys(PageHasher):
    """The key of a block is its id, which stands for all blocks before it too: one object for all that ask for it, so
    that its hash is computed once."""

    def __init__(self) -> None:
        super().__init__(b"", 1)
        self._keys = np.empty(0, np.object_)  # by id

    def seed(self, namespace: str) -> bytes:
        return b""

    def chain(self, previous: bytes, tokens: Tokens) -> list[bytes]:
        known, most = len(self._keys), int(tokens.max(initial=-1))
        if most >= known:
            more = np.arange(known, max(most + 1, 2 * known))
            keys = np.empty(len(more), np.object_)
            keys[:] = more.astype(">i8").view(_KEY).tolist()
            self._keys = np.concatenate((self._keys, keys))
        found: list[bytes] = self._keys[tokens].tolist()
        return found


def ids_of(runs: Iterable[Sequence[bytes]]) -> Tokens:
    """Of keys, one run after the other."""
    return np.frombuffer(b"".join(chain.from_iterable(runs)), ">i8").astype(np.int64)
