"""What an eviction order is, and the two that policies are made of.

An order is a persistent structure: the next victim is found without looking at the others. A tree keeps one per place
and tells it of every event there; a policy of its own is a class that answers to `EvictionOrder`, or a strategy in a
`PriorityHeap`, in a file that imports this one, and a line in the table of `hicache.tree.policy`.

May import nothing above `hicache.tree.node`.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hicache.tree.node import TreeNode

Priority = float | tuple[float, ...]
MayGo = Callable[[TreeNode], bool]

_NO_ENTRY = -1
_SPARE_ENTRIES = 16  # stale ones that a small heap may have before it is worth compacting


class EvictionOrder(Protocol):
    """The nodes that hold a value at one place and are not locked there, and which of them goes next.

    Called by the tree alone, from the scheduler thread. A node's fields are up to date when an event of it is told, and
    of a path the deepest node comes first.
    """

    def insert(self, node: TreeNode) -> None:
        """`node`, unlocked, gained a value here and enters the order as the most recently used."""

    def hit(self, node: TreeNode) -> None:
        """`node` was used; nothing happens where it is not in the order."""

    def lock(self, node: TreeNode) -> None:
        """Someone needs `node`, which leaves the order."""

    def unlock(self, node: TreeNode) -> None:
        """Nobody needs `node` any more: it is back in the order, as the most recently used."""

    def expose(self, node: TreeNode) -> None:
        """The last child of `node`, which is in the order, left this place: where only leaves may go, it may now."""

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` is new and took the front of `lower`, which is in the order; it enters with the rank of `lower`."""

    def evict(self, node: TreeNode) -> None:
        """The value of `node` leaves this place, and `node` the order."""

    def victim(self) -> TreeNode | None:
        """The next to go, which stays in the order until `evict`; None where none may go."""

    def __contains__(self, node: TreeNode) -> bool: ...

    def __iter__(self) -> Iterator[TreeNode]: ...

    def __len__(self) -> int: ...


class RecencyList:
    """Least recently used first: a doubly linked list through `older[place]` and `newer[place]` of its nodes.

    Every operation is O(1). A path is told deepest node first, so a parent is newer than its children and the oldest
    node is a leaf: no leaf test is needed. Iteration: oldest first.
    """

    def __init__(self, place: int) -> None:
        self._place = place
        self._num_nodes = 0
        # A sentinel closes the ring: sentinel.newer is the oldest node, sentinel.older the newest.
        self._ring = TreeNode()
        self._ring.older[place] = self._ring.newer[place] = self._ring

    def insert(self, node: TreeNode) -> None:
        newest = self._ring.older[self._place]
        assert newest is not None
        self._link(node, newest)

    def hit(self, node: TreeNode) -> None:
        if node in self:
            self._unlink(node)
            self.insert(node)

    def lock(self, node: TreeNode) -> None:
        self._unlink(node)

    def unlock(self, node: TreeNode) -> None:
        self.insert(node)

    def expose(self, node: TreeNode) -> None:
        """Nothing to do: its children were older."""

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        self._link(upper, lower)

    def evict(self, node: TreeNode) -> None:
        self._unlink(node)

    def victim(self) -> TreeNode | None:
        node = self._ring.newer[self._place]
        return None if node is self._ring else node

    def __contains__(self, node: TreeNode) -> bool:
        return node.newer[self._place] is not None

    def __iter__(self) -> Iterator[TreeNode]:
        node = self._ring.newer[self._place]
        while node is not None and node is not self._ring:
            yield node
            node = node.newer[self._place]

    def __len__(self) -> int:
        return self._num_nodes

    def _link(self, node: TreeNode, anchor: TreeNode) -> None:
        """Put `node` right on the newer side of `anchor`."""
        place = self._place
        after = anchor.newer[place]
        assert after is not None and node.newer[place] is None
        node.older[place], node.newer[place] = anchor, after
        anchor.newer[place] = after.older[place] = node
        self._num_nodes += 1

    def _unlink(self, node: TreeNode) -> None:
        place = self._place
        older, newer = node.older[place], node.newer[place]
        assert older is not None and newer is not None
        older.newer[place], newer.older[place] = newer, older
        node.older[place] = node.newer[place] = None
        self._num_nodes -= 1


class EvictionStrategy(ABC):
    """Ranks nodes by a number or a tuple of numbers."""

    @abstractmethod
    def get_priority(self, node: TreeNode) -> Priority:
        """The node with the lowest goes first. All of one strategy are of one length."""


class PriorityHeap:
    """The node whose priority was lowest when its last event was told goes first; of equals, the one told earlier.

    `may_go(node)`: whether it may be a victim now. One that may not has no entry in the heap, or loses it when it comes
    to the top, until its next event. An entry that a later event has made stale stays until it comes to the top or
    stale entries outnumber the others; each is made by one event, so every event costs O(log n), amortised. Iteration:
    in no order.
    """

    def __init__(self, strategy: EvictionStrategy, may_go: MayGo) -> None:
        self._strategy, self._may_go = strategy, may_go
        # (*priority, sequence number, node), flat: a comparison that has to follow pointers costs much of a large heap.
        self._heap: list[tuple[Any, ...]] = []
        self._sequence = itertools.count()
        # The sequence number of the entry that speaks for each node in the order.
        self._current: dict[TreeNode, int] = {}
        self._num_current = 0  # of which so many are in the heap

    @property
    def num_entries(self) -> int:
        """Entries of the heap, stale ones included: at most two a node and a few more."""
        return len(self._heap)

    def insert(self, node: TreeNode) -> None:
        assert node not in self._current
        self._push(node)

    def hit(self, node: TreeNode) -> None:
        if node in self._current:
            self._num_current -= self._current[node] != _NO_ENTRY
            self._push(node)

    def lock(self, node: TreeNode) -> None:
        self._num_current -= self._current.pop(node) != _NO_ENTRY
        self._compact()

    def unlock(self, node: TreeNode) -> None:
        self.insert(node)

    def expose(self, node: TreeNode) -> None:
        self.hit(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """The fields of `upper` are those of `lower`, so is its priority."""
        self.insert(upper)

    def evict(self, node: TreeNode) -> None:
        self.lock(node)

    def victim(self) -> TreeNode | None:
        node: TreeNode
        while self._heap:
            first = self._heap[0]
            sequence, node = first[-2], first[-1]
            if self._current.get(node) == sequence:
                if self._may_go(node):
                    return node
                self._current[node] = _NO_ENTRY
                self._num_current -= 1
            heapq.heappop(self._heap)
        return None

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._current

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self._current)

    def __len__(self) -> int:
        return len(self._current)

    def _push(self, node: TreeNode) -> None:
        """Enter the node's priority of now; an entry that it has already counts as stale before the call."""
        if self._may_go(node):
            self._current[node] = sequence = next(self._sequence)
            self._num_current += 1
            priority = self._strategy.get_priority(node)
            front = priority if isinstance(priority, tuple) else (priority,)
            heapq.heappush(self._heap, (*front, sequence, node))
        else:
            self._current[node] = _NO_ENTRY
        self._compact()

    def _compact(self) -> None:
        """Rebuild the heap when more than half of it is stale, so that each stale entry pays for one other."""
        if len(self._heap) > 2 * self._num_current + _SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._current.get(entry[-1]) == entry[-2]]
            heapq.heapify(self._heap)
