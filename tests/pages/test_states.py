"""The page table of one tier, compared with a model of dictionaries: transfers, locks and evictions."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

import hicache.pages.order
from cases import long
from hicache.errors import InvariantError
from hicache.host.pool import HostPagePool
from hicache.layout import BufferSpec, PoolLayout
from hicache.pages.order import RANK_POLICIES, rank_policy
from hicache.pages.states import ABOVE, COPY, HELD, IN_FLIGHT, READ, TierPages
from hicache.pages.table import PageTable, Rows, Seen

NUM_PAGES = 40
LAYOUT = PoolLayout((BufferSpec("k", torch.bfloat16, (8,), "token", (0,)),), 1)


def pool_of(num_pages: int) -> HostPagePool:
    return HostPagePool(LAYOUT, 8, (num_pages + 1) * LAYOUT.page_bytes(8), pin=False)


def prompt_of(dice: random.Random, texts: list[list[int]]) -> list[bytes]:
    """The beginning of a text, which sometimes continues differently. A key names a page and all pages before it."""
    blocks = dice.choice(texts)[: dice.randrange(1, 25)]
    if dice.random() < 0.3:
        blocks = blocks[: dice.randrange(len(blocks) + 1)] + [dice.randrange(3) for _ in range(dice.randrange(1, 6))]
    return [bytes(block + 1 for block in blocks[: end + 1]) for end in range(len(blocks))]


class Model:
    """A tier and its expected content: `held` and `flying` keys, `locks` by key, and keys `above`. The model computes
    each victim from the ranks of the tier."""

    def __init__(self, policy: str, seed: int, *, is_exclusive: bool) -> None:
        self.dice = random.Random(f"{policy} {seed} {is_exclusive}")
        self.texts = [[self.dice.randrange(3) for _ in range(24)] for _ in range(6)]
        self.tier = TierPages(pool_of(NUM_PAGES), policy, is_exclusive=is_exclusive, on_evict=self.left)
        self.held, self.above = dict[bytes, None](), set[bytes]()
        self.flying = list[Rows]()
        self.locked = list[list[bytes]]()
        self.expected = list[list[bytes]]()
        self.num_evicted = self.num_refused = self.now_s = 0

    # Calls of the tier

    def left(self, rows: Rows) -> None:
        for row in rows.tolist():
            key = self.tier.table.keys_of(np.array([row]))[0]
            assert key == self.next_victim(), "another page was to leave"
            del self.held[key]
            self.num_evicted += 1

    def next_victim(self) -> bytes:
        """The next victim: the page with the lowest class and rank among unlocked pages that no page follows; of
        equals, the youngest. A page that the tier above also has may be evicted although other pages follow it."""
        order, table = self.tier.order, self.tier.table
        locks = Counter(key for keys in self.locked for key in keys)
        locks.update(self.kept_in_place)
        before = table.previous[table.find([*self.held, *self.keys_flying()])]
        followed = {*table.keys_of(before[before >= 0])} - self.above
        may = [key for key in self.held if not locks[key] and key not in followed]

        def pool_page(key: bytes) -> tuple[float, ...]:
            row = table.row(key)
            return int(order.class_[row]), float(order.key[row]), -len(key), -int(table.age[row])

        return min(may, key=pool_page)

    kept_in_place: tuple[bytes, ...] = ()

    def keys_flying(self) -> list[bytes]:
        return [key for rows in self.flying for key in self.tier.table.keys_of(rows)]

    # Events

    def request(self) -> None:
        """Reserve the pages of a prompt that the tier lacks, as far as there is capacity. Pages after a gap stay."""
        keys, tier = prompt_of(self.dice, self.texts), self.tier
        rows = tier.table.add(keys)
        absent = ~tier.has(rows, HELD | IN_FLIGHT)
        before = tier.table.previous[rows[absent]]
        self.kept_in_place = tuple(tier.table.keys_of(before[tier.has(before) & ~tier.has(before, ABOVE)]))
        state = self.dice.choice((COPY, READ))
        num_free = tier.capacity
        taken = tier.reserve(rows[absent], state)
        self.kept_in_place = ()
        assert len(taken) == int(absent.sum()) or len(taken) <= num_free
        self.num_refused += len(taken) < int(absent.sum())
        if len(taken):
            self.flying.append(taken)

    def reserve_second(self) -> None:
        """Some pages in flight do not fit when packed and need a second pool page."""
        if self.flying:
            rows = self.dice.choice(self.flying)
            rows = rows[(self.tier.second_pool_page[rows] == 0) & (np.arange(len(rows)) % 3 == 0)]
            self.num_refused += len(self.tier.reserve_second(rows)) < len(rows)

    def land(self) -> None:
        if not self.flying:
            return
        rows = self.flying.pop(self.dice.randrange(len(self.flying)))
        if self.dice.random() < 0.2:
            self.tier.abandon(rows)
            return
        ok = None if self.dice.random() < 0.7 else np.array([self.dice.random() < 0.7 for _ in rows])
        keys = self.tier.table.keys_of(rows if ok is None else rows[ok])
        assert self.tier.table.keys_of(self.tier.complete(rows, ok)) == keys and not {*keys} & self.held.keys()
        self.held.update(dict.fromkeys(keys))

    def lock(self) -> None:
        rows = self.tier.held(prompt_of(self.dice, self.texts))
        self.tier.lock(rows)
        self.locked.append(self.tier.table.keys_of(rows))

    def unlock(self) -> None:
        if self.locked:
            self.tier.unlock(self.tier.table.find(self.locked.pop(self.dice.randrange(len(self.locked)))))

    def use(self) -> None:
        rows = self.tier.held(prompt_of(self.dice, self.texts))
        self.tier.table.hits[rows] += 1
        self.tier.use(rows)
        self.tier.order.raise_priority(rows, self.dice.randrange(3))

    def hint(self) -> None:
        """Give a prompt a hint: it is kept for some seconds, one of which passes; or it is expected; or more uses are
        announced."""
        self.now_s += 1
        self.tier.order.expire(self.now_s)
        rows, kind = self.tier.held(prompt_of(self.dice, self.texts)), self.dice.randrange(4)
        if kind == 0:
            self.tier.keep_until(rows, self.now_s + self.dice.randrange(20), NUM_PAGES * 0.9)
        elif kind == 1:
            self.tier.expect(rows, 1)
            self.expected.append(self.tier.table.keys_of(rows))
        elif kind == 2 and self.expected:
            self.tier.expect(self.tier.table.find(self.expected.pop()), -1)
        else:
            self.tier.expect_uses(rows, 3)

    def to_above(self) -> None:
        """Let the tier above compute or load a prompt."""
        keys = prompt_of(self.dice, self.texts)
        rows = self.tier.table.find(keys)
        rows = rows[rows >= 0]
        self.tier.came_above(rows)
        self.above.update(self.tier.table.keys_of(rows[self.tier.has(rows, HELD | IN_FLIGHT)]))

    def off_above(self) -> None:
        """Let the tier above evict the end of a prompt with all pages after it."""
        keys = prompt_of(self.dice, self.texts)
        gone = [key for key in self.above if key.startswith(keys[-1])]
        self.tier.left_above(self.tier.table.find(gone))
        self.above -= {*gone}

    def check(self) -> None:
        table, tier = self.tier.table, self.tier
        locks = np.zeros(len(table.age), np.int32)
        for keys in self.locked:
            locks[table.find(keys)] += 1
        for rows in self.flying:
            locks[rows] += 1
        tier.check(locks)
        assert {*table.keys_of(tier.rows_held())} == self.held.keys() and len(tier) == len(self.held)
        assert {*table.keys_of(np.flatnonzero(tier.state & ABOVE))} == self.above
        for keys in self.expected:
            assert (table.find(keys) >= 0).all(), "somebody still needs these rows"


@pytest.mark.parametrize("is_exclusive", [False, True])
@pytest.mark.parametrize("seed", [0, *long(*range(1, 6))])
@pytest.mark.parametrize("policy", sorted(RANK_POLICIES))
def test_what_leaves_is_what_should(
    policy: str, seed: int, is_exclusive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random histories use every verb, with failures. Each evicted page is the one that the rule names, no locked page
    is evicted, and the end of a prompt is evicted first. Sums and states agree after each verb."""
    monkeypatch.setattr(PageTable, "many", 1 if is_exclusive else PageTable.many)  # index by slices, or by numbers
    model = Model(policy, seed, is_exclusive=is_exclusive)
    verbs = [model.request, model.request, model.land, model.land, model.lock, model.unlock, model.use, model.hint]
    verbs += [model.reserve_second] + ([model.to_above, model.to_above, model.off_above] if is_exclusive else [])
    for _ in range(400):
        model.dice.choice(verbs)()
        model.check()
    while model.flying:
        model.land()
    while model.locked:
        model.unlock()
    while model.expected:
        model.tier.expect(model.tier.table.find(model.expected.pop()), -1)
    model.tier.left_above(model.tier.table.find([*model.above]))
    model.above.clear()
    model.check()
    model.tier.evict_all()
    assert not model.held and model.tier.pool.available() == NUM_PAGES and not len(model.tier.table)
    assert model.num_evicted > 20 and model.num_refused > 0


def test_a_large_tier_evicts_what_a_small_one_would() -> None:
    """A large tier evicts from a batch of victims, some of which were used after they were chosen. The prompt that was
    used longest ago loses its pages first, from its end on."""
    dice, tier, used = random.Random(0), TierPages(pool_of(4000), "lru"), dict[int, list[bytes]]()
    for _ in range(600):
        name = dice.randrange(140)
        keys = used.pop(name, [b"%d %d" % (name, at) for at in range(50)])
        used[name] = keys  # the most recently used prompt is last
        rows = tier.table.add(keys)
        tier.complete(tier.reserve(rows[~tier.has(rows)], COPY))
        tier.use(rows)
        held = [tier.has(tier.table.find(each)) for each in used.values()]
        lengths = [int(each.sum()) for each in held]
        assert sorted(lengths) == lengths and len({*lengths} - {0, 50}) <= 1
        assert all(each[:length].all() for each, length in zip(held, lengths, strict=True))
    tier.check()


@pytest.mark.parametrize("name", ["auto", "LRU"])
def test_policies_are_named_in_any_case(name: str) -> None:
    assert type(rank_policy(name)) is RANK_POLICIES[name.lower()]


def test_the_audit_finds_planted_faults() -> None:
    """`check` reports a lock without an owner, a pool page of two rows, a wrong sum and a wrong state."""
    tier = TierPages(pool_of(8), "lru")
    rows = tier.complete(tier.reserve(tier.table.add([b"a", b"ab", b"abc"]), COPY))
    tier.check(np.zeros(len(tier.table.age), np.int32))
    faults = [
        (tier.pool_page, 1, "share a page"),
        (tier.state, READ, "in flight"),
        (tier.second_pool_page, 5, "not raw"),
    ]
    for column, value, message in faults:
        before = column[rows].copy()
        column[rows[:2]] = value
        with pytest.raises(InvariantError, match=message):
            tier.check()
        column[rows] = before
    tier.check()
    tier.order.locks[rows[0]] += 1
    with pytest.raises(InvariantError, match="1 pages have other locks: one has 1, 0 are held"):
        tier.check(np.zeros(len(tier.table.age), np.int32))
    tier.order.locks[rows[0]] -= 1
    tier.order.keep[rows[0]] = 5
    with pytest.raises(InvariantError, match="kept"):
        tier.check()


def _tier_with(policy: str, *prompts: list[bytes]) -> TierPages:
    tier = TierPages(pool_of(NUM_PAGES), policy)
    for keys in prompts:
        tier.complete(tier.reserve(tier.table.add(keys), COPY))
    return tier


def test_pages_that_queued_requests_need_leave_last_and_are_not_discarded() -> None:
    expected, plain = [b"a0", b"a1"], [b"b0", b"b1"]
    tier = _tier_with("lru", expected, plain)
    rows = tier.held(expected)
    tier.expect(rows, 1)
    tier.discard(tier.held([*expected, *plain][1:3]))
    assert {*tier} == {b"a0", b"a1", b"b1"}
    assert tier.table.keys_of(tier.order.eviction_order()) == [b"b1", b"a1", b"a0"]
    tier.expect(rows, -1)
    tier.discard(rows)
    tier.check()
    assert {*tier} == {b"b1"}


def _assert_prefix_stays(tier: TierPages, last: Rows) -> None:
    """Assert that the page before `last` is evicted only after `last` was unlocked."""
    tier.lock(last)
    tier.evict_all()
    assert {*tier} == {b"a0", b"a1"}
    tier.unlock(last)
    tier.evict_all()
    tier.check()
    assert not len(tier)


@pytest.mark.parametrize("has_moved", [False, True])
def test_a_page_stays_whose_follower_was_locked(has_moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tier has chosen a batch of victims. Then one of its pages gets a lock, with or without another rank. The
    page before it is not evicted."""
    monkeypatch.setattr(hicache.pages.order, "_SMALL", 0)
    tier = _tier_with("lru", [b"z"], [b"a0", b"a1"], [b"b"])
    tier.drop(tier.order.take(1))
    assert {*tier} == {b"a0", b"a1", b"b"}
    last = tier.held([b"a1"])
    if has_moved:
        tier.end_session(last)
    _assert_prefix_stays(tier, last)


def test_a_page_stays_whose_follower_came_first() -> None:
    """A tier has a page before the table knows the previous page. The previous page is not evicted while the page is
    locked."""
    tier = _tier_with("lru", [b"a1"])
    last = tier.held([b"a1"])
    tier.complete(tier.reserve(tier.table.add([b"a0", b"a1"])[:1], COPY))
    _assert_prefix_stays(tier, last)


def test_a_victim_that_was_not_evicted_is_a_victim_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eviction from a large tier raises before it changes anything. The page before its victim stays, and the victim
    is chosen again."""
    monkeypatch.setattr(hicache.pages.order, "_SMALL", 0)
    tier = _tier_with("lru", [b"a0", b"a1", b"a2"])
    victim = tier.order.take(1)
    assert tier.table.keys_of(victim) == [b"a2"]
    assert np.array_equal(tier.order.take(1), victim)
    tier.evict_all()
    tier.check()
    assert not len(tier)


def test_kept_pages_stay_within_their_limit() -> None:
    """A new hint ends older ones until at most `limit` pages are kept."""
    prompts = [[b"a0", b"a1"], [b"b0", b"b1"], [b"c0"]]
    tier = _tier_with("lru", *prompts)
    for keys in prompts:
        tier.keep_until(tier.held(keys), 60.0, 3)
        assert tier.order.num_kept <= 3
    assert tier.table.keys_of(tier.order.eviction_order()) == [b"a1", b"a0", b"b1", b"b0", b"c0"]
    assert {*tier.table.keys_of(np.flatnonzero(tier.order.keep))} == {b"b0", b"b1", b"c0"}


def test_paths_name_a_page_whose_row_was_that_of_another() -> None:
    """`with_paths` distinguishes rows by age: if another page has got a row, the row counts as new."""
    tier = _tier_with("lru", [b"a0", b"a1"])
    table, seen = tier.table, Seen()
    table.add_columns(seen)
    before = table.with_paths(tier.held([b"a1"]), seen)
    assert table.keys_of(before) == [b"a0", b"a1"] and not len(table.with_paths(before, seen))
    tier.evict_all()
    after = tier.complete(tier.reserve(table.add([b"b0", b"b1"]), COPY))
    assert {*after.tolist()} == {*before.tolist()}
    assert table.keys_of(table.with_paths(after[-1:], seen)) == [b"b0", b"b1"]


def test_of_pages_that_the_tier_above_has_the_last_ones_leave_first() -> None:
    """The host evicts pages first that the device keeps longest, because they arrived or were used last. The host
    evicts the beginning of a prompt before its end: a request that needs the end finds the beginning on the device."""
    prompts = [[b"a0", b"a1"], [b"b0", b"b1"]]
    tier = _tier_with("lru", *prompts)
    tier.is_exclusive = True
    for keys in prompts:
        tier.came_above(tier.held(keys))
    assert tier.table.keys_of(tier.order.eviction_order()) == [b"b0", b"b1", b"a0", b"a1"]
    tier.use(tier.held(prompts[0]))
    assert tier.table.keys_of(tier.order.eviction_order()) == [b"a0", b"a1", b"b0", b"b1"]


def test_a_page_that_was_used_after_it_entered_a_batch_does_not_leave_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tier has chosen a batch of victims. A page of the batch that a request used since then is not evicted
    with the batch, even if the page returns to its old position in the order."""
    monkeypatch.setattr(hicache.pages.order, "_SMALL", 0)
    monkeypatch.setattr(hicache.pages.order, "_LEAST_BATCH", 3)
    keys = [b"%d" % number for number in range(8)]
    tier = _tier_with("lru", *([key] for key in keys))
    locked = tier.held(keys[:1])
    tier.lock(locked)
    tier.drop(tier.order.take(1))
    tier.unlock(locked)
    tier.use(locked)
    while len(tier) > 1:
        tier.drop(tier.order.take(1))
    assert {*tier} == {keys[0]}
