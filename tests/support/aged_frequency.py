"""An eviction order of one's own, in one file: frequencies that age, and a memory of what was evicted.

It is a policy where a name has an entry for it in `hicache.tree.policy.ORDERS`: `{"aged": AgedFrequency}`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from hicache.tree.node import Component, Tier, TreeNode
from hicache.tree.orders import EvictionStrategy, IsEvictable, PriorityHeap


class AgedFrequency(EvictionStrategy):
    """Uses count half as much after every `HALF_LIFE` events; what was evicted is remembered with its count.

    A node's rank is log2 of the sum of 2^(t / HALF_LIFE) over its uses at times t, so ranks age without being touched.
    """

    HALF_LIFE, MAX_GHOSTS = 20.0, 32

    def __init__(self, component: Component, tier: Tier, is_evictable: IsEvictable) -> None:
        self._heap = PriorityHeap(self, is_evictable)
        self._ranks: dict[TreeNode, float] = {}
        self._ghosts: OrderedDict[bytes, float] = OrderedDict()
        self._now = 0

    def get_priority(self, node: TreeNode) -> float:
        return self._ranks[node]

    def insert(self, node: TreeNode) -> None:
        self._ranks[node] = self._ghosts.pop(self._name(node), -np.inf)
        self._use(node)
        self._heap.insert(node)

    def hit(self, node: TreeNode) -> None:
        if node in self._heap:
            self._use(node)
            self._heap.hit(node)

    def lock(self, node: TreeNode) -> None:
        self._heap.lock(node)

    def unlock(self, node: TreeNode) -> None:
        if node not in self._ranks:  # it gained its value while it was locked
            self._ranks[node] = self._ghosts.pop(self._name(node), -np.inf)
        self._use(node)
        self._heap.unlock(node)

    def on_leaf(self, node: TreeNode) -> None:
        self._heap.on_leaf(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        self._ranks[upper] = self._ranks[lower]
        self._heap.split(upper, lower)

    def evict(self, node: TreeNode) -> None:
        self._heap.evict(node)
        self._ghosts[self._name(node)] = self._ranks.pop(node)
        if len(self._ghosts) > self.MAX_GHOSTS:
            self._ghosts.popitem(last=False)

    def victim(self) -> TreeNode | None:
        return self._heap.victim()

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._heap

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def _use(self, node: TreeNode) -> None:
        self._now += 1
        self._ranks[node] = float(np.logaddexp2(self._ranks[node], self._now / self.HALF_LIFE))

    @staticmethod
    def _name(node: TreeNode) -> bytes:
        return b"".join(at.run.tokens.tobytes() for at in node.path() if at.run is not None)
