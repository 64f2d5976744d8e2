"""The threads of one store, which serve all clients of the store. One thread writes, several threads read, and one
thread only answers finds.

The serving thread puts frozen jobs on queues. The thread that runs a job passes the outcome to the job's `reply`. Finds
precede reads, and reads for which a request waits precede background reads. A find never waits for a read, because a
read takes tenths of a second, and a scheduler that waits for the find would delay a prompt. Writes that are queued at
the same time are merged into one `put`. Every error of a store becomes a miss or a failed write. A store that fails or
stalls is not used until the backoff is over (see `health`).
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol, TypeAlias

from hicache.storage.base import DiskPages, Leases, PageStore, StoreError, StoreStats
from hicache.storage.memory import Scratch
from hicache.storage.process.detached import DetachedRead
from hicache.storage.process.health import Breaker, BreakerToken, Watchdog
from hicache.storage.process.io_queue import IoQueue, Queued
from hicache.storage.process.jobs import (
    FindDone,
    FindJob,
    LeaseDone,
    LeaseJob,
    Question,
    QuestionDone,
    ReadClass,
    ReadDone,
    ReadJob,
    RemoveJob,
    ValueJob,
    WriteDone,
    WriteJob,
)
from hicache.storage.process.settings import ServiceSettings
from hicache.storage.process.shared_memory import BACKUP_NUMBERS

log = logging.getLogger(__name__)

# Names of the threads that open or close a store.
OPENS = "hicache-store-open"
CLOSES_DISK, CLOSES_REMOTE = "hicache-store-close", "hicache-remote-close"

# maximum time for which a write waits until no read is queued, and interval between two checks
_MAX_YIELD_S, _CHECK_INTERVAL_S = 0.1, 0.002
_LAST_FIND = ReadClass.BACKGROUND_FIND
_IDLE_S = 10.0  # time without writes after which the writer checks whether other stores need disk space
_GROUP_BYTES = 256 << 20  # maximum bytes of merged writes: several commits, each compressed during the previous one
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # errors after which another attempt would fail as well


class _Fault(NamedTuple):
    why: str
    lasting: bool = False


_Read: TypeAlias = Queued[Question, QuestionDone]
_Change: TypeAlias = WriteJob | RemoveJob | ValueJob
_Write: TypeAlias = Queued[_Change, WriteDone]
_MAX_FILL_BYTES = 256 << 20  # values from a remote store that wait for the writer


class Copies(Protocol):
    """The methods of `replicator.Replicator` that `StoreService` calls. A replicator copies pages of a store to a
    remote store."""

    @property
    def is_busy(self) -> bool: ...

    def wrote(self, keys: Sequence[bytes], page_bytes: int, *, is_costly: bool) -> None: ...

    def used(self, keys: Sequence[bytes]) -> None: ...

    def know(self, keys: Iterable[bytes]) -> None: ...

    def look(self) -> None: ...

    def numbers(self) -> tuple[float, ...]: ...

    def close(self) -> None: ...


class StoreService:
    """Owns the threads of a store. The serving thread calls all methods except `close`. The serving thread never waits
    for I/O; only the worker threads do I/O.

    `owns_store`: if True, `close` also closes the store. If `owns_store` is False, `close` syncs the store, and the
    store stays open for its owner. `clock`: returns seconds; the deadlines of jobs are times of this clock. `removed`:
    list to which the store appends the keys of pages that it removes during calls of the writer; None if no client
    needs these keys. `copies`: set once, before the first job, if pages are copied to a remote store. `has_remote`:
    whether clients can open this remote store.
    """

    def __init__(
        self,
        store: PageStore,
        settings: ServiceSettings,
        *,
        owns_store: bool = True,
        clock: Callable[[], float] = time.monotonic,
        removed: list[bytes] | None = None,
    ) -> None:
        self.store = store
        self._owns_store = owns_store
        self._settings = settings
        self.clock = clock
        self._removed = removed if removed is not None else []
        self.failed_touches = 0
        self.copies: Copies | None = None
        self.has_remote = False
        self._fill_lock = threading.Lock()
        self._fill_bytes = self._num_filled = self._num_unfilled = 0
        self._detached = dict[int, DetachedRead]()  # reads without an answer, by id
        self._scratch = Scratch()
        self._stats = StoreStats()
        self._stats_fail = False
        queue_jobs, limits, name = settings.queue_jobs, settings.limits, settings.name
        self.reads: IoQueue[Question, QuestionDone]
        self.reads = IoQueue("reads", queue_jobs, unserved_read, limits, clock, name)
        self.writes: IoQueue[_Change, WriteDone]
        self.writes = IoQueue("writes", queue_jobs, unserved_write, limits, clock, name)
        try:
            self.reads.start(settings.readers, self._read_loop)
            self.reads.start(1, self._find_loop, _LAST_FIND)
            self.writes.start(1, self._write_loop)
        except BaseException:  # raised if the system cannot start another thread
            self.writes.stop()
            self.reads.stop()
            raise

    def ask(self, job: Question, reply: Callable[[Any], None]) -> None:
        """Queue a find, a read or a lease of a client."""
        if not self._settings.detaches_reads or not isinstance(job, ReadJob):
            self.reads.submit(job, reply)
            return

        def answer(done: ReadDone) -> None:
            self._detached.pop(id(detached), None)
            reply(done)

        detached = DetachedRead.of(job, answer)
        self._detached[id(detached)] = detached
        self.reads.submit(detached, detached.reply)

    def drop_cancelled(self) -> None:
        """Answer detached reads that were cancelled."""
        for detached in tuple(self._detached.values()):
            detached.drop_if_cancelled()

    def used(self, keys: Sequence[bytes]) -> None:
        """Count pages as used by a request, in the order of its prompt; any tier may have served them."""
        if self.copies is not None:
            self.copies.used(keys)
        self._hint(partial(self.store.touch, keys))

    def keep_until(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """Evict these pages after all other pages until `deadline_s`, if the store is on a disk."""
        if (disk := self._disk_pages) is not None:
            self._hint(partial(disk.keep_until, keys, time.monotonic() + deadline_s - self.clock()))

    def _hint(self, give: Callable[[], None]) -> None:
        try:
            give()
        except Exception:  # only the eviction order suffers
            if not self.failed_touches:
                log.exception(
                    "the store of the %s tier could not record uses of pages; further failures are counted",
                    self._settings.name,
                )
            self.failed_touches += 1

    @property
    def _disk_pages(self) -> DiskPages | None:
        """The store, if it is on a disk of this machine."""
        return self.store if isinstance(self.store, DiskPages) else None

    @property
    def is_on_disk(self) -> bool:
        return self._disk_pages is not None

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return self.store.page_sizes

    def stats(self) -> StoreStats:
        """Return the statistics of the store; the previous ones if the store raises."""
        try:
            stats = self.store.stats()
            tuple(map(int, dataclasses.astuple(stats)))  # raises if a field is not a number
            self._stats = stats
            self._stats_fail = False
        except Exception:
            if not self._stats_fail:
                log.exception("the store of the %s tier does not count; its last numbers are kept", self._settings.name)
            self._stats_fail = True
        return self._stats

    @property
    def note(self) -> bytes:
        """Return the note, which are bytes that a client stored in the index; b"" if the store has no notes."""
        return b"" if (disk := self._disk_pages) is None else disk.note

    @note.setter
    def note(self, note: bytes) -> None:
        if (disk := self._disk_pages) is not None:
            disk.note = note

    @property
    def is_busy(self) -> bool:
        """Return whether a job or a copy is queued or running."""
        return self.reads.is_busy or self.writes.is_busy or (self.copies is not None and self.copies.is_busy)

    def look(self) -> None:
        """Announce stalled threads. Never blocks."""
        self.drop_cancelled()
        self.reads.look()
        self.writes.look()
        if self.copies is not None:
            self.copies.look()

    def numbers(self) -> dict[str, tuple[float, ...]]:
        """Return the numbers of both queues and of the copies, for the shared status."""
        copies = self.copies.numbers() if self.copies is not None else (0,) * (len(BACKUP_NUMBERS) - 2)
        backup = *copies, self._num_filled, self._num_unfilled
        return {"reads": self.reads.numbers(), "writes": self.writes.numbers(), "backup": backup}

    def fill(self, key: bytes, value: memoryview) -> None:
        """Queue a value that a read of the remote store returned, to be stored after the writes of clients. If the
        writer refuses writes, or too many values wait, the value is dropped and counted. Any thread may call this
        method. Does not block."""
        with self._fill_lock:
            if self.writes.refuses() or self._fill_bytes + len(value) > _MAX_FILL_BYTES:
                self._num_unfilled += 1
                return
            self._fill_bytes += len(value)
        if self.copies is not None:
            self.copies.know([key])
        self.writes.submit(ValueJob((key,), (value,)), partial(self._filled, len(value)))

    def _filled(self, num_bytes: int, outcome: object) -> None:
        if isinstance(outcome, WriteDone):
            with self._fill_lock:
                self._fill_bytes -= num_bytes
                self._num_filled += sum(outcome.ok)
                self._num_unfilled += outcome.ok.count(False)

    def close(self) -> None:
        """Finish the queued jobs, end the threads, and close or sync the store. Blocks while the disk stalls. Must not
        be called on the serving thread. Raises the error of closing the store."""
        if self._owns_store and (disk := self._disk_pages) is not None:
            disk.announce_close()
        if self.copies is not None:
            self.copies.close()
        self.writes.stop()
        self.reads.stop()
        if self._owns_store:
            self.store.close()
        else:
            self.store.sync()

    # Methods that run on the worker threads

    def _read_loop(self, watchdog: Watchdog[_Read]) -> None:
        """Run reads until the queue is stopped. A job is a local variable of `_do_read`, so that a waiting thread
        refers to no job: the pages of the job would keep the memory of a disconnected engine mapped."""
        while self._do_read(watchdog):
            continue

    def _find_loop(self, watchdog: Watchdog[_Read]) -> None:
        while self._do_read(watchdog, _LAST_FIND):
            continue

    def _do_read(self, watchdog: Watchdog[_Read], last_class: float = math.inf) -> bool:
        """Run the next find or read of a class up to `last_class`. Returns False if the queue is stopped and empty."""
        reads = self.reads
        if (item := reads.take(last_class=last_class)) is None:
            return False
        job = item.job
        if isinstance(job, ReadJob) and self._is_void(job):
            item.reply(unserved_read(job))
        elif token := reads.breaker.admit(can_probe=isinstance(job, ReadJob)):
            watchdog.begin([item], token)
            answer = unserved_read(job)
            try:
                answer = self._answer(job, token)
            except Exception:  # the thread must continue with the jobs of other clients
                log.exception("a read of the %s tier failed", self._settings.name)
            watchdog.end()
            item.reply(answer)
        else:
            reads.refuse(item)
        return True

    def _write_loop(self, watchdog: Watchdog[_Write]) -> None:
        while self._do_writes(watchdog):
            continue

    def _do_writes(self, watchdog: Watchdog[_Write]) -> bool:
        """Run the queued writes. Returns False if the queue is stopped and empty."""
        writes = self.writes
        if (first := writes.take(_IDLE_S)) is None:
            if not writes.is_stopped:
                self._keep_budget(watchdog)
            return not writes.is_stopped or len(writes) > 0
        if self._settings.yields_to_reads:
            self._yield_to_reads()
        items = [first, *writes.take_more(_GROUP_BYTES - first.num_bytes)]
        if token := writes.breaker.admit():
            watchdog.begin(items, token)
            answers = [unserved_write(item.job) for item in items]
            try:
                answers = self._change([item.job for item in items], token)
            except Exception:
                log.exception("writes of the %s tier failed", self._settings.name)
            watchdog.end()
            for item, answer in zip(items, answers, strict=True):
                item.reply(answer)
        else:
            for item in items:
                writes.refuse(item)
        return True

    def _keep_budget(self, watchdog: Watchdog[_Write]) -> None:
        """Evict pages until the store is within its share of the budget. `put` does this too, but an idle store has no
        `put`."""
        disk, token = self._disk_pages, self.writes.breaker.admit(can_probe=False)
        if token is not None and disk is not None:
            watchdog.begin([], token)
            try:
                disk.keep_budget()
            except Exception:
                log.exception("the budget of the %s tier is not kept", self._settings.name)
            watchdog.end()

    def _yield_to_reads(self) -> None:
        """Wait while reads are queued, because requests wait for reads. Wait at most `_MAX_YIELD_S`, so that writes
        progress too."""
        until_s = time.monotonic() + _MAX_YIELD_S
        while len(self.reads) and time.monotonic() < until_s:
            time.sleep(_CHECK_INTERVAL_S)

    def _is_void(self, job: ReadJob) -> bool:
        """Return whether the job was cancelled or its deadline has passed."""
        return job.cancelled.is_set() or self.clock() >= job.deadline_s

    def _answer(self, job: Question, token: BreakerToken) -> QuestionDone:
        if isinstance(job, LeaseJob):
            return self._lease(job, token)
        return self._find(job, token) if isinstance(job, FindJob) else self._read(job, token)

    def _lease(self, job: LeaseJob, token: BreakerToken) -> LeaseDone:
        leases, end_s = self.store, 0.0
        if not isinstance(leases, Leases):
            return LeaseDone(job.ticket, batch=job.batch)

        def ask() -> list[bool]:
            nonlocal end_s
            has_begun = bool(job.until_s) and leases.begin(job.key, job.until_s)
            end_s = job.until_s if has_begun else leases.who(job.key) or 0.0
            return [has_begun]

        begun, _ = self._ask_to_read(ask, token, proves=False)
        return LeaseDone(job.ticket, any(begun), end_s, job.batch)

    def _find(self, job: FindJob, token: BreakerToken) -> FindDone:
        keys = (*job.keys, *job.others)
        held, answered = self._ask_to_read(lambda: _one_each(self.store.contains(keys), keys), token, proves=False)
        pages, others = held[: len(job.keys)], held[len(job.keys) :]
        num_pages = next((i for i, present in enumerate(pages) if not present), len(pages))
        return FindDone(job.ticket, num_pages, answered, tuple(others), job.batch)

    def _read(self, job: ReadJob, token: BreakerToken) -> ReadDone:
        """Read pages in parts until the job is void or a page is missing, because pages after a missing page are
        useless."""
        ok: list[bool] = []
        begin_s, part_pages = self.clock(), 1
        if job.pages:
            part_pages = max(1, self._settings.part_bytes // job.pages[0].nbytes)
        while len(ok) < len(job.keys) and all(ok) and not (ok and self._is_void(job)):
            part = slice(len(ok), len(ok) + part_pages)
            got, _ = self._ask_to_read(partial(self._get, job, part), token, job.deadline_s)
            ok += got or [False] * len(job.keys[part])
        if self.copies is not None and any(ok):
            self.copies.used([key for key, hit in zip(job.keys, ok, strict=False) if hit])
        missing = [False] * (len(job.keys) - len(ok))
        return ReadDone(job.ticket, job.batch, tuple(ok + missing), asked=len(ok), seconds=self.clock() - begin_s)

    def _get(self, job: ReadJob, part: slice) -> list[bool]:
        until_s = time.monotonic() + job.deadline_s - self.clock()
        keys, pages = job.keys[part], job.pages[part]
        if not isinstance(job, DetachedRead):
            return _one_each(self.store.get_into(keys, pages, deadline_s=until_s), keys)
        page_bytes = pages[0].nbytes
        own = list(self._scratch.take_page(len(pages) * page_bytes).reshape(len(pages), page_bytes))
        return job.land(part, own, _one_each(self.store.get_into(keys, own, deadline_s=until_s), keys))

    def _change(self, jobs: list[_Change], token: BreakerToken) -> list[WriteDone]:
        answers: list[WriteDone] = []
        for kind, run in groupby(jobs, type):
            if kind is WriteJob:
                answers += self._write([job for job in run if isinstance(job, WriteJob)], token)
            elif kind is ValueJob:
                answers += self._put_values([job for job in run if isinstance(job, ValueJob)], token)
            else:
                answers += [self._remove(job, token) for job in run if isinstance(job, RemoveJob)]
        return answers

    def _remove(self, job: RemoveJob, token: BreakerToken) -> WriteDone:
        keys, store = job.keys, self.store

        def remove() -> list[bool]:
            self._require_writable(token)
            if keys is None:
                return [(disk := self._disk_pages) is not None and disk.evict_all()]
            held = store.contains(keys)
            store.delete(keys)
            return [was and not still for was, still in zip(held, store.contains(keys), strict=True)]

        removed_pages = self._ask_to_write(remove, token)
        return WriteDone(job.ticket, tuple(removed_pages), job.batch) if removed_pages else unserved_write(job)

    def _require_writable(self, token: BreakerToken) -> None:
        if token.is_probe and not self.store.reopen():
            raise StoreError("the store is still not writable")

    def _write(self, jobs: list[WriteJob], token: BreakerToken) -> list[WriteDone]:
        """Write the pages of all jobs in one `put`. Returns one answer for each job."""
        items = [item for job in jobs for item in zip(job.keys, job.pages, strict=True)]
        lag = self.writes.fullness(self._settings.full_bytes)

        def put() -> list[bool]:
            self._require_writable(token)
            return _one_each(self.store.put(items, lag=lag), items)

        begin_s, num_puts = self.clock(), self.store.stats().puts
        stored = self._ask_to_write(put, token) or [False] * len(items)
        num_puts_now = self.store.stats().puts
        num_new = num_puts_now - num_puts if num_puts_now else len(items)
        page_s = (self.clock() - begin_s) / max(1, len(items))
        answers, start = [], 0
        for job in jobs:
            end = start + len(job.keys)
            num_new_here = min(num_new, sum(stored[start:end]))
            num_new -= num_new_here
            answers.append(
                WriteDone(
                    job.ticket,
                    tuple(stored[start:end]),
                    job.batch,
                    seconds=page_s * len(job.keys),
                    removed=tuple(self._removed),
                    num_new=num_new_here,
                )
            )
            self._removed.clear()
            if self.copies is not None and len(job.pages):
                stored_keys = [key for key, ok in zip(job.keys, stored[start:end], strict=True) if ok]
                self.copies.wrote(stored_keys, job.pages[0].nbytes, is_costly=job.is_costly)
            start = end
        return answers

    def _put_values(self, jobs: list[ValueJob], token: BreakerToken) -> list[WriteDone]:
        """Store the values of all jobs in one call. Returns one answer for each job. If the store removes pages in this
        call, the next answer to a client's write has the keys of these pages."""
        items = [item for job in jobs for item in zip(job.keys, job.values, strict=True)]

        def put() -> list[bool]:
            self._require_writable(token)
            return _one_each(self.store.put_values(items), items)

        stored = iter(self._ask_to_write(put, token) or [False] * len(items))
        return [WriteDone(job.ticket, tuple(next(stored) for _ in job.keys), job.batch) for job in jobs]

    def _ask_to_read(
        self, call: Callable[[], list[bool]], token: BreakerToken, until_s: float = math.inf, *, proves: bool = True
    ) -> tuple[list[bool], bool]:
        """Call the store and report the outcome to the breaker. Returns the answers ([] if the store raised) and
        whether they are valid. A store that cannot read returns misses. If its count of read errors in this thread
        grows, the misses are failures and not absent pages. A call that ends after `until_s` with at least one hit was
        slow, but not at fault."""
        ok, fault = _answer(
            call, self.store.thread_read_errors, lambda fails: _Fault("the store cannot be read") if fails else None
        )
        if any(ok) and self.clock() >= until_s:
            fault = None
        _update_breaker(self.reads.breaker, token, fault, proves=proves)
        return ok, fault is None

    def _ask_to_write(self, call: Callable[[], list[bool]], token: BreakerToken) -> list[bool]:
        """Call the store and report the outcome to the breaker. Returns the answers, [] if the store raised. The count
        of write errors shows whether the store failed or is only full."""

        def fault_of(fails: bool) -> _Fault | None:
            if self.stats().read_only:
                return _Fault("the store is read-only; free space on its disk", lasting=True)
            return _Fault("the store did not store all pages") if fails else None

        ok, fault = _answer(call, lambda: self.stats().write_errors, fault_of)
        _update_breaker(self.writes.breaker, token, fault)
        return ok


def _answer(
    call: Callable[[], list[bool]], num_errors: Callable[[], int], fault_of: Callable[[bool], _Fault | None]
) -> tuple[list[bool], _Fault | None]:
    """Call the store. Returns the answers ([] if the store raised) and the fault. If an answer is False,
    `fault_of(has_errors)` returns the fault; `has_errors` says whether the store counted an error during the call."""
    try:
        before = num_errors()
        ok = call()
        return ok, None if all(ok) else fault_of(num_errors() > before)
    except (StoreError, OSError) as error:
        return [], _Fault(str(error), lasting=isinstance(error, StoreError) or error.errno in _LASTING)
    except Exception as error:  # the job must be answered after any error
        log.exception("a store raised an unexpected error")
        return [], _Fault(repr(error))


def _update_breaker(breaker: Breaker, token: BreakerToken, fault: _Fault | None, *, proves: bool = True) -> None:
    """Report the outcome of a call to the breaker. `proves`: whether a success of this call shows that the store
    works."""
    if fault is not None:
        breaker.failed(token, fault.why, at_once=fault.lasting)
    elif proves:
        breaker.succeeded(token)


def _one_each(answers: Iterable[object], asked: Sequence[object]) -> list[bool]:
    """Convert the answers of a store to bools. Raises StoreError unless there is one answer for each item of
    `asked`."""
    found = [bool(answer) for answer in answers]
    if len(found) != len(asked):
        raise StoreError(f"a store was asked about {len(asked)} pages, and gave {len(found)} answers")
    return found


def unserved_read(job: Question) -> QuestionDone:
    if isinstance(job, LeaseJob):
        return LeaseDone(job.ticket, batch=job.batch)
    if isinstance(job, FindJob):
        return FindDone(job.ticket, 0, answered=False, batch=job.batch)
    return ReadDone(job.ticket, job.batch, (False,) * len(job.keys))


def unserved_write(job: _Change) -> WriteDone:
    return WriteDone(job.ticket, (False,) * (1 if job.keys is None else len(job.keys)), job.batch)
