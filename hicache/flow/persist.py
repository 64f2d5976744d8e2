"""Down, second half: host to disk.

Pages that reached the host go to the writer thread in batches, locked on the host until the store has acknowledged
them. At most half of the host tier is locked so; what comes beyond that waits without a lock, and is lost to the disk
only if the host evicts it before its turn. What the store refuses stays on the host, and is sent again when a request
that used it ends. Pages that a hanging writer has stay locked until it returns; nothing else waits for that.
"""

from __future__ import annotations

import itertools
from collections import deque

import torch

from hicache.disk.jobs import Hung, WriteDone, WriteJob
from hicache.disk.workers import DiskTier
from hicache.flow.base import Parts
from hicache.tree.node import Span, Tier, TreeNode

_BATCH_PAGES = 16


class _Store(Span):
    """One node on its way: `jobs` batches are out, `ok` as long as none failed. `hung`: those whose writer hangs."""

    def __init__(self, node: TreeNode, pages: torch.Tensor, jobs: int) -> None:
        super().__init__([node])
        self.pages, self.jobs, self.ok = pages, jobs, True
        self.hung: set[int] = set()

    @property
    def settled(self) -> bool:
        """Whether it waits for nothing, or for a hanging writer alone. Once it is, it stays so."""
        return self.jobs == len(self.hung)


class Persist:
    """Owned by the scheduler thread; the writer thread sees frozen jobs only."""

    def __init__(self, parts: Parts, disk: DiskTier) -> None:
        self._parts, self._disk = parts, disk
        self._tickets = itertools.count()
        self._stores: dict[int, _Store] = {}
        self._backlog: deque[WriteJob] = deque()
        self._done: deque[WriteDone | Hung] = deque()
        # Of stores that are not settled. What a hanging writer has is not among them: it would hold up all others.
        self._locked_pages = 0
        self._waiting: deque[TreeNode] = deque()
        count = parts.metrics.counter
        self._bytes = count("persist.bytes", "bytes of pages, before compression, that the store acknowledged")
        self._failures = count("persist.failed_pages", "pages that the store did not take")

    def store(self, nodes: list[TreeNode]) -> None:
        """Send what is on the host and not yet on disk on its way, or let it wait for its turn."""
        for node in nodes:
            if self._waiting or not self._fits(node):
                self._waiting.append(node)
            else:
                self._send(node)
        self._push()

    def used(self, node: TreeNode) -> None:
        """A request used the prefix that ends with `node`: what the disk has of it counts as used, whichever tier
        served it; what it refused before is sent again."""
        path = list(node.path())[::-1]
        self._disk.used([key for at in path if at.stored for key in self._parts.tree.names.of(at)])
        missed = [at for at in path if not at.stored and at.holds(Tier.HOST)]
        # While others wait for their turn, so may these be: a node is to wait once, however often it is used.
        if missed and not self._waiting and self._disk.takes_writes:
            self.store(missed)

    def ready(self) -> int:
        self._done.extend(self._disk.drain_writes())
        return len(self._done)

    def land(self, count: int) -> None:
        for _ in range(count):
            done = self._done.popleft()
            store = self._stores[done.ticket]
            was_settled = store.settled
            if isinstance(done, Hung):
                store.hung.add(done.batch)
            else:
                self._take(store, done)
            if store.settled and not was_settled:
                self._locked_pages -= len(store.pages)
            if not store.jobs:
                self._end(self._stores.pop(done.ticket))
        while self._waiting and self._fits(self._waiting[0]):
            # A split may have left part of it above; ancestors that wait for their own turn lose nothing by coming now.
            for node in reversed(list(self._waiting.popleft().path())):
                self._send(node)
        self._push()

    def busy(self) -> bool:
        return bool(self._waiting or self._locked_pages)

    def _take(self, store: _Store, done: WriteDone) -> None:
        assert self._parts.host is not None
        store.jobs -= 1
        store.hung.discard(done.batch)
        store.ok &= all(done.ok)
        written = sum(done.ok)
        self._bytes.value += written * self._parts.host.page_bytes
        self._failures.value += len(done.ok) - written

    def _fits(self, node: TreeNode) -> bool:
        """Whether locking the node keeps half of the host free of such locks; one node alone always may."""
        assert self._parts.host is not None
        pages = node.num_tokens // self._parts.tree.page_size
        return not self._locked_pages or self._locked_pages + pages <= self._parts.host.num_pages // 2

    def _send(self, node: TreeNode) -> None:
        tree, host = self._parts.tree, self._parts.host
        assert host is not None
        if node.stored or not node.holds(Tier.HOST) or any(isinstance(span, _Store) for span in node.spans):
            return
        pages = node.held(Tier.HOST)
        keys, views = tree.names.of(node), host.views(pages)
        tree.lock(node, Tier.HOST)
        host.begin_read(pages)
        self._locked_pages += len(pages)
        ticket = next(self._tickets)
        batches = range(0, len(keys), _BATCH_PAGES)
        self._stores[ticket] = _Store(node, pages.clone(), len(batches))
        for batch, at in enumerate(batches):
            end = at + _BATCH_PAGES
            self._backlog.append(WriteJob(ticket, tuple(keys[at:end]), tuple(views[at:end]), batch))

    def _push(self) -> None:
        while self._backlog and self._disk.submit(self._backlog[0]):
            self._backlog.popleft()

    def _end(self, store: _Store) -> None:
        assert self._parts.host is not None
        self._parts.host.end_read(store.pages)
        for node in store.nodes:
            node.stored = store.ok
        store.leave()
        self._parts.tree.unlock(store.nodes[-1], Tier.HOST)
