"""Stores to host, the bytes: one read brings what a prompt's prefix lacks on the host.

A read asks the stores what they hold, the disk and then the remote tier for the rest, chooses the longest prefix that
all components can use and that the host has capacity for, reserves host pages job by job, some in each step, and
publishes each batch when it has come. What was published stays, however the read ends. Pages that were given to a
reader are freed only when the reader is done: a stalled one returns them later.

    start -> (find, in each store) -> fetch: planned -> queue: host pages -> (read) -> apply: published -> end
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TypeAlias

from hicache.flow.components import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel
from hicache.flow.located import StorePrefix
from hicache.flow.prompt import told_of
from hicache.flow.reading import Batch, PlannedJob, PrefixRead
from hicache.host import HostRun, pages_of
from hicache.metrics import Histogram
from hicache.storage.process.jobs import FIND, FindDone, FindJob, ReadClass, ReadDone, ReadJob, Stalled
from hicache.tiers import DISK, FULL, REMOTE, Component, Store

Answer: TypeAlias = FindDone | ReadDone | Stalled
# Of every reader's first job while a store's rate is unknown: enough to tell it, and soon read from a slow one.
_GAUGE_BYTES = 8 << 20
_MAX_JOB_S = 0.25  # of one job, which ends before anything else can begin
_MAX_QUEUED_JOBS = 16  # of one step: each takes 0.1 ms of the scheduler's thread, and readers far longer
_METRICS = {DISK: "prefetch", REMOTE: "remote_prefetch"}


class PrefixReads:
    """The reads in flight. Owned by the scheduler thread."""

    def __init__(self, context: EngineContext, cost: CostModel) -> None:
        self._context, self._cost = context, cost
        self._tiers = tuple(context.stores.items())
        self._ids = itertools.count()
        self._reads: dict[int, PrefixRead] = {}
        # By component: see `pages_in_flight`, and those of planned jobs.
        self._num_pages, self._planned = dict.fromkeys(context.by_name, 0), dict.fromkeys(context.by_name, 0)
        self.to_queue: dict[PrefixRead, None] = {}  # those with planned jobs, and those that were stopped
        # Of reads that ended, by number and batch: what a stalled thread has. A find has no pages.
        self._left: dict[tuple[int, int], Batch | None] = {}
        count, moved = context.metrics.counter, "bytes of verified pages that a job read from the store to the host"
        self._bytes, self._seconds = dict[Store, Histogram](), dict[Store, Histogram]()
        for store in context.stores:
            labels = {"movement": "read", "direction": f"{store.name.lower()}_to_host"}
            both = context.metrics.movement(_METRICS[store], moved, "time that job took a reader", **labels)
            self._bytes[store], self._seconds[store] = both
        self._lost = count("prefetch.lost_pages", "pages a store announced and could not give back verified")
        self._landed = count("prefetch.landed_tokens", "tokens that prefetches added to the host tier")
        self._refused = count("prefetch.refused_jobs", "jobs not started because the readers' queue was full")
        context.metrics.gauge("prefetch.queued_reads", "prefixes being read", lambda: len(self._reads))

    def __len__(self) -> int:
        return len(self._reads)

    def in_flight(self) -> list[PrefixRead]:
        """In the order in which they started."""
        return list(self._reads.values())

    def pages_in_flight(self, component: Component) -> int:
        """Host pages of a component that are reserved for reads."""
        return self._num_pages[component]

    def pages_claimed(self, component: Component) -> int:
        """These, and those that are to be reserved."""
        return self._num_pages[component] + self._planned[component]

    def start(self, prefix: StorePrefix, *, is_urgent: bool, until_s: float = math.inf) -> PrefixRead | None:
        """Ask the first store what it holds of `prefix`; None where their readers' queue is full.

        `is_urgent`: a request waits for it. Nothing is read after `until_s` of the tier's clock.
        """
        located, locked = prefix.located, dict[Component, list[HostRun]]()
        for component in self._context.components:
            pages = range(component.first_required(prefix.num_usable), prefix.num_usable)
            if component.name == FULL:
                pages = range(located.device_end, located.host_end)
            locked[component.name] = [part.run for part in located.parts(component, pages)]
        ends = (prefix.start, prefix.num_pages, prefix.num_pages)
        read = PrefixRead(next(self._ids), prefix, locked, is_urgent, until_s, *ends, prefix.nothing)
        with ExitStack() as undo:
            for name, runs in locked.items():
                index = self._context.by_name[name].index
                index.lock(runs)
                undo.callback(index.unlock, runs)
            if not self._ask_next(read):
                self._refused.value += 1
                return None
            undo.pop_all()
        self._reads[read.number] = read
        return read

    def host_locks(self, component: Component) -> Iterator[HostRun]:
        """Each lock on published pages."""
        for read in self._reads.values():
            yield from read.locked[component]

    def stop(self, read: PrefixRead) -> None:
        """Read no further. What readers hold comes back through `apply`, and the read through `queue`."""
        if read.cancelled.is_set():
            return
        read.cancelled.set()
        self._drop_planned(read)
        self.to_queue[read] = None
        for _, tier in self._tiers:
            tier.reads.tell_cancelled()

    def poll(self) -> Iterator[tuple[PrefixRead, Answer]]:
        """What the readers have answered, each to be applied before the next is taken. Answers for reads that ended, of
        stalled threads, are dealt with here."""
        for _, tier in self._tiers:
            for done in tier.reads.poll():
                late = (done.ticket, done.batch)
                if late in self._left:
                    self._free(self._left.pop(late))
                else:
                    yield self._reads[done.ticket], done

    def apply(self, read: PrefixRead, done: Answer) -> None:
        """Enter an answer. After that of the last find, `fetch` is to be called; where the read is done, `end`."""
        if isinstance(done, Stalled):
            read.stalled.add(done.batch)
            if done.batch > FIND or not self._note_answer(read, done):
                self.stop(read)
            return
        read.outstanding -= 1
        read.stalled.discard(done.batch)
        if isinstance(done, FindDone):
            self._note_answer(read, done)
            return
        batch = read.batches[done.batch]
        self._count_other(read, batch.component, batch.store, len(batch.indices))
        num_ok, num_bytes = sum(done.ok), sum(done.ok) * batch.component.host.page_bytes
        self._lost.value += done.asked - num_ok
        if num_ok:
            self._bytes[batch.store].observe(num_bytes)
            self._seconds[batch.store].observe(done.seconds)
        self._cost.observe_read(num_bytes, done.seconds, batch.store)
        batch.ok = done.ok
        self._publish(batch)
        self._advance(read)

    def fetch(self, read: PrefixRead, max_pages: int) -> None:
        """Plan the jobs for the longest prefix that all components can use: of at most `max_pages` full pages, and no
        more than there is room for beside what they follow, which stays."""
        assert read.found is not None
        if read.cancelled.is_set():
            return
        prefix, found, full = read.prefix, read.found, self._context.full
        new = prefix.prompt.new_pages(FULL, prefix.missing[: len(found.pages)])
        followed = [run for pages in new if pages.before is not None and (run := full.index.get(pages.before))]
        full.index.lock(followed)
        read.locked[FULL] += followed
        num_pages = max(0, min(len(found.pages), max_pages, self._capacity(full)))
        if num_pages < len(found.pages):
            read.end = prefix.usable_end(found, num_pages)
            read.is_short = read.end < read.found_end
        reads, needed = prefix.to_read(read.end, found), Counter[CacheComponent]()
        for component, _, indices in reads:
            needed[component] += len(indices)
        if any(num_pages > self._capacity(component) for component, num_pages in needed.items()):
            read.failed = read.is_short = True
            return
        for component, store, indices in reads:
            self._planned[component.name] += len(indices)
            if component.name != FULL:
                num_bytes = len(indices) * component.host.page_bytes
                read.other_bytes[store] = read.other_bytes.get(store, 0) + num_bytes
            self.to_queue[read] = None
            for job in self._jobs(store, len(indices), component.host.page_bytes):
                read.planned.append(PlannedJob(component, store, indices[job]))

    def queue(self) -> list[PrefixRead]:
        """Reserve host pages for planned jobs and queue these, so many that a step stays short: those of reads that
        requests wait for first. Returns the reads that it was, or that were stopped, of which some may be done."""
        touched, num_jobs = list[PrefixRead](), 0
        for read in sorted(self.to_queue, key=lambda read: not read.is_urgent):
            if num_jobs < _MAX_QUEUED_JOBS or not read.planned:
                touched.append(read)
            while read.planned and num_jobs < _MAX_QUEUED_JOBS:
                self._queue(read, read.planned.popleft())
                num_jobs += 1
            if not read.planned:
                del self.to_queue[read]
        return touched

    def end(self, read: PrefixRead) -> None:
        """All readers are done, but stalled ones: give back what did not come and what they do not have."""
        read.cancelled.set()
        self.to_queue.pop(read, None)
        del self._reads[read.number]
        for index, batch in enumerate(read.batches):
            if index in read.stalled:
                self._left[read.number, index] = batch
            else:
                self._free(batch)
        self._left.update({(read.number, batch): None for batch in read.stalled if batch <= FIND})
        for name, runs in read.locked.items():
            self._context.by_name[name].index.unlock(runs)

    def _ask_next(self, read: PrefixRead) -> bool:
        """Ask the next store for what those before it lack; False where its readers' queue is full."""
        keys, others = read.partial.missing(read.prefix)
        queue_class = ReadClass.URGENT_FIND if read.is_urgent else ReadClass.BACKGROUND_FIND
        _, tier = self._tiers[read.asked]
        if not tier.reads.submit(FindJob(read.number, keys, queue_class, others, FIND - read.asked)):
            return False
        read.asked += 1
        read.outstanding += 1
        return True

    def _note_answer(self, read: PrefixRead, done: FindDone | Stalled) -> bool:
        """A store has told what it holds, or is stalled, and the next is asked. False: it is stalled, and nothing is
        there to go on with."""
        if done.batch != FIND - read.asked + 1 or read.found is not None:
            return True  # a late answer, which others have replaced
        if isinstance(done, FindDone):
            (store, tier), events = self._tiers[read.asked - 1], self._context.tree.events
            if events is not None and store is DISK and done.answered and not tier.tells_removed:
                events.missed_on_disk(read.prefix.page_keys[done.num_pages :][:1])
            read.partial = read.partial.with_answer(store, done.num_pages, done.others)
        if read.asked < len(self._tiers) and read.is_live and any(read.partial.missing(read.prefix)):
            if self._ask_next(read):
                return True
            self._refused.value += 1
        elif isinstance(done, Stalled) and read.partial == read.prefix.nothing:
            return False
        read.found = read.partial
        read.end = read.found_end = read.prefix.usable_end(read.found, len(read.found.pages))
        return True

    def _capacity(self, component: CacheComponent) -> int:
        """Host pages that nobody has, nor planned to."""
        return component.index.capacity - self._planned[component.name]

    def _drop_planned(self, read: PrefixRead) -> None:
        for component, store, indices in read.planned:
            self._planned[component.name] -= len(indices)
            self._count_other(read, component, store, len(indices))
        read.planned.clear()

    @staticmethod
    def _count_other(read: PrefixRead, component: CacheComponent, store: Store, num_pages: int) -> None:
        """So many pages of a window or state have landed, or will not."""
        if component.name != FULL:
            read.other_bytes[store] -= num_pages * component.host.page_bytes

    def _queue(self, read: PrefixRead, job: PlannedJob) -> None:
        """Reserve host pages for a job and queue it. Where others took them meanwhile, or the readers' queue is full,
        the read ends with what was queued before."""
        component, store, indices = job
        self._planned[component.name] -= len(indices)
        runs = component.index.reserve(read.prefix.prompt.new_pages(component.name, indices))
        if runs is not None:
            for run in runs:
                run.source = store
            batch = Batch(store, component, indices, runs, pages_of(runs))
            component.host.begin_read(batch.pages)
            self._num_pages[component.name] += len(indices)
            read.batches.append(batch)
            if self._submit_job(read, batch):
                return
            batch.ok = ()
        self._count_other(read, component, store, len(indices))
        self._drop_planned(read)
        read.is_short = True

    def _submit_job(self, read: PrefixRead, batch: Batch) -> bool:
        """Queue the last of its batches."""
        queue_class = ReadClass.URGENT_READ if read.is_urgent else ReadClass.BACKGROUND_READ
        keys, views = [key for run in batch.runs for key in run.keys], batch.component.host.views(batch.pages)
        number = len(read.batches) - 1
        job = ReadJob(read.number, number, tuple(keys), views, read.cancelled, read.until_s, queue_class)
        if not self._context.stores[batch.store].reads.submit(job):
            self._refused.value += 1
            read.is_short = True
            return False
        read.outstanding += 1
        return True

    def _jobs(self, store: Store, num_pages: int, page_bytes: int) -> Iterator[slice]:
        """The pages of each job, of `num_pages`."""
        tier = self._context.stores[store]
        job_s = self._cost.read_s(tier.job_pages * page_bytes, 1, store)
        start, num_gauges = 0, tier.num_readers if job_s is None else 0
        gauge_pages = min(tier.job_pages, max(1, _GAUGE_BYTES // page_bytes))
        job_pages = max(1, int(tier.job_pages * min(1.0, _MAX_JOB_S / (job_s or _MAX_JOB_S))))
        while start < num_pages:
            end = min(num_pages, start + (gauge_pages if num_gauges > 0 else job_pages))
            yield slice(start, end)
            start, num_gauges = end, num_gauges - 1

    def _advance(self, read: PrefixRead) -> None:
        """How far the full pages have come without a gap. What follows a gap is of no use to the request."""
        while not read.failed and read.next_batch < len(read.batches):
            batch = read.batches[read.next_batch]
            if batch.component.name != FULL or batch.ok is None:
                return
            num_good = next((i for i, verified in enumerate(batch.ok) if not verified), len(batch.ok))
            read.next_batch += 1
            if num_good == len(batch.indices):
                following = read.prefix.num_missing(0, batch.indices[-1] + 1)
                read.landed_end = min(read.prefix.end_of(following), read.end)
                continue
            read.landed_end = batch.indices[num_good]
            read.failed = True
            self.stop(read)

    def _publish(self, batch: Batch) -> None:
        """The pages of a batch that came are there from now on."""
        component, start, events = batch.component, 0, self._context.tree.events
        component.host.end_read(batch.pages)
        self._num_pages[component.name] -= len(batch.pages)
        ok = [*(batch.ok or ())] + [False] * (len(batch.pages) - len(batch.ok or ()))
        runs, batch.runs = batch.runs, []
        for run in runs:
            end = start + len(run.keys)
            came, start = ok[start:end], end
            for published in component.index.publish(run, came):
                published.stored |= batch.store
                if component.name == FULL:
                    self._landed.value += len(published.keys) * self._context.tree.page_size
                    if events is not None:
                        events.landed(told_of(published), from_disk=batch.store is DISK)

    def _free(self, batch: Batch | None) -> None:
        """Give back what was reserved for a batch that did not come."""
        if batch is not None and batch.runs:
            batch.component.host.end_read(batch.pages)
            self._num_pages[batch.component.name] -= len(batch.pages)
            for run in reversed(batch.runs):
                batch.component.index.abandon(run)
            batch.runs = []
