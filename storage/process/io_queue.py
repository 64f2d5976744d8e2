"""The queue of reads, or of writes, of one store: waiting jobs by class, threads and a circuit breaker."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from hicache.storage.process.health import Breaker, Limits, Watchdog
from hicache.storage.process.jobs import Job, Stalled, ValueJob

J = TypeVar("J", bound=Job | ValueJob)
D = TypeVar("D")


@dataclass(frozen=True, order=True)
class Queued(Generic[J, D]):
    """A queued job. Jobs with a lower `queue_class` run first. Jobs of one class run in the order of `number`, which is
    the order of submission. `num_bytes`: bytes of the job's pages. `reply`: called with each outcome, on any thread."""

    queue_class: int
    number: int
    job: J = field(compare=False)
    num_bytes: int = field(compare=False)
    reply: Callable[[Any], None] = field(compare=False)


class _Worker(NamedTuple, Generic[J, D]):
    """A thread that runs jobs of classes up to `last_class`."""

    thread: threading.Thread
    watchdog: Watchdog[Queued[J, D]]
    last_class: float


class IoQueue(Generic[J, D]):
    """Queue, threads and breaker. The serving thread owns this object. A worker thread calls `take` to get a job, then
    calls `reply` of the job, or `refuse`.

    The queue accepts any number of jobs, because clients limit the number of waiting jobs; a queue with `capacity` jobs
    counts as full. `unserved` returns the answer to a job that the store did not receive. Invariant: every submitted
    job is answered once, also if its thread fails. A job whose thread does not return is announced as `Stalled`.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        unserved: Callable[[J], D],
        limits: Limits,
        clock: Callable[[], float],
        tier: str = "disk",
    ) -> None:
        self.name = name
        self._tier = tier
        self._capacity = capacity
        self.breaker = Breaker(name, limits, clock, tier)
        self._unserved = unserved
        self._limits = limits
        self._clock = clock
        self._threads: list[_Worker[J, D]] = []
        self._changed = threading.Condition()
        self._waiting: list[Queued[J, D]] = []  # a heap
        self._waiting_bytes = 0
        self._order = itertools.count()
        self._refused = self._stalled = 0
        self._stopped = False

    def start(
        self,
        num_threads: int,
        loop: Callable[[Watchdog[Queued[J, D]]], None],
        last_class: float = math.inf,
    ) -> None:
        """Start threads that run `loop`, which takes jobs of classes up to `last_class`."""
        for _ in range(num_threads):
            watchdog: Watchdog[Queued[J, D]] = Watchdog(self._clock, self._limits.io_timeout_s)
            name = f"hicache-{self._tier}-{self.name}-{len(self._threads)}"
            thread = threading.Thread(target=loop, args=(watchdog,), name=name, daemon=True)
            thread.start()
            self._threads.append(_Worker(thread, watchdog, last_class))

    def submit(self, job: J, reply: Callable[[Any], None]) -> None:
        """Queue a job, or refuse it if no thread would run it."""
        num_bytes = sum(page.nbytes for page in job.pages)
        item: Queued[J, D] = Queued(job.queue_class, next(self._order), job, num_bytes, reply)
        if self.refuses(job.queue_class):
            self.refuse(item)
            return
        with self._changed:
            heapq.heappush(self._waiting, item)
            self._waiting_bytes += num_bytes
            # All threads are notified, because a single notified thread might not accept this class.
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, wait_s: float | None = None, last_class: float = math.inf) -> Queued[J, D] | None:
        """Wait for a job of a class up to `last_class`. Returns None after `wait_s` without a job, or if the queue is
        stopped and has no job of these classes."""

        def has_one() -> bool:
            return bool(self._waiting) and self._waiting[0].queue_class <= last_class

        with self._changed:
            self._changed.wait_for(lambda: has_one() or self._stopped, wait_s)
            return self._pop() if has_one() else None

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    def take_more(self, max_bytes: float) -> list[Queued[J, D]]:
        """Take the next queued jobs, together at most `max_bytes`, without blocking."""
        with self._changed:
            taken: list[Queued[J, D]] = []
            while self._waiting and (max_bytes := max_bytes - self._waiting[0].num_bytes) >= 0:
                taken.append(self._pop())
            return taken

    def fullness(self, full_bytes: int) -> float:
        """Return the fullness in [0, 1]: the larger of jobs / capacity and queued bytes / `full_bytes`."""
        with self._changed:
            return min(1.0, max(len(self._waiting) / self._capacity, self._waiting_bytes / full_bytes))

    def refuses(self, queue_class: float = math.inf) -> bool:
        """Return whether the queue would refuse a job of this class now, because the breaker is open, the queue is
        stopped, or all threads for the class are stalled."""
        return self._stopped or self._runs_no(queue_class)

    def refuse(self, item: Queued[J, D]) -> None:
        with self._changed:
            self._refused += 1
        item.reply(self._unserved(item.job))

    def look(self) -> None:
        """Announce the jobs of stalled threads, and refuse queued jobs that no thread will run. Never blocks.

        A job whose thread does not return in time has two outcomes: first `Stalled`, and later the answer, when no
        thread uses the pages of the job.
        """
        for worker in self._threads:
            token = worker.watchdog.report(self._announce)
            if token is not None:
                why = f"a job takes longer than io_timeout_s={self._limits.io_timeout_s:g}"
                self.breaker.failed(token, why, at_once=True)
        if self._waiting and self._runs_no(math.inf):  # a stopped queue still runs its jobs
            for item in self.take_more(math.inf):
                self.refuse(item)

    @property
    def is_busy(self) -> bool:
        """Return whether a job is queued or running."""
        return len(self._waiting) > 0 or any(worker.watchdog.is_working for worker in self._threads)

    def stop(self) -> None:
        """Let the threads finish the queued jobs, and wait until all threads have ended."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for worker in self._threads:
            worker.thread.join()

    def numbers(self) -> tuple[float, ...]:
        """Return the `QUEUE_NUMBERS` of the shared status, and the time until which jobs are refused."""
        breaker = self.breaker
        counts = breaker.state, breaker.opens, breaker.failures, self._refused, self._stalled
        until_s = math.inf if self._are_stalled() else breaker.refuses_until_s
        return (*counts, len(self._waiting), self._waiting_bytes, until_s)

    def _runs_no(self, queue_class: float) -> bool:
        """Return whether the breaker is open, or all threads for a class are stalled."""
        return self.breaker.refuses() or self._are_stalled(queue_class)

    def _are_stalled(self, queue_class: float = math.inf) -> bool:
        """Return whether all threads for a class are stalled."""
        return all(worker.watchdog.is_stalled for worker in self._threads if worker.last_class >= queue_class)

    def _pop(self) -> Queued[J, D]:
        item = heapq.heappop(self._waiting)
        self._waiting_bytes -= item.num_bytes
        return item

    def _announce(self, item: Queued[J, D]) -> None:
        self._stalled += 1
        item.reply(Stalled(item.job.ticket, item.job.batch))
