"""What a caller holds of its prefetch."""

from __future__ import annotations

import time
from collections.abc import Callable

from hicache.config import PrefetchMode


class Prefetch:
    """A caller's view of one prefetch. `ready`: admission need not wait. `ended`: nothing more comes. `joins`: its
    request is computed while it reads on, and joins what has come; `yields`: it did not wait since that delayed nobody,
    so it comes behind those that wait for nothing. Changes in `poll()` and `cancel()` alone, but for a
    deadline that passes."""

    def __init__(
        self,
        request_id: str,
        mode: PrefetchMode,
        deadline_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        *,
        joins: bool = False,
    ) -> None:
        self.request_id, self.mode, self.deadline_s, self._clock = request_id, mode, deadline_s, clock
        self.joins, self.yields = joins, False
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
