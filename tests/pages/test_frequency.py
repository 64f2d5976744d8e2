"""The policy `auto`: its ranks compared with a naive sum over all uses, and its hit rates compared with those of
`lru`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from hicache.pages.device import DevicePages
from hicache.pages.frequency import FadingFrequency
from hicache.pages.key import PageHasher, Tokens
from hicache.pages.tree import RadixTree
from hicache.replay.cache import CacheSimulation
from hicache.replay.settings import ReplaySettings
from hicache.tiers import FULL

HALF_LIFE = 200.0


def hits(requests: Sequence[Tokens], policy: str, capacity: int) -> int:
    """The number of blocks that hit when their request arrived."""
    cache = CacheSimulation(ReplaySettings(capacity, policy=policy))
    num_hits = sum(cache.serve(request).device for request in requests)
    cache.check()
    return num_hits


def tree_of(half_life: float) -> tuple[RadixTree, DevicePages, FadingFrequency]:
    """A tree of pages of one token under `auto`, with a constant half-life."""
    tree = RadixTree(1, PageHasher(b"identity", 1), policy="auto")
    policy = tree.pages[FULL].order.policy
    assert isinstance(policy, FadingFrequency)
    policy.half_life, policy._adapt = half_life, lambda: None  # type: ignore[method-assign]
    return tree, tree.pages[FULL], policy


def test_the_victim_has_the_least_faded_uses_also_of_times_before_it_was_evicted() -> None:
    """The victim has the least faded uses, including uses before its last eviction. The test compares it with a model
    that keeps every use of every prompt. No prompt is a part of another."""
    dice, (tree, pages, policy) = random.Random(1), tree_of(HALF_LIFE)
    prompts = [np.arange(100 * n, 100 * n + dice.randrange(4, 12)) for n in range(14)]
    uses: dict[int, list[int]] = {}  # by prompt: the uses of its last page
    seen, evictions = 0, 0
    for _ in range(1500):
        number = min(int(dice.expovariate(0.3)), len(prompts) - 1)
        tokens = prompts[number]
        match = tree.match(tokens)
        assert match.full_len in (0, len(tokens))
        tree.begin_use(match.rows)
        node = tree.insert(tree.root, tokens, torch.zeros(len(tokens), dtype=torch.int64)).node
        tree.touch(node)
        last = seen + 1
        seen += len(tokens)
        if not uses.get(number) or last - uses[number][-1] > min(HALF_LIFE, policy._capacity) / 64:
            uses.setdefault(number, []).append(last)
        while tree.evictable(FULL) > 40:
            ranks = {at: sum(2 ** ((t - seen) / HALF_LIFE) for t in uses[_number(at)]) for at in tree.nodes()}
            victim = tree.node_of(pages.take(1)[0])
            assert ranks[victim] == pytest.approx(min(ranks.values()))
            tree.evict(victim.rows, FULL)
            evictions += 1
    tree.check()
    assert evictions > 300


def test_a_use_counts_when_it_is_reported() -> None:
    """Expecting or unlocking a page does not count as a use, even while the hits of a running request are counted."""
    tree, pages, _ = tree_of(1 << 40)
    for n in range(50):
        tree.insert(tree.root, np.array([n]), torch.ones(1, dtype=torch.int64))
    rows = tree.match(np.array([0])).rows
    tree.begin_use(rows)
    pages.order.expect(rows, 1)
    pages.order.expect(rows, -1)
    order = pages.order
    assert order.policy.uses_of(order.at, rows) == 1
    pages.use(rows)
    assert order.policy.uses_of(order.at, rows) == pytest.approx(2)


def test_no_priority_lasts_for_ever() -> None:
    """A page that is not requested again is evicted before pages in use, at any priority."""
    tree, pages, _ = tree_of(1.0)
    for tokens in (np.arange(8), np.arange(8, 16)):
        tree.insert(tree.root, tokens, torch.zeros(8, dtype=torch.int64))
    once, used = (tree.node_at(tree.match(tokens), 8) for tokens in (np.arange(8), np.arange(8, 16)))
    tree.raise_priority(once, 1 << 30)
    for _ in range(8):  # half-lives in each step
        tree.begin_use(used.rows)
        tree.touch(used)
    assert tree.node_of(pages.take(1)[0]) is once


def _number(node) -> int:  # type: ignore[no-untyped-def]
    return int(node.run.tokens[0]) // 100


def multi_turn(dice: np.random.Generator, fresh: Callable[[int], Tokens]) -> list[Tokens]:
    """Chats over a few system prompts. A few chats are active at a time."""
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
    """Half of the requests ask about documents of unequal popularity; each of the others is made once."""
    documents = [fresh(int(dice.integers(30, 120))) for _ in range(100)]
    shares = 1 / np.arange(1, 101) ** 1.2
    return [
        np.concatenate([documents[int(dice.choice(100, p=shares / shares.sum()))], fresh(3)])
        if dice.random() < 0.5
        else fresh(int(dice.integers(20, 100)))
        for _ in range(600)
    ]


def scans(dice: np.random.Generator, fresh: Callable[[int], Tokens]) -> list[Tokens]:
    """A loop over more pages than the tier holds, with frequent prompts between the pages."""
    loop, often = [fresh(30) for _ in range(120)], [fresh(30) for _ in range(20)]
    return [loop[n % 120] if dice.random() < 0.6 else often[int(dice.integers(20))] for n in range(600)]


def drifting(dice: np.random.Generator, fresh: Callable[[int], Tokens]) -> list[Tokens]:
    """New prompts are requested for a while and then never again, so the least recently used page is the best
    victim."""
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
    """`auto` hits at most 2 % less than `lru` at any capacity. The replay ends with a check of the tree."""
    requests = generated(shape, seed)
    for capacity in (300, 1000):
        assert hits(requests, "auto", capacity) >= 0.98 * hits(requests, "lru", capacity), capacity


def test_it_hits_more_than_lru_where_much_comes_once() -> None:
    for shape in (one_shot, scans):
        requests = generated(shape, 0)
        assert hits(requests, "auto", 300) > 1.5 * hits(requests, "lru", 300)
