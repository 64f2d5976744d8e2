"""What a radix tree of components holds, as plain dictionaries of prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from hicache.tiers import DEVICE, FULL, HOST, MAMBA, SWA, Component, Tier
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
from page_life import DROPPED, PageLives

Prefix = tuple[str, tuple[int, ...]]


class Copies:
    """Copies that began together, of a path of `nodes`: where each prefix goes, and the runs that follow its nodes."""

    def __init__(self, nodes: list[TreeNode]) -> None:
        self.nodes = tuple(nodes)
        self.ids: dict[Component, dict[Prefix, int]] = {}
        self.runs: dict[Component, NodeRun] = {}

    def note(self, component: Component, ids: Iterable[tuple[Prefix, int]]) -> None:
        self.ids.setdefault(component, {}).update(ids)


class ComponentDicts:
    """A tree of pages, and what it should hold of each component on each tier."""

    def __init__(self) -> None:
        super().__init__()
        names = (FULL, SWA, MAMBA)
        self.held: dict[tuple[Component, Tier], dict[Prefix, int]] = {(n, tier): {} for n in names for tier in Tier}
        self.locked: list[tuple[TreeNode, Tier]] = []
        self.expected: list[Expectation] = []
        self.prompts: list[tuple[str, list[int]]] = []  # that were committed or prefetched
        self.backups: list[Copies] = []  # in flight, oldest first
        self.loads: list[Copies] = []
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
        self.lives = PageLives(self.tree)

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

    def prompt(self, which: int, end: int = 6) -> tuple[str, list[int]]:
        """The first pages of one of the prompts that came last."""
        space, pages = self.prompts[-1 - which % len(self.prompts)]
        return space, pages[:end]

    def matched(self, space: str, pages: list[int]) -> Match:
        return self.tree.match(self.tokens(pages), space)

    def note(self, node: TreeNode, component: Component, ids: torch.Tensor) -> None:
        self.held[component, DEVICE].update(zip(self.pages_of(node, component), ids.tolist(), strict=True))

    def pages_of(self, node: TreeNode, component: Component) -> Iterator[Prefix]:
        """The prefixes that a node's pages end, or that its state belongs to."""
        tokens = np.concatenate([at.run.tokens for at in reversed(list(node.path())) if at.run is not None])
        pages = tokens[self.page - 1 :: self.page].tolist()
        first = len(pages) - (1 if component == MAMBA else node.num_tokens // self.page)
        return iter(self.prefixes(node.namespace, pages)[first:])

    def contents(self) -> dict[tuple[Component, Tier], dict[Prefix, int]]:
        """What the tree holds of each component on each tier, by prefix."""
        found: dict[tuple[Component, Tier], dict[Prefix, int]] = {key: {} for key in self.held}
        for node in self.tree.nodes():
            for name in self.names:
                for tier in Tier:
                    if node.holds(name, tier):
                        ids = self.first_of_pages(name, tier, node.held(name, tier))
                        found[name, tier].update(zip(self.pages_of(node, name), ids, strict=True))
        return found

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
