"""The page keys of nodes. Each key is computed on demand, and only once per page.

The key of a window or state is SHA-256(page key || name of the component).
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
    """Consecutive pages of one prompt: the `tokens` and `keys` of the pages, and `previous_key`, the key of the page
    before them (None at the start of the prompt)."""

    keys: Sequence[bytes]
    previous_key: bytes | None
    tokens: Tokens
    namespace: str

    def part(self, start: int, end: int) -> PromptPages:
        """Return pages [start, end)."""
        size = len(self.tokens) // max(1, len(self.keys))
        previous_key = self.keys[start - 1] if start else self.previous_key
        return PromptPages(self.keys[start:end], previous_key, self.tokens[start * size : end * size], self.namespace)


class PageNames:
    """Computes the page keys of one tree. The tree owns this object."""

    def __init__(self, hasher: PageHasher, table: PageTable) -> None:
        self._hasher, self._table = hasher, table

    def of(self, node: TreeNode) -> list[bytes]:
        """Return the keys of the node's pages."""
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
        """Return the keys of the complete pages in `tokens`, after `node`. `known`: keys of the first pages that were
        computed before."""
        num_pages = len(tokens) // self._hasher.page_size
        if len(known) >= num_pages:
            return [*known[:num_pages]]
        previous = known[-1] if known else self._end_key(node, namespace)
        return [*known, *self._hasher.chain(previous, tokens[len(known) * self._hasher.page_size :])]

    def pages(self, node: TreeNode, start: int = 0) -> PromptPages:
        """Return the node's pages from page `start` on, as events report them."""
        assert node.run is not None and node.parent is not None
        is_first = node.parent.is_root
        previous_key = None if is_first else self._end_key(node.parent, node.namespace)
        return PromptPages(self.of(node), previous_key, node.run.tokens, node.namespace).part(start, len(node.rows))

    def of_prompt(self, match: Match, tokens: Tokens) -> list[bytes]:
        """Return the keys of the complete pages of a prompt. `match`: the match of the prompt in the tree."""
        if match.nodes:
            self.of(match.nodes[-1])
        keys = self._table.keys_of(match.rows)
        previous = keys[-1] if keys else self._hasher.seed(match.namespace)
        return keys + self._hasher.chain(previous, tokens[len(keys) * self._hasher.page_size :])

    def _end_key(self, node: TreeNode, namespace: str) -> bytes:
        """Return the key of the last page up to `node`; the namespace's seed at the start of a prompt."""
        return self.of(node)[-1] if node.parent is not None else self._hasher.seed(namespace)

    @staticmethod
    def of_component(component: Component, page_keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys of a component's data for the pages with the keys `page_keys`."""
        if component == FULL:
            return list(page_keys)
        name = component.encode()
        return [hashlib.sha256(key + name).digest() for key in page_keys]
