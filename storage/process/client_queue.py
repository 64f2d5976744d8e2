"""The reads or the writes that a client of a store process has in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from hicache.storage.process.jobs import (
    Job,
    Question,
    QuestionDone,
    ReadJob,
    RemoveJob,
    Stalled,
    WriteDone,
    WriteJob,
)

J = TypeVar("J", Question, WriteJob | RemoveJob)
D = TypeVar("D", QuestionDone, WriteDone)


class JobSender(Protocol):
    """The methods of `StoreClient` that a queue calls."""

    def refuses(self, name: str) -> bool:
        """Whether the process would refuse a job of the queue `name`."""
        ...

    def send_jobs(self, jobs: Sequence[Job]) -> None: ...

    def send_cancels(self, jobs: Sequence[tuple[int, int]]) -> None:
        """Cancel reads by ticket and batch."""
        ...

    def poll(self) -> None:
        """Pass received outcomes to `ClientQueue.take`. Never blocks."""
        ...


class ClientQueue(Generic[J, D]):
    """The reads or the writes of a client. `refused`: number of jobs answered without the process. `fault`: why the
    last write failed; "" if it succeeded or the store is full."""

    def __init__(self, client: JobSender, name: str, capacity: int, unserved: Callable[[J], D]) -> None:
        self.name = name
        self._client = client
        self._capacity = capacity
        self._unserved: Callable[[J], D] = unserved
        self.in_flight: dict[tuple[int, int], J] = {}
        self._announced = set[tuple[int, int]]()
        self._cancelled = set[tuple[int, int]]()
        self._done: list[D | Stalled] = []
        self.refused = 0
        self.fault = ""

    def submit(self, *jobs: J) -> bool:
        """Send jobs, or answer them here if the process would refuse them. If too many jobs are in flight, send none
        and return False."""
        if self.refuses():
            self.refused += len(jobs)
            self._done += map(self._unserved, jobs)
            return True
        if len(self.in_flight) + len(jobs) > self._capacity:
            return False
        sent = list[J]()
        for job in jobs:
            if isinstance(job, ReadJob) and job.cancelled.is_set():
                self._done.append(self._unserved(job))
            else:
                sent.append(job)
        self._client.send_jobs(sent)
        for job in sent:
            self.in_flight[job.ticket, job.batch] = job
        return True

    @property
    def num_free(self) -> int:
        """How many more jobs `submit` accepts. If too many are in flight, 0 unless the process would refuse them."""
        return self._capacity - len(self.in_flight) or int(self.refuses())

    def refuses(self) -> bool:
        return self._client.refuses(self.name)

    def poll(self) -> list[D | Stalled]:
        """The outcomes since the last call, in order of arrival. Never blocks.

        A job whose thread or process does not answer in time has two outcomes: `Stalled`, and its answer once no thread
        uses its pages.
        """
        self._client.poll()
        found, self._done = self._done, []
        return found

    def tell_cancelled(self) -> None:
        """Send the process a cancellation for each read whose `cancelled` is set. Call this after setting it."""
        cancelled = [
            key
            for key, job in self.in_flight.items()
            if isinstance(job, ReadJob) and job.cancelled.is_set() and key not in self._cancelled
        ]
        self._cancelled.update(cancelled)
        if cancelled:
            self._client.send_cancels(cancelled)

    @property
    def is_stalled(self) -> bool:
        """Whether all jobs in flight were announced as stalled."""
        return len(self._announced) == len(self.in_flight)

    def take(self, done: D | Stalled) -> None:
        """Record a received outcome. KeyError if it belongs to no job in flight."""
        key = done.ticket, done.batch
        if isinstance(done, Stalled):
            if key in self._announced:
                return
            self._announced.add(key)
            self.fault = "a write takes longer than io_timeout_s"
        else:
            self.fault = done.why if isinstance(done, WriteDone) else ""
            del self.in_flight[key]
            self._announced.discard(key)
            self._cancelled.discard(key)
        self._done.append(done)

    def announce(self) -> None:
        """Announce all jobs in flight as stalled."""
        for ticket, batch in self.in_flight:
            self.take(Stalled(ticket, batch))

    def settle(self) -> None:
        """Answer all jobs in flight as failed, once the process no longer uses their pages."""
        for job in list(self.in_flight.values()):
            self.take(self._unserved(job))
