"""The eviction order, a heap by rank, and what a policy is: how records rank.

The order is a persistent structure: the next victim is found without a look at the others. It holds records, one for
each thing that may be evicted, and knows nothing of what they stand for: of nodes the radix tree keeps an order for
each component, of runs of pages their index keeps one, of chunks vLLM's CPU tier. What queued requests expect goes last
in all of them.

A policy of one's own is an `EvictionStrategy`, or an `EvictionPolicy` where it remembers more than how a thing was
used, in a file that imports this one, and an entry in the table of `hicache.eviction.policy`.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, Protocol, TypeVar

Priority = float | tuple[float, ...]

clock = itertools.count(1)  # ticks, one for each use
_NO_ENTRY = -1
NOBODY: Any = None


class Usage(Protocol):
    """How a thing was used, which strategies rank by. Times are ticks. `name`: the same when it comes back."""

    hit_count: int
    priority: int
    last_access_time: int
    creation_time: int
    num_tokens: int

    @property
    def name(self) -> int: ...


class Record:
    """A thing's place in its order. `owner`: whose use counts, while the thing is held. `expected`: how many queued
    requests will need it.

    Of the order: `at`, the index of its entry. Of the policy auto: `uses`, `used_at`, `hits`.
    """

    __slots__ = ("at", "expected", "hits", "used_at", "uses")

    def __init__(self) -> None:
        self.at = _NO_ENTRY
        self.expected = self.used_at = self.hits = 0
        self.uses = 0.0

    @property
    def owner(self) -> Usage:
        raise AssertionError("nobody holds it")

    def follow(self, other: Record) -> None:
        """It was part of what `other` stands for: their last uses are the same."""
        self.uses, self.used_at, self.hits = other.uses, other.used_at, other.hits


class CountedRecord(Record):
    """A record that counts its own use: of a page, or of what else is known by a key."""

    __slots__ = ("creation_time", "hit_count", "key", "last_access_time", "priority")
    num_tokens = 1

    def __init__(self, key: Hashable) -> None:
        super().__init__()
        self.key = key
        self.hit_count = self.priority = 0
        self.last_access_time = self.creation_time = next(clock)

    @property
    def owner(self) -> CountedRecord:
        return self

    @property
    def name(self) -> int:
        return hash(self.key)


R = TypeVar("R", bound=Record)


class EvictionPolicy(ABC):
    """How the records of one order rank. The order tells it of every event before it asks for the rank; a record's
    owner is up to date then. `generation`: another number once all ranks have changed.

    What is not abstract suits a policy that ranks by `Usage` alone.
    """

    generation = 0

    @abstractmethod
    def rank(self, record: Record) -> Priority:
        """The one with the lowest goes first. All of one policy are of one length."""

    def enter(self, record: Record) -> None:  # noqa: B027
        """It is held and not locked from now on: it came, or lost its last lock."""

    def use(self, record: Record) -> None:  # noqa: B027
        """It was used while it was in the order."""

    def lock(self, record: Record) -> None:  # noqa: B027
        """It got its first lock."""

    def split(self, upper: Record, lower: Record) -> None:  # noqa: B027
        """`upper` is new and took a part of `lower`."""

    def forget(self, record: Record) -> None:  # noqa: B027
        """It, or a part that was split off it, is held no more."""

    def expect_uses(self, record: Record, num_uses: float) -> None:  # noqa: B027
        """It will be used `num_uses` times; 0: its uses so far say nothing."""

    def uses_of(self, record: Record) -> float:
        """How often it was used, as far as that counts; 0 where no use is to come."""
        return 1.0

    def like_tokens(self, num_tokens: int, name_at: Callable[[int], int]) -> int:
        """How many of `num_tokens` tokens are to be one record. `name_at(n)`: the name of what follows the first n."""
        return num_tokens


class EvictionStrategy(EvictionPolicy):
    """Ranks nodes, runs or chunks by how they were used."""

    @abstractmethod
    def get_priority(self, node: Usage) -> Priority:
        """The one with the lowest goes first. All of one strategy are of one length."""

    def rank(self, record: Record) -> Priority:
        return self.get_priority(record.owner)


class EvictionOrder(Generic[R]):
    """The records of what is held and not locked, and which of them is evicted next: what nobody expects goes first; of
    these the record whose rank was lowest at its last event; of equals, the one with the earlier event.

    Called from one thread. A record has one order for life; its owner is up to date when an event is reported, and of a
    path the deepest is reported first. `is_evictable(record)`: whether it may be a victim now. One that may not has no
    entry in the heap, or loses it at the top, until `update`. Nothing stale is left behind for one later call to clear
    away: every event costs at most O(log n), but for a victim after all ranks have changed. Iteration: in no order.
    """

    def __init__(self, policy: EvictionPolicy, is_evictable: Callable[[R], bool]) -> None:
        self.policy, self._is_evictable = policy, is_evictable
        # (is expected, *rank, sequence number, record), flat: a comparison that has to follow pointers costs much of a
        # large heap.
        self._heap: list[tuple[Any, ...]] = []
        self._sequence = itertools.count()
        self._aside: dict[R, None] = {}
        self._generation = policy.generation

    def insert(self, record: R) -> None:
        """What is held, and not locked, from now on enters the order."""
        self.policy.enter(record)
        self._enter(record)

    def hit(self, record: R) -> None:
        """It was used; where it is locked, that counts once it is unlocked."""
        if record in self:
            self.policy.use(record)
            self._move(record)

    def expect(self, record: R, change: int) -> None:
        """`change` more queued requests will need it, or fewer. That is no use."""
        record.expected += change
        self.update(record)

    def expect_uses(self, record: R, num_uses: float) -> None:
        """It will be used `num_uses` times, see `EvictionPolicy.expect_uses`. That is no use."""
        self.policy.expect_uses(record, num_uses)
        self.update(record)

    def lock(self, record: R) -> None:
        """It got its first lock and leaves the order."""
        self.policy.lock(record)
        self._leave(record)

    def unlock(self, record: R) -> None:
        """It lost its last lock and is back in the order, with the rank of its last use. That is no use."""
        self.insert(record)

    def update(self, record: R) -> None:
        """It may be a victim from now on, or its rank changed without a use; where it is locked, nothing happens."""
        if record in self._aside:
            del self._aside[record]
            self._enter(record)
        else:
            self._move(record)

    def split(self, upper: R, lower: R) -> None:
        """`upper` is new and took a part of `lower`, which is in the order; it enters with `lower`'s rank: their owners
        were used alike."""
        self.policy.split(upper, lower)
        self._enter(upper)

    def evict(self, record: R) -> None:
        """It is held no more and leaves the order."""
        self._leave(record)
        self.policy.forget(record)

    def victim(self) -> R | None:
        """The next to be evicted, which stays in the order until `evict`; None where none may be."""
        if self._generation != self.policy.generation:
            self._generation = self.policy.generation
            self._rank_again()
        while self._heap:
            record: R = self._heap[0][-1]
            if self._is_evictable(record):
                return record
            self._leave(record)
            self._aside[record] = None
        return None

    def leaving(self, above: Callable[[R], R | None], num_behind: Callable[[R], int]) -> Iterator[R]:
        """The records in the order in which they would be evicted if nothing changed from now on. `above(record)`: the
        one that may be evicted once all `num_behind` of it have gone, of which this record is one."""
        heap, num_gone = self._heap.copy(), Counter[R]()
        while heap:
            record: R = heapq.heappop(heap)[-1]
            yield record
            if (upper := above(record)) is not None:
                num_gone[upper] += 1
                if num_gone[upper] == num_behind(upper) and upper in self._aside:
                    heapq.heappush(heap, self._entry(upper))

    def __contains__(self, record: R) -> bool:
        return record.at != _NO_ENTRY or record in self._aside

    def __iter__(self) -> Iterator[R]:
        yield from (entry[-1] for entry in self._heap)
        yield from self._aside

    def __len__(self) -> int:
        return len(self._heap) + len(self._aside)

    def _rank_again(self) -> None:
        self._heap = sorted((*self._entry(entry[-1])[:-2], *entry[-2:]) for entry in self._heap)
        for at, entry in enumerate(self._heap):
            entry[-1].at = at

    def _entry(self, record: R) -> tuple[Any, ...]:
        """With the record's rank of now."""
        rank = self.policy.rank(record)
        if isinstance(rank, tuple):
            return (record.expected > 0, *rank, next(self._sequence), record)
        return (record.expected > 0, rank, next(self._sequence), record)

    def _enter(self, record: R) -> None:
        assert record.at == _NO_ENTRY and record not in self._aside
        if self._is_evictable(record):
            entry = self._entry(record)
            self._heap.append(entry)
            self._rise(len(self._heap) - 1, entry)
        else:
            self._aside[record] = None

    def _move(self, record: R) -> None:
        """To where its rank of now puts it."""
        if record.at != _NO_ENTRY:
            entry = self._entry(record)
            self._rise(self._sink(record.at), entry)

    def _leave(self, record: R) -> None:
        at = record.at
        if at == _NO_ENTRY:
            del self._aside[record]
            return
        record.at = _NO_ENTRY
        last = self._heap.pop()
        if at < len(self._heap):
            self._rise(self._sink(at), last)

    def _sink(self, at: int) -> int:
        """Fill the empty place with the lower of its children, theirs with theirs; returns the place that is left."""
        heap, end = self._heap, len(self._heap)
        while (child := 2 * at + 1) < end:
            if child + 1 < end and heap[child + 1] < heap[child]:
                child += 1
            heap[at] = entry = heap[child]
            entry[-1].at = at
            at = child
        return at

    def _rise(self, at: int, entry: tuple[Any, ...]) -> None:
        """Put `entry` into the empty place, or as far above it as it is lower than what is there."""
        heap = self._heap
        while at and entry < (above := heap[(at - 1) >> 1]):
            heap[at] = above
            above[-1].at = at
            at = (at - 1) >> 1
        heap[at] = entry
        entry[-1].at = at
