"""The policy `auto`: its ranks against a naive sum over all uses, its hit rates beside those of `lru`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from hicache.eviction.frequency import FadingFrequency
from hicache.eviction.orders import CountedRecord
from hicache.eviction.policy import make_order
from hicache.replay.cache import CacheSimulation
from hicache.replay.settings import ReplaySettings
from hicache.tiers import FULL
from hicache.tree.core import RadixTree
from hicache.tree.key import PageHasher, Tokens

HALF_LIFE = 200.0


def hits(requests: Sequence[Tokens], policy: str, capacity: int) -> int:
    """Blocks of the requests that were held when they came."""
    cache = CacheSimulation(ReplaySettings(capacity, policy=policy))
    num_hits = sum(cache.serve(request).device for request in requests)
    cache.check()
    return num_hits


def test_the_victim_has_the_least_faded_uses_also_of_times_before_it_was_evicted() -> None:
    """Against a model that keeps every use of every prompt for ever. No prompt is a part of another."""
    dice, tree = random.Random(1), RadixTree(1, PageHasher(b"identity", 1), policy="auto")
    log = tree.account(FULL).order.policy
    assert isinstance(log, FadingFrequency)
    log.half_life, log._adapt = HALF_LIFE, lambda: None  # type: ignore[method-assign]
    prompts = [np.arange(100 * n, 100 * n + dice.randrange(4, 12)) for n in range(40)]
    uses: dict[int, list[int]] = {}
    seen, evictions = 0, 0
    for _ in range(1500):
        number = min(int(dice.expovariate(0.1)), len(prompts) - 1)
        tokens = prompts[number]
        match = tree.match(tokens)
        node = tree.node_at(match, match.full_len)
        for at in node.path():
            at.hit_count += 1
        tree.lock(node)
        rest = tokens[match.full_len :]
        new = tree.insert(node, rest, torch.zeros(len(rest), dtype=torch.int64)).node
        tree.unlock(node)
        seen += len(tokens)
        if not uses.get(number) or seen - uses[number][-1] > min(HALF_LIFE, log._capacity_tokens) / 64:
            uses.setdefault(number, []).append(seen)
        assert new.num_tokens == len(tokens)
        while tree.evictable(FULL) > 60:
            ranks = {at.child_key: sum(2 ** ((t - seen) / HALF_LIFE) for t in uses[_number(at)]) for at in tree.nodes()}
            victim = tree.victim(FULL)
            assert victim is not None and ranks[victim.child_key] == pytest.approx(min(ranks.values()))
            tree.drop(victim, FULL)
            evictions += 1
    tree.check()
    assert evictions > 300


def test_a_use_counts_when_it_is_reported() -> None:
    """What is expected, or may be evicted again, is not used, though a request that has not ended is counted on it."""
    order = make_order("auto", lambda record: True)
    record, *others = [CountedRecord(n) for n in range(50)]
    for each in (record, *others):
        order.insert(each)
    record.hit_count += 1
    order.expect(record, 1)
    order.expect(record, -1)
    order.update(record)
    assert order.policy.uses_of(record) == 1
    order.hit(record)
    assert order.policy.uses_of(record) == pytest.approx(2)


def test_no_priority_lasts_for_ever() -> None:
    """What nobody asks for again is evicted before what is in use, whatever its priority was."""
    tree = RadixTree(1, PageHasher(b"identity", 1), policy="auto")
    log = tree.account(FULL).order.policy
    assert isinstance(log, FadingFrequency)
    log.half_life, log._adapt = 1.0, lambda: None  # type: ignore[method-assign]
    for tokens in (np.arange(8), np.arange(8, 16)):
        tree.insert(tree.root, tokens, torch.zeros(8, dtype=torch.int64))
    once, used = (tree.node_at(tree.match(tokens), 8) for tokens in (np.arange(8), np.arange(8, 16)))
    tree.raise_priority(once, 1 << 30)
    for _ in range(8):  # half-lives, each
        used.hit_count += 1
        tree.touch(used)
    assert tree.victim(FULL) is once


def _number(node) -> int:  # type: ignore[no-untyped-def]
    return int(node.run.tokens[0]) // 100


def multi_turn(dice: np.random.Generator, fresh: Callable[[int], Tokens]) -> list[Tokens]:
    """Chats over a few system prompts, of which some are alive at a time."""
    systems, chats, requests = [fresh(8) for _ in range(5)], [], []
    for _ in range(800):
        if len(chats) < 60 or dice.random() < 1 / 8:
            if len(chats) == 60:
                chats.pop(int(dice.integers(60)))
            chats.append(np.concatenate([systems[int(dice.integers(5))], fresh(int(dice.integers(1, 24)))]))
            at = len(chats) - 1
        else:
            at = int(dice.integers(len(chats)))
            chats[at] = np.concatenate([chats[at], fresh(int(dice.integers(1, 6)))])
        requests.append(chats[at])
    return requests


def one_shot(dice: np.random.Generator, fresh: Callable[[int], Tokens]) -> list[Tokens]:
    """Half of the requests ask about documents of unequal popularity, half come once."""
    documents = [fresh(int(dice.integers(30, 120))) for _ in range(100)]
    shares = 1 / np.arange(1, 101) ** 1.2
    return [
        np.concatenate([documents[int(dice.choice(100, p=shares / shares.sum()))], fresh(3)])
        if dice.random() < 0.5
        else fresh(int(dice.integers(20, 100)))
        for _ in range(600)
    ]


def scans(dice: np.random.Generator, fresh: Callable[[int], Tokens]) -> list[Tokens]:
    """A loop over more than fits, beside prompts that come often."""
    loop, often = [fresh(30) for _ in range(120)], [fresh(30) for _ in range(20)]
    return [loop[n % 120] if dice.random() < 0.6 else often[int(dice.integers(20))] for n in range(600)]


def drifting(dice: np.random.Generator, fresh: Callable[[int], Tokens]) -> list[Tokens]:
    """What is new is asked for, and then never again: the least recently used is the best to evict."""
    documents: list[Tokens] = []
    requests = []
    for _ in range(2000):
        if dice.random() < 0.3 or not documents:
            documents.append(fresh(25))
        requests.append(documents[-1 - min(len(documents) - 1, int(dice.exponential(20)))])
    return requests


def generated(shape: Callable[..., list[Tokens]], seed: int) -> list[Tokens]:
    next_id = 0

    def fresh(num_blocks: int) -> Tokens:
        nonlocal next_id
        next_id += num_blocks
        return np.arange(next_id - num_blocks, next_id)

    return shape(np.random.default_rng(seed), fresh)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("shape", [multi_turn, one_shot, scans, drifting])
def test_it_hits_no_less_than_lru(shape: Callable[..., list[Tokens]], seed: int) -> None:
    """At most 2 % less at any capacity; the replay ends with a check of the tree."""
    requests = generated(shape, seed)
    for capacity in (300, 1000):
        assert hits(requests, "auto", capacity) >= 0.98 * hits(requests, "lru", capacity), capacity


def test_it_hits_more_than_lru_where_much_comes_once() -> None:
    for shape in (one_shot, scans):
        requests = generated(shape, 0)
        assert hits(requests, "auto", 300) > 1.5 * hits(requests, "lru", 300)


def test_what_is_remembered_is_bounded() -> None:
    """A prompt that never comes back is forgotten, however many come."""
    tree = RadixTree(1, PageHasher(b"identity", 1), policy="auto")
    log = tree.account(FULL).order.policy
    assert isinstance(log, FadingFrequency)
    log.half_life = 50.0
    for number in range(3000):
        tree.insert(tree.root, np.array([number]), torch.zeros(1, dtype=torch.int64))
        while tree.evictable(FULL) > 20:
            victim = tree.victim(FULL)
            assert victim is not None
            tree.drop(victim, FULL)
    assert len(log._evicted) <= 8 * 50 + 20
