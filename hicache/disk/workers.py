"""The threads between host pages and the page store: one writes, several read.

The scheduler thread puts frozen jobs on bounded queues and takes frozen outcomes; nothing else crosses. A full queue
refuses the job. Reads that a request waits for go before background reads, finds before reads; writes that wait at the
same time are put together. Whatever a store raises becomes a miss or a failed write. A store that fails or stalls is
not used for a while (see `health`), and serving goes on without it.
"""

from __future__ import annotations

import errno
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from hicache.disk.health import LIMITS, Breaker, BreakerToken, Limits, Watchdog
from hicache.disk.io_queue import IoQueue, Outcomes, Queued
from hicache.disk.jobs import FindDone, FindJob, ReadDone, ReadJob, WriteDone, WriteJob
from hicache.metrics import Metrics, MetricType
from hicache.owner import OwnerProcess
from hicache.storage.base import PageStore, StoreError

log = logging.getLogger(__name__)

_JOB_PAGES, _PART_PAGES = 8, 2
_GIVES_WAY_S, _LOOK_S = 0.1, 0.002  # how long a write waits for reads, and between two looks at them
_GROUP_BYTES = 256 << 20  # of writes put together: several commits, each compressed during the previous one
_LOOKUP = -1  # the ticket of a find that the scheduler thread waits for
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # another attempt would fail as well


class _Fault(NamedTuple):
    why: str
    lasting: bool


_TIER_METRICS: dict[str, tuple[MetricType, str]] = {
    "failed_touches": ("counter", "uses that the store was not told of"),
    "stored_pages": ("gauge", "pages in the store: of tokens, windows and states"),
    "live_bytes": ("gauge", "their bytes as stored"),
    "raw_bytes": ("gauge", "their bytes before compression"),
    "file_bytes": ("gauge", "disk space of the store's files"),
    "budget_bytes": ("gauge", "what the files may take"),
    "used_ratio": ("gauge", "file_bytes over budget_bytes"),
    "hit_pages": ("counter", "pages that the store was asked for and gave back verified"),
    "missed_pages": ("counter", "pages that the store was asked for and did not hold"),
    "put_pages": ("counter", "pages written to the store"),
    "put_raw_bytes": ("counter", "their bytes before compression"),
    "put_stored_bytes": ("counter", "their bytes as stored"),
    "evicted_pages": ("counter", "pages evicted from the store to keep its budget"),
    "corrupt_pages": ("counter", "pages that did not verify and were deleted"),
    "read_errors": ("counter", "reads that the medium failed"),
    "write_errors": ("counter", "writes that the medium failed"),
    "read_only_flag": ("gauge", "1 while the store takes no pages, after a write failed"),
}

_Judge: TypeAlias = Callable[[list[bool]], "_Fault | None"]
_Read: TypeAlias = Queued[FindJob | ReadJob, FindDone | ReadDone]
_Write: TypeAlias = Queued[WriteJob, WriteDone]


class _Closing:
    """Closes a store, or syncs it, on a separate thread, so that the caller can limit its wait for a medium that
    stalls."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close_store = close
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
            self._close_store()
        except Exception as error:
            log.exception("the store could not be closed")
            self._error = error


class DiskTier:
    """Owns the threads between host pages and a store. Every method is called by the scheduler thread, and none waits
    for the medium longer than its argument says: only the worker threads do I/O.

    `reads` and `writes` take jobs and return their outcomes. `owns_store`: `close` closes the store too; else it syncs
    it, and the store stays open for its owner. `full_bytes`: waiting writes of so many bytes count as a full queue.
    `clock`: seconds, those of the jobs' deadlines. `removed`: where the store, in the writer's calls, notes the keys of
    pages that it loses; None: nobody asks. `name`: of the tier, in metrics, logs and threads. `job_pages`: pages of
    one job that reads a prefix. `part_pages`: of one call to the store, between two looks of a reader at whether it
    should go on. `gives_way`: writes wait while reads do.
    """

    def __init__(
        self,
        store: PageStore,
        *,
        readers: int,
        queue_jobs: int,
        owns_store: bool = True,
        full_bytes: int = 1 << 40,
        limits: Limits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
        removed: list[bytes] | None = None,
        name: str = "disk",
        job_pages: int = _JOB_PAGES,
        part_pages: int = _PART_PAGES,
        gives_way: bool = False,
    ) -> None:
        self.name, self._part_pages, self._gives_way = name, part_pages, gives_way
        self.num_readers, self.job_pages = readers, job_pages
        self._removed = removed if removed is not None else []
        self.store, self._owns_store = store, owns_store
        self._full_bytes, self._limits, self.clock = full_bytes, limits, clock
        self._failed_touches = 0
        self._late_lookup: Outcomes[FindJob | ReadJob, FindDone | ReadDone] | None = None
        self._closing: _Closing | None = None
        self._owner = OwnerProcess(f"the {name} tier")
        self.reads = IoQueue[FindJob | ReadJob, FindDone | ReadDone](
            "reads", queue_jobs, _unserved_read, limits, clock, name
        )
        self.writes = IoQueue[WriteJob, WriteDone]("writes", queue_jobs, _unserved_write, limits, clock, name)
        self.reads.add_threads(readers, self._read_loop)
        self.writes.add_threads(1, self._write_loop)

    def register(self, metrics: Metrics) -> None:
        """Enter what the tier and its store count."""
        self.reads.register(metrics)
        self.writes.register(metrics)
        described = {f"{self.name}.{metric}": about for metric, about in _TIER_METRICS.items()}
        families = {f"{self.name}.used_ratio": ("tier_used_ratio", {"tier": self.name})}
        metrics.read_from(described, self._numbers, families)

    def _numbers(self) -> dict[str, float]:
        """Of `_TIER_METRICS`."""
        stats = self.store.stats()
        found = {
            "failed_touches": self._failed_touches,
            "stored_pages": stats.entries,
            "live_bytes": stats.live_bytes,
            "raw_bytes": stats.raw_bytes,
            "file_bytes": stats.file_bytes,
            "budget_bytes": stats.budget_bytes,
            "used_ratio": stats.file_bytes / max(1, stats.budget_bytes),
            "hit_pages": stats.hits,
            "missed_pages": stats.misses,
            "put_pages": stats.puts,
            "put_raw_bytes": stats.put_bytes_raw,
            "put_stored_bytes": stats.put_bytes_stored,
            "evicted_pages": stats.evicted,
            "corrupt_pages": stats.corrupt,
            "read_errors": stats.read_errors,
            "write_errors": stats.write_errors,
            "read_only_flag": stats.read_only,
        }
        return {f"{self.name}.{metric}": value for metric, value in found.items()}

    def start(self) -> None:
        self.reads.start()
        self.writes.start()

    def find(self, keys: Sequence[bytes], wait_s: float, others: Sequence[bytes] = ()) -> FindDone | None:
        """The answer to a `FindJob`. None when the store cannot tell within `wait_s` and the I/O timeout: the breaker
        is open, the readers are busy, or the medium stalls. Until such a call is answered, others do not wait."""
        if not (keys or others):
            return FindDone(_LOOKUP, 0)
        if self.reads.refuses() or (self._late_lookup is not None and self._late_lookup.empty()):
            return None
        self._late_lookup = outcomes = self.reads.submit_first(FindJob(_LOOKUP, tuple(keys), others=tuple(others)))
        if outcomes is None:
            return None
        try:
            _, answer = outcomes.get(timeout=min(wait_s, self._limits.io_timeout_s))
        except queue.Empty:
            return None
        self._late_lookup = None
        return answer if isinstance(answer, FindDone) and answer.answered else None

    def used(self, keys: Sequence[bytes]) -> None:
        """A request used these pages, in the order of its prompt, whichever tier served them."""
        try:
            self.store.touch(keys)
        except Exception:  # the order of eviction suffers, and nothing else
            if not self._failed_touches:
                log.exception("the %s tier was not told what is used; further failures are counted", self.name)
            self._failed_touches += 1

    def close(self, within_s: float | None = None) -> bool:
        """Finish what is queued, stop the threads, close or sync the store. Idempotent. In a fork it does nothing.

        Waits at most `within_s` (default: `close_s` of the limits) for the threads and for the store. False: a thread
        did not return. The store then stays open and keeps its path, and nobody else may use the pages of the thread's
        job, whose memory stays mapped; a later call tries again. Raises what closing the store raises.
        """
        if not self._owner.is_here:
            return True
        deadline_s = time.monotonic() + (self._limits.close_s if within_s is None else within_s)
        ended = [io_queue.stop(deadline_s) for io_queue in (self.writes, self.reads)]
        if not all(ended):
            log.warning(
                "the %s tier closes without its store: a thread is stalled in it; close it again later", self.name
            )
            return False
        if self._closing is None:
            self._closing = _Closing(self.store.close if self._owns_store else self.store.sync)
        try:
            if self._closing.ends_before(deadline_s):
                return True
        except BaseException:
            self._closing = None
            raise
        log.warning("the %s tier closes without its store, whose close() is stalled; close it again later", self.name)
        return False

    # On the threads

    def _read_loop(self, watchdog: Watchdog[_Read]) -> None:
        reads = self.reads
        while (item := reads.jobs.take()) is not None:
            job = item.job
            if isinstance(job, ReadJob) and self._is_void(job):
                reads.answer(item, _unserved_read(job))
                continue
            token = reads.breaker.admit(can_probe=isinstance(job, ReadJob))
            if token is None:
                reads.refuse(item)
                continue
            watchdog.begin([item], token)
            answer = self._find(job, token) if isinstance(job, FindJob) else self._read(job, token)
            watchdog.end()
            reads.answer(item, answer)

    def _write_loop(self, watchdog: Watchdog[_Write]) -> None:
        writes = self.writes
        while (first := writes.jobs.take()) is not None:
            if self._gives_way:
                self._give_way()
            items = [first, *writes.jobs.take_more(_GROUP_BYTES - first.num_bytes)]
            token = writes.breaker.admit()
            if token is None:
                for item in items:
                    writes.refuse(item)
                continue
            watchdog.begin(items, token)
            answers = self._write([item.job for item in items], token)
            watchdog.end()
            for item, answer in zip(items, answers, strict=True):
                writes.answer(item, answer)

    def _give_way(self) -> None:
        """Wait while reads wait, for which requests do; not for long, so that writes come to an end too."""
        until_s = time.monotonic() + _GIVES_WAY_S
        while len(self.reads.jobs) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)

    def _is_void(self, job: ReadJob) -> bool:
        """Whether the pages are no longer wanted."""
        return job.cancelled.is_set() or self.clock() >= job.deadline_s

    def _find(self, job: FindJob, token: BreakerToken) -> FindDone:
        keys = (*job.keys, *job.others)

        def contains() -> list[bool]:
            return _one_each(self.store.contains(keys), keys)

        held, answered = _ask(self.reads.breaker, token, contains, self._judge_read, proves=False)
        pages, others = held[: len(job.keys)], held[len(job.keys) :]
        num_pages = next((i for i, present in enumerate(pages) if not present), len(pages))
        return FindDone(job.ticket, num_pages, answered, tuple(others), job.batch)

    def _read(self, job: ReadJob, token: BreakerToken) -> ReadDone:
        """A part at a time, as long as the rest is wanted; pages behind a gap would be useless."""
        ok: list[bool] = []
        begin_s = self.clock()
        while len(ok) < len(job.keys) and all(ok) and not (ok and self._is_void(job)):
            part = slice(len(ok), len(ok) + self._part_pages)
            judge_read = partial(self._judge_read, job.deadline_s)
            got, _ = _ask(self.reads.breaker, token, partial(self._get, job, part), judge_read)
            ok += got or [False] * len(job.keys[part])
        missing = [False] * (len(job.keys) - len(ok))
        return ReadDone(job.ticket, job.batch, tuple(ok + missing), asked=len(ok), seconds=self.clock() - begin_s)

    def _get(self, job: ReadJob, part: slice) -> list[bool]:
        until_s = time.monotonic() + job.deadline_s - self.clock()
        ok = _one_each(self.store.get_into(job.keys[part], job.pages[part], deadline_s=until_s), job.keys[part])
        if job.landed is not None:
            for i, verified in enumerate(ok, part.start):
                if verified:
                    job.landed(i)
        return ok

    def _write(self, jobs: list[WriteJob], token: BreakerToken) -> list[WriteDone]:
        """All jobs in one `put`; each answer tells of the job's own pages."""
        items = [item for job in jobs for item in zip(job.keys, job.pages, strict=True)]
        lag = self.writes.jobs.fullness(self._full_bytes)

        def put() -> list[bool]:
            if token.is_probe and not self.store.reopen():
                raise StoreError("the store still takes no writes")
            return _one_each(self.store.put(items, lag=lag), items)

        begin_s = self.clock()
        stored = _ask(self.writes.breaker, token, put, self._judge_write)[0] or [False] * len(items)
        page_s = (self.clock() - begin_s) / max(1, len(items))
        answers, start = [], 0
        for job in jobs:
            end = start + len(job.keys)
            answers.append(
                WriteDone(
                    job.ticket,
                    tuple(stored[start:end]),
                    job.batch,
                    seconds=page_s * len(job.keys),
                    removed=tuple(self._removed),
                )
            )
            self._removed.clear()
            start = end
        return answers

    def _judge_read(self, until_s: float = math.inf) -> _Judge:
        """For this thread's next call. A store that cannot read answers with misses; its count of read errors in this
        thread tells them from pages that it does not hold. What brings pages until `until_s` is slow at worst."""
        before = self.store.thread_read_errors()

        def judge(ok: list[bool]) -> _Fault | None:
            is_fault = not all(ok) and self.store.thread_read_errors() > before
            is_fault &= not (any(ok) and self.clock() >= until_s)
            return _Fault("the store cannot be read", lasting=False) if is_fault else None

        return judge

    def _judge_write(self) -> _Judge:
        """For the next call. Its count of write errors tells a store that fails from one that is full."""
        before = self.store.stats().write_errors

        def judge(ok: list[bool]) -> _Fault | None:
            if all(ok):
                return None
            stats = self.store.stats()
            if stats.read_only:
                return _Fault("the store is read-only; free space on its disk", lasting=True)
            return _Fault("the store did not take pages", lasting=False) if stats.write_errors > before else None

        return judge


def _ask(
    breaker: Breaker,
    token: BreakerToken,
    call: Callable[[], list[bool]],
    judge_next: Callable[[], _Judge],
    *,
    proves: bool = True,
) -> tuple[list[bool], bool]:
    """The store's answer, empty where it raised, and whether it is one; the breaker is told. `proves`: success means
    that the store works."""
    try:
        judge = judge_next()
        ok = call()
        fault = judge(ok)
    except (StoreError, OSError) as error:
        lasting = isinstance(error, StoreError) or error.errno in _LASTING
        ok, fault = [], _Fault(str(error), lasting)
    except Exception as error:  # whatever it is, the job must be answered
        log.exception("a store raised an unexpected error")
        ok, fault = [], _Fault(repr(error), lasting=False)
    if fault is not None:
        breaker.failed(token, fault.why, at_once=fault.lasting)
    elif proves:
        breaker.succeeded(token)
    return ok, fault is None


def _one_each(answers: Iterable[object], asked: Sequence[object]) -> list[bool]:
    """What a store answered. StoreError unless that is one answer for each that it was asked about."""
    found = [bool(answer) for answer in answers]
    if len(found) != len(asked):
        raise StoreError(f"a store was asked about {len(asked)} pages, and gave {len(found)} answers")
    return found


def _unserved_read(job: FindJob | ReadJob) -> FindDone | ReadDone:
    if isinstance(job, FindJob):
        return FindDone(job.ticket, 0, answered=False, batch=job.batch)
    return ReadDone(job.ticket, job.batch, (False,) * len(job.keys))


def _unserved_write(job: WriteJob) -> WriteDone:
    return WriteDone(job.ticket, (False,) * len(job.keys), job.batch)
