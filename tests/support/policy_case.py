"""A world of nodes that orders are told of, and oracles that sort them all at every victim."""

from __future__ import annotations

from collections.abc import Callable

from hicache.tree.node import TreeNode
from hicache.tree.policy import make_order

PLACE = 3
# What goes first under each policy: the lowest.
RANKS: dict[str, Callable[[TreeNode], tuple[int, ...]]] = {
    "lru": lambda n: (n.last_access_time,),
    "lfu": lambda n: (n.hit_count, n.last_access_time),
    "fifo": lambda n: (n.creation_time,),
    "mru": lambda n: (-n.last_access_time,),
    "filo": lambda n: (-n.creation_time,),
    "priority": lambda n: (n.priority, n.last_access_time),
    "slru": lambda n: (1 if n.hit_count >= 2 else 0, n.last_access_time),
}


class SortedOracle:
    """Sorts all nodes whenever it is asked: by their rank when their last event was told, then by when it was told."""

    def __init__(self, name: str) -> None:
        self.rank = RANKS[name]
        self.told: dict[TreeNode, tuple[tuple[int, ...], int]] = {}
        self.events = 0

    def enter(self, node: TreeNode) -> None:
        self.events += 1
        self.told[node] = (self.rank(node), self.events)

    def beside(self, upper: TreeNode, lower: TreeNode) -> None:
        self.enter(upper)

    def expose(self, node: TreeNode) -> None:
        self.enter(node)

    def leave(self, node: TreeNode) -> None:
        del self.told[node]

    def by_rank(self) -> list[TreeNode]:
        return sorted(self.told, key=lambda node: self.told[node])


class ListOracle:
    """Least recently used first, as a plain list."""

    def __init__(self) -> None:
        self.nodes: list[TreeNode] = []

    def enter(self, node: TreeNode) -> None:
        if node in self.nodes:
            self.nodes.remove(node)
        self.nodes.append(node)

    def beside(self, upper: TreeNode, lower: TreeNode) -> None:
        self.nodes.insert(self.nodes.index(lower) + 1, upper)

    def expose(self, node: TreeNode) -> None:
        assert node in self.nodes

    def leave(self, node: TreeNode) -> None:
        self.nodes.remove(node)

    def by_rank(self) -> list[TreeNode]:
        return list(self.nodes)


class World:
    """Nodes at one place, with the rules by which a tree tells an order and, at the same time, an oracle of them."""

    def __init__(self, name: str, leaves_only: bool) -> None:
        self.leaves_only = leaves_only
        self.order = make_order(name, PLACE, self._may_go)
        self.oracle = ListOracle() if name == "lru" else SortedOracle(name)
        self.root = TreeNode()
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
        """The order is told of locked nodes too: it has to ignore them."""
        for at in node.path():
            at.used()
            self.order.hit(at)
            if not at.locks[PLACE]:
                self.oracle.enter(at)

    def lock(self, at: int, _: int) -> None:
        if self.held:
            end = self._pick(self.held, at)
            self.lock_ends.append(end)
            for node in end.path():
                node.locks[PLACE] += 1
                if node.locks[PLACE] == 1:
                    self.order.lock(node)
                    self.oracle.leave(node)

    def unlock(self, at: int, _: int) -> None:
        if self.lock_ends:
            end = self.lock_ends.pop(at % len(self.lock_ends))
            for node in end.path():
                node.locks[PLACE] -= 1
                if not node.locks[PLACE]:
                    node.used()
                    self.order.unlock(node)
                    self.oracle.enter(node)

    def split(self, at: int, _: int) -> None:
        if not self.held:
            return
        lower = self._pick(self.held, at)
        assert lower.parent is not None
        key = next(key for key, node in lower.parent.children.items() if node is lower)
        upper = self._link(lower.parent, key)
        upper.hit_count, upper.priority, upper.locks = lower.hit_count, lower.priority, list(lower.locks)
        upper.creation_time, upper.last_access_time = lower.creation_time, lower.last_access_time
        lower.parent = upper
        if not lower.locks[PLACE]:
            self.order.split(upper, lower)
            self.oracle.beside(upper, lower)
        upper.children[b"lower"] = lower

    def use_elsewhere(self, at: int, _: int) -> None:
        """Another place shares the fields, and this one is told nothing."""
        if self.held:
            node = self._pick(self.held, at)
            node.used()
            node.hit_count += 1
            node.priority += 1

    def evict(self, _: int, __: int) -> None:
        node = self.expected()
        if node is not None:
            self._drop(node)

    def drop_any(self, at: int, _: int) -> None:
        """What goes need not be the victim: a request may be aborted."""
        free = [node for node in self.held if not node.locks[PLACE] and not node.children]
        if free:
            self._drop(self._pick(free, at))

    def expected(self) -> TreeNode | None:
        """The first that may go of all that are in order, found the slow way."""
        allowed = (node for node in self.oracle.by_rank() if not (self.leaves_only and node.children))
        return next(allowed, None)

    def _drop(self, node: TreeNode) -> None:
        """An inner node that goes stays as a link: only its value has left this place."""
        parent = node.parent
        self.order.evict(node)
        self.oracle.leave(node)
        self.held.remove(node)
        if node.children:  # taken out of the middle: the children move up
            assert parent is not None
            for child in node.children.values():
                child.parent = parent
                parent.children[self._new_key()] = child
        assert parent is not None
        parent.children = {key: child for key, child in parent.children.items() if child is not node}
        if not parent.children and parent in self.order:
            self.order.expose(parent)
            self.oracle.expose(parent)

    def _link(self, parent: TreeNode, key: bytes | tuple[str, bytes] | None = None) -> TreeNode:
        node = TreeNode(parent=parent)
        parent.children[key or self._new_key()] = node
        self.held.append(node)
        return node

    def _new_key(self) -> bytes:
        self.keys += 1
        return self.keys.to_bytes(4, "little")

    def _may_go(self, node: TreeNode) -> bool:
        return not (self.leaves_only and node.children)

    @staticmethod
    def _pick(nodes: list[TreeNode], at: int) -> TreeNode:
        return nodes[at % len(nodes)]
