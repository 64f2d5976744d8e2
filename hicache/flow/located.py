"""The locations of the pages of a prompt in memory: on the device by rows of the tree, on the host by page keys.

`Located.last_end` finds the longest prefix that all components can use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from hicache.flow.components.base import CacheComponent, PageTest
from hicache.flow.context import EngineContext
from hicache.flow.page_transfer import PromptRows
from hicache.flow.prompt import Prompt
from hicache.pages.components import last_end
from hicache.pages.key import component_keys
from hicache.pages.node import Match
from hicache.pages.states import COPY, HELD
from hicache.pages.table import Mask, Rows
from hicache.tiers import FULL, Component

Unused = tuple[int, int, int]
"""Pages [start, end) of a prompt that a tier has, and the reason for which these pages are not used: a `MissReason`, or
`USABLE`."""


class Located:
    """The locations of the pages of a prompt in memory, at the time of each call. Changes nothing.

    [0, device_end)          full pages on the device
    [device_end, host_end)   full pages on the host, without a gap

    `resident`: for each component except FULL, which of the pages [0, device_end) are on the device.
    """

    def __init__(self, context: EngineContext, prompt: Prompt, match: Match) -> None:
        self.context, self.prompt, self.match = context, prompt, match
        self._page = context.tree.page_size
        self.num_pages = len(prompt.keys)
        self.device_end = min(match.full_len // self._page, self.num_pages)
        self.resident = dict[Component, Mask]()
        for other in context.others:
            self.resident[other.name] = other.resident.has(match.rows[: self.device_end])

    @cached_property
    def host_rows(self) -> Rows:
        """The rows of the full pages from `device_end` on, at the time of the first access; `NO_ROW` for a page without
        a row. Rows may belong to other pages after an eviction."""
        return self.context.full.pages.table.find(self.prompt.keys[self.device_end :])

    @cached_property
    def host_end(self) -> int:
        return self.device_end + first_gap(self.context.full.pages.has(self.host_rows))

    def full_rows(self, start: int, end: int) -> PromptRows:
        """Return the full pages [start, end), which were on the host when `host_rows` was accessed first. The host has
        evicted no page since then."""
        rows = self.host_rows[start - self.device_end : end - self.device_end]
        return PromptRows(rows, np.arange(start, end))

    def on_device(self, component: CacheComponent, index: int) -> bool:
        if component.name == FULL:
            return index < self.device_end
        return index < self.device_end and bool(self.resident[component.name][index])

    def on_host(self, component: CacheComponent, index: int) -> bool:
        return component.has_host and self.keys_of(component.name, [index])[0] in component.pages

    def in_memory(self, component: CacheComponent, index: int) -> bool:
        """Return whether the page is on the device or on the host."""
        return self.on_device(component, index) or self.on_host(component, index)

    def is_arriving(self, component: CacheComponent, index: int) -> bool:
        """Return whether the page is in memory, or in flight from the device to the host."""
        if self.on_device(component, index):
            return True
        row = component.pages.table.row(self.keys_of(component.name, [index])[0])
        return row >= 0 and bool(component.pages.state[row] & (HELD | COPY))

    def keys_of(self, component: Component, indices: Sequence[int]) -> list[bytes]:
        """Return the keys of the pages `indices` of a component, ascending."""
        keys = self.prompt.keys
        if component == FULL:
            if len(indices) and indices[-1] - indices[0] + 1 == len(indices):
                return keys[indices[0] : indices[-1] + 1]
            return [keys[index] for index in indices]
        known = self.prompt.component_keys
        for index in indices:
            if (component, index) not in known:
                (known[component, index],) = component_keys(component, keys[index : index + 1])
        return [known[component, index] for index in indices]

    def rows_of(self, component: CacheComponent, indices: Sequence[int]) -> PromptRows:
        """Return the pages, ascending, that are on the host now."""
        rows = self.rows_named(component, indices)
        is_held = component.pages.has(rows)
        return PromptRows(rows[is_held], np.asarray(indices, np.int64)[is_held])

    def rows_named(self, component: CacheComponent, indices: Sequence[int]) -> Rows:
        """Return the row of each page; `NO_ROW` for a page without a row."""
        return component.pages.table.find(self.keys_of(component.name, indices))

    def rows_added(self, component: CacheComponent, indices: range) -> Rows:
        """Return the row of each page, and add rows for pages without one. The caller calls `forget` for the rows."""
        keys, first = self.keys_of(component.name, indices), indices.start
        previous = self.prompt.keys[first - 1] if component.name == FULL and first else None
        return component.pages.table.add(keys, first, previous)

    def last_end(self, limit: int, floor: int, has: PageTest) -> int:
        """Return the number of pages, at most `limit`, of the longest prefix that all components can use; `floor` if
        none is longer."""
        if not self.context.others:
            return max(limit, floor)

        def gap(component: CacheComponent, start: int, end: int) -> int | None:
            return next((index for index in range(end - 1, start - 1, -1) if not has(component, index)), None)

        return last_end(self.context.others, limit, floor, gap)

    def arriving_end(self, floor: int) -> int:
        """Return the number of pages of the longest prefix that all components can use when all pages in flight from
        the device to the host have arrived; at least `floor`."""
        full = self.context.full
        rows = self.rows_named(full, range(self.host_end, self.num_pages))
        limit = self.host_end + first_gap(full.pages.has(rows, HELD | COPY))
        return self.last_end(limit, floor, self.is_arriving)


def first_gap(has: Mask) -> int:
    """Return the number of leading True values."""
    return len(has) if has.all() else int(has.argmin())


def spans(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as half-open intervals."""
    if not indices:
        return []
    if indices[-1] - indices[0] + 1 == len(indices):
        return [(indices[0], indices[-1] + 1)]
    ends = [at for at in range(1, len(indices) + 1) if at == len(indices) or indices[at] != indices[at - 1] + 1]
    return [(indices[start], indices[end - 1] + 1) for start, end in pairwise([0, *ends])]


def slices_of(value: torch.Tensor, indices: Sequence[int], page_size: int) -> list[torch.Tensor]:
    """Return the slots or states of the pages `indices`, ascending, as slices of `value`, int64 `[pages * page_size]`.
    Slices share the memory of `value`. Indexing by an array would copy the array to the GPU and wait for the forward
    pass."""
    return [value[start * page_size : end * page_size] for start, end in spans(indices)]
