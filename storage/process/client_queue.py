"""The reads or the writes that a client of a store process has under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from hicache.storage.process.jobs import (
    FindDone,
    FindJob,
    Job,
    ReadDone,
    ReadJob,
    RemoveJob,
    Stalled,
    WriteDone,
    WriteJob,
)

J = TypeVar("J", FindJob | ReadJob, WriteJob | RemoveJob)
D = TypeVar("D", FindDone | ReadDone, WriteDone)


class JobSender(Protocol):
    def refuses(self, name: str) -> bool:
        """Whether a job of the queue would not be done."""
        ...

    def send_jobs(self, jobs: Sequence[Job]) -> None: ...

    def send_cancels(self, jobs: Sequence[tuple[int, int]]) -> None:
        """Of reads, by ticket and batch."""
        ...

    def poll(self) -> None:
        """Hand what has come to `ClientQueue.take`. Never blocks."""
        ...


class ClientQueue(Generic[J, D]):
    """The reads or the writes of a client. `refused`: jobs that were answered without the process. `fault`: why the
    last write was not done; empty if it was, or if the store is full."""

    def __init__(self, client: JobSender, name: str, capacity: int, unserved: Callable[[J], D]) -> None:
        self.name = name
        self._client = client
        self._capacity = capacity
        self._unserved: Callable[[J], D] = unserved
        self.under_way: dict[tuple[int, int], J] = {}
        self._announced = set[tuple[int, int]]()
        self._cancelled = set[tuple[int, int]]()
        self._done: list[D | Stalled] = []
        self.refused = 0
        self.fault = ""

    def submit(self, *jobs: J) -> bool:
        """Send jobs, or answer them where the process would not do them. False: too many are under way, and none is
        sent."""
        if self.refuses():
            self.refused += len(jobs)
            self._done += map(self._unserved, jobs)
            return True
        if len(self.under_way) + len(jobs) > self._capacity:
            return False
        sent = list[J]()
        for job in jobs:
            if isinstance(job, ReadJob) and job.cancelled.is_set():
                self._done.append(self._unserved(job))
            else:
                sent.append(job)
        self._client.send_jobs(sent)
        for job in sent:
            self.under_way[job.ticket, job.batch] = job
        return True

    @property
    def num_free(self) -> int:
        """How many more may be submitted: with too many under way none, unless they are refused."""
        return self._capacity - len(self.under_way) or int(self.refuses())

    def refuses(self) -> bool:
        return self._client.refuses(self.name)

    def poll(self) -> list[D | Stalled]:
        """The outcomes since the last call, as they came. Never blocks.

        A job whose thread or process does not answer in time has two: `Stalled`, and its answer once nothing uses its
        pages.
        """
        self._client.poll()
        found, self._done = self._done, []
        return found

    def tell_cancelled(self) -> None:
        """Tell the process of reads whose `cancelled` is set now: nothing else does."""
        cancelled = [
            key
            for key, job in self.under_way.items()
            if isinstance(job, ReadJob) and job.cancelled.is_set() and key not in self._cancelled
        ]
        self._cancelled.update(cancelled)
        if cancelled:
            self._client.send_cancels(cancelled)

    @property
    def is_stalled(self) -> bool:
        """Whether all that is under way was announced as stalled."""
        return len(self._announced) == len(self.under_way)

    def take(self, done: D | Stalled) -> None:
        """An outcome has come. KeyError for that of no job."""
        key = done.ticket, done.batch
        if isinstance(done, Stalled):
            if key in self._announced:
                return
            self._announced.add(key)
            self.fault = "a write takes longer than io_timeout_s"
        else:
            self.fault = done.why if isinstance(done, WriteDone) else ""
            del self.under_way[key]
            self._announced.discard(key)
            self._cancelled.discard(key)
        self._done.append(done)

    def announce(self) -> None:
        """Nobody knows when what is under way will be answered."""
        for ticket, batch in self.under_way:
            self.take(Stalled(ticket, batch))

    def settle(self) -> None:
        """Nothing uses the pages of what was under way any more."""
        for job in list(self.under_way.values()):
            self.take(self._unserved(job))
