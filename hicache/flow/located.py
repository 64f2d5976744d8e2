"""Which tier has which page of a prompt: on the device the tree says it, on the host a map by page key, and what the
stores can add to both.

One loop says how far a prefix can be used, as in the tree: `Located.last_end`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter

from hicache.flow.components import CacheComponent
from hicache.flow.components.base import PageTest
from hicache.flow.context import EngineContext
from hicache.flow.prompt import Prompt
from hicache.host import RunPart, end_of, within
from hicache.tiers import FULL, Component, Store
from hicache.tree.base import Match
from hicache.tree.components import last_end
from hicache.tree.node import TreeNode


class Located:
    """Where the pages of a prompt are in memory. Changes nothing; as of the moment that it is asked.

    [0, device_end)          full pages on the device
    [device_end, host_end)   full pages on the host, without a gap
    """

    def __init__(self, context: EngineContext, prompt: Prompt, match: Match) -> None:
        self.context, self.prompt, self.match = context, prompt, match
        self._page = context.tree.page_size
        self.num_pages = len(prompt.keys)
        self.device_end = min(match.full_len // self._page, self.num_pages)
        # Made at once, for nodes of the match may be split later.
        self._on_device = {other.name: self._device_pages(other) for other in context.components[1:]}

    @cached_property
    def host(self) -> list[RunPart]:
        """Full pages on the host, those included that the device has too."""
        return self.context.full.index.parts(self.prompt.keys)

    @cached_property
    def host_end(self) -> int:
        return end_of(self.host, self.device_end)

    def on_device(self, component: CacheComponent, index: int) -> bool:
        if component.name == FULL:
            return index < self.device_end
        return self._on_device[component.name][index]

    def on_host(self, component: CacheComponent, index: int) -> bool:
        return component.has_host and self.prompt.key(component.name, index) in component.index

    def in_memory(self, component: CacheComponent, index: int) -> bool:
        """On the device or on the host."""
        return self.on_device(component, index) or self.on_host(component, index)

    def coming(self, component: CacheComponent, index: int) -> bool:
        """In memory, or on its way to the host from the device."""
        key = self.prompt.key(component.name, index)
        return self.on_device(component, index) or component.index.is_coming(key)

    def parts(self, component: CacheComponent, indices: Sequence[int]) -> list[RunPart]:
        """Of these pages, ascending, those on the host: where they are."""
        if component.name == FULL:
            return within(self.host, indices)
        parts = component.index.parts(self.prompt.keys_of(component.name, indices))
        return [part._replace(start=indices[part.start], end=indices[part.end - 1] + 1) for part in parts]

    def last_end(self, limit: int, floor: int, has: PageTest) -> int:
        """The pages of the longest prefix of at most `limit` that all components can use; `floor` where none longer
        is."""

        def gap(component: CacheComponent, start: int, end: int) -> int | None:
            return next((index for index in range(end - 1, start - 1, -1) if not has(component, index)), None)

        return last_end(self.context.components[1:], limit, floor, gap)

    def _device_pages(self, component: CacheComponent) -> list[bool]:
        """Which pages the device has of a component. Of the last node, pages behind the match are those of another
        prompt."""
        held, start = [False] * self.num_pages, 0
        for node in self.match.nodes:
            node_end = start + node.num_tokens // self._page
            end = min(node_end, self.device_end)
            first = node_end - 1 if component.tree_component.at_node_end else start
            if first < end and node.has(component.name):
                held[first:end] = [True] * (end - first)
            start = end
        return held


def path_keys(context: EngineContext, node: TreeNode) -> dict[Component, list[bytes]]:
    """By component: under which what the prefix that ends with `node` needs is known below the device, in order."""
    names = context.tree.names
    found = {FULL: [key for above in reversed(node.path()) for key in names.of(above)]}
    for component in context.components[1:]:
        keys: list[bytes] = []
        for required in reversed(component.tree_component.required_nodes(node)):
            of_node = names.of(required)
            keys += names.of_component(
                component.name, of_node[-1:] if component.tree_component.at_node_end else of_node
            )
        found[component.name] = keys
    return found


@dataclass(frozen=True)
class Found:
    """What the stores hold of a `StorePrefix`. `pages`: the store of each of its `missing` pages, from the first on
    without a gap; `others`: that of each of its `component_keys`, None for those that no store holds."""

    pages: tuple[Store, ...] = ()
    others: tuple[Store | None, ...] = ()

    def missing(self, prefix: StorePrefix) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """The page keys and component keys to ask the next store for."""
        others = [key for key, store in zip(prefix.component_keys, self.others, strict=True) if store is None]
        return prefix.page_keys[len(self.pages) :], tuple(others)

    def with_answer(self, store: Store, num_pages: int, others: Sequence[bool]) -> Found:
        """With what `store` answered when it was asked for what is missing."""
        answers = iter(others)
        merged = [(store if next(answers, False) else None) if known is None else known for known in self.others]
        return Found((*self.pages, *[store] * num_pages), tuple(merged))


class StorePrefix:
    """The pages of a prompt that stores may add, as of when it was made. Changes nothing.

    [0, num_usable)            memory can serve them, for all components
    [0, start)                 their full pages are in memory, or being copied to the host
    [start, num_pages)         of these, stores may add the full pages `missing`
    [num_usable, num_pages)    and pages of the other components: `component_keys`
    """

    def __init__(self, located: Located) -> None:
        self.located, self.prompt, self.num_pages = located, located.prompt, located.num_pages
        self.num_usable = located.last_end(located.host_end, 0, located.in_memory)
        self.missing = located.context.full.index.lacking(self.prompt.keys, located.device_end)
        self.start = self.missing[0] if self.missing else self.num_pages

    @property
    def is_complete(self) -> bool:
        """Whether memory can serve all of it."""
        return not self.missing and self.num_usable == self.num_pages

    @cached_property
    def page_keys(self) -> tuple[bytes, ...]:
        """Of the missing pages."""
        return tuple(self.prompt.keys_of(FULL, self.missing))

    @cached_property
    def component_keys(self) -> tuple[bytes, ...]:
        """One component after the other."""
        pages = range(self.num_usable, self.num_pages)
        return tuple(key for component in self._others for key in self.prompt.keys_of(component.name, pages))

    @property
    def nothing(self) -> Found:
        """Before a store was asked."""
        return Found(others=(None,) * len(self.component_keys))

    def end_of(self, num_missing: int) -> int:
        """Where the full pages end, with the first `num_missing` of those that are missing."""
        return self.missing[num_missing] if num_missing < len(self.missing) else self.num_pages

    def num_missing(self, start: int, end: int) -> int:
        """How many of pages [start, end) were missing."""
        return max(0, bisect_left(self.missing, end) - bisect_left(self.missing, start))

    def stores_of(self, found: Found, start: int, end: int) -> Sequence[Store]:
        """Of the missing pages among [start, end) those that were found: the store of each."""
        return found.pages[bisect_left(self.missing, start) : bisect_left(self.missing, end)]

    def usable_end(self, found: Found, num_pages: int) -> int:
        """The pages of the longest prefix that all components can use, with the first `num_pages` full pages of those
        found; at most `num_usable` where the stores add nothing."""
        limit = self.end_of(num_pages)

        def has(component: CacheComponent, index: int) -> bool:
            return self.located.coming(component, index) or self._store_of(found, component, index) is not None

        return self.located.last_end(limit, min(limit, self.num_usable), has)

    def to_read(self, end: int, found: Found) -> list[tuple[CacheComponent, Store, list[int]]]:
        """The pages to be read for a prefix of `end` pages, as `usable_end` gave it: full ones first, and of a
        component those of one store together."""
        num_full = bisect_left(self.missing, end)
        wanted: list[tuple[CacheComponent, list[int], list[Store | None]]]
        wanted = [(self.located.context.full, self.missing[:num_full], [*found.pages[:num_full]])]
        for component in self._others if end > self.num_usable else ():
            first = min(component.first_required(end), end - 1)  # the last page of what is optional
            pages = [index for index in range(first, end) if not self.located.coming(component, index)]
            wanted.append((component, pages, [self._store_of(found, component, index) for index in pages]))
        return [
            (component, store, [index for index, _ in group])
            for component, pages, stores in wanted
            for store, group in groupby(zip(pages, stores, strict=True), key=itemgetter(1))
            if store is not None
        ]

    def _store_of(self, found: Found, component: CacheComponent, index: int) -> Store | None:
        if index < self.num_usable or not found.others:
            return None
        position = self._others.index(component) * (self.num_pages - self.num_usable)
        return found.others[position + index - self.num_usable]

    @property
    def _others(self) -> tuple[CacheComponent, ...]:
        return self.located.context.components[1:]
