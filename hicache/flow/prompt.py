"""The pages of a prompt and their keys, which are made once and kept while its request waits, and events of pages."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from hicache.metrics import Metrics
from hicache.pages.events import EventLog
from hicache.pages.key import Tokens
from hicache.pages.misses import EvictedAges, Fates, MissReason
from hicache.pages.names import PageNames, PromptPages
from hicache.pages.states import ABOVE, RAW, TierPages
from hicache.pages.table import Rows
from hicache.pages.tree import RadixTree
from hicache.pages.tree_results import Match
from hicache.tiers import FULL, Component

_MAX_KEPT_BYTES = 256 << 20
_PAGE_BYTES = 256  # about what the keys of a page take: of full attention, and of one other component


class Prompt:
    """The whole pages of `tokens`, by index from 0, and their keys. `match`: what the tree has of it now."""

    def __init__(self, names: PageNames, tokens: Tokens, namespace: str, match: Match) -> None:
        self.tokens, self.namespace = tokens, namespace
        self.keys = names.of_prompt(match, tokens)
        self._of_component: dict[tuple[Component, int], bytes] = {}

    def key(self, component: Component, index: int) -> bytes:
        """Under which what a component has of a page is known."""
        if component == FULL:
            return self.keys[index]
        found = self._of_component.get((component, index))
        if found is None:
            (found,) = PageNames.of_component(component, [self.keys[index]])
            self._of_component[component, index] = found
        return found

    def keys_of(self, component: Component, indices: Sequence[int]) -> list[bytes]:
        """The keys of pages, ascending."""
        if component != FULL:
            return [self.key(component, index) for index in indices]
        if not indices:
            return []
        if indices[-1] - indices[0] + 1 == len(indices):
            return self.keys[indices[0] : indices[-1] + 1]
        return [self.keys[index] for index in indices]

    def event_pages(self, start: int, end: int) -> PromptPages:
        """Pages [start, end), for events."""
        return PromptPages(self.keys, None, self.tokens, self.namespace).part(start, end)

    @property
    def num_bytes(self) -> int:
        """About what it takes of memory, when all its keys are made."""
        return self.tokens.nbytes + _PAGE_BYTES * (1 + len(self.keys))


class Prompts:
    """The prompts of requests that wait to be admitted, or are computed while stores are read; of `max_bytes`, those
    used last, and at least one. Owned by the scheduler thread."""

    def __init__(self, tree: RadixTree, max_bytes: int = _MAX_KEPT_BYTES) -> None:
        self._tree, self._max_bytes = tree, max_bytes
        self._by_request: dict[str, Prompt] = {}
        self._num_bytes = 0

    def of(self, tokens: Tokens, namespace: str, match: Match, request_id: str | None = None) -> Prompt:
        """Of the whole pages of `tokens`, of which the tree has `match`. Kept for the request, if there is one."""
        tree = self._tree
        whole = tokens[: len(tokens) // tree.page_size * tree.page_size]
        prompt = None if request_id is None else self._by_request.get(request_id)
        if prompt is None or prompt.namespace != namespace or not np.array_equal(prompt.tokens, whole):
            prompt = Prompt(tree.names, whole.copy(), namespace, match)
        if request_id is not None:
            self._keep(request_id, prompt)
        return prompt

    def forget(self, request_id: str) -> None:
        """The request waits no more, and nothing is read for it."""
        prompt = self._by_request.pop(request_id, None)
        self._num_bytes -= 0 if prompt is None else prompt.num_bytes

    def _keep(self, request_id: str, prompt: Prompt) -> None:
        """Keep a prompt as the one used last, and forget older ones: a refused request may never be cancelled."""
        if self._by_request.get(request_id) is not prompt:
            self.forget(request_id)
            self._num_bytes += prompt.num_bytes
        self._by_request[request_id] = self._by_request.pop(request_id, prompt)
        while self._num_bytes > self._max_bytes and len(self._by_request) > 1:
            self.forget(next(iter(self._by_request)))


log = logging.getLogger(__name__)


class HostWatch:
    """Counts full pages that leave the host and tells events of them. With events it keeps of each page on the host, or
    on its way there, what these need."""

    def __init__(self, metrics: Metrics, page_tokens: int, *, has_stores: bool, events: EventLog | None) -> None:
        self._page_tokens, self._has_stores, self._events = page_tokens, has_stores, events
        self._is_told = False
        self.fates, self._ages = Fates(), EvictedAges(metrics, "host")
        self._kept: dict[bytes, tuple[PromptPages, int]] = {}  # by key: pages that came together, and which of them
        self._demoted, self._lost = (
            metrics.counter(f"evict.host_{outcome}_tokens", help, "evict_tokens", tier="host", outcome=outcome)
            for outcome, help in (
                ("demoted", "tokens evicted from the host that a store holds"),
                ("lost", "tokens evicted from the host that no store is known to hold"),
            )
        )

    def note(self, pages: PromptPages, keys: Iterable[bytes]) -> None:
        """Those of `pages` that have one of `keys` are on their way to the host. Their tokens are copied: those of the
        prompt go with it."""
        if self._events is not None:
            pages, coming = pages._replace(tokens=pages.tokens.copy()), {*keys}
            self._kept.update((key, (pages, at)) for at, key in enumerate(pages.keys) if key in coming)

    def forget(self, keys: Sequence[bytes]) -> None:
        """These did not come."""
        for key in keys if self._kept else ():
            del self._kept[key]

    def told(self, keys: Sequence[bytes]) -> list[PromptPages]:
        """The pages of `keys` as events describe them, one entry for consecutive pages; empty without events."""
        found = list[tuple[PromptPages, int, int]]()
        for key in keys if self._kept else ():
            pages, at = self._kept[key]
            if found and found[-1][0] is pages and found[-1][2] == at:
                found[-1] = pages, found[-1][1], at + 1
            else:
                found.append((pages, at, at + 1))
        return [pages.part(start, end) for pages, start, end in found]

    def left(self, pages: TierPages, rows: Rows) -> None:
        """Note that the host is about to evict `rows`. A page that the device has as well is not lost."""
        rows_lost = rows[~pages.has(rows, ABOVE)]
        is_stored = (pages.stored[rows_lost] != 0) & ~pages.has(rows_lost, RAW)
        num_stored = int(np.count_nonzero(is_stored))
        if self._has_stores and not self._is_told and (pages.stored[rows_lost] == 0).any():
            self._is_told = True
            log.warning("tokens leave the host before a store has them; raise host_bytes, or use a faster disk")
        self.fates.note(pages.table.name[rows_lost], MissReason.EVICTED)
        self._ages.observe(pages.order.at, rows_lost)
        self._demoted.value += num_stored * self._page_tokens
        self._lost.value += (len(rows_lost) - num_stored) * self._page_tokens
        if self._events is not None:
            keys = pages.table.keys_of(rows)
            self._events.removed(keys, "CPU")
            self.forget(keys)
