"""The eviction order, heaps by rank, and what a policy is: how records rank.

The order is a persistent structure: the next victim is found without a look at the others. It holds records, one for
each thing that may be evicted, and knows nothing of what they stand for: of nodes the radix tree keeps an order for
each component, of runs of pages their index keeps one, of chunks vLLM's CPU tier. What queued requests expect goes last
in all of them, what is of an ended session first, and what is kept for its next turn after what else its namespace has.

A policy of one's own is an `EvictionStrategy`, or an `EvictionPolicy` where it remembers more than how a thing was
used, in a file that imports this one, and an entry in the table of `hicache.eviction.policy`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from hicache.eviction.heap import NO_ENTRY, Entry, Heap, lowest_first

Priority = float | tuple[float, ...]

clock = itertools.count(1)  # ticks, one for each use
NOBODY: Any = None
# The first of an entry: hints and queued requests count before every policy.
_ENDED, _PLAIN, _KEPT, _EXPECTED = range(-1, 3)


class Usage(Protocol):
    """How a thing was used, which strategies rank by. Times are ticks. `name`: the same when it comes back.
    `namespace`: whose hints order it."""

    hit_count: int
    priority: int
    last_access_time: int
    creation_time: int
    num_tokens: int

    @property
    def name(self) -> int: ...

    @property
    def namespace(self) -> str: ...


class Record:
    """A thing's place in its order. `owner`: whose use counts, while the thing is held. `expected`: how many queued
    requests will need it. `has_ended`: its session has, and nobody used it since. `keep`: until its next turn.

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

    __slots__ = ("creation_time", "hit_count", "key", "last_access_time", "namespace", "priority")
    num_tokens = 1

    def __init__(self, key: Hashable, namespace: str = "") -> None:
        super().__init__()
        self.key, self.namespace = key, namespace
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
    """A prompt stays until its next turn: `record`, its last, behind which none of `num_tokens` tokens leaves before
    others of its namespace.

    Of the order: `at`, the index of its turn; `owed_tokens`, of others that have yet to leave for it; `first_paid`: the
    turn of the first that did."""

    __slots__ = ("at", "first_paid", "num_tokens", "order", "owed_tokens", "record")

    def __init__(self, order: EvictionOrder[Any], record: Record, num_tokens: int) -> None:
        self.order, self.record, self.num_tokens = order, record, num_tokens
        self.at, self.owed_tokens = NO_ENTRY, num_tokens
        self.first_paid: Entry = ()

    @property
    def is_over(self) -> bool:
        """Whether the record was used since, or has left."""
        return self.record.keep is not self

    def end(self) -> None:
        """The record has the rank of its last use again. Idempotent."""
        if not self.is_over:
            self.order.set_keep(self.record, None)


class _Own(Generic[R]):
    """What a namespace has in an order. `records`: who of them leaves first. `turns`: of those that are kept, when one
    of the namespace is to leave for it. Of the order of namespaces: `at`."""

    __slots__ = ("at", "namespace", "records", "turns")

    def __init__(self, namespace: str) -> None:
        self.namespace, self.at = namespace, NO_ENTRY
        self.records, self.turns = Heap[R](), Heap[Keep]()

    def next_turn(self) -> Entry | None:
        """When the next of its records is to leave."""
        records, turns = self.records.entries, self.turns.entries
        if turns and not (records and records[0][:-1] <= turns[0][:-1]):
            return turns[0]
        return records[0] if records else None


class EvictionOrder(Generic[R]):
    """The records of what is held and not locked, and which of them is evicted next. First what is of a session that
    has ended, last what queued requests expect; of the others, the namespace of the record whose rank was lowest at its
    last event (of equals, the one with the earlier event) loses its lowest that is not kept. So a hint orders what its
    namespace has, and what others have leaves no earlier for it.

    Called from one thread. A record has one order for life; its owner is up to date when an event is reported, and of a
    path the deepest is reported first. `is_evictable(record)`: whether it may be a victim now. One that may not has no
    entry in a heap, or loses it at the top, until `update`. Nothing stale is left behind for one later call to clear
    away: every event costs at most O(log n), but for a victim after all ranks have changed. Iteration: in no order.
    """

    def __init__(self, policy: EvictionPolicy, is_evictable: Callable[[R], bool]) -> None:
        self.policy, self._is_evictable = policy, is_evictable
        self._owns: dict[str, _Own[R]] = {}  # by namespace; entries are (standing, *rank, sequence number, record)
        self._turns, self._sequence, self._aside = Heap[_Own[R]](), itertools.count(), dict[R, None]()
        self._generation = policy.generation
        self._victim: R | None = None

    def insert(self, record: R) -> None:
        """What is held, and not locked, from now on enters the order."""
        self.policy.enter(record)
        self._enter(record)

    def hit(self, record: R) -> None:
        """It was used; where it is locked, that counts once it is unlocked. Its session goes on, and the next turn of a
        prompt that was kept has come."""
        record.has_ended = False
        self.set_keep(record, None)
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
        self.set_keep(record, None)
        self.update(record)

    def keep(self, record: R, num_tokens: int) -> Keep:
        """It goes after all others of its namespace, until it is used or the keep ends; `num_tokens` stay with it.

        Where it would have gone others of its namespace go, until these are as many tokens; then it has the turn of the
        first of them."""
        keep = Keep(self, record, num_tokens)
        self.set_keep(record, keep)
        return keep

    def set_keep(self, record: R, keep: Keep | None) -> None:
        """Replace its keep."""
        if record.keep is keep:
            return
        is_placed = record.at != NO_ENTRY
        if is_placed:
            self._leave(record)
        record.keep = keep
        if is_placed:
            self._enter(record)

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

    def split(self, upper: R, lower: R) -> None:
        """`upper` is new and took a part of `lower`, which is in the order; it enters with `lower`'s rank: their owners
        were used alike."""
        self.policy.split(upper, lower)
        self._enter(upper)

    def evict(self, record: R) -> None:
        """It is held no more and leaves the order."""
        if record is self._victim and record.at != NO_ENTRY:
            self._leave_in_turn(record)
        else:
            self._leave(record)
        record.has_ended, record.keep = False, None
        self.policy.forget(record)

    def victim(self) -> R | None:
        """The next to be evicted, which stays in the order until `evict`; None where none may be."""
        if self._generation != self.policy.generation:
            self._generation = self.policy.generation
            self._rank_again()
        while turns := self._turns.entries:
            record: R = turns[0][-1].records.entries[0][-1]
            if self._is_evictable(record):
                self._victim = record
                return record
            self._leave(record)
            self._aside[record] = None
        return None

    def leaving(self, freed: Callable[[R], R | None]) -> Iterator[R]:
        """All by rank as of now, and once one has gone which others followed, it too: `freed` says after which."""
        entries = [own.records.entry_of(record) for own in self._owns.values() for record in own.records]
        return lowest_first(entries, lambda gone: [self._entry(up) for up in (freed(gone),) if up in self._aside])

    def __contains__(self, record: R) -> bool:
        return record.at != NO_ENTRY or record in self._aside

    def __iter__(self) -> Iterator[R]:
        return itertools.chain(*(own.records for own in self._owns.values()), self._aside)

    def __len__(self) -> int:
        return sum(len(own.records) for own in self._owns.values()) + len(self._aside)

    def _rank_again(self) -> None:
        for own in self._owns.values():
            ranked = [(self._entry(record), own.records.entry_of(record)) for record in own.records]
            own.records.replace_all((*entry[:-2], *old[-2:]) for entry, old in ranked)
            own.turns.replace_all([self._turn_entry(keep, own) for keep in own.turns])
        self._turns.replace_all((*(own.next_turn() or ())[:-1], own) for own in self._owns.values())

    def _leave_in_turn(self, record: R) -> None:
        """The victim leaves. If that is for another one, which is kept, that owes so much less; once it has paid, its
        next turn is when the first that left for it would have left."""
        own = self._owns[record.owner.namespace]
        turn = own.records.entry_of(record) if record.keep is None else own.turns.entry_of(record.keep)
        first = next(iter(own.turns.entries), None)
        self._leave(record)
        if first is not None and first[-1] is not record.keep and first < turn:
            keep: Keep = first[-1]
            keep.owed_tokens -= record.owner.num_tokens
            keep.first_paid = keep.first_paid or turn[:-1]
            if keep.owed_tokens <= 0:
                own.turns.replace((*keep.first_paid, keep))
                keep.owed_tokens, keep.first_paid = keep.num_tokens, ()
                self._set_turn(own)

    def _entry(self, record: R) -> Entry:
        """With the record's standing and rank of now."""
        standing = _ENDED if record.has_ended else _PLAIN
        if record.expected > 0 or record.keep is not None:
            standing = _EXPECTED if record.expected > 0 else _KEPT
        rank = self.policy.rank(record)
        return (standing, *(rank if isinstance(rank, tuple) else (rank,)), next(self._sequence), record)

    @staticmethod
    def _turn_entry(keep: Keep, own: _Own[Any]) -> Entry:
        """As though its record were not kept."""
        standing, *rank, _ = own.records.entry_of(keep.record)
        return (_PLAIN if standing == _KEPT else standing, *rank, keep)

    def _set_turn(self, own: _Own[R]) -> None:
        """What the namespace has was changed."""
        turn = own.next_turn()
        if turn is None:
            self._turns.remove(own)
            del self._owns[own.namespace]
        elif own.at == NO_ENTRY:
            self._turns.push((*turn[:-1], own))
        elif turn[-2] != self._turns.entry_of(own)[-2] or turn[0] != self._turns.entry_of(own)[0]:
            self._turns.replace((*turn[:-1], own))

    def _enter(self, record: R) -> None:
        assert record.at == NO_ENTRY and record not in self._aside
        if not self._is_evictable(record):
            self._aside[record] = None
            return
        namespace = record.owner.namespace
        if (own := self._owns.get(namespace)) is None:
            own = self._owns[namespace] = _Own(namespace)
        own.records.push(self._entry(record))
        if record.keep is not None:
            own.turns.push(self._turn_entry(record.keep, own))
        self._set_turn(own)

    def _move(self, record: R) -> None:
        """To where its rank of now puts it."""
        if record.at != NO_ENTRY:
            own = self._owns[record.owner.namespace]
            own.records.replace(self._entry(record))
            if record.keep is not None:
                own.turns.replace(self._turn_entry(record.keep, own))
            self._set_turn(own)

    def _leave(self, record: R) -> None:
        if record.at == NO_ENTRY:
            del self._aside[record]
            return
        own = self._owns[record.owner.namespace]
        own.records.remove(record)
        if record.keep is not None:
            own.turns.remove(record.keep)
        self._set_turn(own)
