"""One direction of the disk tier, reads or writes: its waiting jobs, its answers, its threads and its health.

Owns no loop and never asks the store. May import metrics and its siblings.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from hicache.disk.health import Breaker, Limits, Watch
from hicache.disk.jobs import FindDone, FindJob, Hung, Job, num_bytes
from hicache.disk.queueing import JobQueue
from hicache.metrics import Metrics

J = TypeVar("J", bound=Job)
D = TypeVar("D")


class Direction(Generic[J, D]):
    """`nothing` makes the answer to a job that is not done. The scheduler thread submits and drains, threads take from
    `jobs` and put to `done`, either refuses.

    Invariant: every job that `submit` took is answered once, however its thread fares; that of a thread that never
    returns is announced as `Hung` and not answered.
    """

    def __init__(
        self, name: str, capacity: int, nothing: Callable[[J], D], limits: Limits, clock: Callable[[], float]
    ) -> None:
        self.name = name
        self.breaker = Breaker(name, limits, clock)
        self.jobs: JobQueue[J] = JobQueue(capacity, num_bytes)
        self.done: queue.SimpleQueue[D | Hung] = queue.SimpleQueue()
        self._nothing, self._limits, self._clock = nothing, limits, clock
        self._threads: list[tuple[threading.Thread, Watch[J]]] = []
        self._counting = threading.Lock()
        self._refused = self._hung = 0
        self._stopped = False

    def add_threads(self, count: int, loop: Callable[[Watch[J]], None]) -> None:
        for n in range(count):
            watch: Watch[J] = Watch(self._clock)
            name = f"hicache-disk-{self.name}-{n}"
            self._threads.append((threading.Thread(target=loop, args=(watch,), name=name, daemon=True), watch))

    def start(self) -> None:
        for thread, _ in self._threads:
            thread.start()

    def submit(self, job: J, priority: int = 0) -> bool:
        """Queue a job, or answer it with nothing where no thread would do it. False: the queue is full."""
        if self.refuses():
            self.refuse(job)
            return True
        return self.jobs.offer(job, priority)

    def refuses(self) -> bool:
        """Whether a job has no chance now: the breaker lets none through, or no thread is left to take it."""
        return self.breaker.refuses() or self._stopped or all(watch.hangs for _, watch in self._threads)

    def refuse(self, job: J) -> None:
        with self._counting:
            self._refused += 1
        self.answer(job, self._nothing(job))

    def answer(self, job: J, answer: D | Hung) -> None:
        """Put an answer or announcement where it is waited for."""
        if isinstance(job, FindJob) and job.reply is not None:
            job.reply.put(cast("FindDone | Hung", answer))
        else:
            self.done.put(answer)

    def drain(self) -> list[D | Hung]:
        """Answers and announcements, after a look at the threads. While nothing is under way it takes no lock."""
        for _, watch in self._threads:
            if watch.works:
                permit = watch.report(self._limits.hang_s, self._announce)
                if permit is not None:
                    why = f"a job takes longer than hang_s={self._limits.hang_s:g}"
                    self.breaker.failed(permit, why, at_once=True)
        if len(self.jobs) and self.refuses():
            for job in self.jobs.clear():
                self.refuse(job)
        found: list[D | Hung] = []
        while not self.done.empty():
            found.append(self.done.get())
        return found

    def stop(self, deadline_s: float) -> bool:
        """Let the threads finish what is queued, until `deadline_s` of `time.monotonic`; true when all have ended."""
        self._stopped = True
        self.jobs.close()
        for thread, watch in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(0 if watch.hangs else max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread, _ in self._threads)

    def add_gauges(self, metrics: Metrics) -> None:
        name, breaker = self.name, self.breaker
        for series, help, read in (
            ("state", "0 in use, 1 tried again, 2 left alone", lambda: breaker.state),
            ("opens", "times that they stopped since the store failed", lambda: breaker.opens),
            ("failures", "calls that the store failed", lambda: breaker.failures),
            ("refused_jobs", "jobs answered with nothing while they were stopped", lambda: self._refused),
            ("hung_jobs", "jobs under way for longer than hang_s", lambda: self._hung),
        ):
            metrics.gauge(f"disk.{name}_{series}", f"{name} of the disk tier: {help}", read)

    def _announce(self, job: J) -> None:
        self._hung += 1
        self.answer(job, Hung(job.ticket, job.batch))
