"""The page keys of nodes: computed when they are asked for, and once in the life of a page.

Each other component than FULL has its own key of each page: SHA-256(page key || name of the component).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from hicache.pages.key import PageHasher, Tokens
from hicache.pages.node import TreeNode
from hicache.pages.table import PageTable
from hicache.pages.tree_results import Match
from hicache.tiers import FULL, Component


class PromptPages(NamedTuple):
    """Consecutive pages of one prompt: `keys`, which follow `previous_key` (None at its start), of `tokens`."""

    keys: Sequence[bytes]
    previous_key: bytes | None
    tokens: Tokens
    namespace: str

    def part(self, start: int, end: int) -> PromptPages:
        """Pages [start, end)."""
        size = len(self.tokens) // max(1, len(self.keys))
        previous_key = self.keys[start - 1] if start else self.previous_key
        return PromptPages(self.keys[start:end], previous_key, self.tokens[start * size : end * size], self.namespace)


class PageNames:
    """The page keys of one tree. Owned by it."""

    def __init__(self, hasher: PageHasher, table: PageTable) -> None:
        self._hasher, self._table = hasher, table

    def of(self, node: TreeNode) -> list[bytes]:
        """The keys of the node's pages."""
        unnamed, keys = [], self._table.keys
        above: TreeNode | None = node
        while above is not None and len(above.rows) and keys[above.rows[-1]] is None:
            unnamed.append(above)
            above = above.parent
        for below in reversed(unnamed):
            assert below.run is not None and below.parent is not None
            self._table.set_keys(below.rows, self.following(below.parent, below.namespace, below.run.tokens))
        return self._table.keys_of(node.rows)

    def following(self, node: TreeNode, namespace: str, tokens: Tokens, known: Sequence[bytes] = ()) -> list[bytes]:
        """Keys of the whole pages in `tokens` behind `node`, of which the first ones are `known`."""
        num_pages = len(tokens) // self._hasher.page_size
        if len(known) >= num_pages:
            return [*known[:num_pages]]
        previous = known[-1] if known else self._end_key(node, namespace)
        return [*known, *self._hasher.chain(previous, tokens[len(known) * self._hasher.page_size :])]

    def pages(self, node: TreeNode, start: int = 0) -> PromptPages:
        """The node's pages from the `start`-th on, for events."""
        assert node.run is not None and node.parent is not None
        is_first = node.parent.is_root
        previous_key = None if is_first else self._end_key(node.parent, node.namespace)
        return PromptPages(self.of(node), previous_key, node.run.tokens, node.namespace).part(start, len(node.rows))

    def of_prompt(self, match: Match, tokens: Tokens) -> list[bytes]:
        """Keys of the whole pages of a prompt, of which `match` is held."""
        if match.nodes:
            self.of(match.nodes[-1])
        keys = self._table.keys_of(match.rows)
        previous = keys[-1] if keys else self._hasher.seed(match.namespace)
        return keys + self._hasher.chain(previous, tokens[len(keys) * self._hasher.page_size :])

    def _end_key(self, node: TreeNode, namespace: str) -> bytes:
        """The key of the last page up to `node`: the namespace's seed at the start of a prompt."""
        return self.of(node)[-1] if node.parent is not None else self._hasher.seed(namespace)

    @staticmethod
    def of_component(component: Component, page_keys: Sequence[bytes]) -> list[bytes]:
        """The keys under which what a component has of these pages is stored."""
        if component == FULL:
            return list(page_keys)
        name = component.encode()
        return [hashlib.sha256(key + name).digest() for key in page_keys]
