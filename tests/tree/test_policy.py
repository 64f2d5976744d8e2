"""Eviction orders against naive ones, and what a policy of one's own takes."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hicache.errors import ConfigError
from hicache.tiers import DEVICE, FULL, MAMBA, Component
from hicache.tree import MambaComponent, PageHasher, RadixTree, TreeNode
from hicache.tree.orders import EvictionStrategy, PriorityHeap
from hicache.tree.policy import SLRUStrategy, get_eviction_strategy, make_order

# What each policy evicts first: the lowest.
RANKS: dict[str, Callable[[TreeNode], tuple[float, ...]]] = {
    "lru": lambda node: (node.last_access_time,),
    "lfu": lambda node: (node.hit_count, node.last_access_time),
    "fifo": lambda node: (node.creation_time,),
    "mru": lambda node: (-node.last_access_time,),
    "filo": lambda node: (-node.creation_time,),
    "priority": lambda node: (node.priority, node.last_access_time),
    "slru": lambda node: (node.hit_count >= 2, node.last_access_time),
}


@pytest.mark.parametrize(
    ("name", "component", "most"),
    [*((name, FULL, 40) for name in RANKS), *((name, MAMBA, 12) for name in RANKS if name != "lru")],
)
def test_the_tree_names_the_lowest_evictable_node(name: str, component: Component, most: int) -> None:
    """Before each eviction the victim is a node of lowest rank among the unlocked leaves, and that of states among the
    unlocked nodes that have one, inner nodes too; over splits, locks and uses elsewhere."""
    dice, tree = random.Random(name), RadixTree(1, PageHasher(b"identity", 1), [MambaComponent()], policy=name)
    rank, locked, evictions = RANKS[name], [], 0
    for _ in range(400):
        tokens = np.array([dice.randrange(3) for _ in range(dice.randrange(1, 9))])
        match = tree.match(tokens)
        node = tree.node_at(match, match.device_len)
        for at in node.path():
            at.hit_count += 1
        tree.lock(node, DEVICE)
        rest = tokens[match.device_len :]
        new = tree.insert(node, rest, torch.zeros(len(rest), dtype=torch.int64), DEVICE).node
        tree.attach(new, MAMBA, DEVICE, torch.ones(1, dtype=torch.int64))
        tree.move_lock(node, new, DEVICE)
        new.priority = dice.randrange(3)
        locked.append(new)
        while len(locked) > dice.randrange(6):
            tree.unlock(locked.pop(dice.randrange(len(locked))), DEVICE)
        while tree.evictable(component, DEVICE) > most:
            free = [at for at in tree.nodes() if at.holds(component, DEVICE) and not at.locks(component, DEVICE)]
            if component == FULL:
                free = [at for at in free if not at.children]
            victim = tree.victim(component, DEVICE)
            assert victim in free and rank(victim) == min(map(rank, free))
            tree.drop(victim, component, DEVICE)
            evictions += 1
        tree.check()
    assert evictions > 60


@pytest.mark.parametrize("name", RANKS)
def test_what_a_queued_request_expects_goes_last(name: str) -> None:
    """Under every policy, and whenever it came."""
    for which in range(3):
        tree = RadixTree(1, PageHasher(b"identity", 1), policy=name)
        nodes = [tree.insert(tree.root, np.array([n]), torch.tensor([n + 1]), DEVICE).node for n in range(3)]
        tree.expect(nodes[which])
        evicted = []
        while (victim := tree.victim(FULL, DEVICE)) is not None:
            tree.drop(victim, FULL, DEVICE)
            evicted.append(victim)
        assert evicted[2:] == [nodes[which]]


def test_a_raised_priority_counts_at_once() -> None:
    """A path whose priority is raised is evicted later from then on, without a use; no priority is lowered."""
    tree = RadixTree(1, PageHasher(b"identity", 1), policy="priority")
    nodes = []
    for first in range(3):
        tokens = np.array([first, 10, 11])
        nodes.append(tree.insert(tree.root, tokens, torch.ones(3, dtype=torch.int64), DEVICE).node)
        tree.split_suffix(nodes[-1], 1)
    assert tree.victim(FULL, DEVICE) is nodes[0]
    for node, priority in ((nodes[0], 2), (nodes[1], 1), (nodes[0], 0)):
        tree.raise_priority(node, priority)
    evicted = []
    while (victim := tree.victim(FULL, DEVICE)) is not None:
        assert victim.run is not None
        evicted.append((victim.priority, victim.num_tokens))
        tree.drop(victim, FULL, DEVICE)
    assert evicted == [(0, 2), (0, 1), (1, 2), (1, 1), (2, 2), (2, 1)]


class CountedRank(EvictionStrategy):
    """Ranks by the last use, and counts how often ranks are compared."""

    def __init__(self) -> None:
        self.comparisons = 0

    def get_priority(self, node: TreeNode) -> float:
        strategy = self

        class Rank(int):
            def __lt__(self, other: int) -> bool:
                strategy.comparisons += 1
                return int(self) < int(other)

            __hash__ = int.__hash__

        return Rank(node.last_access_time)


@pytest.mark.parametrize("num_nodes", [64, 1024])
def test_the_cost_of_an_event_grows_with_the_logarithm_of_the_nodes(num_nodes: int) -> None:
    """Locks, uses and victims take at most 4 log2(n) comparisons each, at every size and after any others: none pays
    for what was put off before it."""
    rank = CountedRank()
    order, dice = PriorityHeap(rank, lambda node: True), random.Random(num_nodes)
    nodes = [TreeNode() for _ in range(num_nodes)]
    for node in nodes:
        order.insert(node)
    for at in range(8 * num_nodes):
        rank.comparisons = 0
        node = nodes[dice.randrange(num_nodes)]
        node.touch()
        if at % 4 == 0 or at < 2 * num_nodes:
            order.hit(node)
        elif at % 4 == 1 or at < 4 * num_nodes:
            order.lock(node)
            order.unlock(node)
        else:
            victim = order.victim()
            assert victim is not None
            order.evict(victim)
            victim.touch()
            order.insert(victim)
        assert rank.comparisons <= 4 * np.log2(num_nodes)


def test_what_is_not_evictable_is_tested_once() -> None:
    """A node that is not evictable is tested once until it becomes a leaf, however often the victim is asked for."""
    looks: list[TreeNode] = []
    inner: set[TreeNode] = set()

    def is_evictable(node: TreeNode) -> bool:
        looks.append(node)
        return node not in inner

    order, nodes = PriorityHeap(get_eviction_strategy("fifo"), is_evictable), [TreeNode() for _ in range(100)]
    for node in nodes:
        order.insert(node)
    inner.update(nodes[:99])
    for _ in range(50):
        assert order.victim() is nodes[99]
    assert len(looks) == 100 + 99 + 50
    inner.discard(nodes[40])
    assert order.victim() is nodes[99]
    order.on_leaf(nodes[40])
    assert order.victim() is nodes[40] and len(order) == 100


def test_names_are_known_in_any_case() -> None:
    """A name finds the same policy however it is written; an unknown one is refused with all that there are."""
    for name in RANKS:
        orders = [
            make_order(written, FULL, DEVICE, lambda node: True) for written in (name, name.upper(), name.title())
        ]
        assert len({type(order) for order in orders}) == 1
    for ask in (get_eviction_strategy, lambda name: make_order(name, FULL, DEVICE, lambda node: True)):
        with pytest.raises(ConfigError, match="fifo, filo, lfu, lru, mru, priority, slru"):
            ask("arc")


def test_the_protected_segment_starts_where_it_is_told_to() -> None:
    """With a threshold of 3, what was used twice is evicted before what was used three times, however recently."""
    order = PriorityHeap(SLRUStrategy(protected_threshold=3), lambda node: True)
    nodes = [TreeNode() for _ in range(3)]
    for node, hits in zip(nodes, (3, 2, 1), strict=True):
        node.hit_count = hits
        node.touch()
        order.insert(node)
    evicted = []
    while (victim := order.victim()) is not None:
        order.evict(victim)
        evicted.append(victim)
    assert evicted == [nodes[1], nodes[2], nodes[0]]
