"""Disk to host: what a waiting request needs is read before it is admitted.

A prefetch extends the prefix that memory can serve. It asks the store what it holds, chooses the longest prefix that
all components can use, takes host pages, reads batches and inserts full pages in order, each batch when those before it
are there; windows and states are attached at the end. What was inserted stays, however the prefetch ends. Pages that
were given to a reader are freed only when the reader is done: a stalled one returns them later.

    find -> (host pages) -> read, batch by batch -> tree
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hicache.config import PrefetchMode
from hicache.disk.jobs import FIND, FindDone, FindJob, ReadClass, ReadDone, ReadJob, Stalled
from hicache.disk.workers import DiskTier
from hicache.errors import PrefetchPending
from hicache.flow.components import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.disk_prefix import DiskPrefix
from hicache.flow.host_eviction import HostEviction
from hicache.tree.key import Tokens
from hicache.tree.node import DEVICE, FULL, HOST, Component, TreeNode

_BATCH_PAGES = 8


class Prefetch:
    """A caller's view of one prefetch. `ready`: admission need not wait. Changes only in `poll()` and `cancel()`."""

    def __init__(self, request_id: str, mode: PrefetchMode, deadline_s: float) -> None:
        self.request_id, self.mode, self.deadline_s = request_id, mode, deadline_s
        self.found_tokens = self.landed_tokens = 0
        self.ended = False

    @property
    def ready(self) -> bool:
        """Best effort never waits; a timeout waits until its deadline; wait_complete until the end."""
        if self.ended or self.mode == "best_effort":
            return True
        return self.mode == "timeout" and time.monotonic() >= self.deadline_s


@dataclass
class _Batch:
    """Pages of a component that one job reads: `indices` in the prompt, `pages` of the host pool."""

    component: CacheComponent
    indices: list[int]
    pages: torch.Tensor
    ok: tuple[bool, ...] | None = None


@dataclass
class _Ticket:
    """One prefetch in flight. `anchor`: the node, locked on the host, behind which full pages are inserted.

    `batches`: jobs that read, full pages first; `next_batch`: the first that was not inserted. `outstanding`: jobs that
    were not answered; `stalled`: the batches of those whose thread is stalled. `failed`: nothing more can be inserted.
    """

    handle: Prefetch
    prefix: DiskPrefix
    anchor: TreeNode
    cancelled: threading.Event = field(default_factory=threading.Event)
    batches: list[_Batch] = field(default_factory=list)
    stalled: set[int] = field(default_factory=set)
    next_batch: int = 0
    outstanding: int = 1
    end: int = 0
    failed: bool = False

    @property
    def read_class(self) -> ReadClass:
        """Urgent where a request waits for it."""
        return ReadClass.BACKGROUND_READ if self.handle.mode == "best_effort" else ReadClass.URGENT_READ

    @property
    def read_until_s(self) -> float:
        return self.handle.deadline_s if self.handle.mode == "timeout" else math.inf


class Prefetcher:
    """Owned by the scheduler thread."""

    def __init__(self, context: EngineContext, disk: DiskTier, host_eviction: HostEviction) -> None:
        self._context, self._disk, self._host_eviction = context, disk, host_eviction
        self._ids = itertools.count()
        self._tickets: dict[int, _Ticket] = {}
        self._by_request: dict[str, _Ticket] = {}
        # Of prefetches that ended, by ticket and batch: what a stalled thread has. A find has no pages.
        self._left: dict[tuple[int, int], _Batch | None] = {}
        count = context.metrics.counter
        self._bytes = count("prefetch.bytes", "bytes of pages that came from the store to the host")
        self._lost = count("prefetch.lost_pages", "pages the store announced and could not give back verified")
        self._refused = count("prefetch.refused", "prefetches not started because the readers' queue was full")

    def start(self, handle: Prefetch, tokens: Tokens, namespace: str) -> None:
        """Extend the prefix of `tokens` that memory can serve (the caller leaves out what must be computed anyway)."""
        prefix = DiskPrefix.of(self._context, tokens, namespace)
        if prefix.is_complete or handle.request_id in self._by_request:
            handle.ended = True
            return
        number = next(self._ids)
        queue_class = ReadClass.BACKGROUND_FIND if handle.mode == "best_effort" else ReadClass.URGENT_FIND
        if not self._disk.reads.submit(FindJob(number, prefix.page_keys, queue_class, prefix.component_keys)):
            self._refused.value += 1
            handle.ended = True
            return
        tree = self._context.tree
        anchor = tree.node_at(prefix.match, prefix.num_host_pages * tree.page_size)
        tree.lock(anchor, HOST)
        self._tickets[number] = self._by_request[handle.request_id] = _Ticket(handle, prefix, anchor)

    def lookup(self, tokens: Tokens, namespace: str, wait_s: float) -> int | None:
        """Tokens that the disk adds to what memory can serve; None where the store did not answer in time."""
        prefix = DiskPrefix.of(self._context, tokens, namespace)
        if prefix.is_complete:
            return 0
        found = self._disk.find(prefix.page_keys, wait_s, prefix.component_keys)
        if found is None:
            return None
        num_added = prefix.usable_end(found, found.num_pages) - prefix.num_usable
        return max(0, num_added) * self._context.tree.page_size

    def settle(self, request_id: str) -> None:
        """The request is about to be admitted: raise if it must wait, else read no further for it."""
        ticket = self._by_request.get(request_id)
        if ticket is None:
            return
        if not ticket.handle.ready:
            raise PrefetchPending(f"prefetch of {request_id} is in flight: poll() until it is ready, or cancel it")
        self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """Read no further. What readers hold comes back through `complete`."""
        ticket = self._by_request.get(request_id)
        if ticket is not None:
            self._stop(ticket)

    def finished(self) -> Sequence[int]:
        return self._disk.reads.finished()

    def complete(self, through: Sequence[int]) -> None:
        for done in self._disk.reads.take(through):
            late = (done.ticket, done.batch)
            if late in self._left:
                self._free(self._left.pop(late))
                continue
            ticket = self._tickets[done.ticket]
            if isinstance(done, Stalled):
                ticket.stalled.add(done.batch)
                self._stop(ticket)
            else:
                ticket.outstanding -= 1
                ticket.stalled.discard(done.batch)
                self._take(ticket, done)
            if ticket.outstanding == len(ticket.stalled):
                self._end(done.ticket, ticket)

    def is_busy(self) -> bool:
        return bool(self._tickets)

    def pages_in_flight(self, component: Component) -> int:
        """Host pages of a component that were taken for reads and are not in the tree."""
        batches = [batch for ticket in self._tickets.values() for batch in ticket.batches]
        batches += [batch for batch in self._left.values() if batch is not None]
        return sum(len(batch.pages) for batch in batches if batch.component.name == component)

    def _stop(self, ticket: _Ticket) -> None:
        """Nobody waits for it, and nothing more is read for it."""
        ticket.handle.ended = True
        ticket.cancelled.set()
        if self._by_request.get(ticket.handle.request_id) is ticket:
            del self._by_request[ticket.handle.request_id]

    def _take(self, ticket: _Ticket, done: FindDone | ReadDone) -> None:
        if isinstance(done, FindDone):
            self._read(done.ticket, ticket, done)
            return
        self._lost.value += done.asked - sum(done.ok)
        ticket.batches[done.batch].ok = done.ok
        self._insert_batches(ticket)

    def _read(self, number: int, ticket: _Ticket, found: FindDone) -> None:
        """Take host pages for the longest prefix that all components can use, and queue the reads."""
        if ticket.cancelled.is_set():
            return
        prefix, components = ticket.prefix, self._context.by_name
        num_pages = min(found.num_pages, self._host_eviction.capacity(self._context.full))
        longest = prefix.usable_end(found, found.num_pages)
        ticket.end = longest if num_pages == found.num_pages else prefix.usable_end(found, num_pages)
        ticket.handle.found_tokens = max(0, longest - prefix.num_host_pages) * self._context.tree.page_size
        for name, indices in prefix.to_read(ticket.end, found).items():
            component = components[name]
            pages = self._host_eviction.alloc(component, len(indices))
            if pages is None:
                ticket.failed = True
                return
            if indices:
                self._queue(number, ticket, component, indices, pages)

    def _queue(
        self, number: int, ticket: _Ticket, component: CacheComponent, indices: list[int], pages: torch.Tensor
    ) -> None:
        component.host.begin_read(pages)
        views, keys = component.host.views(pages), ticket.prefix.keys_of(component.name, indices)
        for start in range(0, len(indices), _BATCH_PAGES):
            end = start + _BATCH_PAGES
            batch = len(ticket.batches)
            ticket.batches.append(_Batch(component, indices[start:end], pages[start:end]))
            job = ReadJob(
                number,
                batch,
                tuple(keys[start:end]),
                tuple(views[start:end]),
                ticket.cancelled,
                ticket.read_until_s,
                ticket.read_class,
            )
            if not self._disk.reads.submit(job):
                self._refused.value += 1
                ticket.batches[batch:] = [_Batch(component, indices[start:], pages[start:], ())]
                return
            ticket.outstanding += 1

    def _insert_batches(self, ticket: _Ticket) -> None:
        """Insert the full pages that have arrived without a gap."""
        while not ticket.failed and ticket.next_batch < len(ticket.batches):
            batch = ticket.batches[ticket.next_batch]
            if batch.component.name != FULL or batch.ok is None:
                return
            num_good = next((i for i, verified in enumerate(batch.ok) if not verified), len(batch.ok))
            accepted = self._insert(ticket, batch, num_good) if num_good else 0
            ticket.next_batch += 1
            if accepted < len(batch.indices):
                ticket.failed = True
                ticket.cancelled.set()  # what follows a gap is of no use

    def _insert(self, ticket: _Ticket, batch: _Batch, num_pages: int) -> int:
        """Insert the first pages of a batch behind the anchor; returns how many were (the others stay the batch's)."""
        tree, host, prefix = self._context.tree, batch.component.host, ticket.prefix
        step, first, pages = tree.page_size, batch.indices[0], batch.pages[:num_pages]
        result = tree.insert(
            ticket.anchor, prefix.tokens[first * step : (first + num_pages) * step], pages, HOST, prefix.namespace
        )
        num_placed = result.accepted_len // step
        host.end_read(pages[:num_placed])
        for twice in result.duplicates:
            host.free(pages[twice.start // step : twice.end // step])
        gained = set(result.gained)
        for node in result.node.path():
            if node is ticket.anchor:
                break
            if node in gained:
                end = node.depth_tokens // step
                node.page_keys = prefix.keys_of(FULL, list(range(end - node.num_tokens // step, end)))
                node.holdings[FULL][HOST].stored = True
                node.from_disk = not node.holds(FULL, DEVICE)
        tree.move_lock(ticket.anchor, result.node, HOST)
        ticket.anchor = result.node
        batch.pages = batch.pages[num_placed:]
        ticket.handle.landed_tokens += num_placed * step
        self._bytes.value += num_placed * host.page_bytes
        return num_placed

    def _attach(self, ticket: _Ticket) -> None:
        """All full pages are there: attach what the other components have read."""
        tree, step = self._context.tree, self._context.tree.page_size
        match = tree.match(ticket.prefix.tokens[: ticket.end * step], ticket.prefix.namespace)
        if match.full_len < ticket.end * step:
            return
        last = tree.node_at(match, ticket.end * step)
        if not last.holds(FULL, HOST):
            return
        for component in self._context.components[1:]:
            read = [batch for batch in ticket.batches if batch.component is component and batch.ok]
            pages = {
                index: page
                for batch in read
                for index, page, ok in zip(batch.indices, batch.pages.tolist(), batch.ok or (), strict=True)
                if ok
            }
            used = self._attach_component(last, component, pages) if pages else set()
            for batch in read:
                taken = torch.tensor([page in used for page in batch.pages.tolist()], dtype=torch.bool)
                component.host.end_read(batch.pages[taken])
                batch.pages = batch.pages[~taken]
            self._bytes.value += len(used) * component.host.page_bytes

    def _attach_component(self, last: TreeNode, component: CacheComponent, pages: dict[int, int]) -> set[int]:
        """Attach pages, by their index in the prompt, to the nodes up to `last` that lack them; returns those used."""
        tree, step, name = self._context.tree, self._context.tree.page_size, component.name
        first, used = min(pages), set[int]()
        for node in last.path():
            end, start = node.depth_tokens // step, (node.depth_tokens - node.num_tokens) // step
            if start < first < end and not component.rules.at_node_end:
                tree.split_prefix(node, (first - start) * step)
                start = first
            indices = [end - 1] if component.rules.at_node_end else list(range(start, end))
            lacks = not node.holds(name, HOST) and node.pending(name) is None and node.holds(FULL, HOST)
            if lacks and all(index in pages for index in indices):
                tree.attach(node, name, HOST, torch.tensor([pages[index] for index in indices]))
                node.holdings[name][HOST].stored = True
                used.update(pages[index] for index in indices)
            if start <= first:
                break
        return used

    def _end(self, number: int, ticket: _Ticket) -> None:
        """All readers are done, but stalled ones: free what is not in the tree and what they do not have."""
        full = [batch for batch in ticket.batches if batch.component.name == FULL]
        is_whole = not (ticket.failed or ticket.stalled or any(len(batch.pages) for batch in full))
        if is_whole and len(full) < len(ticket.batches):
            self._attach(ticket)
        self._stop(ticket)
        del self._tickets[number]
        for index, batch in enumerate(ticket.batches):
            if index in ticket.stalled:
                self._left[number, index] = batch
            else:
                self._free(batch)
        if FIND in ticket.stalled:
            self._left[number, FIND] = None
        self._context.tree.unlock(ticket.anchor, HOST)

    @staticmethod
    def _free(batch: _Batch | None) -> None:
        if batch is not None:
            batch.component.host.end_read(batch.pages)
            batch.component.host.free(batch.pages)
