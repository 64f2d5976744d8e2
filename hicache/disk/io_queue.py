"""The reads or the writes of a store's tier: waiting jobs by class, outcomes, threads and breaker."""

from __future__ import annotations

import heapq
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from hicache.disk.health import Breaker, Limits, Watchdog
from hicache.disk.jobs import Job, Stalled
from hicache.metrics import Metrics, MetricType

J = TypeVar("J", bound=Job)
D = TypeVar("D")

Outcomes: TypeAlias = "queue.SimpleQueue[tuple[Queued[J, D], D | Stalled]]"
_FIRST = -1  # the queue class of jobs that go before all others, and whose outcomes have a queue of their own

_METRICS: dict[str, tuple[MetricType, str]] = {
    "state": ("gauge", "the breaker of reads or writes: 0 closed, 1 half open, 2 open"),
    "opens": ("counter", "times that the breaker opened"),
    "failures": ("counter", "calls that the store failed"),
    "refused_jobs": ("counter", "jobs for which the store was not asked, because the breaker was open"),
    "stalled_jobs": ("counter", "jobs under way for longer than the tier's I/O timeout"),
    "queued_jobs": ("gauge", "jobs that wait for a thread"),
    "queued_bytes": ("gauge", "bytes of their pages"),
}


@dataclass(frozen=True, order=True)
class Queued(Generic[J, D]):
    """A job on its way. Lower classes go first, within a class those submitted first, which have lower numbers.
    `num_bytes`: of its pages. `outcomes`: where its outcomes go."""

    queue_class: int
    number: int
    job: J = field(compare=False)
    num_bytes: int = field(compare=False)
    outcomes: Outcomes[J, D] = field(compare=False)


class JobQueue(Generic[J, D]):
    """At most `capacity` jobs, handed out in their order. Any thread.

    Bounded by their number alone: the pages behind the jobs exist whether they wait here or not.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._changed = threading.Condition()
        self._heap: list[Queued[J, D]] = []
        self.waiting_bytes = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, item: Queued[J, D]) -> bool:
        """Add a job; False when the queue is full, and nothing happened then."""
        with self._changed:
            if len(self._heap) >= self._capacity:
                return False
            heapq.heappush(self._heap, item)
            self.waiting_bytes += item.num_bytes
            self._changed.notify()
            return True

    def take(self) -> Queued[J, D] | None:
        """Wait for a job. None: the queue is closed and empty."""
        with self._changed:
            while not self._heap and not self._closed:
                self._changed.wait()
            return self._pop() if self._heap else None

    def take_more(self, max_bytes: int) -> list[Queued[J, D]]:
        """The next waiting jobs, up to `max_bytes` together, without waiting."""
        with self._changed:
            taken: list[Queued[J, D]] = []
            while self._heap and (max_bytes := max_bytes - self._heap[0].num_bytes) >= 0:
                taken.append(self._pop())
            return taken

    def clear(self) -> list[Queued[J, D]]:
        """Take all waiting jobs, without waiting."""
        with self._changed:
            return [self._pop() for _ in range(len(self._heap))]

    def fullness(self, full_bytes: int) -> float:
        """In [0, 1]: the larger of jobs / capacity and waiting bytes / `full_bytes`."""
        with self._changed:
            return min(1.0, max(len(self._heap) / self._capacity, self.waiting_bytes / full_bytes))

    def close(self) -> None:
        """`take` returns the remaining jobs, then None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _pop(self) -> Queued[J, D]:
        item = heapq.heappop(self._heap)
        self.waiting_bytes -= item.num_bytes
        return item


class IoQueue(Generic[J, D]):
    """Owned by the scheduler thread; the worker threads take from `jobs` and call `answer` and `refuse`.

    `unserved` makes the answer to a job for which the store was not asked. Invariant: every submitted job is answered
    once, whatever happens to its thread; a job whose thread does not return is announced as `Stalled`.
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
        self.name, self._tier = name, tier
        self.breaker = Breaker(name, limits, clock, tier)
        self.jobs: JobQueue[J, D] = JobQueue(capacity)
        self._outcomes: Outcomes[J, D] = queue.SimpleQueue()
        self._order = itertools.count()
        self._unserved, self._limits, self._clock = unserved, limits, clock
        self._threads: list[tuple[threading.Thread, Watchdog[Queued[J, D]]]] = []
        self._counting = threading.Lock()
        self._refused = self._stalled = 0
        self._stopped = False

    def add_threads(self, count: int, loop: Callable[[Watchdog[Queued[J, D]]], None]) -> None:
        for n in range(count):
            watchdog: Watchdog[Queued[J, D]] = Watchdog(self._clock, self._limits.io_timeout_s)
            name = f"hicache-{self._tier}-{self.name}-{n}"
            self._threads.append((threading.Thread(target=loop, args=(watchdog,), name=name, daemon=True), watchdog))

    def start(self) -> None:
        for thread, _ in self._threads:
            thread.start()

    def submit(self, job: J) -> bool:
        """Queue a job, or refuse it when no thread would do it. False: the queue is full."""
        num_bytes = sum(page.nbytes for page in job.pages)
        item = Queued(job.queue_class, next(self._order), job, num_bytes, self._outcomes)
        if self.refuses():
            self.refuse(item)
            return True
        return self.jobs.offer(item)

    def submit_first(self, job: J) -> Outcomes[J, D] | None:
        """Queue a job before all others; its outcomes come through the returned queue. None: the queue is full."""
        outcomes: Outcomes[J, D] = queue.SimpleQueue()
        return outcomes if self.jobs.offer(Queued(_FIRST, 0, job, 0, outcomes)) else None

    def refuses(self) -> bool:
        """Whether a job submitted now would not be done: the breaker is open, or no thread is left."""
        return self.breaker.refuses() or self._stopped or all(watchdog.is_stalled for _, watchdog in self._threads)

    def refuse(self, item: Queued[J, D]) -> None:
        with self._counting:
            self._refused += 1
        self.answer(item, self._unserved(item.job))

    def answer(self, item: Queued[J, D], answer: D) -> None:
        item.outcomes.put((item, answer))

    def poll(self) -> list[D | Stalled]:
        """The outcomes since the last call, as they came, after a look for stalled threads. Never blocks.

        A job whose thread does not return in time has two: `Stalled`, and its answer once no thread uses its pages.
        """
        for _, watchdog in self._threads:
            if watchdog.stalls_at_s < math.inf and self._clock() > watchdog.stalls_at_s:
                token = watchdog.report(self._announce)
                if token is not None:
                    why = f"a job takes longer than io_timeout_s={self._limits.io_timeout_s:g}"
                    self.breaker.failed(token, why, at_once=True)
        if len(self.jobs) and self.refuses():
            for item in self.jobs.clear():
                self.refuse(item)
        found: list[D | Stalled] = []
        while not self._outcomes.empty():
            found.append(self._outcomes.get()[1])
        return found

    def stop(self, deadline_s: float) -> bool:
        """Let the threads finish what is queued, until `deadline_s` of `time.monotonic`; true when all have ended."""
        self._stopped = True
        self.jobs.close()
        for thread, watchdog in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(0 if watchdog.is_stalled else max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread, _ in self._threads)

    def register(self, metrics: Metrics) -> None:
        """Enter what is counted here, as `disk.reads_*` or `disk.writes_*`."""
        named, labels = f"{self._tier}.{self.name}_", {"direction": self.name.removesuffix("s")}
        families = {f"{named}{name}": (f"{self._tier}_{name}", labels) for name in _METRICS}
        families[f"{named}state"] = (f"{self._tier}_breaker_state", labels)
        metrics.read_from(
            {f"{named}{name}": described for name, described in _METRICS.items()},
            lambda: {f"{named}{name}": value for name, value in zip(_METRICS, self._numbers(), strict=True)},
            families,
        )

    def _numbers(self) -> tuple[float, ...]:
        """Of `_METRICS`."""
        breaker, jobs = self.breaker, self.jobs
        return (
            *(breaker.state, breaker.opens, breaker.failures, self._refused, self._stalled),
            *(len(jobs), jobs.waiting_bytes),
        )

    def _announce(self, item: Queued[J, D]) -> None:
        self._stalled += 1
        item.outcomes.put((item, Stalled(item.job.ticket, item.job.batch)))
