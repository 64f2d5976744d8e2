"""Copies between host and device.

Offloads: pages of a node of SGLang's tree go to the host, all or none, and from there to the disk. Loads: pages that a
request needs are pinned on the host, and copied to the device layer by layer under its forward.

pin      pages on the disk come to the host, all pages of a request are locked
start    one copy a component for all requests of a batch; `BatchCounter` tells the forward which layers have arrived
finish   the copies have ended, the pages are unlocked
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hicache.errors import TransferError
from hicache.host.run import HostRun, NewPages, RunPart, ids_of, pages_of
from hicache.integrations.sglang.linker_disk import LinkerDisk
from hicache.integrations.sglang.linker_host import HostTier, Part
from hicache.transfer import LayerTransferCounter, TransferOp

log = logging.getLogger(__name__)
Fence = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class Pinned:
    """Locked pages of one component, to be copied to `slots`."""

    tier: HostTier
    held: list[RunPart]
    slots: torch.Tensor

    @property
    def runs(self) -> list[HostRun]:
        return [part.run for part in self.held]


@dataclass(frozen=True)
class _LoadCopy:
    """The copy of one component's pages, which are locked until it ends."""

    tier: HostTier
    pinned: Sequence[Pinned]
    load_id: int
    op: TransferOp


@dataclass(frozen=True)
class _Batch:
    """The copies of one forward. `failed`: some could not be submitted."""

    copies: list[_LoadCopy]
    failed: bool


class BatchCounter:
    """What the getters of SGLang's pools wait for: of a layer, the components that have it, each with a counter.

    SGLang calls `set_consumer` before a forward and `wait_until` within it. A failed load raises nothing there:
    `finish_layer_wise_loading` reports it, and SGLang aborts its requests. On CUDA `wait_until` orders the current
    stream and never blocks the host.
    """

    def __init__(self, layers: Mapping[str, tuple[int, ...]], counters: Mapping[str, LayerTransferCounter]) -> None:
        """`layers`: of each component, ascending."""
        self.num_layers = 1 + max(layer for found in layers.values() for layer in found)
        self.consumer_index = -1
        self._counters = counters
        self._routes: list[list[tuple[LayerTransferCounter, int]]] = [[] for _ in range(self.num_layers)]
        for name, found in layers.items():
            for position, layer in enumerate(found):
                self._routes[layer].append((counters[name], position))
        self._batches: dict[int, dict[str, int]] = {}
        self._next = 0

    def begin(self, loads: Mapping[str, int]) -> int:
        """A batch begins that consumes these loads, by component; returns its index."""
        index, self._next = self._next, self._next + 1
        self._batches[index] = dict(loads)
        return index

    def end(self, index: int) -> None:
        """No forward will consume this batch again."""
        for name, load_id in self._batches.pop(index, {}).items():
            self._counters[name].forget(load_id)

    def set_consumer(self, index: int) -> None:
        """The batch that the next forward depends on; -1: none."""
        self.consumer_index = index
        loads = self._batches.get(index, {})
        for name, counter in self._counters.items():
            counter.set_consumer(loads.get(name, -1))

    def wait_until(self, threshold: int) -> None:
        """Order the forward behind this layer, counted from 0 in this pipeline stage."""
        for counter, layer in self._routes[threshold]:
            try:
                counter.wait_until(layer)
            except TransferError as error:
                log.debug("a forward runs on a load that failed, and its output is dropped: %s", error)


def unpin(pinned: Sequence[Pinned]) -> None:
    for each in pinned:
        each.tier.index.unlock(each.runs)


class Loads:
    """The loads of one linker, from `pin` to `finish`. Scheduler thread, but `counter.wait_until`."""

    def __init__(self, tiers: Sequence[HostTier], disk: LinkerDisk, wait_s: float) -> None:
        """`wait_s`: how long a request waits for pages on the disk."""
        self._tiers, self._disk, self._wait_s = tiers, disk, wait_s
        layers = {tier.name: tier.pool.layout.layers for tier in tiers}
        self.counter = BatchCounter(layers, {tier.name: tier.counter for tier in tiers})
        self._queued: dict[str, list[Pinned]] = {}
        self._batches: dict[int, _Batch] = {}

    def pin(self, parts: Sequence[Part]) -> list[Pinned] | None:
        """All pages of a request on the host, locked; None where some cannot be had."""
        present = [(part.tier.index, part.tier.index.runs_of(part.keys)) for part in parts]
        for index, runs in present:
            index.lock(runs)  # what the others need room for may not push these out
        try:
            came = self._disk.fetch(parts, self._wait_s)
        finally:
            for index, runs in present:
                index.unlock(runs)
        if not came or any(part.tier.index.held_end(part.keys, 0) < len(part.keys) for part in parts):
            return None
        pinned = []
        for part in parts:
            part.use()
            self._disk.used(part.keys)
            pinned.append(Pinned(part.tier, part.tier.index.parts(part.keys), part.slots))
            part.tier.index.lock(pinned[-1].runs)
        return pinned

    def queue(self, rid: str, pinned: list[Pinned]) -> None:
        """For the next `start`. Another load of the same request is void."""
        self.cancel(rid)
        self._queued[rid] = pinned

    def cancel(self, rid: str) -> bool:
        """Whether a load was queued, and not started yet."""
        pinned = self._queued.pop(rid, None)
        unpin(pinned or ())
        return pinned is not None

    def start(self) -> int:
        """Submit what is queued; returns the index of the batch, -1 for none."""
        if not self._queued:
            return -1
        queued, self._queued = [each for pinned in self._queued.values() for each in pinned], {}
        groups = [(tier, [each for each in queued if each.tier is tier]) for tier in self._tiers]
        copies = [self._submit(tier, group) for tier, group in groups if group]
        submitted = [copy for copy in copies if copy is not None]
        index = self.counter.begin({copy.tier.name: copy.load_id for copy in submitted})
        self._batches[index] = _Batch(submitted, failed=len(submitted) < len(copies))
        return index

    def finish(self, index: int) -> bool:
        """Wait until the batch writes to the device no more; whether all of it arrived. False for an unknown one."""
        batch = self._batches.pop(index, None)
        if batch is None:
            return False
        for copy in batch.copies:
            copy.op.wait()
            unpin(copy.pinned)
        self.counter.end(index)
        return not batch.failed and all(copy.op.error is None for copy in batch.copies)

    def locked(self, tier: HostTier) -> list[HostRun]:
        """Runs that loads need, each as often as it is locked."""
        pinned = [each for queued in self._queued.values() for each in queued]
        pinned += [each for batch in self._batches.values() for copy in batch.copies for each in copy.pinned]
        return [run for each in pinned if each.tier is tier for run in each.runs]

    def end_all(self) -> None:
        """Cancel what is queued, wait for the rest."""
        for rid in [*self._queued]:
            self.cancel(rid)
        for index in [*self._batches]:
            self.finish(index)

    def _submit(self, tier: HostTier, group: Sequence[Pinned]) -> _LoadCopy | None:
        """Begin one copy; None where the backend refuses it. Waits for a producer of the counter."""
        if not tier.counter.can_begin():
            for copy in [copy for batch in self._batches.values() for copy in batch.copies]:
                copy.op.wait()
        pages, load_id = ids_of(part for each in group for part in each.held), tier.counter.begin()
        try:
            op = tier.transfer.load(pages, torch.cat([each.slots for each in group]), load_id)
            return _LoadCopy(tier, group, load_id, op)
        except Exception as error:
            log.exception("a load could not be submitted; SGLang aborts its requests")
            tier.counter.fail(load_id, error)
            unpin(group)
            return None


@dataclass(frozen=True)
class _OffloadCopy:
    """What is new of one component, in flight. `keys`: of the whole transfer."""

    tier: HostTier
    keys: list[bytes]
    runs: list[HostRun]
    op: TransferOp


class Offloads:
    """The offloads of one linker, completed in the order of their begin. Scheduler thread.

    `behind_forward`: work queued within it waits for all forwards before.
    """

    def __init__(self, disk: LinkerDisk, behind_forward: Fence) -> None:
        self._disk, self._behind_forward = disk, behind_forward
        self._running: deque[list[_OffloadCopy] | None] = deque()  # None: could not be taken
        self.completed: deque[bool] = deque()

    def begin(self, parts: Sequence[Part]) -> list[_OffloadCopy] | None:
        """None where the host has no room, or a copy is refused. Pages that it has already are not copied again."""
        reserved: list[tuple[Part, torch.Tensor, list[HostRun]]] = []
        copies: list[_OffloadCopy] = []
        try:
            for part in parts:
                part.use()
                index, slots = part.tier.index, part.slots
                rows = index.lacking(part.keys, 0)
                if len(rows) < len(part.keys):  # else without a copy, which waits for the device
                    slots = slots.view(len(part.keys), -1)[rows].flatten()
                runs = index.reserve(index.absent(NewPages(part.keys)))
                if runs is None:
                    return self._undo(reserved, copies)
                reserved.append((part, slots, runs))
            with self._behind_forward():
                for part, slots, runs in reserved:
                    if runs:
                        op = part.tier.transfer.store(slots, pages_of(runs))
                        copies.append(_OffloadCopy(part.tier, part.keys, runs, op))
        except BaseException:
            self._undo(reserved, copies)
            raise
        return copies

    def add(self, copies: list[_OffloadCopy] | None) -> None:
        """What `begin` returned; None completes as failed."""
        self._running.append(copies)

    @property
    def is_idle(self) -> bool:
        return not self._running

    def locked(self, tier: HostTier) -> list[HostRun]:
        """Runs that copies fill."""
        copies = [copy for copies in self._running for copy in copies or ()]
        return [run for copy in copies if copy.tier is tier for run in copy.runs]

    def poll(self) -> None:
        """Take what ended."""
        while self._running and ((first := self._running[0]) is None or all(copy.op.done() for copy in first)):
            self._running.popleft()
            self.completed.append(first is not None and self._end(first))

    def end_all(self) -> None:
        """Wait for all, and forget their outcomes."""
        for copy in [copy for copies in self._running for copy in copies or ()]:
            copy.op.wait()
        self.poll()
        self.completed.clear()

    def _end(self, copies: Sequence[_OffloadCopy]) -> bool:
        """The pages hold their keys' bytes from now on, unless a copy failed."""
        ok = all(copy.op.error is None for copy in copies)
        for copy in copies:
            index = copy.tier.index
            if not ok:
                for run in copy.runs:
                    index.abandon(run)
                continue
            new = [run for reserved in copy.runs for run in index.publish(reserved)]
            index.link(copy.keys)
            self._disk.write(copy.tier, new)
        return ok

    @staticmethod
    def _undo(reserved: Sequence[tuple[Part, torch.Tensor, list[HostRun]]], copies: Sequence[_OffloadCopy]) -> None:
        for copy in copies:
            copy.op.wait()
        for part, _, runs in reserved:
            for run in runs:
                part.tier.index.abandon(run)
