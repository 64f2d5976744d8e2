"""The jobs that stores were given for requests that wait: to tell what they hold, and to read it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from hicache.flow.asked import Asked, Find, ReadOfRuns
from hicache.flow.components.base import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel
from hicache.flow.counters import PrefetchCounters
from hicache.flow.located import Question
from hicache.flow.prompt import event_pages_of
from hicache.flow.queues import ReadQueues
from hicache.host.run import HostRun, pages_of
from hicache.storage.process.jobs import FindDone, FindJob, ReadClass, ReadDone, ReadJob, Stalled
from hicache.tiers import DISK, FULL, REMOTE, Component, Store

# Of every reader's first job while a store's rate is unknown: enough to tell it, and soon read from a slow one.
_GAUGE_BYTES = 8 << 20
_MAX_JOB_S = 0.25  # of one job, which ends before anything else can begin
_LEAST_JOBS = 16  # of a prompt that is computed meanwhile
_MAX_IN_FLIGHT = 32  # jobs of a store, for who waits and for who does not: many steps' work for its readers
_LEAST_SHARED_PAGES = 32  # of the disk, for which the remote tier is asked too


class Readers:
    """Owned by the scheduler thread. `reads`: by number, in the order in which they were queued."""

    def __init__(self, context: EngineContext, cost: CostModel, counters: PrefetchCounters) -> None:
        self._context, self._cost, self._counters = context, cost, counters
        self._tickets, self._tiers = itertools.count(), tuple(context.stores.values())
        self._stores = tuple(context.stores)  # in the order in which they are asked
        self.finds, self.reads = dict[int, Find](), dict[int, ReadOfRuns]()
        self.num_pages = dict.fromkeys(context.by_name, 0)  # that are read, by component
        self.queues = ReadQueues(context, cost, self.reads)

    def poll(self) -> list[FindDone | ReadDone | Stalled]:
        """What was answered."""
        return [done for tier in self._tiers for done in tier.reads.poll()]

    def is_busy(self) -> bool:
        """Whether anything is under way that no stalled thread has."""
        return not all(job.is_stalled for job in self.finds.values()) or not all(
            job.is_stalled for job in self.reads.values()
        )

    def runs(self, component: Component) -> Iterable[HostRun]:
        return (run for job in self.reads.values() if job.component.name == component for run in job.runs)

    @property
    def num_finds(self) -> int:
        """Those that somebody waits for, or did."""
        return sum([not find.is_also for find in self.finds.values()])

    def find(self, asked: Asked) -> bool:
        """Ask the next store for the pages that the one before it lacks. False if there is no such store or page, or
        its queue is full."""
        assert asked.has is not None
        if asked.num_stores_asked == len(self._stores) or not asked.has.is_open:
            return False
        store = self._stores[asked.num_stores_asked]
        asked.num_stores_asked += 1
        asked.find = self._ask(asked, store, asked.has.question())
        return asked.find is not None

    def find_also(self, asked: Asked) -> None:
        """Ask the remote tier for the pages of the disk too, if it would read a good part of them in the same time. Not
        if it was asked for pages that the disk lacks."""
        assert asked.has is not None
        if REMOTE not in self._stores or asked.num_stores_asked == len(self._stores):
            return
        question = asked.has.question(known=True)
        num_bytes = len(question.pages) * self._context.full.host.page_bytes
        if len(question.pages) < _LEAST_SHARED_PAGES or not self.queues.is_remote_worth_asking(num_bytes):
            return
        find = self._ask(asked, REMOTE, question)
        if find is not None:
            find.is_also = True

    def _ask(self, asked: Asked, store: Store, question: Question) -> Find | None:
        assert asked.has is not None
        ticket = next(self._tickets)
        queue_class = ReadClass.URGENT_FIND if asked.is_urgent else ReadClass.BACKGROUND_FIND
        if not self._context.stores[store].reads.submit(FindJob(ticket, (), queue_class, question.keys)):
            self._counters.refused.value += 1
            return None
        find = self.finds[ticket] = Find(asked, store, asked.has, question)
        return find

    def next_of(self, asked: Asked, num_times: int) -> tuple[int, Store] | None:
        """Which piece of what is to be read for a request comes next, and the store that gives it sooner. Where that
        has enough to do, `num_times` as much as where a step is short, what comes next of the other."""
        free = self._free_stores(asked, num_times)
        at, skipped = 0, 0  # all of whose stores have enough to do
        while at < len(asked.to_read):
            stores = asked.to_read[at].stores
            if asked.to_read[at].component is self._context.full and asked.lacks_end:
                return None
            if at and (stores == skipped or not stores & free):
                at += 1
            elif asked.share(at):
                store = self.queues.sooner(stores, self._context.full.host.page_bytes, is_urgent=asked.is_urgent)
                if store.bit & free:
                    return at, store
                at, skipped = at + 1, stores
        return None

    def _free_stores(self, asked: Asked, num_times: int) -> int:
        """The stores that have not enough to do, for what is urgent or for what is not, as a set."""
        found = 0
        for store, tier in self._context.stores.items():
            if tier.reads.is_full:
                self._counters.refused.value += 1
            elif self.queues.num_jobs(store, is_urgent=asked.is_urgent) < num_times * _MAX_IN_FLIGHT:
                found |= store.bit
        return found

    def read(self, asked: Asked, at: int, store: Store) -> ReadOfRuns | None:
        """Queue a job of a store for the next pages of a piece, which nobody brings, as far as they have host pages;
        None where the first has none."""
        component, stores, start, _ = piece = asked.to_read[at]
        assert asked.has is not None
        index, prompt = component.index, asked.has.located.prompt
        max_pages = self._job_pages(component, store)
        if asked.handle.overlaps or stores & (
            stores - 1
        ):  # what is computed, or the other brings, ends between two jobs
            max_pages = min(max_pages, -(-asked.num_to_read(component) // _LEAST_JOBS))
        pages = asked.next_pages(at, max_pages)
        new = index.fitting(prompt.new_pages(component.name, pages))
        if asked.handle.overlaps and (num_fit := sum(len(fit.keys) for fit in new)) < len(pages):
            pages = pages[len(pages) - num_fit :]  # where there is no room for all, the last of them
            new = prompt.new_pages(component.name, pages)
        runs = index.reserve(new)
        if not runs:
            return None
        job, ticket = ReadOfRuns(component, store, runs, asked.is_urgent), next(self._tickets)
        self.reads[ticket] = job
        self.num_pages[component.name] += job.num_pages
        self.queues.begin(store)
        for run in runs:
            run.source, run.job, run.wanted = store, job, {asked: None}
            asked.runs[run] = None
        if asked.handle.overlaps:
            asked.to_read[at] = piece._replace(end=pages.start)
        else:
            asked.to_read[at] = piece._replace(start=start + job.num_pages)
        keys, views = tuple([key for run in runs for key in run.keys]), component.host.views(pages_of(runs).tolist())
        queue_class = ReadClass.URGENT_READ if job.is_urgent else ReadClass.BACKGROUND_READ
        read = ReadJob(ticket, 0, keys, views, job.cancelled, asked.until_s, queue_class)
        is_queued = self._context.stores[store].reads.submit(read)
        assert is_queued, "the queue has room"
        return job

    def take(self, done: ReadDone) -> tuple[ReadOfRuns, list[bool]]:
        """A job that was answered, and which of its pages came."""
        job = self.reads.pop(done.ticket)
        self.queues.hear(job.store)
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

    def take_find(self, done: FindDone | Stalled) -> Find:
        """A job that was answered, or of which nobody knows when it will be."""
        find = self.finds[done.ticket]
        find.is_stalled = True
        if isinstance(done, FindDone):
            del self.finds[done.ticket]
        return find

    def note_found(self, find: Find, done: FindDone) -> None:
        """A store has told what it holds of a request."""
        find.has.add(find.store, find.question, done.others)
        self._tell_missed(find, done)

    def _tell_missed(self, find: Find, done: FindDone) -> None:
        """Tell events the first page that the disk lacks, unless the answers of its writes name removed pages."""
        events, tells_removed = self._context.tree.events, self._context.stores[find.store].tells_removed
        if events is None or find.store is not DISK or not done.answered or tells_removed:
            return
        missed = (index for index in find.question.pages if not find.has.stores_of(self._context.full, index))
        events.missed_on_disk(find.has.located.prompt.keys_of(FULL, [*itertools.islice(missed, 1)]))

    def give_back(self, job: ReadOfRuns) -> list[Asked]:
        """Have all requests of a job read its pages from the other store. Returns those for which it lacks some."""
        short = list[Asked]()
        for asked in job.wanted:
            runs = [run for run in job.runs if asked in run.wanted]
            own = [asked.own_pages(job.component, run.first, run.keys) for run in runs]
            asked.leave(runs)
            if asked.read_elsewhere(job.component, [*itertools.chain(*own)], job.store):
                short.append(asked)
        self.cancel([job])
        return short

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
        is_gauge = sum(job.store == store for job in self.reads.values()) < tier.num_readers
        return min(tier.job_pages, max(1, _GAUGE_BYTES // page_bytes)) if is_gauge else tier.job_pages
