"""The radix tree against a plain dict of prefixes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache.errors import InvariantError
from hicache.tree import PageHasher, PageState, RadixTree, Tier
from hicache.tree.key import pack_tokens
from hicache.tree.node import TRANSITIONS

SPACES = st.sampled_from(["", "tenant"])


def make_tree(page_size: int) -> RadixTree:
    return RadixTree(page_size, PageHasher(b"identity", page_size))


class TreeAgainstDict(RuleBasedStateMachine):
    """Every page prefix the tree claims to hold is one the oracle holds, with the same slots and pages, and
    conversely."""

    page_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.tree = make_tree(self.page_size)
        self.device: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        self.host: dict[tuple[str, tuple[int, ...]], int] = {}
        self.locked: list[tuple[object, Tier]] = []
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
        result = self.tree.insert(self.tree.root, pack_tokens(tokens), slots, Tier.DEVICE, space)
        kept = {i for dup in result.duplicates for i in range(dup.start, dup.end)}
        for at, prefix in enumerate(self.prefixes(space, tokens)):
            span = range(at * self.page_size, (at + 1) * self.page_size)
            assert (prefix in self.device) == all(i in kept for i in span)
            self.device.setdefault(prefix, tuple(slots[i].item() for i in span))
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
        result = self.tree.insert(self.tree.root, pack_tokens(tokens), pages, Tier.HOST, space)
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
        assert (match.device_len, match.host_len) == (on_device, on_host)
        length = min(cut // self.page_size * self.page_size, match.device_len)
        node = self.tree.node_at(match, length)
        assert node.depth_tokens == length
        values = [n.held(Tier.DEVICE) for n in reversed(list(node.path()))]
        ours = [s for p in self.prefixes(space, tokens[:length]) for s in self.device[p]]
        assert (torch.cat(values).tolist() if values else []) == ours
        self.tree.lock(node, Tier.DEVICE)
        self.locked.append((node, Tier.DEVICE))

    @precondition(lambda self: self.locked)
    @rule(which=st.integers(0, 100))
    def unlock(self, which: int) -> None:
        node, tier = self.locked.pop(which % len(self.locked))
        self.tree.unlock(node, tier)  # type: ignore[arg-type]

    @rule(tier=st.sampled_from(list(Tier)), keep=st.integers(0, 3))
    def evict(self, tier: Tier, keep: int) -> None:
        node = self.tree.victim(tier)
        if node is None:
            return
        keep = min(keep * self.page_size, node.num_tokens - self.page_size)
        if keep:
            node = self.tree.cut_tail(node, keep)
        (released,) = self.tree.drop(node, tier)
        gone = set(released.value.tolist())
        if tier is Tier.DEVICE:
            self.device = {p: s for p, s in self.device.items() if not gone & set(s)}
        else:
            self.host = {p: page for p, page in self.host.items() if page not in gone}

    @invariant()
    def consistent(self) -> None:
        self.tree.check()
        held = sorted(s for v in self.tree.values(Tier.DEVICE) for s in v.tolist())
        assert held == sorted(s for slots in self.device.values() for s in slots)
        assert sorted(p for v in self.tree.values(Tier.HOST) for p in v.tolist()) == sorted(self.host.values())


TestTreeAgainstDict = TreeAgainstDict.TestCase


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_match_returns_what_was_inserted(page_size: int) -> None:
    """The longest common whole-page prefix comes back with the slots it was inserted with."""
    tree = make_tree(page_size)
    tokens = np.arange(page_size * 7)
    tree.insert(tree.root, tokens, torch.arange(len(tokens)) + 5, Tier.DEVICE)
    asked = np.concatenate([tokens[: page_size * 3], tokens[:page_size] + 999])
    match = tree.match(asked)
    assert match.device_len == 3 * page_size
    node = tree.node_at(match, match.device_len)
    assert torch.equal(node.held(Tier.DEVICE), torch.arange(match.device_len) + 5)
    assert tree.match(asked, "another").device_len == 0
    tree.check()


def test_match_changes_nothing() -> None:
    """Looking up leaves recency, structure and account as they were."""
    tree = make_tree(2)
    for base in (0, 10, 20):
        tree.insert(tree.root, np.arange(base, base + 8), torch.arange(8) + base + 1, Tier.DEVICE)
    oldest, nodes = tree.victim(Tier.DEVICE), tree.num_nodes
    tree.match(np.arange(0, 5))
    assert tree.victim(Tier.DEVICE) is oldest and tree.num_nodes == nodes


def test_page_keys_do_not_depend_on_splits() -> None:
    """A page's key is a function of the identity, namespace and tokens up to its end alone."""
    tokens = np.arange(16)
    whole, cut = make_tree(2), make_tree(2)
    node = whole.insert(whole.root, tokens, torch.arange(16) + 1, Tier.DEVICE, "a").node
    expected = whole.names.of(node)
    cut.insert(cut.root, tokens, torch.arange(16) + 1, Tier.DEVICE, "a")
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
    node = tree.insert(tree.root, np.arange(12), torch.arange(12) + 1, Tier.DEVICE).node
    for _ in range(3):
        tree.names.of(node)
    tree.node_at(tree.match(np.arange(6)), 6)
    tree.names.of(node)
    assert hasher.pages_hashed == 6


def test_span_survives_a_split() -> None:
    """A backup under way when its node splits attaches every host page to the tokens it was made for."""
    tree = make_tree(2)
    node = tree.insert(tree.root, np.arange(8), torch.arange(8) + 1, Tier.DEVICE).node
    tree.lock(node, Tier.DEVICE)
    tree.begin_backup(node, torch.tensor([7, 3, 9, 5]))
    upper = tree.node_at(tree.match(np.arange(4)), 4)
    for at in (upper, node):
        assert tree.end_backup(at, confirmed=True) is None
    assert upper.held(Tier.HOST).tolist() == [7, 3] and node.held(Tier.HOST).tolist() == [9, 5]
    tree.unlock(node, Tier.DEVICE)
    tree.check()


def test_every_state_change_is_in_the_table() -> None:
    """No method can take a node from one state to another except along the table."""
    tree = make_tree(2)
    node = tree.insert(tree.root, np.arange(4), torch.arange(4) + 1, Tier.DEVICE).node
    assert node.state is PageState.DEVICE
    with pytest.raises(AssertionError):
        tree.begin_load(node, torch.arange(4) + 9)
    with pytest.raises(AssertionError):
        tree.end_backup(node, confirmed=True)
    assert set(TRANSITIONS) == set(PageState)
    reachable = {to for targets in TRANSITIONS.values() for to in targets}
    assert reachable == set(PageState)


def test_check_finds_planted_faults() -> None:
    """The audit names each fault: it can fail."""
    tree = make_tree(2)
    node = tree.insert(tree.root, np.arange(4), torch.arange(4) + 1, Tier.DEVICE).node
    node.locks[Tier.DEVICE] = 1
    with pytest.raises(InvariantError, match="account") as caught:
        tree.check()
    assert any("order" in line for line in caught.value.violations)
    node.locks[Tier.DEVICE] = 0
    node.state = PageState.BOTH
    with pytest.raises(InvariantError, match="state BOTH"):
        tree.check()
