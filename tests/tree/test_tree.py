"""The radix tree case by case: splits, locks, backups, drops, keys, and the violations that `check` names. Tests of its
content after random histories are in prefix_cache/test_cache_machines.py, and tests with loads in
flow/test_engine_in_flight.py."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
import torch

from hicache.errors import InvariantError
from hicache.pages.components import MambaComponent, SwaComponent, TreeComponent
from hicache.pages.key import PageHasher
from hicache.pages.node import TreeNode
from hicache.pages.table import PageTable
from hicache.pages.tree import RadixTree
from hicache.tiers import FULL, MAMBA, SWA


def tree_of(*components: TreeComponent, page: int = 1) -> RadixTree:
    return RadixTree(page, PageHasher(b"identity", page), components)


def test_match_changes_nothing() -> None:
    """A lookup changes neither recency, structure nor accounts."""
    tree = tree_of(page=2)
    for base in (0, 10, 20):
        tree.insert(tree.root, np.arange(base, base + 8), torch.arange(8) + base + 1)
    leaving, num_nodes = tree.pages[FULL].order.eviction_order(), tree.num_nodes
    tree.match(np.arange(0, 5))
    assert np.array_equal(tree.pages[FULL].order.eviction_order(), leaving) and tree.num_nodes == num_nodes


def test_page_keys_do_not_depend_on_splits() -> None:
    """A page's key depends only on the identity, the namespace and the tokens up to its end."""
    tokens = np.arange(16)
    complete, cut = tree_of(page=2), tree_of(page=2)
    node = complete.insert(complete.root, tokens, torch.arange(16) + 1, "a").node
    expected = complete.keys_of(node)
    cut.insert(cut.root, tokens, torch.arange(16) + 1, "a")
    for length in (4, 10):
        cut.node_at(cut.match(tokens[:length], "a"), length)
    deepest = cut.node_at(cut.match(tokens, "a"), 16)
    keys = [key for at in reversed(list(deepest.path())) for key in cut.keys_of(at)]
    assert keys == expected == complete.prompt_keys(complete.match(tokens, "a"), tokens)
    assert set(keys).isdisjoint(complete.prompt_keys(complete.match(tokens, "b"), tokens))
    other = PageHasher(b"another identity", 2)
    assert set(keys).isdisjoint(other.chain(other.seed("a"), tokens))


def test_pages_are_hashed_once() -> None:
    """Each page of a node is hashed once, however often its key is requested. A split keeps the keys."""
    hasher = PageHasher(b"identity", 2)
    tree = RadixTree(2, hasher)
    node = tree.insert(tree.root, np.arange(12), torch.arange(12) + 1).node
    keys = tree.keys_of(node)
    assert tree.keys_of(node) == keys
    upper = tree.node_at(tree.match(np.arange(6)), 6)
    assert [*tree.keys_of(upper), *tree.keys_of(node)] == keys
    assert hasher.pages_hashed == 6


def test_kept_pages_are_counted_while_they_exist() -> None:
    """Each page, window and state of a kept prompt counts once, also after a split of a locked node. A page, window or
    state no longer counts after its deadline, a use, the end of its session, its eviction, or a failed load."""
    tree = tree_of(SwaComponent(4), MambaComponent())
    limits = {FULL: 100, SWA: 100, MAMBA: 100}

    def kept() -> list[int]:
        tree.check()
        return [tree.pages[name].order.num_kept for name in limits]

    def keep(*, is_locked: bool = False) -> TreeNode:
        node = tree.insert(tree.root, np.arange(8), torch.arange(8) + 1, window_from=4).node
        tree.attach(node, MAMBA, torch.tensor([1]))
        if is_locked:
            tree.lock(node)
        tree.keep(node, 10.0, limits)
        if node.num_tokens > 2:
            tree.split(node, 2)
        assert kept() == [8, 4, 1]
        tree.expire(9.0)
        assert kept() == [8, 4, 1]
        return node

    node = keep()
    ends = (
        lambda: tree.expire(10.0),
        lambda: tree.touch(node),
        lambda: tree.end_session(tree.alone_rows(node)),
        lambda: evict_all(tree),
    )
    for end in ends:
        keep()
        end()
        assert kept() == [0, 0, 0]
    node = keep(is_locked=True)
    tree.remove(node.rows)
    assert kept() == [6, 2, 0]
    tree.unlock(node)


def evict_all(tree: RadixTree) -> None:
    while len(rows := tree.pages[FULL].take(1)):
        tree.evict(rows, FULL)


def test_a_dropped_node_is_freed_at_once() -> None:
    """The tokens of evicted pages are freed without a run of the garbage collector, also if the pages were locked."""
    tree = RadixTree(1, PageHasher(b"identity", 1), [SwaComponent(2), MambaComponent()])
    gc.disable()
    try:
        node = tree.insert(tree.root, np.arange(8), torch.arange(8) + 1, window_from=4).node
        tree.attach(node, MAMBA, torch.tensor([1]))
        tree.lock(node)
        tree.keys_of(node)
        tree.unlock(node)
        runs = [weakref.ref(at.run.tokens) for at in node.path() if at.run is not None]
        del node
        evict_all(tree)
        assert len(runs) == 2 and not any(run() is not None for run in runs)
    finally:
        gc.enable()


def test_a_prompt_leaves_page_by_page_from_its_end() -> None:
    """A prompt is evicted page by page from its end, however its nodes were split before. No page is split."""
    tree, num_tokens = tree_of(page=2), 64
    tree.insert(tree.root, np.arange(num_tokens), torch.arange(num_tokens) + 1)
    for length in (10, 40):
        tree.node_at(tree.match(np.arange(num_tokens)), length)
    for end in range(num_tokens, 0, -2):
        [released] = tree.evict(tree.pages[FULL].take(1), FULL)
        assert released.value.tolist() == [end - 1, end]
        assert tree.match(np.arange(num_tokens)).full_len == end - 2
        tree.check()
    assert not tree.num_nodes and not len(tree.table)


def test_a_row_stays_while_a_lock_of_it_is_held() -> None:
    """If a load failed, no other page gets the row of its page before the lock of the row has ended."""
    tree = tree_of()
    node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5)).node
    tree.lock(node)
    assert [removed.value.tolist() for removed in tree.remove(node.rows)] == [[1, 2, 3, 4]]
    other = tree.insert(tree.root, np.arange(10, 14), torch.arange(1, 5)).node
    assert not {*node.rows} & {*other.rows} and tree.evictable(FULL) == 4
    tree.unlock(node)
    assert len(tree.table) == 4
    tree.check()


def test_sharing_ends_at_a_load_in_flight() -> None:
    """While a request loads pages, another request shares none of them, and hands over no state below them. When the
    pages have arrived, the tree's slots replace the request's own, and its state is accepted."""
    tree, tokens = tree_of(MambaComponent(), page=2), np.arange(6)
    offered, state = torch.arange(11, 17), {MAMBA: torch.tensor([7])}
    tree.insert(tree.root, tokens[:2], torch.arange(1, 3))
    loading = tree.insert(tree.root, tokens, torch.arange(1, 7)).node
    tree.lock(loading)
    tree.pages[FULL].load[loading.rows] = 1
    inserted = tree.insert(tree.root, tokens, offered, end_values=state)
    assert inserted.existing.tolist() == [1, 2] and not len(inserted.gained)
    assert (inserted.accepted_len, inserted.attached) == (2, set())
    tree.pages[FULL].load[loading.rows] = 0
    tree.unlock(loading)
    for attached in ({MAMBA}, set()):
        inserted = tree.insert(tree.root, tokens, offered, end_values=state)
        assert inserted.existing.tolist() == [*range(1, 7)] and not len(inserted.gained)
        assert (inserted.accepted_len, inserted.attached) == (6, attached)
    tree.check()


def test_evicting_a_leaf_end_removes_pages_without_matches() -> None:
    """If one page is needed, only the last page of a prompt is evicted. With states, all pages back to the next state
    are evicted, because matches end at states."""
    for components, num_tokens in (((), 2), ((MambaComponent(),), 6)):
        tree = tree_of(*components, page=2)
        for end in (2, 8):
            node = tree.insert(tree.root, np.arange(end), torch.arange(1, end + 1)).node
            if components:
                tree.attach(node, MAMBA, torch.tensor([end]))
        released = tree.evict(tree.pages[FULL].take(1), FULL)
        assert sum(removed.size for removed in released if removed.component == FULL) == num_tokens
        tree.check()


def test_locked_pages_at_the_beginning_of_a_leaf_stay() -> None:
    """A backup for which the host lacks capacity locks the first pages of a leaf. After the state behind them is
    evicted, no match can end in them, but they stay until they are unlocked."""
    tree = tree_of(MambaComponent(), page=2)
    node = tree.insert(tree.root, np.arange(8), torch.arange(1, 9)).node
    tree.attach(node, MAMBA, torch.tensor([7]))
    rows = node.rows
    tree.pages[FULL].lock(rows[:2])
    released = tree.evict(rows[-1:], FULL)
    assert [(removed.component, removed.value.tolist()) for removed in released] == [
        (MAMBA, [7]),
        (FULL, [7, 8]),
        (FULL, [5, 6]),
    ]
    tree.check()
    assert tree.match(np.arange(8)).full_len == 4
    tree.pages[FULL].unlock(rows[:2])
    evict_all(tree)
    tree.check()
    assert not tree.num_nodes


def test_a_state_is_dropped_alone_where_a_tier_below_has_it() -> None:
    """The state of a leaf is evicted alone if a lower tier has it. Otherwise no match could end in the leaf, so the
    leaf is evicted too."""
    for is_below in (True, False):
        tree = RadixTree(1, PageHasher(b"identity", 1), [MambaComponent()], is_below=lambda node, name: is_below)  # noqa: B023
        node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5)).node
        tree.attach(node, MAMBA, torch.tensor([7]))
        released = {(removed.component, tuple(removed.value.tolist())) for removed in tree.evict(node.rows[-1:], MAMBA)}
        match = tree.match(np.arange(4))
        if is_below:
            assert released == {(MAMBA, (7,))} and match.full_len == 4 and tree.usable_len(match) == 0
        else:
            assert released == {(MAMBA, (7,)), (FULL, (1, 2, 3, 4))}
            assert match.full_len == 0 and tree.num_nodes == 0
        tree.check()


def test_tombstone_ancestors_leave_with_their_last_child() -> None:
    """Inner nodes without states are evicted with the leaf below them. An inner node with a state stays."""
    tree = tree_of(MambaComponent())
    node = tree.root
    for at in range(4):
        tokens = np.arange(at * 2, at * 2 + 2)
        node = tree.insert(node, tokens, torch.arange(1, 3) + at * 2).node
        tree.attach(node, MAMBA, torch.tensor([at + 1]))
    inner = [at for at in node.path() if at is not node]
    for at in inner[:2]:
        tree.evict(at.rows[-1:], MAMBA)
    released = [r.size for r in tree.evict(node.rows, FULL) if r.component == FULL]
    assert released == [2, 2, 2] and [at.depth_tokens for at in tree.nodes()] == [2]
    tree.check()


def test_check_finds_planted_faults() -> None:
    """`check` names each planted fault."""
    tree = tree_of(SwaComponent(2), MambaComponent())
    node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5), window_from=0).node
    tree.attach(node, MAMBA, torch.tensor([1]))
    tree.check()
    end, full, states = node.rows[-1:], tree.pages[FULL].order, tree.pages[MAMBA].order
    for message, column, fault in (
        ("pages were counted as evictable", full.locks, 1),
        ("other pages than the nodes name", full.is_held, False),
        ("mamba: a page has more locks than its slots have", states.locks, 1),
        ("says that it lies in another node", tree.node, -1),
        ("says that it follows another row", tree.table.previous, -1),
    ):
        before = column[end]
        column[end] = fault
        with pytest.raises(InvariantError, match=message):
            tree.check()
        column[end] = before
        tree.check()


@pytest.mark.parametrize("policy", ["auto", "lfu"])
def test_slices_and_row_numbers_select_the_same_pages(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A history of insertions, uses, locks and evictions gives the same slots, rows and victims for both indices."""
    found = list[list[list[int]]]()
    for many in (1, 1 << 30):
        monkeypatch.setattr(PageTable, "many", many)
        tree, dice, seen = RadixTree(2, PageHasher(b"identity", 2), policy=policy), random.Random(policy), []
        for number in range(150):
            length, start = 2 * dice.randrange(1, 40), dice.randrange(3)
            tokens = np.arange(start, start + length) // dice.choice([1, 1, 40])
            match = tree.match(tokens)
            inserted = tree.insert(tree.node_at(match, match.full_len), tokens[match.full_len :], torch.arange(length))
            tree.lock(inserted.node)
            seen.append(tree.path_rows(inserted.node).tolist())
            seen.append(tree.pages[FULL].value(tree.path_rows(inserted.node)).tolist())
            tree.begin_use(tree.path_rows(inserted.node))
            tree.touch(inserted.node)
            tree.unlock(inserted.node)
            while tree.pages[FULL].num_held > 60:
                released = tree.evict(tree.pages[FULL].take(2 * dice.randrange(1, 9)), FULL)
                seen += [each.value.tolist() for each in released]
            if number % 50 == 0:
                tree.check()
        found.append(seen)
    assert found[0] == found[1]
