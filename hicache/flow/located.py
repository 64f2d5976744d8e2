"""Which tier has which page of a prompt: on the device the tree says it, on the host a map by page key, and what the
stores can add to both.

One loop says how far a prefix can be used, as in the tree: `Located.last_end`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from hicache.flow.components.base import CacheComponent, PageTest
from hicache.flow.context import EngineContext
from hicache.flow.prompt import Prompt
from hicache.host.run import RunPart, end_of, spans, within
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

    def coming_end(self, floor: int) -> int:
        """The same, at least `floor`, of what is in memory or on its way to the host from the device."""
        full = self.context.full
        is_gap = (not self.coming(full, index) for index in range(self.host_end, self.num_pages))
        limit = next((self.host_end + n for n, found in enumerate(is_gap) if found), self.num_pages)
        return self.last_end(limit, floor, self.coming)

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


class ToRead(NamedTuple):
    """Pages [start, end) of a component of a prompt, which `store` has; None: a read in flight brings them."""

    component: CacheComponent
    store: Store | None
    start: int
    end: int


class StoreAnswers:
    """Which store has which page of a prompt that memory lacks, as far as they have answered.

    [0, num_usable)          memory can serve them, for all components
    [num_usable, num_pages)  of these pages stores are asked for windows and states too
    `to_ask`                 full pages that memory lacks, no read brings, and no store has told of
    `known`                  those that a store has, or that a read brings (None): (start, end, store)

    `is_read`: whether a read brings a key of a component that its request may share.
    """

    def __init__(self, located: Located, is_read: Callable[[CacheComponent, bytes], bool] = lambda *_: False) -> None:
        full, self.located, self._is_read = located.context.full, located, is_read
        self.num_usable = located.last_end(located.host_end, 0, located.in_memory)
        keys = located.prompt.keys
        lacking = full.index.lacking(keys, located.device_end)
        read = {index for index in lacking if is_read(full, keys[index])} if full.index.num_in_flight else set()
        self.first_gap = lacking[0] if lacking else located.num_pages
        self.to_ask = deque(spans([index for index in lacking if index not in read] if read else lacking))
        self.known: list[tuple[int, int, Store | None]] = [(start, end, None) for start, end in spans(sorted(read))]
        self._others: dict[bytes, Store] = {}

    @property
    def is_complete(self) -> bool:
        """Whether memory can serve all of the prompt, or what it lacks comes from the device."""
        return not (self.to_ask or self.known) and self.num_usable == self.located.num_pages

    @property
    def is_open(self) -> bool:
        """Whether there is anything to ask a store for."""
        return bool(self.to_ask) or len(self._others) < len(self._component_keys)

    def keys_to_ask(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """For the next store: keys of full pages, in order, and of windows and states."""
        keys = self.located.prompt.keys
        return (
            tuple([key for start, end in self.to_ask for key in keys[start:end]]),
            tuple([key for key in self._component_keys if key not in self._others]),
        )

    def add(self, store: Store, num_pages: int, others: Sequence[bytes], ok: Sequence[bool]) -> None:
        """What `store` answered to `keys_to_ask`: it has the first `num_pages` full pages, and of `others` these."""
        while num_pages and self.to_ask:
            start, end = self.to_ask.popleft()
            found_end = min(end, start + num_pages)
            self.known.append((start, found_end, store))
            num_pages -= found_end - start
            if found_end < end:
                self.to_ask.appendleft((found_end, end))
        self._others.update((key, store) for key, has in zip(others, ok, strict=False) if has)

    @property
    def has_none(self) -> bool:
        """Whether nothing is known to come."""
        return not (self.known or self._others)

    @property
    def full_end(self) -> int:
        """Where the full pages end that memory has or may get."""
        return self.to_ask[0][0] if self.to_ask else self.located.num_pages

    def end_with(self, room: int) -> int:
        """Where they end if stores bring the first `room` alone."""
        for start, end, store in sorted(self.known, key=itemgetter(0)):
            if store is not None and end - start > room:
                return min(start + room, self.full_end)
            room -= end - start if store is not None else 0
        return self.full_end

    def usable_end(self, limit: int) -> int:
        """The pages of the longest prefix of at most `limit` that all components can use, with what is known to come;
        at most `num_usable` where that adds nothing."""
        return self.located.last_end(limit, min(limit, self.num_usable), self._has)

    def to_read(self, end: int) -> Iterator[ToRead]:
        """What a prefix of `end` pages needs of what is known to come: full pages first, then windows and states."""
        for start, known_end, store in sorted(self.known, key=itemgetter(0)):
            if start < end:
                yield ToRead(self.located.context.full, store, start, min(known_end, end))
        for component in self.located.context.components[1:] if end > self.num_usable else ():
            first = min(component.first_required(end), end - 1)  # the last page of what is optional
            wanted = [index for index in range(first, end) if not self.located.coming(component, index)]
            stores = [self._store_of(component, index) for index in wanted]
            for store, group in groupby(zip(wanted, stores, strict=True), key=itemgetter(1)):
                indices = [index for index, _ in group if store is not None or self._has(component, index)]
                yield from (ToRead(component, store, start, stop) for start, stop in spans(indices))

    def num_coming(self, end: int) -> int:
        """Full pages below `end` that are known to come."""
        return sum(self.by_store(0, end).values())

    def by_store(self, start: int, end: int) -> Counter[Store | None]:
        """Of full pages [start, end) those known to come, by store."""
        found = Counter[Store | None]()
        for known_start, known_end, store in self.known:
            found[store] += max(0, min(end, known_end) - max(start, known_start))
        return found

    @cached_property
    def _component_keys(self) -> list[bytes]:
        pages, prompt = range(self.num_usable, self.located.num_pages), self.located.prompt
        return [key for other in self.located.context.components[1:] for key in prompt.keys_of(other.name, pages)]

    def _store_of(self, component: CacheComponent, index: int) -> Store | None:
        return self._others.get(self.located.prompt.key(component.name, index))

    def _has(self, component: CacheComponent, index: int) -> bool:
        key = self.located.prompt.key(component.name, index)
        return self.located.coming(component, index) or key in self._others or self._is_read(component, key)


def look_up(located: Located, wait_s: float) -> tuple[dict[Store, int], bool]:
    """Tokens that each store adds to what memory can serve, and whether all of them answered within `wait_s`. No side
    effect."""
    has, until_s, all_known = StoreAnswers(located), time.monotonic() + wait_s, True
    for store, tier in located.context.stores.items():
        keys, others = has.keys_to_ask()
        done = tier.find(keys, max(0.0, until_s - time.monotonic()), others)
        if done is None:
            all_known = False
        else:
            has.add(store, done.num_pages, others, done.others)
    end = has.usable_end(has.full_end)
    num_pages = has.by_store(has.num_usable, end)
    # Where memory has the full pages, a store adds windows or states to them: the one asked last, of several.
    added = [piece.store for piece in has.to_read(end) if piece.component.name != FULL and piece.store is not None]
    if added:
        num_pages[max(added)] += max(0, end - has.num_usable - sum(num_pages.values()))
    return {store: num_pages[store] * located.context.tree.page_size for store in Store}, all_known
