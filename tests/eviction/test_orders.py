"""Eviction orders over plain records, against a model that ranks all of them anew each time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from costs import lines_of
from hicache.errors import ConfigError
from hicache.eviction.orders import CountedRecord, EvictionOrder, clock
from hicache.eviction.policy import EVICTION_POLICIES, SLRUStrategy, get_eviction_strategy, make_order

Evictable = Callable[[CountedRecord], bool]
Rank = tuple[float, ...]
KEPT_LIMIT = 30

# What each policy evicts first: the lowest.
RANKS: dict[str, Callable[[CountedRecord], Rank]] = {
    "lru": lambda record: (record.last_access_time,),
    "lfu": lambda record: (record.hit_count, record.last_access_time),
    "fifo": lambda record: (record.creation_time,),
    "mru": lambda record: (-record.last_access_time,),
    "filo": lambda record: (-record.creation_time,),
    "priority": lambda record: (record.priority, record.last_access_time),
    "slru": lambda record: (record.hit_count >= 2, record.last_access_time),
    "slru of 3": lambda record: (record.hit_count >= 3, record.last_access_time),
}


class Model:
    """An order, and beside it what is in it with the rank of the last event. `inner`: what may not be evicted. `hints`:
    what is kept with its sizes, by deadline, the oldest hint first."""

    def __init__(self, name: str, dice: random.Random) -> None:
        policy = SLRUStrategy(protected_threshold=3) if name == "slru of 3" else EVICTION_POLICIES[name]()
        self.order: EvictionOrder[CountedRecord] = EvictionOrder(policy, lambda record: record not in self.inner)
        self.name, self.dice = name, dice
        self.held: list[CountedRecord] = []
        self.ranks: dict[CountedRecord, Rank] = {}
        self.inner: set[CountedRecord] = set()
        self.locked: set[CountedRecord] = set()
        self.hints: list[tuple[int, dict[CountedRecord, int]]] = []
        self.sizes: dict[CountedRecord, int] = {}
        self.now_s = 0

    @property
    def kept(self) -> dict[CountedRecord, int]:
        return {record: size for _, hint in self.hints for record, size in hint.items()}

    def note(self, record: CountedRecord) -> None:
        """Ties go to the earlier event. Ranks of auto have a test of their own."""
        tie = () if self.name == "auto" else (next(clock),)
        if record in self.held and record not in self.locked:
            self.ranks[record] = (*(RANKS[self.name](record) if self.name in RANKS else ()), *tie)

    def key(self, record: CountedRecord) -> Rank:
        """A session that ended first, then by rank; after these what is kept, and what is expected last."""
        standing = 3 if record.expected else 2 if record in self.kept else -record.has_ended
        return (standing, *self.ranks[record])

    def insert(self) -> None:
        record = CountedRecord(next(clock))
        self.sizes[record] = self.dice.randrange(1, 5)
        record.priority = self.dice.randrange(3)
        self.order.insert(record)
        self.held.append(record)
        self.note(record)

    def hit(self, record: CountedRecord) -> None:
        record.hit_count += 1
        record.last_access_time = next(clock)
        self.order.hit(record)
        self.keep_no_more(record)
        self.note(record)

    def keep(self, record: CountedRecord) -> None:
        """With another one for some seconds, one of which passes; other hints end, the oldest where there is
        no room."""
        self.now_s += 1
        self.order.expire(self.now_s)
        for _, hint in sorted((at for at in self.hints if at[0] <= self.now_s), key=lambda at: at[0]):
            self.keep_no_more(*hint)
        sizes = {each: self.sizes[each] for each in (record, self.dice.choice(self.held))}
        until_s, limit = self.now_s + self.dice.randrange(1, 40), self.dice.choice((4, KEPT_LIMIT))
        self.order.keep(sizes, until_s, limit)
        if sum(sizes.values()) > limit:
            return
        self.keep_no_more(*sizes)
        while sum(self.kept.values()) + sum(sizes.values()) > limit:
            self.keep_no_more(*self.hints[0][1])
        self.hints.append((until_s, sizes))
        for each in sizes:
            self.note(each)

    def keep_no_more(self, *records: CountedRecord) -> None:
        for record in records:
            if record in self.kept:
                for _, hint in self.hints:
                    hint.pop(record, None)
                self.note(record)
        self.hints = [at for at in self.hints if at[1]]

    def lock(self, record: CountedRecord) -> None:
        """Or undo it."""
        if record in self.locked:
            self.locked.remove(record)
            self.order.unlock(record)
            self.note(record)
        else:
            self.locked.add(record)
            self.order.lock(record)
            del self.ranks[record]

    def expect(self, record: CountedRecord) -> None:
        self.order.expect(record, 1 if not record.expected else self.dice.choice((1, -1)))
        if record in self.ranks:
            self.note(record)

    def end(self, record: CountedRecord) -> None:
        """Until the next use."""
        self.order.end(record)
        self.keep_no_more(record)
        self.note(record)

    def become_inner(self, record: CountedRecord) -> None:
        """Or undo it: the order is told of that alone."""
        if record in self.inner:
            self.inner.remove(record)
            record.priority = self.dice.randrange(3)
            self.order.update(record)
            if record in self.ranks:
                self.note(record)
        else:
            self.inner.add(record)

    def split(self, lower: CountedRecord) -> None:
        if self.sizes[lower] == 1:
            return
        upper = CountedRecord(next(clock))
        self.sizes[upper], self.sizes[lower] = 1, self.sizes[lower] - 1
        for _, hint in self.hints:
            if lower in hint:
                hint.update({lower: hint[lower] - 1, upper: 1})
        for field in ("hit_count", "priority", "last_access_time", "creation_time", "expected"):
            setattr(upper, field, getattr(lower, field))
        upper.follow(lower)
        self.inner.add(upper)
        self.held.append(upper)
        if lower in self.locked:
            self.locked.add(upper)
        self.order.split(upper, lower, 1)
        self.note(upper)

    def shrink(self, record: CountedRecord) -> None:
        if self.sizes[record] > 1:
            self.sizes[record] -= 1
            self.order.shrink(record, 1)
            for _, hint in self.hints:
                if record in hint:
                    hint[record] -= 1

    def evict(self) -> bool:
        victim = self.order.victim()
        free = [record for record in self.ranks if record not in self.inner]
        if victim is None:
            assert not free
            return False
        assert victim in free and self.key(victim) == min(map(self.key, free))
        self.order.evict(victim)
        del self.ranks[victim]
        self.held.remove(victim)
        self.keep_no_more(victim)
        return True


@pytest.mark.parametrize("name", [*RANKS, "auto"])
def test_the_victim_is_the_lowest_of_what_may_be_evicted(name: str) -> None:
    """Over uses, locks, splits, expectations, hints, ends of sessions and changes of what may be evicted: what queued
    requests expect last, before it what is kept, else by the rank at the last event. The order holds exactly what is
    held and not locked. Records are kept until their deadline or use, each is counted once, and beyond the limit the
    oldest hints end."""
    model = Model(name, random.Random(name))
    evictions = most_kept = 0
    for _ in range(4000):
        if len(model.held) < 20 or model.dice.random() < 0.2:
            model.insert()
        steps = (
            model.hit,
            model.lock,
            model.expect,
            model.end,
            model.become_inner,
            model.split,
            model.keep,
            model.shrink,
        )
        model.dice.choices(steps, (4, 4, 1, 1, 4, 1, 2, 1))[0](model.dice.choice(model.held))
        while len(model.held) > 40 and model.evict():
            evictions += 1
        assert {*model.order} == {*model.ranks} and len(model.order) == len(model.ranks)
        assert all((record in model.order) == (record in model.ranks) for record in model.held)
        assert model.order.kept == model.kept and model.order.num_kept == sum(model.kept.values())
        most_kept = max(most_kept, len(model.kept))
    assert evictions > 500 and most_kept > 8


@pytest.mark.parametrize("name", [name for name in EVICTION_POLICIES if name != "auto"])
def test_the_cost_of_an_event_grows_with_the_logarithm_of_the_records(name: str) -> None:
    """Uses, hints, locks of any record and victims execute at most 24 lines for each doubling of the records, after any
    events before them: none pays for work that was put off, nor for other kept records. (The policy auto makes all
    ranks anew where its half-life changes.)"""
    num_records = 512
    order, dice = make_order(name, lambda record: True), random.Random(name)
    records = [CountedRecord(n) for n in range(num_records)]

    def evict() -> None:
        victim = order.victim()
        assert victim is not None
        order.evict(victim)
        order.insert(victim)

    for record in records:
        order.insert(record)
    for at in range(2 * num_records):
        record = dice.choice(records)
        locked = dice.choice(records)
        record.last_access_time, record.hit_count = next(clock), record.hit_count + 1
        assert lines_of(lambda: order.hit(record)) <= 24 * math.log2(num_records)  # noqa: B023
        assert lines_of(lambda: (order.lock(locked), order.unlock(locked))) <= 24 * math.log2(num_records)  # noqa: B023
        assert lines_of(lambda: order.keep({locked: 1}, at, num_records / 2)) <= 24 * math.log2(num_records)  # noqa: B023
        assert lines_of(lambda: order.expire(at - num_records)) <= 24 * math.log2(num_records)  # noqa: B023
        if at % 4 == 0:
            assert lines_of(evict) <= 24 * math.log2(num_records)
    assert order.num_kept > num_records / 4


def test_what_is_not_evictable_is_tested_once() -> None:
    """It is tested once until the order is told that it may be evicted, however often the victim is asked for."""
    looks: list[CountedRecord] = []
    inner: set[CountedRecord] = set()

    def is_evictable(record: CountedRecord) -> bool:
        looks.append(record)
        return record not in inner

    order, records = make_order("lru", is_evictable), [CountedRecord(n) for n in range(100)]
    for record in records:
        order.insert(record)
    inner.update(records[:99])
    for _ in range(50):
        assert order.victim() is records[99]
    assert len(looks) == 100 + 99 + 50
    inner.discard(records[40])
    assert order.victim() is records[99]
    order.update(records[40])
    assert order.victim() is records[40] and len(order) == 100


def test_names_are_known_in_any_case() -> None:
    """A name finds the same policy however it is written; an unknown one is refused with all that there are."""
    for name in EVICTION_POLICIES:
        written = (name, name.upper(), name.title())
        assert len({type(make_order(each, lambda record: True).policy) for each in written}) == 1
    for ask in (get_eviction_strategy, lambda name: make_order(name, lambda record: True)):
        with pytest.raises(ConfigError, match="fifo, filo, lfu, lru, mru, priority, slru"):
            ask("arc")
