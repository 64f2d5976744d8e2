"""Writes of host pages to stores: to the disk, and independently to the remote store.

`pages/writes.py: WriteScheduler` chooses the pages of each round of writes, at most a share of a component's host pool.
These pages are locked on the host until the store has answered. Pages that a store refused stay on the host, and are
sent again when a request that used them ends. If a writer thread stalls, the pages of its job stay locked until the
thread returns, and other pages are written. A raw page, which did not fit its packed size, is never written. Later
pages of its prompt are written: requests can hit these pages while the host has the raw page.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from operator import itemgetter

import numpy as np

from hicache.flow.components.base import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.page_transfer import PageTransfer
from hicache.pages.table import Mask, Rows, Seen, names_of
from hicache.pages.writes import ROUND_SHARE, WriteBudget, WriteMode, WriteScheduler, WriteSource
from hicache.storage.process.jobs import PageRows, Stalled, WriteDone, WriteJob
from hicache.tiers import DISK, FULL, Component, Store

REMOTE_SHARE = 0.25  # share of a host pool that may be locked by writes to the remote store
_STORE_SHARE = 0.25  # share of the budget of a store that one round may write
_MAX_SENT_JOBS = 6  # jobs sent in one poll, so that it ends soon
_JOB_PAGES, _JOB_BYTES = 64, 8 << 20  # the most pages and bytes of one job
# If no budget is set, the budget is half of the measured rate of writes, so that reads have the other half.
_MEASURED_BYTES, _BUDGET_SHARE = 256 << 20, 0.5
_SOURCE, _ROWS = itemgetter(0), itemgetter(1)  # accessors of one part of a round
_POLL_S = 0.05  # time between two attempts to write pages that the budget refused
_ANNOUNCED_SHARE = 0.25  # share of store or host that is written between two announcements of prefixes


_Write = tuple[CacheComponent, Rows]  # the pages of one job


class Writes(PageTransfer):
    """The writes to one store. Owned by the scheduler thread. The store's writer gets only frozen jobs.

    `share`: the share of a component's host pool that one round may lock.
    """

    def __init__(self, context: EngineContext, store: Store, share: float, budget: WriteBudget) -> None:
        self.store = store
        self.tier = context.stores[store]
        self._context = context
        self._share = share
        self._budget = budget
        self._is_measured = store is DISK and not budget.bytes_per_s
        self._measured_bytes = self._measured_s = 0.0
        self._uses = context.page_uses if store is DISK else None
        # Windows and states first: the store evicts them first.
        self._sources = {
            component.name: WriteSource(component.pages, component.host.page_bytes, 1)
            for component in reversed(context.components)
        }
        self._components = {source: context.by_name[name] for name, source in self._sources.items()}
        self._scheduler = WriteScheduler([*self._components], store, budget, self._uses)
        self._backlog = deque[_Write]()  # locked pages that were not sent yet
        self._writes: dict[int, _Write] = {}
        self._stalled = set[int]()  # tickets of jobs whose writer has stalled
        self._tickets = itertools.count()
        self._next_attempt_s = 0.0
        self._times_lost = 0  # losses of the store process that were reported as events
        self._host_bytes = sum([each.host.num_pages * each.host.page_bytes for each in context.components])
        self._store_bytes = 0  # the budget of the store; 0: unknown
        # The keys and rows of the prefixes of written pages, in the order of the prompts, until `announce_prefixes`.
        self._prefix_keys = list[bytes]()
        self._prefix_rows = Seen()
        self._unannounced_bytes = 0
        context.full.pages.table.add_columns(self._prefix_rows)
        self._register(f"{store.prefix}persist")

    def _register(self, name: str) -> None:
        metrics, budget, uses = self._context.metrics, self._budget, self._uses
        self._bytes, self._seconds = metrics.transfer(
            name,
            "bytes of the pages that the store accepted from one write job, before compression",
            "time for which a write job occupied the writer thread; the time of a batch is divided among its jobs",
            operation="write",
            direction=f"host_to_{self.store.name}",
        )
        self._failures = metrics.counter(f"{name}.failed_pages", "pages that the store did not accept")
        help = "bytes of new pages that the store accepted, before compression"
        self._written = metrics.counter(f"{name}.written_bytes", help)
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "queued_pages": ("unlocked host pages that wait to be written to the store", lambda: self.num_waiting)
        }
        if uses is not None:
            gauges |= {
                "budget_bytes_per_second": (
                    "maximum mean rate of writes to the disk; 0: not measured yet",
                    lambda: budget.bytes_per_s,
                ),
                "budget_left_ratio": (
                    "share of the token bucket of writes that is left; the full bucket has 30 seconds of the budget",
                    lambda: budget.level,
                ),
                "unread_pages": (
                    "pages that the store accepted and that no request has read from the store since",
                    lambda: uses.num_written - uses.num_read,
                ),
            }
        for of, (help, read) in gauges.items():
            metrics.gauge(f"{name}.{of}", help, read)

    def arrived(self, component: CacheComponent, rows: Rows) -> None:
        """Queue host pages that the store lacks."""
        self._scheduler.arrived(self._sources[component.name], rows)

    def used(self, keys: Mapping[Component, Sequence[bytes]]) -> None:
        """Record that a request used the prefix with these keys, from any tier. The pages count as used in the store,
        and pages that the store refused before are sent again.

        The order of uses is: windows and states, then full pages from the end of the prompt to its beginning. The store
        evicts in this order.
        """
        self.tier.used([key for of_component in keys.values() for key in of_component])
        # Refused pages are queued again only when no page waits, so that a page that is used often is queued once.
        is_again = not self.num_waiting and not self.tier.writes.refuses()
        for name, source in self._sources.items():
            if self._uses is not None:
                self._uses.use(names_of(keys[name]))
            self._scheduler.used(source, len(keys[name]))
            if is_again:
                self._scheduler.arrived(source, source.pages.held(keys[name]))

    def drain(self) -> None:
        """Write all pages of the host that the store lacks, regardless of the budget, until `resume`."""
        self._scheduler.drain()

    def resume(self) -> None:
        """End a drain."""
        self._scheduler.resume()

    def lacks(self, component: CacheComponent, rows: Rows) -> Mask:
        """Return which pages the host has and the store lacks, except pages of ended sessions."""
        pages = component.pages
        lacking: Mask = pages.has(rows) & (pages.stored[rows] & self.store.bit == 0) & ~pages.order.has_ended[rows]
        return lacking

    def poll(self) -> bool:
        """Apply the answers of the store and send the next pages. Returns whether there was an answer."""
        outcomes = self.tier.writes.poll()
        if self.tier.times_lost != self._times_lost:
            self._times_lost = self.tier.times_lost
            if self._context.tree.events is not None and self.store is DISK:
                self._context.tree.events.disk_lost()
        if outcomes:
            self.is_partly_applied = True
            self._apply(outcomes)
            self.is_partly_applied = False
        scheduler = self._scheduler
        if not scheduler.num_unanswered and (
            not scheduler.is_done
            or (scheduler.mode is WriteMode.COLD and self._context.clock() >= self._next_attempt_s)
        ):
            self._begin_round()
        if self._backlog:
            self._send()
        return bool(outcomes)

    @property
    def num_waiting(self) -> int:
        """The number of pages that wait for a round."""
        return self._scheduler.num_waiting

    def is_busy(self) -> bool:
        return not self._scheduler.is_done or self._scheduler.num_unanswered > 0

    def host_locks(self, component: Component) -> Iterable[Rows]:
        writing = self._context.by_name[component].pages.writing
        return (np.flatnonzero(writing & self.store.bit),)

    def announce_prefixes(self) -> None:
        """Tell the store that the prefixes of written pages were used after these pages, so that the store evicts the
        end of a prompt first."""
        self.tier.used(self._prefix_keys)
        self._prefix_keys = []
        self._prefix_rows.age[:] = 0
        self._unannounced_bytes = 0

    def _begin_round(self) -> None:
        """Lock the pages of the next round. The number of these pages is bounded by shares of the host pool and of the
        store."""
        self._store_bytes = self.tier.stats().budget_bytes
        for source, component in self._components.items():
            num_pages = self._share * component.host.num_pages
            if self._store_bytes:
                num_pages = min(num_pages, _STORE_SHARE * self._store_bytes / source.page_bytes)
            source.max_pages = max(1, int(num_pages))
        for source, parts in itertools.groupby(self._scheduler.next_round(), _SOURCE):
            component, rows = self._components[source], np.concatenate([*map(_ROWS, parts)])
            size = max(1, min(_JOB_PAGES, _JOB_BYTES // source.page_bytes))
            for start in range(0, len(rows), size):
                self._backlog.append((component, rows[start : start + size]))
        self._next_attempt_s = self._context.clock() + _POLL_S

    def _send(self) -> None:
        """Send the first pages of the backlog, at most `_MAX_SENT_JOBS` jobs."""
        first = [*islice(self._backlog, min(_MAX_SENT_JOBS, self.tier.writes.num_free))]
        for component, writes in itertools.groupby(first, _SOURCE):
            by_ticket = dict(zip(self._tickets, writes, strict=False))
            all_rows = np.concatenate([rows for _, rows in by_ticket.values()])
            keys, pool_pages = component.pages.table.keys_of(all_rows), component.pages.pool_page[all_rows].tolist()
            jobs, memory, start = list[WriteJob](), component.host.memory, 0
            for ticket, (_, rows) in by_ticket.items():
                end = start + len(rows)
                jobs.append(WriteJob(ticket, tuple(keys[start:end]), PageRows(memory, pool_pages[start:end])))
                start = end
            if not self.tier.writes.submit(*jobs):
                return
            self._writes |= by_ticket
            for _ in jobs:
                self._backlog.popleft()

    def _apply(self, outcomes: Iterable[WriteDone | Stalled]) -> None:
        ended, num_answered = dict[Component, list[tuple[Rows, WriteDone]]](), 0
        for done in outcomes:
            component, rows = self._writes[done.ticket]
            if done.ticket not in self._stalled:
                num_answered += len(rows)
            if isinstance(done, Stalled):
                self._stalled.add(done.ticket)
                continue
            self._stalled.discard(done.ticket)
            del self._writes[done.ticket]
            ended.setdefault(component.name, []).append((rows, done))
        for component in self._context.components:
            if component.name in ended:
                self._end(component, ended[component.name])
        self._scheduler.answered(num_answered)
        if not self._scheduler.num_unanswered and self._prefix_keys:
            store_bytes = min(self._host_bytes, self._store_bytes or self._host_bytes)
            if self._unannounced_bytes >= _ANNOUNCED_SHARE * store_bytes:
                self.announce_prefixes()

    def _end(self, component: CacheComponent, ended: Sequence[tuple[Rows, WriteDone]]) -> None:
        """Apply the answers to writes of a component."""
        pages, table, page_bytes = component.pages, component.pages.table, component.host.page_bytes
        written, oks, new = list[Rows](), list[Mask](), list[Rows]()
        job_bytes, job_seconds = list[int](), list[float]()
        num_new, measured_pages, measured_s = 0, 0, 0.0
        for of_job, done in ended:
            ok = np.array(done.ok, np.bool_)
            written.append(of_job)
            oks.append(ok)
            if num_written := int(np.count_nonzero(ok)):
                job_bytes.append(num_written * page_bytes)
                job_seconds.append(done.seconds)
            self._failures.value += len(ok) - num_written
            if done.num_new:
                new.append(of_job[ok])
                num_new += done.num_new
            if done.num_new == len(ok):
                measured_pages += done.num_new
                measured_s += done.seconds
        self._bytes.observe(*job_bytes)
        self._seconds.observe(*job_seconds)
        if self._is_measured:
            self._measure(measured_pages * page_bytes, measured_s)
        if self._uses is not None and new:
            self._uses.write(table.name[np.concatenate(new)], num_new)
        rows = np.concatenate(written)
        if self.store is DISK and self._context.tree.events is not None:
            for of_job, done in ended:
                self._publish(component, of_job[np.array(done.ok, np.bool_)], done.removed)
        # The budget is charged only for the pages that the store lacked.
        self._budget.spend(num_new * page_bytes, len(rows) * page_bytes)
        self._written.value += num_new * page_bytes
        self._unannounced_bytes += len(rows) * page_bytes
        if component.name == FULL:  # keys are read while the rows are locked; later, rows may belong to other pages
            self._prefix_keys += table.keys_of(table.with_paths(rows, self._prefix_rows))
        # The latest writes first, as in the order of uses: the end of a prompt is evicted first.
        pages.written(np.concatenate(written[::-1]), np.concatenate(oks[::-1]), self.store.bit)

    def _measure(self, num_bytes: int, seconds: float) -> None:
        """Update the rate of writes. If no budget is set, the budget is a share of this rate."""
        self._measured_bytes += num_bytes
        self._measured_s += seconds
        if self._measured_bytes >= _MEASURED_BYTES and self._measured_s:
            self._budget.bytes_per_s = _BUDGET_SHARE * self._measured_bytes / self._measured_s
            self._measured_bytes /= 2
            self._measured_s /= 2

    def _publish(self, component: CacheComponent, taken: Rows, removed: Sequence[bytes]) -> None:
        """Publish events of the disk: the pages that the disk removed, and the full pages that the disk stored."""
        events, watch = self._context.tree.events, self._context.watch
        assert events is not None
        events.removed(removed, "DISK")
        if watch is not None and component.name == FULL:
            for pages in watch.announced(component.pages.table.keys_of(taken)):
                events.stored(pages, "DISK")


def writes_of(context: EngineContext) -> tuple[Writes, ...]:
    """Return a `Writes` for each store to which this engine writes."""
    remote, disk = context.config.remote, context.config.disk
    disk_rate = 0.0 if disk is None else disk.write_bytes_per_s
    return tuple(
        Writes(
            context,
            store,
            ROUND_SHARE if store is DISK else REMOTE_SHARE,
            WriteBudget(disk_rate if store is DISK else 0.0, context.clock),
        )
        for store in context.stores
        if store is DISK or remote is None or remote.backup == "all"
    )


def num_lacking(component: CacheComponent, rows: Rows, writes: Sequence[Writes]) -> int:
    """Return the number of `rows` whose pages the host has and at least one store lacks."""
    return int(np.count_nonzero(np.any([each.lacks(component, rows) for each in writes], axis=0)))


def flush_host(context: EngineContext, writes: Sequence[Writes], settle: Callable[[], None]) -> int:
    """Write all pages of the host that stores lack, and retry as long as a store takes some of them. Returns the number
    of pages that a store still lacks. `settle`: drains the writes until all transfers have ended."""
    num_before = math.inf
    while True:
        settle()
        num_left = sum([num_lacking(at, at.pages.rows_held(), writes) for at in context.components if writes])
        if not num_left or num_left >= num_before:
            return num_left
        num_before = num_left
