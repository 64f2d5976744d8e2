"""The radix tree case by case: splits, locks, backups, drops, keys, and what `check` names. What it holds after any
history is compared in prefix_cache/test_cache_machines.py, and under loads in flow/test_engine_in_flight.py."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest
import torch

from hicache.errors import InvariantError
from hicache.tiers import FULL, MAMBA, SWA
from hicache.tree.components import MambaComponent, SwaComponent, TreeComponent
from hicache.tree.core import RadixTree
from hicache.tree.key import PageHasher
from hicache.tree.node import NodeRun, TreeNode


def tree_of(*components: TreeComponent, page: int = 1) -> RadixTree:
    return RadixTree(page, PageHasher(b"identity", page), components)


def test_match_changes_nothing() -> None:
    """Looking up leaves recency, structure and account as they were."""
    tree = tree_of(page=2)
    for base in (0, 10, 20):
        tree.insert(tree.root, np.arange(base, base + 8), torch.arange(8) + base + 1)
    oldest, num_nodes = tree.victim(FULL), tree.num_nodes
    tree.match(np.arange(0, 5))
    assert tree.victim(FULL) is oldest and tree.num_nodes == num_nodes


def test_page_keys_do_not_depend_on_splits() -> None:
    """A page's key is a function of the identity, namespace and tokens up to its end alone."""
    tokens = np.arange(16)
    whole, cut = tree_of(page=2), tree_of(page=2)
    node = whole.insert(whole.root, tokens, torch.arange(16) + 1, "a").node
    expected = whole.names.of(node)
    cut.insert(cut.root, tokens, torch.arange(16) + 1, "a")
    for length in (4, 10):
        cut.node_at(cut.match(tokens[:length], "a"), length)
    deepest = cut.node_at(cut.match(tokens, "a"), 16)
    keys = [key for at in reversed(list(deepest.path())) for key in cut.names.of(at)]
    assert keys == expected == whole.names.of_prompt(whole.match(tokens, "a"), tokens)
    assert set(keys).isdisjoint(whole.names.of_prompt(whole.match(tokens, "b"), tokens))
    other = PageHasher(b"another identity", 2)
    assert set(keys).isdisjoint(other.chain(other.seed("a"), tokens))


def test_pages_are_hashed_once() -> None:
    """However often keys are asked for, each page of a node is hashed once in its life; a split leaves it its key."""
    hasher = PageHasher(b"identity", 2)
    tree = RadixTree(2, hasher)
    node = tree.insert(tree.root, np.arange(12), torch.arange(12) + 1).node
    keys = tree.names.of(node)
    assert tree.names.of(node) == keys
    upper = tree.node_at(tree.match(np.arange(6)), 6)
    assert [*tree.names.of(upper), *tree.names.of(node)] == keys
    assert hasher.pages_hashed == 6


def test_a_split_keeps_what_policies_rank_by() -> None:
    """Both halves of a node have its hits, priority and times."""
    tree = tree_of(page=2)
    node = tree.insert(tree.root, np.arange(8), torch.arange(8) + 1).node
    node.hit_count, node.priority = 5, 3
    tree.insert(tree.root, np.arange(10, 14), torch.arange(4) + 11)
    before = node.creation_time, node.last_access_time
    for at in (tree.split_prefix(node, 4), node):
        assert (at.hit_count, at.priority) == (5, 3)
        assert (at.creation_time, at.last_access_time) == before
    tree.check()


def test_what_is_kept_is_counted_while_it_is_there() -> None:
    """Each token, window token and state of a kept prompt counts once, also after a split of a locked node. It counts
    no more when its deadline or a use has come, its session has ended, its node was dropped, or its load failed."""
    tree = tree_of(SwaComponent(4, 1), MambaComponent())
    limits = {FULL: 100, SWA: 100, MAMBA: 100}

    def kept() -> list[int]:
        tree.check()
        return [tree.account(name).order.num_kept for name in limits]

    def keep(*, is_locked: bool = False) -> TreeNode:
        node = tree.insert(tree.root, np.arange(8), torch.arange(8) + 1, window_from=4).node
        tree.attach(node, MAMBA, torch.tensor([1]))
        if is_locked:
            tree.lock(node)
        tree.keep(node, 10.0, limits)
        if node.num_tokens > 2:
            tree.split_prefix(node, 2)
        assert kept() == [8, 4, 1]
        tree.expire(9.0)
        assert kept() == [8, 4, 1]
        return node

    def drop_all() -> None:
        while (victim := tree.victim(FULL)) is not None:
            tree.drop(victim, FULL)

    node = keep()
    ends = (lambda: tree.expire(10.0), lambda: tree.touch(node), lambda: tree.end_session(node), drop_all)
    for end in ends:
        keep()
        end()
        assert kept() == [0, 0, 0]
    node = keep(is_locked=True)
    tree.fail_load(node)
    assert kept() == [6, 2, 0]
    tree.unlock(node)


def test_a_dropped_node_is_freed_at_once() -> None:
    """The tokens of what was evicted are freed without a run of the garbage collector, also where it was locked."""
    tree = RadixTree(1, PageHasher(b"identity", 1), [SwaComponent(2, 1), MambaComponent()])
    gc.disable()
    try:
        node = tree.insert(tree.root, np.arange(8), torch.arange(8) + 1, window_from=4).node
        tree.attach(node, MAMBA, torch.tensor([1]))
        tree.lock(node)
        tree.names.of(node)
        tree.unlock(node)
        runs = [weakref.ref(at.run.tokens) for at in node.path() if at.run is not None]
        del node
        while (victim := tree.victim(FULL)) is not None:
            tree.drop(victim, FULL)
        assert len(runs) == 2 and not any(run() is not None for run in runs)
    finally:
        gc.enable()


def test_evicting_a_long_prompt_page_by_page_costs_few_copies_of_it() -> None:
    """Its pages leave from the end, and all splits together copy it once for each doubling of its length."""
    split_tokens = []

    class Tree(RadixTree):
        def split_suffix(self, node: TreeNode, num_kept: int) -> TreeNode:
            split_tokens.append(node.num_tokens)
            return super().split_suffix(node, num_kept)

    tree, num_tokens = Tree(2, PageHasher(b"identity", 2)), 1024
    tree.insert(tree.root, np.arange(num_tokens), torch.arange(num_tokens) + 1)
    for end in range(num_tokens, 0, -2):
        victim = tree.victim(FULL, 1)
        assert victim is not None
        [released] = tree.drop(victim, FULL)
        assert released.value.tolist() == [end - 1, end]
    assert not tree.num_nodes and sum(split_tokens) <= num_tokens * math.log2(num_tokens)
    tree.check()


def test_a_window_lock_survives_splits() -> None:
    """A node that splits under a window lock is unlocked whole, however the lock's window lies."""
    tree = tree_of(SwaComponent(3, 1))
    node = tree.insert(tree.root, np.arange(10), torch.arange(1, 11), window_from=0).node
    tree.lock(node)
    for length in (5, 8, 2):
        tree.node_at(tree.match(np.arange(10)), length)
    assert tree.protected(SWA) == 10
    tree.unlock(node)
    tree.check()
    tree.lock(node)
    assert tree.protected(SWA) == 5  # [5, 8) and [8, 10): the last three tokens lie in both
    tree.unlock(node)
    assert tree.protected(SWA) == 0


def test_sharing_ends_at_a_load_in_flight() -> None:
    """Of pages that another request is loading nothing is shared, and no state is donated below them. When they have
    arrived, the tree's slots take the place of the request's own, and its state is taken."""
    tree, tokens = tree_of(MambaComponent(), page=2), np.arange(6)
    offered, state = torch.arange(11, 17), {MAMBA: torch.tensor([7])}
    tree.insert(tree.root, tokens[:2], torch.arange(1, 3))
    loading = tree.insert(tree.root, tokens, torch.arange(1, 7)).node
    tree.lock(loading)
    copy = NodeRun([loading], FULL)
    inserted = tree.insert(tree.root, tokens, offered, donated=state)
    assert inserted.existing.tolist() == [1, 2] and not inserted.gained
    assert (inserted.accepted_len, inserted.attached) == (2, set())
    copy.detach()
    tree.unlock(loading)
    for attached in ({MAMBA}, set()):
        inserted = tree.insert(tree.root, tokens, offered, donated=state)
        assert inserted.existing.tolist() == [*range(1, 7)] and not inserted.gained
        assert (inserted.accepted_len, inserted.attached) == (6, attached)
    tree.check()


def test_a_victim_with_a_state_at_its_end_is_not_split() -> None:
    """Where few tokens are needed, the victim gives its last pages alone, but not where a state is at its end."""
    for components, num_tokens in (((), 2), ((MambaComponent(),), 8)):
        tree = tree_of(*components, page=2)
        tree.insert(tree.root, np.arange(8), torch.arange(1, 9))
        victim = tree.victim(FULL, 1)
        assert victim is not None and victim.num_tokens == num_tokens
        tree.check()


def test_a_state_is_dropped_alone_where_a_tier_below_has_it() -> None:
    """A leaf's state leaves alone where it can be had again; else no match could end in the leaf, which leaves too."""
    for is_below in (True, False):
        tree = RadixTree(1, PageHasher(b"identity", 1), [MambaComponent()], is_below=lambda node, name: is_below)  # noqa: B023
        node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5)).node
        tree.attach(node, MAMBA, torch.tensor([7]))
        released = {(gone.component, tuple(gone.value.tolist())) for gone in tree.drop(node, MAMBA)}
        match = tree.match(np.arange(4))
        if is_below:
            assert released == {(MAMBA, (7,))} and match.full_len == 4 and tree.usable_len(match) == 0
        else:
            assert released == {(MAMBA, (7,)), (FULL, (1, 2, 3, 4))}
            assert match.full_len == 0 and tree.num_nodes == 0
        tree.check()


def test_tombstone_ancestors_leave_with_their_last_child() -> None:
    """Inner nodes that lost their states go when the leaf below them goes; one that has a state stays."""
    tree = tree_of(MambaComponent())
    node = tree.root
    for at in range(4):
        tokens = np.arange(at * 2, at * 2 + 2)
        node = tree.insert(node, tokens, torch.arange(1, 3) + at * 2).node
        tree.attach(node, MAMBA, torch.tensor([at + 1]))
    inner = [at for at in node.path() if at is not node]
    for at in inner[:2]:
        tree.drop(at, MAMBA)
    released = [r.size for r in tree.drop(node, FULL) if r.component == FULL]
    assert released == [2, 2, 2] and [at.depth_tokens for at in tree.nodes()] == [2]
    tree.check()


def test_check_finds_planted_faults() -> None:
    """The audit names each fault: it can fail."""
    tree = tree_of(SwaComponent(2, 1), MambaComponent())
    node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5), window_from=0).node
    tree.attach(node, MAMBA, torch.tensor([1]))
    tree.check()
    for message, component, name, fault in (
        ("account", FULL, "locks", 1),
        ("holds no full slots", FULL, "value", None),
        ("swa slots are not the node's full slots", SWA, "value", torch.arange(1, 5)),
        ("2 elements of mamba", MAMBA, "value", torch.tensor([1, 2])),
        ("1 locks of mamba, 0 of full", MAMBA, "locks", 1),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(InvariantError, match=message):
            patch.setattr(node.holdings[component], name, fault)
            tree.check()
        tree.check()
    tree.account(MAMBA).evictable = 5
    with pytest.raises(InvariantError, match="mamba: the account says 5"):
        tree.check()
