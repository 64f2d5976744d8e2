"""A blocking client of stores, for servers whose memory a store process cannot share. Pages are copied through staging
pages, which the server and the store process share.

    write   the caller copies into staging pages | the process reads the staging pages | the staging pages are free
    read    the process writes staging pages | the caller copies out of the staging pages | the staging pages are free

The store process never accesses the server's memory, and no copy runs after a call has returned. This module starts no
thread. If several threads wait, one of them receives the answers of the process for all.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import takewhile
from typing import ParamSpec, TypeVar

from hicache.storage import PageBuffer
from hicache.storage.process.frames import Outcome
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
from hicache.storage.process.shared_memory import new_memory
from hicache.stores.disk_and_remote import Stores
from hicache.tiers import Store

_POLL_S = 0.25  # time between two checks while the process sends nothing
_JOB_BYTES = 8 << 20  # maximum bytes of one job, which has at least one page
_WRITE_BYTES = 128 << 20  # bytes of staging pages for writes, which are at least two pages
_MAX_PAGES = 4096  # maximum staging pages for reads, and for writes

J = TypeVar("J", bound=Job)
P = ParamSpec("P")
T = TypeVar("T")


class StagingPages:
    """`num_pages` staging pages of up to `page_bytes` each, in memory shared with the processes of `stores`. Staging
    pages that were never used take no memory. Only one thread at a time may call the methods."""

    def __init__(self, stores: Stores, num_pages: int, page_bytes: int) -> None:
        self._descriptor, memory = new_memory("hicache-staging", num_pages * page_bytes)
        stores.share(self._descriptor, memory)
        self.num_pages = num_pages
        self._free = list(memory.reshape(num_pages, page_bytes))

    def take(self, num_pages: int) -> list[PageBuffer] | None:
        """Take `num_pages` free pages. Returns None if fewer pages are free."""
        return [self._free.pop() for _ in range(num_pages)] if num_pages <= len(self._free) else None

    def give_back(self, pages: Sequence[PageBuffer]) -> None:
        self._free += pages

    def close(self) -> None:
        """Close the descriptor of the memory. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _JobState(Enum):
    IN_FLIGHT = auto()  # The store may access the pages. The caller waits for the answer.
    STALLED = auto()  # The store may still access the pages. The caller no longer waits.
    DONE = auto()  # The store does not access the pages: the job is not submitted, or refused, or answered.


@dataclass(eq=False)
class _StagedJob:
    """A job of a tier with its staging pages, each uint8 [page_bytes].

    `ok`: for each key, whether the job found, read, stored or removed the page. All items are False if the tier refused
    the job or did not answer in time. `is_abandoned`: the caller no longer needs the pages or the answer.
    """

    staging: StagingPages | None
    taken: list[PageBuffer]
    page_bytes: int = 0
    ok: list[bool] = field(default_factory=list)
    state: _JobState = _JobState.DONE
    is_abandoned: bool = False

    @property
    def pages(self) -> tuple[PageBuffer, ...]:
        return tuple(page[: self.page_bytes] for page in self.taken)


class WaitingTier:
    """Blocking calls on `stores`, from any thread. Only one `read` and one `write` run at a time.

    If a store does not answer within the I/O timeout of its tier, the remaining pages of the call count as missing or
    not stored. Until the breaker of the tier closes, all pages of later calls count as missing or not stored too.
    `page_bytes`: bytes of the largest pages.

    A job is begun, submitted, answered and released, in this order. Each step holds the lock. If a job is released
    before it is answered, its staging pages become free when the answer arrives, because the store may use the pages
    until then.
    """

    def __init__(self, stores: Stores, page_bytes: int) -> None:
        self.stores, self.tier = stores, stores.tier
        num_reads = max(stores.num_readers, 2 * stores.num_readers * _JOB_BYTES // page_bytes)
        num_writes = max(2, _WRITE_BYTES // page_bytes)
        self._for_reads = StagingPages(stores, min(_MAX_PAGES, num_reads), page_bytes)
        self._for_writes = StagingPages(stores, min(_MAX_PAGES, num_writes), page_bytes)
        self._tickets = itertools.count()
        self._in_flight: dict[int, _StagedJob] = {}
        self._changed = threading.Condition()
        self._is_watched = False  # a thread waits at the socket and receives the answers for all threads
        self._reading = threading.Lock()
        self._writing = threading.Lock()

    def find(self, keys: Sequence[bytes], answer_s: float = math.inf) -> list[bool]:
        """Return, for each key, whether a store has the page. The remote store has `answer_s` seconds to answer."""
        return self._wait(self._do(self._submit_find, keys, answer_s)) if keys else []

    def stores_of(self, keys: Sequence[bytes]) -> list[Store]:
        """Return the store from which each page is read, according to the last `find` of its key."""
        return self._do(lambda: [self.stores.store_of(key) for key in keys])

    def read(
        self,
        keys: Sequence[bytes],
        page_bytes: int,
        receive: Callable[[int, PageBuffer], None],
        wait_s: float = math.inf,
    ) -> int:
        """Read pages of `page_bytes`. Returns the number of pages read before the first missing page.

        `receive(i, page)` is called with page i, in order. The memory of `page` is reused after `receive` returns. An
        exception in `receive` ends the call. `wait_s`: maximum wait for the next page; after this time the page counts
        as missing.
        """
        staging, cancelled = self._for_reads, threading.Event()
        share = -(-len(keys) // (2 * self.stores.num_readers))  # so that even a few pages are divided among all readers
        job_pages = max(1, min(share, _JOB_BYTES // page_bytes, staging.num_pages // 2))
        in_flight, num_read, num_requested = deque[_StagedJob](), 0, 0
        with self._reading:
            try:
                while num_read < len(keys):
                    while num_requested < len(keys):
                        end = self._do(self.stores.end_of_part, keys, num_requested, job_pages)
                        part = keys[num_requested:end]
                        job = self._do(self._begin, staging, len(part), page_bytes)
                        if job is None:
                            break
                        in_flight.append(job)
                        self._do(self._submit_read, job, part, cancelled)
                        num_requested += len(part)
                    if not in_flight:
                        break  # all staging pages belong to jobs that are late
                    job = in_flight[0]
                    num_valid = sum(1 for _ in takewhile(bool, self._wait(job, wait_s)))
                    for page in job.pages[:num_valid]:
                        receive(num_read, page)
                        num_read += 1
                    if num_valid < len(job.taken):
                        break
                    self._do(self._release, in_flight.popleft())
            finally:
                cancelled.set()
                self._release_all(in_flight)
        self.used(keys[:num_read])
        return num_read

    def write(
        self,
        keys: Sequence[bytes],
        page_bytes: int,
        fill: Callable[[int, PageBuffer], None],
        *,
        is_costly: bool = False,
    ) -> list[bool]:
        """Write pages of `page_bytes`. Returns for each key whether its page is stored. After a page that was not
        stored, no further page is written. `fill(i, page)` is called in order, and writes page i into `page`. An
        exception in `fill` ends the call. `is_costly`: see `WriteJob`."""
        staging, writes = self._for_writes, self.tier.writes
        job_pages = max(1, min(_JOB_BYTES // page_bytes, staging.num_pages // 2))
        in_flight, stored, num_filled = deque[_StagedJob](), list[bool](), 0
        with self._writing:
            try:
                while len(stored) < len(keys) and all(stored):
                    part = keys[num_filled : num_filled + job_pages]
                    is_needed = part and not self._do(writes.refuses)
                    job = self._do(self._begin, staging, len(part), page_bytes) if is_needed else None
                    if job is not None:
                        in_flight.append(job)
                        for i, page in enumerate(job.pages, num_filled):
                            fill(i, page)
                        self._do(self._submit_write, job, part, is_costly)
                        num_filled += len(part)
                    elif in_flight:
                        stored += self._wait(in_flight[0])
                        self._do(self._release, in_flight.popleft())
                    else:
                        break
            finally:
                self._release_all(in_flight)
        return stored + [False] * (len(keys) - len(stored))

    @property
    def note(self) -> bytes:
        return self.tier.note

    def keep(self, note: bytes) -> None:
        self._do(self.tier.keep, note)

    def clear(self) -> bool:
        """Remove all pages. Returns False if the removal fails. Also returns False if the removal takes longer than the
        I/O timeout; the store then continues to remove pages."""
        return self._wait(self._do(self._submit_remove, None)) == [True]

    def used(self, keys: Sequence[bytes]) -> None:
        self._do(self.stores.used, keys)

    def close(self) -> bool:
        return self._do(self._close)

    def _do(self, do: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Take the lock, process received answers unless another thread receives them now, and call `do`."""
        with self._changed:
            if not self._is_watched:
                self._poll()
            return do(*arguments, **named)

    def _wait(self, job: _StagedJob, wait_s: float = math.inf) -> list[bool]:
        """Wait for the answer to a submitted job. Returns the `ok` of the job, which is all False if no answer arrives
        within `wait_s`."""
        until_s = self.tier.clock() + wait_s
        while True:
            with self._changed:
                while self._is_watched and job.state is _JobState.IN_FLIGHT and self.tier.clock() <= until_s:
                    self._changed.wait(_POLL_S)
                left_s = until_s - self.tier.clock()
                if job.state is not _JobState.IN_FLIGHT or left_s < 0:
                    return job.ok
                self._is_watched = True
            try:
                self.stores.wait(min(_POLL_S, left_s))
            finally:
                with self._changed:
                    self._is_watched = False
                    self._changed.notify_all()
                    self._poll()

    def _release_all(self, jobs: Iterable[_StagedJob]) -> None:
        for job in jobs:
            self._do(self._release, job)

    # Methods whose caller holds the lock

    def _begin(self, staging: StagingPages, num_pages: int, page_bytes: int) -> _StagedJob | None:
        """Return a new job with `num_pages` pages of `staging`; None if fewer pages are free."""
        taken = staging.take(num_pages)
        return None if taken is None else _StagedJob(staging, taken, page_bytes)

    def _submit_find(self, keys: Sequence[bytes], answer_s: float) -> _StagedJob:
        job = FindJob(next(self._tickets), (), others=tuple(keys))
        return self._submit(_StagedJob(None, []), lambda job: self.stores.find(job, answer_s), job, len(keys))

    def _submit_read(self, staged: _StagedJob, keys: Sequence[bytes], cancelled: threading.Event) -> None:
        job = ReadJob(next(self._tickets), 0, tuple(keys), staged.pages, cancelled)
        self._submit(staged, self.stores.read, job, len(keys))

    def _submit_write(self, staged: _StagedJob, keys: Sequence[bytes], is_costly: bool) -> None:
        job = WriteJob(next(self._tickets), tuple(keys), staged.pages, is_costly=is_costly)
        self._submit(staged, self.tier.writes.submit, job, len(keys))

    def _submit_remove(self, keys: Sequence[bytes] | None) -> _StagedJob:
        """Submit the removal of `keys`. If `keys` is None, the job removes all pages and has one result for all of
        them."""
        job = RemoveJob(next(self._tickets), None if keys is None else tuple(keys))
        return self._submit(_StagedJob(None, []), self.tier.writes.submit, job, 1 if keys is None else len(keys))

    def _submit(self, staged: _StagedJob, submit: Callable[[J], bool], job: J, num_keys: int) -> _StagedJob:
        staged.ok = [False] * num_keys
        if submit(job):
            staged.state = _JobState.IN_FLIGHT
            self._in_flight[job.ticket] = staged
        return staged

    def _poll(self) -> None:
        """Process the received answers of the tier. Never blocks."""
        for outcome in (*(done for _, done in self.stores.poll()), *self.tier.writes.poll()):
            self._take(outcome)

    def _take(self, outcome: Outcome) -> None:
        job = self._in_flight[outcome.ticket]
        if isinstance(outcome, Stalled):
            job.state = _JobState.STALLED
            return
        is_late = job.state is _JobState.STALLED
        del self._in_flight[outcome.ticket]
        job.state = _JobState.DONE
        if job.is_abandoned:
            self._release(job)
        if is_late:
            return
        if isinstance(outcome, ReadDone | WriteDone):
            job.ok = list(outcome.ok)
        elif isinstance(outcome, FindDone) and outcome.answered:
            job.ok = list(outcome.others)

    def _release(self, job: _StagedJob) -> None:
        """Record that the caller needs neither the pages of a job nor its answer. Free the pages unless the store may
        still use them."""
        job.is_abandoned = True
        if job.state is _JobState.DONE and job.staging is not None:
            job.staging.give_back(job.taken)

    def _close(self) -> bool:
        closed = self.stores.close()
        if closed:
            self._for_reads.close()
            self._for_writes.close()
        return closed
