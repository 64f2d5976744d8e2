"""What a radix tree of components holds, as plain dictionaries of prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from hicache.tiers import FULL, MAMBA, SWA, Component
from hicache.tree import (
    MambaComponent,
    Match,
    NodeRun,
    PageHasher,
    RadixTree,
    Released,
    SwaComponent,
    TreeComponent,
    TreeNode,
)
from hicache.tree.accounts import Expectation
from hicache.tree.key import Tokens, pack_tokens

Prefix = tuple[str, tuple[int, ...]]


class LoadInFlight:
    """A load to the prefix that ends with `node`: the prefixes that it brings, and the runs that follow its nodes."""

    def __init__(self, node: TreeNode, prefixes: Iterable[Prefix]) -> None:
        self.node, self.prefixes = node, set(prefixes)
        self.runs: dict[Component, NodeRun] = {}


class ComponentDicts:
    """A tree of pages, and what it should hold of each component."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[Component, dict[Prefix, int]] = {name: {} for name in (FULL, SWA, MAMBA)}
        self.locked: list[TreeNode] = []
        self.expected: list[Expectation] = []
        self.prompts: list[tuple[str, list[int]]] = []  # that were committed
        self.loads: list[LoadInFlight] = []
        self.next_id = 1

    def make_tree(self, page: int, window_pages: int, *others: Component) -> None:
        """A tree of full pages and `others`, with windows of about `window_pages`."""
        self.page, self.names = page, (FULL, *others)
        self.window = max(1, window_pages * page - page // 2)
        self.swa, self.mamba = SWA in self.names, MAMBA in self.names
        self.windows = SwaComponent(self.window, page)
        components: list[TreeComponent] = [self.windows] if self.swa else []
        if self.mamba:
            components.append(MambaComponent())
        self.tree = RadixTree(page, PageHasher(b"identity", page), components)

    def tokens(self, pages: list[int]) -> Tokens:
        """Each number as a page of its own; pages differ in their last token."""
        tokens = np.zeros(len(pages) * self.page, dtype=np.int64)
        tokens[self.page - 1 :: self.page] = pages
        return pack_tokens(tokens)

    def prefixes(self, space: str, pages: list[int]) -> list[Prefix]:
        return [(space, tuple(pages[: end + 1])) for end in range(len(pages))]

    def ids(self, count: int) -> torch.Tensor:
        made = torch.arange(self.next_id, self.next_id + count)
        self.next_id += count
        return made

    def accepted(self, prefixes: list[Prefix]) -> int:
        """Pages in front of the first that is being loaded."""
        runs = (run for load in self.loads for run in load.runs.values())
        in_flight = {prefix for run in runs for node in run.nodes for prefix in self.pages_of(node, FULL)}
        return next((at for at, prefix in enumerate(prefixes) if prefix in in_flight), len(prefixes))

    def attach(self, node: TreeNode, component: Component) -> None:
        """A component comes to where it is lacking, and nowhere else."""
        prefixes = list(self.pages_of(node, component))
        value, held = self.ids(len(prefixes)), self.held[component]
        lacking = not any(prefix in held for prefix in prefixes)
        assert self.tree.attach(node, component, value) == lacking
        if lacking:
            held.update(zip(prefixes, value.tolist(), strict=True))

    def full_len(self, space: str, pages: list[int]) -> int:
        """Pages from the front that are held in full."""
        held = [prefix in self.held[FULL] for prefix in self.prefixes(space, pages)]
        return held.index(False) if False in held else len(held)

    def usable(self, space: str, pages: list[int], end: int) -> bool:
        prefixes = self.prefixes(space, pages)[:end]
        start = max(0, end * self.page - self.window) // self.page
        windows = not self.swa or all(prefix in self.held[SWA] for prefix in prefixes[start:])
        return windows and (not self.mamba or prefixes[-1] in self.held[MAMBA])

    def prompt(self, which: int, end: int = 6) -> tuple[str, list[int]]:
        """The first pages of one of the prompts that came last."""
        space, pages = self.prompts[-1 - which % len(self.prompts)]
        return space, pages[:end]

    def matched(self, space: str, pages: list[int]) -> Match:
        return self.tree.match(self.tokens(pages), space)

    def note(self, node: TreeNode, component: Component, ids: torch.Tensor) -> None:
        self.held[component].update(zip(self.pages_of(node, component), ids.tolist(), strict=True))

    def pages_of(self, node: TreeNode, component: Component) -> Iterator[Prefix]:
        """The prefixes that a node's pages end, or that its state belongs to."""
        tokens = np.concatenate([at.run.tokens for at in reversed(list(node.path())) if at.run is not None])
        pages = tokens[self.page - 1 :: self.page].tolist()
        first = len(pages) - (1 if component == MAMBA else node.num_tokens // self.page)
        return iter(self.prefixes(node.namespace, pages)[first:])

    def contents(self) -> dict[Component, dict[Prefix, int]]:
        """What the tree holds of each component, by prefix."""
        found: dict[Component, dict[Prefix, int]] = {name: {} for name in self.held}
        for node in self.tree.nodes():
            for name in self.names:
                if node.has(name):
                    ids = self.first_of_pages(name, node.value_of(name))
                    found[name].update(zip(self.pages_of(node, name), ids, strict=True))
        return found

    def drop(self, node: TreeNode, component: Component) -> None:
        dropped = self.tree.drop(node, component)
        num_windows = sum(released.component == SWA for released in dropped)
        assert num_windows == (component == SWA), "windows leave unreleased with their full slots"
        for released in dropped:
            self.forget(released)

    def protected(self) -> list[int]:
        return [self.tree.protected(name) for name in self.names]

    def first_of_pages(self, component: Component, value: torch.Tensor) -> list[int]:
        """One element a page, or the state."""
        ids: list[int] = value[:: self.page if component != MAMBA else 1].tolist()
        return ids

    def forget(self, released: Released) -> None:
        component = released.component
        gone = set(self.first_of_pages(component, released.value))
        assert released.size == (1 if component == MAMBA else len(gone) * self.page)
        held = self.held[component]
        kept = {prefix: value for prefix, value in held.items() if value not in gone}
        assert len(kept) == len(held) - len(gone), "released what was not held"
        self.held[component] = kept
        if component == FULL:  # their window slots go with them
            self.held[SWA] = {prefix: value for prefix, value in self.held[SWA].items() if value not in gone}
