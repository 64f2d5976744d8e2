"""The page keys of nodes: computed when they are asked for, and once in the life of a page.

May import hicache.tree.key and node.
"""

from __future__ import annotations

from hicache.tree.key import PageHasher, Tokens
from hicache.tree.node import TreeNode


class PageNames:
    """Names the pages of one tree. Owned by it."""

    def __init__(self, hasher: PageHasher) -> None:
        self._hasher = hasher

    def of(self, node: TreeNode) -> list[bytes]:
        """The keys of the node's pages."""
        missing = []
        above = node
        while above.page_keys is None and not above.is_root:
            missing.append(above)
            assert above.parent is not None
            above = above.parent
        for below in reversed(missing):
            assert below.run is not None
            below.page_keys = self._hasher.chain(self.before(below), below.run.tokens)
        return node.page_keys or []

    def before(self, node: TreeNode) -> bytes:
        """The key of the page before the node's first: the namespace's seed at the start of a prompt."""
        parent = node.parent
        if parent is None or parent.is_root:
            return self._hasher.seed(node.namespace)
        return self.of(parent)[-1]

    def of_tokens(self, tokens: Tokens, namespace: str) -> list[bytes]:
        """Keys of the whole pages of a prompt, held or not."""
        return self._hasher.chain(self._hasher.seed(namespace), tokens)

    def after(self, node: TreeNode, tokens: Tokens, namespace: str) -> list[bytes]:
        """Keys of the whole pages that `tokens` have, or would have, below `node`."""
        if node.is_root:
            return self.of_tokens(tokens, namespace)
        return self._hasher.chain(self.of(node)[-1], tokens)
