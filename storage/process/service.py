"""The threads of one store: one writes, several read, one more looks up; for all clients of the store.

The serving thread puts frozen jobs on bounded queues; the thread that does a job hands its outcome to the job's
`reply`. Finds go before reads, and reads that a request waits for before others. A find waits for no read: readers
are busy for tenths of a second, and a server that asks what there is delays a prompt meanwhile. Writes that wait at the
same time are put together. Whatever a store raises becomes a miss or a failed write. A store that fails or stalls is
not used for a while (see `health`).
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeAlias

from hicache.storage.base import PageStore, StoreError, StoreStats
from hicache.storage.lmdb_store import LmdbPageStore
from hicache.storage.maintenance import evict
from hicache.storage.process.health import Breaker, BreakerToken, Watchdog
from hicache.storage.process.io_queue import IoQueue, Queued
from hicache.storage.process.jobs import (
    FindDone,
    FindJob,
    ReadClass,
    ReadDone,
    ReadJob,
    RemoveJob,
    WriteDone,
    WriteJob,
)
from hicache.storage.process.settings import ServiceSettings

log = logging.getLogger(__name__)

_GIVES_WAY_S, _LOOK_S = 0.1, 0.002  # how long a write waits for reads, and between two looks at them
_LAST_FIND = ReadClass.BACKGROUND_FIND
_IDLE_S = 10.0  # without a write, after which it is looked whether other stores need space
_GROUP_BYTES = 256 << 20  # of writes put together: several commits, each compressed during the previous one
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # another attempt would fail as well


class _Fault(NamedTuple):
    why: str
    lasting: bool = False


_Read: TypeAlias = Queued[FindJob | ReadJob, FindDone | ReadDone]
_Write: TypeAlias = Queued[WriteJob | RemoveJob, WriteDone]


class StoreService:
    """Owns the threads of a store. The serving thread calls every method but `close`, and none waits for the medium:
    only the worker threads do I/O.

    `owns_store`: `close` closes the store too; else it syncs it, and the store stays open for its owner. `clock`:
    seconds, those of the jobs' deadlines. `removed`: where the store, in the writer's calls, notes the keys of pages
    that it loses; None: nobody asks.
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
        self._stats = StoreStats()
        self._stats_fail = False
        queue_jobs, limits, name = settings.queue_jobs, settings.limits, settings.name
        self.reads: IoQueue[FindJob | ReadJob, FindDone | ReadDone]
        self.reads = IoQueue("reads", queue_jobs, unserved_read, limits, clock, name)
        self.writes: IoQueue[WriteJob | RemoveJob, WriteDone]
        self.writes = IoQueue("writes", queue_jobs, unserved_write, limits, clock, name)
        try:
            self.reads.start(settings.readers, self._read_loop)
            self.reads.start(1, self._find_loop, _LAST_FIND)
            self.writes.start(1, self._write_loop)
        except BaseException:  # no thread is left on the machine
            self.writes.stop()
            self.reads.stop()
            raise

    def used(self, keys: Sequence[bytes]) -> None:
        """A request used these pages, in the order of its prompt, whichever tier served them."""
        try:
            self.store.touch(keys)
        except Exception:  # the order of eviction suffers, and nothing else
            if not self.failed_touches:
                log.exception(
                    "the store of the %s tier was not told what is used; further failures are counted",
                    self._settings.name,
                )
            self.failed_touches += 1

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return self.store.page_sizes

    def stats(self) -> StoreStats:
        """Of the store; those before, where it raises."""
        try:
            stats = self.store.stats()
            tuple(map(int, dataclasses.astuple(stats)))  # which raises for what is no number
            self._stats = stats
            self._stats_fail = False
        except Exception:
            if not self._stats_fail:
                log.exception("the store of the %s tier does not count; its last numbers are kept", self._settings.name)
            self._stats_fail = True
        return self._stats

    @property
    def note(self) -> bytes:
        """What clients keep with the store; b"" where it keeps nothing."""
        return self.store.note if isinstance(self.store, LmdbPageStore) else b""

    @note.setter
    def note(self, note: bytes) -> None:
        if isinstance(self.store, LmdbPageStore):
            self.store.note = note

    @property
    def is_busy(self) -> bool:
        """Whether a job waits or is under way."""
        return self.reads.is_busy or self.writes.is_busy

    def look(self) -> None:
        """Announce stalled threads. Never blocks."""
        self.reads.look()
        self.writes.look()

    def numbers(self) -> dict[str, tuple[float, ...]]:
        """Of both queues, for the shared status."""
        return {"reads": self.reads.numbers(), "writes": self.writes.numbers()}

    def close(self) -> None:
        """Finish what is queued, end the threads, close or sync the store; waits for a stalled medium. Not to be called
        on the serving thread. Raises what closing the store raises."""
        if self._owns_store and isinstance(self.store, LmdbPageStore):
            self.store.announce_close()
        self.writes.stop()
        self.reads.stop()
        if self._owns_store:
            self.store.close()
        else:
            self.store.sync()

    # On the threads

    def _read_loop(self, watchdog: Watchdog[_Read]) -> None:
        """A thread that waits refers to no job: its pages keep the memory of an engine that has left."""
        while self._do_read(watchdog):
            continue

    def _find_loop(self, watchdog: Watchdog[_Read]) -> None:
        while self._do_read(watchdog, _LAST_FIND):
            continue

    def _do_read(self, watchdog: Watchdog[_Read], last_class: float = math.inf) -> bool:
        """Do the next read up to a class; False where none comes any more."""
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
                answer = self._find(job, token) if isinstance(job, FindJob) else self._read(job, token)
            except Exception:  # the thread is for the jobs of others too
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
        """Do the writes that wait; False where none come any more."""
        writes = self.writes
        if (first := writes.take(_IDLE_S)) is None:
            if not writes.is_stopped:
                self._keep_budget(watchdog)
            return not writes.is_stopped or len(writes) > 0
        if self._settings.gives_way:
            self._give_way()
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
        """Other stores may need what this one, which writes nothing now, has beyond its share."""
        token = self.writes.breaker.admit(can_probe=False)
        if token is not None and isinstance(self.store, LmdbPageStore):
            watchdog.begin([], token)
            try:
                self.store.keep_budget()
            except Exception:
                log.exception("the budget of the %s tier is not kept", self._settings.name)
            watchdog.end()

    def _give_way(self) -> None:
        """Wait while reads wait, for which requests do; not for long, so that writes come to an end too."""
        until_s = time.monotonic() + _GIVES_WAY_S
        while len(self.reads) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)

    def _is_void(self, job: ReadJob) -> bool:
        """Whether the pages are no longer wanted."""
        return job.cancelled.is_set() or self.clock() >= job.deadline_s

    def _find(self, job: FindJob, token: BreakerToken) -> FindDone:
        keys = (*job.keys, *job.others)
        held, answered = self._ask_to_read(lambda: _one_each(self.store.contains(keys), keys), token, proves=False)
        pages, others = held[: len(job.keys)], held[len(job.keys) :]
        num_pages = next((i for i, present in enumerate(pages) if not present), len(pages))
        return FindDone(job.ticket, num_pages, answered, tuple(others), job.batch)

    def _read(self, job: ReadJob, token: BreakerToken) -> ReadDone:
        """A part at a time, as long as the rest is wanted; pages behind a gap would be useless."""
        ok: list[bool] = []
        begin_s, part_pages = self.clock(), 1
        if job.pages:
            part_pages = max(1, self._settings.part_bytes // job.pages[0].nbytes)
        while len(ok) < len(job.keys) and all(ok) and not (ok and self._is_void(job)):
            part = slice(len(ok), len(ok) + part_pages)
            got, _ = self._ask_to_read(partial(self._get, job, part), token, job.deadline_s)
            ok += got or [False] * len(job.keys[part])
        missing = [False] * (len(job.keys) - len(ok))
        return ReadDone(job.ticket, job.batch, tuple(ok + missing), asked=len(ok), seconds=self.clock() - begin_s)

    def _get(self, job: ReadJob, part: slice) -> list[bool]:
        until_s = time.monotonic() + job.deadline_s - self.clock()
        return _one_each(self.store.get_into(job.keys[part], job.pages[part], deadline_s=until_s), job.keys[part])

    def _change(self, jobs: list[WriteJob | RemoveJob], token: BreakerToken) -> list[WriteDone]:
        answers: list[WriteDone] = []
        for kind, run in groupby(jobs, type):
            if kind is WriteJob:
                answers += self._write([job for job in run if isinstance(job, WriteJob)], token)
            else:
                answers += [self._remove(job, token) for job in run if isinstance(job, RemoveJob)]
        return answers

    def _remove(self, job: RemoveJob, token: BreakerToken) -> WriteDone:
        keys, store = job.keys, self.store

        def remove() -> list[bool]:
            self._require_writable(token)
            if keys is None:
                return [_emptied(store)]
            held = store.contains(keys)
            store.delete(keys)
            return [was and not still for was, still in zip(held, store.contains(keys), strict=True)]

        gone = self._ask_to_write(remove, token)
        return WriteDone(job.ticket, tuple(gone), job.batch) if gone else unserved_write(job)

    def _require_writable(self, token: BreakerToken) -> None:
        if token.is_probe and not self.store.reopen():
            raise StoreError("the store still takes no writes")

    def _write(self, jobs: list[WriteJob], token: BreakerToken) -> list[WriteDone]:
        """All jobs in one `put`; each answer tells of the job's own pages."""
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
            start = end
        return answers

    def _ask_to_read(
        self, call: Callable[[], list[bool]], token: BreakerToken, until_s: float = math.inf, *, proves: bool = True
    ) -> tuple[list[bool], bool]:
        """The answer of a call, empty where it raised, and whether it is one. A store that cannot read answers with
        misses; its count of read errors in this thread tells them from pages that it does not hold. What brings pages
        until `until_s` is slow at worst."""
        ok, fault = _answer(
            call, self.store.thread_read_errors, lambda fails: _Fault("the store cannot be read") if fails else None
        )
        if any(ok) and self.clock() >= until_s:
            fault = None
        _tell(self.reads.breaker, token, fault, proves=proves)
        return ok, fault is None

    def _ask_to_write(self, call: Callable[[], list[bool]], token: BreakerToken) -> list[bool]:
        """The answer of a call, empty where it raised. The count of write errors tells a store that fails from one that
        is full."""

        def fault_of(fails: bool) -> _Fault | None:
            if self.stats().read_only:
                return _Fault("the store is read-only; free space on its disk", lasting=True)
            return _Fault("the store did not take pages") if fails else None

        ok, fault = _answer(call, lambda: self.stats().write_errors, fault_of)
        _tell(self.writes.breaker, token, fault)
        return ok


def _answer(
    call: Callable[[], list[bool]], num_errors: Callable[[], int], fault_of: Callable[[bool], _Fault | None]
) -> tuple[list[bool], _Fault | None]:
    """What a call of the store answers, empty where it raised, and what is wrong with that. `fault_of`: where it lacks
    something, by whether the store has counted an error."""
    try:
        before = num_errors()
        ok = call()
        return ok, None if all(ok) else fault_of(num_errors() > before)
    except (StoreError, OSError) as error:
        return [], _Fault(str(error), lasting=isinstance(error, StoreError) or error.errno in _LASTING)
    except Exception as error:  # whatever it is, the job must be answered
        log.exception("a store raised an unexpected error")
        return [], _Fault(repr(error))


def _tell(breaker: Breaker, token: BreakerToken, fault: _Fault | None, *, proves: bool = True) -> None:
    """`proves`: success means that the store works."""
    if fault is not None:
        breaker.failed(token, fault.why, at_once=fault.lasting)
    elif proves:
        breaker.succeeded(token)


def _one_each(answers: Iterable[object], asked: Sequence[object]) -> list[bool]:
    """What a store answered. StoreError unless that is one answer for each that it was asked about."""
    found = [bool(answer) for answer in answers]
    if len(found) != len(asked):
        raise StoreError(f"a store was asked about {len(asked)} pages, and gave {len(found)} answers")
    return found


def _emptied(store: PageStore) -> bool:
    """Remove all pages; whether that is done. False for a store that cannot."""
    if not isinstance(store, LmdbPageStore):
        return False
    evict(store, 0)
    return store.stats().entries == 0


def unserved_read(job: FindJob | ReadJob) -> FindDone | ReadDone:
    if isinstance(job, FindJob):
        return FindDone(job.ticket, 0, answered=False, batch=job.batch)
    return ReadDone(job.ticket, job.batch, (False,) * len(job.keys))


def unserved_write(job: WriteJob | RemoveJob) -> WriteDone:
    return WriteDone(job.ticket, (False,) * (1 if job.keys is None else len(job.keys)), job.batch)
