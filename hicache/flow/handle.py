"""What a caller holds of its prefetch, and how much of the host its requests may take before they are admitted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from weakref import ref

from hicache.config import PrefetchMode


class Prefetch:
    """A caller's view of one prefetch. `ready`: admission need not wait. Changes in `poll()` and `cancel()` alone, but
    for a deadline that passes."""

    def __init__(
        self, request_id: str, mode: PrefetchMode, deadline_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.request_id, self.mode, self.deadline_s, self._clock = request_id, mode, deadline_s, clock
        self.found_tokens = self.landed_tokens = 0
        self.waits = mode != "best_effort"
        self.ended = False

    @property
    def ready(self) -> bool:
        """Best effort never waits; a timeout waits until its deadline; wait_complete until the end; auto where
        that is estimated to cost less than computing."""
        if self.ended or not self.waits:
            return True
        return self.mode == "timeout" and self._clock() >= self.deadline_s


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
