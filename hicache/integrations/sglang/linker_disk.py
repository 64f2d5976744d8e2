"""The disk behind the host pages of the linker: what it holds, reads that requests wait for, writes in the background.

Pages wait for their write unlocked, and may leave the host before it: then they are on no tier. From the submission of
a job until its answer they are locked, or in flight, for the store process uses their bytes.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hicache.host.run import HostRun, NewPages, pages_of
from hicache.integrations.server_store import ServerStore
from hicache.integrations.sglang.linker_host import HostTier, Part
from hicache.storage.process.jobs import ReadDone, ReadJob, Stalled, WriteDone, WriteJob

_LOOK_S = 0.25  # between two looks at what nobody answers
_JOB_BYTES = 64 << 20  # of a write


@dataclass
class _Fetch:
    """What one request waits for."""

    cancelled: threading.Event = field(default_factory=threading.Event)
    pending: set[int] = field(default_factory=set)
    failed: bool = False


class LinkerDisk:
    """`writes`: whether this rank stores pages, which others may. Scheduler thread; `poll` once a step takes the
    answers."""

    def __init__(self, store: ServerStore, lookup_wait_s: float, *, writes: bool) -> None:
        self.tier, self._keys, self._lookup_wait_s, self._writes_pages = store.tier, store.keys, lookup_wait_s, writes
        self._tickets = itertools.count()
        self._reads: dict[int, tuple[HostTier, HostRun, _Fetch]] = {}
        self._writes: dict[int, tuple[HostTier, list[HostRun]]] = {}
        self._unwritten: deque[tuple[HostTier, list[bytes]]] = deque()  # of each run its keys
        self._locked = Counter[HostTier]()  # pages of writes in flight
        self.stats = {"pages_read": 0, "pages_written": 0, "read_failures": 0, "write_failures": 0}

    def find(self, chain: Sequence[bytes], others: Sequence[bytes]) -> set[bytes]:
        """What the disk holds of `chain`, from its first page on without a gap, and of `others`. Nothing where it
        cannot tell in time."""
        found = self.tier.find(self._keys(chain), self._lookup_wait_s, self._keys(others))
        if found is None:
            return set()
        return {*chain[: found.num_pages], *itertools.compress(others, found.others)}

    def used(self, keys: Sequence[bytes]) -> None:
        """A request uses these pages, in the order of its prompt."""
        self.tier.used(self._keys(keys))

    def fetch(self, parts: Iterable[Part], within_s: float) -> bool:
        """Bring what is absent to the host; waits for it. False: some did not come, the others are on the host."""
        fetch, deadline_s = _Fetch(), time.monotonic() + within_s
        fetch.failed = not all(self._read(fetch, part) for part in parts)
        self._poll_reads()
        while fetch.pending and not fetch.failed and (left_s := deadline_s - time.monotonic()) > 0:
            self.tier.wait(min(left_s, _LOOK_S))
            self._poll_reads()
        fetch.cancelled.set()
        failed = fetch.failed or bool(fetch.pending)
        self.stats["read_failures"] += failed
        return not failed

    def write(self, tier: HostTier, runs: Iterable[HostRun]) -> None:
        """Have pages written when the disk has time for them."""
        if self._writes_pages:
            self._unwritten.extend((tier, [*run.keys]) for run in runs)

    @property
    def is_idle(self) -> bool:
        return not (self._reads or self._writes or self._unwritten)

    def locked(self, tier: HostTier) -> list[HostRun]:
        """Runs that readers fill, and those that the writer reads."""
        filled = [run for owner, run, _ in self._reads.values() if owner is tier]
        return filled + [run for owner, runs in self._writes.values() if owner is tier for run in runs]

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
        for _, _, fetch in self._reads.values():
            fetch.cancelled.set()
            fetch.failed = True
        self.poll()
        while not self.is_idle and time.monotonic() < deadline_s:
            self.tier.wait(_LOOK_S)
            self.poll()
        self._unwritten.clear()

    def _read(self, fetch: _Fetch, part: Part) -> bool:
        """Queue reads of what is absent, in jobs that several readers share; False when the host has no room for it,
        or the queue is full."""
        index, keys, size = part.tier.index, part.keys, self.tier.job_pages
        jobs = [NewPages(keys[at : at + size], keys[at - 1] if at else None) for at in range(0, len(keys), size)]
        runs = index.reserve([piece for pages in jobs for piece in index.absent(pages)])
        if runs is None:
            return False
        for at, run in enumerate(runs):
            run.job, ticket = fetch, next(self._tickets)
            stored, views = tuple(self._keys(run.keys)), part.tier.host.views(run.ids)
            if not self.tier.reads.submit(ReadJob(ticket, 0, stored, views, fetch.cancelled, math.inf)):
                for left in runs[at:]:
                    index.abandon(left)
                return False
            self._reads[ticket] = part.tier, run, fetch
            fetch.pending.add(ticket)
        return True

    def _poll_reads(self) -> None:
        for answer in self.tier.reads.poll():
            if isinstance(answer, ReadDone):
                tier, run, fetch = self._reads.pop(answer.ticket)
                fetch.pending.discard(answer.ticket)
                fetch.failed |= not all(answer.ok)
                tier.index.publish(run, answer.ok)
                self.stats["pages_read"] += sum(answer.ok)
            elif isinstance(answer, Stalled) and answer.ticket in self._reads:
                self._reads[answer.ticket][-1].failed = True

    def _submit_write(self) -> bool:
        """Queue one job of runs that wait. False when enough are in flight: a host full of locked pages would take no
        others."""
        tier = self._unwritten[0][0]
        room = max(1, tier.host.num_pages // 2) - self._locked[tier]
        most = min(room, max(1, _JOB_BYTES // tier.host.page_bytes))
        batch = dict[bytes, HostRun]()
        while len(batch) < most and self._unwritten and self._unwritten[0][0] is tier:
            held = tier.index.runs_of(self._unwritten.popleft()[1])  # what has not left, in the runs of now
            batch.update((key, run) for run in held for key in run.keys)
        if not batch:
            return room > 0
        runs, ticket = [*dict.fromkeys(batch.values())], next(self._tickets)
        stored, views = tuple(self._keys([*batch])), tier.host.views(pages_of(runs).tolist())
        if not self.tier.writes.submit(WriteJob(ticket, stored, views)):
            self._unwritten.extendleft((tier, [*run.keys]) for run in reversed(runs))
            return False
        tier.index.lock(runs)
        self._locked[tier] += len(batch)
        self._writes[ticket] = tier, runs
        return True

    def _written(self, answer: WriteDone) -> None:
        tier, runs = self._writes.pop(answer.ticket)
        self._locked[tier] -= len(answer.ok)
        tier.index.unlock(runs)
        self.stats["pages_written"] += sum(answer.ok)
        self.stats["write_failures"] += len(answer.ok) - sum(answer.ok)
