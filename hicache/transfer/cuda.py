"""The CUDA backend: the copy engine moves pages, kernels in device memory do the scattering.

Up, per layer: where slots are known to be runs, copies write to the pool itself. Else, per group of layers: a copy
brings the group's part of each page into one of a ring of staging buffers, a kernel scatters it to the slots. An event
a layer is recorded. The whole load is queued before the forward. Down is the reverse, at lower stream priority: what
fits the ring is queued at once, the rest when somebody next asks how far the store is, so that neither a load nor a
forward is queued behind all of it; and nothing of it while a load has not brought its first layer. What is too small
for that goes by one kernel that reads or writes the host itself. `hicache.transfer.plan` decides. Nothing here waits
for the device, allocates device memory, or loops over pages in Python.

    ring of buffers   copy waits for `free` -> copies -> records `filled` -> kernel waits -> scatters -> records `free`

Figures and the reasons for each choice: docs/performance.md. May import torch, numpy, layout, kernels, config and
errors.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hicache.kernels.direct_copy import DirectMover
from hicache.kernels.page_copy import PageMover
from hicache.transfer.calibrate import measured_rates
from hicache.transfer.copies import can_batch, copy_batched, copy_strided, need_bindings
from hicache.transfer.counter import LayerTransferCounter
from hicache.transfer.ids import IdUploader
from hicache.transfer.plan import Cut, Ids, Plan, Shape, choose, cut, power_of_two, spans, tapered
from hicache.transfer.straight import SlotRuns, StraightCopier

log = logging.getLogger(__name__)

_RING = 3
_LAST_BYTES = 32 << 20  # what a load scatters when all has been copied: 20 us
_STEPS_AT_ONCE = 2  # of a store: they last until a load that is submitted right after it has brought its first layer
_ENDED = object()


class CudaOp:
    """A copy on the streams: done when its last event is. Holds the slots it was given, which streams may still read.

    `issue`: queues what is held back of any copy; called by whoever asks how far this one is.
    """

    def __init__(self, num_bytes: int, slots: torch.Tensor, issue: Callable[[bool], None]) -> None:
        self.num_bytes = num_bytes
        self.error: Exception | None = None
        self._slots, self._issue = slots, issue
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end: torch.cuda.Event | None = None  # until all of it is queued

    def began(self, stream: torch.cuda.Stream) -> None:
        self._begin.record(stream)

    def ended(self, stream: torch.cuda.Stream) -> None:
        self._end = torch.cuda.Event(enable_timing=True)
        self._end.record(stream)

    def done(self) -> bool:
        self._issue(False)
        return self._end is not None and bool(self._end.query())

    def wait(self) -> None:
        if self._end is None:
            self._issue(True)
        assert self._end is not None
        self._end.synchronize()

    def wait_outcome(self) -> None:
        """A copy can fail only while it is queued: of a load that is before `load` returns."""
        if self._end is None:
            self._issue(True)

    def seconds(self) -> float:
        assert self._end is not None
        return float(self._begin.elapsed_time(self._end)) / 1e3


class _Buffer:
    """One staging buffer of a ring, and the events of its two users."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.address = self.bytes.data_ptr()
        self.filled = torch.cuda.Event()
        self.free = torch.cuda.Event()  # never recorded counts as free


class _Lane:
    """One direction: a copy stream, a kernel stream and a ring of staging buffers between them."""

    def __init__(self, ring_bytes: int, device: torch.device, priority: int, page_bytes: int) -> None:
        self.copy = torch.cuda.Stream(device, priority=priority)
        self.kernel = torch.cuda.Stream(device, priority=priority)
        self.buffer_bytes = max(ring_bytes // _RING, page_bytes)
        self._ring = [_Buffer(self.buffer_bytes, device) for _ in range(_RING)]
        self._turn = 0

    @property
    def buffer(self) -> torch.Tensor:
        """The bytes of one buffer."""
        return self._ring[0].bytes

    def next(self) -> _Buffer:
        self._turn += 1
        return self._ring[self._turn % _RING]


@dataclass(frozen=True)
class _Store:
    """A store that was asked for: `ready` is recorded behind whatever wrote the slots."""

    op: CudaOp
    slots: torch.Tensor
    ids: Ids
    ready: torch.cuda.Event


@dataclass
class _Load:
    """A load that is being queued. Kernels need `slots` on the device, copies that go straight only `slot_runs`."""

    plan: Plan
    ids: Ids
    slots: torch.Tensor
    slot_runs: SlotRuns | None = None
    pages_cut: Cut | None = None


class CudaTransfer:
    """See `TransferBackend`. `host`: pinned uint8 [pages, page_bytes]; `staging_bytes` is shared by both directions."""

    def __init__(
        self,
        host: torch.Tensor,
        mover: PageMover,
        layer_page_bytes: list[int],
        counter: LayerTransferCounter,
        *,
        device: torch.device,
        rows_per_chunk: int,
        page_tokens: int,
        device_page_tokens: int,
        staging_bytes: int,
        chunk_tokens: int,
    ) -> None:
        need_bindings()
        self._host, self._mover, self._counter, self._device = host, mover, counter, device
        self._direct, self._host_address = DirectMover(mover, host), host.data_ptr()
        self._upload = IdUploader(device, mover.table.kernels)
        self._straight = StraightCopier(mover, host, rows_per_chunk, device_page_tokens)
        self._rows_per_chunk, self._page_tokens = rows_per_chunk, page_tokens
        self._chunk_pages = max(1, chunk_tokens // page_tokens)
        self._offsets = [0, *np.cumsum(layer_page_bytes).tolist()]
        widest = max(layer_page_bytes)
        self._shape = partial(
            Shape,
            layer_bytes=widest,
            num_layers=len(layer_page_bytes),
            grouped=mover.uniform,
            num_parts=self._straight.num_parts,
            part_bytes=self._straight.piece_bytes,
        )
        with torch.cuda.device(device):
            # Down, groups are wide and chunks short; up, a layer of many pages at a time takes the fewest calls.
            self._up = _Lane(staging_bytes * 3 // 4, device, -1, widest)
            self._down = _Lane(staging_bytes // 4, device, 0, widest)
        self._rates = measured_rates(host, self._up.buffer, widest, len(layer_page_bytes), self._direct, page_tokens)
        self._stores: deque[Iterator[None]] = deque()  # each queues one step at a time
        self._first_layer = torch.cuda.Event()  # of the latest load; never recorded counts as there
        self._counts = {"straight": 0, "strided": 0, "batched": 0, "direct": 0, "held_back": 0}

    def start(self) -> None:
        """Nothing to start: streams run by themselves."""

    def close(self) -> None:
        self._issue(True)
        for lane in (self._up, self._down):
            lane.copy.synchronize()
            lane.kernel.synchronize()

    def abandon(self, deadline_s: float) -> None:
        """What is held back is never queued. The streams cannot be stopped, and they use memory that is about to go."""
        self._stores.clear()
        streams = [stream for lane in (self._up, self._down) for stream in (lane.copy, lane.kernel)]
        try:
            while not all(stream.query() for stream in streams) and time.monotonic() < deadline_s:
                time.sleep(0.001)
        except RuntimeError as error:
            log.debug("a device that failed runs no copies any more: %s", error)

    def figures(self) -> dict[str, float]:
        """What the plan assumes of the link, and how many copies went which way."""
        return {**self._rates.figures(), **{f"copies.{name}": float(count) for name, count in self._counts.items()}}

    def load(self, pages: torch.Tensor, slots: torch.Tensor, load_id: int) -> CudaOp:
        op, lane, behind = self._op(pages, slots), self._up, torch.cuda.Event()
        behind.record(torch.cuda.current_stream(self._device))
        lane.kernel.wait_event(behind)
        try:
            self._queue_load(op, self._plan_load(pages.numpy(), slots), load_id, behind)
        except Exception as error:  # noqa: BLE001 - kept in `op.error`, and told to whoever consumes the load
            log.warning("a load could not be queued: %s", error)
            op.error = error
            self._counter.fail(load_id, error)
            op.began(lane.copy)  # it may not have
            lane.kernel.wait_stream(lane.copy)  # it may still read host pages
        op.ended(lane.kernel)
        return op

    def store(self, slots: torch.Tensor, pages: torch.Tensor) -> CudaOp:
        op, ready = self._op(pages, slots), torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        self._stores.append(self._store_steps(_Store(op, slots, pages.numpy(), ready)))
        if not self._first_layer.query():
            self._counts["held_back"] += 1
        elif len(self._stores) == 1:
            self._issue(False, _STEPS_AT_ONCE)
        return op

    def _op(self, pages: torch.Tensor, slots: torch.Tensor) -> CudaOp:
        return CudaOp(len(pages) * self._offsets[-1], slots, self._issue)

    def _plan_load(self, ids: Ids, slots: torch.Tensor) -> _Load:
        """Slots that the host knows may turn out to be runs."""
        runs = self._straight.runs(ids, slots.numpy()) if slots.is_cpu else None
        if runs is not None:
            plan = self._plan(self._up, len(ids), len(runs), len(runs))
            if plan.method == "straight":
                return _Load(plan, ids, slots, slot_runs=runs)
        pages_cut = cut(ids, self._rows_per_chunk)
        return _Load(self._plan(self._up, len(ids), len(pages_cut)), ids, slots, pages_cut=pages_cut)

    def _queue_load(self, op: CudaOp, load: _Load, load_id: int, behind: torch.cuda.Event) -> None:
        """Queue all layers, and an event behind each. `behind`: what may still use the slots."""
        lane = self._up
        if load.plan.method == "straight":
            lane.copy.wait_event(behind)
        op.began(lane.kernel if load.plan.method == "direct" else lane.copy)
        self._counts[load.plan.method] += 1
        for first, end in load.plan.groups:
            self._load_group(load, first, end)
            for layer in range(first, end):
                self._counter.record(load_id, layer, lane.kernel)
            if not first:
                self._first_layer = torch.cuda.Event()
                self._first_layer.record(lane.kernel)

    def _plan(self, lane: _Lane, num_pages: int, num_runs: int, slot_runs: int = 0) -> Plan:
        """For the next power of two of each, so that a plan that was made is likely to serve again."""
        rates, ramp = (self._rates.up, True) if lane is self._up else (self._rates.down, False)
        runs = power_of_two(num_runs) if can_batch() else 1
        shape = self._shape(num_pages=power_of_two(num_pages), num_runs=runs, slot_runs=power_of_two(slot_runs))
        return choose(rates, shape, lane.buffer_bytes, ramp=ramp)

    def _issue(self, whatever: bool, most_steps: float = math.inf) -> None:
        """Queue steps of stores, unless a load waits for its first layer; `whatever`: in any case."""
        while self._stores and most_steps > 0 and (whatever or self._first_layer.query()):
            if next(self._stores[0], _ENDED) is _ENDED:
                self._stores.popleft()
            most_steps -= 1

    def _store_steps(self, store: _Store) -> Iterator[None]:
        """Queues one step of a store each time it is resumed."""
        lane = self._down
        lane.kernel.wait_event(store.ready)
        store.op.began(lane.kernel)
        try:
            pages_cut = cut(store.ids, self._rows_per_chunk)
            plan = self._plan(lane, len(store.ids), len(pages_cut))
            self._counts[plan.method] += 1
            with torch.cuda.stream(lane.kernel):
                slots = self._upload(store.slots)
            store = _Store(store.op, slots, store.ids, store.ready)
            for first, end in plan.groups:
                for start, stop in self._chunks(plan, lane, first, end, len(store.ids)):
                    with torch.cuda.stream(lane.kernel):
                        self._store_step(plan, store, pages_cut, (first, end), (start, stop))
                    yield
        except Exception as error:  # noqa: BLE001 - kept in `op.error`, which every landing looks at
            log.warning("a store could not be queued: %s", error)
            store.op.error = error
        # Stores end in the order in which they came, whichever way each went.
        lane.copy.wait_stream(lane.kernel)
        store.op.ended(lane.copy)

    def _load_group(self, load: _Load, first: int, end: int) -> None:
        """Queue layers [first, end): at the end of the kernel stream they are there."""
        lane, plan = self._up, load.plan
        if plan.method == "straight":
            assert load.slot_runs is not None
            for layer in range(first, end):
                self._straight.load(load.slot_runs, layer, lane.copy.cuda_stream)
            lane.kernel.wait_stream(lane.copy)
            return
        if plan.method == "direct":
            with torch.cuda.stream(lane.kernel):
                load.slots = self._upload(load.slots)
                self._direct.load(self._upload(torch.from_numpy(load.ids)), load.slots, first, end - first)
            return
        for start, stop in self._chunks(plan, lane, first, end, len(load.ids)):
            buffer = lane.next()
            lane.copy.wait_event(buffer.free)
            self._load_staging(load, buffer, (first, end), (start, stop))
            buffer.filled.record(lane.copy)
            with torch.cuda.stream(lane.kernel):
                load.slots = self._upload(load.slots)  # once, behind the first copy, which need not wait for it
                lane.kernel.wait_event(buffer.filled)
                staging = self._staging(buffer, stop - start, first, end)
                self._mover.scatter(staging, self._slots(load.slots, start, stop), first, end - first)
            buffer.free.record(lane.kernel)

    def _load_staging(self, load: _Load, buffer: _Buffer, layers: tuple[int, int], pages: tuple[int, int]) -> None:
        """Queue the copy of layers [first, end) of the load's pages [start, stop) into a buffer."""
        (first, end), (start, stop) = layers, pages
        if load.plan.method == "batched":
            self._copy_batch(self._up, buffer, load.ids[start:stop], first, end, up=True)
            return
        assert load.pages_cut is not None
        self._copy_runs(self._up, buffer, load.pages_cut.within(start, stop), first, end, up=True)

    def _store_step(
        self, plan: Plan, store: _Store, pages_cut: Cut, layers: tuple[int, int], pages: tuple[int, int]
    ) -> None:
        """Queue layers [first, end) of the store's pages [start, stop)."""
        lane, ids, (first, end), (start, stop) = self._down, store.ids, layers, pages
        if plan.method == "direct":
            self._direct.store(store.slots, self._upload(torch.from_numpy(ids)), first, end - first)
            return
        buffer = lane.next()
        lane.kernel.wait_event(buffer.free)
        staging = self._staging(buffer, stop - start, first, end)
        self._mover.gather(self._slots(store.slots, start, stop), staging, first, end - first)
        buffer.filled.record(lane.kernel)
        lane.copy.wait_event(buffer.filled)
        if plan.method == "batched":
            self._copy_batch(lane, buffer, ids[start:stop], first, end, up=False)
        else:
            self._copy_runs(lane, buffer, pages_cut.within(start, stop), first, end, up=False)
        buffer.free.record(lane.copy)

    def _chunks(self, plan: Plan, lane: _Lane, first: int, end: int, num_pages: int) -> list[tuple[int, int]]:
        """Chunks of pages that fit a staging buffer. Down they also stay within the chunk of tokens configured; up,
        those of the last layers are ever smaller, for their scattering is hidden behind nothing."""
        if plan.method == "direct":
            return [(0, num_pages)]
        width = self._offsets[end] - self._offsets[first]
        fit = max(1, lane.buffer_bytes // width)
        if lane is self._down:
            return spans(num_pages, min(fit, self._chunk_pages))
        chunks = spans(num_pages, fit)
        return chunks if self._offsets[end] < self._offsets[-1] else tapered(chunks, _LAST_BYTES // width)

    def _slots(self, slots: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return slots[start * self._page_tokens : stop * self._page_tokens]

    def _staging(self, buffer: _Buffer, num_pages: int, first: int, end: int) -> torch.Tensor:
        width = self._offsets[end] - self._offsets[first]
        return buffer.bytes[: num_pages * width].view(num_pages, width)

    def _copy_batch(self, lane: _Lane, buffer: _Buffer, ids: Ids, first: int, end: int, *, up: bool) -> None:
        """Queue the copy of layers [first, end) of host pages `ids` from (up) or to (down) the buffer."""
        width, pitch = self._offsets[end] - self._offsets[first], self._host.shape[1]
        host_at = self._host_address + self._offsets[first] + ids * pitch
        device_at = buffer.address + np.arange(len(ids)) * width
        # Up, the source is a page that nobody writes: the engine may read it in any order, which is faster.
        to, of = (device_at, host_at) if up else (host_at, device_at)
        copy_batched(to, of, width, up, lane.copy.cuda_stream)

    def _copy_runs(
        self, lane: _Lane, buffer: _Buffer, pages: list[tuple[int, int, int]], first: int, end: int, *, up: bool
    ) -> None:
        """The same for runs of pages: (first page, pages, position in the buffer)."""
        width, pitch, stream = self._offsets[end] - self._offsets[first], self._host.shape[1], lane.copy.cuda_stream
        for page, rows, position in pages:
            near = buffer.address + position * width
            far = self._host_address + self._offsets[first] + page * pitch
            if up:
                copy_strided(near, width, far, pitch, width, rows, up, stream)
            else:
                copy_strided(far, pitch, near, width, width, rows, up, stream)
