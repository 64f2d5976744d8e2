"""The pages of a prompt and their keys, which are made once and kept while its request waits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from hicache.host import NewPages, spans
from hicache.tiers import FULL, Component
from hicache.tree.base import Match
from hicache.tree.core import RadixTree
from hicache.tree.key import Tokens
from hicache.tree.names import PageNames, PromptPages

_MAX_KEPT = 4096


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
        if component != FULL:
            return [self.key(component, index) for index in indices]
        if isinstance(indices, range) and indices.step == 1:
            return self.keys[indices.start : max(indices.start, indices.stop)]
        return [self.keys[index] for index in indices]

    def new_pages(self, component: Component, indices: Sequence[int]) -> list[NewPages]:
        """These pages, ascending, in pieces without a gap, to be reserved on the host."""
        found = list[NewPages]()
        for start, end in spans(indices):
            keys = self.keys_of(component, range(start, end))
            if component == FULL:
                found.append(NewPages(keys, self.keys[start - 1] if start else None, start, self.told(), start))
            else:
                found.append(NewPages(keys, None, start))
        return found

    def told(self) -> PromptPages:
        """All pages, for events."""
        return PromptPages(self.keys, None, self.tokens, self.namespace)

    def common_pages(self, other: Prompt) -> int:
        """With how many equal pages both begin. A key names all tokens up to its page, so the first that differs is
        found by bisection."""
        ours, theirs = self.keys, other.keys
        if ours[:1] != theirs[:1]:
            return 0
        return bisect_left(range(min(len(ours), len(theirs))), True, key=lambda index: ours[index] != theirs[index])


class Prompts:
    """The prompts of requests that wait to be admitted, of the last 4096. Owned by the scheduler thread."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._by_request: dict[str, Prompt] = {}

    def of(self, tokens: Tokens, namespace: str, match: Match, request_id: str | None = None) -> Prompt:
        """Of the whole pages of `tokens`, of which the tree has `match`. Kept for the request, if there is one."""
        tree = self._tree
        whole = tokens[: len(tokens) // tree.page_size * tree.page_size]
        known = None if request_id is None else self._by_request.get(request_id)
        if known is not None and known.namespace == namespace and np.array_equal(known.tokens, whole):
            return known
        prompt = Prompt(tree.names, whole.copy(), namespace, match)
        if request_id is not None:
            self._by_request[request_id] = prompt
            if len(self._by_request) > _MAX_KEPT:  # a request that was refused may never be cancelled
                del self._by_request[next(iter(self._by_request))]
        return prompt

    def forget(self, request_id: str) -> None:
        """The request waits no more."""
        self._by_request.pop(request_id, None)
