"""Host to a store: to the disk, and on its own to the remote tier.

`WriteScheduler` chooses the pages in rounds. A round is locked on the host until the store has acknowledged
it: at most a share of a component's host pool. What the store refuses stays on the host, and is sent again when a
request that used it ends. Pages that a stalled writer has stay locked until it returns; nothing else waits for that.
A raw page stays on the host, and what follows it in a prompt is sent: a read finds that while memory has the raw one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import itemgetter

import numpy as np

from hicache.flow.components.base import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.movement import Movement
from hicache.metrics import Counter
from hicache.pages.table import Mask, Rows, Seen, names_of
from hicache.pages.writes import ROUND_SHARE, WriteBudget, WriteMode, WriteScheduler, WriteSource
from hicache.storage.process.jobs import Stalled, WriteDone, WriteJob
from hicache.tiers import DISK, FULL, Component, Store

REMOTE_SHARE = 0.25  # of a host pool: pages locked until the store has them
_MAX_SENT_JOBS = 6  # of one step, so that it ends soon
_JOB_PAGES, _JOB_BYTES = 64, 8 << 20  # of one job at most, of several runs
_STORE_SHARE = 0.25  # of its budget, on its way at a time
_MEASURED_BYTES, _BUDGET_SHARE = 256 << 20, 0.5  # of writes that are timed, and of what they reach
_LOOK_S = 0.05  # between two looks whether the budget admits pages that it refused
_UNTOLD_SHARE = 0.25  # of store and host, written before the store is told which prefixes the written pages continue


@dataclass(eq=False)
class _Write:
    """Pages of a component on their way to the store, in one job. `is_stalled`: a stalled writer has them."""

    component: CacheComponent
    rows: Rows
    is_stalled: bool = False

    def job(self, ticket: int) -> WriteJob:
        pages = self.component.pages
        return WriteJob(
            ticket, tuple(pages.table.keys_of(self.rows)), self.component.host.views(pages.place[self.rows].tolist())
        )


class Persist(Movement):
    """Owned by the scheduler thread; the writer thread sees frozen jobs only. `into`: the store; `share`: how much of a
    component's host pool may be locked on its way there."""

    def __init__(self, context: EngineContext, store: Store, share: float, budget: WriteBudget) -> None:
        self._context, self.into, self._share, self.tier = context, store, share, context.stores[store]
        self._budget, self._is_measured = budget, store is DISK and not budget.bytes_per_s
        self._measured_bytes = self._measured_s = 0.0
        # States and windows first: the store evicts them first.
        self._written_pages = {
            component.name: WriteSource(component.pages, component.host.page_bytes, 1)
            for component in reversed(context.components)
        }
        self._uses = context.page_uses if store is DISK else None
        self._ahead = WriteScheduler([*self._written_pages.values()], store, budget, self._uses)
        self._names = {at: name for name, at in self._written_pages.items()}
        self._tickets = itertools.count()
        self._writes: dict[int, _Write] = {}
        self._next_look_s = 0.0
        self._times_lost = 0  # its process, as events know
        self._backlog = deque[tuple[CacheComponent, Rows]]()  # locked, and not sent yet
        # For `tell_prefixes`: keys in the order of prompts, their rows, bytes sent since the last call.
        self._prefix_keys, self._prefix_rows = list[bytes](), Seen()
        context.full.pages.table.add_columns(self._prefix_rows)
        self._untold_bytes = 0
        self._has_written = False  # full pages, since the last round began
        # By component, of writes that are not stalled. What a stalled writer has would hold up all others.
        self._locked_pages = dict.fromkeys(context.by_name, 0)
        self._register(f"{store.prefix}persist")

    def _register(self, name: str) -> None:
        metrics = self._context.metrics

        def count(of: str, help: str) -> Counter:
            return metrics.counter(f"{name}.{of}", help)

        def gauge(of: str, help: str, read: Callable[[], float]) -> None:
            metrics.gauge(f"{name}.{of}", help, read)

        moved, took = (
            "bytes, before compression, of pages of a job that the store took",
            "time that job took the writer, its share of a batch",
        )
        direction = f"host_to_{self.into.name}"
        self._bytes, self._seconds = metrics.movement(name, moved, took, movement="write", direction=direction)
        self._failures = count("failed_pages", "pages that the store did not take")
        gauge("queued_pages", "pages that wait, unlocked, for their turn", lambda: self.num_waiting)
        self._written = count("written_bytes", "bytes, before compression, of pages that the store lacked and took")
        if (uses := self._uses) is not None:
            budget = self._budget
            gauge("budget_bytes_per_second", "what may be written; 0: not known yet", lambda: budget.bytes_per_s)
            gauge("budget_left_ratio", "what is left of 30 seconds of it", lambda: budget.level)
            help = "pages that the store took, and that no request has read from it since"
            gauge("unread_pages", help, lambda: uses.num_written - uses.num_read)

    def store(self, component: CacheComponent, rows: Rows) -> None:
        """What of these the store lacks is to be sent."""
        self._ahead.arrived(self._written_pages[component.name], rows)

    def touch(self, keys: Mapping[Component, Sequence[bytes]]) -> None:
        """A request used the prefix with these keys: what the store has of it counts as used, whichever tier served it;
        what it refused before is sent again.

        A prefix counts as used after what continues it, pages after windows and states: these are evicted first.
        """
        self.tier.used([key for of_component in keys.values() for key in of_component])
        # While others wait for their turn, so may these: a page is to wait once, however often it is used.
        is_again = not self.num_waiting and not self.tier.writes.refuses()
        for name, at in self._written_pages.items():
            if self.into is DISK:  # uses are told once
                self._context.page_uses.use(names_of(keys[name]))
            self._ahead.used(at, len(keys[name]))
            if is_again:
                self._ahead.arrived(at, at.pages.held(keys[name]))

    def drain(self, *, anew: bool) -> None:
        """Write all pages of the host that the store lacks, regardless of the budget."""
        self._ahead.drain()

    def lacks(self, component: CacheComponent, rows: Rows) -> Mask:
        """Which of these pages of the host the store has not taken and is to get."""
        pages = component.pages
        lacking: Mask = pages.has(rows) & (pages.stored[rows] & self.into.bit == 0) & ~pages.order.has_ended[rows]
        return lacking

    def poll(self) -> bool:
        """Enter what the writer has answered, and send what has its turn; whether there was an answer."""
        outcomes, taken = self.tier.writes.poll(), list[tuple[_Write, WriteDone]]()
        self._note_loss()
        self.is_torn = bool(outcomes)
        for done in outcomes:
            write = self._writes[done.ticket]
            if not write.is_stalled:
                self._locked_pages[write.component.name] -= len(write.rows)
                self._ahead.answered(len(write.rows))
            if isinstance(done, Stalled):
                write.is_stalled = True
            else:
                taken.append((self._writes.pop(done.ticket), done))
        for component in self._context.components if taken else ():
            self._take(component, [(write, done) for write, done in taken if write.component is component])
        self.is_torn = False
        if (self._has_written or self._may_begin()) and not self._backlog and not any(self._locked_pages.values()):
            self._tell_share()
            self._begin_round()
            self._next_look_s = self._context.clock() + _LOOK_S
        self._push()
        return bool(outcomes)

    @property
    def num_waiting(self) -> int:
        """Pages that wait for their turn."""
        return self._ahead.num_waiting

    def is_busy(self) -> bool:
        return not self._ahead.is_done or any(self._locked_pages.values())

    def host_locks(self, component: Component) -> Iterable[Rows]:
        yield from (rows for held, rows in self._backlog if held.name == component)
        yield from (write.rows for write in self._writes.values() if write.component.name == component)

    def _note_loss(self) -> None:
        """What the store lost before its process ended, that did not tell any more."""
        events, num_lost = self._context.tree.events, self.tier.times_lost
        if num_lost != self._times_lost and events is not None and self.into is DISK:
            events.disk_lost()
        self._times_lost = num_lost

    def tell_prefixes(self) -> None:
        """Tell the store that prefixes were used after the written pages that continue them. So the store evicts the
        end of a prompt first."""
        self.tier.used(self._prefix_keys)
        self._prefix_keys = []
        self._prefix_rows.age[:] = 0
        self._untold_bytes = 0

    def _note_prefixes(self, rows: Rows) -> None:
        """Collect the prefixes that these full pages continue. They are still locked: later their rows may be those of
        other pages."""
        table = self._context.full.pages.table
        self._prefix_keys += table.keys_of(table.with_paths(rows, self._prefix_rows))
        self._has_written = True

    def _tell_share(self) -> None:
        """Tell the collected prefixes if a share of the store was written since the last time. So the store is told a
        few keys for each written page, however long the prompts are."""
        if not self._has_written:
            return
        self._has_written = False
        host_bytes = sum(at.host.num_pages * at.host.page_bytes for at in self._context.components)
        least_bytes = min(host_bytes, self.tier.stats().budget_bytes or host_bytes)
        if self._untold_bytes >= _UNTOLD_SHARE * least_bytes:
            self.tell_prefixes()

    def _may_begin(self) -> bool:
        """Whether pages may be chosen that were not chosen before. The budget grows all the time, and is asked now and
        then."""
        ahead = self._ahead
        return not ahead.is_done or (ahead.mode is WriteMode.COLD and self._context.clock() >= self._next_look_s)

    def _begin_round(self) -> None:
        """Lock the pages that are sent next. At most a share of the host pool is locked by them, and the store has room
        for them and the pages before them. One page may always be sent."""
        budget_bytes = self.tier.stats().budget_bytes
        for name, at in self._written_pages.items():
            max_pages = self._share * self._context.by_name[name].host.num_pages
            if budget_bytes:
                max_pages = min(max_pages, _STORE_SHARE * budget_bytes / at.page_bytes)
            at.max_pages = max(1, int(max_pages))
        for at, rows in self._ahead.next_round():
            component = self._context.by_name[self._names[at]]
            self._locked_pages[component.name] += len(rows)
            self._backlog.append((component, rows))

    def _take(self, component: CacheComponent, ended: Sequence[tuple[_Write, WriteDone]]) -> None:
        """Enter the answers to writes of a component."""
        rows, oks = [write.rows for write, _ in ended], list[Mask]()
        events, watch = self._context.tree.events, self._context.watch
        for write, done in ended:
            written = sum(done.ok)
            if written:
                self._bytes.observe(written * component.host.page_bytes)
                self._seconds.observe(done.seconds)
            self._untold_bytes += len(done.ok) * component.host.page_bytes
            self._count_new(write, done)
            self._failures.value += len(done.ok) - written
            ok = np.zeros(len(write.rows), np.bool_)
            ok[: len(done.ok)] = done.ok
            oks.append(ok)
            if events is not None and self.into is DISK:
                events.removed(done.removed, "DISK")
                if watch is not None and component.name == FULL:
                    for told in watch.told(component.pages.table.keys_of(write.rows[ok])):
                        events.stored(told, "DISK")
        if ended and component.name == FULL:
            self._note_prefixes(np.concatenate(rows))
        if ended:  # those that ended last come first, as uses of pages do
            component.pages.written(np.concatenate(rows[::-1]), np.concatenate(oks[::-1]), self.into.bit)

    def _count_new(self, write: _Write, done: WriteDone) -> None:
        """What the store lacked costs budget. Where none is set, half of what the store was measured to write is one:
        reads have the other half."""
        page_bytes, num_pages = write.component.host.page_bytes, len(done.ok)
        num_bytes = done.num_new * page_bytes
        self._budget.spend(num_bytes, num_pages * page_bytes)
        self._written.value += num_bytes
        if self._uses is not None and done.num_new:
            keys = write.component.pages.table.keys_of(write.rows)
            self._uses.write(names_of([*compress(keys, done.ok)]), done.num_new)
        if self._is_measured and done.num_new == num_pages:
            self._measured_bytes, self._measured_s = self._measured_bytes + num_bytes, self._measured_s + done.seconds
            if self._measured_bytes >= _MEASURED_BYTES and self._measured_s:
                self._budget.bytes_per_s = _BUDGET_SHARE * self._measured_bytes / self._measured_s
                self._measured_bytes, self._measured_s = self._measured_bytes / 2, self._measured_s / 2

    def _push(self) -> None:
        """Send what has its turn, so much in a step that this ends soon."""
        if not self._backlog:
            return
        writes = self._next_writes(min(_MAX_SENT_JOBS, self.tier.writes.num_free))
        jobs = [write.job(next(self._tickets)) for write in writes]
        if jobs and self.tier.writes.submit(*jobs):
            self._writes.update({job.ticket: write for job, write in zip(jobs, writes, strict=True)})
            self._drop(sum([len(write.rows) for write in writes]))

    def _next_writes(self, max_jobs: int) -> list[_Write]:
        """The first pages of the backlog as jobs, each of one component."""
        writes = list[_Write]()
        for component, parts in itertools.groupby(self._backlog, itemgetter(0)):
            rows = np.concatenate([rows for _, rows in parts])
            size = max(1, min(_JOB_PAGES, _JOB_BYTES // component.host.page_bytes))
            end = min(len(rows), (max_jobs - len(writes)) * size)
            writes += [_Write(component, rows[start : start + size]) for start in range(0, end, size)]
        return writes

    def _drop(self, num_pages: int) -> None:
        """The first pages of the backlog were sent."""
        while num_pages:
            component, rows = self._backlog.popleft()
            if len(rows) > num_pages:
                self._backlog.appendleft((component, rows[num_pages:]))
            num_pages -= min(num_pages, len(rows))


def persists_of(context: EngineContext) -> tuple[Persist, ...]:
    """One for each store that this engine writes to."""
    remote, disk = context.config.remote, context.config.disk
    disk_rate = 0.0 if disk is None else disk.write_bytes_per_s
    return tuple(
        Persist(
            context,
            store,
            ROUND_SHARE if store is DISK else REMOTE_SHARE,
            WriteBudget(disk_rate if store is DISK else 0.0, context.clock),
        )
        for store in context.stores
        if store is DISK or remote is None or remote.backup == "all"
    )
