"""Eviction order as a persistent structure: the next victim is found without looking at the others.

`Recency` is an intrusive doubly linked list over nodes. The tree keeps in it every node that a tier holds and nobody
locks, and appends a path deepest node first, so a parent is always newer than its children and the oldest node is a
leaf.

May import nothing above `hicache.tree.node`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hicache.tree.node import Tier, TreeNode


class Recency:
    """Least-recently-used order of one tier. All operations are O(1)."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        # A sentinel closes the ring: sentinel.newer is the oldest node, sentinel.older the newest.
        self._ring = TreeNode(np.empty(0, np.int64), None)
        self._ring.older[tier] = self._ring.newer[tier] = self._ring

    def append(self, node: TreeNode) -> None:
        """Put `node` at the newest end."""
        newest = self._ring.older[self._tier]
        assert newest is not None
        self.insert_after(node, newest)

    def insert_after(self, node: TreeNode, anchor: TreeNode) -> None:
        """Put `node` right on the newer side of `anchor`."""
        t = self._tier
        after = anchor.newer[t]
        assert after is not None and node.newer[t] is None
        node.older[t], node.newer[t] = anchor, after
        anchor.newer[t] = after.older[t] = node

    def remove(self, node: TreeNode) -> None:
        t = self._tier
        older, newer = node.older[t], node.newer[t]
        assert older is not None and newer is not None
        older.newer[t], newer.older[t] = newer, older
        node.older[t] = node.newer[t] = None

    def oldest(self) -> TreeNode | None:
        node = self._ring.newer[self._tier]
        return None if node is self._ring else node

    def __contains__(self, node: TreeNode) -> bool:
        return node.newer[self._tier] is not None

    def __iter__(self) -> Iterator[TreeNode]:
        """Oldest first."""
        node = self._ring.newer[self._tier]
        while node is not None and node is not self._ring:
            yield node
            node = node.newer[self._tier]


class TierBook:
    """Account and recency order of one tier, in tokens. `stride`: tokens that one element of a value stands for."""

    def __init__(self, tier: Tier, stride: int) -> None:
        self.recency = Recency(tier)
        self.stride = stride
        self.evictable = 0
        self.protected = 0
