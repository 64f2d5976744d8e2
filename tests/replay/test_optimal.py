"""The optimum against all choices, and against every policy."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import numpy as np
import pytest

from hicache.replay.cache import ReplaySettings
from hicache.replay.optimal import optimal_hits
from hicache.replay.simulation import replay
from hicache.tree.key import Tokens
from hicache.tree.policy import ORDERS
from replay_case import synthetic_trace, trace_of

Prefix = tuple[int, ...]


def max_hits(requests: list[Tokens], capacity: int) -> int:
    """The hits of the best of all choices: after every request, any blocks of those held and brought may stay."""
    prompts = [[tuple(r[:end].tolist()) for end in range(1, len(r) + 1)] for r in requests]

    @cache
    def best(now: int, held: frozenset[Prefix]) -> int:
        if now == len(prompts):
            return 0
        prompt = prompts[now]
        hits = next((at for at, prefix in enumerate(prompt) if prefix not in held), len(prompt))
        there = sorted(held | set(prompt))
        stay = combinations(there, min(capacity, len(there)))
        return hits + max(best(now + 1, frozenset(kept)) for kept in stay)

    return best(0, frozenset())


def random_trace(dice: random.Random, num_requests: int, most_blocks: int) -> list[Tokens]:
    """Prompts over two ids: they share, repeat, extend and shorten each other's prefixes."""
    return [
        np.array([dice.randrange(2) for _ in range(dice.randrange(1, most_blocks + 1))]) for _ in range(num_requests)
    ]


def test_the_optimum_is_the_best_of_all_choices() -> None:
    """On small traces no choice of what stays gives more hits, and one gives as many."""
    for seed in range(150):
        dice = random.Random(seed)
        trace = random_trace(dice, 6, 4)
        capacity = dice.randrange(1, 5)
        assert optimal_hits(trace, capacity).sum() == max_hits(trace, capacity)


@pytest.mark.parametrize("capacity", [50, 300, 1000, None])
def test_no_policy_hits_more_than_the_optimum(capacity: int | None) -> None:
    """The optimum bounds every policy, and without a limit all hit whatever came before."""
    requests = synthetic_trace(num_requests=200)
    trace = trace_of(*requests)
    optimum = optimal_hits(requests, capacity).sum()
    hits = {name: replay(trace, ReplaySettings(capacity, policy=name)).hit_blocks["device"].sum() for name in ORDERS}
    assert max(hits.values()) <= optimum
    if capacity is None:
        distinct = {tuple(r[:end].tolist()) for r in requests for end in range(1, len(r) + 1)}
        assert set(hits.values()) == {optimum} == {sum(map(len, requests)) - len(distinct)}
    else:
        assert max(hits.values()) < optimum and len(set(hits.values())) > 3
