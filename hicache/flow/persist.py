"""Host to disk.

What reached the host goes to the writer thread in batches, locked on the host until the store has acknowledged it. At
most half of a component's host pool is locked so; what comes beyond that waits without a lock, and is lost to the disk
only if the host evicts it before its turn. What the store refuses stays on the host, and is sent again when a request
that used it ends. Pages that a stalled writer has stay locked until it returns; nothing else waits for that.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import torch

from hicache.disk.jobs import Stalled, WriteDone, WriteJob
from hicache.disk.workers import DiskTier
from hicache.flow.components import CacheComponent
from hicache.flow.context import EngineContext
from hicache.tree.events import EventLog
from hicache.tree.node import FULL, HOST, NodeRun, TreeNode

_BATCH_PAGES = 16


class _Store(NodeRun):
    """What a component has of one node: `jobs` batches are out, `ok` as long as none failed; `stalled`: the batches of
    a stalled writer."""

    def __init__(self, node: TreeNode, component: CacheComponent, pages: torch.Tensor, jobs: int) -> None:
        super().__init__([node], component.name)
        self.cache_component, self.pages, self.jobs, self.ok = component, pages, jobs, True
        self.stalled: set[int] = set()

    @property
    def is_settled(self) -> bool:
        """Whether it waits for nothing, or for a stalled writer alone. Once it is, it stays so."""
        return self.jobs == len(self.stalled)


class Persist:
    """Owned by the scheduler thread; the writer thread sees frozen jobs only."""

    def __init__(self, context: EngineContext, disk: DiskTier) -> None:
        self._context, self._disk = context, disk
        self._tickets = itertools.count()
        self._stores: dict[int, _Store] = {}
        self._backlog: deque[WriteJob] = deque()
        # By component, of stores that are not settled. What a stalled writer has would hold up all others.
        self._locked_pages = dict.fromkeys(context.by_name, 0)
        self._waiting: deque[TreeNode] = deque()
        count, histogram, gauge = context.metrics.counter, context.metrics.histogram, context.metrics.gauge
        self._bytes = histogram("persist.bytes", "bytes, before compression, of pages of a job that the store took")
        self._seconds = histogram("persist.seconds", "time that job took the writer, its share of a batch")
        self._failures = count("persist.failed_pages", "pages that the store did not take")
        gauge("persist.queued_nodes", "nodes that wait, unlocked, for their turn to be written", self._waiting.__len__)
        gauge("persist.queued_jobs", "jobs that wait for room in the writer's queue", self._backlog.__len__)

    def store(self, nodes: Sequence[TreeNode]) -> None:
        """Send what is on the host and not yet on disk, or let it wait for its turn."""
        for node in nodes:
            if self._waiting or not self._fits(node):
                self._waiting.append(node)
            else:
                self._send(node)
        self._push()

    def touch(self, node: TreeNode) -> None:
        """A request used the prefix that ends with `node`: what the disk has of it counts as used, whichever tier
        served it; what it refused before is sent again.

        A prefix counts as used after what continues it, pages after windows and states: these are evicted first.
        """
        names, path = self._context.tree.names, node.path()[::-1]
        keys = [key for at in path if at.is_stored(FULL) for key in names.of(at)]
        for component in self._context.components[1:]:
            for at in component.rules.required_nodes(node):
                if at.is_stored(component.name):
                    keys += self._keys(at, component)
        self._disk.used(keys)
        # While others wait for their turn, so may these: a node is to wait once, however often it is used.
        if not self._waiting and not self._disk.writes.refuses():
            self.store([at for at in path if self._unstored(at)])

    def finished(self) -> Sequence[int]:
        return self._disk.writes.finished()

    def complete(self, through: Sequence[int]) -> None:
        for done in self._disk.writes.take(through):
            store = self._stores[done.ticket]
            was_settled = store.is_settled
            if isinstance(done, Stalled):
                store.stalled.add(done.batch)
            else:
                self._take(store, done)
            if store.is_settled and not was_settled:
                self._locked_pages[store.component] -= len(store.pages)
            if not store.jobs:
                self._end(self._stores.pop(done.ticket))
        while self._waiting and self._fits(self._waiting[0]):
            # A split may have left part of it above; ancestors that wait for their own turn lose nothing by coming now.
            for node in reversed(self._waiting.popleft().path()):
                self._send(node)
        self._push()

    @property
    def num_waiting(self) -> int:
        """Nodes that wait for their turn."""
        return len(self._waiting)

    def is_busy(self) -> bool:
        return bool(self._waiting) or any(self._locked_pages.values())

    def _take(self, store: _Store, done: WriteDone) -> None:
        store.jobs -= 1
        store.stalled.discard(done.batch)
        store.ok &= all(done.ok)
        written = sum(done.ok)
        if written:
            self._bytes.observe(written * store.cache_component.host.page_bytes)
            self._seconds.observe(done.seconds)
        self._failures.value += len(done.ok) - written
        events = self._context.tree.events
        if events is not None:
            self._tell(events, store, done)

    def _tell(self, events: EventLog, store: _Store, done: WriteDone) -> None:
        """Pages that the disk lost, and then full pages that it took."""
        if done.removed:
            events.removed(done.removed, "DISK")
        if store.component != FULL:
            return
        names, first, end = self._context.tree.names, done.batch * _BATCH_PAGES, 0
        for node in store.nodes:  # [start, end) of the store's pages, of which [first, first + len(ok)) are told
            start, end = end, end + len(names.of(node))
            which = [0 <= page - first < len(done.ok) and done.ok[page - first] for page in range(start, end)]
            events.stored(node, names, "DISK", which)

    def _send(self, node: TreeNode) -> None:
        """Send what is to be stored of a node; states and windows first: the disk evicts them first."""
        for component in reversed(self._unstored(node)):
            self._send_component(node, component)

    def _unstored(self, node: TreeNode) -> list[CacheComponent]:
        """The components that the host holds of a node and the disk does not, nor is being sent."""
        sent = {run.component for run in node.runs if isinstance(run, _Store)}
        return [
            component
            for component in self._context.components
            if node.holds(component.name, HOST) and not node.is_stored(component.name) and component.name not in sent
        ]

    def _fits(self, node: TreeNode) -> bool:
        """Whether half of each host pool stays free of such locks; one node alone always may be sent."""
        for component in self._unstored(node):
            locked, pages = self._locked_pages[component.name], node.held(component.name, HOST)
            if locked and locked + len(pages) > component.host.num_pages // 2:
                return False
        return True

    def _send_component(self, node: TreeNode, component: CacheComponent) -> None:
        tree, host, pages = self._context.tree, component.host, node.held(component.name, HOST)
        keys, views = self._keys(node, component), host.views(pages)
        tree.lock(node, HOST)
        host.begin_read(pages)
        self._locked_pages[component.name] += len(pages)
        ticket, starts = next(self._tickets), range(0, len(keys), _BATCH_PAGES)
        self._stores[ticket] = _Store(node, component, pages.clone(), len(starts))
        for batch, start in enumerate(starts):
            end = start + _BATCH_PAGES
            self._backlog.append(WriteJob(ticket, tuple(keys[start:end]), tuple(views[start:end]), batch))

    def _keys(self, node: TreeNode, component: CacheComponent) -> list[bytes]:
        names = self._context.tree.names
        page_keys = names.of(node)[-1:] if component.rules.at_node_end else names.of(node)
        return names.of_component(component.name, page_keys)

    def _push(self) -> None:
        while self._backlog and self._disk.writes.submit(self._backlog[0]):
            self._backlog.popleft()

    def _end(self, store: _Store) -> None:
        store.cache_component.host.end_read(store.pages)
        for node in store.nodes:
            node.holdings[store.component][HOST].stored = store.ok
        store.detach()
        self._context.tree.unlock(store.nodes[-1], HOST)
