"""Windows and states in the radix tree, case by case: splits, locks, backups, drops, and what `check` names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache.errors import InvariantError
from hicache.tree import (
    DEVICE,
    DISK,
    FULL,
    HOST,
    MAMBA,
    SWA,
    MambaComponent,
    NodeRun,
    PageHasher,
    RadixTree,
    SwaComponent,
    TreeComponent,
)


def tree_of(*components: TreeComponent, page: int = 1) -> RadixTree:
    return RadixTree(page, PageHasher(b"identity", page), components)


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


def test_a_state_that_comes_under_a_lock_is_protected() -> None:
    """A lock at a node without a state protects the state it gets, and is undone without a remainder."""
    tree = tree_of(MambaComponent())
    node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5), DEVICE).node
    tree.lock(node, DEVICE)
    assert tree.attach(node, MAMBA, DEVICE, torch.tensor([1]))
    assert tree.victim(MAMBA, DEVICE) is None and tree.protected(MAMBA, DEVICE) == 1
    tree.unlock(node, DEVICE)
    assert tree.victim(MAMBA, DEVICE) is node and tree.evictable(MAMBA, DEVICE) == 1
    tree.check()


def test_a_split_leaves_the_state_at_its_end() -> None:
    """The front half of a node never answers with the state of the whole."""
    tree = tree_of(MambaComponent())
    node = tree.insert(tree.root, np.arange(8), torch.arange(1, 9), DEVICE).node
    tree.attach(node, MAMBA, DEVICE, torch.tensor([5]))
    upper = tree.node_at(tree.match(np.arange(8)), 3)
    assert not upper.holds(MAMBA, DEVICE) and node.held(MAMBA, DEVICE).tolist() == [5]
    match = tree.match(np.arange(7))
    assert match.full_len == 7 and tree.usable_len(match, 7, on_host=False) == 0


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


def test_nothing_is_attached_where_a_backup_brings_it() -> None:
    """What a backup in flight brings to the host is not taken from elsewhere, and arrives."""
    tree = tree_of(MambaComponent())
    node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5), DEVICE).node
    tree.attach(node, MAMBA, DEVICE, torch.tensor([7]))
    tree.insert(tree.root, np.arange(4), torch.arange(11, 15), HOST)
    run = NodeRun([node], MAMBA, HOST)
    tree.begin_backup(node, MAMBA, torch.tensor([8]))
    assert not tree.attach(node, MAMBA, HOST, torch.tensor([9]))
    assert tree.end_backup(node, MAMBA, confirmed=True) is None
    run.detach()
    assert node.held(MAMBA, HOST).tolist() == [8]
    tree.check()


def test_nothing_is_inserted_on_the_host_below_what_the_host_lacks() -> None:
    """An insertion on the host stops at once below a node that only the device holds, and changes nothing."""
    tree = tree_of()
    node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5), DEVICE).node
    result = tree.insert(node, np.arange(4, 8), torch.arange(11, 15), HOST)
    assert (result.accepted_len, result.node, result.gained) == (0, node, ()) and tree.num_nodes == 1
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


def test_a_lock_on_the_other_tier_keeps_nothing() -> None:
    """A node that only the device holds goes when it is evicted, though someone has locked it on the host."""
    tree = tree_of(SwaComponent(1, 1))
    node = tree.insert(tree.root, np.arange(3), torch.arange(1, 4), DEVICE, window_from=0).node
    tree.lock(node, HOST)
    tree.drop(node, FULL, DEVICE)
    assert tree.num_nodes == 0
    tree.unlock(node, HOST)
    tree.check()


def test_check_finds_planted_faults() -> None:
    """A window or state without full pages, windows of other slots, and wrong counts are each named."""
    tree = tree_of(SwaComponent(2, 1), MambaComponent())
    node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5), DEVICE, window_from=0).node
    tree.attach(node, MAMBA, DEVICE, torch.tensor([1]))
    tree.check()
    faults = [
        ("holds swa on HOST where it does not hold full", SWA, HOST, torch.arange(4)),
        ("swa slots are not the node's full slots", SWA, DEVICE, torch.arange(1, 5)),
        ("2 elements of mamba on DEVICE", MAMBA, DEVICE, torch.tensor([1, 2])),
    ]
    for message, component, tier, value in faults:
        holding = node.holdings[component][tier]
        kept, holding.value = holding.value, value
        with pytest.raises(InvariantError, match=message):
            tree.check()
        holding.value = kept
    tree.check()
    with pytest.raises(InvariantError, match="1 locks of mamba on DEVICE, 0 of full"):
        node.holdings[MAMBA][DEVICE].locks += 1
        tree.check()
    node.holdings[MAMBA][DEVICE].locks -= 1
    with pytest.raises(InvariantError, match="mamba on DEVICE: the account says 5"):
        tree.account(MAMBA, DEVICE).evictable = 5
        tree.check()
