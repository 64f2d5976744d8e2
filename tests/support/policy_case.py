"""Nodes whose events are reported to an eviction order, and oracles that sort all nodes at every victim."""

from __future__ import annotations

from collections.abc import Callable

from hicache.tree.node import FULL, HOST, SWA, TreeNode
from hicache.tree.policy import make_order

COMPONENT, TIER = SWA, HOST
# What each policy evicts first: the lowest.
RANKS: dict[str, Callable[[TreeNode], tuple[int, ...]]] = {
    "lru": lambda n: (n.last_access_time,),
    "lfu": lambda n: (n.hit_count, n.last_access_time),
    "fifo": lambda n: (n.creation_time,),
    "mru": lambda n: (-n.last_access_time,),
    "filo": lambda n: (-n.creation_time,),
    "priority": lambda n: (n.priority, n.last_access_time),
    "slru": lambda n: (1 if n.hit_count >= 2 else 0, n.last_access_time),
}


def locks_of(node: TreeNode) -> int:
    return node.locks(COMPONENT, TIER)


def add_locks(node: TreeNode, count: int) -> None:
    node.holdings[COMPONENT][TIER].locks += count


class SortedOracle:
    """Sorts all nodes whenever it is asked: by their rank at their last event, then by when that was reported."""

    def __init__(self, name: str) -> None:
        self.rank = RANKS[name]
        self.reported: dict[TreeNode, tuple[tuple[int, ...], int]] = {}
        self.events = 0

    def enter(self, node: TreeNode) -> None:
        self.events += 1
        self.reported[node] = (self.rank(node), self.events)

    def use(self, node: TreeNode) -> None:
        if node in self.reported:
            self.enter(node)

    def unlock(self, node: TreeNode) -> None:
        self.enter(node)

    def beside(self, upper: TreeNode, lower: TreeNode) -> None:
        self.enter(upper)

    def on_leaf(self, node: TreeNode) -> None:
        self.enter(node)

    def leave(self, node: TreeNode) -> None:
        del self.reported[node]

    def by_rank(self) -> list[TreeNode]:
        return sorted(self.reported, key=lambda node: self.reported[node])


class ListOracle:
    """Least recently used first, as a plain list, in which locked nodes keep their place."""

    def __init__(self) -> None:
        self.nodes: list[TreeNode] = []
        self.present: set[TreeNode] = set()

    def enter(self, node: TreeNode) -> None:
        self.use(node)
        self.present.add(node)

    def use(self, node: TreeNode) -> None:
        if node in self.nodes:
            self.nodes.remove(node)
        self.nodes.append(node)

    def unlock(self, node: TreeNode) -> None:
        self.present.add(node)

    def beside(self, upper: TreeNode, lower: TreeNode) -> None:
        self.nodes.insert(self.nodes.index(lower) + 1, upper)
        if lower in self.present:
            self.present.add(upper)

    def on_leaf(self, node: TreeNode) -> None:
        assert node in self.present

    def leave(self, node: TreeNode) -> None:
        self.present.remove(node)

    def by_rank(self) -> list[TreeNode]:
        return [node for node in self.nodes if node in self.present]


class World:
    """Nodes of one account, whose events are reported to an order, as a tree does it, and to an oracle."""

    def __init__(self, name: str, leaves_only: bool) -> None:
        self.leaves_only = leaves_only
        self.order = make_order(name, COMPONENT, TIER, self._is_evictable)
        self.oracle = ListOracle() if name == "lru" else SortedOracle(name)
        self.root = TreeNode(components=(FULL, COMPONENT))
        self.held: list[TreeNode] = []
        self.lock_ends: list[TreeNode] = []
        self.keys = 0

    def grow(self, at: int, priority: int) -> None:
        parent = self._pick([self.root, *self.held], at)
        child = self._link(parent)
        child.hit_count, child.priority = 1, priority % 3
        self.order.insert(child)
        self.oracle.enter(child)
        self.touch_path(parent)

    def touch(self, at: int, _: int) -> None:
        if self.held:
            node = self._pick(self.held, at)
            for above in node.path():
                above.hit_count += 1
            self.touch_path(node)

    def touch_path(self, node: TreeNode) -> None:
        """Uses of locked nodes are reported too: they count when the node is back in the order."""
        for at in node.path():
            at.touch()
            self.order.hit(at)
            self.oracle.use(at)

    def lock(self, at: int, _: int) -> None:
        if self.held:
            end = self._pick(self.held, at)
            self.lock_ends.append(end)
            for node in end.path():
                add_locks(node, 1)
                if locks_of(node) == 1:
                    self.order.lock(node)
                    self.oracle.leave(node)

    def unlock(self, at: int, _: int) -> None:
        if self.lock_ends:
            end = self.lock_ends.pop(at % len(self.lock_ends))
            for node in end.path():
                add_locks(node, -1)
                if not locks_of(node):
                    self.order.unlock(node)
                    self.oracle.unlock(node)

    def split(self, at: int, _: int) -> None:
        if not self.held:
            return
        lower = self._pick(self.held, at)
        assert lower.parent is not None
        key = next(key for key, node in lower.parent.children.items() if node is lower)
        upper = self._link(lower.parent, key)
        upper.hit_count, upper.priority = lower.hit_count, lower.priority
        add_locks(upper, locks_of(lower))
        upper.creation_time, upper.last_access_time = lower.creation_time, lower.last_access_time
        lower.parent = upper
        upper.holdings[COMPONENT][TIER].last_use = lower.holdings[COMPONENT][TIER].last_use
        if not locks_of(lower):
            self.order.split(upper, lower)
        if not locks_of(lower) or isinstance(self.oracle, ListOracle):
            self.oracle.beside(upper, lower)
        upper.children[b"lower"] = lower

    def use_elsewhere(self, at: int, _: int) -> None:
        """Other accounts share the fields, and nothing is reported to this order."""
        if self.held:
            node = self._pick(self.held, at)
            node.touch()
            node.hit_count += 1
            node.priority += 1

    def evict(self, _: int, __: int) -> None:
        node = self.expected()
        if node is not None:
            self._drop(node)

    def drop_any(self, at: int, _: int) -> None:
        """What is dropped need not be the victim: a request may be aborted."""
        free = [node for node in self.held if not locks_of(node) and not node.children]
        if free:
            self._drop(self._pick(free, at))

    def expected(self) -> TreeNode | None:
        """The first evictable of all that are in the order, found by a look at each."""
        allowed = (node for node in self.oracle.by_rank() if not (self.leaves_only and node.children))
        return next(allowed, None)

    def _drop(self, node: TreeNode) -> None:
        """An inner node leaves the account alone: its children follow its parent from then on."""
        parent = node.parent
        self.order.evict(node)
        self.oracle.leave(node)
        self.held.remove(node)
        if node.children:
            assert parent is not None
            for child in node.children.values():
                child.parent = parent
                parent.children[self._new_key()] = child
        assert parent is not None
        parent.children = {key: child for key, child in parent.children.items() if child is not node}
        if not parent.children and parent in self.order:
            self.order.on_leaf(parent)
            self.oracle.on_leaf(parent)

    def _link(self, parent: TreeNode, key: bytes | tuple[str, bytes] | None = None) -> TreeNode:
        node = TreeNode(parent=parent, components=(FULL, COMPONENT))
        parent.children[key or self._new_key()] = node
        self.held.append(node)
        return node

    def _new_key(self) -> bytes:
        self.keys += 1
        return self.keys.to_bytes(4, "little")

    def _is_evictable(self, node: TreeNode) -> bool:
        return not (self.leaves_only and node.children)

    @staticmethod
    def _pick(nodes: list[TreeNode], at: int) -> TreeNode:
        return nodes[at % len(nodes)]
