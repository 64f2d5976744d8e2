"""The radix tree against a plain dict of prefixes."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache.errors import InvariantError
from hicache.tree import (
    DEVICE,
    FULL,
    HOST,
    MAMBA,
    REMOTE,
    MambaComponent,
    NodeRun,
    PageHasher,
    PageState,
    RadixTree,
    SwaComponent,
    Tier,
    TreeNode,
)
from hicache.tree.key import pack_tokens
from page_life import PageLives

SPACES = st.sampled_from(["", "tenant"])


def make_tree(page_size: int) -> RadixTree:
    return RadixTree(page_size, PageHasher(b"identity", page_size))


class TreeAgainstDict(RuleBasedStateMachine):
    """The tree holds exactly the page prefixes that the dict holds, with the same slots and pages, and every page goes
    along the table of states."""

    page_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.tree = make_tree(self.page_size)
        self.device: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        self.host: dict[tuple[str, tuple[int, ...]], int] = {}
        self.lives = PageLives(self.tree)
        self.locked: list[tuple[TreeNode, Tier]] = []
        self.next_slot = self.next_page = 1

    def prefixes(self, space: str, tokens: list[int]) -> list[tuple[str, tuple[int, ...]]]:
        step = self.page_size
        return [(space, tuple(tokens[:end])) for end in range(step, len(tokens) + 1, step)]

    @rule(space=SPACES, tokens=st.lists(st.integers(0, 2), max_size=14))
    def insert_on_device(self, space: str, tokens: list[int]) -> None:
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        if not tokens:
            return
        slots = torch.arange(self.next_slot, self.next_slot + len(tokens))
        self.next_slot += len(tokens)
        result = self.tree.insert(self.tree.root, pack_tokens(tokens), slots, DEVICE, space)
        kept = {i for dup in result.duplicates for i in range(dup.start, dup.end)}
        for at, prefix in enumerate(self.prefixes(space, tokens)):
            page = range(at * self.page_size, (at + 1) * self.page_size)
            assert (prefix in self.device) == all(i in kept for i in page)
            self.device.setdefault(prefix, tuple(slots[i].item() for i in page))
        for dup in result.duplicates:
            ours = [s for p in self.prefixes(space, tokens)[dup.start // 2 : dup.end // 2] for s in self.device[p]]
            assert dup.value.tolist() == ours

    @rule(space=SPACES, tokens=st.lists(st.integers(0, 2), max_size=14))
    def insert_on_host(self, space: str, tokens: list[int]) -> None:
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        if not tokens:
            return
        prefixes = self.prefixes(space, tokens)
        pages = torch.arange(self.next_page, self.next_page + len(prefixes))
        self.next_page += len(prefixes)
        result = self.tree.insert(self.tree.root, pack_tokens(tokens), pages, HOST, space)
        assert result.accepted_len == len(tokens)
        for page, prefix in zip(pages.tolist(), prefixes, strict=True):
            self.host.setdefault(prefix, page)

    @rule(space=SPACES, tokens=st.lists(st.integers(0, 2), max_size=16), cut=st.integers(0, 16))
    def lock_a_match(self, space: str, tokens: list[int], cut: int) -> None:
        match = self.tree.match(pack_tokens(tokens), space)
        on_device = on_host = 0
        for prefix in self.prefixes(space, tokens):
            if prefix in self.device and not on_host:
                on_device += self.page_size
            elif prefix in self.host:
                on_host += self.page_size
            else:
                break
        assert (match.device_len, match.full_len - match.device_len) == (on_device, on_host)
        length = min(cut // self.page_size * self.page_size, match.device_len)
        node = self.tree.node_at(match, length)
        assert node.depth_tokens == length
        values = [n.held(FULL, DEVICE) for n in reversed(list(node.path()))]
        ours = [s for p in self.prefixes(space, tokens[:length]) for s in self.device[p]]
        assert (torch.cat(values).tolist() if values else []) == ours
        self.tree.lock(node, DEVICE)
        self.locked.append((node, DEVICE))

    @precondition(lambda self: self.locked)
    @rule(which=st.integers(0, 100))
    def unlock(self, which: int) -> None:
        node, tier = self.locked.pop(which % len(self.locked))
        self.tree.unlock(node, tier)

    @rule(tier=st.sampled_from(list(Tier)), num_pages=st.none() | st.integers(1, 3))
    def evict(self, tier: Tier, num_pages: int | None) -> None:
        """The next victim goes whole, or its last pages alone."""
        whole = self.tree.victim(FULL, tier)
        node = self.tree.victim(FULL, tier, num_pages and num_pages * self.page_size)
        assert node is whole
        if node is None:
            return
        assert num_pages is None or node.num_tokens <= num_pages * self.page_size
        (released,) = self.tree.drop(node, FULL, tier)
        assert (released.component, released.tier, released.size) == (FULL, tier, node.num_tokens)
        gone = set(released.value.tolist())
        if tier is DEVICE:
            self.device = {p: s for p, s in self.device.items() if not gone & set(s)}
        else:
            self.host = {p: page for p, page in self.host.items() if page not in gone}

    @invariant()
    def consistent(self) -> None:
        self.tree.check()
        self.lives.look()
        held = sorted(s for v in self.tree.values(FULL, DEVICE) for s in v.tolist())
        assert held == sorted(s for slots in self.device.values() for s in slots)
        assert sorted(p for v in self.tree.values(FULL, HOST) for p in v.tolist()) == sorted(self.host.values())


TestTreeAgainstDict = TreeAgainstDict.TestCase


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_match_returns_what_was_inserted(page_size: int) -> None:
    """The longest common whole-page prefix comes back with the slots it was inserted with."""
    tree = make_tree(page_size)
    tokens = np.arange(page_size * 7)
    tree.insert(tree.root, tokens, torch.arange(len(tokens)) + 5, DEVICE)
    asked = np.concatenate([tokens[: page_size * 3], tokens[:page_size] + 999])
    match = tree.match(asked)
    assert match.device_len == 3 * page_size
    node = tree.node_at(match, match.device_len)
    assert torch.equal(node.held(FULL, DEVICE), torch.arange(match.device_len) + 5)
    assert tree.match(asked, "another").device_len == 0
    tree.check()


def test_match_changes_nothing() -> None:
    """Looking up leaves recency, structure and account as they were."""
    tree = make_tree(2)
    for base in (0, 10, 20):
        tree.insert(tree.root, np.arange(base, base + 8), torch.arange(8) + base + 1, DEVICE)
    oldest, num_nodes = tree.victim(FULL, DEVICE), tree.num_nodes
    tree.match(np.arange(0, 5))
    assert tree.victim(FULL, DEVICE) is oldest and tree.num_nodes == num_nodes


def test_page_keys_do_not_depend_on_splits() -> None:
    """A page's key is a function of the identity, namespace and tokens up to its end alone."""
    tokens = np.arange(16)
    whole, cut = make_tree(2), make_tree(2)
    node = whole.insert(whole.root, tokens, torch.arange(16) + 1, DEVICE, "a").node
    expected = whole.names.of(node)
    cut.insert(cut.root, tokens, torch.arange(16) + 1, DEVICE, "a")
    for length in (4, 10):
        cut.node_at(cut.match(tokens[:length], "a"), length)
    deepest = cut.node_at(cut.match(tokens, "a"), 16)
    keys = [key for at in reversed(list(deepest.path())) for key in cut.names.of(at)]
    assert keys == expected == whole.names.of_tokens(tokens, "a")
    assert set(keys).isdisjoint(whole.names.of_tokens(tokens, "b"))
    other = PageHasher(b"another identity", 2)
    assert set(keys).isdisjoint(other.chain(other.seed("a"), tokens))


def test_pages_are_hashed_once() -> None:
    """However often keys are asked for, each page of a node is hashed once in its life."""
    hasher = PageHasher(b"identity", 2)
    tree = RadixTree(2, hasher)
    node = tree.insert(tree.root, np.arange(12), torch.arange(12) + 1, DEVICE).node
    for _ in range(3):
        tree.names.of(node)
    tree.node_at(tree.match(np.arange(6)), 6)
    tree.names.of(node)
    assert hasher.pages_hashed == 6


def test_a_copy_survives_a_split() -> None:
    """A backup in flight when its node splits gives every host page to the tokens that it was made for."""
    tree = make_tree(2)
    node = tree.insert(tree.root, np.arange(8), torch.arange(8) + 1, DEVICE).node
    run = NodeRun([node], FULL, HOST)
    tree.lock(node, DEVICE)
    tree.begin_backup(node, FULL, torch.tensor([7, 3, 9, 5]))
    upper = tree.node_at(tree.match(np.arange(4)), 4)
    tree.check()
    assert run.nodes == [upper, node]
    for at in run.nodes:
        assert tree.end_backup(at, FULL, confirmed=True) is None
    run.detach()
    assert upper.held(FULL, HOST).tolist() == [7, 3] and node.held(FULL, HOST).tolist() == [9, 5]
    tree.unlock(node, DEVICE)
    tree.check()


def test_a_copy_to_where_something_is_or_comes_is_refused() -> None:
    """A node is copied to a tier at most once: what is there, or on its way there, is no destination."""
    tree = make_tree(2)
    node = tree.insert(tree.root, np.arange(4), torch.arange(4) + 1, DEVICE).node
    with pytest.raises(AssertionError):
        tree.begin_load(node, torch.arange(4) + 9)
    with pytest.raises(AssertionError):
        tree.end_backup(node, FULL, confirmed=True)
    tree.begin_backup(node, FULL, torch.tensor([1, 2]))
    with pytest.raises(AssertionError):
        tree.begin_backup(node, FULL, torch.tensor([3, 4]))
    assert tree.end_backup(node, FULL, confirmed=True) is None
    with pytest.raises(AssertionError):
        tree.begin_backup(node, FULL, torch.tensor([3, 4]))


def test_a_state_is_what_is_held_and_what_is_in_flight() -> None:
    """Each state of a page follows from its values, its pending pages and the copies that follow its node."""
    tree = make_tree(2)
    node = tree.insert(tree.root, np.arange(4), torch.arange(4) + 1, DEVICE).node
    assert node.state is PageState.DEVICE
    run = NodeRun([node], FULL, HOST)
    tree.begin_backup(node, FULL, torch.tensor([1, 2]))
    assert node.state is PageState.BACKING_UP
    tree.end_backup(node, FULL, confirmed=True)
    run.detach()
    assert node.state is PageState.BOTH
    to_disk = NodeRun([node])
    assert node.state is PageState.BOTH and not node.is_loading, "a copy to the disk changes no state"
    to_disk.detach()
    tree.drop(node, FULL, DEVICE)
    assert node.state is PageState.HOST
    tree.begin_load(node, torch.arange(4) + 9)
    run = NodeRun([node], FULL, DEVICE)
    assert node.state is PageState.LOADING
    run.detach()
    assert tree.fail_load(node).tolist() == [9, 10, 11, 12] and node.state is PageState.HOST
    tree.drop(node, FULL, HOST)
    assert node.state is PageState.GONE


def test_a_split_keeps_what_policies_rank_by() -> None:
    """Both halves of a node have its hits, priority and times, and its mark of coming from the disk."""
    tree = make_tree(2)
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


def test_check_finds_planted_faults() -> None:
    """The audit names each fault: it can fail."""
    tree = make_tree(2)
    node = tree.insert(tree.root, np.arange(4), torch.arange(4) + 1, DEVICE).node
    device, host = node.full
    device.locks = 1
    with pytest.raises(InvariantError, match="account") as caught:
        tree.check()
    assert any("order" in line for line in caught.value.violations)
    device.locks = 0
    tree.check()
    host.pending = torch.tensor([1, 2])
    with pytest.raises(InvariantError, match="no copy of the node is in flight"):
        tree.check()
    host.pending = None
    kept, device.value = device.value, None
    with pytest.raises(InvariantError, match="held by no tier"):
        tree.check()
    device.value = kept
    tree.check()
