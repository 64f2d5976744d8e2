"""The victims of a tree for each policy, compared with SGLang's strategies over its nodes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hicache import get_eviction_strategy
from hicache.errors import ConfigError
from hicache.pages.components import MambaComponent, TreeComponent
from hicache.pages.key import PageHasher
from hicache.pages.order import RANK_POLICIES
from hicache.pages.tree import RadixTree
from hicache.prefix_cache.node import TreeNode
from hicache.tiers import FULL, MAMBA, Component

NAMES = sorted({*RANK_POLICIES} - {"auto"})


def tree_of(policy: str, *components: TreeComponent) -> RadixTree:
    tree = RadixTree(1, PageHasher(b"identity", 1), components, policy, node_type=TreeNode)
    tree.root.tree = tree  # type: ignore[attr-defined]
    return tree


def victim_of(tree: RadixTree, component: Component = FULL) -> TreeNode:
    node = tree.node_of(tree.pages[component].take(1)[0])
    assert isinstance(node, TreeNode)
    return node


def evicted(tree: RadixTree) -> list[TreeNode]:
    """Evict all nodes that can be evicted; returns the evicted nodes in the order of eviction."""
    found = []
    while tree.evictable(FULL):
        found.append(victim_of(tree))
        tree.evict(found[-1].rows, FULL)
    return found


@pytest.mark.parametrize(
    ("name", "component", "most"),
    [*((name, FULL, 40) for name in NAMES), *((name, MAMBA, 12) for name in NAMES if name != "lru")],
)
def test_the_tree_names_the_lowest_evictable_node(name: str, component: Component, most: int) -> None:
    """Before each eviction the victim is a node of lowest rank among the unlocked leaves. The victim of a state is
    among the unlocked nodes that have a state, including inner nodes. Meanwhile other nodes are split, locked and
    used."""
    dice, tree = random.Random(name), tree_of(name, MambaComponent())
    rank, locked, evictions = get_eviction_strategy(name.upper()).get_priority, list[TreeNode](), 0
    for _ in range(400):
        tokens = np.array([dice.randrange(3) for _ in range(dice.randrange(1, 9))])
        match = tree.match(tokens)
        node = tree.node_at(match, match.full_len)
        tree.begin_use(match.rows)
        tree.lock(node)
        rest = tokens[match.full_len :]
        new = tree.insert(node, rest, torch.zeros(len(rest), dtype=torch.int64)).node
        tree.attach(new, MAMBA, torch.ones(1, dtype=torch.int64))
        tree.move_lock(node, new)
        tree.raise_priority(new, dice.randrange(3))
        assert isinstance(new, TreeNode)
        locked.append(new)
        while len(locked) > dice.randrange(6):
            tree.touch(locked[0])
            tree.unlock(locked.pop(dice.randrange(len(locked))))
        while tree.evictable(component) > most:
            free = [at for at in tree.nodes() if isinstance(at, TreeNode) and at.has(component)]
            free = [at for at in free if not (at.lock_ref if component == FULL else at.mamba_lock_ref)]
            if component == FULL:
                free = [at for at in free if not at.children]
            victim = victim_of(tree, component)
            assert victim in free
            if component == FULL:
                assert rank(victim) == min(map(rank, free))
            tree.evict(tree.pages[component].held(victim.rows), component)
            evictions += 1
        tree.check()
    assert evictions > 60


@pytest.mark.parametrize("name", sorted(RANK_POLICIES))
def test_a_page_that_was_locked_leaves_after_those_that_follow_it(name: str) -> None:
    """A page that was locked is evicted after the pages that follow it in its prompt. The order is the same if the page
    returns to a batch of victims that already contains the pages after it."""
    tree = tree_of(name)
    tree.insert(tree.root, np.array([9]), torch.zeros(1, dtype=torch.int64))
    refused = tree.insert(tree.root, np.arange(2), torch.zeros(2, dtype=torch.int64)).node
    tree.insert(refused, np.arange(2, 4), torch.zeros(2, dtype=torch.int64))
    for first in range(100, 800, 10):
        tree.insert(tree.root, np.arange(first, first + 10), torch.zeros(10, dtype=torch.int64))
    tree.evict(tree.pages[FULL].take(1), FULL)
    tree.lock(refused)
    tree.unlock(refused)
    while len(rows := tree.pages[FULL].take(7)):
        tree.evict(rows, FULL)
        tree.check()
    assert not tree.num_nodes


@pytest.mark.parametrize("name", NAMES)
def test_expected_pages_are_evicted_last(name: str) -> None:
    """Under every policy expected pages are evicted last, whenever they were inserted."""
    for which in range(3):
        tree = tree_of(name)
        nodes = [tree.insert(tree.root, np.array([n]), torch.tensor([n + 1])).node for n in range(3)]
        tree.expect({FULL: nodes[which].rows})
        assert evicted(tree)[2:] == [nodes[which]]


def test_a_raised_priority_counts_at_once() -> None:
    """If the priority of a path is raised, the path is evicted later from then on, without a use. No priority is
    lowered."""
    tree, nodes = tree_of("priority"), []
    for first in range(3):
        tokens = np.array([first, 10, 11])
        nodes.append(tree.insert(tree.root, tokens, torch.ones(3, dtype=torch.int64)).node)
        tree.split(nodes[-1], 1)
    for node, priority in ((nodes[0], 2), (nodes[1], 1), (nodes[0], 0)):
        tree.raise_priority(node, priority)
    expected = [node for at in (2, 1, 0) for node in nodes[at].path()]
    assert evicted(tree) == expected


def test_names_are_known_in_any_case() -> None:
    """The name of a policy may have any case. An unknown name is refused, and the error lists all names."""
    for name in NAMES:
        assert len({type(get_eviction_strategy(at)) for at in (name, name.upper(), name.title())}) == 1
    with pytest.raises(ConfigError, match="fifo, filo, lfu, lru, mru, priority, slru"):
        get_eviction_strategy("arc")
