"""`Prompt`: the pages of a prompt and their keys, which are computed once and kept while the request waits.
`HostWatch`: reports pages that the host evicts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache.metrics import Metrics
from hicache.pages.events import EventLog
from hicache.pages.key import PromptPages, Tokens, owned
from hicache.pages.misses import EvictedAges, MissReason, MissReasons
from hicache.pages.node import Match
from hicache.pages.states import ABOVE, RAW, TierPages
from hicache.pages.table import Rows
from hicache.pages.tree import RadixTree
from hicache.tiers import Component

_MAX_KEPT_BYTES = 256 << 20
_PAGE_BYTES = 256  # approximate memory of the keys of one page: full attention and one other component


@dataclass(eq=False, slots=True)
class Prompt:
    """The complete pages of `tokens`, by index from 0, and their keys. `component_keys`: the keys of windows and states
    that were computed, by component and index of the page."""

    tokens: Tokens
    namespace: str
    keys: list[bytes]
    num_bytes: int = 0  # approximate memory of the prompt with all keys
    component_keys: dict[tuple[Component, int], bytes] = field(default_factory=dict)


class Prompts:
    """The prompts of requests that wait, or that are computed while their pages are read. Keeps the most recently used
    prompts, up to `max_bytes` and at least one. Owned by the scheduler thread."""

    def __init__(self, tree: RadixTree, max_bytes: int = _MAX_KEPT_BYTES) -> None:
        self._tree, self._max_bytes = tree, max_bytes
        self._by_request: dict[str, Prompt] = {}
        self._num_bytes = 0

    def of(self, tokens: Tokens, namespace: str, match: Match, request_id: str | None = None) -> Prompt:
        """Return the prompt of the complete pages of `tokens`. `match`: the tree's match of the prompt. The prompt is
        kept for `request_id`, if given."""
        tree = self._tree
        full_pages = tokens[: len(tokens) // tree.page_size * tree.page_size]
        prompt = None if request_id is None else self._by_request.get(request_id)
        if prompt is None or prompt.namespace != namespace or not np.array_equal(prompt.tokens, full_pages):
            prompt = Prompt(owned(full_pages), namespace, tree.prompt_keys(match, full_pages))
            prompt.num_bytes = full_pages.nbytes + _PAGE_BYTES * (1 + len(prompt.keys))
            if request_id is not None:
                if request_id in self._by_request:
                    self.forget(request_id)
                self._num_bytes += prompt.num_bytes
        if request_id is not None:  # keep the prompt as the most recently used prompt
            self._by_request[request_id] = self._by_request.pop(request_id, prompt)
            # Older prompts are dropped, because a refused request may never be cancelled.
            while self._num_bytes > self._max_bytes and len(self._by_request) > 1:
                self.forget(next(iter(self._by_request)))
        return prompt

    def forget(self, request_id: str) -> None:
        """Drop the prompt of a request that no longer waits and for which no page is read."""
        prompt = self._by_request.pop(request_id, None)
        self._num_bytes -= 0 if prompt is None else prompt.num_bytes


log = logging.getLogger(__name__)


class HostWatch:
    """Counts full pages that the host evicts, and reports them to the event log. With events, this object keeps the
    tokens of each page that is on the host or in flight to the host."""

    def __init__(self, metrics: Metrics, page_tokens: int, *, has_stores: bool, events: EventLog | None) -> None:
        self._page_tokens, self._has_stores, self._events = page_tokens, has_stores, events
        self._is_logged = False
        self.miss_reasons, self._ages = MissReasons(), EvictedAges(metrics, "host")
        self._kept: dict[
            bytes, tuple[PromptPages, int]
        ] = {}  # by page key: the pages that were noted together, and the index of the page among them
        self._demoted, self._lost = (
            metrics.counter(f"evict.host_{outcome}_tokens", help, "evict_tokens", tier="host", outcome=outcome)
            for outcome, help in (
                ("demoted", "tokens that the host evicted and that a store has"),
                ("lost", "tokens that the host evicted and that no store has, as far as the engine knows"),
            )
        )

    def note(self, pages: PromptPages, keys: Iterable[bytes]) -> None:
        """Record that the pages with `keys` are in flight to the host. The tokens of these pages are copied, because
        the prompt's array may be freed."""
        if self._events is not None:
            pages, is_arriving = pages._replace(tokens=pages.tokens.copy()), {*keys}
            self._kept.update((key, (pages, at)) for at, key in enumerate(pages.keys) if key in is_arriving)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget pages that did not arrive on the host."""
        for key in keys if self._kept else ():
            del self._kept[key]

    def announced(self, keys: Sequence[bytes]) -> list[PromptPages]:
        """Return the pages of `keys` as events report them, one entry for consecutive pages; empty without events."""
        found = list[tuple[PromptPages, int, int]]()
        for key in keys if self._kept else ():
            pages, at = self._kept[key]
            if found and found[-1][0] is pages and found[-1][2] == at:
                found[-1] = pages, found[-1][1], at + 1
            else:
                found.append((pages, at, at + 1))
        return [pages.part(start, end) for pages, start, end in found]

    def left(self, pages: TierPages, rows: Rows) -> None:
        """Record that the host is about to evict `rows`. A page that is also on the device is not lost."""
        rows_lost = rows[~pages.has(rows, ABOVE)]
        is_stored = (pages.stored[rows_lost] != 0) & ~pages.has(rows_lost, RAW)
        num_stored = int(np.count_nonzero(is_stored))
        if self._has_stores and not self._is_logged and (pages.stored[rows_lost] == 0).any():
            self._is_logged = True
            log.warning("tokens leave the host before a store has them; raise host_bytes, or use a faster disk")
        self.miss_reasons.note(pages.table.name[rows_lost], MissReason.EVICTED)
        self._ages.observe(pages.order.at, rows_lost)
        self._demoted.value += num_stored * self._page_tokens
        self._lost.value += (len(rows_lost) - num_stored) * self._page_tokens
        if self._events is not None:
            keys = pages.table.keys_of(rows)
            self._events.removed(keys, "CPU")
            self.forget(keys)
