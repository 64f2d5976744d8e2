"""Eviction orders over plain records, against a model that ranks all of them anew each time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from costs import lines_of
from hicache.errors import ConfigError
from hicache.eviction.keeps import Keeps
from hicache.eviction.orders import CountedRecord, EvictionOrder, clock
from hicache.eviction.policy import EVICTION_POLICIES, SLRUStrategy, get_eviction_strategy, make_order

Evictable = Callable[[CountedRecord], bool]
Rank = tuple[float, ...]

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
    """An order, and beside it what is in it with the rank of the last event. `inner`: what may not be evicted."""

    def __init__(self, name: str, dice: random.Random) -> None:
        policy = SLRUStrategy(protected_threshold=3) if name == "slru of 3" else EVICTION_POLICIES[name]()
        self.order: EvictionOrder[CountedRecord] = EvictionOrder(policy, lambda record: record not in self.inner)
        self.name, self.dice = name, dice
        self.held: list[CountedRecord] = []
        self.ranks: dict[CountedRecord, Rank] = {}
        self.inner: set[CountedRecord] = set()
        self.locked: set[CountedRecord] = set()

    def note(self, record: CountedRecord) -> None:
        """Ties go to the earlier event. Ranks of auto have a test of their own."""
        tie = () if self.name == "auto" else (next(clock),)
        self.ranks[record] = (*(RANKS[self.name](record) if self.name in RANKS else ()), *tie)

    def key(self, record: CountedRecord) -> Rank:
        """A session that ended first, then by rank; what is expected last."""
        return (2 if record.expected else -record.has_ended, *self.ranks[record])

    def insert(self) -> None:
        record = CountedRecord(next(clock), self.dice.choice("abc"))
        record.priority = self.dice.randrange(3)
        self.order.insert(record)
        self.held.append(record)
        self.note(record)

    def hit(self, record: CountedRecord) -> None:
        record.hit_count += 1
        record.last_access_time = next(clock)
        self.order.hit(record)
        if record in self.ranks:
            self.note(record)

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
        if record in self.ranks:
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
        upper = CountedRecord(next(clock), lower.namespace)
        for field in ("hit_count", "priority", "last_access_time", "creation_time", "expected"):
            setattr(upper, field, getattr(lower, field))
        upper.follow(lower)
        self.inner.add(upper)
        self.held.append(upper)
        if lower in self.locked:
            self.locked.add(upper)
        else:
            self.order.split(upper, lower)
            self.note(upper)

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
        return True


@pytest.mark.parametrize("name", [*RANKS, "auto"])
def test_the_victim_is_the_lowest_of_what_may_be_evicted(name: str) -> None:
    """Over uses, locks, splits, expectations, ends of sessions and changes of what may be evicted, in three namespaces:
    what queued requests expect last, else by the rank at the last event. The order holds exactly what is held and not
    locked."""
    model = Model(name, random.Random(name))
    evictions = 0
    for _ in range(4000):
        if len(model.held) < 20 or model.dice.random() < 0.2:
            model.insert()
        steps = (model.hit, model.lock, model.expect, model.end, model.become_inner, model.split)
        model.dice.choices(steps, (4, 4, 1, 1, 4, 1))[0](model.dice.choice(model.held))
        while len(model.held) > 40 and model.evict():
            evictions += 1
        assert {*model.order} == {*model.ranks} and len(model.order) == len(model.ranks)
        assert all((record in model.order) == (record in model.ranks) for record in model.held)
    assert evictions > 500


class Sized(CountedRecord):
    """A record of some tokens."""

    __slots__ = ("num_tokens",)

    def __init__(self, namespace: str, num_tokens: int = 1) -> None:
        super().__init__(next(clock), namespace)
        self.num_tokens = num_tokens


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("name", [name for name in EVICTION_POLICIES if name != "auto"])
def test_a_hint_orders_what_its_own_namespace_has(name: str, ends: bool) -> None:
    """Two orders see the same, one of them hints of tenant `a` too. There `a` loses another one of its records whenever
    it keeps the one whose turn it is: the others lose the same ones at the same time, and fewer where sessions end."""
    dice, (told, plain) = random.Random(name), [make_order(name, lambda record: True) for _ in range(2)]
    held: dict[EvictionOrder[CountedRecord], dict[int, CountedRecord]] = {told: {}, plain: {}}
    num_differ = num_later = 0
    for number in range(4000):
        namespace, priority, key = dice.choice("aab"), dice.randrange(3), dice.randrange(number + 1)
        hint, now, is_used = dice.random(), next(clock), all(key in records for records in held.values())
        for order, records in held.items():
            record = records[number] = CountedRecord(number, namespace)
            record.priority, record.last_access_time, record.creation_time = priority, now, now
            order.insert(record)
            if is_used and hint < 0.7:
                used = records[key]
                used.hit_count, used.last_access_time = used.hit_count + 1, next(clock)
                order.hit(used)
        asked = held[told].get(dice.choice((number, dice.randrange(number + 1))))
        if asked is not None and asked.namespace == "a" and asked.keep is None and hint < 0.5:
            (told.end if ends and hint < 0.1 else lambda record: told.keep(record, 1))(asked)
        if number > 60:
            victims = {order: order.victim() for order in held}
            for order, victim in victims.items():
                assert victim is not None
                order.evict(victim)
                del held[order][victim.key]
            num_differ += victims[told].key != victims[plain].key
        of_b = [{key for key, record in held[order].items() if record.namespace == "b"} for order in (told, plain)]
        assert of_b[0] >= of_b[1] if ends else of_b[0] == of_b[1]
        num_later += len(of_b[0]) - len(of_b[1])
    assert num_differ and (num_later > 0) == ends


def test_what_is_kept_pays_with_as_many_tokens_of_its_namespace() -> None:
    """By hand, under lru: two tokens are kept, for which two others leave, and then the turn of the first of these is
    its own. What is used, or whose keep ends, leaves in its turn again."""
    order = make_order("lru", lambda record: True)
    kept, first, foreign, second, last = records = [Sized("a", 2), Sized("a"), Sized("b"), Sized("a"), Sized("b")]
    for record in records:
        order.insert(record)
    keep = order.keep(kept, 2)

    def evicted() -> CountedRecord:
        victim = order.victim()
        assert victim is not None
        order.evict(victim)
        return victim

    assert [evicted(), evicted()] == [first, second] and not keep.is_over
    for record in (first, second):
        order.insert(record)  # as recent as they were
    keep.end()
    assert keep.is_over and [evicted() for _ in range(5)] == [kept, first, foreign, second, last]
    for record in records:
        order.insert(record)
    keep = order.keep(kept, 2)
    assert [evicted() for _ in range(5)] == [first, second, kept, foreign, last] and keep.is_over
    order.insert(kept)
    keep = order.keep(kept, 2)
    order.hit(kept)
    assert keep.is_over


def test_prompts_are_kept_until_their_time_and_within_their_share() -> None:
    """Against a list of them: of each namespace those that were told last, as many as fit, until four times the time
    that was told."""
    dice, keeps, order = random.Random(0), Keeps(20), make_order("lru", lambda record: True)
    told: list[Sized] = []
    kept: list[tuple[Sized, int]] = []  # the oldest first, with its end
    for now in range(500):
        keeps.expire(now)
        record, within = Sized(dice.choice("ab"), dice.randrange(1, 9)), dice.randrange(1, 5)
        order.insert(record)
        keeps.add(record.namespace, now, within, record.num_tokens, [order.keep(record, record.num_tokens)])
        told.append(record)
        kept = [(each, until) for each, until in (*kept, (record, now + 4 * within)) if until > now]
        while sum(each.num_tokens for each, _ in kept if each.namespace == record.namespace) > 20:
            kept.remove(next(pair for pair in kept if pair[0].namespace == record.namespace))
        if dice.random() < 0.3:
            used = dice.choice(told[-8:])
            order.hit(used)
            kept = [pair for pair in kept if pair[0] is not used]
        assert [each for each in told if each.keep is not None] == [each for each, _ in kept]
        assert keeps.num_tokens == sum(each.num_tokens for each, _ in kept)
    assert len(kept) > 4


@pytest.mark.parametrize("name", [name for name in EVICTION_POLICIES if name != "auto"])
def test_the_cost_of_an_event_grows_with_the_logarithm_of_the_records(name: str) -> None:
    """Uses, locks of any record and victims execute at most 24 lines for each doubling of the records, after any events
    before them: none pays for what was put off. (The policy auto makes all ranks anew where its half-life changes.)"""
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
        if at % 4 == 0:
            assert lines_of(evict) <= 24 * math.log2(num_records)


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
