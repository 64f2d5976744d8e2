"""Windows and states in the radix tree, against plain dictionaries of prefixes."""

from __future__ import annotations

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

from hicache.tiers import FULL, MAMBA, SWA
from hicache.tree import NodeRun, Released
from tree_case import ComponentDicts, LoadInFlight

SPACES = st.sampled_from(["", "tenant"])
KINDS = {"full": (), "swa": (SWA,), "mamba": (MAMBA,), "both": (SWA, MAMBA)}
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
ASKED = st.lists(st.integers(0, 2), max_size=7)


class ComponentsAgainstDicts(ComponentDicts, RuleBasedStateMachine):
    """What the tree holds of each component, and how far a prefix can be used, is what dictionaries of prefixes say."""

    @initialize(page=st.sampled_from([1, 4, 16, 64]), window_pages=st.integers(1, 3), kind=st.sampled_from(list(KINDS)))
    def build(self, page: int, window_pages: int, kind: str) -> None:
        self.make_tree(page, window_pages, *KINDS[kind])

    @rule(space=SPACES, pages=PROMPTS, unmapped=st.integers(0, 6), keep=st.booleans())
    def insert(self, space: str, pages: list[int], unmapped: int, keep: bool) -> None:
        """A request commits: the first `unmapped` pages have lost their windows; with `keep`, a state of the end."""
        tokens, slots = self.tokens(pages), self.ids(len(pages) * self.page)
        unmapped = min(unmapped, len(pages) - 1)
        window_from = unmapped * self.page if self.swa else None
        result = self.tree.insert(self.tree.root, tokens, slots, space, window_from)
        self.prompts.append((space, pages))
        all_prefixes = self.prefixes(space, pages)
        accepted = self.accepted(all_prefixes)
        assert result.accepted_len == accepted * self.page
        adopted = {at for start, end in result.adopted for at in range(start, end)}
        theirs = dict(enumerate(result.existing.tolist()))
        full, windows = self.held[FULL], self.held[SWA]
        for at, prefix in enumerate(all_prefixes[:accepted]):
            first = at * self.page
            was_there = prefix in full
            assert theirs.get(first) == full.get(prefix)
            full.setdefault(prefix, int(slots[first]))
            if self.swa and at >= unmapped:
                assert (first in adopted) == (was_there and prefix not in windows)
                windows[prefix] = full[prefix]
        if self.mamba and accepted == len(pages) and (keep or not result.node.children):
            self.attach(result.node, MAMBA)

    @rule(space=SPACES, pages=ASKED)
    def match(self, space: str, pages: list[int]) -> None:
        """Of what was asked for and of the last prompt, up to any limit, also within a node."""
        for at in ((space, pages), *self.prompts[-1:]):
            match = self.matched(*at)
            assert match.full_len == self.full_len(*at) * self.page
            best = 0
            for end in range(match.full_len // self.page + 1):
                best = end if end and self.usable(*at, end) else best
                assert self.tree.usable_len(match, end * self.page) == best * self.page

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 3), end=st.integers(1, 6))
    def split(self, which: int, end: int) -> None:
        """A request that shares the first pages of a prompt cuts the node that they end in, copies in flight or not."""
        match = self.matched(*self.prompt(which, end))
        self.tree.node_at(match, match.full_len)

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 3), end=st.integers(1, 6))
    def begin_load(self, which: int, end: int) -> None:
        """What the device lacks of a prompt starts on its way there: full pages, and the last window to the same
        slots."""
        space, pages = self.prompt(which, end)
        match = self.matched(space, pages)
        node, start = self.tree.node_at(match, match.full_len), match.full_len // self.page
        rest = self.prefixes(space, pages)[start:]
        load = LoadInFlight(node, rest)
        if rest:
            slots = self.ids(len(rest) * self.page)
            inserted = self.tree.insert(node, self.tokens(pages)[match.full_len :], slots, space)
            self.held[FULL].update(zip(rest, slots[:: self.page].tolist(), strict=True))
            load.runs[FULL], load.node = NodeRun(list(inserted.gained), FULL), inserted.node
        windows = list(self.windows.required_nodes(load.node))[::-1] if self.swa else []
        windows = [at for at in windows if not at.has(SWA)]
        for at in windows:
            self.tree.attach(at, SWA, at.value_of(FULL))
            self.note(at, SWA, at.value_of(SWA)[:: self.page])
        load.runs[SWA] = NodeRun(windows, SWA)
        self.tree.lock(load.node)
        self.loads.append(load)

    @precondition(lambda self: self.loads)
    @rule(ok=st.booleans())
    def end_load(self, ok: bool) -> None:
        """The oldest load arrives; or it fails, and with it those after it, which may continue its nodes: what it
        brought leaves the tree, locked or not."""
        ended = self.loads[:1] if ok else self.loads[::-1]
        self.loads = self.loads[1:] if ok else []
        for load in ended:
            own = load.runs[FULL].nodes if FULL in load.runs else []
            assert {prefix for node in own for prefix in self.pages_of(node, FULL)} == load.prefixes
            for node in [] if ok else load.runs[SWA].nodes:
                if node not in own and node.has(SWA):
                    self.forget(self.tree.detach(node, SWA))
            for node in [] if ok else reversed(own):
                self.forget(Released(FULL, self.tree.fail_load(node), node.num_tokens))
                assert not (self.swa and node.has(SWA)), "windows share the slots that left"
            for run in load.runs.values():
                run.detach()
            self.tree.unlock(load.node)

    @rule(space=SPACES, pages=ASKED, limit=st.integers(0, 6))
    def lock(self, space: str, pages: list[int], limit: int) -> None:
        match = self.matched(space, pages)
        node = self.tree.node_at(match, self.tree.usable_len(match, min(limit * self.page, match.full_len)))
        self.tree.lock(node)
        self.locked.append(node)

    @precondition(lambda self: self.locked)
    @rule(which=st.integers(0, 100), space=SPACES, pages=ASKED)
    def move_lock(self, which: int, space: str, pages: list[int]) -> None:
        old = self.locked.pop(which % len(self.locked))
        match = self.matched(space, pages)
        new = self.tree.node_at(match, self.tree.usable_len(match, match.full_len))
        self.tree.move_lock(old, new)
        self.locked.append(new)

    @precondition(lambda self: self.locked)
    @rule(which=st.integers(0, 100))
    def unlock(self, which: int) -> None:
        self.tree.unlock(self.locked.pop(which % len(self.locked)))

    @rule(space=SPACES, pages=ASKED)
    def expect(self, space: str, pages: list[int]) -> None:
        """A queued request expects what is held of its prefix."""
        match = self.matched(space, pages)
        self.expected.append(self.tree.expect(self.tree.node_at(match, match.full_len)))

    @precondition(lambda self: self.expected)
    @rule(which=st.integers(0, 100))
    def forget_one(self, which: int) -> None:
        self.tree.forget(self.expected.pop(which % len(self.expected)))

    @rule(which=st.integers(0, 5), keep=st.integers(0, 3), num_pages=st.none() | st.integers(1, 3))
    def evict(self, which: int, keep: int, num_pages: int | None) -> None:
        """The next victim goes: of full pages whole or from its end, of windows whole or from its front."""
        component = self.names[which % len(self.names)]
        num_tokens = num_pages * self.page if num_pages and component == FULL else None
        node = self.tree.victim(component, num_tokens)
        if node is None:
            return
        assert num_tokens is None or self.mamba or node.num_tokens <= num_tokens
        keep = min(keep * self.page, node.num_tokens - self.page)
        if keep and component == SWA:
            node = self.tree.split_prefix(node, keep)
        protected = self.protected()
        self.drop(node, component)
        assert self.protected() == protected, "eviction took what is locked"

    @invariant()
    def consistent(self) -> None:
        if not self.held or not getattr(self, "tree", None):
            return
        self.tree.check()
        for name, held in self.contents().items():
            assert held == self.held[name], name

    def teardown(self) -> None:
        """Everything can be unlocked and evicted, to the last node."""
        if not getattr(self, "tree", None):
            return
        for ok in (False, True):  # ends of loads, which few runs draw
            if self.prompts:
                self.begin_load(0, 6)
            while self.loads:
                self.consistent()
                self.end_load(ok)
            self.consistent()
        for node in self.locked:
            self.tree.unlock(node)
        for expectation in self.expected:
            self.tree.forget(expectation)
        holdings = [holding for node in self.tree.nodes() for holding in node.holdings.values()]
        assert not any(holding.locks or holding.expected for holding in holdings)
        self.tree.check()
        while (victim := self.tree.victim(FULL)) is not None:
            self.drop(victim, FULL)
        assert self.tree.num_nodes == 0 and not any(self.protected())
        assert not any(self.held.values()), "what left the tree was not released"
        self.tree.check()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("factor", [4, pytest.param(20, marks=pytest.mark.long)])
def test_components_against_dicts(factor: int) -> None:
    """No run of the machine finds a difference."""
    many = settings(max_examples=factor * settings.default.max_examples, stateful_step_count=40)
    run_state_machine_as_test(ComponentsAgainstDicts, settings=many)
