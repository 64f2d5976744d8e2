"""The radix tree case by case: splits, locks, backups, drops, keys, and what `check` names. What it holds after any
history is compared with dictionaries in test_tree_components.py."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from hicache.errors import InvariantError
from hicache.tiers import DEVICE, DISK, FULL, HOST, MAMBA, REMOTE, SWA
from hicache.tree import MambaComponent, NodeRun, PageHasher, RadixTree, SwaComponent, TreeComponent, share


def tree_of(*components: TreeComponent, page: int = 1) -> RadixTree:
    return RadixTree(page, PageHasher(b"identity", page), components)


def test_match_changes_nothing() -> None:
    """Looking up leaves recency, structure and account as they were."""
    tree = tree_of(page=2)
    for base in (0, 10, 20):
        tree.insert(tree.root, np.arange(base, base + 8), torch.arange(8) + base + 1, DEVICE)
    oldest, num_nodes = tree.victim(FULL, DEVICE), tree.num_nodes
    tree.match(np.arange(0, 5))
    assert tree.victim(FULL, DEVICE) is oldest and tree.num_nodes == num_nodes


def test_page_keys_do_not_depend_on_splits() -> None:
    """A page's key is a function of the identity, namespace and tokens up to its end alone."""
    tokens = np.arange(16)
    whole, cut = tree_of(page=2), tree_of(page=2)
    node = whole.insert(whole.root, tokens, torch.arange(16) + 1, DEVICE, "a").node
    expected = whole.names.of(node)
    cut.insert(cut.root, tokens, torch.arange(16) + 1, DEVICE, "a")
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
    node = tree.insert(tree.root, np.arange(12), torch.arange(12) + 1, DEVICE).node
    keys = tree.names.of(node)
    assert tree.names.of(node) == keys
    upper = tree.node_at(tree.match(np.arange(6)), 6)
    assert [*tree.names.of(upper), *tree.names.of(node)] == keys
    assert hasher.pages_hashed == 6


def test_a_split_keeps_what_policies_rank_by() -> None:
    """Both halves of a node have its hits, priority and times, and its mark of coming from the disk."""
    tree = tree_of(page=2)
    node = tree.insert(tree.root, np.arange(8), torch.arange(8) + 1, DEVICE).node
    node.hit_count, node.priority, node.source = 5, 3, REMOTE
    tree.insert(tree.root, np.arange(10, 14), torch.arange(4) + 11, DEVICE)
    before = node.creation_time, node.last_access_time
    for at in (tree.split_prefix(node, 4), node):
        assert (at.hit_count, at.priority, at.source) == (5, 3, REMOTE)
        assert (at.creation_time, at.last_access_time) == before
    tree.check()


def test_a_dropped_node_is_freed_at_once() -> None:
    """The tokens of what was evicted are freed without a run of the garbage collector, also where it was locked."""
    tree = RadixTree(1, PageHasher(b"identity", 1), [SwaComponent(2, 1), MambaComponent()])
    gc.disable()
    try:
        node = tree.insert(tree.root, np.arange(8), torch.arange(8) + 1, DEVICE, window_from=4).node
        tree.attach(node, MAMBA, DEVICE, torch.tensor([1]))
        tree.lock(node, DEVICE)
        tree.names.of(node)
        tree.unlock(node, DEVICE)
        runs = [weakref.ref(at.run.tokens) for at in node.path() if at.run is not None]
        del node
        while (victim := tree.victim(FULL, DEVICE)) is not None:
            tree.drop(victim, FULL, DEVICE)
        assert len(runs) == 2 and not any(run() is not None for run in runs)
    finally:
        gc.enable()


def test_a_window_lock_survives_splits() -> None:
    """A node that splits under a window lock is unlocked whole, however the lock's window lies."""
    tree = tree_of(SwaComponent(3, 1))
    node = tree.insert(tree.root, np.arange(10), torch.arange(1, 11), DEVICE, window_from=0).node
    tree.lock(node, DEVICE)
    for length in (5, 8, 2):
        tree.node_at(tree.match(np.arange(10)), length)
    assert tree.protected(SWA, DEVICE) == 10
    tree.unlock(node, DEVICE)
    tree.check()
    tree.lock(node, DEVICE)
    assert tree.protected(SWA, DEVICE) == 5  # [5, 8) and [8, 10): the last three tokens lie in both
    tree.unlock(node, DEVICE)
    assert tree.protected(SWA, DEVICE) == 0


def test_a_split_keeps_what_is_known_to_be_on_disk() -> None:
    """Both halves of stored pages are stored; a stored state stays with the half that it is at the end of."""
    tree = tree_of(SwaComponent(2, 1), MambaComponent())
    node = tree.insert(tree.root, np.arange(8), torch.arange(1, 9), HOST).node
    tree.attach(node, MAMBA, HOST, torch.tensor([1]))
    for component in (FULL, MAMBA):
        node.holdings[component][HOST].stored = DISK
    upper = tree.split_prefix(node, 3)
    assert [(at.is_stored(FULL), at.is_stored(SWA), at.is_stored(MAMBA)) for at in (upper, node)] == [
        (True, False, False),
        (True, False, True),
    ]


def test_nothing_is_inserted_on_the_host_below_what_the_host_lacks() -> None:
    """An insertion on the host stops at once below a node that only the device holds, and changes nothing."""
    tree = tree_of()
    node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5), DEVICE).node
    result = tree.insert(node, np.arange(4, 8), torch.arange(11, 15), HOST)
    assert (result.accepted_len, result.node, result.gained) == (0, node, ()) and tree.num_nodes == 1
    tree.check()


def test_sharing_ends_at_a_load_in_flight() -> None:
    """Of pages that another request is loading nothing is shared, and no state is donated below them. When they have
    arrived, the tree's slots take the place of the request's own, and its state is taken."""
    tree, tokens = tree_of(MambaComponent(), page=2), np.arange(6)
    offered, state = torch.arange(11, 17), {MAMBA: torch.tensor([7])}
    tree.insert(tree.root, tokens[:2], torch.arange(1, 3), DEVICE)
    loading = tree.insert(tree.root, tokens, torch.arange(3), HOST).node
    tree.lock(loading, HOST)
    tree.begin_load(loading, torch.arange(3, 7))
    tree.lock(loading, DEVICE)
    copy = NodeRun([loading], FULL, DEVICE)
    shared = share(tree, tree.root, tokens, offered, donated=state)
    assert (shared.theirs.tolist(), shared.ours.tolist()) == ([1, 2], [11, 12])
    assert (shared.accepted_len, shared.refused) == (2, (MAMBA,))
    copy.detach()
    tree.unlock(loading, DEVICE)
    tree.unlock(loading, HOST)
    for refused in ((), (MAMBA,)):
        shared = share(tree, tree.root, tokens, offered, donated=state)
        assert (shared.theirs.tolist(), shared.ours.tolist()) == ([*range(1, 7)], offered.tolist())
        assert (shared.accepted_len, shared.refused) == (6, refused)
    tree.check()


def test_a_victim_with_a_state_at_its_end_is_not_split() -> None:
    """Where few tokens are needed, the victim gives its last pages alone, but not where a state is at its end."""
    for components, num_tokens in (((), 2), ((MambaComponent(),), 8)):
        tree = tree_of(*components, page=2)
        tree.insert(tree.root, np.arange(8), torch.arange(1, 9), DEVICE)
        victim = tree.victim(FULL, DEVICE, 1)
        assert victim is not None and victim.num_tokens == num_tokens
        tree.check()


def test_a_state_is_dropped_alone_where_the_host_has_a_copy() -> None:
    """A leaf's state leaves the device alone where the host has it; where no tier has it, the leaf leaves too."""
    for backed_up in (True, False):
        tree = tree_of(MambaComponent())
        node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5), DEVICE).node
        tree.attach(node, MAMBA, DEVICE, torch.tensor([7]))
        if backed_up:
            for component, pages in ((FULL, torch.arange(11, 15)), (MAMBA, torch.tensor([9]))):
                tree.begin_backup(node, component, pages)
                assert tree.end_backup(node, component, confirmed=True) is None
        released = {(r.component, r.tier, tuple(r.value.tolist())) for r in tree.drop(node, MAMBA, DEVICE)}
        match = tree.match(np.arange(4))
        if backed_up:
            assert released == {(MAMBA, DEVICE, (7,))}
            assert tree.usable_len(match, 4, on_host=True) == 4 and tree.usable_len(match, 4, on_host=False) == 0
        else:
            assert released == {(MAMBA, DEVICE, (7,)), (FULL, DEVICE, (1, 2, 3, 4))}
            assert match.full_len == 0 and tree.num_nodes == 0
        tree.check()


def test_tombstone_ancestors_leave_with_their_last_child() -> None:
    """Inner nodes that lost their states go when the leaf below them goes; one that has a state stays."""
    tree = tree_of(MambaComponent())
    node = tree.root
    for at in range(4):
        tokens = np.arange(at * 2, at * 2 + 2)
        node = tree.insert(node, tokens, torch.arange(1, 3) + at * 2, DEVICE).node
        tree.attach(node, MAMBA, DEVICE, torch.tensor([at + 1]))
    inner = [at for at in node.path() if at is not node]
    for at in inner[:2]:
        tree.drop(at, MAMBA, DEVICE)
    released = [r.size for r in tree.drop(node, FULL, DEVICE) if r.component == FULL]
    assert released == [2, 2, 2] and [at.depth_tokens for at in tree.nodes()] == [2]
    tree.check()


def test_check_finds_planted_faults() -> None:
    """The audit names each fault: it can fail."""
    tree = tree_of(SwaComponent(2, 1), MambaComponent())
    node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5), DEVICE, window_from=0).node
    tree.attach(node, MAMBA, DEVICE, torch.tensor([1]))
    tree.check()
    for message, component, tier, name, fault in (
        ("account", FULL, DEVICE, "locks", 1),
        ("no copy of the node is in flight", FULL, HOST, "pending", torch.arange(4)),
        ("held by no tier", FULL, DEVICE, "value", None),
        ("holds swa on HOST where it does not hold full", SWA, HOST, "value", torch.arange(4)),
        ("swa slots are not the node's full slots", SWA, DEVICE, "value", torch.arange(1, 5)),
        ("2 elements of mamba on DEVICE", MAMBA, DEVICE, "value", torch.tensor([1, 2])),
        ("1 locks of mamba on DEVICE, 0 of full", MAMBA, DEVICE, "locks", 1),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(InvariantError, match=message):
            patch.setattr(node.holdings[component][tier], name, fault)
            tree.check()
        tree.check()
    tree.account(MAMBA, DEVICE).evictable = 5
    with pytest.raises(InvariantError, match="mamba on DEVICE: the account says 5"):
        tree.check()
