"""Windows and states in the radix tree, on both tiers, against plain dictionaries of prefixes."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
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

from hicache.tiers import DEVICE, FULL, HOST, MAMBA, SWA, Tier
from hicache.tree import NodeRun, PageState, Released
from page_life import DROPPED, EDGES, Edge
from tree_case import ComponentDicts, Copies

SPACES = st.sampled_from(["", "tenant"])
KINDS = {"full": (), "swa": (SWA,), "mamba": (MAMBA,), "both": (SWA, MAMBA)}
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
ASKED = st.lists(st.integers(0, 2), max_size=7)


class ComponentsAgainstDicts(ComponentDicts, RuleBasedStateMachine):
    """What the tree holds of each component on each tier, and how far a prefix can be used, is what dictionaries of
    prefixes say; every page goes along the table of states."""

    edges: ClassVar[set[Edge]] = set()  # that the pages of all runs took

    @initialize(page=st.sampled_from([1, 4, 16, 64]), window_pages=st.integers(1, 3), kind=st.sampled_from(list(KINDS)))
    def build(self, page: int, window_pages: int, kind: str) -> None:
        self.make_tree(page, window_pages, *KINDS[kind])

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
        theirs = {dup.start + at: slot for dup in result.duplicates for at, slot in enumerate(dup.value.tolist())}
        full, windows = self.held[FULL, DEVICE], self.held[SWA, DEVICE]
        for at, prefix in enumerate(all_prefixes[:accepted]):
            first = at * self.page
            was_there = prefix in full
            assert theirs.get(first) == full.get(prefix)
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

    @rule(space=SPACES, pages=ASKED)
    def match(self, space: str, pages: list[int]) -> None:
        """Of what was asked for and of the last prompt, up to any limit, also within a node."""
        for at in ((space, pages), *self.prompts[-1:]):
            match = self.matched(*at)
            assert match.full_len == self.full_len(*at) * self.page
            for on_host in (False, True):
                best = 0
                for end in range(match.full_len // self.page + 1):
                    best = end if end and self.usable(*at, end, on_host) else best
                    assert self.tree.usable_len(match, end * self.page, on_host) == best * self.page

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 3), end=st.integers(1, 6))
    def split(self, which: int, end: int) -> None:
        """A request that shares the first pages of a prompt cuts the node that they end in, copies in flight or not."""
        match = self.matched(*self.prompt(which, end))
        self.tree.node_at(match, match.full_len)

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 3), end=st.integers(1, 6))
    def begin_backup(self, which: int, end: int) -> None:
        """What only the device holds of a path starts on its way to the host, each component by itself."""
        match = self.matched(*self.prompt(which, end))
        if not match.device_len:
            return
        node = self.tree.node_at(match, match.device_len)
        fresh = list(itertools.takewhile(lambda at: at.state is PageState.DEVICE, node.path()))[::-1]
        copy = Copies(fresh or [node])
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
        load = Copies([node])
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
                    assert not (self.swa and node.holds(SWA, DEVICE)), "windows share the slots that left"
            assert not load.ids.get(FULL), "pages of a load that no node waits for"
            for node in [] if ok else load.runs[SWA].nodes:
                if node.holds(SWA, DEVICE):
                    self.forget(self.tree.detach(node, SWA, DEVICE))
            for run in load.runs.values():
                run.detach()
            self.tree.unlock(load.nodes[0], DEVICE)
            self.tree.unlock(load.nodes[0], HOST)

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

    @rule(space=SPACES, pages=ASKED)
    def expect(self, space: str, pages: list[int]) -> None:
        """A queued request expects what is held of its prefix."""
        match = self.matched(space, pages)
        self.expected.append(self.tree.expect(self.tree.node_at(match, match.full_len)))

    @precondition(lambda self: self.expected)
    @rule(which=st.integers(0, 100))
    def forget_one(self, which: int) -> None:
        self.tree.forget(self.expected.pop(which % len(self.expected)))

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

    @invariant()
    def consistent(self) -> None:
        if not self.held or not getattr(self, "tree", None):
            return
        self.tree.check()
        self.lives.look()
        for (name, tier), held in self.contents().items():
            assert held == self.held[name, tier], (name, tier)

    def teardown(self) -> None:
        """Everything can be unlocked and evicted, to the last node."""
        if not getattr(self, "tree", None):
            return
        for ok in (False, True):  # ends of copies, which few runs draw
            if self.prompts:
                self.begin_backup(0, 6)
            while self.backups:
                self.consistent()
                self.end_backup(ok, ok)
            self.consistent()
            if self.prompts:
                self.drop_copies(DEVICE)
                self.consistent()
                self.begin_load(0, 6)
            while self.loads:
                self.consistent()
                self.end_load(ok)
            self.consistent()
        for node, tier in self.locked:
            self.tree.unlock(node, tier)
        for expectation in self.expected:
            self.tree.forget(expectation)
        holdings = [holding for node in self.tree.nodes() for pair in node.holdings.values() for holding in pair]
        assert not any(holding.locks or holding.expected for holding in holdings)
        self.tree.check()
        self.lives.look()
        for tier in Tier:
            while (node := self.tree.victim(FULL, tier)) is not None:
                self.drop(node, FULL, tier)
        assert self.tree.num_nodes == 0 and not any(self.protected())
        assert not any(self.held.values()), "what left the tree was not released"
        self.tree.check()
        self.edges.update(self.lives.seen)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("factor", [8, pytest.param(20, marks=pytest.mark.long)])
def test_components_against_dicts(factor: int) -> None:
    """No run of the machine finds a difference, and the runs take each edge of the table of states, and no other."""
    many = settings(max_examples=factor * settings.default.max_examples, stateful_step_count=40)
    run_state_machine_as_test(ComponentsAgainstDicts, settings=many)
    assert ComponentsAgainstDicts.edges == EDGES | DROPPED
