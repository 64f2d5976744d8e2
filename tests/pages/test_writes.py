"""The pages that a store gets next, its write budget, and its record of their uses."""

from __future__ import annotations

import hashlib
import random
from itertools import product

import numpy as np
import pytest

from disk_case import Clock
from hicache.pages import writes
from hicache.pages.states import COPY, TierPages
from hicache.pages.table import Rows, names_of
from hicache.pages.writes import BUCKET_S, PageUses, WriteBudget, WriteMode, WriteScheduler, WriteSource
from hicache.replay.blocks import BlockPool
from hicache.tiers import DISK

NUM_PAGES = 40
EVENTS = ("SPENT", "REFILLED", "DRAIN", "RESUME")


class Scenario:
    """A tier of `NUM_PAGES` pages over a disk whose budget is one page per second."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.tier = TierPages(BlockPool(NUM_PAGES), "lru")
        self.budget = WriteBudget(1.0, self.clock)
        self.source = WriteSource(self.tier, 1, NUM_PAGES // 2)
        self.uses = PageUses(1009)  # not a multiple of 2, because the keys of this test are shorter than real names
        self.writes = WriteScheduler([self.source], DISK, self.budget, self.uses)

    def add(self, *keys: bytes) -> Rows:
        """Add new pages of one prompt."""
        rows = self.tier.complete(self.tier.reserve(self.tier.table.add(keys), COPY))
        self.writes.arrived(self.source, rows)
        return rows

    def next_round(self) -> list[bytes]:
        """The keys of the next round."""
        return [key for _, rows in self.writes.next_round() for key in self.tier.table.keys_of(rows)]

    def answer(self, keys: list[bytes], num_taken: int) -> None:
        """Report the store's answer for these pages: it accepted the first `num_taken` pages."""
        rows = self.tier.table.find(keys)
        self.budget.spend(num_taken, len(rows))
        self.tier.written(rows, np.arange(len(rows)) < num_taken, DISK.bit)
        self.writes.answered(len(rows))

    def enter(self, mode: WriteMode) -> None:
        """Bring the disk to the mode `mode`."""
        if mode is WriteMode.COLD:
            self.add(b"cold")
            assert self.next_round() == []
        elif mode is WriteMode.DRAIN:
            self.writes.drain()
        else:
            self.clock.now_s += BUCKET_S
        assert self.writes.mode is mode

    def apply(self, event: str) -> None:
        if event == "SPENT":
            self.budget.spend(NUM_PAGES, 0)
            self.add(b"new")
            self.next_round()
        elif event == "REFILLED":
            self.clock.now_s += 3 * BUCKET_S
            self.next_round()
        elif event == "DRAIN":
            self.writes.drain()
        else:
            self.writes.resume()


@pytest.mark.parametrize(("mode", "event"), [*product(WriteMode, EVENTS)])
def test_each_event_leads_to_the_mode_that_the_module_documents(mode: WriteMode, event: str) -> None:
    """Each event leads to the mode in the table of the module. An event without a row in the table changes nothing."""
    assert writes.__doc__ is not None
    lines = [line.split("|")[1:-1] for line in writes.__doc__.splitlines() if line.strip().startswith("| ")]
    (heads, *table) = ([cell.strip() for cell in line] for line in lines)
    assert heads[:3] == ["event", "from", "to"]
    found = [row[2] for row in table if row[:2] == [event, mode.name]]
    scenario = Scenario()
    scenario.enter(mode)
    scenario.apply(event)
    assert scenario.writes.mode.name == (found or [mode.name])[0]


@pytest.mark.parametrize("event", ["DRAIN", "REFILLED"])
def test_a_store_gets_pages_early_then_cold_ones_and_everything_at_the_end(event: str) -> None:
    """Pages are written in order of arrival until a quarter of the bucket is spent. Then only the colder half is
    written: pages that several requests used, and other pages while half of the bucket is left. A drain or a full
    bucket writes all pages that the store lacks, the first pages of prompts first."""
    scenario = Scenario()
    prompts = [[b"%d.%d" % (prompt, page) for page in range(10)] for prompt in range(4)]
    scenario.clock.now_s += BUCKET_S
    scenario.add(*prompts[0])
    assert scenario.next_round() == prompts[0]
    scenario.answer(prompts[0], 10)
    for keys in prompts[1:]:
        scenario.add(*keys)
    assert scenario.next_round() == prompts[1]
    scenario.answer(prompts[1], 6)
    assert scenario.writes.mode is WriteMode.COLD and scenario.budget.level < 0.5
    assert scenario.next_round() == []
    for _ in range(2):
        scenario.uses.use(names_of(prompts[1][5:8]))
    scenario.writes.used(scenario.source, NUM_PAGES)
    assert scenario.next_round() == prompts[1][6:8]
    scenario.answer(prompts[1][6:8], 2)
    scenario.clock.now_s += 6
    scenario.writes.used(scenario.source, NUM_PAGES)
    assert scenario.next_round() == prompts[1][8:], "half of the bucket is left"
    scenario.answer(prompts[1][8:], 0)
    if event == "DRAIN":
        scenario.writes.drain()
    else:
        scenario.clock.now_s += BUCKET_S
    rest = [keys[page] for page in range(10) for keys in prompts[1:] if keys[page] not in prompts[1][:8]]
    assert scenario.next_round() == rest[: NUM_PAGES // 2]


@pytest.mark.parametrize("seed", range(20))
def test_a_drain_writes_each_page_of_the_tier_once(seed: int) -> None:
    """After arrivals, evictions, uses, seconds and refused pages in any order, a drain writes each page of the tier
    once. No round has a page that the store has or is writing, which `begin_write` asserts, and no page of an ended
    session."""
    dice, scenario, names = random.Random(seed), Scenario(), iter(range(1000))
    tier, written, chosen = scenario.tier, set[bytes](), list[bytes]()
    for _ in range(200):
        scenario.clock.now_s += dice.choice((0.0, 1.0, 10.0))
        if dice.random() < 0.3:
            prompt = next(names)
            scenario.add(*(b"%d.%d" % (prompt, page) for page in range(dice.randrange(1, 9))))
        if len(tier) and dice.random() < 0.3:
            rows = np.array(dice.sample(tier.rows_held().tolist(), 1))
            scenario.uses.use(tier.table.name[rows])
            scenario.writes.used(scenario.source, 3)
            if dice.random() < 0.2:
                tier.end_session(rows)
        if chosen and dice.random() < 0.5:
            num_taken = dice.randrange(len(chosen) + 1)
            written.update(chosen[:num_taken])
            scenario.answer(chosen, num_taken)
            chosen = []
        elif not chosen:
            chosen = scenario.next_round()
            assert not tier.order.has_ended[tier.table.find(chosen)].any()
        tier.check()
    if chosen:
        scenario.answer(chosen, len(chosen))
    scenario.writes.drain()
    while chosen := scenario.next_round():
        scenario.answer(chosen, len(chosen))
    rows = tier.rows_held()
    assert (tier.stored[rows] & DISK.bit > 0)[~tier.order.has_ended[rows]].all()
    assert scenario.writes.is_done and written


def test_a_store_that_writes_within_a_budget_gets_nothing_that_the_tier_above_has() -> None:
    """A store with a write budget gets no page that the tier above also has, because evicting such a page loses
    nothing."""
    scenario = Scenario()
    keys, tier = [b"a0", b"a1", b"b0", b"b1"], scenario.tier
    scenario.add(*keys[:2])
    scenario.add(*keys[2:])
    tier.is_exclusive = True
    tier.came_above(tier.held(keys[:2]))
    tier.pool.alloc(tier.pool.available())  # fills the tier, so that all pages are in the colder half
    scenario.clock.now_s += 20.0  # two thirds of the bucket are full
    assert scenario.next_round() == keys[2:]


@pytest.mark.parametrize("seed", range(20))
def test_no_interval_has_more_than_its_budget(seed: int) -> None:
    """If each write that fits is made, no interval has more bytes than its seconds and the bucket allow, and no minute
    more than one and a half times its budget. Pages that the store already had cost nothing. In the long run the budget
    is used up."""
    dice, now_s, rate = random.Random(seed), 0.0, 100.0
    budget, written, in_flight = WriteBudget(rate, lambda: now_s), list[tuple[float, int]](), list[int]()
    for _ in range(2000):
        now_s += dice.choice((0.0, 0.01, 0.5, 3.0, 40.0)) * dice.random()
        for num_bytes in (dice.randrange(1, 400) for _ in range(dice.randrange(8))):
            if budget.num_fitting(1, num_bytes):
                budget.reserve(num_bytes)
                in_flight.append(num_bytes)
        while in_flight and dice.random() < 0.8:
            num_bytes = in_flight.pop()
            num_new = num_bytes if dice.random() < 0.7 else dice.randrange(num_bytes + 1)
            budget.spend(num_new, num_bytes)
            written.append((now_s, num_new))
        assert 0 <= budget.level <= 1
    start, in_window = 0, 0
    for end_s, num_bytes in written:
        in_window += num_bytes
        while end_s - written[start][0] > 60:
            in_window -= written[start][1]
            start += 1
        assert in_window <= rate * (end_s - written[start][0] + BUCKET_S) + 1e-6 <= rate * 1.5 * 60 + 1e-6
    assert sum(num_bytes for _, num_bytes in written) <= rate * now_s


def test_a_crash_loop_writes_no_more_than_one_process() -> None:
    """Processes that end after two seconds each, and make each write that fits, together stay within the rate."""
    clock, rate, num_written = Clock(), 100.0, 0
    begin_s = clock.now_s
    for _ in range(50):
        budget = WriteBudget(rate, clock)
        for _ in range(20):
            clock.now_s += 0.1
            while budget.num_fitting(1, 7):
                budget.reserve(7)
                budget.spend(7, 7)
                num_written += 7
    assert 0.8 * rate * (clock.now_s - begin_s) < num_written <= rate * (clock.now_s - begin_s)


def test_uses_outlive_the_pages_and_the_table_is_bounded() -> None:
    """A page counts as used twice from its second use on, unless another page has its entry. A table that is too small
    forgets pages, but never confuses two pages."""
    names = names_of([hashlib.sha256(bytes([n // 256, n % 256])).digest() for n in range(3000)])
    uses = PageUses(1 << 16)
    uses.use(names[:100])
    assert not uses.used_twice(names[:200]).any()
    uses.use(names[50:1000])
    assert uses.used_twice(names[50:100]).sum() >= 48 and not uses.used_twice(names[100:]).any()
    small = PageUses(64)
    small.use(names[:1000])
    assert not small.used_twice(names).any()
    small.use(names[990:1000])
    assert 1 <= small.used_twice(names).sum() <= 10 and small.used_twice(names[990:1000]).any()


def test_a_page_that_is_read_was_not_written_in_vain() -> None:
    """Each written page counts as read once, however often it is read. A use does not count as a read."""
    names = names_of([hashlib.sha256(bytes([n])).digest() for n in range(20)])
    uses = PageUses()
    uses.write(names, 15)
    uses.use(names)
    for _ in range(2):
        uses.read(names[:5])
    assert uses.num_written == 15
    assert uses.num_read == 5
