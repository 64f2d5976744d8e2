"""What an eviction order is, and the two that policies are made of.

An order is a persistent structure: the next victim is found without a look at the others. A tree keeps one for each
component on each tier and reports every event to it. A policy of one's own is an `EvictionOrder`, or a strategy in a
`PriorityHeap`, in a file that imports this one, and an entry in the table of `hicache.tree.policy`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from hicache.tiers import Component, Tier
from hicache.tree.node import Holding, TreeNode

Priority = float | tuple[float, ...]
IsEvictable = Callable[[TreeNode], bool]

_NO_ENTRY = -1
_uses = itertools.count(1)


class EvictionOrder(Protocol):
    """The nodes that hold a component on a tier and are not locked there, and which of them is evicted next.

    Called by the tree alone, from the scheduler thread. A node's fields are up to date when its event is reported; of a
    path the deepest node is reported first.
    """

    def insert(self, node: TreeNode) -> None:
        """`node`, unlocked, gained a value and enters the order as the most recently used."""

    def hit(self, node: TreeNode) -> None:
        """`node` was used; where it is locked, that counts once it is unlocked."""

    def lock(self, node: TreeNode) -> None:
        """`node` got its first lock and leaves the order."""

    def unlock(self, node: TreeNode) -> None:
        """`node` lost its last lock and is back in the order, with the rank of its last use. That is no use."""

    def on_leaf(self, node: TreeNode) -> None:
        """`node`, which is in the order, became a leaf of its tier, or its rank changed without a use."""

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` is new and took the first tokens of `lower`, which is in the order; it enters with `lower`'s rank."""

    def evict(self, node: TreeNode) -> None:
        """The value of `node` leaves the tier, and `node` the order."""

    def victim(self) -> TreeNode | None:
        """The next to be evicted, which stays in the order until `evict`; None where none may be."""

    def __contains__(self, node: TreeNode) -> bool: ...

    def __iter__(self) -> Iterator[TreeNode]: ...

    def __len__(self) -> int: ...


class RecencyList:
    """Least recently used first: a doubly linked list through `older` and `newer` of its nodes' holdings.

    Every operation is O(1), but for `unlock`, which looks for the node's place from both ends: copies lock what was
    just used, or what is to go. A path is reported deepest node first, so nearly always a parent is newer than its
    children. One that is oldest and may not be evicted is set aside until it is a leaf. Iteration: oldest first, then
    those.
    """

    def __init__(self, component: Component, tier: Tier, is_evictable: IsEvictable) -> None:
        self._component, self._tier, self._is_evictable = component, tier, is_evictable
        self._num_nodes = 0
        self._aside: dict[TreeNode, None] = {}
        # A sentinel without a node closes the ring: sentinel.newer is the oldest, sentinel.older the newest.
        self._ring = Holding()
        self._ring.older = self._ring.newer = self._ring

    def insert(self, node: TreeNode) -> None:
        self._holding(node).last_use = next(_uses)
        self._link_newest(node)

    def hit(self, node: TreeNode) -> None:
        holding = self._holding(node)
        holding.last_use = next(_uses)
        if holding.newer is not None:
            self._unlink(node)
            self._link_newest(node)

    def lock(self, node: TreeNode) -> None:
        self.evict(node)

    def unlock(self, node: TreeNode) -> None:
        """Between those that were used before and after it."""
        last_use = self._holding(node).last_use
        old = new = self._ring
        while True:
            old, new = _next(old.newer), _next(new.older)
            if new.node is None or new.last_use <= last_use:
                return self._link(node, new)
            if old.last_use > last_use:
                return self._link(node, _next(old.older))

    def on_leaf(self, node: TreeNode) -> None:
        if node in self._aside:
            del self._aside[node]
            self.unlock(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`upper` has the last use of `lower` already."""
        if lower in self._aside:
            self._aside[upper] = None
        else:
            self._link(upper, self._holding(lower))

    def evict(self, node: TreeNode) -> None:
        if node in self._aside:
            del self._aside[node]
        else:
            self._unlink(node)

    def victim(self) -> TreeNode | None:
        while (node := _next(self._ring.newer).node) is not None and not self._is_evictable(node):
            self._unlink(node)
            self._aside[node] = None
        return node

    def __contains__(self, node: TreeNode) -> bool:
        return self._holding(node).newer is not None or node in self._aside

    def __iter__(self) -> Iterator[TreeNode]:
        holding = self._ring.newer
        while holding is not None and holding.node is not None:
            yield holding.node
            holding = holding.newer
        yield from self._aside

    def __len__(self) -> int:
        return self._num_nodes + len(self._aside)

    def _holding(self, node: TreeNode) -> Holding:
        return node.holdings[self._component][self._tier]

    def _link_newest(self, node: TreeNode) -> None:
        self._link(node, _next(self._ring.older))

    def _unlink(self, node: TreeNode) -> None:
        holding = self._holding(node)
        older, newer = _next(holding.older), _next(holding.newer)
        older.newer, newer.older = newer, older
        holding.older = holding.newer = holding.node = None
        self._num_nodes -= 1

    def _link(self, node: TreeNode, anchor: Holding) -> None:
        """Insert `node` next to `anchor`, on its newer side."""
        holding, after = self._holding(node), _next(anchor.newer)
        assert holding.newer is None
        holding.node, holding.older, holding.newer = node, anchor, after
        anchor.newer = after.older = holding
        self._num_nodes += 1


def _next(holding: Holding | None) -> Holding:
    """A neighbour of what is in the ring, which has two."""
    assert holding is not None
    return holding


class ExpectedLast:
    """What queued requests expect to find goes last: two orders of one policy, of which the second is asked for a
    victim when the first has none.

    A node is in the second while its holding is `expected`, which changes while it is in neither. Ancestors of an
    expected node are expected too, so both orders keep what they promise of parents and children. Iteration: the first,
    then the second.
    """

    def __init__(self, component: Component, tier: Tier, others: EvictionOrder, expected: EvictionOrder) -> None:
        self._component, self._tier = component, tier
        self._others, self._expected = others, expected

    def insert(self, node: TreeNode) -> None:
        self._order_of(node).insert(node)

    def hit(self, node: TreeNode) -> None:
        self._order_of(node).hit(node)

    def lock(self, node: TreeNode) -> None:
        self._order_of(node).lock(node)

    def unlock(self, node: TreeNode) -> None:
        self._order_of(node).unlock(node)

    def on_leaf(self, node: TreeNode) -> None:
        self._order_of(node).on_leaf(node)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        self._order_of(lower).split(upper, lower)  # as many expect the one as the other

    def evict(self, node: TreeNode) -> None:
        self._order_of(node).evict(node)

    def victim(self) -> TreeNode | None:
        return self._others.victim() or self._expected.victim()

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._order_of(node)

    def __iter__(self) -> Iterator[TreeNode]:
        return itertools.chain(self._others, self._expected)

    def __len__(self) -> int:
        return len(self._others) + len(self._expected)

    def _order_of(self, node: TreeNode) -> EvictionOrder:
        return self._expected if node.holdings[self._component][self._tier].expected else self._others


class Usage(Protocol):
    """What strategies rank by: the fields of a node, or of a block in the cache of another server."""

    hit_count: int
    priority: int
    last_access_time: int
    creation_time: int


U = TypeVar("U", bound=Usage)


class EvictionStrategy(ABC):
    """Ranks nodes by a number or a tuple of numbers."""

    @abstractmethod
    def get_priority(self, node: Usage) -> Priority:
        """The node with the lowest goes first. All of one strategy are of one length."""


class PriorityHeap(Generic[U]):
    """The node whose priority was lowest at its last event goes first; of equals, the one with the earlier event.

    `is_evictable(node)`: whether it may be a victim now. One that may not has no entry in the heap, or loses it at the
    top, until its next event. Nothing stale is left behind for one later call to clear away: every event costs at most
    O(log n). Iteration: in no order.
    """

    def __init__(self, strategy: EvictionStrategy, is_evictable: Callable[[U], bool]) -> None:
        self._strategy, self._is_evictable = strategy, is_evictable
        # (*priority, sequence number, node), flat: a comparison that has to follow pointers costs much of a large heap.
        self._heap: list[tuple[Any, ...]] = []
        self._sequence = itertools.count()
        self._at: dict[U, int] = {}  # where the entry of each node in the order is

    def insert(self, node: U) -> None:
        assert node not in self._at
        self._enter(node)

    def hit(self, node: U) -> None:
        if node in self._at:
            self._leave(node)
            self._enter(node)

    def lock(self, node: U) -> None:
        self._leave(node)

    def unlock(self, node: U) -> None:
        self._enter(node)

    def on_leaf(self, node: U) -> None:
        self.hit(node)

    def split(self, upper: U, lower: U) -> None:
        """The fields of `upper` are those of `lower`, so is its priority."""
        self.insert(upper)

    def evict(self, node: U) -> None:
        self._leave(node)

    def victim(self) -> U | None:
        while self._heap:
            node: U = self._heap[0][-1]
            if self._is_evictable(node):
                return node
            self._leave(node)
            self._at[node] = _NO_ENTRY
        return None

    def rank_again(self) -> None:
        """All priorities have changed."""
        self._heap = sorted((*self._front(entry[-1]), *entry[-2:]) for entry in self._heap)
        self._at.update((entry[-1], at) for at, entry in enumerate(self._heap))

    def __contains__(self, node: U) -> bool:
        return node in self._at

    def __iter__(self) -> Iterator[U]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def _front(self, node: U) -> tuple[float, ...]:
        priority = self._strategy.get_priority(node)
        return priority if isinstance(priority, tuple) else (priority,)

    def _enter(self, node: U) -> None:
        """Enter the node's priority of now."""
        if self._is_evictable(node):
            self._heap.append((*self._front(node), next(self._sequence), node))
            self._rise(len(self._heap) - 1, self._heap[-1])
        else:
            self._at[node] = _NO_ENTRY

    def _leave(self, node: U) -> None:
        at = self._at.pop(node)
        if at != _NO_ENTRY:
            last = self._heap.pop()
            if at < len(self._heap):
                self._rise(self._sink(at), last)

    def _sink(self, at: int) -> int:
        """Fill the empty place with the lower of its children, theirs with theirs; returns the place that is left."""
        heap, where, end = self._heap, self._at, len(self._heap)
        while (child := 2 * at + 1) < end:
            if child + 1 < end and heap[child + 1] < heap[child]:
                child += 1
            heap[at] = entry = heap[child]
            where[entry[-1]] = at
            at = child
        return at

    def _rise(self, at: int, entry: tuple[Any, ...]) -> None:
        """Put `entry` into the empty place, or as far above it as it is lower than what is there."""
        heap, where = self._heap, self._at
        while at and entry < (above := heap[(at - 1) >> 1]):
            heap[at] = above
            where[above[-1]] = at
            at = (at - 1) >> 1
        heap[at] = entry
        where[entry[-1]] = at


OrderFactory = Callable[[Component, Tier, IsEvictable], EvictionOrder]
"""Makes an empty order for a component on a tier."""


def ranked(strategy: Callable[[], EvictionStrategy]) -> OrderFactory:
    """Orders that are heaps, each ranked by a strategy of its own."""
    return lambda component, tier, is_evictable: PriorityHeap(strategy(), is_evictable)
