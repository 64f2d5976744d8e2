"""A page store that passes every call on, for classes that change some of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hicache.storage import PageBuffer, PageStore, StoreStats


class ForwardingStore:
    """See `PageStore`. Every call goes to `store`, which this one closes."""

    def __init__(self, store: PageStore) -> None:
        self._store = store

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return self._store.page_sizes

    def register_memory(self, memory: PageBuffer) -> None:
        self._store.register_memory(memory)

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        return self._store.contains(keys, deadline_s=deadline_s)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        return self._store.get_into(keys, buffers, deadline_s=deadline_s)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._store.touch(keys)

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        return self._store.put(items, lag=lag, deadline_s=deadline_s)

    def reopen(self) -> bool:
        return self._store.reopen()

    def delete(self, keys: Sequence[bytes]) -> int:
        return self._store.delete(keys)

    def stats(self) -> StoreStats:
        return self._store.stats()

    def thread_read_errors(self) -> int:
        return self._store.thread_read_errors()

    def sync(self) -> None:
        self._store.sync()

    def close(self) -> None:
        self._store.close()
