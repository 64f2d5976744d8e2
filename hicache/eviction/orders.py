"""The eviction order, heaps by rank, and what a policy is: how records rank.

The order is a persistent structure: the next victim is found without a look at the others. It holds records, one for
each thing that may be evicted, and knows nothing of what they stand for: of nodes the radix tree keeps an order for
each component, of runs of pages their index keeps one, of chunks vLLM's CPU tier. What queued requests expect goes last
in all of them, what is of an ended session first. Records with a deadline are evicted after plain ones until then.

A policy of one's own is an `EvictionStrategy`, or an `EvictionPolicy` where it remembers more than how a thing was
used, in a file that imports this one, and an entry in the table of `hicache.eviction.policy`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from hicache.eviction.heap import NO_ENTRY, Entry, Heap, lowest_first

Priority = float | tuple[float, ...]

clock = itertools.count(1)  # ticks, one for each use
NOBODY: Any = None
# The first of an entry: hints and queued requests count before every policy.
_ENDED, _PLAIN, _KEPT, _EXPECTED = range(-1, 3)
KEPT_SHARE = 0.9  # of a tier, for kept pages; the rest is for prompts without a hint
_PATIENCE = 4.0  # factor on the announced time: without it a turn that comes later than announced would miss


def deadline_s(now_s: float, within_s: float) -> float:
    """Until when a prompt is kept whose next turn was announced at `now_s`, by a client whose times may be wrong."""
    return now_s + _PATIENCE * within_s


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
    requests will need it. `has_ended`: its session has, and nobody used it since. `keep`: its deadline, if it has one.

    Of the order: `at`, the index of its entry. Of the policy auto: `uses`, `used_at`, `hits`.
    """

    __slots__ = ("at", "expected", "has_ended", "hits", "keep", "used_at", "uses")

    def __init__(self) -> None:
        self.at = NO_ENTRY
        self.expected = self.used_at = self.hits = 0
        self.uses = 0.0
        self.has_ended = False
        self.keep: Keep | None = None

    @property
    def owner(self) -> Usage:
        raise AssertionError("nobody holds it")

    def follow(self, other: Record) -> None:
        """It was the first part of what `other` stands for: their last uses are the same."""
        self.uses, self.used_at, self.hits = other.uses, other.used_at, other.hits
        self.has_ended = other.has_ended


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
        """It will be used `num_uses` times, 1 at least."""

    def uses_of(self, record: Record) -> float:
        """How often it was used, as far as that counts."""
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


class Keep:
    """The hint of one prompt. `records`: the records with its deadline, by the tokens or pages of each. `at`: its index
    in the heap of deadlines."""

    __slots__ = ("at", "records")

    def __init__(self, records: dict[Any, int]) -> None:
        self.records, self.at = records, NO_ENTRY


class EvictionOrder(Generic[R]):
    """The records of what is held and not locked, and which of them is evicted next. Records of ended sessions come
    first, then plain ones, then records that are kept until a deadline, last those that queued requests expect. Among
    these the record with the lowest rank at its last event comes first, and of equal ranks the one with the earlier
    event.

    Called from one thread; other threads may read `num_kept`, the tokens or pages of all records with a deadline,
    locked ones included. A record has one order for life; its owner is up to date when an event is reported, and of a
    path the deepest is reported first. `is_evictable(record)`: whether it may be a victim now. One that may not has no
    entry in the heap, or loses it at the top, until `update`. Nothing stale is left behind for one later call to clear
    away: every event costs at most O(log n), but for a victim after all ranks have changed. Iteration: in no order.
    """

    def __init__(self, policy: EvictionPolicy, is_evictable: Callable[[R], bool]) -> None:
        self.policy, self._is_evictable = policy, is_evictable
        # Entries are (standing, *rank, sequence number, record) and (deadline, sequence number, keep).
        self._records, self._deadlines = Heap[R](), Heap[Keep]()
        self._keeps = OrderedDict[Keep, None]()  # the oldest first
        self._sequence, self._aside = itertools.count(), dict[R, None]()
        self._generation = policy.generation
        self.num_kept = 0

    def insert(self, record: R) -> None:
        """What is held, and not locked, from now on enters the order."""
        self.policy.enter(record)
        self._enter(record)

    def hit(self, record: R) -> None:
        """It was used; where it is locked, that counts once it is unlocked. Its session goes on, and the next turn of a
        prompt that was kept has come."""
        record.has_ended = False
        self.end_keep(record)
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

    def end(self, record: R) -> None:
        """Its session has ended: it goes before all others until it is used again."""
        record.has_ended = True
        self.end_keep(record)
        self.update(record)

    def keep(self, sizes: Mapping[R, int], until_s: float, limit: float) -> None:
        """Evict the records of a prompt after plain ones until `until_s`, or until they are used. `sizes`: their tokens
        or pages.

        Older hints end, the oldest first, until at most `limit` tokens or pages are kept. A prompt that exceeds the
        limit alone is not kept."""
        size = sum(sizes.values())
        if not 0 < size <= limit:
            return
        for record in sizes:
            self.end_keep(record)
        while self.num_kept + size > limit:
            self._end(next(iter(self._keeps)))
        keep = Keep({**sizes})
        self._deadlines.push((until_s, next(self._sequence), keep))
        self._keeps[keep] = None
        self.num_kept += size
        for record in sizes:
            record.keep = keep
            self.update(record)

    def end_keep(self, record: R) -> None:
        """The record has no deadline any more, and the rank of its last use again. Idempotent."""
        if (keep := record.keep) is not None:
            self.num_kept -= keep.records.pop(record)
            record.keep = None
            if not keep.records:
                self._deadlines.remove(keep)
                del self._keeps[keep]
            self.update(record)

    def expire(self, now_s: float) -> None:
        """End the deadlines up to now."""
        while (deadlines := self._deadlines.entries) and deadlines[0][0] <= now_s:
            self._end(deadlines[0][-1])

    @property
    def kept(self) -> dict[R, int]:
        """The tokens or pages of every record with a deadline."""
        return {record: size for keep in self._keeps for record, size in keep.records.items()}

    def lock(self, *records: R) -> None:
        """Each got its first lock and leaves the order."""
        for record in records:
            self.policy.lock(record)
            self._leave(record)

    def unlock(self, *records: R) -> None:
        """Each lost its last lock and is back in the order, with the rank of its last use. That is no use."""
        for record in records:
            self.policy.enter(record)
            self._enter(record)

    def update(self, record: R) -> None:
        """It may be a victim from now on, or its rank changed without a use; where it is locked, nothing happens."""
        if record in self._aside:
            del self._aside[record]
            self._enter(record)
        else:
            self._move(record)

    def split(self, upper: R, lower: R, size: int) -> None:
        """`upper` is new and took a part of `size` tokens or pages from `lower`. It gets `lower`'s deadline. If `lower`
        is in the order, `upper` enters with the same rank: their owners were used alike."""
        if (keep := lower.keep) is not None:
            keep.records[lower] -= size
            keep.records[upper] = size
            upper.keep = keep
        if lower in self:
            self.policy.split(upper, lower)
            self._enter(upper)

    def shrink(self, record: R, size: int) -> None:
        """The record lost a part of `size` tokens or pages."""
        if (keep := record.keep) is not None:
            keep.records[record] -= size
            self.num_kept -= size

    def evict(self, record: R) -> None:
        """It is held no more and leaves the order."""
        self._leave(record)
        self.end_keep(record)
        record.has_ended = False
        self.policy.forget(record)

    def victim(self) -> R | None:
        """The next to be evicted, which stays in the order until `evict`; None where none may be."""
        if self._generation != self.policy.generation:
            self._generation = self.policy.generation
            self._rank_again()
        while entries := self._records.entries:
            record: R = entries[0][-1]
            if self._is_evictable(record):
                return record
            self._leave(record)
            self._aside[record] = None
        return None

    def leaving(self, freed: Callable[[R], R | None]) -> Iterator[R]:
        """All by rank as of now, and once one has gone which others followed, it too: `freed` says after which."""
        entries = [*self._records.entries]
        return lowest_first(entries, lambda gone: [self._entry(up) for up in (freed(gone),) if up in self._aside])

    def __contains__(self, record: R) -> bool:
        return record.at != NO_ENTRY or record in self._aside

    def __iter__(self) -> Iterator[R]:
        return itertools.chain(self._records, self._aside)

    def __len__(self) -> int:
        return len(self._records) + len(self._aside)

    def _end(self, keep: Keep) -> None:
        for record in [*keep.records]:
            self.end_keep(record)

    def _rank_again(self) -> None:
        ranked = [(self._entry(entry[-1]), entry) for entry in self._records.entries]
        self._records.replace_all((*entry[:-2], *old[-2:]) for entry, old in ranked)

    def _entry(self, record: R) -> Entry:
        """With the record's standing and rank of now."""
        standing = _ENDED if record.has_ended else _PLAIN
        if record.expected > 0 or record.keep is not None:
            standing = _EXPECTED if record.expected > 0 else _KEPT
        rank = self.policy.rank(record)
        return (standing, *(rank if isinstance(rank, tuple) else (rank,)), next(self._sequence), record)

    def _enter(self, record: R) -> None:
        assert record.at == NO_ENTRY and record not in self._aside
        if self._is_evictable(record):
            self._records.push(self._entry(record))
        else:
            self._aside[record] = None

    def _move(self, record: R) -> None:
        """To where its rank of now puts it."""
        if record.at != NO_ENTRY:
            self._records.replace(self._entry(record))

    def _leave(self, record: R) -> None:
        if record.at == NO_ENTRY:
            del self._aside[record]
        else:
            self._records.remove(record)
