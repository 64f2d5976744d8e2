"""Host to a store: to the disk, and on its own to the remote tier.

What reached the host goes to the writer thread in batches, locked on the host until the store has acknowledged it. At
most a share of a component's host pool is locked so; what comes beyond that waits without a lock, and is lost to the
store only if the host evicts it before its turn. What the store refuses stays on the host, and is sent again when a
request that used it ends. Pages that a stalled writer has stay locked until it returns; nothing else waits for that.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from hicache.flow.completion import Movement
from hicache.flow.components import CacheComponent
from hicache.flow.context import EngineContext
from hicache.storage.process.jobs import Stalled, WriteDone, WriteJob
from hicache.tiers import DISK, FULL, HOST, REMOTE, Store, Tier
from hicache.tree.events import EventLog
from hicache.tree.node import NodeRun, TreeNode

_BATCH_PAGES = 16
_DISK_SHARE, _REMOTE_SHARE = 0.5, 0.25  # of a host pool, locked until the store has it
_METRICS = {DISK: "persist", REMOTE: "remote_persist"}


class _Write(NodeRun):
    """What a component has of one node, on its way to `store`: `jobs` batches are out, `ok` as long as none failed;
    `stalled`: the batches of a stalled writer."""

    def __init__(self, store: Store, node: TreeNode, component: CacheComponent, pages: torch.Tensor, jobs: int) -> None:
        super().__init__([node], component.name)
        self.store, self.cache_component, self.pages, self.jobs, self.ok = store, component, pages, jobs, True
        self.stalled: set[int] = set()

    @property
    def is_settled(self) -> bool:
        """Whether it waits for nothing, or for a stalled writer alone. Once it is, it stays so."""
        return self.jobs == len(self.stalled)


class Persist(Movement):
    """Owned by the scheduler thread; the writer thread sees frozen jobs only. `share`: how much of a component's host
    pool may be locked on its way to `store`."""

    def __init__(self, context: EngineContext, store: Store, share: float) -> None:
        self._context, self._store, self._share, self._tier = context, store, share, context.stores[store]
        self._tickets = itertools.count()
        self._writes: dict[int, _Write] = {}
        self._backlog: deque[WriteJob] = deque()
        # By component, of writes that are not settled. What a stalled writer has would hold up all others.
        self._locked_pages = dict.fromkeys(context.by_name, 0)
        self._waiting: deque[TreeNode] = deque()
        self._turn_len = 0  # tokens of the path to the first of them that had their turn
        name = _METRICS[store]
        count, gauge = context.metrics.counter, context.metrics.gauge
        moved, took = (
            "bytes, before compression, of pages of a job that the store took",
            "time that job took the writer",
        )
        labels = {"movement": "write", "direction": f"host_to_{store.name.lower()}"}
        self._bytes, self._seconds = context.metrics.movement(name, moved, f"{took}, its share of a batch", **labels)
        self._failures = count(f"{name}.failed_pages", "pages that the store did not take")
        gauge(f"{name}.queued_nodes", "nodes that wait, unlocked, for their turn to be written", self._waiting.__len__)
        gauge(f"{name}.queued_jobs", "jobs that wait for room in the writer's queue", self._backlog.__len__)

    def store(self, nodes: Sequence[TreeNode]) -> None:
        """Send what is on the host and not yet in the store, or let it wait for its turn."""
        for node in nodes:
            if self._waiting or not self._fits(node):
                self._waiting.append(node)
            else:
                self._send(node)
        self._push()

    def touch(self, node: TreeNode) -> None:
        """A request used the prefix that ends with `node`: what the store has of it counts as used, whichever tier
        served it; what it refused before is sent again.

        A prefix counts as used after what continues it, pages after windows and states: these are evicted first.
        """
        names, path = self._context.tree.names, node.path()[::-1]
        keys = [key for at in path if at.is_stored(FULL, self._store) for key in names.of(at)]
        for component in self._context.components[1:]:
            for at in component.rules.required_nodes(node):
                if at.is_stored(component.name, self._store):
                    keys += self._keys(at, component)
        self._tier.used(keys)
        # While others wait for their turn, so may these: a node is to wait once, however often it is used.
        if not self._waiting and not self._tier.writes.refuses():
            self.store([at for at in path if self._unstored(at)])

    def poll(self) -> bool:
        """Enter what the writer has answered, and send what waits; whether there was an answer."""
        outcomes = self._tier.writes.poll()
        self.is_torn = bool(outcomes)
        for done in outcomes:
            write = self._writes[done.ticket]
            was_settled = write.is_settled
            if isinstance(done, Stalled):
                write.stalled.add(done.batch)
            else:
                self._take(write, done)
            if write.is_settled and not was_settled:
                self._locked_pages[write.component] -= len(write.pages)
            if not write.jobs:
                self._end(self._writes.pop(done.ticket))
        self.is_torn = False
        if outcomes:  # which alone make room: what waits, waits for one
            self._send_waiting()
        self._push()
        return bool(outcomes)

    @property
    def num_waiting(self) -> int:
        """Nodes that wait for their turn."""
        return len(self._waiting)

    def is_busy(self) -> bool:
        return bool(self._waiting) or any(self._locked_pages.values())

    def locks(self) -> list[tuple[TreeNode, Tier]]:
        return [(write.nodes[-1], HOST) for write in self._writes.values()]

    def _send_waiting(self) -> None:
        """Send what waits, as far as it fits, each once. A split may have left part of a node above it; ancestors that
        wait for their own turn lose nothing by coming now."""
        while self._waiting:
            for node in reversed(self._waiting[0].path()):
                if node.depth_tokens > self._turn_len:
                    if not self._fits(node):
                        return
                    self._send(node)
                    self._turn_len = node.depth_tokens
            self._waiting.popleft()
            self._turn_len = 0

    def _take(self, write: _Write, done: WriteDone) -> None:
        write.jobs -= 1
        write.stalled.discard(done.batch)
        write.ok &= all(done.ok)
        written = sum(done.ok)
        if written:
            self._bytes.observe(written * write.cache_component.host.page_bytes)
            self._seconds.observe(done.seconds)
        self._failures.value += len(done.ok) - written
        events = self._context.tree.events
        if events is not None and self._store is DISK:
            self._tell(events, write, done)

    def _tell(self, events: EventLog, write: _Write, done: WriteDone) -> None:
        """Pages that the disk lost, and then full pages that it took."""
        if done.removed:
            events.removed(done.removed, "DISK")
        if write.component != FULL:
            return
        names, first, end = self._context.tree.names, done.batch * _BATCH_PAGES, 0
        for node in write.nodes:  # [start, end) of the store's pages, of which [first, first + len(ok)) are told
            start, end = end, end + len(names.of(node))
            which = [0 <= page - first < len(done.ok) and done.ok[page - first] for page in range(start, end)]
            events.stored(node, names, "DISK", which)

    def _send(self, node: TreeNode) -> None:
        """Send what is to be stored of a node; states and windows first: the disk evicts them first."""
        for component in reversed(self._unstored(node)):
            self._send_component(node, component)

    def _unstored(self, node: TreeNode) -> list[CacheComponent]:
        """The components that the host holds of a node and the store does not, nor is being sent."""
        sent = {run.component for run in node.runs if isinstance(run, _Write) and run.store is self._store}
        return [
            component
            for component in self._context.components
            if node.holds(component.name, HOST)
            and component.name not in sent
            and not node.is_stored(component.name, self._store)
        ]

    def _fits(self, node: TreeNode) -> bool:
        """Whether the rest of each host pool stays free of such locks; one node alone always may be sent."""
        for component in self._unstored(node):
            locked, pages = self._locked_pages[component.name], node.held(component.name, HOST)
            if locked and locked + len(pages) > self._share * component.host.num_pages:
                return False
        return True

    def _send_component(self, node: TreeNode, component: CacheComponent) -> None:
        tree, host, pages = self._context.tree, component.host, node.held(component.name, HOST)
        keys, views, ticket = self._keys(node, component), host.views(pages), next(self._tickets)
        parts = [slice(start, start + _BATCH_PAGES) for start in range(0, len(keys), _BATCH_PAGES)]
        jobs = [WriteJob(ticket, tuple(keys[part]), views[part], batch) for batch, part in enumerate(parts)]
        with ExitStack() as undo:
            tree.lock(node, HOST)
            undo.callback(tree.unlock, node, HOST)
            host.begin_read(pages)
            undo.callback(host.end_read, pages)
            write = _Write(self._store, node, component, pages.clone(), len(jobs))
            undo.pop_all()
        self._locked_pages[component.name] += len(pages)
        self._writes[ticket] = write
        self._backlog += jobs

    def _keys(self, node: TreeNode, component: CacheComponent) -> list[bytes]:
        names = self._context.tree.names
        page_keys = names.of(node)[-1:] if component.rules.at_node_end else names.of(node)
        return names.of_component(component.name, page_keys)

    def _push(self) -> None:
        while self._backlog and self._tier.writes.submit(self._backlog[0]):
            self._backlog.popleft()

    def _end(self, write: _Write) -> None:
        write.cache_component.host.end_read(write.pages)
        for node in write.nodes:
            holding = node.holdings[write.component][HOST]
            holding.stored = holding.stored | self._store if write.ok else holding.stored & ~self._store
        write.detach()
        self._context.tree.unlock(write.nodes[-1], HOST)


def persists_of(context: EngineContext) -> tuple[Persist, ...]:
    """One for each store that this engine writes to."""
    remote = context.config.remote
    shares = {DISK: _DISK_SHARE, REMOTE: _REMOTE_SHARE if remote is None else remote.backup_share}
    return tuple(
        Persist(context, store, shares[store])
        for store in context.stores
        if store is DISK or remote is None or remote.backup == "all"
    )
