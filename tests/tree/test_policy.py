"""What the tree evicts first, by policy: it reports every event to its eviction orders."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hicache.tiers import FULL, MAMBA, Component
from hicache.tree.components import MambaComponent
from hicache.tree.core import RadixTree
from hicache.tree.key import PageHasher
from hicache.tree.node import TreeNode

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
        node = tree.node_at(match, match.full_len)
        for at in node.path():
            at.hit_count += 1
        tree.lock(node)
        rest = tokens[match.full_len :]
        new = tree.insert(node, rest, torch.zeros(len(rest), dtype=torch.int64)).node
        tree.attach(new, MAMBA, torch.ones(1, dtype=torch.int64))
        tree.move_lock(node, new)
        new.priority = dice.randrange(3)
        locked.append(new)
        while len(locked) > dice.randrange(6):
            tree.unlock(locked.pop(dice.randrange(len(locked))))
        while tree.evictable(component) > most:
            free = [at for at in tree.nodes() if at.has(component) and not at.locks(component)]
            if component == FULL:
                free = [at for at in free if not at.children]
            victim = tree.victim(component)
            assert victim in free and rank(victim) == min(map(rank, free))
            tree.drop(victim, component)
            evictions += 1
        tree.check()
    assert evictions > 60


@pytest.mark.parametrize("name", RANKS)
def test_what_a_queued_request_expects_goes_last(name: str) -> None:
    """Under every policy, and whenever it came."""
    for which in range(3):
        tree = RadixTree(1, PageHasher(b"identity", 1), policy=name)
        nodes = [tree.insert(tree.root, np.array([n]), torch.tensor([n + 1])).node for n in range(3)]
        tree.expect(nodes[which])
        evicted = []
        while (victim := tree.victim(FULL)) is not None:
            tree.drop(victim, FULL)
            evicted.append(victim)
        assert evicted[2:] == [nodes[which]]


def test_a_raised_priority_counts_at_once() -> None:
    """A path whose priority is raised is evicted later from then on, without a use; no priority is lowered."""
    tree = RadixTree(1, PageHasher(b"identity", 1), policy="priority")
    nodes = []
    for first in range(3):
        tokens = np.array([first, 10, 11])
        nodes.append(tree.insert(tree.root, tokens, torch.ones(3, dtype=torch.int64)).node)
        tree.split_suffix(nodes[-1], 1)
    assert tree.victim(FULL) is nodes[0]
    for node, priority in ((nodes[0], 2), (nodes[1], 1), (nodes[0], 0)):
        tree.raise_priority(node, priority)
    evicted = []
    while (victim := tree.victim(FULL)) is not None:
        assert victim.run is not None
        evicted.append((victim.priority, victim.num_tokens))
        tree.drop(victim, FULL)
    assert evicted == [(0, 2), (0, 1), (1, 2), (1, 1), (2, 2), (2, 1)]
