"""Failure handling. If a store fails or hangs, circuit breakers for reads and writes, and a watchdog for each thread,
stop the use of the store.

    CLOSED --- failures in a row, permanent error or stall ---> OPEN --- backoff has ended ---> HALF_OPEN
       ^                                                         ^                                  | one probe
       +--------------------- probe succeeds --------------------+-- probe fails: double backoff ---+

Times are seconds of the injected clock.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

J = TypeVar("J")


@dataclass(frozen=True)
class Limits:
    """Limits that stop reads or writes, and the times after which they are tried again.

    `io_timeout_s`: a job that runs longer opens the breaker. `reopen_backoff_s`: the first backoff; later backoffs
    double up to `max_reopen_backoff_s`. `max_failures`: number of consecutive failures that open the breaker. `open_s`:
    time for which a client waits until its store is open, before it continues without the store. `close_s`: time for
    which closing waits for threads that do not return.
    """

    io_timeout_s: float = 10.0
    reopen_backoff_s: float = 1.0
    max_reopen_backoff_s: float = 300.0
    max_failures: int = 3
    open_s: float = 30.0
    close_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not a number, or is negative."""
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"{name}={value!r}")


LIMITS = Limits()


class State(enum.IntEnum):
    """State of a breaker; metrics export these numbers."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True)
class BreakerToken:
    """Permission to call the store once. The outcome of the call counts only in the `epoch` in which the token was
    created. A change of the breaker's state ends the epoch, because the outcome of an older call shows nothing about
    the present state of the store."""

    epoch: int
    is_probe: bool = False


class Breaker:
    """Circuit breaker of reads or writes. Any thread may use the breaker. `opens` and `failures` are counted since the
    breaker was created. `why`: if the last call failed, the reason."""

    def __init__(self, name: str, limits: Limits, clock: Callable[[], float], tier: str = "disk") -> None:
        self._name = name
        self._tier = tier
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._state = State.CLOSED
        self._epoch = 0
        self._in_a_row = 0
        self._backoff_s = self._probe_at_s = 0.0
        self.opens = self.failures = 0
        self.why = ""

    @property
    def state(self) -> State:
        return self._state

    def refuses(self) -> bool:
        """Return whether the breaker would certainly refuse a job that is submitted now. Takes no lock."""
        return self._state is not State.CLOSED and self._clock() < self.refuses_until_s

    @property
    def refuses_until_s(self) -> float:
        """Return the time until which jobs are refused; infinite during a probe, 0 while the breaker is closed."""
        return {State.CLOSED: 0.0, State.HALF_OPEN: math.inf, State.OPEN: self._probe_at_s}[self._state]

    def admit(self, *, can_probe: bool = True) -> BreakerToken | None:
        """Return a token, or None while the breaker is open. After the backoff, the first call with `can_probe` gets
        the probe's token. A call whose success does not prove that the store works passes `can_probe` False; such a
        call may run before the probe."""
        with self._lock:
            if self.refuses():
                return None
            if self._state is State.OPEN and can_probe:
                self._become(State.HALF_OPEN)
                log.info("the %s tier tries %s again", self._tier, self._name)
                return BreakerToken(self._epoch, is_probe=True)
            return BreakerToken(self._epoch)

    def succeeded(self, token: BreakerToken) -> None:
        with self._lock:
            if token.epoch != self._epoch:
                return
            self._in_a_row = 0
            self.why = ""
            if self._state is State.HALF_OPEN:
                self._become(State.CLOSED)
                log.info("the %s tier resumes %s", self._tier, self._name)

    def failed(self, token: BreakerToken, why: str, *, at_once: bool = False) -> None:
        """Count a failed call. `at_once`: open the breaker after this failure, even if `max_failures` is not
        reached."""
        with self._lock:
            self.failures += 1
            self.why = why
            if token.epoch != self._epoch:
                return
            self._in_a_row += 1
            if self._state is State.CLOSED and not at_once and self._in_a_row < self._limits.max_failures:
                log.debug("%s of the %s tier failed: %s", self._name, self._tier, why)
                return
            if self._state is State.CLOSED:
                self._backoff_s = self._limits.reopen_backoff_s
            else:
                self._backoff_s = min(2 * self._backoff_s, self._limits.max_reopen_backoff_s)
            self._probe_at_s = self._clock() + self._backoff_s
            self.opens += 1
            self._become(State.OPEN)
            log.warning(
                "the %s tier stops %s: %s; it tries again in %g s", self._tier, self._name, why, self._backoff_s
            )

    def _become(self, state: State) -> None:
        self._state = state
        self._in_a_row = 0
        self._epoch += 1


class Watchdog(Generic[J]):
    """Watches the jobs of one thread. The watched thread calls `begin` and `end`; the serving thread calls `report`.

    `is_stalled`: `report` has announced the jobs, and the thread has not called `end` yet. Invariant: `report` never
    announces a job after `end` has returned.
    """

    def __init__(self, clock: Callable[[], float], timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._jobs: list[J] = []
        self._token = BreakerToken(0)
        self._stalls_at_s = math.inf  # infinite if there are no jobs
        self.is_stalled = False

    @property
    def is_working(self) -> bool:
        return bool(self._jobs)

    def begin(self, jobs: list[J], token: BreakerToken) -> None:
        with self._lock:
            self._jobs = jobs
            self._token = token
            self._stalls_at_s = self._clock() + self._timeout_s

    def end(self) -> None:
        with self._lock:
            self._jobs = []  # jobs refer to pages, which would keep their memory mapped
            self._stalls_at_s = math.inf
            self.is_stalled = False

    def report(self, announce: Callable[[J], None]) -> BreakerToken | None:
        """If the jobs take longer than the timeout, announce each job once, and return the token with which they
        run."""
        with self._lock:
            if self._clock() <= self._stalls_at_s:
                return None
            self._stalls_at_s = math.inf
            self.is_stalled = True
            for job in self._jobs:
                announce(job)
            return self._token
