"""Windows and states in the radix tree, on both tiers, against plain dictionaries of prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hicache.errors import InvariantError
from hicache.tree import (
    DEVICE,
    DISK,
    FULL,
    HOST,
    MAMBA,
    SWA,
    Component,
    MambaComponent,
    Match,
    NodeRun,
    PageHasher,
    PageState,
    RadixTree,
    Released,
    SwaComponent,
    Tier,
    TreeComponent,
    TreeNode,
)
from hicache.tree.key import Tokens, pack_tokens
from page_life import DROPPED, EDGES, Edge, PageLives

Prefix = tuple[str, tuple[int, ...]]
SPACES = st.sampled_from(["", "tenant"])
KINDS = {"swa": (SWA,), "mamba": (MAMBA,), "both": (SWA, MAMBA)}
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
ASKED = st.lists(st.integers(0, 2), max_size=7)


class _Copies:
    """Copies that began together, of a path of `nodes`: where each prefix goes, and the runs that follow its nodes."""

    def __init__(self, nodes: list[TreeNode]) -> None:
        self.nodes = tuple(nodes)
        self.ids: dict[Component, dict[Prefix, int]] = {}
        self.runs: dict[Component, NodeRun] = {}

    def note(self, component: Component, ids: Iterable[tuple[Prefix, int]]) -> None:
        self.ids.setdefault(component, {}).update(ids)


class ComponentsAgainstDicts(RuleBasedStateMachine):
    """What the tree holds of each component on each tier, and how far a prefix can be used, is what dictionaries of
    prefixes say; every page goes along the table of states."""

    edges: ClassVar[set[Edge]] = set()  # that the pages of all runs took

    def __init__(self) -> None:
        super().__init__()
        names = (FULL, SWA, MAMBA)
        self.held: dict[tuple[Component, Tier], dict[Prefix, int]] = {(n, tier): {} for n in names for tier in Tier}
        self.locked: list[tuple[TreeNode, Tier]] = []
        self.prompts: list[tuple[str, list[int]]] = []  # that were committed or prefetched
        self.backups: list[_Copies] = []  # in flight, oldest first
        self.loads: list[_Copies] = []
        self.next_id = 1

    @initialize(page=st.sampled_from([1, 4, 16, 64]), window_pages=st.integers(1, 3), kind=st.sampled_from(list(KINDS)))
    def build(self, page: int, window_pages: int, kind: str) -> None:
        self.page, self.names = page, (FULL, *KINDS[kind])
        self.window = max(1, window_pages * page - page // 2)
        self.swa, self.mamba = SWA in self.names, MAMBA in self.names
        self.windows = SwaComponent(self.window, page)
        components: list[TreeComponent] = [self.windows] if self.swa else []
        if self.mamba:
            components.append(MambaComponent())
        self.tree = RadixTree(page, PageHasher(b"identity", page), components)
        self.lives = PageLives(self.tree)

    def tokens(self, pages: list[int]) -> Tokens:
        """Each number as a page of its own."""
        return pack_tokens(np.repeat(np.asarray(pages, dtype=np.int64), self.page))

    def prefixes(self, space: str, pages: list[int]) -> list[Prefix]:
        return [(space, tuple(pages[: end + 1])) for end in range(len(pages))]

    def ids(self, count: int) -> torch.Tensor:
        made = torch.arange(self.next_id, self.next_id + count)
        self.next_id += count
        return made

    @rule(space=SPACES, pages=PROMPTS, unmapped=st.integers(0, 6), keep=st.booleans())
    def insert(self, space: str, pages: list[int], unmapped: int, keep: bool) -> None:
        """A request commits: the first `unmapped` pages have lost their windows; with `keep`, a state of the end."""
        tokens, slots = self.tokens(pages), self.ids(len(pages) * self.page)
        unmapped = min(unmapped, len(pages) - 1)
        window_from = unmapped * self.page if self.swa else None
        result = self.tree.insert(self.tree.root, tokens, slots, DEVICE, space, window_from)
        self.prompts.append((space, pages))
        all_prefixes = self.prefixes(space, pages)
        accepted = self.accepted(all_prefixes, [run for load in self.loads for run in load.runs.values()])
        assert result.accepted_len == accepted * self.page
        adopted = {at for dup in result.duplicates if dup.adopts_window for at in range(dup.start, dup.end)}
        full, windows = self.held[FULL, DEVICE], self.held[SWA, DEVICE]
        for at, prefix in enumerate(all_prefixes[:accepted]):
            first = at * self.page
            was_there = prefix in full
            full.setdefault(prefix, int(slots[first]))
            if self.swa and at >= unmapped:
                assert (first in adopted) == (was_there and prefix not in windows)
                windows[prefix] = full[prefix]
        if self.mamba and accepted == len(pages) and (keep or not result.node.children):
            self.attach(result.node, MAMBA, DEVICE)

    @rule(space=SPACES, pages=PROMPTS, unmapped=st.integers(0, 6), keep=st.booleans())
    def prefetch(self, space: str, pages: list[int], unmapped: int, keep: bool) -> None:
        """Pages come from the disk to the host, with the windows behind the first `unmapped` pages, and perhaps with a
        state of the end."""
        host_pages = self.ids(len(pages))
        result = self.tree.insert(self.tree.root, self.tokens(pages), host_pages, HOST, space)
        self.prompts.append((space, pages))
        all_prefixes = self.prefixes(space, pages)
        accepted = self.accepted(all_prefixes, [copy.runs[FULL] for copy in self.backups])
        assert result.accepted_len == accepted * self.page
        for at, prefix in enumerate(all_prefixes[:accepted]):
            self.held[FULL, HOST].setdefault(prefix, int(host_pages[at]))
        match = self.matched(space, pages[:accepted])
        if self.swa:
            self.tree.node_at(match, min(unmapped, accepted) * self.page)
            for node in [] if not accepted else result.node.path():
                if node.depth_tokens > unmapped * self.page:
                    self.attach(node, SWA, HOST)
        if self.mamba and accepted and (keep or not result.node.children):
            self.attach(result.node, MAMBA, HOST)

    def accepted(self, prefixes: list[Prefix], runs: Iterable[NodeRun]) -> int:
        """Pages in front of the first that is being copied to where they were inserted."""
        in_flight = {prefix for run in runs for node in run.nodes for prefix in self.pages_of(node, FULL)}
        return next((at for at, prefix in enumerate(prefixes) if prefix in in_flight), len(prefixes))

    def attach(self, node: TreeNode, component: Component, tier: Tier) -> None:
        """A component comes to where it is lacking, and nowhere else."""
        prefixes = list(self.pages_of(node, component))
        value, held = self.ids(len(prefixes)), self.held[component, tier]
        coming = tier is HOST and any(
            prefix in copy.ids.get(component, ()) for copy in self.backups for prefix in prefixes
        )
        lacking = not coming and not any(prefix in held for prefix in prefixes)
        assert self.tree.attach(node, component, tier, value) == lacking
        if lacking:
            held.update(zip(prefixes, value.tolist(), strict=True))

    @rule(space=SPACES, pages=ASKED, limit=st.integers(0, 7), on_host=st.booleans())
    def match(self, space: str, pages: list[int], limit: int, on_host: bool) -> None:
        match = self.tree.match(self.tokens(pages), space)
        assert match.full_len == self.full_len(space, pages) * self.page
        best = 0
        for end in range(1, min(limit * self.page, match.full_len) // self.page + 1):
            if self.usable(space, pages, end, on_host):
                best = end * self.page
        assert self.tree.usable_len(match, limit * self.page, on_host) == best

    def full_len(self, space: str, pages: list[int]) -> int:
        """Pages from the front that either tier holds in full."""
        held = [any(prefix in self.held[FULL, tier] for tier in Tier) for prefix in self.prefixes(space, pages)]
        return held.index(False) if False in held else len(held)

    def usable(self, space: str, pages: list[int], end: int, on_host: bool) -> bool:
        def has(component: Component, prefix: Prefix) -> bool:
            tiers = (DEVICE, HOST) if on_host else (DEVICE,)
            return any(prefix in self.held[component, tier] for tier in tiers)

        prefixes = self.prefixes(space, pages)[:end]
        start = max(0, end * self.page - self.window) // self.page
        windows = not self.swa or all(has(SWA, p) for p in prefixes[start:])
        return windows and (not self.mamba or has(MAMBA, prefixes[-1]))

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 3), end=st.integers(1, 6))
    def split(self, which: int, end: int) -> None:
        """A request that shares the first pages of a prompt cuts the node that they end in, copies in flight or not."""
        match = self.matched(*self.prompt(which, end))
        self.tree.node_at(match, match.full_len)

    def prompt(self, which: int, end: int = 6) -> tuple[str, list[int]]:
        """The first pages of one of the prompts that came last."""
        space, pages = self.prompts[-1 - which % len(self.prompts)]
        return space, pages[:end]

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 3), end=st.integers(1, 6))
    def begin_backup(self, which: int, end: int) -> None:
        """What only the device holds of a path starts on its way to the host, each component by itself."""
        match = self.matched(*self.prompt(which, end))
        if not match.device_len:
            return
        node = self.tree.node_at(match, match.device_len)
        fresh = list(itertools.takewhile(lambda at: at.state is PageState.DEVICE, node.path()))[::-1]
        copy = _Copies(fresh or [node])
        for component in self.names:
            nodes = [at for at in copy.nodes if at.holds(component, DEVICE) and not at.holds(component, HOST)]
            nodes = [at for at in nodes if at.pending(component) is None]
            for at in nodes:
                ids = self.ids(1 if component == MAMBA else at.num_tokens // self.page)
                self.tree.begin_backup(at, component, ids)
                copy.note(component, zip(self.pages_of(at, component), ids.tolist(), strict=True))
            copy.runs[component] = NodeRun(nodes, component, HOST)
        for at in copy.nodes:
            self.tree.lock(at, DEVICE)
            self.tree.lock(at, HOST)
        self.backups.append(copy)

    @precondition(lambda self: self.backups)
    @rule(full_ok=st.booleans(), others_ok=st.booleans())
    def end_backup(self, full_ok: bool, others_ok: bool) -> None:
        """The oldest backup arrives, or fails in part: the pages of each prefix are where its copy wrote, however its
        node was split since; nothing counts as held whose parent does not."""
        copy = self.backups.pop(0)
        for component, run in copy.runs.items():
            ok = full_ok if component == FULL else others_ok
            for node in run.nodes:
                above = node.parent if component == FULL else node
                fits = above is not None and (above.is_root or above.holds(FULL, HOST))
                prefixes = list(self.pages_of(node, component))
                want = [copy.ids[component].pop(prefix) for prefix in prefixes]
                back = self.tree.end_backup(node, component, ok)
                assert (back is None) == (ok and fits)
                assert (node.held(component, HOST) if back is None else back).tolist() == want
                if back is None:
                    self.held[component, HOST].update(zip(prefixes, want, strict=True))
            assert not copy.ids.get(component), "pages of a copy that no node waits for"
            run.detach()
        for node in copy.nodes:
            self.tree.unlock(node, HOST)
            self.tree.unlock(node, DEVICE)

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 3), end=st.integers(1, 6))
    def begin_load(self, which: int, end: int) -> None:
        """What only the host holds of a usable prefix starts on its way to the device: full pages, and windows to the
        same slots."""
        match = self.matched(*self.prompt(which, end))
        node = self.tree.node_at(match, self.tree.usable_len(match, match.full_len, on_host=True))
        lacking = [at for at in node.path() if not at.holds(FULL, DEVICE)][::-1]
        windows = list(self.windows.required_nodes(node))[::-1] if self.swa else []
        windows = [at for at in windows if not at.holds(SWA, DEVICE)]
        if not lacking and not windows:
            return
        load = _Copies([node])
        self.tree.lock(node, HOST)
        for at in lacking:
            slots = self.ids(at.num_tokens)
            self.tree.begin_load(at, slots)
            self.note(at, FULL, slots[:: self.page])
            load.note(FULL, ((prefix, 0) for prefix in self.pages_of(at, FULL)))
        for at in windows:
            self.tree.attach(at, SWA, DEVICE, at.held(FULL, DEVICE))
            self.note(at, SWA, at.held(SWA, DEVICE)[:: self.page])
        self.tree.lock(node, DEVICE)
        load.runs = {FULL: NodeRun(lacking, FULL, DEVICE), SWA: NodeRun(windows, SWA, DEVICE)}
        self.loads.append(load)

    @precondition(lambda self: self.loads)
    @rule(ok=st.booleans())
    def end_load(self, ok: bool) -> None:
        """The oldest load arrives; or it fails, and with it those after it, which may continue its nodes."""
        ended = self.loads[:1] if ok else self.loads[::-1]
        self.loads = self.loads[1:] if ok else []
        for load in ended:
            for node in reversed(load.runs[FULL].nodes):
                for prefix in self.pages_of(node, FULL):
                    del load.ids[FULL][prefix]
                if not ok:
                    self.forget(Released(FULL, DEVICE, self.tree.fail_load(node), node.num_tokens))
            assert not load.ids.get(FULL), "pages of a load that no node waits for"
            for node in [] if ok else load.runs[SWA].nodes:
                if node.holds(SWA, DEVICE):
                    self.forget(self.tree.detach(node, SWA, DEVICE))
            for run in load.runs.values():
                run.detach()
            self.tree.unlock(load.nodes[0], DEVICE)
            self.tree.unlock(load.nodes[0], HOST)

    def matched(self, space: str, pages: list[int]) -> Match:
        return self.tree.match(self.tokens(pages), space)

    def note(self, node: TreeNode, component: Component, ids: torch.Tensor) -> None:
        self.held[component, DEVICE].update(zip(self.pages_of(node, component), ids.tolist(), strict=True))

    def pages_of(self, node: TreeNode, component: Component) -> Iterator[Prefix]:
        """The prefixes that a node's pages end, or that its state belongs to."""
        tokens = np.concatenate([at.run.tokens for at in reversed(list(node.path())) if at.run is not None])
        pages = tokens[:: self.page].tolist()
        first = len(pages) - (1 if component == MAMBA else node.num_tokens // self.page)
        return iter(self.prefixes(node.namespace, pages)[first:])

    @rule(space=SPACES, pages=ASKED, limit=st.integers(0, 6), tier=st.sampled_from(list(Tier)))
    def lock(self, space: str, pages: list[int], limit: int, tier: Tier) -> None:
        match = self.matched(space, pages)
        node = self.tree.node_at(match, self.tree.usable_len(match, min(limit * self.page, match.full_len), True))
        self.tree.lock(node, tier)
        self.locked.append((node, tier))

    @precondition(lambda self: self.locked)
    @rule(which=st.integers(0, 100), space=SPACES, pages=ASKED)
    def move_lock(self, which: int, space: str, pages: list[int]) -> None:
        old, tier = self.locked.pop(which % len(self.locked))
        match = self.matched(space, pages)
        new = self.tree.node_at(match, self.tree.usable_len(match, match.full_len, True))
        self.tree.move_lock(old, new, tier)
        self.locked.append((new, tier))

    @precondition(lambda self: self.locked)
    @rule(which=st.integers(0, 100))
    def unlock(self, which: int) -> None:
        self.tree.unlock(*self.locked.pop(which % len(self.locked)))

    @rule(tier=st.sampled_from(list(Tier)))
    def drop_copies(self, tier: Tier) -> None:
        """All that the other tier holds too, and nobody has locked, leaves `tier`."""
        other = HOST if tier is DEVICE else DEVICE
        while (node := self.tree.victim(FULL, tier)) is not None and node.holds(FULL, other):
            self.drop(node, FULL, tier)

    @rule(which=st.integers(0, 5), keep=st.integers(0, 3), num_pages=st.none() | st.integers(1, 3))
    def evict(self, which: int, keep: int, num_pages: int | None) -> None:
        """The next victim goes: of full pages whole or from its end, of windows whole or from its front."""
        component, tier = [(name, tier) for name in self.names for tier in Tier][which % (2 * len(self.names))]
        num_tokens = num_pages * self.page if num_pages and component == FULL else None
        node = self.tree.victim(component, tier, num_tokens)
        if node is None:
            return
        assert num_tokens is None or self.mamba or node.num_tokens <= num_tokens
        keep = min(keep * self.page, node.num_tokens - self.page)
        if keep and component == SWA:
            node = self.tree.split_prefix(node, keep)
        protected = self.protected()
        self.drop(node, component, tier)
        assert self.protected() == protected, "eviction took what is locked"

    def drop(self, node: TreeNode, component: Component, tier: Tier) -> None:
        dropped = self.tree.drop(node, component, tier)
        num_windows = sum((released.component, released.tier) == (SWA, DEVICE) for released in dropped)
        assert num_windows == ((component, tier) == (SWA, DEVICE)), "windows leave unreleased with their full slots"
        for released in dropped:
            self.forget(released)
        self.lives.look(DROPPED)

    def protected(self) -> list[int]:
        return [self.tree.protected(name, tier) for name in self.names for tier in Tier]

    def first_of_pages(self, component: Component, tier: Tier, value: torch.Tensor) -> list[int]:
        """One element a page, or the state."""
        ids: list[int] = value[:: self.page if tier is DEVICE and component != MAMBA else 1].tolist()
        return ids

    def forget(self, released: Released) -> None:
        component, tier = released.component, released.tier
        gone = set(self.first_of_pages(component, tier, released.value))
        assert released.size == (1 if component == MAMBA else len(gone) * self.page)
        held = self.held[component, tier]
        kept = {prefix: value for prefix, value in held.items() if value not in gone}
        assert len(kept) == len(held) - len(gone), "released what was not held"
        self.held[component, tier] = kept
        if (component, tier) == (FULL, DEVICE):  # their window slots go with them
            windows = self.held[SWA, DEVICE]
            self.held[SWA, DEVICE] = {prefix: value for prefix, value in windows.items() if value not in gone}

    @invariant()
    def consistent(self) -> None:
        if not self.held or not getattr(self, "tree", None):
            return
        self.tree.check()
        self.lives.look()
        for name in self.names:
            for tier in Tier:
                values = [self.first_of_pages(name, tier, value) for value in self.tree.values(name, tier)]
                assert sorted(itertools.chain(*values)) == sorted(self.held[name, tier].values()), (name, tier)

    def teardown(self) -> None:
        """Everything can be unlocked and evicted, to the last node."""
        if not getattr(self, "tree", None):
            return
        while self.backups:
            self.end_backup(full_ok=False, others_ok=False)
        while self.loads:
            self.end_load(ok=True)
        for node, tier in self.locked:
            self.tree.unlock(node, tier)
        self.tree.check()
        self.lives.look()
        for tier in Tier:
            while (node := self.tree.victim(FULL, tier)) is not None:
                self.drop(node, FULL, tier)
        assert self.tree.num_nodes == 0 and not any(self.protected())
        assert not any(self.held.values()), "what left the tree was not released"
        self.tree.check()
        self.edges.update(self.lives.seen)


def test_components_against_dicts() -> None:
    """No run of the machine finds a difference, and the runs take edges of the table of states alone."""
    run_state_machine_as_test(ComponentsAgainstDicts, settings=settings(max_examples=200, stateful_step_count=40))
    assert ComponentsAgainstDicts.edges <= EDGES | DROPPED


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_components_against_dicts_for_long() -> None:
    """The same machine over many more and longer runs."""
    many = settings(max_examples=3000, stateful_step_count=60, derandomize=False)
    run_state_machine_as_test(ComponentsAgainstDicts, settings=many)


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
