"""The disk behind the host pages of the linker: what it holds, reads that requests wait for, writes in the background.

Pages wait for their write unlocked, and may leave the host before it: then they are on no tier. From the submission of
a job until its answer they are locked, or in flight, for the store process uses their bytes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from hicache.integrations.server_store import ServerStore
from hicache.integrations.sglang.linker_index import HostPage, PageIndex, page_ids
from hicache.storage.process.jobs import ReadDone, ReadJob, Stalled, WriteDone, WriteJob

log = logging.getLogger(__name__)

_LOOK_S = 0.25  # between two looks at what nobody answers
_JOB_PAGES = 8  # of a read: several readers share what a request waits for
_JOB_BYTES = 64 << 20  # of a write


@dataclass(eq=False)
class _Read:
    """Pages in flight, which a reader fills. `wanted`: False when the cache was reset meanwhile."""

    index: PageIndex
    pages: list[HostPage]
    cancelled: threading.Event
    wanted: bool = True


@dataclass
class _Fetch:
    """What one request waits for."""

    cancelled: threading.Event = field(default_factory=threading.Event)
    pending: set[int] = field(default_factory=set)
    failed: bool = False


class LinkerDisk:
    """`indexes`: by the name of the component. `writes`: whether this rank stores pages, which others may. Scheduler
    thread; `poll` once a step takes the answers."""

    def __init__(
        self, store: ServerStore, indexes: Mapping[str, PageIndex], lookup_wait_s: float, *, writes: bool
    ) -> None:
        self._writes_pages = writes
        self.tier, self._store, self._indexes, self._lookup_wait_s = store.tier, store, indexes, lookup_wait_s
        self._reads: dict[int, tuple[_Read, _Fetch]] = {}
        self._writes: dict[int, tuple[PageIndex, list[HostPage]]] = {}
        self._unwritten: deque[tuple[str, HostPage]] = deque()
        self._ticket = 0
        self._locked = dict.fromkeys(indexes, 0)  # pages of writes in flight
        self.stats = {"pages_read": 0, "pages_written": 0, "read_failures": 0, "write_failures": 0}

    def find(self, name: str, chain: Sequence[str], others: Mapping[str, Sequence[str]]) -> tuple[int, set[str]]:
        """How many pages of `chain`, of component `name`, the disk holds from the first on without a gap, and which of
        `others`, as "component/key". Nothing where it cannot tell in time."""
        names = [f"{other}/{key}" for other, keys in others.items() for key in keys]
        found = self.tier.find(
            self._names(name, chain), self._lookup_wait_s, self._store.keys([n.encode() for n in names])
        )
        if found is None:
            return 0, set()
        return found.num_pages, {name for name, held in zip(names, found.others, strict=True) if held}

    def used(self, name: str, keys: Sequence[str]) -> None:
        """A request uses these pages, in the order of its prompt."""
        self.tier.used(self._names(name, keys))

    def fetch(self, missing: Mapping[str, Sequence[str]], within_s: float) -> bool:
        """Bring pages to the host; waits for them. False: some did not come, the others are on the host."""
        fetch, deadline_s = _Fetch(), time.monotonic() + within_s
        for name, keys in missing.items():
            if not self._submit(fetch, name, keys):
                fetch.failed = True
                break
        self._poll_reads()
        while fetch.pending and not fetch.failed and (left_s := deadline_s - time.monotonic()) > 0:
            self.tier.wait(min(left_s, _LOOK_S))
            self._poll_reads()
        fetch.cancelled.set()
        failed = fetch.failed or bool(fetch.pending)
        self.stats["read_failures"] += failed
        return not failed

    def write(self, name: str, pages: Sequence[HostPage]) -> None:
        """Have pages written when the disk has time for them."""
        if not self._writes_pages:
            return
        self._unwritten.extend((name, page) for page in pages)

    @property
    def is_idle(self) -> bool:
        return not (self._reads or self._writes or self._unwritten)

    def num_in_flight(self, index: PageIndex) -> int:
        """Pages of an index that readers fill."""
        return sum(len(read.pages) for read, _ in self._reads.values() if read.index is index)

    def num_locks(self, index: PageIndex) -> int:
        """Pages of an index that the writer reads."""
        return sum(len(pages) for owner, pages in self._writes.values() if owner is index)

    def poll(self) -> None:
        """Take answers, submit what waits."""
        self._poll_reads()
        for answer in self.tier.writes.poll():
            if not isinstance(answer, Stalled):
                self._written(answer)
        while self._unwritten and self._submit_write():
            pass

    def settle(self, within_s: float) -> None:
        """Wait until nothing is read or written any more, but not for a medium that stalls."""
        deadline_s = time.monotonic() + within_s
        for read, fetch in self._reads.values():
            read.cancelled.set()
            fetch.failed = True
        self.poll()
        while not self.is_idle and time.monotonic() < deadline_s:
            self.tier.wait(_LOOK_S)
            self.poll()
        self._unwritten.clear()

    def forget(self) -> None:
        """The host pages were cleared: what is still read is of no use."""
        for read, _ in self._reads.values():
            read.wanted = False

    def _names(self, name: str, keys: Sequence[Hashable]) -> list[bytes]:
        """The store's keys of pages of a component."""
        return self._store.keys([f"{name}/{key}".encode() for key in keys])

    def _submit(self, fetch: _Fetch, name: str, keys: Sequence[str]) -> bool:
        """Queue reads of all keys; False when the host has no room for them, or the queue is full."""
        index = self._indexes[name]
        pages = index.reserve(keys)
        if pages is None:
            return False
        for start in range(0, len(keys), _JOB_PAGES):
            part = pages[start : start + _JOB_PAGES]
            self._ticket += 1
            names = tuple(self._names(name, [page.key for page in part]))
            views = tuple(index.pool.views(page_ids(part)))
            if not self.tier.reads.submit(ReadJob(self._ticket, 0, names, views, fetch.cancelled, math.inf)):
                index.abandon(pages[start:])
                return False
            self._reads[self._ticket] = _Read(index, part, fetch.cancelled), fetch
            fetch.pending.add(self._ticket)
        return True

    def _poll_reads(self) -> None:
        for answer in self.tier.reads.poll():
            if isinstance(answer, ReadDone):
                self._read_done(answer)
            elif isinstance(answer, Stalled) and answer.ticket in self._reads:
                self._reads[answer.ticket][1].failed = True

    def _read_done(self, answer: ReadDone) -> None:
        read, fetch = self._reads.pop(answer.ticket)
        fetch.pending.discard(answer.ticket)
        fetch.failed |= not all(answer.ok)
        oks = [ok and read.wanted for ok in answer.ok]
        good = [page for page, ok in zip(read.pages, oks, strict=True) if ok]
        read.index.abandon([page for page, ok in zip(read.pages, oks, strict=True) if not ok])
        for page in read.index.publish(good):
            page.stored = True
        self.stats["pages_read"] += len(good)

    def _submit_write(self) -> bool:
        """Queue one job of pages that wait. False when enough are in flight: a host full of locked pages would take no
        others."""
        name = self._unwritten[0][0]
        index = self._indexes[name]
        max_pages = max(1, _JOB_BYTES // index.pool.page_bytes)
        capacity = min(max_pages, max(1, index.pool.num_pages // 2) - self._locked[name])
        batch: list[HostPage] = []
        while len(batch) < capacity and self._unwritten and self._unwritten[0][0] == name:
            page = self._unwritten.popleft()[1]
            if index.get(page.key) is page and not page.stored:
                batch.append(page)
        if not batch:
            return capacity > 0
        self._ticket += 1
        keys = tuple(self._names(name, [page.key for page in batch]))
        job = WriteJob(self._ticket, keys, tuple(index.pool.views(page_ids(batch))))
        if not self.tier.writes.submit(job):
            self._unwritten.extendleft((name, page) for page in reversed(batch))
            return False
        index.lock(batch)
        self._locked[name] += len(batch)
        self._writes[self._ticket] = index, batch
        return True

    def _written(self, answer: WriteDone) -> None:
        index, batch = self._writes.pop(answer.ticket)
        for page, ok in zip(batch, answer.ok, strict=True):
            page.stored = ok
        name = next(name for name, known in self._indexes.items() if known is index)
        self._locked[name] -= len(batch)
        index.unlock(batch)
        self.stats["pages_written"] += sum(answer.ok)
        self.stats["write_failures"] += len(batch) - sum(answer.ok)
