"""Eviction policies of one's own: a strategy and an order, each in one file, and an entry in the table of policies."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

import aged_frequency
import largest_first
from aged_frequency import AgedFrequency
from hicache.tree import DEVICE, FULL, PageHasher, RadixTree
from hicache.tree.orders import OrderFactory, ranked
from hicache.tree.policy import ORDERS
from largest_first import LargestFirst


class Cache:
    """A tree of one-page prompts of its own policy, that holds a fixed number of them."""

    def __init__(self, policy: str, capacity: int) -> None:
        self.tree, self.capacity = RadixTree(1, PageHasher(b"identity", 1), policy=policy), capacity

    def ask(self, prompt: int) -> bool:
        """Whether the prompt was there; it is afterwards."""
        tokens = np.array([prompt])
        match = self.tree.match(tokens)
        if match.device_len:
            for node in match.nodes:
                node.hit_count += 1
            self.tree.touch(match.nodes[-1], DEVICE)
        else:
            if self.tree.evictable(FULL, DEVICE) == self.capacity:
                victim = self.tree.victim(FULL, DEVICE)
                assert victim is not None
                self.tree.drop(victim, FULL, DEVICE)
            self.tree.insert(self.tree.root, tokens, torch.zeros(1, dtype=torch.int64), DEVICE)
        self.tree.check()
        return bool(match.device_len)


# What each of the two takes beside its file: one entry in the table.
OWN: dict[str, OrderFactory] = {"aged": AgedFrequency, "largest": ranked(LargestFirst)}


@pytest.fixture(autouse=True)
def own_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, order in OWN.items():
        monkeypatch.setitem(ORDERS, name, order)


@pytest.mark.parametrize("module", [aged_frequency, largest_first])
def test_a_policy_of_ones_own_is_one_file(module: ModuleType) -> None:
    """Each file imports what nodes and orders are, and nothing else of the project."""
    names = {getattr(value, "__module__", None) for value in vars(module).values()}
    ours = {name for name in names if name is not None and name.startswith("hicache")}
    assert ours <= {"hicache.tree.node", "hicache.tree.orders"}


def test_a_strategy_of_ones_own_ranks_what_a_tree_evicts() -> None:
    """The tree evicts the prompt of most tokens first, of equals the least recently used; under lru the oldest."""
    for policy, expected in (("largest", [4, 3, 2, 2, 1]), ("lru", [2, 4, 1, 2, 3])):
        tree, evicted = RadixTree(1, PageHasher(b"identity", 1), policy=policy), list[list[int]]()
        for first, length in enumerate((2, 4, 1, 2, 3)):
            tree.insert(tree.root, np.full(length, first), torch.arange(1, length + 1), DEVICE)
        while (victim := tree.victim(FULL, DEVICE)) is not None:
            (released,) = tree.drop(victim, FULL, DEVICE)
            evicted.append([released.size, int(victim.run.tokens[0]) if victim.run is not None else -1])
            tree.check()
        assert [size for size, _ in evicted] == expected
        twos = [first for size, first in evicted if size == 2]
        assert twos == [0, 3]


def test_a_policy_of_ones_own_resists_what_recency_does_not() -> None:
    """Prompts seen once do not evict what was used often under the policy of one's own; under lru they do."""
    for cache, survives in ((Cache("Aged", capacity=4), True), (Cache("lru", capacity=4), False)):
        for prompt in (1, 2, 1, 2, 1, 2, *range(100, 110)):
            cache.ask(prompt)
        assert (cache.ask(1), cache.ask(2)) == (survives, survives)
