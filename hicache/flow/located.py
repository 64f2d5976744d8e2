"""Which tier has which page of a prompt: on the device the tree says it, on the host a map by page key, and what the
stores can add to both.

One loop says how far a prefix can be used, as in the tree: `Located.last_end`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import compress, groupby, pairwise
from typing import NamedTuple

import numpy as np

from hicache.flow.components.base import CacheComponent, PageTest
from hicache.flow.context import EngineContext
from hicache.flow.prompt import Prompt
from hicache.host.run import RunPart, end_of, spans, within
from hicache.tiers import DISK, FULL, REMOTE, Component, Store
from hicache.tree.base import Match
from hicache.tree.components import last_end
from hicache.tree.node import TreeNode

_IN_MEMORY, _READ = -1, 1 << 14  # in place of stores: memory has the page; a read in flight brings it


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
    """Pages [start, end) of a component of a prompt, which each of `stores` has, a set of bits; 0: a read in flight
    brings them."""

    component: CacheComponent
    stores: int
    start: int
    end: int


class Question(NamedTuple):
    """What a store is asked for: `keys`, first those of the full `pages`, then those of windows and states."""

    pages: list[int]
    keys: tuple[bytes, ...]


class StoreAnswers:
    """Which stores have which page of a prompt that memory lacks, as far as they have answered.

    [0, num_usable)          memory can serve them, for all components
    [num_usable, num_pages)  of these pages stores are asked for windows and states too
    `known`                  full pages that stores have, or that a read brings (0): (start, end, set of stores)

    `is_read`: whether a read brings a key of a component that its request may share.
    """

    def __init__(self, located: Located, is_read: Callable[[CacheComponent, bytes], bool] = lambda *_: False) -> None:
        full, self.located, self._is_read = located.context.full, located, is_read
        self.num_usable = located.last_end(located.host_end, 0, located.in_memory)
        keys = located.prompt.keys
        lacking = full.index.lacking(keys, located.device_end)
        read = {index for index in lacking if is_read(full, keys[index])} if full.index.num_in_flight else set()
        self.first_gap = lacking[0] if lacking else located.num_pages
        self._stores = np.full(located.num_pages, _IN_MEMORY, np.int16)  # of each full page, a set
        self._stores[lacking] = 0
        self._stores[sorted(read)] = _READ
        self._others: dict[bytes, int] = {}
        self.num_stores = len(located.context.stores)

    @property
    def known(self) -> list[tuple[int, int, int]]:
        ends = [*(np.flatnonzero(np.diff(self._stores)) + 1).tolist(), len(self._stores)]
        found = [(start, end, int(self._stores[start])) for start, end in pairwise([0, *ends]) if start < end]
        return [(start, end, stores & ~_READ) for start, end, stores in found if stores > 0]

    @property
    def is_complete(self) -> bool:
        """Whether memory can serve all of the prompt, or what it lacks comes from the device."""
        return not (self._stores >= 0).any() and self.num_usable == self.located.num_pages

    @property
    def is_open(self) -> bool:
        """Whether there is anything to ask a store for."""
        return not self._stores.all() or len(self._others) < len(self._component_keys)

    def question(self, *, known: bool = False) -> Question:
        """For the next store: what none is known to have. `known`: full pages that the other has."""
        pages = np.flatnonzero((self._stores > 0) & (self._stores < _READ) if known else self._stores == 0).tolist()
        others = [] if known else [key for key in self._component_keys if key not in self._others]
        return Question(pages, (*self.located.prompt.keys_of(FULL, pages), *others))

    def add(self, store: Store, question: Question, ok: Sequence[bool]) -> None:
        """What `store` answered: it has those that are `ok`, of full pages in order and of the others."""
        num_pages = len(question.pages)
        pages = [*compress(question.pages, ok)]
        self._stores[pages] |= store.bit
        for key in compress(question.keys[num_pages:], ok[num_pages:]):
            self._others[key] = self._others.get(key, 0) | store.bit

    def lose(self, component: CacheComponent, indices: Sequence[int], store: Store) -> list[int]:
        """`store` does not bring these pages. Returns those that the other lacks."""
        if component.name == FULL:
            self._stores[[*indices]] &= ~store.bit
        else:
            for key in self.located.prompt.keys_of(component.name, indices):
                if left := self._others.pop(key, 0) & ~store.bit:
                    self._others[key] = left
        return [index for index in indices if not self.stores_of(component, index)]

    @property
    def has_none(self) -> bool:
        """Whether nothing is known to come."""
        return not ((self._stores > 0).any() or self._others)

    @property
    def full_end(self) -> int:
        """Where the full pages end that memory has or may get."""
        lacking = np.flatnonzero(self._stores == 0)
        return int(lacking[0]) if len(lacking) else self.located.num_pages

    def end_with(self, room: int) -> int:
        """Where they end if stores bring the first `room` alone."""
        for start, end, stores in self.known:
            if stores and end - start > room:
                return min(start + room, self.full_end)
            room -= end - start if stores else 0
        return self.full_end

    def usable_end(self, limit: int) -> int:
        """The pages of the longest prefix of at most `limit` that all components can use, with what is known to come;
        at most `num_usable` where that adds nothing."""
        return self.located.last_end(limit, min(limit, self.num_usable), self._has)

    def to_read(self, end: int) -> Iterator[ToRead]:
        """What a prefix of `end` pages needs of what is known to come: full pages first, then windows and states."""
        for start, known_end, stores in self.known:
            if start < end:
                yield ToRead(self.located.context.full, stores, start, min(known_end, end))
        for component in self.located.context.components[1:] if end > self.num_usable else ():
            first = min(component.first_required(end), end - 1)  # the last page of what is optional
            wanted = [index for index in range(first, end) if not self.located.coming(component, index)]
            yield from self.pieces(component, [index for index in wanted if self._has(component, index)])

    def pieces(self, component: CacheComponent, indices: Sequence[int]) -> Iterator[ToRead]:
        """These pages, ascending, by the stores that have them."""
        for stores, group in groupby(indices, key=lambda index: self.stores_of(component, index)):
            yield from (ToRead(component, stores, start, stop) for start, stop in spans([*group]))

    def stores_of(self, component: CacheComponent, index: int) -> int:
        """The stores that have a page that memory lacks, as a set."""
        if component.name == FULL:
            return max(0, int(self._stores[index])) & ~_READ
        return self._others.get(self.located.prompt.key(component.name, index), 0)

    def num_coming(self, end: int) -> int:
        """Full pages below `end` that are known to come."""
        return int((self._stores[:end] > 0).sum())

    def by_store(self, start: int, end: int) -> Counter[Store]:
        """Of full pages [start, end) those that stores have, by the first of these."""
        found, context = Counter[Store](), self.located.context
        for known_start, known_end, stores in self.known:
            first = next((store for store in context.stores if stores & store.bit), None)
            if first is not None:
                found[first] += max(0, min(end, known_end) - max(start, known_start))
        return found

    @cached_property
    def _component_keys(self) -> list[bytes]:
        pages, prompt = range(self.num_usable, self.located.num_pages), self.located.prompt
        return [key for other in self.located.context.components[1:] for key in prompt.keys_of(other.name, pages)]

    def _has(self, component: CacheComponent, index: int) -> bool:
        key = self.located.prompt.key(component.name, index)
        return self.located.coming(component, index) or bool(self._others.get(key)) or self._is_read(component, key)


def look_up(located: Located, wait_s: float) -> tuple[int, int, bool]:
    """Tokens that the disk adds to the prefix in memory, and the remote tier to that; and whether all stores answered
    within `wait_s`. No side effect."""
    has, until_s, all_known = StoreAnswers(located), time.monotonic() + wait_s, True
    for store, tier in located.context.stores.items():
        question = has.question()
        done = tier.find((), max(0.0, until_s - time.monotonic()), question.keys)
        if done is None:
            all_known = False
        else:
            has.add(store, question, done.others)
    end = has.usable_end(has.full_end)
    num_pages = has.by_store(has.num_usable, end)
    # Where memory has the full pages, a store adds windows or states to them.
    added = [piece.stores for piece in has.to_read(end) if piece.component.name != FULL and piece.stores]
    if added:
        last = REMOTE if added[-1] == REMOTE.bit else DISK
        num_pages[last] += max(0, end - has.num_usable - num_pages.total())
    page = located.context.tree.page_size
    return num_pages[DISK] * page, num_pages[REMOTE] * page, all_known
