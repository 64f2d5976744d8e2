"""Replays through the tiers, compared with known answers and with the figures of real traces."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hicache.pages.key import Tokens
from hicache.pages.order import RANK_POLICIES
from hicache.replay.cost import TierCosts
from hicache.replay.curve import miss_ratio_curve
from hicache.replay.disk import DiskOrder
from hicache.replay.hints import NO_HINT, Hint, hints_of
from hicache.replay.optimal import lru_hits_by_size, optimal_hits
from hicache.replay.settings import WRITE_POLICIES, ReplaySettings
from hicache.replay.simulation import Copies, one_tier, optimal, replay
from hicache.replay.trace import Trace, TraceRequest, prefix_ids
from replay_case import synthetic_trace, trace_of


def test_a_scan_has_known_answers() -> None:
    """Fifty documents are read in turn, twenty times. LRU hits nothing in a tier for 49 documents, and all repetitions
    in a tier for all fifty. A device and a host that hold different pages have the hits of one tier of their total
    size. The optimum keeps the documents that fit in addition to the running one."""
    rounds, documents = 20, 50
    trace = trace_of(*([document] for _ in range(rounds) for document in range(documents)))
    repeated = (rounds - 1) / rounds

    def rates(*blocks: int | None, write_policy: str = "") -> tuple[float, ...]:
        return tuple(replay(trace, ReplaySettings(*blocks, write_policy=write_policy)).tier_hit_rates.values())

    assert rates(49) == (0, 0, 0) and rates(50) == rates(None) == (repeated, 0, 0)
    assert rates(10, 39) == rates(10, 49, write_policy="write_through") == rates(10, 20, 49) == (0, 0, 0)
    assert rates(10, 41) == rates(10, 50) == rates(49, 50, 49) == (0, repeated, 0)
    assert rates(10, 20, 50) == rates(1, 1, None) == (0, 0, repeated)
    for blocks in (10, 49, 50):
        kept = (blocks - 1) / (documents - 1)
        assert optimal(trace, ReplaySettings(blocks)).hit_rate == pytest.approx(repeated * kept, rel=0.04)


def test_a_partial_block_counts_for_its_tokens() -> None:
    """A prompt that is hit completely saves its own tokens, not those of complete blocks."""
    requests = tuple(TraceRequest(float(at), np.array([1, 2]), 7, 1) for at in range(2))
    result = replay(Trace("generated", 4, requests), ReplaySettings(8))
    assert result.hit_rate == 0.5 and result.tokens_saved == 7 and result.device_tokens.tolist() == [0, 7]


@pytest.mark.parametrize(("policy", "write_policy"), list(zip(sorted(RANK_POLICIES), itertools.cycle(WRITE_POLICIES))))
def test_tiers_add_up(policy: str, write_policy: str) -> None:
    """For requests in any order, no tier exceeds its capacity. Tiers hit at most the optimum of their total size, and
    unlimited tiers hit all repetitions."""
    dice = random.Random(policy)
    trace = trace_of(*([dice.randrange(3) for _ in range(dice.randrange(1, 9))] for _ in range(300)))
    settings = ReplaySettings(10, 20, 40, policy, write_policy)
    result = replay(trace, settings)
    assert 0 < result.hit_rate <= optimal(trace, settings).hit_rate
    complete = replay(trace, ReplaySettings(None, None, None, policy, write_policy))
    assert complete.hit_rate == optimal(trace, ReplaySettings(None)).hit_rate > result.hit_rate
    assert complete.tier_hit_rates["device"] == complete.hit_rate


Prefix = tuple[int, ...]


def max_hits(requests: list[Tokens], capacity: int) -> int:
    """The hits of the best choice of victims, by trying all choices. The pages of the running prompt stay."""
    prompts = [[tuple(r[:end].tolist()) for end in range(1, len(r) + 1)] for r in requests]

    @cache
    def best(now: int, held: frozenset[Prefix]) -> int:
        if now == len(prompts):
            return 0
        prompt = prompts[now]
        hits = next((at for at, prefix in enumerate(prompt) if prefix not in held), len(prompt))
        others = sorted(held - set(prompt))
        stay = itertools.combinations(others, min(capacity - len(prompt), len(others)))
        return hits + max(best(now + 1, frozenset((*kept, *prompt))) for kept in stay)

    return best(0, frozenset())


def random_trace(dice: random.Random, num_requests: int, most_blocks: int) -> list[Tokens]:
    """Prompts over two ids: they share, repeat, extend and shorten each other's prefixes."""
    return [
        np.array([dice.randrange(2) for _ in range(dice.randrange(1, most_blocks + 1))]) for _ in range(num_requests)
    ]


def test_the_optimum_is_the_best_of_all_choices() -> None:
    """On small traces no choice of victims has more hits than the optimum, and one has the same number."""
    for seed in range(150):
        dice = random.Random(seed)
        capacity = dice.randrange(1, 7)
        trace = random_trace(dice, 6, min(4, capacity))
        assert optimal_hits(prefix_ids(trace), capacity).sum() == max_hits(trace, capacity)


def test_the_miss_ratio_curve_is_that_of_replays() -> None:
    """At every size the curve has the hits of a replay with `lru` over the counted requests, and the misses of the
    optimum. Prompts longer than a size are cut."""
    complete = Trace("generated", 4, trace_of(*synthetic_trace(300)).requests, num_warm_up=100)
    hits = lru_hits_by_size(complete.prefixes, complete.num_warm_up)
    for blocks in (1, 5, 40, 200, 700, len(hits) - 1):
        result = replay(complete, ReplaySettings(blocks))
        assert result.hit_blocks["device"].sum() == hits[blocks] and len(result.time_s) == 200
    curve = miss_ratio_curve(complete)
    for point in curve[:: len(curve) // 4]:
        settings = ReplaySettings(point.blocks)
        assert point.lru == pytest.approx(1 - replay(complete, settings).hit_rate)
        assert point.optimal == pytest.approx(1 - optimal(complete, settings).hit_rate)
    assert curve[-1].lru == curve[-1].optimal == pytest.approx(1 - optimal(complete, ReplaySettings(None)).hit_rate)
    assert curve[-1].lru < curve[-2].lru


def test_one_tier_takes_of_a_prompt_what_the_device_takes() -> None:
    """A prompt of four blocks runs on a device of two, so at most two blocks are hit. The limit holds for tiers of
    seven blocks in all, and for one tier of seven blocks."""
    trace, settings = trace_of([1, 2, 3, 4], [5, 6], [1, 2, 3, 4]), ReplaySettings(2, 5)
    for result in (replay(trace, settings), one_tier(trace, settings), optimal(trace, settings)):
        assert result.hit_rate == 2 / 10
    assert one_tier(trace, settings).tier_hit_rates == {"device": 2 / 10, "host": 0, "disk": 0}
    assert replay(trace, ReplaySettings(7)).hit_rate == 4 / 10


def test_copies_are_counted_by_link() -> None:
    """Copies equal a computation by hand. Written blocks that no later request asked for were never read. The warm-up
    does not count."""
    prompts = [[1, 2], [3, 4], [5, 6], [1, 2], [1, 2]]
    trace = trace_of(*prompts)
    settings, costs = ReplaySettings(2, 2, None), TierCosts(bytes_per_token=10.0, host_bytes_per_token=5.0)
    result = replay(trace, settings, costs=costs)
    assert result.copies == Copies(loaded=2, backed_up=6, read=2, written=6, never_read=4)
    assert result.copied_bytes == {"loaded": 40, "backed_up": 120, "read": 40, "written": 120, "never_read": 80}
    later = replay(Trace("generated", 4, trace.requests, num_warm_up=2), settings, costs=costs)
    assert later.copies == Copies(loaded=2, backed_up=2, read=2, written=2, never_read=2)
    assert later.hit_rate == 4 / 6 and later.uncached_tokens.tolist() == [8, 1, 1]
    assert later.to_json()["uncached_tokens"]["p50"] == 1 and "ttft_s" not in later.to_json()
    assert optimal(trace, settings).copies is None


def test_hints_are_what_the_trace_knows() -> None:
    """Hints equal those found by hand. A continuation has all but at most two blocks of the earlier prompt, and is in
    the same session."""
    prompts = [[1, 2, 3], [1, 2, 3, 4, 5], [9, 8, 7], [1, 6, 6], [9, 8, 5], [9], []]
    trace = trace_of(*prompts)
    assert hints_of(trace, ()) == [NO_HINT] * 7
    next_s = [1.0, None, 2.0, None, 1.0, None, None]
    assert hints_of(trace, ("session", "next")) == [Hint(within_s is None, within_s) for within_s in next_s]
    sessions = [replace(at, session=name) for at, name in zip(trace.requests, "cababbb", strict=True)]
    named = hints_of(Trace("generated", 4, tuple(sessions)), ("next",))
    assert named == [Hint(next_turn_within_s=s) for s in (None, None, 2.0, None, 1.0, None, None)]


def test_a_disk_is_an_order_of_uses() -> None:
    """The order of a disk equals that of an ordered dict of keys, through evictions and logs that are rewritten."""
    for seed, capacity in enumerate((1, 7, 40, None)):
        dice, disk, known = random.Random(seed), DiskOrder(capacity), OrderedDict[int, bool]()
        written = useful = 0
        for _ in range(2_000):
            ids = [*range(start := dice.randrange(60), start + dice.randrange(12))]
            held = [number for number in ids if number in known]
            if dice.random() < 0.4:
                disk.put(np.array(ids, np.int64))
                new = [number for number in ids if number not in known]
                known.update(dict.fromkeys(reversed(new), True))
                written += len(new)
                for number in (*reversed(held), *reversed(new)):
                    known.move_to_end(number)
                while capacity is not None and len(known) > capacity:
                    known.popitem(last=False)
            else:
                is_read = dice.random() < 0.5
                (disk.read if is_read else disk.touch)(np.array(held if is_read else ids, np.int64))
                for number in reversed(held):
                    useful += is_read and known[number]
                    known[number] = known[number] and not is_read
                    known.move_to_end(number)
            present = next((at for at, number in enumerate(ids) if number not in known), len(ids))
            assert disk.num_present(np.array(ids, np.int64)) == present
            assert (len(disk), disk.num_written, disk.num_useful) == (len(known), written, useful)


def test_a_prefix_has_one_id() -> None:
    """Two prefixes have the same id only if they are equal. The ids are consecutive from 0 on."""
    dice = random.Random(0)
    prompts = [np.array([dice.randrange(3) << 40 for _ in range(dice.randrange(5))], np.int64) for _ in range(200)]
    found = prefix_ids(prompts)
    pairs = {
        (tuple(prompt[: end + 1].tolist()), int(ids[end]))
        for prompt, ids in zip(prompts, found, strict=True)
        for end in range(len(prompt))
    }
    assert len({prefix for prefix, _ in pairs}) == len({number for _, number in pairs}) == len(pairs)
    assert {number for _, number in pairs} == {*range(len(pairs))}
    assert [len(ids) for ids in found] == [len(prompt) for prompt in prompts]
