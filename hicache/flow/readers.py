"""The jobs that stores were given for requests that wait: to tell what they hold, and to read it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from hicache.flow.asked import Asked, Find, ReadOfRuns
from hicache.flow.components.base import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel
from hicache.flow.counters import PrefetchCounters
from hicache.flow.prompt import event_pages_of
from hicache.host.run import HostRun, pages_of
from hicache.storage.process.jobs import FindDone, FindJob, ReadClass, ReadDone, ReadJob, Stalled
from hicache.tiers import DISK, Component, Store

# Of every reader's first job while a store's rate is unknown: enough to tell it, and soon read from a slow one.
_GAUGE_BYTES = 8 << 20
_MAX_JOB_S = 0.25  # of one job, which ends before anything else can begin
_LEAST_JOBS = 16  # of a prompt that is computed meanwhile
_MAX_IN_FLIGHT = 32  # jobs of a store, for who waits and for who does not: many steps' work for its readers


class Readers:
    """Owned by the scheduler thread. `reads`: by number, in the order in which they were queued."""

    def __init__(self, context: EngineContext, cost: CostModel, counters: PrefetchCounters) -> None:
        self._context, self._cost, self._counters = context, cost, counters
        self._tiers, self._tickets = tuple(context.stores.items()), itertools.count()
        self.finds, self.reads = dict[int, Find](), dict[int, ReadOfRuns]()
        self.num_pages = dict.fromkeys(context.by_name, 0)  # that are read, by component

    def poll(self) -> list[FindDone | ReadDone | Stalled]:
        """What was answered."""
        return [done for _, tier in self._tiers for done in tier.reads.poll()]

    def is_busy(self) -> bool:
        """Whether anything is under way that no stalled thread has."""
        return not all(job.is_stalled for job in self.finds.values()) or not all(
            job.is_stalled for job in self.reads.values()
        )

    def runs(self, component: Component) -> Iterable[HostRun]:
        return (run for job in self.reads.values() if job.component.name == component for run in job.runs)

    def find(self, asked: Asked, number: int) -> bool:
        """Ask a store, by its number, for what those before it lack; False where there is none, or nothing to ask for,
        or its queue is full."""
        assert asked.has is not None
        if number == len(self._tiers) or not asked.has.is_open:
            return False
        keys, others = asked.has.keys_to_ask()
        store, tier = self._tiers[number]
        queue_class = ReadClass.URGENT_FIND if asked.is_urgent else ReadClass.BACKGROUND_FIND
        ticket = next(self._tickets)
        if not tier.reads.submit(FindJob(ticket, keys, queue_class, others)):
            self._counters.refused.value += 1
            return False
        asked.find = self.finds[ticket] = Find(asked, store, number, keys, others)
        return True

    def have_enough(self, asked: Asked, num_times: int) -> bool:
        """Whether the store that has the next pages of a request has enough to do, for what is urgent or for what is
        not: `num_times` as much as where a step is short."""
        store, is_urgent = asked.to_read[0].store, asked.is_urgent
        assert store is not None
        if self._context.stores[store].reads.is_full:
            self._counters.refused.value += 1
            return True
        jobs = (job for job in self.reads.values() if job.store is store and job.is_urgent == is_urgent)
        return sum(not job.is_stalled for job in jobs) >= num_times * _MAX_IN_FLIGHT

    def read(self, asked: Asked) -> ReadOfRuns | None:
        """Queue a job for the next pages of a request, which nobody brings, as far as they have host pages; None where
        the first has none."""
        component, store, start, _ = piece = asked.to_read[0]
        assert asked.has is not None and store is not None
        index, prompt = component.index, asked.has.located.prompt
        max_pages = self._job_pages(component, store)
        if asked.handle.joins:  # what is computed meanwhile, or meets it, ends between two jobs
            max_pages = min(max_pages, -(-(piece.end - start) // _LEAST_JOBS))
        pages = asked.next_pages(max_pages)
        new = index.fitting(prompt.new_pages(component.name, pages))
        if asked.handle.joins and (num_fit := sum(len(fit.keys) for fit in new)) < len(pages):
            pages = pages[len(pages) - num_fit :]  # where there is no room for all, the last of them
            new = prompt.new_pages(component.name, pages)
        runs = index.reserve(new)
        if not runs:
            return None
        job, ticket = ReadOfRuns(component, store, runs, asked.is_urgent), next(self._tickets)
        self.reads[ticket] = job
        self.num_pages[component.name] += job.num_pages
        for run in runs:
            run.source, run.job, run.wanted = store, job, {asked: None}
            asked.runs[run] = None
        if asked.handle.joins:
            asked.to_read[0] = piece._replace(end=pages.start)
        else:
            asked.to_read[0] = piece._replace(start=start + job.num_pages)
        keys, views = tuple([key for run in runs for key in run.keys]), component.host.views(pages_of(runs))
        queue_class = ReadClass.URGENT_READ if job.is_urgent else ReadClass.BACKGROUND_READ
        read = ReadJob(ticket, 0, keys, views, job.cancelled, asked.until_s, queue_class)
        is_queued = self._context.stores[store].reads.submit(read)
        assert is_queued, "the queue has room"
        return job

    def take(self, done: ReadDone) -> tuple[ReadOfRuns, list[bool]]:
        """A job that was answered, and which of its pages came."""
        job = self.reads.pop(done.ticket)
        self.num_pages[job.component.name] -= job.num_pages
        num_ok, num_bytes = sum(done.ok), sum(done.ok) * job.component.host.page_bytes
        self._counters.lost.value += done.asked - num_ok
        if num_ok:
            self._counters.count_read(job.store, num_bytes, done.seconds)
        self._cost.observe_read(num_bytes, done.seconds, job.store)
        return job, [*done.ok, *itertools.repeat(False, job.num_pages - len(done.ok))]

    def count_landed(self, store: Store, published: Sequence[HostRun]) -> int:
        """Full pages came from `store`: so many."""
        num_pages, events = sum([len(run.keys) for run in published]), self._context.tree.events
        self._counters.landed.value += num_pages * self._context.tree.page_size
        if events is not None:
            for run in published:
                events.landed(event_pages_of(run), from_disk=store is DISK)
        return num_pages

    def tell_missed(self, find: Find, done: FindDone) -> None:
        """Events are told of the first page that the disk lacks, where it does not tell itself what it removes."""
        events, tells_removed = self._context.tree.events, self._context.stores[find.store].tells_removed
        if events is not None and find.store is DISK and done.answered and not tells_removed:
            events.missed_on_disk(find.keys[done.num_pages :][:1])

    def cancel(self, jobs: Iterable[ReadOfRuns]) -> None:
        """Nobody wants what these bring."""
        stores = set[Store]()
        for job in jobs:
            job.cancelled.set()
            stores.add(job.store)
        for store in stores:
            self._context.stores[store].reads.tell_cancelled()

    def _job_pages(self, component: CacheComponent, store: Store) -> int:
        """Of one job at most: what a reader takes `_MAX_JOB_S` for, and little of a store whose rate is unknown."""
        tier, page_bytes = self._context.stores[store], component.host.page_bytes
        job_s = self._cost.read_s(tier.job_pages * page_bytes, 1, store)
        if job_s is not None:
            return tier.job_pages if job_s <= _MAX_JOB_S else max(1, int(tier.job_pages * _MAX_JOB_S / job_s))
        is_gauge = sum(job.store is store for job in self.reads.values()) < tier.num_readers
        return min(tier.job_pages, max(1, _GAUGE_BYTES // page_bytes)) if is_gauge else tier.job_pages
