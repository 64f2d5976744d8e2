"""What may be written to a drive, and what is remembered of its pages."""

from __future__ import annotations

import hashlib
import random

import pytest

from disk_case import Clock
from hicache.eviction.write_budget import BUCKET_S, PageUses, WriteBudget, names_of


@pytest.mark.parametrize("seed", range(20))
def test_no_interval_has_more_than_its_budget(seed: int) -> None:
    """Whoever writes whatever fits, whenever: in no interval more is written than its seconds and the bucket allow, and
    of a minute that is one and a half. What the store had already costs nothing, and all is used in the long run."""
    dice, now_s, rate = random.Random(seed), 0.0, 100.0
    budget, written, on_its_way = WriteBudget(rate, lambda: now_s), list[tuple[float, int]](), list[int]()
    for _ in range(2000):
        now_s += dice.choice((0.0, 0.01, 0.5, 3.0, 40.0)) * dice.random()
        for num_bytes in (dice.randrange(1, 400) for _ in range(dice.randrange(8))):
            if budget.has_room(num_bytes):
                budget.reserve(num_bytes)
                on_its_way.append(num_bytes)
        while on_its_way and dice.random() < 0.8:
            num_bytes = on_its_way.pop()
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
    """Of processes that end after two seconds each, and write whatever fits, all together keep to the rate."""
    clock, rate, num_written = Clock(), 100.0, 0
    begin_s = clock.now_s
    for _ in range(50):
        budget = WriteBudget(rate, clock)
        for _ in range(20):
            clock.now_s += 0.1
            while budget.has_room(7):
                budget.reserve(7)
                budget.spend(7, 7)
                num_written += 7
    assert 0.8 * rate * (clock.now_s - begin_s) < num_written <= rate * (clock.now_s - begin_s)


def test_uses_outlive_the_pages_and_the_table_is_bounded() -> None:
    """A page counts as used twice from its second use on, whatever came between as long as its place is its own; where
    more pages come than the table has places, it forgets, and never takes one page for another."""
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
    """Each page that was written counts as read once, however often it is; a use of it changes nothing."""
    names = names_of([hashlib.sha256(bytes([n])).digest() for n in range(20)])
    uses = PageUses()
    uses.write(names, 15)
    uses.use(names)
    for _ in range(2):
        uses.read(names[:5])
    assert (uses.num_written, uses.num_read) == (15, 5)
    uses.count_anew()
    uses.read(names)
    assert (uses.num_written, uses.num_read) == (0, 0)
