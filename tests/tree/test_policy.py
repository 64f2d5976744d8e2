"""Eviction orders against naive ones, and what a policy of one's own takes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import ConfigError
from hicache.tree import DEVICE, FULL, PageHasher, RadixTree, TreeNode
from hicache.tree.orders import EvictionStrategy, PriorityHeap
from hicache.tree.policy import SLRUStrategy, get_eviction_strategy, make_order
from policy_case import RANKS, World, locks_of

NAMES = ["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]


EVENTS = ["grow", "grow", "touch", "lock", "unlock", "split", "use_elsewhere", "evict", "drop_any"]
Event = tuple[str, int, int]


def play(name: str, leaves_only: bool, events: list[Event]) -> World:
    """Run the events; after each, the order must agree with the oracle."""
    world = World(name, leaves_only)
    for event, at, more in events:
        getattr(world, event)(at, more)
        victim = world.order.victim()
        assert victim is world.expected()
        assert world.order.victim() is victim, "asking changes nothing"
        expected = world.oracle.by_rank()
        assert len(world.order) == len(expected)
        assert set(world.order) == set(expected)
        assert name != "lru" or list(world.order) == expected, "the recency list reads oldest first"
        assert all((node in world.order) == (not locks_of(node)) for node in world.held)
    return world


@pytest.mark.parametrize("leaves_only", [True, False])
@pytest.mark.parametrize("name", NAMES)
@given(
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1000), st.integers(0, 1000)), max_size=60),
)
def test_every_victim_is_the_one_that_sorting_all_nodes_finds(
    name: str, leaves_only: bool, events: list[Event]
) -> None:
    """After any events the victim is the first evictable unlocked node, and the order contains the unlocked nodes."""
    play(name, leaves_only, events)


@pytest.mark.parametrize("leaves_only", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_long_histories_agree_with_sorting(name: str, leaves_only: bool) -> None:
    """The same over a history long enough for the heap to be compacted many times, until all nodes are evicted."""
    dice = random.Random(f"{name}{leaves_only}")
    events = [(dice.choice(EVENTS), dice.randrange(1000), dice.randrange(1000)) for _ in range(700)]
    world = play(name, leaves_only, events)
    evicted: list[TreeNode] = []
    while world.lock_ends:
        world.unlock(0, 0)
    while (victim := world.order.victim()) is not None:
        assert victim is world.expected()
        world.evict(0, 0)
        evicted.append(victim)
    assert len(world.order) == 0 and not world.held and len(evicted) > 20
    assert len(set(evicted)) == len(evicted)


@pytest.mark.parametrize("name", NAMES)
def test_the_tree_names_the_lowest_evictable_node(name: str) -> None:
    """In a real tree the victim is, before each eviction, a node of lowest priority among the unlocked leaves."""
    dice, tree = random.Random(name), RadixTree(1, PageHasher(b"identity", 1), policy=name)
    rank, locked, evictions = get_eviction_strategy(name.upper()), [], 0
    for _ in range(250):
        tokens = np.array([dice.randrange(3) for _ in range(dice.randrange(1, 9))])
        match = tree.match(tokens)
        node = tree.node_at(match, match.device_len)
        for at in node.path():
            at.hit_count += 1
        tree.lock(node, DEVICE)
        rest = tokens[match.device_len :]
        new = tree.insert(node, rest, torch.zeros(len(rest), dtype=torch.int64), DEVICE).node
        tree.move_lock(node, new, DEVICE)
        new.priority = dice.randrange(3)
        locked.append(new)
        while len(locked) > dice.randrange(6):
            tree.unlock(locked.pop(dice.randrange(len(locked))), DEVICE)
        while tree.evictable(FULL, DEVICE) > 40:
            free = [at for at in tree.nodes() if not at.locks(FULL, DEVICE) and not at.children]
            victim = tree.victim(FULL, DEVICE)
            assert victim in free
            assert rank.get_priority(victim) == min(map(rank.get_priority, free))
            if victim.num_tokens > 1:
                victim = tree.split_suffix(victim, 1)
            tree.drop(victim, FULL, DEVICE)
            evictions += 1
        tree.check()
    assert evictions > 60


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
    for name in NAMES:
        orders = [
            make_order(written, FULL, DEVICE, lambda node: True) for written in (name, name.upper(), name.title())
        ]
        assert len({type(order) for order in orders}) == 1
        ranks = [get_eviction_strategy(written).get_priority(TreeNode()) for written in (name, name.title())]
        assert np.shape(ranks[0]) == np.shape(ranks[1]) == np.shape(np.squeeze(RANKS[name](TreeNode())))
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
