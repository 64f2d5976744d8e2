"""The threads between host pages and the page store: one writes, several read.

The scheduler thread puts frozen jobs on bounded queues and drains frozen answers; nothing else crosses. A full queue
refuses the job. Reads that a request waits for go before speculative ones, finds before reads; writes that wait
together are put together. Whatever a store raises on a worker becomes a miss or a failed write, and a store that fails
or hangs is left alone for a while (see `health`): serving goes on without it.

May import numpy, storage, metrics and its siblings.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from hicache.disk.direction import Direction
from hicache.disk.health import LIMITS, Breaker, Limits, Permit, Watch
from hicache.disk.jobs import FindDone, FindJob, Hung, ReadDone, ReadJob, WriteDone, WriteJob, num_bytes
from hicache.metrics import Metrics
from hicache.storage.base import PageStore, StoreError

log = logging.getLogger(__name__)

_PART_PAGES = 2  # after so many a reader looks whether it should go on
_GROUP_BYTES = 256 << 20  # of writes that are put together: several commits, each packed during the one before
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # trying again at once would tell nothing new


class _Fault(NamedTuple):
    why: str
    lasting: bool


class DiskTier:
    """Owns the store and its threads. Every method belongs to the scheduler thread.

    `full_bytes`: waiting writes of so many bytes count as a full queue. `clock`: seconds; deadlines of jobs are its.
    """

    def __init__(
        self,
        store: PageStore,
        *,
        readers: int,
        queue_jobs: int,
        full_bytes: int = 1 << 40,
        limits: Limits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._full_bytes, self._limits, self._clock = full_bytes, limits, clock
        self._read_errors = self._write_errors = 0
        self._reads: Direction[FindJob | ReadJob, FindDone | ReadDone]
        self._reads = Direction("reads", queue_jobs, _found_nothing, limits, clock)
        self._writes: Direction[WriteJob, WriteDone]
        self._writes = Direction("writes", queue_jobs, _wrote_nothing, limits, clock)
        self._reads.add_threads(readers, self._read_loop)
        self._writes.add_threads(1, self._write_loop)

    @property
    def failures(self) -> int:
        """Calls that the store failed, both ways."""
        return self._reads.breaker.failures + self._writes.breaker.failures

    def add_gauges(self, metrics: Metrics) -> None:
        self._reads.add_gauges(metrics)
        self._writes.add_gauges(metrics)

    def start(self) -> None:
        self._reads.start()
        self._writes.start()

    def submit(self, job: FindJob | ReadJob | WriteJob) -> bool:
        """Queue a job; False when the queue is full, and nothing happened then. While the store is left alone, a job is
        taken and answered with nothing."""
        if isinstance(job, WriteJob):
            return self._writes.submit(job)
        # Batches of a prompt come from the first on, and the queue keeps the order within a priority.
        return self._reads.submit(job, 2 * (not job.urgent) + isinstance(job, ReadJob))

    def contains(self, keys: Sequence[bytes]) -> int:
        """Keys held from the first on without a gap; looked up on the calling thread. 0 while reads are stopped."""
        permit = None if self._reads.refuses() else self._reads.breaker.admit(probes=False)
        return 0 if permit is None else self._find(keys, permit)

    @property
    def takes_writes(self) -> bool:
        """Whether a write has a chance now."""
        return not self._writes.refuses()

    def used(self, keys: Sequence[bytes]) -> None:
        """A request used these pages, the first of its prompt first, whichever tier served them."""
        self.store.touch(keys)

    def drain_reads(self) -> list[FindDone | ReadDone | Hung]:
        return self._reads.drain()

    def drain_writes(self) -> list[WriteDone | Hung]:
        return self._writes.drain()

    def close(self) -> bool:
        """Finish what is queued, stop the threads, close the store.

        Waits at most `close_s` for threads that do not return. False: one is left in the store, which stays open and
        keeps its path; the memory of the pages that the thread has stays mapped, for its job refers to it, and a later
        call tries again. Nothing else may use these pages until the process ends.
        """
        deadline_s = time.monotonic() + self._limits.close_s
        ended = [direction.stop(deadline_s) for direction in (self._writes, self._reads)]
        if not all(ended):
            log.warning("the disk tier closes without its store: a thread hangs in it; restart the process to free it")
            return False
        self.store.close()
        return True

    # On the threads

    def _read_loop(self, watch: Watch[FindJob | ReadJob]) -> None:
        reads = self._reads
        while (job := reads.jobs.take()) is not None:
            if isinstance(job, ReadJob) and self._is_void(job):
                reads.done.put(_found_nothing(job))
                continue
            permit = reads.breaker.admit(probes=isinstance(job, ReadJob))
            if permit is None:
                reads.refuse(job)
                continue
            watch.begin([job], permit)
            answer: FindDone | ReadDone
            if isinstance(job, FindJob):
                answer = FindDone(job.ticket, self._find(job.keys, permit))
            else:
                answer = self._read(job, permit)
            watch.end()
            reads.done.put(answer)

    def _write_loop(self, watch: Watch[WriteJob]) -> None:
        writes = self._writes
        while (first := writes.jobs.take()) is not None:
            jobs = [first, *writes.jobs.take_more(_GROUP_BYTES - num_bytes(first))]
            permit = writes.breaker.admit()
            if permit is None:
                for job in jobs:
                    writes.refuse(job)
                continue
            watch.begin(jobs, permit)
            answers = self._write(jobs, permit)
            watch.end()
            for answer in answers:
                writes.done.put(answer)

    def _is_void(self, job: ReadJob) -> bool:
        """Whether nobody wants the pages any more."""
        return job.cancelled.is_set() or self._clock() >= job.deadline_s

    def _find(self, keys: Sequence[bytes], permit: Permit) -> int:
        breaker = self._reads.breaker
        held = _ask(breaker, permit, partial(self.store.contains, keys), self._judge_read, proves=False)
        return next((i for i, present in enumerate(held) if not present), len(held))

    def _read(self, job: ReadJob, permit: Permit) -> ReadDone:
        """A part at a time, until nobody wants the rest; what is behind a gap is of no use."""
        ok: list[bool] = []
        while len(ok) < len(job.keys) and all(ok) and not (ok and self._is_void(job)):
            part = slice(len(ok), len(ok) + _PART_PAGES)
            call = partial(self.store.get_into, job.keys[part], job.pages[part])
            got = _ask(self._reads.breaker, permit, call, self._judge_read)
            ok += got or [False] * len(job.keys[part])
        return ReadDone(job.ticket, job.batch, tuple(ok + [False] * (len(job.keys) - len(ok))), asked=len(ok))

    def _write(self, jobs: list[WriteJob], permit: Permit) -> list[WriteDone]:
        """All jobs in one `put`; each is answered by its own pages."""
        items = [item for job in jobs for item in zip(job.keys, job.pages, strict=True)]
        lag = self._writes.jobs.fullness(self._full_bytes)

        def put() -> list[bool]:
            if permit.is_probe and not self.store.revive():
                raise StoreError("the store still takes no writes")
            return self.store.put(items, lag=lag)

        stored = _ask(self._writes.breaker, permit, put, self._judge_write) or [False] * len(items)
        answers, start = [], 0
        for job in jobs:
            end = start + len(job.keys)
            answers.append(WriteDone(job.ticket, tuple(stored[start:end]), job.batch))
            start = end
        return answers

    def _judge_read(self, ok: list[bool]) -> _Fault | None:
        """A store that cannot read answers with misses: only its own count tells them from pages it does not have."""
        if all(ok):
            return None
        before, self._read_errors = self._read_errors, self.store.stats().read_errors
        return _Fault("the medium cannot be read", lasting=False) if self._read_errors > before else None

    def _judge_write(self, ok: list[bool]) -> _Fault | None:
        if all(ok):
            return None
        stats = self.store.stats()
        before, self._write_errors = self._write_errors, stats.write_errors
        if stats.read_only:
            return _Fault("the store is read-only; free space on its disk", lasting=True)
        failed = stats.write_errors > before or not any(ok)
        return _Fault("the store did not take pages", lasting=False) if failed else None


def _ask(
    breaker: Breaker,
    permit: Permit,
    call: Callable[[], list[bool]],
    judge: Callable[[list[bool]], _Fault | None],
    *,
    proves: bool = True,
) -> list[bool]:
    """The store's answer, empty where it failed; the breaker hears of it. `proves`: success means the store is well."""
    try:
        ok = call()
        fault = judge(ok)
    except (StoreError, OSError) as error:
        lasting = isinstance(error, StoreError) or error.errno in _LASTING
        ok, fault = [], _Fault(str(error), lasting)
    except Exception as error:  # whatever it is, somebody waits for the result
        log.exception("the disk tier failed in a way that no store should")
        ok, fault = [], _Fault(repr(error), lasting=False)
    if fault is not None:
        breaker.failed(permit, fault.why, at_once=fault.lasting)
    elif proves:
        breaker.succeeded(permit)
    return ok


def _found_nothing(job: FindJob | ReadJob) -> FindDone | ReadDone:
    if isinstance(job, FindJob):
        return FindDone(job.ticket, 0)
    return ReadDone(job.ticket, job.batch, (False,) * len(job.keys))


def _wrote_nothing(job: WriteJob) -> WriteDone:
    return WriteDone(job.ticket, (False,) * len(job.keys), job.batch)
