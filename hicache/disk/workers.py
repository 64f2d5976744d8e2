"""The threads between host pages and the page store: one writes, several read.

The scheduler thread puts frozen jobs on bounded queues and drains frozen results; nothing else crosses. A full queue
refuses the job. A page's bytes belong to the thread from `put` until the job's result is drained. Whatever a store
raises on a worker becomes a miss or a failed write, counted and logged: serving goes on.

May import numpy, storage, config and errors.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hicache.storage.base import PageStore, StoreError

log = logging.getLogger(__name__)

_T = TypeVar("_T")
PageBytes = npt.NDArray[np.uint8]
_JOIN_S = 30.0


@dataclass(frozen=True)
class FindJob:
    """How many of `keys`, from the first on, does the store hold without a gap?"""

    ticket: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class FindDone:
    ticket: int
    num_pages: int


@dataclass(frozen=True)
class ReadJob:
    """Read `keys` into `pages`. `batch` numbers the jobs of a ticket. A job whose `cancelled` is set reads nothing."""

    ticket: int
    batch: int
    keys: tuple[bytes, ...]
    pages: tuple[PageBytes, ...]
    cancelled: threading.Event = field(compare=False)


@dataclass(frozen=True)
class ReadDone:
    """`ok[i]`: page i holds verified bytes."""

    ticket: int
    batch: int
    ok: tuple[bool, ...]


@dataclass(frozen=True)
class WriteJob:
    ticket: int
    keys: tuple[bytes, ...]
    pages: tuple[PageBytes, ...]


@dataclass(frozen=True)
class WriteDone:
    """`ok[i]`: page i is in the store, as durable as its mode says."""

    ticket: int
    ok: tuple[bool, ...]


class DiskTier:
    """Owns the store and its threads. Every method belongs to the scheduler thread."""

    def __init__(self, store: PageStore, *, readers: int, queue_jobs: int) -> None:
        self.store = store
        self.failures = 0
        self._reads: queue.Queue[FindJob | ReadJob | None] = queue.Queue(queue_jobs)
        self._writes: queue.Queue[WriteJob | None] = queue.Queue(queue_jobs)
        self._found: queue.SimpleQueue[FindDone | ReadDone] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[WriteDone] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._write_loop, name="hicache-disk-write", daemon=True)]
        for i in range(readers):
            self._threads.append(threading.Thread(target=self._read_loop, name=f"hicache-disk-read-{i}", daemon=True))
        self._num_readers = readers

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, job: FindJob | ReadJob | WriteJob) -> bool:
        """Queue a job; False when the queue is full, and nothing happened then."""
        try:
            if isinstance(job, WriteJob):
                self._writes.put_nowait(job)
            else:
                self._reads.put_nowait(job)
        except queue.Full:
            return False
        return True

    def contains(self, keys: Sequence[bytes]) -> int:
        """Keys held from the first on without a gap; looked up on the calling thread."""
        return _leading(self.store.contains(keys))

    def drain_reads(self) -> list[FindDone | ReadDone]:
        return _drain(self._found)

    def drain_writes(self) -> list[WriteDone]:
        return _drain(self._written)

    def close(self) -> None:
        """Finish what is queued, stop the threads, close the store."""
        if self._threads[0].is_alive():
            self._writes.put(None)
            for _ in range(self._num_readers):
                self._reads.put(None)
            for thread in self._threads:
                thread.join(_JOIN_S)
        self.store.close()

    def _read_loop(self) -> None:
        while (job := self._reads.get()) is not None:
            if isinstance(job, FindJob):
                held = self._guard(partial(self.store.contains, job.keys), len(job.keys))
                self._found.put(FindDone(job.ticket, _leading(held)))
            elif job.cancelled.is_set():
                self._found.put(ReadDone(job.ticket, job.batch, (False,) * len(job.keys)))
            else:
                ok = self._guard(partial(self.store.get_into, job.keys, job.pages), len(job.keys))
                self._found.put(ReadDone(job.ticket, job.batch, tuple(ok)))

    def _write_loop(self) -> None:
        while (job := self._writes.get()) is not None:
            items = list(zip(job.keys, job.pages, strict=True))
            ok = self._guard(partial(self.store.put, items), len(items))
            self._written.put(WriteDone(job.ticket, tuple(ok)))

    def _guard(self, call: Callable[[], list[bool]], length: int) -> list[bool]:
        try:
            return call()
        except Exception as error:  # whatever it is, somebody waits for the result
            self.failures += 1
            log.warning("the disk tier failed: %s", error, exc_info=not isinstance(error, (StoreError, OSError)))
            return [False] * length


def _leading(held: Sequence[bool]) -> int:
    return next((i for i, present in enumerate(held) if not present), len(held))


def _drain(results: queue.SimpleQueue[_T]) -> list[_T]:
    found: list[_T] = []
    while not results.empty():
        found.append(results.get())
    return found
