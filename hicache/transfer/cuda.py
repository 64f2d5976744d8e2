"""The CUDA backend: the copy engine moves pages, kernels in device memory gather and scatter them.

    ring of buffers   copy waits for `free` -> copies -> records `filled` -> kernel waits -> scatters -> records `free`

Up, layers are queued in order with an event behind each: some when a load is submitted, the others before a forward
waits for them or when somebody asks for the state of a copy (`LoadQueue`). Down is the reverse, at lower stream
priority, queued in steps when somebody asks for the state of a store and no load waits for its first layer, so that
loads and forwards do not queue up behind a long store. No call here waits for the device, allocates staging memory or
loops over pages in Python. Measurements and the reasons for each choice: docs/performance.md.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hicache.errors import TransferError
from hicache.kernels.page_copy import PageMover
from hicache.kernels.upload import IdUploader
from hicache.kernels.zero_copy import ZeroCopyMover
from hicache.transfer.calibrate import measured_rates
from hicache.transfer.copies import can_batch, copy_batched, copy_strided, need_bindings
from hicache.transfer.counter import LayerSink
from hicache.transfer.load_queue import LoadQueue
from hicache.transfer.plan import Ids, PageRuns, Plan, Shape, choose, intervals, next_power_of_two, page_runs, tapered
from hicache.transfer.unstaged import SlotRuns, UnstagedCopier

log = logging.getLogger(__name__)

_RING = 3
_MAX_LAST_BYTES = 32 << 20  # of the last chunk of a load, whose scatter of 20 us overlaps no copy
_STEPS_AT_ONCE = 2  # of a store: while they run, a load submitted right after it brings its first layer
_SUBMIT_S = 1.5e-3  # of the host, for steps of loads in one call: less than a long load's first layer takes
_AHEAD = 4  # layers that are queued when a forward waits for the first of them
_ENDED = object()


class CudaOp:
    """A copy on the streams: done when its last event is. Keeps the slots alive, which streams may still read.

    `issue(force)` queues steps of copies, with `force` all of this one; whoever asks for the state of an operation
    calls it.
    """

    def __init__(self, num_bytes: int, slots: torch.Tensor, issue: Callable[[bool], None]) -> None:
        self.num_bytes = num_bytes
        self.error: Exception | None = None
        self.is_undelayed = False
        self._slots, self._issue = slots, issue
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end: torch.cuda.Event | None = None  # until the whole copy is queued

    def began(self, stream: torch.cuda.Stream) -> None:
        self._begin.record(stream)

    def ended(self, stream: torch.cuda.Stream) -> None:
        self._end = torch.cuda.Event(enable_timing=True)
        self._end.record(stream)

    @property
    def is_queued(self) -> bool:
        """Whether all of it is on the streams."""
        return self._end is not None

    def done(self) -> bool:
        self._issue(False)
        return self._end is not None and bool(self._end.query())

    def wait(self) -> None:
        self.wait_outcome()
        assert self._end is not None
        self._end.synchronize()

    def wait_outcome(self) -> None:
        """A copy can fail only while it is queued."""
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


class _StreamPair:
    """One direction: a copy stream, a kernel stream and a ring of staging buffers between them.

    Used by one thread at a time, which may be another one for the other direction.
    """

    def __init__(self, ring_bytes: int, device: torch.device, priority: int, page_bytes: int, mover: PageMover) -> None:
        self.copy = torch.cuda.Stream(device, priority=priority)
        self.kernel = torch.cuda.Stream(device, priority=priority)
        self.buffer_bytes = max(ring_bytes // _RING, page_bytes)
        self.ring = [_Buffer(self.buffer_bytes, device) for _ in range(_RING)]
        self.upload = IdUploader(device, mover.table.kernels)
        self._turn = 0

    def next(self) -> _Buffer:
        self._turn += 1
        return self.ring[self._turn % _RING]


@dataclass
class _Copy:
    """A copy that is being queued. Kernels need `slots` on the device; of the runs, `plan.method` uses one or none."""

    plan: Plan
    ids: Ids
    slots: torch.Tensor
    runs: PageRuns | None = None
    slot_runs: SlotRuns | None = None


class CudaTransfer:
    """See `TransferBackend`. `host`: pinned uint8 [pages, page_bytes]; pages may lie apart. `staging_bytes` is shared
    by both directions."""

    def __init__(
        self,
        host: torch.Tensor,
        mover: PageMover,
        counter: LayerSink,
        *,
        rows_per_chunk: int,
        device_page_tokens: int,
        staging_bytes: int,
        chunk_tokens: int,
    ) -> None:
        need_bindings()
        self._host, self._mover, self._counter, self._device = host, mover, counter, mover.table.device
        self._zero_copy, self._host_address = ZeroCopyMover(mover, host), host.data_ptr()
        self._unstaged = UnstagedCopier(mover, host, rows_per_chunk, device_page_tokens)
        self._rows_per_chunk, self._page_tokens = rows_per_chunk, mover.page_tokens
        self._chunk_pages = max(1, chunk_tokens // self._page_tokens)
        self._offsets = mover.table.ends
        widest = max(mover.group_bytes(layer, 1) for layer in range(mover.num_layers))
        self._shape = partial(
            Shape,
            layer_bytes=widest,
            num_layers=mover.num_layers,
            grouped=mover.uniform,
            num_parts=self._unstaged.num_parts,
            part_bytes=self._unstaged.piece_bytes,
        )
        with torch.cuda.device(self._device):
            # Down, groups are wide and chunks short; up, a layer of many pages at a time takes the fewest calls.
            self.up = _StreamPair(staging_bytes * 3 // 4, self._device, -1, widest, mover)
            self.down = _StreamPair(staging_bytes // 4, self._device, 0, widest, mover)
        buffer = self.up.ring[0].bytes
        self._rates = measured_rates(host, buffer, widest, self._zero_copy, mover)
        self._loads = LoadQueue()
        self._stores: deque[Iterator[None]] = deque()  # each queues one step at a time
        self._first_layer = torch.cuda.Event()  # of the latest load; never recorded counts as arrived
        self._counts = {"unstaged": 0, "strided": 0, "batched": 0, "zero_copy": 0, "delayed": 0}

    def start(self) -> None:
        """Streams need no start."""

    def close(self) -> None:
        self._queue_load(sys.maxsize)
        self._issue(True)
        for stream in self._streams():
            stream.synchronize()

    def abandon(self, deadline_s: float) -> None:
        """The remaining steps are never queued. Streams cannot be stopped; the memory that they use is about to be
        released, so this waits for them."""
        for load_id in self._loads.clear():
            self._counter.fail(load_id, TransferError("the engine of this load is gone"))
        self._stores.clear()
        try:
            while not all(stream.query() for stream in self._streams()) and time.monotonic() < deadline_s:
                time.sleep(0.001)
        except RuntimeError as error:
            log.debug("the device has failed and runs no copies: %s", error)

    def stats(self) -> dict[str, float]:
        """The rates that plans are based on, and the number of copies by method."""
        return {**self._rates.stats(), **{f"{name}_copies": float(count) for name, count in self._counts.items()}}

    def load(self, pages: torch.Tensor, slots: torch.Tensor, load_id: int) -> CudaOp:
        behind = torch.cuda.Event()
        behind.record(torch.cuda.current_stream(self._device))
        is_device_idle = behind.query()
        op = self._op(pages, slots, partial(self._issue_load, load_id))
        self._loads.put(load_id, self._load_steps(op, pages.numpy(), slots, load_id, behind))
        self._counter.queue_on_demand(load_id, partial(self._queue_load, load_id))
        self._loads.queue_some(_SUBMIT_S)
        op.is_undelayed = is_device_idle and op.is_queued
        return op

    def store(self, slots: torch.Tensor, pages: torch.Tensor) -> CudaOp:
        op, ready = self._op(pages, slots, self._issue), torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        self._stores.append(self._store_steps(op, slots, pages.numpy(), ready))
        if not self._first_layer.query():
            self._counts["delayed"] += 1
        elif len(self._stores) == 1:
            self._issue(False, _STEPS_AT_ONCE)
        return op

    def _streams(self) -> list[torch.cuda.Stream]:
        return [stream for pair in (self.up, self.down) for stream in (pair.copy, pair.kernel)]

    def _op(self, pages: torch.Tensor, slots: torch.Tensor, issue: Callable[[bool], None]) -> CudaOp:
        return CudaOp(len(pages) * self._offsets[-1], slots, issue)

    def _queue_load(self, load_id: int, layer: int = sys.maxsize - _AHEAD) -> None:
        """Queue a load and those before it, as far as a forward needs it that waits for `layer` now."""
        self._loads.queue_layers(load_id, layer + _AHEAD)

    def _issue_load(self, load_id: int, force: bool) -> None:
        """Queue all of a load; without `force` some steps of the first loads, and of stores."""
        if force:
            self._queue_load(load_id)
        else:
            self._loads.queue_some(_SUBMIT_S)
            self._issue(False)

    def _plan_load(self, ids: Ids, slots: torch.Tensor) -> _Copy:
        slot_runs = self._unstaged.runs(ids, slots.numpy()) if slots.is_cpu else None
        if slot_runs is not None:
            plan = self._plan(self.up, len(ids), len(slot_runs), len(slot_runs))
            if plan.method == "unstaged":
                return _Copy(plan, ids, slots, slot_runs=slot_runs)
        runs = page_runs(ids, self._rows_per_chunk)
        return _Copy(self._plan(self.up, len(ids), len(runs)), ids, slots, runs=runs)

    def _load_steps(
        self, op: CudaOp, ids: Ids, slots: torch.Tensor, load_id: int, behind: torch.cuda.Event
    ) -> Iterator[int]:
        """Queues a group of layers each time it is resumed. `behind`: the end of work that may still use `slots`."""
        pair = self.up
        pair.kernel.wait_event(behind)
        try:
            load = self._plan_load(ids, slots)
            self._counts[load.plan.method] += 1
            if load.plan.method == "unstaged":
                pair.copy.wait_event(behind)
            op.began(pair.kernel if load.plan.method == "zero_copy" else pair.copy)
            for first, end in load.plan.groups:
                if first:
                    yield first
                self._load_group(load, first, end)
                self._record(load, load_id, first, end)
        except Exception as error:  # noqa: BLE001 - kept in `op.error` and raised to the consumers of the load
            log.warning("a load could not be queued: %s", error)
            op.error = error
            self._counter.fail(load_id, error)
            op.began(pair.copy)  # unless it began before
        pair.kernel.wait_stream(pair.copy)  # which wrote to the pool itself, or may still read host pages
        op.ended(pair.kernel)

    def _record(self, load: _Copy, load_id: int, first: int, end: int) -> None:
        """Record that layers [first, end) have arrived, on the stream that wrote them to the pool."""
        stream = self.up.copy if load.plan.method == "unstaged" else self.up.kernel
        for layer in range(first, end):
            self._counter.record(load_id, layer, stream)
        if not first:
            self._first_layer = torch.cuda.Event()
            self._first_layer.record(stream)

    def _plan(self, pair: _StreamPair, num_pages: int, num_runs: int, slot_runs: int = 0) -> Plan:
        """For the next power of two of each number, so that remembered plans are used often."""
        up = pair is self.up
        shape = self._shape(
            num_pages=next_power_of_two(num_pages),
            num_runs=next_power_of_two(num_runs) if can_batch() else 1,
            slot_runs=next_power_of_two(slot_runs),
        )
        return choose(self._rates.up if up else self._rates.down, shape, pair.buffer_bytes, up=up)

    def _issue(self, force: bool, max_steps: float = math.inf) -> None:
        """Queue steps of stores, unless a load waits for its first layer; with `force`, also then."""
        while self._stores and max_steps > 0 and (force or self._first_layer.query()):
            if next(self._stores[0], _ENDED) is _ENDED:
                self._stores.popleft()
            max_steps -= 1

    def _store_steps(self, op: CudaOp, slots: torch.Tensor, ids: Ids, ready: torch.cuda.Event) -> Iterator[None]:
        """Queues one step of a store each time it is resumed. `ready`: the end of the work that wrote the slots."""
        pair = self.down
        pair.kernel.wait_event(ready)
        op.began(pair.kernel)
        try:
            runs = page_runs(ids, self._rows_per_chunk)
            plan = self._plan(pair, len(ids), len(runs))
            self._counts[plan.method] += 1
            with torch.cuda.stream(pair.kernel):
                store = _Copy(plan, ids, pair.upload(slots), runs)
            for first, end in plan.groups:
                for start, stop in self._chunks(plan, pair, first, end, len(ids)):
                    with torch.cuda.stream(pair.kernel):
                        self._store_step(store, first, end, start, stop)
                    yield
        except Exception as error:  # noqa: BLE001 - kept in `op.error`, which the backup flow counts
            log.warning("a store could not be queued: %s", error)
            op.error = error
        # Stores end in submission order, whatever their methods.
        pair.copy.wait_stream(pair.kernel)
        op.ended(pair.copy)

    def _load_group(self, load: _Copy, first: int, end: int) -> None:
        """Queue layers [first, end) behind what is on the streams."""
        pair, plan = self.up, load.plan
        if plan.method == "unstaged":
            assert load.slot_runs is not None
            for layer in range(first, end):
                self._unstaged.load(load.slot_runs, layer, pair.copy.cuda_stream)
            return
        if plan.method == "zero_copy":
            with torch.cuda.stream(pair.kernel):
                load.slots = pair.upload(load.slots)
                self._zero_copy.load(pair.upload(torch.from_numpy(load.ids)), load.slots, first, end - first)
            return
        for start, stop in self._chunks(plan, pair, first, end, len(load.ids)):
            buffer = pair.next()
            pair.copy.wait_event(buffer.free)
            self._copy(pair, buffer, load, first, end, start, stop)
            buffer.filled.record(pair.copy)
            with torch.cuda.stream(pair.kernel):
                load.slots = pair.upload(load.slots)  # once, behind the first copy, which does not need them
                pair.kernel.wait_event(buffer.filled)
                staging = self._staging(buffer, stop - start, first, end)
                self._mover.scatter(staging, self._slots(load.slots, start, stop), first, end - first)
            buffer.free.record(pair.kernel)

    def _store_step(self, store: _Copy, first: int, end: int, start: int, stop: int) -> None:
        """Queue layers [first, end) of the store's pages [start, stop)."""
        pair = self.down
        if store.plan.method == "zero_copy":
            self._zero_copy.store(store.slots, pair.upload(torch.from_numpy(store.ids)), first, end - first)
            return
        buffer = pair.next()
        pair.kernel.wait_event(buffer.free)
        staging = self._staging(buffer, stop - start, first, end)
        self._mover.gather(self._slots(store.slots, start, stop), staging, first, end - first)
        buffer.filled.record(pair.kernel)
        pair.copy.wait_event(buffer.filled)
        self._copy(pair, buffer, store, first, end, start, stop)
        buffer.free.record(pair.copy)

    def _chunks(self, plan: Plan, pair: _StreamPair, first: int, end: int, num_pages: int) -> list[tuple[int, int]]:
        """Chunks of pages that fit a staging buffer. Down, they have at most the configured chunk of tokens. Up, the
        last chunks of the last layers get smaller, because their scatter overlaps no copy."""
        if plan.method == "zero_copy":
            return [(0, num_pages)]
        width = self._offsets[end] - self._offsets[first]
        fit = max(1, pair.buffer_bytes // width)
        if pair is self.down:
            return intervals(num_pages, min(fit, self._chunk_pages))
        chunks = intervals(num_pages, fit)
        return chunks if self._offsets[end] < self._offsets[-1] else tapered(chunks, _MAX_LAST_BYTES // width)

    def _slots(self, slots: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return slots[start * self._page_tokens : stop * self._page_tokens]

    def _staging(self, buffer: _Buffer, num_pages: int, first: int, end: int) -> torch.Tensor:
        width = self._offsets[end] - self._offsets[first]
        return buffer.bytes[: num_pages * width].view(num_pages, width)

    def _copy(
        self, pair: _StreamPair, buffer: _Buffer, copy: _Copy, first: int, end: int, start: int, stop: int
    ) -> None:
        """Queue the copy of layers [first, end) of the pages [start, stop) from (up) or to (down) their host pages."""
        up, width, pitch = pair is self.up, self._offsets[end] - self._offsets[first], self._host.stride(0)
        host_address, stream = self._host_address + self._offsets[first], pair.copy.cuda_stream
        if copy.plan.method == "batched":
            on_host = host_address + copy.ids[start:stop] * pitch
            in_buffer = buffer.address + np.arange(stop - start) * width
            dst, src = (in_buffer, on_host) if up else (on_host, in_buffer)
            # Up, nobody writes the source pages: the engine may read them in any order, which is faster.
            copy_batched(dst, src, width, up, stream)
            return
        assert copy.runs is not None
        for page, rows, position in copy.runs.within(start, stop):
            staged, hosted = (buffer.address + position * width, width), (host_address + page * pitch, pitch)
            dst_run, src_run = (staged, hosted) if up else (hosted, staged)
            copy_strided(*dst_run, *src_run, width, rows, up, stream)
