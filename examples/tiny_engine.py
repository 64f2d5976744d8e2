"""The engine in 150 lines: a tree has the pages on the device, a table by page key the pages on the host.

python examples/tiny_engine.py
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch

from hicache.pages.key import PageHasher

PAGE, ROW = 4, 3  # number of tokens of a page; number of elements of a token


@dataclass(eq=False)
class TreeNode:
    """A page on the device.
    `hicache/pages/node.py: TreeNode` names rows of a table, and is split where prompts part."""

    key: bytes = b""
    slots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    parent: TreeNode | None = None
    children: dict[bytes, TreeNode] = field(default_factory=dict)
    locks: int = 0
    last_use: int = 0

    def path(self) -> list[TreeNode]:
        """Return the node and its ancestors, deepest first. `hicache/pages/node.py: TreeNode.path`"""
        return [] if self.parent is None else [self, *self.parent.path()]

    def lock(self, change: int = 1) -> None:
        """Lock the prefix that ends at this node, or unlock it (-1).
        `hicache/pages/tree.py: RadixTree.lock`"""
        for node in self.path():
            node.locks += change


class TierPages:
    """Pages on the host, by page key.
    `hicache/pages/states.py: TierPages` keeps a row of a table for each page."""

    def __init__(self, num_pages: int) -> None:
        self.free = list(range(num_pages, 0, -1))
        self.in_flight: dict[bytes, int] = {}
        self.held: OrderedDict[bytes, int] = OrderedDict()  # the least recently used page is the first

    def held_end(self, keys: list[bytes], start: int) -> int:
        """Return the index after the consecutive pages from `start` on that are on the host.
        `hicache/flow/located.py: Located.host_end`"""
        return next((at for at in range(start, len(keys)) if keys[at] not in self.held), len(keys))

    def reserve(self, key: bytes, keep: set[bytes]) -> int | None:
        """Reserve a page to write to. Returns None if no page is free or evictable. Evicts no page of `keep`.
        `hicache/pages/states.py: TierPages.reserve`"""
        if not self.free and (victim := next((at for at in self.held if at not in keep), None)):
            self.free.append(self.held.pop(victim))
        if not self.free:
            return None
        self.in_flight[key] = self.free.pop()
        return self.in_flight[key]

    def complete(self, key: bytes) -> None:
        """End the copy of a page: requests find it from now on.
        `hicache/pages/states.py: TierPages.complete`"""
        self.held[key] = self.in_flight.pop(key)

    def use(self, keys: list[bytes]) -> None:
        """Count the pages of a request as used; the end of a prompt is evicted first.
        `hicache/pages/states.py: TierPages.use`"""
        for key in reversed(keys):
            if key in self.held:
                self.held.move_to_end(key)


@dataclass(eq=False)
class Lease:
    """The slots of a request: positions [0, tree_len) have the tree's slots, locked through `node`; later
    positions have the request's own. `hit`: tokens found on device and host. `hicache/flow/lease.py: Lease`"""

    tokens: np.ndarray
    keys: list[bytes]
    node: TreeNode
    slots: torch.Tensor
    tree_len: int
    hit: tuple[int, int]


class TinyEngine:
    """A device of `num_slots` tokens above a host of `num_pages` pages.
    `hicache/engine.py: CacheEngine`"""

    def __init__(self, num_slots: int, num_pages: int) -> None:
        self.device = torch.zeros(num_slots + 1, ROW)  # slot 0 and page 0 absorb writes of padding
        self.host = torch.zeros(num_pages + 1, PAGE, ROW)
        self.free = list(range(1, num_slots + 1))
        self.root = TreeNode()
        self.pages = TierPages(num_pages)
        self.hasher = PageHasher(b"model, dtype, layout", PAGE)
        self.clock = count(1)
        self.copies: deque[tuple[TreeNode, int]] = deque()  # copies to the host that are in flight

    def admit(self, tokens: np.ndarray) -> Lease | None:
        """Admit a request; None, without any change, if the device has too few free slots.
        `hicache/flow/admit.py: Admit.acquire`

        [0, device_end)          pages on the device: locked
        [device_end, host_end)   pages on the host: loaded
        [host_end, ...)          to be computed: at least the last token, for its logits
        """
        keys = self.hasher.chain(self.hasher.seed("tenant"), tokens)
        cacheable = keys[: (len(tokens) - 1) // PAGE]
        node, hits = self.match(cacheable)
        device_end = len(hits) // PAGE
        host_end = self.pages.held_end(cacheable, device_end)
        node.lock()
        num_new = len(tokens) - len(hits)
        if num_new > len(self.free) + PAGE * len(self.evictable()):
            node.lock(-1)
            return None
        self.evict(num_new)
        slots = torch.cat([hits, torch.tensor([self.free.pop() for _ in range(num_new)])])
        lease = Lease(tokens, keys, node, slots, len(hits), (len(hits), (host_end - device_end) * PAGE))
        self.load(lease, host_end * PAGE)
        return lease

    def match(self, keys: list[bytes]) -> tuple[TreeNode, torch.Tensor]:
        """Return the last node of the longest prefix on the device, and the prefix's slots.
        `hicache/pages/tree.py: RadixTree.match`"""
        node, slots = self.root, [self.root.slots]
        for key in keys:
            if key not in node.children:
                break
            node = node.children[key]
            slots.append(node.slots)
        return node, torch.cat(slots)

    def load(self, lease: Lease, end: int) -> None:
        """Load positions [tree_len, end) from host to device.
        `hicache/flow/copies.py: Copies.load` submits the copies and returns;
        each layer of the forward pass waits for its own."""
        for start in range(lease.tree_len, end, PAGE):
            self.device[lease.slots[start : start + PAGE]] = self.host[self.pages.held[lease.keys[start // PAGE]]]
            self.share(lease, start)

    def commit(self, lease: Lease) -> None:
        """Give the complete pages of computed tokens to the tree, where other requests find them.
        `hicache/flow/commit.py: Commit.commit`"""
        for start in range(lease.tree_len, len(lease.keys) * PAGE, PAGE):
            self.share(lease, start)
        self.backup(lease.node)

    def share(self, lease: Lease, start: int) -> None:
        """Give the lease's page at `start` to the tree. `hicache/pages/tree.py: RadixTree.insert`"""
        key, ours = lease.keys[start // PAGE], lease.slots[start : start + PAGE].clone()
        node = lease.node.children.setdefault(key, TreeNode(key, ours, lease.node))
        if node.slots is not ours:  # another request was first, so this request's slots are freed
            lease.slots[start : start + PAGE] = node.slots
            self.free += ours.tolist()
        node.locks += 1  # the ancestors of this node already have the lease's lock
        lease.node, lease.tree_len = node, start + PAGE

    def backup(self, node: TreeNode) -> None:
        """Copy the pages of the path to `node` that the host lacks.
        `hicache/flow/copies.py: Copies.backup_selected`"""
        path = node.path()[::-1]
        for at in path:
            if at.key not in self.pages.held and at.key not in self.pages.in_flight:
                page = self.pages.reserve(at.key, keep={at.key for at in path})
                if page is None:
                    return
                at.lock()
                self.copies.append((at, page))

    def poll(self) -> None:
        """Finish the copies: requests find their pages from now on.
        `hicache/engine.py: CacheEngine.poll`"""
        while self.copies:
            node, page = self.copies.popleft()
            self.host[page] = self.device[node.slots]
            self.pages.complete(node.key)
            node.lock(-1)

    def evictable(self) -> list[TreeNode]:
        """Return the unlocked nodes, parents first. `hicache/pages/tree.py: RadixTree.evictable` keeps a count
        instead."""
        nodes = [*self.root.children.values()]
        for node in nodes:
            nodes.extend(node.children.values())
        return [node for node in nodes if not node.locks]

    def evict(self, num_slots: int) -> None:
        """Evict the least recently used leaf until `num_slots` are free; an engine keeps an order of its pages.
        `hicache/flow/copies.py: Copies.make_available`"""
        while len(self.free) < num_slots:
            victim = min((node for node in self.evictable() if not node.children), key=lambda node: node.last_use)
            assert victim.parent is not None
            del victim.parent.children[victim.key]
            self.free += victim.slots.tolist()

    def release(self, lease: Lease) -> None:
        """End a request: count its prefix as used, and free its own slots.
        `hicache/flow/commit.py: Commit.release`"""
        for node in lease.node.path():  # in this order, the deepest node becomes the least recently used one
            node.last_use = next(self.clock)
        lease.node.lock(-1)
        self.pages.use(lease.keys)
        self.free += lease.slots[lease.tree_len :].tolist()


def kv_of(tokens: np.ndarray) -> torch.Tensor:
    """Stands for a model's keys and values, `[tokens, ROW]`: each row depends on all tokens so far."""
    sums = torch.from_numpy(np.cumsum(tokens * np.arange(1, len(tokens) + 1)))
    return sums[:, None] * torch.arange(1.0, ROW + 1)


def serve(engine: TinyEngine, name: str, tokens: np.ndarray) -> None:
    """Serve one request, from its arrival to its end."""
    lease, truth = engine.admit(tokens), kv_of(tokens)
    assert lease is not None, "nobody else holds anything"
    start = sum(lease.hit)
    engine.device[lease.slots[start:]] = truth[start:]  # this assignment stands for the forward pass
    assert torch.equal(engine.device[lease.slots], truth), "what came from the cache is what was computed"
    engine.commit(lease)
    engine.release(lease)
    engine.poll()
    print(f"{name}: device {lease.hit[0]}, host {lease.hit[1]}, computed {len(tokens) - start}")


def main() -> None:
    engine, rng = TinyEngine(num_slots=24, num_pages=16), np.random.default_rng(0)
    document, other = rng.integers(0, 1000, 18), rng.integers(0, 1000, 18)
    for name, tokens in {"first": document, "again": document, "other": other, "after": document}.items():
        serve(engine, name, tokens)


if __name__ == "__main__":
    main()
