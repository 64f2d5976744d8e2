"""A policy in one file: frequencies that age, and a memory of what was evicted, written against the protocol."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from hicache.tree import PageHasher, RadixTree, Tier
from hicache.tree.node import TreeNode
from hicache.tree.orders import EvictionOrder, EvictionStrategy, MayGo, PriorityHeap
from hicache.tree.policy import ORDERS

# A policy of one's own: this class could be a file beside orders.py; its line in ORDERS is `"aged": AgedFrequency`.


class AgedFrequency(EvictionStrategy):
    """Uses count half as much after every `HALF_LIFE` events; what was evicted is remembered with its count.

    A node's rank is log2 of the sum of 2^(t / HALF_LIFE) over its uses at times t, so ranks age without being touched.
    """

    HALF_LIFE, MAX_GHOSTS = 20.0, 32

    def __init__(self, place: int, may_go: MayGo) -> None:
        self._heap = PriorityHeap(self, may_go)
        self._ranks: dict[TreeNode, float] = {}
        self._ghosts: OrderedDict[bytes, float] = OrderedDict()
        self._now = 0

    def get_priority(self, node: TreeNode) -> float:
        return self._ranks[node]

    def insert(self, node: TreeNode) -> None:
        self._ranks[node] = self._ghosts.pop(self._name(node), -np.inf)
        self._use(node)
        self._heap.insert(node)

    def hit(self, node: TreeNode) -> None:
        if node in self._heap:
            self._use(node)
            self._heap.hit(node)

    def lock(self, node: TreeNode) -> None:
        self._heap.lock(node)

    def unlock(self, node: TreeNode) -> None:
        if node not in self._ranks:  # it gained its value while it was locked
            self._ranks[node] = self._ghosts.pop(self._name(node), -np.inf)
        self._use(node)
        self._heap.unlock(node)

    def expose(self, node: TreeNode) -> None:
        self._heap.expose(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        self._ranks[upper] = self._ranks[lower]
        self._heap.split(upper, lower)

    def evict(self, node: TreeNode) -> None:
        self._heap.evict(node)
        self._ghosts[self._name(node)] = self._ranks.pop(node)
        if len(self._ghosts) > self.MAX_GHOSTS:
            self._ghosts.popitem(last=False)

    def victim(self) -> TreeNode | None:
        return self._heap.victim()

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._heap

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def _use(self, node: TreeNode) -> None:
        self._now += 1
        self._ranks[node] = float(np.logaddexp2(self._ranks[node], self._now / self.HALF_LIFE))

    @staticmethod
    def _name(node: TreeNode) -> bytes:
        return b"".join(at.run.tokens.tobytes() for at in node.path() if at.run is not None)


class Cache:
    """A tree of one-page prompts of its own policy, that holds a fixed number of them."""

    def __init__(self, policy: str, room: int) -> None:
        self.tree, self.room = RadixTree(1, PageHasher(b"identity", 1), policy=policy), room

    def ask(self, prompt: int) -> bool:
        """Whether the prompt was there; it is afterwards."""
        tokens = np.array([prompt])
        match = self.tree.match(tokens)
        if match.device_len:
            for node in match.nodes:
                node.hit_count += 1
            self.tree.touch(match.nodes[-1], Tier.DEVICE)
        else:
            if self.tree.evictable(Tier.DEVICE) == self.room:
                victim = self.tree.victim(Tier.DEVICE)
                assert victim is not None
                self.tree.drop(victim, Tier.DEVICE)
            self.tree.insert(self.tree.root, tokens, torch.zeros(1, dtype=torch.int64), Tier.DEVICE)
        self.tree.check()
        return bool(match.device_len)


@pytest.fixture
def aged(monkeypatch: pytest.MonkeyPatch) -> Cache:
    order: Callable[[int, MayGo], EvictionOrder] = AgedFrequency
    monkeypatch.setitem(ORDERS, "aged", order)
    return Cache("Aged", room=4)


def test_a_policy_of_ones_own_resists_what_recency_does_not(aged: Cache) -> None:
    """Prompts seen once do not drive out what was used often under the registered policy; under lru they do."""
    for cache, survives in ((aged, True), (Cache("lru", room=4), False)):
        for prompt in (1, 2, 1, 2, 1, 2, *range(100, 110)):
            cache.ask(prompt)
        assert (cache.ask(1), cache.ask(2)) == (survives, survives)


def test_a_policy_of_ones_own_forgets_what_has_aged(aged: Cache) -> None:
    """What was used often long ago goes before what is used now: a plain count would keep it."""
    for cache, forgets in ((aged, True), (Cache("lfu", room=4), False)):
        for prompt in (1,) * 20 + (2, 3, 4) * 18 + (5,):
            cache.ask(prompt)
        assert cache.ask(1) is not forgets


def test_a_policy_of_ones_own_remembers_what_it_evicted(aged: Cache) -> None:
    """A prompt that returns after its eviction has its uses again, so it outlives newcomers seen more often since."""
    for prompt in (1, 1, 1, 1, 10, 11, 12):
        aged.ask(prompt)
    victim = aged.tree.match(np.array([1])).nodes[0]
    aged.tree.drop(victim, Tier.DEVICE)
    for prompt in (1, 20, 20, 21, 21, 22, 22, 23, 23):
        aged.ask(prompt)
    assert aged.ask(1)
