"""A request that waits for its prefetch, and how its caller sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hicache.config import PrefetchMode
from hicache.flow.read_state import PrefixRead
from hicache.tree.key import Tokens


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
        """Best effort never waits; a timeout waits until its deadline; wait_complete until the end; auto as long as
        that is estimated to be faster than computing."""
        if self.ended or not self.waits:
            return True
        return self.mode == "timeout" and self._clock() >= self.deadline_s


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that was not admitted yet. `read`: what brings pages for it; None while it is queued or postponed.

    [seen_end, end)   pages of its prompt that are to land: those of its own read, or the part that it shares
    `owns`: the read is for its whole prompt. `progress_s`: when something last landed for it. `decided_s`: when the
    store had told what it holds and the request chose to wait; `estimate_s`: for how long, where that is known.
    """

    arrival: int
    handle: Prefetch
    tokens: Tokens
    namespace: str
    progress_s: float
    end: int
    read: PrefixRead | None = None
    owns: bool = False
    is_postponed: bool = False
    num_usable: int = 0
    seen_end: int = 0
    estimate_s: float | None = None
    decided_s: float | None = None

    @property
    def wanted_end(self) -> int:
        assert self.read is not None
        return min(self.end, self.read.end)
