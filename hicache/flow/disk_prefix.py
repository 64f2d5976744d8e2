"""Which part of a prompt the stores can add to what memory serves, for all components together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hicache.flow.components import CacheComponent
from hicache.flow.context import EngineContext
from hicache.tiers import FULL, HOST, Component, Store, Tier
from hicache.tree.base import Match
from hicache.tree.key import Tokens


@dataclass(frozen=True)
class Found:
    """What the stores hold of a `DiskPrefix`. `pages`: the store of each of its `page_keys`, from the first on without
    a gap; `others`: that of each of its `component_keys`, None for those that no store holds."""

    pages: tuple[Store, ...] = ()
    others: tuple[Store | None, ...] = ()

    def missing(self, prefix: DiskPrefix) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """The page keys and component keys to ask the next store for."""
        others = [key for key, store in zip(prefix.component_keys, self.others, strict=True) if store is None]
        return prefix.page_keys[len(self.pages) :], tuple(others)

    def with_answer(self, store: Store, num_pages: int, others: Sequence[bool]) -> Found:
        """With what `store` answered when it was asked for what is missing."""
        answers = iter(others)
        merged = [(store if next(answers, False) else None) if known is None else known for known in self.others]
        return Found((*self.pages, *[store] * num_pages), tuple(merged))


@dataclass(frozen=True)
class DiskPrefix:
    """The whole pages of a prompt, by index from 0.

    [0, num_usable)               memory can serve them, for all components
    [0, num_host_pages)           their full pages are on the host, or being copied there
    [num_host_pages, num_pages)   full pages that stores may add; `page_keys`
    [num_usable, num_pages)       pages of the other components that it may add; `component_keys`
    """

    context: EngineContext
    tokens: Tokens
    namespace: str
    match: Match
    num_pages: int
    num_usable: int
    num_host_pages: int
    # By component beside FULL, when the prefix was matched: whether device or host held each page of it.
    in_memory: dict[Component, list[bool]]

    @classmethod
    def of(cls, context: EngineContext, tokens: Tokens, namespace: str) -> DiskPrefix:
        """The prefix of whole pages of `tokens`, which it copies. Changes nothing."""
        tree, page = context.tree, context.tree.page_size
        tokens = tokens[: len(tokens) // page * page].copy()
        match = tree.match(tokens, namespace)
        on_host = end = 0
        for node in match.nodes:
            end += min(node.num_tokens, match.full_len - end)
            if not (node.holds(FULL, HOST) or node.pending(FULL) is not None):
                break
            on_host = end
        usable = tree.usable_len(match, match.full_len, on_host=True)
        num_pages = len(tokens) // page
        in_memory = {
            component.name: _held_pages(component, match, page, num_pages) for component in context.components[1:]
        }
        return cls(context, tokens, namespace, match, num_pages, usable // page, on_host // page, in_memory)

    @property
    def is_complete(self) -> bool:
        """Whether memory can serve all of it, and the host has all full pages."""
        return self.num_usable == self.num_host_pages == self.num_pages

    @cached_property
    def page_keys(self) -> tuple[bytes, ...]:
        return tuple(self._keys[self.num_host_pages :])

    @cached_property
    def component_keys(self) -> tuple[bytes, ...]:
        """One component after the other."""
        pages = range(self.num_usable, self.num_pages)
        return tuple(key for component in self._others for key in self.keys_of(component.name, pages))

    def common_pages(self, other: DiskPrefix) -> int:
        """With how many equal pages both prompts begin. A key names all tokens up to its page, so the first that
        differs is found by bisection."""
        ours, theirs = self._keys, other._keys
        if ours[:1] != theirs[:1]:
            return 0
        return bisect_left(range(min(len(ours), len(theirs))), True, key=lambda index: ours[index] != theirs[index])

    def keys_of(self, component: Component, indices: Sequence[int]) -> list[bytes]:
        return self.context.tree.names.of_component(component, [self._keys[index] for index in indices])

    @property
    def nothing(self) -> Found:
        """Before a store was asked. Makes the keys, which follow from the nodes of `match` as they were found."""
        assert self.page_keys is not None
        return Found(others=(None,) * len(self.component_keys))

    def usable_end(self, found: Found, num_pages: int) -> int:
        """The pages of the longest prefix that all components can use, with the first `num_pages` full pages of those
        found; at most `num_usable` where the stores add nothing."""
        limit, on_disk = self.num_host_pages + num_pages, self._on_disk(found)
        for end in range(limit, self.num_usable, -1):
            if self._to_read(end, on_disk) is not None:
                return end
        return min(limit, self.num_usable)

    def to_read(self, end: int, found: Found) -> dict[Component, list[int]]:
        """The pages to be read for a prefix of `end` pages, as `usable_end` gave it, by component."""
        others = self._to_read(end, self._on_disk(found)) if end > self.num_usable else {}
        assert others is not None
        return {FULL: list(range(self.num_host_pages, end)), **others}

    def store_of(self, found: Found, component: Component, index: int) -> Store:
        """Where page `index` of the prompt is read from, one of `to_read`."""
        if component == FULL:
            return found.pages[index - self.num_host_pages]
        position = [other.name for other in self._others].index(component)
        store = found.others[position * (self.num_pages - self.num_usable) + index - self.num_usable]
        assert store is not None
        return store

    @property
    def _others(self) -> tuple[CacheComponent, ...]:
        return self.context.components[1:]

    @cached_property
    def _keys(self) -> list[bytes]:
        """Of all full pages."""
        return self.context.tree.names.of_prompt(self.match, self.tokens)

    def _on_disk(self, found: Found) -> list[list[bool]]:
        """By component: which pages of the prompt a store holds."""
        num_asked = self.num_pages - self.num_usable
        starts = range(0, len(found.others), num_asked) if num_asked else ()
        asked = [found.others[start : start + num_asked] for start in starts]
        return [[*[False] * self.num_usable, *(store is not None for store in stores)] for stores in asked]

    def _to_read(self, end: int, on_disk: Sequence[Sequence[bool]]) -> dict[Component, list[int]] | None:
        """By component: what a prefix of `end` pages needs from the stores; None where these lack something."""
        needed: dict[Component, list[int]] = {}
        for component, held in zip(self._others, on_disk, strict=False):
            pages = component.pages_to_prefetch(end, self.in_memory[component.name], held)
            if pages is None:
                return None
            needed[component.name] = pages
        return needed


def _held_pages(component: CacheComponent, match: Match, page_size: int, num_pages: int) -> list[bool]:
    """Which pages of a prompt the device or the host hold of a component. Of the last node, pages behind the match are
    those of another prompt."""
    held, start = [False] * num_pages, 0
    for node in match.nodes:
        node_end = start + node.num_tokens // page_size
        end = min(node_end, match.full_len // page_size)
        first = node_end - 1 if component.rules.at_node_end else start
        if first < end and any(node.holds(component.name, tier) for tier in Tier):
            held[first:end] = [True] * (end - first)
        start = end
    return held
