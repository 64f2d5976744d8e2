"""Whether the store is asked at all: a circuit breaker for each direction, and a watch over each thread.

    CLOSED --- failures in a row, a refusal or a hang ---> OPEN --- the delay is over ---> HALF_OPEN
       ^                                                    ^                                 | one probe
       +------------------------ it succeeds ---------------+------- it fails: twice the delay +

Owns no thread and no job. Times are seconds of the injected clock. May import the standard library.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

J = TypeVar("J")


@dataclass(frozen=True)
class Limits:
    """When a direction stops being used and when it is tried again.

    `max_failures`: in a row, before it opens. `retry_s`: the first delay; it doubles up to `max_retry_s`. `hang_s`: a
    job under way for longer opens it. `close_s`: how long closing waits for threads that do not return.
    """

    hang_s: float = 10.0
    retry_s: float = 1.0
    max_retry_s: float = 300.0
    max_failures: int = 3
    close_s: float = 30.0


LIMITS = Limits()


class State(enum.IntEnum):
    """The numbers are those of the metrics."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True)
class Permit:
    """The leave to ask the store once. Its outcome counts only in the `era`, between two changes of state, of its
    birth: what was let through before tells nothing about now."""

    era: int
    is_probe: bool = False


class Breaker:
    """One direction of the disk tier. Any thread.

    `opens`, `failures`: how often it opened, and what failed, since the start.
    """

    def __init__(self, name: str, limits: Limits, clock: Callable[[], float]) -> None:
        self._name, self._limits, self._clock = name, limits, clock
        self._lock = threading.Lock()
        self._state, self._era, self._in_a_row = State.CLOSED, 0, 0
        self._delay_s = self._retry_at_s = 0.0
        self.opens = self.failures = 0

    @property
    def state(self) -> State:
        return self._state

    def refuses(self) -> bool:
        """Whether a job that came now would surely be refused. Takes no lock."""
        if self._state is State.OPEN:
            return self._clock() < self._retry_at_s
        return self._state is State.HALF_OPEN

    def admit(self, *, probes: bool = True) -> Permit | None:
        """The leave to ask the store, or None. After the delay the first that `probes` is the probe; those that do not
        may pass before it, for their success would prove little."""
        with self._lock:
            if self.refuses():
                return None
            if self._state is State.OPEN and probes:
                self._become(State.HALF_OPEN)
                log.info("the disk tier tries %s again", self._name)
                return Permit(self._era, is_probe=True)
            return Permit(self._era)

    def succeeded(self, permit: Permit) -> None:
        with self._lock:
            if permit.era != self._era:
                return
            self._in_a_row = 0
            if self._state is State.HALF_OPEN:
                self._become(State.CLOSED)
                log.info("the disk tier resumes %s", self._name)

    def failed(self, permit: Permit, why: str, *, at_once: bool = False) -> None:
        """`at_once`: more attempts would tell nothing new."""
        with self._lock:
            self.failures += 1
            if permit.era != self._era:
                return
            self._in_a_row += 1
            if self._state is State.CLOSED and not at_once and self._in_a_row < self._limits.max_failures:
                log.debug("%s of the disk tier failed: %s", self._name, why)
                return
            was_closed = self._state is State.CLOSED
            self._delay_s = self._limits.retry_s if was_closed else min(2 * self._delay_s, self._limits.max_retry_s)
            self._retry_at_s = self._clock() + self._delay_s
            self.opens += 1
            self._become(State.OPEN)
            log.warning("the disk tier stops %s: %s; it tries again in %g s", self._name, why, self._delay_s)

    def _become(self, state: State) -> None:
        self._state, self._in_a_row = state, 0
        self._era += 1


class Watch(Generic[J]):
    """What one thread is doing. The thread calls `begin` and `end`, the scheduler thread `report`.

    Invariant: a job is never reported after its `end` returned.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: list[J] = []
        self._permit = Permit(0)
        self._since_s = 0.0
        self._hangs = False

    @property
    def hangs(self) -> bool:
        """Whether the thread's jobs were reported and it has not returned."""
        return self._hangs

    @property
    def works(self) -> bool:
        """Whether the thread has jobs that were not reported. Takes no lock."""
        return bool(self._jobs) and not self._hangs

    def begin(self, jobs: list[J], permit: Permit) -> None:
        with self._lock:
            self._jobs, self._permit, self._since_s = jobs, permit, self._clock()

    def end(self) -> None:
        with self._lock:
            self._jobs, self._hangs = [], False

    def report(self, limit_s: float, tell: Callable[[J], None]) -> Permit | None:
        """Where the jobs have been under way for longer than `limit_s`: `tell` each, once; returns their permit."""
        with self._lock:
            if not self.works or self._clock() - self._since_s <= limit_s:
                return None
            self._hangs = True
            for job in self._jobs:
                tell(job)
            return self._permit
