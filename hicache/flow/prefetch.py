"""Up, from the disk: pages of a waiting request move to the host before it is admitted.

A prefetch extends the prefix that the host holds. It asks the store how far it goes, takes host pages, reads batches
and lands them in order, each as soon as those before it are in; what was landed stays, however the prefetch ends. Pages
that were handed to a reader are freed only after the reader gave them back: where it hangs, the prefetch ends without
them, and they return when it does.

    find -> (pages of the host) -> read, batch by batch -> tree
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from hicache.config import PrefetchMode
from hicache.disk.jobs import FIND, FindDone, FindJob, Hung, ReadDone, ReadJob
from hicache.disk.workers import DiskTier
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
    """One prefetch under way. `anchor`: the node, locked on the host, that landed pages are put behind.

    `outstanding`: jobs that were not answered; `hung`: the batches of those whose thread hangs.
    """

    def __init__(self, handle: Prefetch, anchor: TreeNode, tokens: Tokens, keys: list[bytes], namespace: str) -> None:
        self.handle, self.anchor, self.tokens, self.keys, self.namespace = handle, anchor, tokens, keys, namespace
        self.pages = torch.empty(0, dtype=torch.int64)
        self.results: dict[int, tuple[bool, ...]] = {}
        self.outstanding = self.landed_pages = self.next_batch = 0
        self.hung: set[int] = set()
        self.cancelled = threading.Event()

    @property
    def urgent(self) -> bool:
        """Whether a request waits for it."""
        return self.handle.mode != "best_effort"

    @property
    def read_until_s(self) -> float:
        return self.handle.deadline_s if self.handle.mode == "timeout" else math.inf


class Prefetcher:
    """Owned by the scheduler thread. `host_pages(n)` makes room on the host."""

    def __init__(self, parts: Parts, disk: DiskTier, host_pages: Callable[[int], torch.Tensor | None]) -> None:
        self._parts, self._disk, self._host_pages = parts, disk, host_pages
        self._ids = itertools.count()
        self._tickets: dict[int, _Ticket] = {}
        self._by_request: dict[str, _Ticket] = {}
        self._done: deque[FindDone | ReadDone | Hung] = deque()
        # Of prefetches that ended, by ticket and batch: host pages that a hanging thread has.
        self._left: dict[tuple[int, int], torch.Tensor] = {}
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
        rest = tokens[held:whole].copy()
        ticket = _Ticket(handle, anchor, rest, tree.names.after(anchor, rest, namespace), namespace)
        number = next(self._ids)
        if not self._disk.submit(FindJob(number, tuple(ticket.keys), ticket.urgent)):
            self._refused.value += 1
            handle.ended = True
            return
        tree.lock(anchor, Tier.HOST)
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
        ticket = self._by_request.get(request_id)
        if ticket is not None:
            self._stop(ticket)

    def ready(self) -> int:
        self._done.extend(self._disk.drain_reads())
        return len(self._done)

    def land(self, count: int) -> None:
        for _ in range(count):
            done = self._done.popleft()
            late = self._left.pop((done.ticket, done.batch), None)
            if late is not None:
                self._give_back(late)
                continue
            ticket = self._tickets[done.ticket]
            if isinstance(done, Hung):
                ticket.hung.add(done.batch)
                self._stop(ticket)
            else:
                ticket.outstanding -= 1
                ticket.hung.discard(done.batch)
                self._take(ticket, done)
            if ticket.outstanding == len(ticket.hung):
                self._end(done.ticket, ticket)

    def busy(self) -> bool:
        return bool(self._tickets)

    @property
    def pages_under_way(self) -> int:
        """Host pages taken for reads that have not landed."""
        return sum(len(t.pages) - t.landed_pages for t in self._tickets.values()) + sum(map(len, self._left.values()))

    def _stop(self, ticket: _Ticket) -> None:
        """Nobody waits for it, and nothing more is read for it."""
        ticket.handle.ended = True
        ticket.cancelled.set()
        if self._by_request.get(ticket.handle.request_id) is ticket:
            del self._by_request[ticket.handle.request_id]

    def _take(self, ticket: _Ticket, done: FindDone | ReadDone) -> None:
        if isinstance(done, FindDone):
            self._read(done.ticket, ticket, done.num_pages)
            return
        self._lost.value += done.asked - sum(done.ok)
        ticket.results[done.batch] = done.ok
        self._land_batches(ticket)

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
                ticket.read_until_s,
                ticket.urgent,
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
        """All readers are done, but those that hang: give back what did not land and what they do not have."""
        self._stop(ticket)
        del self._tickets[number]
        free = np.arange(len(ticket.pages)) >= ticket.landed_pages
        for batch in ticket.hung:
            # A find has no pages; that its answer may still come is all there is to remember.
            start = len(ticket.pages) if batch == FIND else batch * _BATCH_PAGES
            self._left[number, batch] = ticket.pages[start : start + _BATCH_PAGES]
            free[start : start + _BATCH_PAGES] = False
        self._give_back(ticket.pages[torch.from_numpy(free)])
        self._parts.tree.unlock(ticket.anchor, Tier.HOST)

    def _give_back(self, pages: torch.Tensor) -> None:
        host = self._parts.host
        assert host is not None
        host.end_read(pages)
        host.free(pages)
