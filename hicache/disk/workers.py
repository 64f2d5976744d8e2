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
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from hicache.disk.direction import Direction
from hicache.disk.health import LIMITS, Breaker, Limits, Permit, Watch
from hicache.disk.jobs import FindDone, FindJob, Hung, ReadDone, ReadJob, WriteDone, WriteJob, num_bytes
from hicache.metrics import Metrics
from hicache.storage.base import PageStore, StoreError

log = logging.getLogger(__name__)

_PART_PAGES = 2  # after so many a reader looks whether it should go on
_GROUP_BYTES = 256 << 20  # of writes that are put together: several commits, each packed during the one before
_LOOK = -1  # the ticket of a find that the scheduler thread waits for
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # trying again at once would tell nothing new


class _Fault(NamedTuple):
    why: str
    lasting: bool


_Judge: TypeAlias = Callable[[list[bool]], "_Fault | None"]


class _Closing:
    """The closing of a store, on a thread of its own: a medium that hangs is waited for as long as the caller likes."""

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._close, name="hicache-disk-close", daemon=True)
        self._thread.start()

    def ends_before(self, deadline_s: float) -> bool:
        """Whether it has ended by `deadline_s` of `time.monotonic`. Raises what the store raised."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _close(self) -> None:
        try:
            self._store.close()
        except Exception as error:
            log.exception("the store could not be closed")
            self._error = error


class DiskTier:
    """Owns the store and its threads. Every method belongs to the scheduler thread, and none waits for the medium
    longer than it is told to: the store is asked on the threads alone, but for what it knows in memory.

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
        self._write_errors = 0  # of the writer thread alone
        self._late_look: queue.SimpleQueue[FindDone | Hung] | None = None
        self._closing: _Closing | None = None
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

    def contains(self, keys: Sequence[bytes], wait_s: float) -> int | None:
        """Keys held from the first on without a gap. None where the store cannot tell, or not within `wait_s`: reads
        are stopped, its readers are busy, or its medium hangs. As long as one call is not answered, others do not wait.
        """
        if not keys:
            return 0
        if self._reads.refuses() or (self._late_look is not None and self._late_look.empty()):
            return None
        reply: queue.SimpleQueue[FindDone | Hung] = queue.SimpleQueue()
        if not self._reads.submit(FindJob(_LOOK, tuple(keys), reply=reply)):
            return None
        self._late_look = reply
        try:
            answer = reply.get(timeout=wait_s)
        except queue.Empty:
            return None
        self._late_look = None
        return answer.num_pages if isinstance(answer, FindDone) and answer.answered else None

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

    def close(self, within_s: float | None = None) -> bool:
        """Finish what is queued, stop the threads, close the store. What is closed already is left alone.

        Waits at most `within_s` (default: `close_s` of the limits) for threads that do not return, and for the store.
        False: one is left in the store, which stays open and keeps its path; the memory of the pages that the thread
        has stays mapped, for its job refers to it, and a later call tries again. Nothing else may use these pages until
        then. Raises what closing the store raises.
        """
        deadline_s = time.monotonic() + (self._limits.close_s if within_s is None else within_s)
        ended = [direction.stop(deadline_s) for direction in (self._writes, self._reads)]
        if not all(ended):
            log.warning("the disk tier closes without its store: a thread hangs in it; close it again later")
            return False
        if self._closing is None:
            self._closing = _Closing(self.store)
        try:
            if self._closing.ends_before(deadline_s):
                return True
        except BaseException:
            self._closing = None
            raise
        log.warning("the disk tier closes without its store, which hangs while it is closed; close it again later")
        return False

    # On the threads

    def _read_loop(self, watch: Watch[FindJob | ReadJob]) -> None:
        reads = self._reads
        while (job := reads.jobs.take()) is not None:
            if isinstance(job, ReadJob) and self._is_void(job):
                reads.answer(job, _found_nothing(job))
                continue
            permit = reads.breaker.admit(probes=isinstance(job, ReadJob))
            if permit is None:
                reads.refuse(job)
                continue
            watch.begin([job], permit)
            answer = self._find(job, permit) if isinstance(job, FindJob) else self._read(job, permit)
            watch.end()
            reads.answer(job, answer)

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
            for job, answer in zip(jobs, answers, strict=True):
                writes.answer(job, answer)

    def _is_void(self, job: ReadJob) -> bool:
        """Whether nobody wants the pages any more."""
        return job.cancelled.is_set() or self._clock() >= job.deadline_s

    def _find(self, job: FindJob, permit: Permit) -> FindDone:
        judge = self._judge_read()
        held = _ask(self._reads.breaker, permit, partial(self.store.contains, job.keys), judge, proves=False)
        num_pages = next((i for i, present in enumerate(held) if not present), len(held))
        return FindDone(job.ticket, num_pages, answered=bool(held) and judge(held) is None)

    def _read(self, job: ReadJob, permit: Permit) -> ReadDone:
        """A part at a time, until nobody wants the rest; what is behind a gap is of no use."""
        ok: list[bool] = []
        while len(ok) < len(job.keys) and all(ok) and not (ok and self._is_void(job)):
            part = slice(len(ok), len(ok) + _PART_PAGES)
            call = partial(self.store.get_into, job.keys[part], job.pages[part])
            got = _ask(self._reads.breaker, permit, call, self._judge_read())
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

    def _judge_read(self) -> _Judge:
        """Of this thread's next call. A store that cannot read answers with misses: only its count of what it could not
        read for this thread tells them from pages it does not have."""
        before = self.store.thread_read_errors()

        def judge(ok: list[bool]) -> _Fault | None:
            is_fault = not all(ok) and self.store.thread_read_errors() > before
            return _Fault("the medium cannot be read", lasting=False) if is_fault else None

        return judge

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
    judge: _Judge,
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
        return FindDone(job.ticket, 0, answered=False)
    return ReadDone(job.ticket, job.batch, (False,) * len(job.keys))


def _wrote_nothing(job: WriteJob) -> WriteDone:
    return WriteDone(job.ticket, (False,) * len(job.keys), job.batch)
