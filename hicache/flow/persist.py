"""Host to a store: to the disk, and on its own to the remote tier.

What reached the host goes to the writer thread in batches, locked on the host until the store has acknowledged it. At
most a share of a component's host pool is locked so; what comes beyond that waits without a lock, and is lost to the
store only if the host evicts it before its turn. What the store refuses stays on the host, and is sent again when a
request that used it ends. Pages that a stalled writer has stay locked until it returns; nothing else waits for that.
A raw page stays on the host, and what follows it in a prompt is sent: a read finds that while memory has the raw one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch

from hicache.flow.components import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.movement import Movement
from hicache.flow.prompt import event_pages_of
from hicache.host import HostRun, path_of
from hicache.storage.process.jobs import Stalled, WriteDone, WriteJob
from hicache.tiers import DISK, FULL, REMOTE, Component, Store

_DISK_SHARE, _REMOTE_SHARE = 0.5, 0.25  # of a host pool, locked until the store has it
_MAX_SENT_JOBS = 6  # of one step, so that it ends soon
_JOB_PAGES, _JOB_BYTES = 64, 8 << 20  # of one job at most, of several runs
_STORE_SHARE = 0.25  # of its budget, on its way at a time
_METRICS = {DISK: "persist", REMOTE: "remote_persist"}


class _Write:
    """Neighbouring runs of a component on their way to the store, in one job. `keys`: those of each that are sent,
    which are not raw. `is_stalled`: a stalled writer has them."""

    def __init__(self, component: CacheComponent, runs: list[HostRun]) -> None:
        self.component, self.runs, self.is_stalled = component, runs, False
        self.keys = [_to_send(run) for run in runs]

    def job(self, ticket: int) -> WriteJob:
        pages = [
            page
            for run in self.runs
            for key, page in zip(run.keys, run.ids, strict=True)
            if key not in run.second_pages
        ]
        keys = tuple(key for of_run in self.keys for key in of_run)
        return WriteJob(ticket, keys, self.component.host.views(torch.tensor(pages)))

    @property
    def num_held(self) -> int:
        return sum(run.num_held for run in self.runs)


def _to_send(run: HostRun) -> list[bytes]:
    return [key for key in run.keys if key not in run.second_pages] if run.second_pages else run.keys[:]


class Persist(Movement):
    """Owned by the scheduler thread; the writer thread sees frozen jobs only. `into`: the store; `share`: how much of a
    component's host pool may be locked on its way there."""

    def __init__(self, context: EngineContext, store: Store, share: float) -> None:
        self._context, self.into, self._share, self._tier = context, store, share, context.stores[store]
        self._tickets = itertools.count()
        self._writes: dict[int, _Write] = {}
        self._sent: set[HostRun] = set()
        self._times_lost = 0  # its process, as events know
        self._backlog = deque[tuple[CacheComponent, HostRun]]()  # locked, and not sent yet
        # By component, of writes that are not stalled. What a stalled writer has would hold up all others.
        self._locked_pages = dict.fromkeys(context.by_name, 0)
        self._waiting: deque[tuple[CacheComponent, list[bytes]]] = deque()  # of each run its keys
        name = _METRICS[store]
        count, gauge = context.metrics.counter, context.metrics.gauge
        moved, took = (
            "bytes, before compression, of pages of a job that the store took",
            "time that job took the writer",
        )
        labels = {"movement": "write", "direction": f"host_to_{store.name.lower()}"}
        self._bytes, self._seconds = context.metrics.movement(name, moved, f"{took}, its share of a batch", **labels)
        self._failures = count(f"{name}.failed_pages", "pages that the store did not take")
        gauge(f"{name}.queued_runs", "runs of pages that wait, unlocked, for their turn", self._waiting.__len__)
        help = "runs of pages that wait for their turn to be sent, or for room in the writer's queue"
        gauge(f"{name}.queued_jobs", help, self._backlog.__len__)

    def store(self, component: CacheComponent, runs: Iterable[HostRun]) -> None:
        """Send what is on the host and not yet in the store, or let it wait for its turn."""
        for run in runs:
            if self._waiting or not self._fits(run, component):
                self._waiting.append((component, [*run.keys]))
            else:
                self._send(run, component)

    def touch(self, keys: Mapping[Component, Sequence[bytes]]) -> None:
        """A request used the prefix with these keys: what the store has of it counts as used, whichever tier served it;
        what it refused before is sent again.

        A prefix counts as used after what continues it, pages after windows and states: these are evicted first.
        """
        self._tier.used([key for of_component in keys.values() for key in of_component])
        # While others wait for their turn, so may these: a run is to wait once, however often it is used.
        if not self._waiting and not self._tier.writes.refuses():
            for component in reversed(self._context.components):
                runs = component.index.runs_of(keys[component.name])
                self.store(component, [run for run in runs if self._is_unstored(run)])

    def send_again(self) -> None:
        """Send what is on the host and the store did not take, what others follow before them."""
        for component in reversed(self._context.components):
            runs = [run for run in component.index.runs_of([*component.index]) if self._is_unstored(run)]
            paths = dict.fromkeys(above for run in runs if run.source is None for above in path_of(run))
            self.store(component, [run for run in paths if self._is_unstored(run)])

    def poll(self) -> bool:
        """Enter what the writer has answered, and send what waits; whether there was an answer."""
        outcomes = self._tier.writes.poll()
        self._note_loss()
        self.is_torn = bool(outcomes)
        landed = list[HostRun]()
        for done in outcomes:
            write = self._writes[done.ticket]
            if not write.is_stalled:
                self._locked_pages[write.component.name] -= write.num_held
            if isinstance(done, Stalled):
                write.is_stalled = True
            else:
                self._take(self._writes.pop(done.ticket), done)
                landed += write.runs if write.component.name == FULL else []
        self._use_prefixes(landed)
        self.is_torn = False
        if outcomes:  # which alone make room: what waits, waits for one
            self._send_waiting()
        self._push()
        return bool(outcomes)

    @property
    def num_waiting(self) -> int:
        """Runs that wait for their turn."""
        return len(self._waiting)

    def is_busy(self) -> bool:
        return bool(self._waiting) or any(self._locked_pages.values())

    def host_locks(self, component: Component) -> Iterable[HostRun]:
        yield from (run for held, run in self._backlog if held.name == component)
        yield from (run for write in self._writes.values() if write.component.name == component for run in write.runs)

    def _note_loss(self) -> None:
        """What the store lost before its process ended, that did not tell any more."""
        events, num_lost = self._context.tree.events, self._tier.times_lost
        if num_lost != self._times_lost and events is not None and self.into is DISK:
            events.disk_lost()
        self._times_lost = num_lost

    def _use_prefixes(self, landed: Sequence[HostRun]) -> None:
        """What these continue counts as used after them: of a prompt that is larger than the store the end leaves."""
        followed = {run.parent_run for run in landed}
        for run in landed:
            if run.parent_run is not None and run not in followed:
                self._tier.used([key for above in path_of(run) for key in above.keys])

    def _is_unstored(self, run: HostRun) -> bool:
        """And worth it, for its session has not ended."""
        return run.is_published and not run.stored & self.into and run not in self._sent and not run.has_ended

    def _send_waiting(self) -> None:
        """Send what waits and is still there, as far as it fits; a run may have been divided meanwhile."""
        while self._waiting:
            component, keys = self._waiting[0]
            for run in component.index.runs_of(keys):
                if self._is_unstored(run) and not self._fits(run, component):
                    first = next(at for at, key in enumerate(keys) if key in run.keys)
                    self._waiting[0] = component, keys[first:]
                    return
                self._send(run, component)
            self._waiting.popleft()

    def _take(self, write: _Write, done: WriteDone) -> None:
        component, written = write.component, sum(done.ok)
        if written:
            self._bytes.observe(written * component.host.page_bytes)
            self._seconds.observe(done.seconds)
        self._failures.value += len(done.ok) - written
        events = self._context.tree.events
        if events is not None and self.into is DISK:
            events.removed(done.removed, "DISK")
        ok = iter(done.ok)
        for run, keys in zip(write.runs, write.keys, strict=True):
            came = dict(zip(keys, ok, strict=False))
            if events is not None and self.into is DISK and component.name == FULL:
                events.stored(event_pages_of(run), "DISK", [came.get(key, False) for key in run.keys])
            run.stored = run.stored | self.into if all(came.values()) else run.stored & ~self.into
            self._sent.remove(run)
        component.index.unlock(write.runs)

    def _fits(self, run: HostRun, component: CacheComponent) -> bool:
        """Whether the rest of the host pool stays free of such locks, and the store has room for what is on its way
        beside what that continues; one run alone always may be sent."""
        locked, most = self._locked_pages[component.name], self._share * component.host.num_pages
        if budget_bytes := self._tier.stats().budget_bytes:
            most = min(most, _STORE_SHARE * budget_bytes / component.host.page_bytes)
        return not locked or locked + run.num_held <= most

    def _send(self, run: HostRun, component: CacheComponent) -> None:
        if not self._is_unstored(run):
            return
        if len(run.second_pages) == len(run.keys):
            run.stored |= self.into  # all of it that goes there
            return
        component.index.lock([run])
        self._locked_pages[component.name] += run.num_held
        self._sent.add(run)
        self._backlog.append((component, run))

    def _push(self) -> None:
        """Send what has its turn, so much in a step that this ends soon."""
        for _ in range(_MAX_SENT_JOBS):
            if not self._backlog:
                return
            write, ticket = self._next_write(), next(self._tickets)
            if not self._tier.writes.submit(write.job(ticket)):
                return
            self._writes[ticket] = write
            for _ in write.runs:
                self._backlog.popleft()

    def _next_write(self) -> _Write:
        """The first runs of the backlog that make one job."""
        component, first = self._backlog[0]
        runs, most = list[HostRun](), max(len(first.keys), min(_JOB_PAGES, _JOB_BYTES // component.host.page_bytes))
        for other, run in self._backlog:
            most -= len(run.keys)
            if other is not component or most < 0:
                break
            runs.append(run)
        return _Write(component, runs)


def persists_of(context: EngineContext) -> tuple[Persist, ...]:
    """One for each store that this engine writes to."""
    remote = context.config.remote
    shares = {DISK: _DISK_SHARE, REMOTE: _REMOTE_SHARE if remote is None else remote.backup_share}
    return tuple(
        Persist(context, store, shares[store])
        for store in context.stores
        if store is DISK or remote is None or remote.backup == "all"
    )
