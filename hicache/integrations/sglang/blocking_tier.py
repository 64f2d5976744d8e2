"""The disk tier for callers that wait: SGLang's storage threads ask, and get an answer in bounded time.

The medium reads and writes memory of this module alone. To and from SGLang's it is copied: what is written by the
calling thread, what was read by the thread that read it, as long as the call waits for that thread. So whatever the
medium does, nothing reads or writes SGLang's memory after a call has returned.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from hicache.disk import DiskTier, FindDone, FindJob, ReadDone, ReadJob, Stalled, WriteDone, WriteJob
from hicache.disk.io_queue import D, IoQueue, J, Outcomes
from hicache.integrations.server_store import ServerStore
from hicache.storage import LmdbPageStore, PageBuffer, evict

log = logging.getLogger(__name__)

_FIND_KEYS = 4096  # of one question to the store
_READ_BYTES = 8 << 20  # of one read at most, or a larger page; few pages are shared out among the readers
_WRITE_BYTES = 64 << 20  # of one write, at least a page
_WRITES_AHEAD = 2  # one is filled while the other is written
_QUEUE_JOBS = 1024
_LOOK_S = 0.25  # between two looks for stalled threads


class Group(NamedTuple):
    """Pages that are read or written together, and the memory that they are part of."""

    memory: PageBuffer
    pages: list[PageBuffer]


class _Landing:
    """Where the pages of one read go while its call waits. `error`: what kept one from landing."""

    def __init__(self, first: int, pages: list[PageBuffer], landed: Callable[[int, PageBuffer], None]) -> None:
        self._first, self._pages, self._landed = first, pages, landed
        self._lock = threading.Lock()
        self._is_wanted = True
        self.error: Exception | None = None

    def land(self, i: int) -> None:
        """Does not raise: what fails here is no fault of the medium."""
        with self._lock:
            if not self._is_wanted or self.error is not None:
                return
            try:
                self._landed(self._first + i, self._pages[i])
            except Exception as error:  # the calling thread raises it
                log.debug("a page that was read could not be handed on", exc_info=True)
                self.error = error

    def give_up(self) -> None:
        """Nothing lands when this has returned."""
        with self._lock:
            self._is_wanted = False


class _Read(NamedTuple):
    first: int
    group: Group
    landing: _Landing
    outcomes: Outcomes[FindJob | ReadJob, FindDone | ReadDone]


class _Write(NamedTuple):
    group: Group
    outcomes: Outcomes[WriteJob, WriteDone]


class Buffers:
    """Memory of groups for reuse, each of `group_bytes` or one larger page; what is never used of it takes no memory.
    One thread at a time."""

    def __init__(self, group_bytes: int) -> None:
        self._group_bytes = group_bytes
        self._free: dict[int, list[PageBuffer]] = {}

    def group_pages(self, page_bytes: int) -> int:
        return max(1, self._group_bytes // page_bytes)

    def take(self, num_pages: int, page_bytes: int) -> Group:
        num_bytes = max(self._group_bytes, page_bytes)
        free = self._free.get(num_bytes)
        memory = free.pop() if free else np.empty(num_bytes, dtype=np.uint8)
        return Group(memory, list(memory[: num_pages * page_bytes].reshape(num_pages, page_bytes)))

    def give_back(self, group: Group) -> None:
        """Only what no thread of the tier uses any more."""
        self._free.setdefault(group.memory.nbytes, []).append(group.memory)


class BlockingTier:
    """Owns a disk tier over a server's store, and closes both. `find`, `read` and `write` may be called at the same
    time; a second caller of one of them waits for the first.

    A call that the medium does not answer within the tier's `io_timeout_s` is answered with misses, and so are the
    following ones at once, until the tier's breaker closes.
    """

    def __init__(self, server: ServerStore, readers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.server, self._readers = server, readers
        self._tier = DiskTier(server.store, readers=readers, queue_jobs=_QUEUE_JOBS, clock=clock)
        self._tier.start()
        self._finding, self._reading, self._writing = threading.Lock(), threading.Lock(), threading.Lock()
        self._read_buffers, self._write_buffers = Buffers(_READ_BYTES), Buffers(_WRITE_BYTES)

    def find(self, names: Sequence[bytes], *, until_gap: bool) -> list[bool]:
        """Which pages are stored. `until_gap`: after the first that is not, the others may be wrongly False."""
        held: list[bool] = []
        with self._finding:
            for start in range(0, len(names), _FIND_KEYS):
                keys = tuple(self.server.keys(names[start : start + _FIND_KEYS]))
                answer = _await(self._tier.reads, _submit(self._tier.reads, FindJob(start, (), others=keys)))
                if not isinstance(answer, FindDone) or not answer.answered:
                    break
                held += answer.others
                if until_gap and not all(answer.others):
                    break
        return held + [False] * (len(names) - len(held))

    def read(self, names: Sequence[bytes], page_bytes: int, landed: Callable[[int, PageBuffer], None]) -> list[bool]:
        """Read pages of `page_bytes`, up to the first that is missing. `landed(i, page)` is called for page i on the
        thread that read it, for several pages at a time, and also for some behind the first that is missing; what it
        raises is raised here when no thread reads any more. `page` is used again when it returns."""
        keys = self.server.keys(names)
        with self._reading:
            num_read = self._read(keys, page_bytes, landed)
        self._tier.used(keys[:num_read])
        return [i < num_read for i in range(len(keys))]

    def write(self, names: Sequence[bytes], page_bytes: int, fill: Callable[[int, PageBuffer], None]) -> list[bool]:
        """Store pages of `page_bytes`, up to the first group that fails. `fill(i, page)` writes page i into `page`, in
        order, on the calling thread."""
        if not self.server.can_write:
            return [False] * len(names)
        keys = self.server.keys(names)
        with self._writing:
            stored = self._write(keys, page_bytes, fill)
        self._tier.used([key for key, ok in zip(keys, stored, strict=True) if ok])
        return stored

    def clear(self, within_s: float) -> bool:
        """Remove all pages of the disk; False when that takes longer than `within_s`, and goes on, or fails."""
        store = self.server.store
        if not isinstance(store, LmdbPageStore):
            return False
        thread = threading.Thread(target=evict, args=(store, 0), name="hicache-clear", daemon=True)
        thread.start()
        thread.join(within_s)
        return not thread.is_alive() and store.stats().entries == 0

    def close(self) -> bool:
        """False: a thread is stalled in the store, which stays open."""
        return self._tier.close()

    def _read(self, keys: list[bytes], page_bytes: int, landed: Callable[[int, PageBuffer], None]) -> int:
        """How many pages were read, from the first on."""
        share = -(-len(keys) // (2 * self._readers))
        group_pages = max(1, min(share, self._read_buffers.group_pages(page_bytes)))
        starts = deque(range(0, len(keys), group_pages))
        gap = threading.Event()
        under_way = deque[_Read]()
        num_read, error = 0, None
        while starts or under_way:
            while starts and len(under_way) < 2 * self._readers:
                start = starts.popleft()
                under_way.append(self._submit_read(start, keys[start : start + group_pages], page_bytes, gap, landed))
            read = under_way.popleft()
            answer = _await(self._tier.reads, read.outcomes)
            if isinstance(answer, ReadDone) and not gap.is_set():
                num_read += sum(1 for _ in takewhile(bool, answer.ok))
            if answer is None:
                read.landing.give_up()
            else:
                self._read_buffers.give_back(read.group)
            error = error or read.landing.error
            if num_read < read.first + len(read.group.pages) or error is not None:
                gap.set()
                starts.clear()
        if error is not None:
            raise error
        return num_read

    def _submit_read(
        self,
        start: int,
        keys: list[bytes],
        page_bytes: int,
        gap: threading.Event,
        landed: Callable[[int, PageBuffer], None],
    ) -> _Read:
        group = self._read_buffers.take(len(keys), page_bytes)
        landing = _Landing(start, group.pages, landed)
        job = ReadJob(start, 0, tuple(keys), tuple(group.pages), gap, landed=landing.land)
        return _Read(start, group, landing, _submit(self._tier.reads, job))

    def _write(self, keys: list[bytes], page_bytes: int, fill: Callable[[int, PageBuffer], None]) -> list[bool]:
        group_pages = self._write_buffers.group_pages(page_bytes)
        under_way = deque[_Write]()
        stored: list[bool] = []

        def settle() -> None:
            write = under_way.popleft()
            answer = _await(self._tier.writes, write.outcomes)
            stored.extend(answer.ok if isinstance(answer, WriteDone) else [False] * len(write.group.pages))
            if answer is not None:
                self._write_buffers.give_back(write.group)

        for start in range(0, len(keys), group_pages):
            if not all(stored) or self._tier.writes.refuses():
                break
            part = keys[start : start + group_pages]
            group = self._write_buffers.take(len(part), page_bytes)
            for i, page in enumerate(group.pages, start):
                fill(i, page)
            job = WriteJob(start, tuple(part), tuple(group.pages))
            under_way.append(_Write(group, _submit(self._tier.writes, job)))
            if len(under_way) == _WRITES_AHEAD:
                settle()
        while under_way:
            settle()
        return stored + [False] * (len(keys) - len(stored))


def _submit(jobs: IoQueue[J, D], job: J) -> Outcomes[J, D]:
    outcomes = jobs.submit_first(job)
    assert outcomes is not None, "more jobs than the queue takes"
    return outcomes


def _await(jobs: IoQueue[J, D], outcomes: Outcomes[J, D]) -> D | None:
    """The answer; None when the job's thread is stalled, which then owns the job's pages."""
    while True:
        try:
            _, outcome = outcomes.get(timeout=_LOOK_S)
        except queue.Empty:
            jobs.poll()  # looks for stalled threads, and refuses what waits behind them
            continue
        return None if isinstance(outcome, Stalled) else outcome
