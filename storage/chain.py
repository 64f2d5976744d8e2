"""Several stores as one: each key is read from the first that has it, and written to all.

For callers that know one store. An engine reads its disk and its remote tier side by side instead, with threads of
their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hicache.storage.base import PageBuffer, PageStore, StoreError, StoreStats

PAUSE_S = 5.0


class ChainStore:
    """See `hicache.storage.base.PageStore`. `stores`: of the same page sizes, in the order in which reads ask them;
    this one closes them.

    A store behind the first that fails is left out for `PAUSE_S` seconds; as often one that is read-only is reopened. A
    page counts as stored where any store took it. `stats` adds up hits, corrupt values and errors; misses are those of
    the last, which was asked for what the others lack; everything else is the first's.
    """

    def __init__(self, stores: Sequence[PageStore]) -> None:
        sizes = {store.page_sizes for store in stores if store.page_sizes}
        if not stores or len(sizes) > 1:
            raise StoreError(f"a chain of {len(stores)} stores with page sizes {sorted(sizes)}; give equal ones")
        self.stores = tuple(stores)
        self._asks_again_s, self._reopens_at_s = [-math.inf] * len(stores), -math.inf

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return next((store.page_sizes for store in self.stores if store.page_sizes), ())

    def register_memory(self, memory: PageBuffer) -> None:
        for store in self.stores:
            store.register_memory(memory)

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        found = [False] * len(keys)
        for store in self._asked():
            absent = [n for n, held in enumerate(found) if not held]
            answers = store.contains([keys[n] for n in absent], deadline_s=deadline_s)
            for n, held in zip(absent, answers, strict=True):
                found[n] = held
        return found

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        if len(keys) != len(buffers):
            raise StoreError(f"{len(keys)} keys but {len(buffers)} buffers")
        found = [False] * len(keys)
        for store in self._asked():
            absent = [n for n, held in enumerate(found) if not held]
            answers = store.get_into([keys[n] for n in absent], [buffers[n] for n in absent], deadline_s=deadline_s)
            for n, held in zip(absent, answers, strict=True):
                found[n] = held
        return found

    def touch(self, keys: Sequence[bytes]) -> None:
        for store in self.stores:
            store.touch(keys)

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        if time.monotonic() >= self._reopens_at_s and any(store.stats().read_only for store in self.stores):
            self._reopens_at_s = time.monotonic() + PAUSE_S
            self.reopen()
        answers = [store.put(items, lag=lag, deadline_s=deadline_s) for store in self._asked()]
        return [any(of_item) for of_item in zip(*answers, strict=True)]

    def reopen(self) -> bool:
        answers = [store.reopen() for store in self.stores]  # each is to try
        return any(answers)

    def delete(self, keys: Sequence[bytes]) -> int:
        return max(store.delete(keys) for store in self.stores)

    def stats(self) -> StoreStats:
        first, *others = (store.stats() for store in self.stores)
        names = ("corrupt", "read_errors", "write_errors")
        sums = {name: sum(getattr(stats, name) for stats in (first, *others)) for name in names}
        hits = first.hits + sum(stats.hits for stats in others)
        read_only = all(stats.read_only for stats in (first, *others))
        return replace(first, hits=hits, misses=(first, *others)[-1].misses, read_only=read_only, **sums)

    def thread_read_errors(self) -> int:
        """Those of the first: what a store behind it cannot read hides nothing of the first."""
        return self.stores[0].thread_read_errors()

    def sync(self) -> None:
        for store in self.stores:
            store.sync()

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def _asked(self) -> Iterator[PageStore]:
        """The stores that are not left out now; one that fails until the next is taken will be."""
        for n, store in enumerate(self.stores):
            if time.monotonic() < self._asks_again_s[n]:
                continue
            before = store.thread_read_errors(), store.stats().write_errors
            yield store
            if n and (store.thread_read_errors(), store.stats().write_errors) != before:
                self._asks_again_s[n] = time.monotonic() + PAUSE_S
