"""Up, from the disk: pages of a waiting request move to the host before it is admitted.

A prefetch extends the prefix that the host holds. It asks the store how far it goes, takes host pages, reads batches
and lands them in order, each as soon as those before it are in; what was landed stays, however the prefetch ends. Pages
that were handed to a reader are freed only after the reader gave them back.

    find -> (pages of the host) -> read, batch by batch -> tree
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from hicache.config import PrefetchMode
from hicache.disk.workers import DiskTier, FindDone, FindJob, ReadDone, ReadJob
from hicache.errors import PrefetchPending
from hicache.flow.base import Parts
from hicache.tree.key import Tokens
from hicache.tree.node import PageState, Tier, TreeNode

_BATCH_PAGES = 8


class Prefetch:
    """A caller's view of one prefetch. `ready`: it need not be waited for. Changes only in `poll()` and `cancel()`."""

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


class _Ticket:
    """One prefetch under way. `anchor`: the node, locked on the host, that landed pages are put behind."""

    def __init__(self, handle: Prefetch, anchor: TreeNode, tokens: Tokens, keys: list[bytes], namespace: str) -> None:
        self.handle, self.anchor, self.tokens, self.keys, self.namespace = handle, anchor, tokens, keys, namespace
        self.pages = torch.empty(0, dtype=torch.int64)
        self.results: dict[int, tuple[bool, ...]] = {}
        self.outstanding = self.landed_pages = self.next_batch = 0
        self.cancelled = threading.Event()


class Prefetcher:
    """Owned by the scheduler thread. `host_pages(n)` makes room on the host."""

    def __init__(self, parts: Parts, disk: DiskTier, host_pages: Callable[[int], torch.Tensor | None]) -> None:
        self._parts, self._disk, self._host_pages = parts, disk, host_pages
        self._ids = itertools.count()
        self._tickets: dict[int, _Ticket] = {}
        self._by_request: dict[str, _Ticket] = {}
        self._done: deque[FindDone | ReadDone] = deque()
        count = parts.metrics.counter
        self._bytes = count("prefetch.bytes", "bytes of pages that came from the store to the host")
        self._lost = count("prefetch.lost_pages", "pages the store announced and could not give back verified")
        self._refused = count("prefetch.refused", "prefetches not started because the readers' queue was full")

    def start(self, handle: Prefetch, tokens: Tokens, namespace: str) -> None:
        """Extend the host-held prefix of `tokens` (the caller leaves out what must be computed anyway)."""
        tree = self._parts.tree
        match = tree.match(tokens, namespace)
        held = pos = 0
        for node in match.nodes:
            pos += min(node.num_tokens, match.device_len + match.host_len - pos)
            if not (node.holds(Tier.HOST) or node.state is PageState.BACKING_UP):
                break
            held = pos
        whole = len(tokens) // tree.page_size * tree.page_size
        if held == whole or handle.request_id in self._by_request:
            handle.ended = True
            return
        anchor = tree.node_at(match, held)
        tree.lock(anchor, Tier.HOST)
        rest = tokens[held:whole].copy()
        ticket = _Ticket(handle, anchor, rest, tree.names.after(anchor, rest, namespace), namespace)
        number = next(self._ids)
        if not self._disk.submit(FindJob(number, tuple(ticket.keys))):
            self._refused.value += 1
            handle.ended = True
            tree.unlock(anchor, Tier.HOST)
            return
        ticket.outstanding = 1
        self._tickets[number] = self._by_request[handle.request_id] = ticket

    def settle(self, request_id: str) -> None:
        """The request is about to be admitted: raise if it must wait, else read no further for it."""
        ticket = self._by_request.get(request_id)
        if ticket is None:
            return
        if not ticket.handle.ready:
            raise PrefetchPending(f"prefetch of {request_id} is under way: poll() until it is ready, or cancel it")
        self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        """Read no further. What readers hold comes back through `land`."""
        ticket = self._by_request.pop(request_id, None)
        if ticket is not None:
            ticket.handle.ended = True
            ticket.cancelled.set()

    def ready(self) -> int:
        self._done.extend(self._disk.drain_reads())
        return len(self._done)

    def land(self, count: int) -> None:
        for _ in range(count):
            done = self._done.popleft()
            ticket = self._tickets[done.ticket]
            ticket.outstanding -= 1
            if isinstance(done, FindDone):
                self._read(done.ticket, ticket, done.num_pages)
            else:
                ticket.results[done.batch] = done.ok
                self._land_batches(ticket)
            if not ticket.outstanding:
                self._end(done.ticket, ticket)

    def busy(self) -> bool:
        return bool(self._tickets)

    @property
    def pages_under_way(self) -> int:
        """Host pages taken for reads that have not landed."""
        return sum(len(t.pages) - t.landed_pages for t in self._tickets.values())

    def _read(self, number: int, ticket: _Ticket, num_pages: int) -> None:
        """Take pages for what the store holds, as far as the host has room, and queue the reads."""
        tree, host = self._parts.tree, self._parts.host
        assert host is not None
        ticket.handle.found_tokens = num_pages * tree.page_size
        room = host.available() + tree.evictable(Tier.HOST) // tree.page_size
        pages = None if ticket.cancelled.is_set() else self._host_pages(min(num_pages, room))
        if pages is None or not len(pages):
            return
        ticket.pages = pages
        host.begin_read(pages)
        views = host.views(pages)
        for batch, at in enumerate(range(0, len(pages), _BATCH_PAGES)):
            end = at + _BATCH_PAGES
            job = ReadJob(
                number,
                batch,
                tuple(ticket.keys[at : len(pages)][:_BATCH_PAGES]),
                tuple(views[at:end]),
                ticket.cancelled,
            )
            if not self._disk.submit(job):
                self._refused.value += 1
                break
            ticket.outstanding += 1

    def _land_batches(self, ticket: _Ticket) -> None:
        """Put into the tree what has arrived without a gap."""
        while (ok := ticket.results.pop(ticket.next_batch, None)) is not None:
            good = next((i for i, verified in enumerate(ok) if not verified), len(ok))
            start = ticket.landed_pages
            pages = ticket.pages[start : start + good]
            accepted = self._insert(ticket, pages) if good else 0
            if not ticket.cancelled.is_set():
                self._lost.value += len(ok) - good
            if accepted < len(ok):
                ticket.cancelled.set()
                ticket.results.clear()
                ticket.next_batch = -1  # nothing behind a gap lands
                return
            ticket.next_batch += 1

    def _insert(self, ticket: _Ticket, pages: torch.Tensor) -> int:
        """Land `pages`, the next of the ticket; returns how many were placed (the others stay the ticket's)."""
        tree, host = self._parts.tree, self._parts.host
        assert host is not None
        step, start = tree.page_size, ticket.landed_pages
        tokens = ticket.tokens[start * step : (start + len(pages)) * step]
        result = tree.insert(ticket.anchor, tokens, pages, Tier.HOST, ticket.namespace)
        placed = result.accepted_len // step
        host.end_read(pages[:placed])
        for twice in result.duplicates:
            host.free(pages[twice.start // step : twice.end // step])
        at = {id(node): node for node in result.gained}
        depth = start + placed
        for node in result.node.path():
            if node is ticket.anchor:
                break
            depth -= node.num_tokens // step
            if id(node) in at:
                node.page_keys = ticket.keys[depth : depth + node.num_tokens // step]
                node.stored = True
                node.from_disk = node.state is PageState.HOST
        tree.move_lock(ticket.anchor, result.node, Tier.HOST)
        ticket.anchor = result.node
        ticket.landed_pages += placed
        ticket.handle.landed_tokens += placed * step
        self._bytes.value += placed * host.page_bytes
        return placed

    def _end(self, number: int, ticket: _Ticket) -> None:
        """All readers are done: give back what did not land."""
        host = self._parts.host
        assert host is not None
        rest = ticket.pages[ticket.landed_pages :]
        host.end_read(rest)
        host.free(rest)
        self._parts.tree.unlock(ticket.anchor, Tier.HOST)
        ticket.handle.ended = True
        del self._tickets[number]
        if self._by_request.get(ticket.handle.request_id) is ticket:
            del self._by_request[ticket.handle.request_id]
