"""How much of the host is read for requests that were not admitted, and how much more may be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from weakref import ref

from hicache.flow.asked import Asked
from hicache.flow.context import EngineContext
from hicache.flow.lease import Prefetch
from hicache.tiers import FULL, Component


class _Claim(ref[Prefetch]):
    """Of one handle. `num_pages`: what it claims."""

    __slots__ = ("num_pages", "request_id")

    def __init__(self, handle: Prefetch, callback: Callable[[_Claim], None]) -> None:
        super().__init__(handle, callback)  # type: ignore[call-arg]
        self.request_id, self.num_pages = handle.request_id, 0


class HostShare:
    """Pages that landed for requests that were not admitted, by request. Owned by the scheduler thread.

    A claim goes with the last handle of its request, so that a caller who forgets a request takes nothing from others
    for good. Handles go in any thread, and in the middle of anything: that is noted then, and counted at the next call.
    """

    def __init__(self) -> None:
        self._total = 0
        self._claims: dict[str, _Claim] = {}
        self._gone = deque[_Claim]()

    @property
    def total(self) -> int:
        """The pages of all requests."""
        self._forget_gone()
        return self._total

    @property
    def sole(self) -> str | None:
        """The request that alone has landed pages."""
        self._forget_gone()
        return next(iter(self._claims)) if len(self._claims) == 1 else None

    def of(self, request_id: str) -> int:
        claim = self._claims.get(request_id)
        return 0 if claim is None else claim.num_pages

    def add(self, handle: Prefetch, num_pages: int) -> None:
        """So many more landed for the request of a handle."""
        self._forget_gone()
        claim = self._claims.get(handle.request_id)
        if claim is None or claim() is not handle:
            held = 0 if claim is None else claim.num_pages
            claim = self._claims[handle.request_id] = _Claim(handle, self._gone.append)
            claim.num_pages = held
        claim.num_pages += num_pages
        self._total += num_pages

    def end(self, request_id: str) -> int:
        """The pages of a request, which are nobody's from now on."""
        claim = self._claims.pop(request_id, None)
        num_pages = 0 if claim is None else claim.num_pages
        self._total -= num_pages
        return num_pages

    def _forget_gone(self) -> None:
        while self._gone:
            gone = self._gone.popleft()
            if self._claims.get(gone.request_id) is gone:
                self.end(gone.request_id)


class HostRoom:
    """Full pages of the host, of which `max_pages` may be claimed: those that landed for requests that were not
    admitted (`share`), those that are read, and those that are to be. Owned by the scheduler thread.

    `num_read`: pages that are read, by component.
    """

    def __init__(self, context: EngineContext, num_read: Mapping[Component, int]) -> None:
        self._full, self._num_read, self._num_planned = context.full, num_read, 0
        self.share = HostShare()
        self.max_pages = int(context.config.prefetch_host_share * context.full.host.num_pages)
        self._num_published = 0
        gauge, help = context.metrics.gauge, "host pages that were read, or are, for requests that were not admitted"
        gauge("prefetch.claimed_pages", help, lambda: self._num_published)
        gauge("prefetch.limit_pages", "what prefetch_host_share allows of them", lambda: self.max_pages)

    def publish(self) -> None:
        """For snapshots, which another thread may take."""
        self._num_published = self.claimed

    @property
    def claimed(self) -> int:
        return self.share.total + self._num_read[FULL] + self._num_planned

    def note(self, asked: Asked) -> None:
        """What is to be read for a request has changed."""
        before, asked.num_planned = asked.num_planned, asked.num_to_read(self._full)
        self._num_planned += asked.num_planned - before

    def left(self, asked: Asked) -> int:
        """Pages that may be read for a request: of the share, or of the whole pool where no other claims any."""
        claimed, full = self.claimed, self._full
        own = self.share.of(asked.handle.request_id) + asked.num_planned
        own += sum([len(run.keys) for run in asked.runs if run.job.component is full])
        return max(0, (self.max_pages if claimed > own else full.host.num_pages) - claimed)
