"""Sharing against plain dictionaries of prefixes: what the tree lacked, what it held before, and what is donated."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.tree import (
    DEVICE,
    FULL,
    HOST,
    MAMBA,
    SWA,
    MambaComponent,
    NodeRun,
    PageHasher,
    RadixTree,
    Shared,
    SwaComponent,
    TreeNode,
    share,
)
from hicache.tree.key import Tokens, pack_tokens

Prefix = tuple[str, tuple[int, ...]]
VERBS = ["commit", "commit", "commit", "prefetch", "load", "load_ends", "evict"]
EVENTS = st.tuples(
    st.sampled_from(VERBS),
    st.sampled_from(["", "tenant"]),
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
    st.integers(0, 5),
    st.integers(0, 5),
)


class Requests:
    """Requests that share what they computed through one tree, and what it has to hold on the device after each.

    `slots[prefix]`: of the last page of a prefix; `windows`: prefixes whose last page has window slots;
    `states[prefix]`: at the end of a prefix; `loads`: in flight, each with the node where it ends.
    """

    def __init__(self, page: int) -> None:
        self.page = page
        self.tree = RadixTree(page, PageHasher(b"identity", page), [SwaComponent(page, page), MambaComponent()])
        self.slots: dict[Prefix, tuple[int, ...]] = {}
        self.windows: set[Prefix] = set()
        self.states: dict[Prefix, int] = {}
        self.loads: list[tuple[NodeRun, TreeNode, set[Prefix]]] = []
        self.seen: set[str] = set()
        self.next_id = 1

    def commit(self, space: str, pages: list[int], known: int, unmapped: int) -> None:
        """A request shares the pages after the `known` ones that it was admitted with; the first `unmapped` of them
        have lost their windows."""
        match = self.tree.match(self.tokens(pages), space)
        known = min(known, match.device_len // self.page)
        if known == len(pages):
            return
        node, tokens = self.tree.node_at(match, known * self.page), self.tokens(pages[known:])
        offered, state, before = self.ids(len(tokens)), self.ids(1), self.held()
        shared = share(self.tree, node, tokens, offered, space, unmapped * self.page, {MAMBA: state})
        self._compare(shared, self.prefixes(space, pages)[known:], offered, int(state), unmapped)
        assert shared.node.depth_tokens == known * self.page + shared.accepted_len
        given_up = set(shared.ours.tolist()) | set(offered[shared.accepted_len :].tolist())
        assert self.held() - before == set(offered.tolist()) - given_up, "each slot is the tree's or the request's"
        offered += 1_000_000  # the caller's memory is not the tree's
        state += 1_000_000

    def _compare(
        self, shared: Shared, prefixes: list[Prefix], offered: torch.Tensor, state: int, unmapped: int
    ) -> None:
        loading = set[Prefix]().union(*(coming for _, _, coming in self.loads))
        accepted = next((at for at, prefix in enumerate(prefixes) if prefix in loading), len(prefixes))
        assert shared.accepted_len == accepted * self.page
        theirs, ours, adopted = list[int](), list[int](), list[tuple[int, int]]()
        for at, prefix in enumerate(prefixes[:accepted]):
            own = tuple(offered[at * self.page : (at + 1) * self.page].tolist())
            if prefix in self.slots:
                theirs += self.slots[prefix]
                ours += own
                if at >= unmapped and prefix not in self.windows:
                    adopted += zip(own, self.slots[prefix], strict=True)
            self.slots.setdefault(prefix, own)
            if at >= unmapped:
                self.windows.add(prefix)
        assert shared.theirs.tolist() == theirs and shared.ours.tolist() == ours
        pairs = [zip(own.tolist(), held.tolist(), strict=True) for own, held in shared.adopted]
        assert list(itertools.chain(*pairs)) == adopted
        donated = accepted == len(prefixes) and prefixes[-1] not in self.states
        assert shared.refused == (() if donated else (MAMBA,))
        if donated:
            self.states[prefixes[-1]] = state
        self._note(
            theirs=theirs, adopted=adopted, donated=donated, had_a_state=not donated and accepted == len(prefixes)
        )
        self._note(stopped=accepted < len(prefixes), gained=len(theirs) < accepted * self.page)

    def _note(self, **cases: object) -> None:
        self.seen |= {name for name, happened in cases.items() if happened}

    def prefetch(self, space: str, pages: list[int], _: int, __: int) -> None:
        """Full pages come to the host."""
        self.tree.insert(self.tree.root, self.tokens(pages), self.ids(len(pages)), HOST, space)

    def load(self, space: str, pages: list[int], _: int, __: int) -> None:
        """Full pages come to the host, and those that the device lacks start on their way there."""
        self.prefetch(space, pages, 0, 0)
        match = self.tree.match(self.tokens(pages), space)
        if match.full_len == match.device_len:
            return
        end = self.tree.node_at(match, match.full_len)
        nodes = [node for node in end.path() if not node.holds(FULL, DEVICE)][::-1]
        self.tree.lock(end, HOST)
        for node in nodes:
            self.tree.begin_load(node, self.ids(node.num_tokens))
        self.tree.lock(end, DEVICE)
        coming = self.prefixes(space, pages)[match.device_len // self.page : match.full_len // self.page]
        slots = torch.cat([node.held(FULL, DEVICE) for node in nodes]).view(-1, self.page)
        self.slots.update(zip(coming, map(tuple, slots.tolist()), strict=True))
        self.loads.append((NodeRun(nodes, FULL, DEVICE), end, set(coming)))

    def load_ends(self, *_: object) -> None:
        """The oldest copy in flight arrives."""
        if self.loads:
            run, end, _coming = self.loads.pop(0)
            run.detach()
            self.tree.unlock(end, DEVICE)
            self.tree.unlock(end, HOST)

    def evict(self, _: str, __: list[int], which: int, ___: int) -> None:
        component = (FULL, SWA, MAMBA)[which % 3]
        node = self.tree.victim(component, DEVICE)
        for released in [] if node is None else self.tree.drop(node, component, DEVICE):
            if released.tier is DEVICE:
                gone = set(released.value.tolist())
                if released.component != MAMBA:
                    self.windows = {prefix for prefix in self.windows if not gone & set(self.slots[prefix])}
                if released.component == FULL:
                    self.slots = {prefix: slots for prefix, slots in self.slots.items() if not gone & set(slots)}
                if released.component == MAMBA:
                    self.states = {prefix: state for prefix, state in self.states.items() if state not in gone}

    def check(self) -> None:
        """The tree holds on the device what the dictionaries do, and nothing twice."""
        self.tree.check()
        assert len(self.held()) == len(self.slots) * self.page
        full: dict[Prefix, tuple[int, ...]] = {}
        windows: set[Prefix] = set()
        states: dict[Prefix, int] = {}
        for node in self.tree.nodes():
            pages = np.concatenate([at.run.tokens for at in [*node.path()][::-1] if at.run is not None])[
                self.page - 1 :: self.page
            ]
            own = self.prefixes(node.namespace, pages.tolist())[-(node.num_tokens // self.page) :]
            if node.holds(FULL, DEVICE):
                full.update(zip(own, map(tuple, node.held(FULL, DEVICE).view(-1, self.page).tolist()), strict=True))
            windows.update(own if node.holds(SWA, DEVICE) else ())
            if node.holds(MAMBA, DEVICE):
                states[own[-1]] = int(node.held(MAMBA, DEVICE))
        assert (full, windows, states) == (self.slots, self.windows, self.states)

    def held(self) -> set[int]:
        return {slot for value in self.tree.values(FULL, DEVICE) for slot in value.tolist()}

    def ids(self, count: int) -> torch.Tensor:
        self.next_id += count
        return torch.arange(self.next_id - count, self.next_id)

    def tokens(self, pages: list[int]) -> Tokens:
        """Each number as a page of its own; pages differ in their last token."""
        tokens = np.zeros(len(pages) * self.page, dtype=np.int64)
        tokens[self.page - 1 :: self.page] = pages
        return pack_tokens(tokens)

    @staticmethod
    def prefixes(space: str, pages: list[int]) -> list[Prefix]:
        return [(space, tuple(pages[: end + 1])) for end in range(len(pages))]


def test_sharing_gives_and_takes_what_dictionaries_say() -> None:
    """Slots of tokens that the tree lacks become its own, `theirs` and `ours` are of exactly the tokens that it held,
    windows that it lacked are adopted, and a state is donated where the insertion reached and the tree had none."""
    seen: set[str] = set()

    @given(page=st.sampled_from([1, 4]), events=st.lists(EVENTS, max_size=25))
    @settings(max_examples=6 * settings.default.max_examples)
    def run(page: int, events: list[tuple[str, str, list[int], int, int]]) -> None:
        requests = Requests(page)
        for verb, *event in events:
            getattr(requests, verb)(*event)
            requests.check()
        seen.update(requests.seen)

    run()
    assert seen == {"theirs", "adopted", "donated", "had_a_state", "stopped", "gained"}, "a case never happened"
