"""Stores to host, the bytes: one read brings what a prompt's prefix lacks on the host.

A read asks the stores what they hold, the disk and then the remote tier for the rest, chooses the longest prefix that
all components can use, reserves host pages, and publishes each batch when it has come. What was published stays,
however the read ends. Pages that were given to a reader are freed only when the reader is done: a stalled one returns
them later.

    start -> (find, in each store) -> fetch: host pages -> (read, batch by batch) -> apply: published -> end
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby
from typing import TypeAlias

import torch

from hicache.flow.components import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel
from hicache.flow.read_state import Batch, PrefixRead
from hicache.flow.store_prefix import Found, StorePrefix
from hicache.flow.told import told_of
from hicache.host import HostRun, held_by, kinds_of, pages_of, rest_keys
from hicache.metrics import Histogram
from hicache.storage.process.jobs import FIND, FindDone, FindJob, ReadClass, ReadDone, ReadJob, Stalled
from hicache.tiers import DISK, FULL, REMOTE, Component, Store

Answer: TypeAlias = FindDone | ReadDone | Stalled
# Of every reader's first job while a store's rate is unknown: enough to tell it, and soon read from a slow one.
_GAUGE_BYTES = 8 << 20
_MAX_JOB_S = 0.25  # of one job, which ends before anything else can begin
_METRICS = {DISK: "prefetch", REMOTE: "remote_prefetch"}


class PrefixReads:
    """The reads in flight. Owned by the scheduler thread."""

    def __init__(self, context: EngineContext, cost: CostModel) -> None:
        self._context, self._cost = context, cost
        self._tiers = tuple(context.stores.items())
        self._ids = itertools.count()
        self._reads: dict[int, PrefixRead] = {}
        self._num_pages = dict.fromkeys(context.by_name, 0)  # by component, see `pages_in_flight`
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

    def start(self, prefix: StorePrefix, *, is_urgent: bool, until_s: float = math.inf) -> PrefixRead | None:
        """Ask the first store what it holds of `prefix`; None where their readers' queue is full.

        `is_urgent`: a request waits for it. Nothing is read after `until_s` of the tier's clock.
        """
        located, locked = prefix.located, dict[Component, list[HostRun]]()
        for component in self._context.components:
            first = component.first_required(prefix.num_usable)
            locked[component.name] = located.runs(component, range(first, prefix.num_usable))
        locked[FULL] = located.runs(self._context.full, range(located.device_end, located.host_end))
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
        """Read no further. What readers hold comes back through `apply`."""
        read.cancelled.set()
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
        if batch.component.name != FULL and batch.first_ok is None:
            read.other_bytes[batch.store] -= len(batch.indices) * batch.component.host.page_bytes
        num_ok = sum(done.ok)
        num_bytes = num_ok * batch.component.host.page_bytes
        self._lost.value += done.asked - num_ok
        if num_ok:
            self._bytes[batch.store].observe(num_bytes)
            self._seconds[batch.store].observe(done.seconds)
        self._cost.observe_read(num_bytes, done.seconds, batch.store)
        if batch.first_ok is None and batch.component.packing is not None and self._read_rest(read, done):
            return
        batch.ok = done.ok if batch.first_ok is None else batch.whole(done.ok)
        self._publish(batch)
        self._advance(read)

    def fetch(self, read: PrefixRead, max_pages: int) -> None:
        """Take host pages for the longest prefix that all components can use, at most `max_pages` full ones, and queue
        the reads."""
        assert read.found is not None
        if read.cancelled.is_set():
            return
        prefix, components, found = read.prefix, self._context.by_name, read.found
        # Second pages of raw ones may have taken more than others were to leave.
        num_pages = max(0, min(len(found.pages), max_pages, self._context.full.index.capacity))
        if num_pages < len(found.pages):
            read.end = prefix.usable_end(found, num_pages)
            read.is_short = read.end < read.found_end
        reads = prefix.to_read(read.end, found)
        if any(len(indices) > components[name].index.capacity for name, indices in reads.items()):
            read.failed = read.is_short = True
            return
        for name, indices in reads.items():
            if read.is_live:
                self._queue(read, found, components[name], indices)

    def end(self, read: PrefixRead) -> None:
        """All readers are done, but stalled ones: give back what did not come and what they do not have."""
        read.cancelled.set()
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
            store, _ = self._tiers[read.asked - 1]
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

    def _queue(self, read: PrefixRead, found: Found, component: CacheComponent, indices: list[int]) -> None:
        """Reserve host pages and queue reads of them, those of one store after those of the other."""
        start, prompt = 0, read.prefix.prompt
        for store, group in groupby(indices, lambda index: read.prefix.store_of(found, component, index)):
            end = start + len(list(group))
            for part in self._parts(store, start, end, component.host.page_bytes):
                runs = component.index.reserve(prompt.new_pages(component.name, indices[part]))
                if runs is None:  # what it has reserved keeps others' pages from leaving
                    read.failed = read.is_short = True
                    self.stop(read)
                    return
                for run in runs:
                    run.source = store
                component.host.begin_read(pages_of(runs))
                self._num_pages[component.name] += len(indices[part])
                read.batches.append(Batch(store, component, indices[part], runs))
                if not self._submit(read, store, len(read.batches) - 1):
                    return
            start = end

    def _submit(self, read: PrefixRead, store: Store, number: int) -> bool:
        """Queue one job, of batch `number`; False where the readers' queue is full."""
        queue_class, batch = (
            ReadClass.URGENT_READ if read.is_urgent else ReadClass.BACKGROUND_READ,
            read.batches[number],
        )
        keys, views = (
            tuple(key for run in batch.runs for key in run.keys),
            batch.component.host.views(pages_of(batch.runs)),
        )
        job = ReadJob(read.number, number, keys, views, read.cancelled, read.until_s, queue_class)
        if not self._context.stores[store].reads.submit(job):
            self._refused.value += 1
            read.is_short, batch.ok = True, ()
            return False
        read.outstanding += 1
        if batch.component.name != FULL:
            num_bytes = len(batch.indices) * batch.component.host.page_bytes
            read.other_bytes[store] = read.other_bytes.get(store, 0) + num_bytes
        return True

    def _read_rest(self, read: PrefixRead, done: ReadDone) -> bool:
        """A batch of a component with packed pages has come: read the second parts of those of its pages that say that
        they are raw, by a job of the same number. False: there are none, or none can be had."""
        batch = read.batches[done.batch]
        host, index = batch.component.host, batch.component.index
        wanted = batch.take_first(done.ok, kinds_of(host, pages_of(batch.runs).tolist()))
        for run, keys in wanted.items():
            if not read.is_live or not index.reserve_rest(run, keys):
                read.is_short = True
                batch.lack(keys)
        places = torch.tensor([page for run in wanted for page in run.rest.values()], dtype=torch.int64)
        if not len(places):
            return False
        host.begin_read(places)
        self._num_pages[batch.component.name] += len(places)
        names = tuple(rest_keys(key for run in wanted for key in run.rest))
        queue_class = ReadClass.URGENT_READ if read.is_urgent else ReadClass.BACKGROUND_READ
        job = ReadJob(read.number, done.batch, names, host.views(places), read.cancelled, read.until_s, queue_class)
        if not self._context.stores[batch.store].reads.submit(job):
            self._refused.value += 1
            read.is_short = True
            batch.lack([key for run in wanted for key in run.rest])
            return False
        read.outstanding += 1
        return True

    def _parts(self, store: Store, start: int, end: int, page_bytes: int) -> Iterator[slice]:
        """The pages of each job, of [start, end)."""
        tier = self._context.stores[store]
        job_s = self._cost.read_s(tier.job_pages * page_bytes, 1, store)
        num_gauges = tier.num_readers if job_s is None else 0
        gauge_pages = min(tier.job_pages, max(1, _GAUGE_BYTES // page_bytes))
        job_pages = max(1, int(tier.job_pages * min(1.0, _MAX_JOB_S / (job_s or _MAX_JOB_S))))
        while start < end:
            part_end = min(end, start + (gauge_pages if num_gauges > 0 else job_pages))
            yield slice(start, part_end)
            start, num_gauges = part_end, num_gauges - 1

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
        component.host.end_read(held_by(batch.runs))
        runs, batch.runs = batch.runs, []
        for run in runs:
            num_pages, ok = len(run.keys), batch.ok or ()
            self._num_pages[component.name] -= run.num_held
            came = [i < len(ok) and ok[i] for i in range(start, start + num_pages)]
            start += num_pages
            if component.index.publish(run, came):
                run.stored |= batch.store
                if component.name == FULL:
                    self._landed.value += len(run.keys) * self._context.tree.page_size
                    if events is not None and batch.store is DISK:
                        for pages, _ in told_of(run):
                            events.found_on_disk(pages)

    def _free(self, batch: Batch | None) -> None:
        """Give back what was reserved for a batch that did not come."""
        if batch is not None:
            batch.component.host.end_read(held_by(batch.runs))
            for run in reversed(batch.runs):
                self._num_pages[batch.component.name] -= run.num_held
                batch.component.index.abandon(run)
            batch.runs = []
