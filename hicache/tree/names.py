"""The page keys of nodes: computed when they are asked for, and once in the life of a page.

A component beside FULL has a key of its own for each page: SHA-256(page key || name of the component).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from hicache.tiers import FULL, Component
from hicache.tree.base import Match
from hicache.tree.key import PageHasher, Tokens
from hicache.tree.node import TreeNode


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

    def __init__(self, hasher: PageHasher) -> None:
        self._hasher = hasher

    def of(self, node: TreeNode) -> list[bytes]:
        """The keys of the node's pages."""
        unnamed = []
        above = node
        while above.page_keys is None and not above.is_root:
            unnamed.append(above)
            assert above.parent is not None
            above = above.parent
        for below in reversed(unnamed):
            assert below.run is not None
            below.page_keys = self._hasher.chain(self.previous_key(below), below.run.tokens)
        return node.page_keys or []

    def previous_key(self, node: TreeNode) -> bytes:
        """The key of the page before the node's first: the namespace's seed at the start of a prompt."""
        parent = node.parent
        if parent is None or parent.parent is None:
            return self._hasher.seed(node.namespace)
        return self.of(parent)[-1]

    def pages(self, node: TreeNode) -> PromptPages:
        """The node's pages, for events."""
        assert node.run is not None
        first = node.parent is None or node.parent.is_root
        return PromptPages(self.of(node), None if first else self.previous_key(node), node.run.tokens, node.namespace)

    def of_prompt(self, match: Match, tokens: Tokens) -> list[bytes]:
        """Keys of the whole pages of a prompt, of which `match` is held."""
        page = self._hasher.page_size
        keys = [key for node in match.nodes for key in self.of(node)][: match.full_len // page]
        previous = keys[-1] if keys else self._hasher.seed(match.namespace)
        return keys + self._hasher.chain(previous, tokens[len(keys) * page :])

    @staticmethod
    def of_component(component: Component, page_keys: Sequence[bytes]) -> list[bytes]:
        """The keys under which what a component has of these pages is stored."""
        if component == FULL:
            return list(page_keys)
        name = component.encode()
        return [hashlib.sha256(key + name).digest() for key in page_keys]
