"""A heap whose items know their places in it, so that any of them leaves or moves at O(log n)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

NO_ENTRY = -1

Entry = tuple[Any, ...]
"""What it is compared by, flat, and at last the item: to follow pointers costs much of the time of a large heap. No two
are equal before that."""


class Placed(Protocol):
    """`at`: the index of its entry; `NO_ENTRY` outside."""

    at: int


I = TypeVar("I", bound=Placed)  # noqa: E741


class Heap(Generic[I]):
    """The lowest entry first: `entries[0]`, if there is any. An item is in one heap at a time. Iteration: over items,
    in no order."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[I]:
        return (entry[-1] for entry in self.entries)

    def entry_of(self, item: I) -> Entry:
        return self.entries[item.at]

    def push(self, entry: Entry) -> None:
        self.entries.append(entry)
        self._rise(len(self.entries) - 1, entry)

    def replace(self, entry: Entry) -> None:
        """The entry of its item, from now on."""
        self._rise(self._sink(entry[-1].at), entry)

    def remove(self, item: I) -> None:
        at, last = item.at, self.entries.pop()
        item.at = NO_ENTRY
        if at < len(self.entries):
            self._rise(self._sink(at), last)

    def replace_all(self, entries: Iterable[Entry]) -> None:
        """Others for all items."""
        self.entries = sorted(entries)
        for at, entry in enumerate(self.entries):
            entry[-1].at = at

    def _sink(self, at: int) -> int:
        """Fill the empty place with the lower of its children, theirs with theirs; returns the place that is left."""
        heap, end = self.entries, len(self.entries)
        while (child := 2 * at + 1) < end:
            if child + 1 < end and heap[child + 1] < heap[child]:
                child += 1
            heap[at] = entry = heap[child]
            entry[-1].at = at
            at = child
        return at

    def _rise(self, at: int, entry: Entry) -> None:
        """Put `entry` into the empty place, or as far above it as it is lower than what is there."""
        heap = self.entries
        while at and entry < (above := heap[(at - 1) >> 1]):
            heap[at] = above
            above[-1].at = at
            at = (at - 1) >> 1
        heap[at] = entry
        entry[-1].at = at


def lowest_first(entries: list[Entry], freed: Callable[[Any], Iterable[Entry]]) -> Iterator[Any]:
    """The items of `entries`, which it takes over, the lowest first; `freed(item)`: those that come in once it has
    gone."""
    heapq.heapify(entries)
    while entries:
        item = heapq.heappop(entries)[-1]
        yield item
        for entry in freed(item):
            heapq.heappush(entries, entry)
