"""Stores to host, the bytes: one read brings what a prompt's prefix lacks on the host.

A read asks the stores what they hold, the disk and then the remote tier for the rest, chooses the longest prefix that
all components can use, takes host pages, reads batches and inserts full pages in order, each batch when those before it
are there; windows and states are attached at the end. What was inserted stays, however the read ends. Pages that were
given to a reader are freed only when the reader is done: a stalled one returns them later.

    start -> (find, in each store) -> fetch: host pages -> (read, batch by batch) -> apply: tree -> end
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby, takewhile
from typing import TypeAlias

import torch

from hicache.flow.components import CacheComponent
from hicache.flow.context import EngineContext
from hicache.flow.cost import CostModel
from hicache.flow.disk_prefix import DiskPrefix, Found
from hicache.flow.host_eviction import HostEviction
from hicache.flow.read_state import Batch, PrefixRead
from hicache.metrics import Histogram
from hicache.storage.process.jobs import FIND, FindDone, FindJob, PageBytes, ReadClass, ReadDone, ReadJob, Stalled
from hicache.tiers import DEVICE, DISK, FULL, HOST, REMOTE, Component, Store
from hicache.tree.node import TreeNode

Answer: TypeAlias = FindDone | ReadDone | Stalled
# Of every reader's first job while a store's rate is unknown: enough to tell it, and soon read from a slow one.
_GAUGE_BYTES = 8 << 20
_MAX_JOB_S = 0.25  # of one job, which ends before anything else can begin
_METRICS = {DISK: "prefetch", REMOTE: "remote_prefetch"}


class PrefixReads:
    """The reads in flight. Owned by the scheduler thread."""

    def __init__(self, context: EngineContext, host_eviction: HostEviction, cost: CostModel) -> None:
        self._context, self._host_eviction, self._cost = context, host_eviction, cost
        self._tiers = tuple(context.stores.items())
        self._ids = itertools.count()
        self._reads: dict[int, PrefixRead] = {}
        self._num_pages = dict.fromkeys(context.by_name, 0)  # by component, see `pages_in_flight`
        self._held_up: list[PrefixRead] = []  # by a copy of their anchor
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
        """Host pages of a component that were taken for reads and are not in the tree."""
        return self._num_pages[component]

    def start(self, prefix: DiskPrefix, *, is_urgent: bool, until_s: float = math.inf) -> PrefixRead | None:
        """Ask the first store what it holds of `prefix`; None where its readers' queue is full.

        `is_urgent`: a request waits for it. Nothing is read after `until_s` of the tier's clock.
        """
        # Its keys, before the anchor is split off a node of the match.
        tree, nothing = self._context.tree, prefix.nothing
        anchor = tree.node_at(prefix.match, prefix.num_host_pages * tree.page_size)
        ends = (prefix.num_host_pages, prefix.num_pages, prefix.num_pages)
        read = PrefixRead(next(self._ids), prefix, anchor, is_urgent, until_s, *ends, nothing)
        with ExitStack() as undo:
            tree.lock(anchor, HOST)
            undo.callback(tree.unlock, anchor, HOST)
            if not self._ask_next(read):
                self._refused.value += 1
                return None
            undo.pop_all()
        self._reads[read.number] = read
        return read

    def stop(self, read: PrefixRead) -> None:
        """Read no further. What readers hold comes back through `apply`."""
        read.cancelled.set()
        for _, tier in self._tiers:
            tier.reads.tell_cancelled()

    def poll(self) -> Iterator[tuple[PrefixRead, Answer | None]]:
        """What the readers have answered, each to be applied before the next is taken; None for reads that go on after
        a copy held them up. Answers for reads that ended, of stalled threads, are dealt with here."""
        if self._held_up:
            for read in [read for read in self._held_up if read.can_go_on]:
                self._held_up.remove(read)
                read.is_held_up = False
                yield read, None
        for _, tier in self._tiers:
            for done in tier.reads.poll():
                late = (done.ticket, done.batch)
                if late in self._left:
                    self._free(self._left.pop(late))
                else:
                    yield self._reads[done.ticket], done

    def apply(self, read: PrefixRead, done: Answer | None) -> None:
        """Enter an answer. After that of the last find, `fetch` is to be called; where the read is done, `end`."""
        if done is None:
            self._insert_batches(read)
            return
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
        batch.ok = done.ok
        if batch.component.name != FULL:
            read.other_bytes[batch.store] -= len(batch.indices) * batch.component.host.page_bytes
        num_ok = sum(done.ok)
        num_bytes = num_ok * batch.component.host.page_bytes
        self._lost.value += done.asked - num_ok
        if num_ok:
            self._bytes[batch.store].observe(num_bytes)
            self._seconds[batch.store].observe(done.seconds)
        self._cost.observe_read(num_bytes, done.seconds, batch.store)
        self._insert_batches(read)

    def fetch(self, read: PrefixRead, max_pages: int) -> None:
        """Take host pages for the longest prefix that all components can use, at most `max_pages` full ones, and queue
        the reads."""
        assert read.found is not None
        if read.cancelled.is_set():
            return
        prefix, components, found = read.prefix, self._context.by_name, read.found
        num_pages = min(len(found.pages), max_pages, self._host_eviction.capacity(self._context.full))
        if num_pages < len(found.pages):
            read.end = prefix.usable_end(found, num_pages)
            read.is_short = read.end < read.found_end
        taken: list[tuple[CacheComponent, list[int], torch.Tensor]] = []
        for name, indices in prefix.to_read(read.end, found).items():
            pages = self._host_eviction.alloc(components[name], len(indices))
            if pages is None:
                for component, _, held in taken:
                    component.host.free(held)
                read.failed = read.is_short = True
                return
            taken.append((components[name], indices, pages))
        for component, indices, pages in taken:
            self._queue(read, found, component, indices, pages)

    def end(self, read: PrefixRead) -> None:
        """All readers are done, but stalled ones: free what is not in the tree and what they do not have."""
        full = [batch for batch in read.batches if batch.component.name == FULL]
        is_whole = not (read.failed or read.stalled or any(len(batch.pages) for batch in full))
        if is_whole and len(full) < len(read.batches):
            self._attach(read)
        read.cancelled.set()
        if read.is_held_up:
            self._held_up.remove(read)
        del self._reads[read.number]
        for index, batch in enumerate(read.batches):
            if index in read.stalled:
                self._left[read.number, index] = batch
            else:
                self._free(batch)
        self._left.update({(read.number, batch): None for batch in read.stalled if batch <= FIND})
        self._context.tree.unlock(read.anchor, HOST)

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

    def _queue(
        self, read: PrefixRead, found: Found, component: CacheComponent, indices: list[int], pages: torch.Tensor
    ) -> None:
        """Queue reads of `pages`, those of one store after those of the other."""
        if not indices:
            return
        component.host.begin_read(pages)
        self._num_pages[component.name] += len(pages)
        views, keys = component.host.views(pages), read.prefix.keys_of(component.name, indices)
        start, goes_on = 0, True
        for store, run in groupby(indices, lambda index: read.prefix.store_of(found, component.name, index)):
            end = start + len(list(run))
            for part in self._parts(store, start, end, component.host.page_bytes):
                number = len(read.batches)
                if not goes_on:  # one batch for all that the queue has no room for: a long prompt fills it many times
                    rest = slice(part.start, end)
                    read.batches.append(Batch(store, component, indices[rest], pages[rest], ()))
                    break
                read.batches.append(Batch(store, component, indices[part], pages[part], None))
                goes_on = self._submit(read, store, number, keys[part], views[part])
            start = end

    def _submit(
        self, read: PrefixRead, store: Store, number: int, keys: Sequence[bytes], views: Sequence[PageBytes]
    ) -> bool:
        """Queue one job, of batch `number`; False where the readers' queue is full."""
        queue_class, batch = (
            ReadClass.URGENT_READ if read.is_urgent else ReadClass.BACKGROUND_READ,
            read.batches[number],
        )
        job = ReadJob(read.number, number, tuple(keys), views, read.cancelled, read.until_s, queue_class)
        if not self._context.stores[store].reads.submit(job):
            self._refused.value += 1
            read.is_short, batch.ok = True, ()
            return False
        read.outstanding += 1
        if batch.component.name != FULL:
            num_bytes = len(batch.indices) * batch.component.host.page_bytes
            read.other_bytes[store] = read.other_bytes.get(store, 0) + num_bytes
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

    def _insert_batches(self, read: PrefixRead) -> None:
        """Insert the full pages that have arrived without a gap, once what they continue is on the host."""
        while not read.failed and read.next_batch < len(read.batches):
            batch = read.batches[read.next_batch]
            if batch.component.name != FULL or batch.ok is None:
                return
            if read.anchor.pending(FULL) is not None:
                if read.is_live and not read.is_held_up:
                    read.is_held_up = True
                    self._held_up.append(read)
                return
            num_good = next((i for i, verified in enumerate(batch.ok) if not verified), len(batch.ok))
            accepted = self._insert(read, batch, num_good) if num_good else 0
            read.next_batch += 1
            read.landed_end += accepted
            if accepted < len(batch.indices):
                read.failed = True
                self.stop(read)  # what follows a gap is of no use

    def _insert(self, read: PrefixRead, batch: Batch, num_pages: int) -> int:
        """Insert the first pages of a batch behind the anchor; returns how many were (the others stay the batch's)."""
        tree, host, prefix = self._context.tree, batch.component.host, read.prefix
        step, first, pages = tree.page_size, batch.indices[0], batch.pages[:num_pages]
        result = tree.insert(
            read.anchor, prefix.tokens[first * step : (first + num_pages) * step], pages, HOST, prefix.namespace
        )
        num_placed = result.accepted_len // step
        host.end_read(pages[:num_placed])
        for twice in result.duplicates:
            host.free(pages[twice.start // step : twice.end // step])
        gained = set(result.gained)
        for node in takewhile(lambda at: at is not read.anchor, result.node.climb()):
            if node in gained:
                end = node.depth_tokens // step
                node.page_keys = prefix.keys_of(FULL, list(range(end - node.num_tokens // step, end)))
                node.holdings[FULL][HOST].stored |= batch.store
                node.source = None if node.holds(FULL, DEVICE) else batch.store
                if tree.events is not None and batch.store is DISK:
                    tree.events.found_on_disk(node, tree.names)
        tree.move_lock(read.anchor, result.node, HOST)
        read.anchor = result.node
        batch.pages = batch.pages[num_placed:]
        self._num_pages[FULL] -= num_placed
        self._landed.value += num_placed * step
        return num_placed

    def _attach(self, read: PrefixRead) -> None:
        """All full pages are there: attach what the other components have read."""
        tree, step = self._context.tree, self._context.tree.page_size
        match = tree.match(read.prefix.tokens[: read.end * step], read.prefix.namespace)
        if match.full_len < read.end * step:
            return
        last = tree.node_at(match, read.end * step)
        if not last.holds(FULL, HOST):
            return
        for component in self._context.components[1:]:
            own = [batch for batch in read.batches if batch.component is component and batch.ok]
            pages = {
                index: (page, batch.store)
                for batch in own
                for index, page, ok in zip(batch.indices, batch.pages.tolist(), batch.ok or (), strict=True)
                if ok
            }
            used = self._attach_component(last, component, pages) if pages else set()
            for batch in own:
                taken = torch.tensor([page in used for page in batch.pages.tolist()], dtype=torch.bool)
                component.host.end_read(batch.pages[taken])
                batch.pages = batch.pages[~taken]
                self._num_pages[component.name] -= int(taken.sum())

    def _attach_component(
        self, last: TreeNode, component: CacheComponent, pages: Mapping[int, tuple[int, Store]]
    ) -> set[int]:
        """Attach pages, by their index in the prompt, to the nodes up to `last` that lack them; returns those used."""
        tree, step, name = self._context.tree, self._context.tree.page_size, component.name
        first, used = min(pages), set[int]()
        for node in last.path():
            end, start = node.depth_tokens // step, (node.depth_tokens - node.num_tokens) // step
            if start < first < end and not component.rules.at_node_end:
                tree.split_prefix(node, (first - start) * step)
                start = first
            indices = [end - 1] if component.rules.at_node_end else list(range(start, end))
            lacks = not node.holds(name, HOST) and node.pending(name) is None and node.holds(FULL, HOST)
            if lacks and all(index in pages for index in indices):
                tree.attach(node, name, HOST, torch.tensor([pages[index][0] for index in indices]))
                stores = {pages[index][1] for index in indices}
                node.holdings[name][HOST].stored |= stores.pop() if len(stores) == 1 else 0
                used.update(pages[index][0] for index in indices)
            if start <= first:
                break
        return used

    def _free(self, batch: Batch | None) -> None:
        if batch is not None:
            self._num_pages[batch.component.name] -= len(batch.pages)
            batch.component.host.end_read(batch.pages)
            batch.component.host.free(batch.pages)
