"""Windows and states in the radix tree, on both tiers, against plain dictionaries of prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

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
from hicache.tree import Component, MambaRules, PageHasher, Place, RadixTree, Released, SwaRules, Tier, TreeNode
from hicache.tree.base import Match
from hicache.tree.key import pack_tokens
from hicache.tree.node import PageState, Span

Prefix = tuple[str, tuple[int, ...]]
SPACES = st.sampled_from(["", "tenant"])
PLACES = {"swa": (2, 3), "mamba": (4, 5), "both": (2, 3, 4, 5)}
KINDS = st.sampled_from(list(PLACES))
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
ASKED = st.lists(st.integers(0, 2), max_size=7)
PAIRED = (Place.FULL_DEVICE, Place.SWA_DEVICE)


class _Flight:
    """Copies that began together, of a run of `nodes`: where each prefix goes, and the spans that follow its nodes."""

    def __init__(self, nodes: list[TreeNode]) -> None:
        self.nodes = tuple(nodes)
        self.ids: dict[Component, dict[Prefix, int]] = {}
        self.spans: dict[Component, Span] = {}

    def note(self, component: Component, ids: Iterable[tuple[Prefix, int]]) -> None:
        self.ids.setdefault(component, {}).update(ids)


class ComponentsAgainstDicts(RuleBasedStateMachine):
    """What the tree holds at each place, and how far a prefix can be used, is what dictionaries of prefixes say."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[Place, dict[Prefix, int]] = {place: {} for place in Place}
        self.locked: list[tuple[TreeNode, Tier]] = []
        self.prompts: list[tuple[str, list[int]]] = []  # that were committed
        self.backups: list[_Flight] = []  # in flight, oldest first
        self.loads: list[_Flight] = []
        self.next_id = 1

    @initialize(
        page=st.sampled_from([1, 4, 16, 64]), window_pages=st.integers(1, 3), kind=st.sampled_from(list(PLACES))
    )
    def build(self, page: int, window_pages: int, kind: str) -> None:
        self.page, self.places = page, [Place.FULL_DEVICE, Place.FULL_HOST, *map(Place, PLACES[kind])]
        self.window = max(1, window_pages * page - page // 2)
        swa, mamba = kind in ("swa", "both"), kind in ("mamba", "both")
        self.rules = [*([SwaRules(self.window, page)] if swa else []), *([MambaRules()] if mamba else [])]
        self.swa, self.mamba = swa, mamba
        self.tree = RadixTree(page, PageHasher(b"identity", page), self.rules)

    def tokens(self, pages: list[int]) -> np.ndarray:
        """Each number as a page of its own."""
        return pack_tokens(np.repeat(np.asarray(pages, dtype=np.int64), self.page))

    def prefixes(self, space: str, pages: list[int]) -> list[Prefix]:
        return [(space, tuple(pages[: end + 1])) for end in range(len(pages))]

    def ids(self, count: int) -> torch.Tensor:
        made = torch.arange(self.next_id, self.next_id + count)
        self.next_id += count
        return made

    @rule(
        space=SPACES,
        pages=PROMPTS,
        bare=st.integers(0, 6),
        keep=st.booleans(),
    )
    def insert(self, space: str, pages: list[int], bare: int, keep: bool) -> None:
        """A request commits: the first `bare` pages have lost their windows; with `keep`, a state of the end."""
        tokens, slots = self.tokens(pages), self.ids(len(pages) * self.page)
        bare = min(bare, len(pages) - 1)
        window_from = bare * self.page if self.swa else None
        result = self.tree.insert(self.tree.root, tokens, slots, Tier.DEVICE, space, window_from)
        self.prompts.append((space, pages))
        all_prefixes = self.prefixes(space, pages)
        spans = [span for load in self.loads for span in load.spans.values()]
        in_flight = {prefix for span in spans for node in span.nodes for prefix in self.pages_of(node, Component.FULL)}
        accepted = next((i for i, prefix in enumerate(all_prefixes) if prefix in in_flight), len(pages))
        assert result.accepted_len == accepted * self.page
        adopted = {at for dup in result.duplicates if dup.adopts_window for at in range(dup.start, dup.end)}
        full, windows = self.held[Place.FULL_DEVICE], self.held[Place.SWA_DEVICE]
        for at, prefix in enumerate(all_prefixes[:accepted]):
            first = at * self.page
            was_there = prefix in full
            full.setdefault(prefix, int(slots[first]))
            if self.swa and at >= bare:
                assert (first in adopted) == (was_there and prefix not in windows)
                windows[prefix] = full[prefix]
        if self.mamba and accepted == len(pages) and (keep or not result.node.children):
            state = self.ids(1)
            end = all_prefixes[-1]
            assert self.tree.attach(result.node, Place.MAMBA_DEVICE, state) == (
                end not in self.held[Place.MAMBA_DEVICE]
            )
            self.held[Place.MAMBA_DEVICE].setdefault(end, int(state))

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
        held = [
            p in self.held[Place.FULL_DEVICE] or p in self.held[Place.FULL_HOST] for p in self.prefixes(space, pages)
        ]
        return held.index(False) if False in held else len(held)

    def usable(self, space: str, pages: list[int], end: int, on_host: bool) -> bool:
        def has(component: Component, prefix: Prefix) -> bool:
            tiers = (Tier.DEVICE, Tier.HOST) if on_host else (Tier.DEVICE,)
            return any(prefix in self.held[Place.of(component, tier)] for tier in tiers)

        prefixes = self.prefixes(space, pages)[:end]
        start = max(0, end * self.page - self.window) // self.page
        windows = not self.swa or all(has(Component.SWA, p) for p in prefixes[start:])
        return windows and (not self.mamba or has(Component.MAMBA, prefixes[-1]))

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 3), end=st.integers(1, 6))
    def split(self, which: int, end: int) -> None:
        """A request that shares the first pages of a prompt cuts the node that they end in, copies in flight or not."""
        match = self.matched(*self.prompt(which, end))
        self.tree.node_at(match, match.full_len)

    def prompt(self, which: int, end: int = 6) -> tuple[str, list[int]]:
        """The first pages of one of the prompts that were committed last."""
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
        copy = _Flight(fresh or [node])
        for component in sorted({place.component for place in self.places}):
            device, host = Place.of(component, Tier.DEVICE), Place.of(component, Tier.HOST)
            nodes = [
                at for at in copy.nodes if at.holds(device) and not at.holds(host) and at.pending[component] is None
            ]
            for at in nodes:
                ids = self.ids(1 if component is Component.MAMBA else at.num_tokens // self.page)
                self.tree.begin_backup(at, ids, component)
                copy.note(component, zip(self.pages_of(at, component), ids.tolist(), strict=True))
            copy.spans[component] = Span(nodes, component, Tier.HOST)
        for at in copy.nodes:
            self.tree.lock(at, Tier.DEVICE)
            self.tree.lock(at, Tier.HOST)
        self.backups.append(copy)

    @precondition(lambda self: self.backups)
    @rule(ok=st.booleans())
    def end_backup(self, ok: bool) -> None:
        """The oldest backup arrives, or fails: the pages of each prefix are where its copy wrote, however its node was
        split since; nothing counts as held whose parent does not."""
        copy = self.backups.pop(0)
        for component, span in copy.spans.items():
            host = Place.of(component, Tier.HOST)
            for node in span.nodes:
                below = node.parent if component is Component.FULL else node
                stands = below is not None and (below.is_root or below.holds(Tier.HOST))
                prefixes = list(self.pages_of(node, component))
                want = [copy.ids[component].pop(prefix) for prefix in prefixes]
                back = self.tree.end_backup(node, ok, component)
                assert (back is None) == (ok and stands)
                assert (node.held(host) if back is None else back).tolist() == want
                if back is None:
                    self.held[host].update(zip(prefixes, want, strict=True))
            assert not copy.ids.get(component), "pages of a copy that no node waits for"
            span.leave()
        for node in copy.nodes:
            self.tree.unlock(node, Tier.HOST)
            self.tree.unlock(node, Tier.DEVICE)

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 3), end=st.integers(1, 6))
    def begin_load(self, which: int, end: int) -> None:
        """What only the host holds of a usable prefix starts on its way to the device: full pages, and windows to the
        same slots."""
        match = self.matched(*self.prompt(which, end))
        node = self.tree.node_at(match, self.tree.usable_len(match, match.full_len, on_host=True))
        lacking = [at for at in node.path() if not at.holds(Tier.DEVICE)][::-1]
        windows = [at for rules in self.rules if isinstance(rules, SwaRules) for at in rules.reach(node)][::-1]
        windows = [at for at in windows if not at.holds(Place.SWA_DEVICE)]
        if not lacking and not windows:
            return
        load = _Flight([node])
        self.tree.lock(node, Tier.HOST)
        for at in lacking:
            slots = self.ids(at.num_tokens)
            self.tree.begin_load(at, slots)
            self.note(at, Place.FULL_DEVICE, slots[:: self.page])
            load.note(Component.FULL, ((prefix, 0) for prefix in self.pages_of(at, Component.FULL)))
        for at in windows:
            self.tree.attach(at, Place.SWA_DEVICE, at.held(Tier.DEVICE))
            self.note(at, Place.SWA_DEVICE, at.held(Tier.DEVICE)[:: self.page])
        self.tree.lock(node, Tier.DEVICE)
        load.spans = {
            Component.FULL: Span(lacking, Component.FULL, Tier.DEVICE),
            Component.SWA: Span(windows, Component.SWA, Tier.DEVICE),
        }
        self.loads.append(load)

    @precondition(lambda self: self.loads)
    @rule(ok=st.booleans())
    def end_load(self, ok: bool) -> None:
        """The oldest load arrives; or it fails, and with it those after it, which may stand on its nodes."""
        ended = self.loads[:1] if ok else self.loads[::-1]
        self.loads = self.loads[1:] if ok else []
        for load in ended:
            for node in reversed(load.spans[Component.FULL].nodes):
                prefixes = list(self.pages_of(node, Component.FULL))
                for prefix in prefixes:
                    del load.ids[Component.FULL][prefix]
                slots = self.tree.end_load(node, ok)
                assert (slots is None) == ok
                if slots is not None:
                    assert slots[:: self.page].tolist() == [self.held[Place.FULL_DEVICE].pop(at) for at in prefixes]
                    for prefix in prefixes:
                        self.held[Place.SWA_DEVICE].pop(prefix, None)
            assert not load.ids.get(Component.FULL), "pages of a load that no node waits for"
            for node in [] if ok else load.spans[Component.SWA].nodes:
                if node.holds(Place.SWA_DEVICE):
                    self.forget(self.tree.detach(node, Place.SWA_DEVICE))
            for span in load.spans.values():
                span.leave()
            self.tree.unlock(load.nodes[0], Tier.DEVICE)
            self.tree.unlock(load.nodes[0], Tier.HOST)

    def matched(self, space: str, pages: list[int]) -> Match:
        return self.tree.match(self.tokens(pages), space)

    def note(self, node: TreeNode, place: Place, ids: torch.Tensor) -> None:
        for prefix, value in zip(self.pages_of(node, place.component), ids.tolist(), strict=True):
            self.held[place][prefix] = value

    def pages_of(self, node: TreeNode, component: Component) -> Iterator[Prefix]:
        """The prefixes that a node's pages end, or that its state belongs to."""
        tokens = np.concatenate([at.run.tokens for at in reversed(list(node.path())) if at.run is not None])
        pages = tokens[:: self.page].tolist()
        first = len(pages) - (1 if component is Component.MAMBA else node.num_tokens // self.page)
        return iter(self.prefixes(node.namespace, pages)[first:])

    @rule(
        space=SPACES,
        pages=ASKED,
        limit=st.integers(0, 6),
        tier=st.sampled_from(list(Tier)),
    )
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

    @rule()
    def demote(self) -> None:
        """All that the host holds too, and nobody needs, leaves the device."""
        while (node := self.tree.victim(Place.FULL_DEVICE)) is not None and node.holds(Tier.HOST):
            for released in self.tree.drop(node, Place.FULL_DEVICE):
                self.forget(released)

    @rule(which=st.integers(0, 5), keep=st.integers(0, 3))
    def evict(self, which: int, keep: int) -> None:
        place = self.places[which % len(self.places)]
        node = self.tree.victim(place)
        if node is None:
            return
        keep = min(keep * self.page, node.num_tokens - self.page)
        if keep and place.component is Component.SWA:
            node = self.tree.cut_head(node, keep)
        protected = self.protected()
        for released in self.tree.drop(node, place):
            self.forget(released)
        assert self.protected() == protected, "eviction took what is locked"

    def protected(self) -> list[int]:
        return [self.tree.protected(place) for place in self.places]

    def forget(self, released: Released) -> None:
        ids = released.value[:: self.page] if released.place in PAIRED else released.value
        gone = set(ids.tolist())
        kept = {p: v for p, v in self.held[released.place].items() if v not in gone}
        assert len(kept) == len(self.held[released.place]) - len(gone), "released what was not held"
        self.held[released.place] = kept
        if released.place is Place.FULL_DEVICE:  # their window slots go with them
            windows = self.held[Place.SWA_DEVICE]
            self.held[Place.SWA_DEVICE] = {p: v for p, v in windows.items() if v not in gone}

    @invariant()
    def consistent(self) -> None:
        if not self.held or not getattr(self, "tree", None):
            return
        self.tree.check()
        for place in self.places:
            values = [v[:: self.page] if place in PAIRED else v for v in self.tree.values(place)]
            assert sorted(i for v in values for i in v.tolist()) == sorted(self.held[place].values()), place.name

    def teardown(self) -> None:
        """Everything can be unlocked and evicted, to the last node."""
        if not getattr(self, "tree", None):
            return
        while self.backups:
            self.end_backup(ok=False)
        while self.loads:
            self.end_load(ok=True)
        for node, tier in self.locked:
            self.tree.unlock(node, tier)
        self.tree.check()
        for place in (Place.FULL_DEVICE, Place.FULL_HOST):
            while (node := self.tree.victim(place)) is not None:
                self.tree.drop(node, place)
        assert self.tree.num_nodes == 0 and not any(self.tree.protected(place) for place in self.places)
        self.tree.check()


TestComponentsAgainstDicts = ComponentsAgainstDicts.TestCase
TestComponentsAgainstDicts.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@pytest.mark.long
def test_components_against_dicts_for_long() -> None:
    """The same machine over many more and longer runs."""
    many = settings(max_examples=3000, stateful_step_count=60, derandomize=False)
    run_state_machine_as_test(ComponentsAgainstDicts, settings=many)


def tree_of(*rules: SwaRules | MambaRules, page: int = 1) -> RadixTree:
    return RadixTree(page, PageHasher(b"identity", page), rules)


def test_a_window_lock_survives_splits() -> None:
    """A node that splits under a window lock is unlocked whole, however the lock's window lies."""
    tree = tree_of(SwaRules(3, 1))
    node = tree.insert(tree.root, np.arange(10), torch.arange(1, 11), Tier.DEVICE, window_from=0).node
    tree.lock(node, Tier.DEVICE)
    for length in (5, 8, 2):
        tree.node_at(tree.match(np.arange(10)), length)
    assert tree.protected(Place.SWA_DEVICE) == 10
    tree.unlock(node, Tier.DEVICE)
    tree.check()
    tree.lock(node, Tier.DEVICE)
    assert tree.protected(Place.SWA_DEVICE) == 5  # [5, 8) and [8, 10): the last three tokens lie in both
    tree.unlock(node, Tier.DEVICE)
    assert tree.protected(Place.SWA_DEVICE) == 0


def test_a_state_that_comes_under_a_lock_is_protected() -> None:
    """A lock at a node without a state protects the state it gets, and is undone without a remainder."""
    tree = tree_of(MambaRules())
    node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5), Tier.DEVICE).node
    tree.lock(node, Tier.DEVICE)
    assert tree.attach(node, Place.MAMBA_DEVICE, torch.tensor([1]))
    assert tree.victim(Place.MAMBA_DEVICE) is None and tree.protected(Place.MAMBA_DEVICE) == 1
    tree.unlock(node, Tier.DEVICE)
    assert tree.victim(Place.MAMBA_DEVICE) is node and tree.evictable(Place.MAMBA_DEVICE) == 1
    tree.check()


def test_a_split_leaves_the_state_at_its_end() -> None:
    """The front half of a node never answers with the state of the whole."""
    tree = tree_of(MambaRules())
    node = tree.insert(tree.root, np.arange(8), torch.arange(1, 9), Tier.DEVICE).node
    tree.attach(node, Place.MAMBA_DEVICE, torch.tensor([5]))
    upper = tree.node_at(tree.match(np.arange(8)), 3)
    assert not upper.holds(Place.MAMBA_DEVICE) and node.held(Place.MAMBA_DEVICE).tolist() == [5]
    match = tree.match(np.arange(7))
    assert match.full_len == 7 and tree.usable_len(match, 7, on_host=False) == 0


def test_eviction_demotes_where_the_host_has_a_copy() -> None:
    """A leaf's state leaves the device alone when the host has it, and takes the leaf along when nobody has."""
    for backed_up in (True, False):
        tree = tree_of(MambaRules())
        node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5), Tier.DEVICE).node
        tree.attach(node, Place.MAMBA_DEVICE, torch.tensor([7]))
        if backed_up:
            tree.begin_backup(node, torch.arange(11, 15))
            tree.begin_backup(node, torch.tensor([9]), Component.MAMBA)
            assert tree.end_backup(node, True) is None and tree.end_backup(node, True, Component.MAMBA) is None
        released = {(r.place, tuple(r.value.tolist())) for r in tree.drop(node, Place.MAMBA_DEVICE)}
        match = tree.match(np.arange(4))
        if backed_up:
            assert released == {(Place.MAMBA_DEVICE, (7,))}
            assert tree.usable_len(match, 4, on_host=True) == 4 and tree.usable_len(match, 4, on_host=False) == 0
        else:
            assert released == {(Place.MAMBA_DEVICE, (7,)), (Place.FULL_DEVICE, (1, 2, 3, 4))}
            assert match.full_len == 0 and tree.num_nodes == 0
        tree.check()


def test_tombstone_ancestors_leave_with_their_last_child() -> None:
    """Inner nodes that lost their states go when the leaf below them goes; one that has a state stays."""
    tree = tree_of(MambaRules())
    node = tree.root
    for at in range(4):
        tokens = np.arange(at * 2, at * 2 + 2)
        node = tree.insert(node, tokens, torch.arange(1, 3) + at * 2, Tier.DEVICE).node
        tree.attach(node, Place.MAMBA_DEVICE, torch.tensor([at + 1]))
    inner = [at for at in node.path() if at is not node]
    for at in inner[:2]:
        tree.drop(at, Place.MAMBA_DEVICE)
    released = [r.num_tokens for r in tree.drop(node, Place.FULL_DEVICE) if r.place is Place.FULL_DEVICE]
    assert released == [2, 2, 2] and [at.depth_tokens for at in tree.nodes()] == [2]
    tree.check()


def test_a_lock_on_the_other_tier_keeps_nothing() -> None:
    """A node that only the device holds goes when it is evicted, though someone has locked it on the host."""
    tree = tree_of(SwaRules(1, 1))
    node = tree.insert(tree.root, np.arange(3), torch.arange(1, 4), Tier.DEVICE, window_from=0).node
    tree.lock(node, Tier.HOST)
    tree.drop(node, Place.FULL_DEVICE)
    assert tree.num_nodes == 0
    tree.unlock(node, Tier.HOST)
    tree.check()


def test_check_finds_planted_faults() -> None:
    """A window or state without its pages, a stale window, and a wrong count of children are each named."""
    tree = tree_of(SwaRules(2, 1), MambaRules())
    node = tree.insert(tree.root, np.arange(4), torch.arange(1, 5), Tier.DEVICE, window_from=0).node
    tree.attach(node, Place.MAMBA_DEVICE, torch.tensor([1]))
    tree.check()
    faults = [
        ("SWA_HOST where it does not hold FULL", Place.SWA_HOST, torch.arange(4)),
        ("window slots of other slots", Place.SWA_DEVICE, torch.arange(4) + 50),
        ("2 MAMBA_DEVICE elements", Place.MAMBA_DEVICE, torch.tensor([1, 2])),
    ]
    for message, place, value in faults:
        kept, node.values[place] = node.values[place], value
        with pytest.raises(InvariantError, match=message):
            tree.check()
        node.values[place] = kept
    tree.root.children_held[Tier.DEVICE] += 1
    node.locks[Place.MAMBA_DEVICE] += 1
    with pytest.raises(InvariantError, match="more MAMBA locks than FULL ones"):
        tree.check()
