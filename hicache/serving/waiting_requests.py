"""The requests that wait for admission. Their prefetches report changes, which `update` applies."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from hicache.engine import Prefetch
from hicache.serving.order import ServingOrder
from hicache.serving.request_queue import RequestQueue, ScheduledRequest


class WaitingRequests:
    """The requests that wait for admission, grouped by the state of their prefetch. The scheduler owns this object. The
    cost of a step without changes does not depend on the number of waiting requests.

    pending     a request whose prefetch is not ready; it is only in `_requests` ready       all others; in `_queue` by
    rank, and in `_looked_up` by the time of the last look-up, oldest first
    """

    def __init__(self, order: ServingOrder) -> None:
        self._order = order
        self._queue = RequestQueue(order.rank_s)
        self._requests = dict[str, ScheduledRequest]()
        self._looked_up = OrderedDict[ScheduledRequest, None]()
        self._changed = deque[Prefetch]()

    def add(self, req: ScheduledRequest, prefetch: Prefetch) -> None:
        """Queue a request whose prefix was just looked up."""
        req.prefetch, prefetch.on_change = prefetch, self._changed.append
        self._requests[req.request_id] = req
        if req.is_ready:
            self._enter(req)

    def discard(self, req: ScheduledRequest) -> None:
        """Remove a request. Does nothing if it does not wait."""
        if self._requests.pop(req.request_id, None) is not None and req in self._looked_up:
            del self._looked_up[req]
            self._queue.discard(req)

    def update(self) -> None:
        """Apply the changes that prefetches reported. If the prefill speed has changed, compute all ranks again."""
        while self._changed:
            prefetch = self._changed.popleft()
            req = self._requests.get(prefetch.request_id)
            if req is None or req.prefetch is not prefetch:
                continue
            if req in self._looked_up:
                self._queue.update(req)
            elif req.is_ready:
                req.seen_commits = -1
                self._enter(req)
                self._looked_up.move_to_end(req, last=False)
        if self._order.follow_speed():
            self._queue.sort()

    def next_to_look_up(self, num_commits: int) -> ScheduledRequest | None:
        """Return the ready request with the oldest look-up. Returns None if even this look-up was made after
        `num_commits` commits, because a new look-up would find nothing more."""
        req = next(iter(self._looked_up), None)
        return None if req is None or req.seen_commits >= num_commits else req

    def note_look_up(self, req: ScheduledRequest) -> None:
        """Record that the prefix of a ready request was looked up again."""
        self._looked_up.move_to_end(req)
        self._queue.update(req)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        """Iterate over the ready requests by rank. Requests may be added and removed during the iteration."""
        return iter(self._queue)

    def _enter(self, req: ScheduledRequest) -> None:
        self._queue.add(req)
        self._looked_up[req] = None
