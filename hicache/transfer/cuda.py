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
from functools import partial

import numpy as np
import torch

from hicache.errors import TransferError
from hicache.kernels.pack import PagePacker
from hicache.kernels.page_copy import PageMover
from hicache.kernels.zero_copy import ZeroCopyMover
from hicache.transfer.calibrate import measured_rates
from hicache.transfer.copies import can_batch, copy_batched, copy_strided, need_bindings
from hicache.transfer.counter import LayerSink
from hicache.transfer.load_queue import LoadQueue
from hicache.transfer.plan import Ids, Plan, Shape, choose, intervals, next_power_of_two, page_runs, tapered
from hicache.transfer.raw_pages import CudaRawPages, RawPart, divided, gather
from hicache.transfer.streams import Buffer, CudaOp, QueuedCopy, StreamPair
from hicache.transfer.unstaged import UnstagedCopier

log = logging.getLogger(__name__)

_MAX_LAST_BYTES = 32 << 20  # of the last chunk of a load, whose scatter of 20 us overlaps no copy
_STEPS_AT_ONCE = 2  # of a store: while they run, a load submitted right after it brings its first layer
_SUBMIT_S = 1.5e-3  # of the host, for steps of loads in one call: less than a long load's first layer takes
_AHEAD = 4  # layers that are queued when a forward waits for the first of them
_ENDED = object()


class CudaTransfer:
    """See `TransferBackend`. `host`: pinned uint8 [pages, page_bytes]; pages may lie apart. `staging_bytes` is shared
    by both directions. `packer` packs the pages of `mover`'s pool: then all of them go through staging."""

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
        packer: PagePacker | None = None,
    ) -> None:
        need_bindings()
        self._mover: PageMover | PagePacker = mover if packer is None else packer
        self._host, self._counter, self._device = host, counter, mover.table.device
        self._zero_copy, self._host_address = None if packer else ZeroCopyMover(mover, host), host.data_ptr()
        self._unstaged = None if packer else UnstagedCopier(mover, host, rows_per_chunk, device_page_tokens)
        self._rows_per_chunk, self._page_tokens = rows_per_chunk, mover.page_tokens
        self._chunk_pages = max(1, chunk_tokens // self._page_tokens)
        self._offsets = self._mover.ends
        widest = max(self._mover.group_bytes(layer, 1) for layer in range(mover.num_layers))
        self._shape = partial(
            Shape,
            layer_bytes=widest,
            num_layers=mover.num_layers,
            grouped=mover.uniform,
            num_parts=self._unstaged.num_parts if self._unstaged else 0,
            part_bytes=self._unstaged.piece_bytes if self._unstaged else 0,
            is_packed=packer is not None,
        )
        with torch.cuda.device(self._device):
            # Down, groups are wide and chunks short; up, a layer of many pages at a time takes the fewest calls.
            self.up = StreamPair(staging_bytes * 3 // 4, self._device, -1, widest, self._mover)
            self.down = StreamPair(staging_bytes // 4, self._device, 0, widest, self._mover)
        self._raw_up, self._raw_down = (
            None if packer is None else CudaRawPages(host, mover, packer.page_bytes, pair.copy, pair.kernel)
            for pair in (self.up, self.down)
        )
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

    def load(self, pages: torch.Tensor, slots: torch.Tensor, load_id: int, rest: torch.Tensor | None = None) -> CudaOp:
        raw, pages, slots = divided(pages, slots, rest)
        behind = torch.cuda.Event()
        behind.record(torch.cuda.current_stream(self._device))
        is_device_idle = behind.query()
        op = self._op(len(pages), slots, partial(self._issue_load, load_id), raw)
        self._loads.put(load_id, self._load_steps(op, pages.numpy(), slots, load_id, behind, raw))
        self._counter.queue_on_demand(load_id, partial(self._queue_load, load_id))
        self._loads.queue_some(_SUBMIT_S)
        op.is_undelayed = is_device_idle and op.is_queued
        return op

    def store(self, slots: torch.Tensor, pages: torch.Tensor, rest: torch.Tensor | None = None) -> CudaOp:
        raw = None if rest is None else RawPart(pages.numpy(), rest.numpy(), slots)
        op, ready = self._op(0 if raw else len(pages), slots, self._issue, raw), torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        self._stores.append(self._store_steps(op, slots, pages.numpy(), ready, raw))
        if not self._first_layer.query():
            self._counts["delayed"] += 1
        elif len(self._stores) == 1:
            self._issue(False, _STEPS_AT_ONCE)
        return op

    def _streams(self) -> list[torch.cuda.Stream]:
        return [stream for pair in (self.up, self.down) for stream in (pair.copy, pair.kernel)]

    def _op(
        self, num_pages: int, slots: torch.Tensor, issue: Callable[[bool], None], raw: RawPart | None = None
    ) -> CudaOp:
        num_bytes, kept = num_pages * self._offsets[-1], [slots]
        if raw is not None and self._raw_up is not None:
            num_bytes += len(raw.first) * self._raw_up.page_bytes
            kept.append(raw.slots)
        return CudaOp(num_bytes, kept, issue)

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

    def _plan_load(self, ids: Ids, slots: torch.Tensor) -> QueuedCopy:
        slot_runs = self._unstaged.runs(ids, slots.numpy()) if self._unstaged and slots.is_cpu else None
        if slot_runs is not None:
            plan = self._plan(self.up, len(ids), len(slot_runs), len(slot_runs))
            if plan.method == "unstaged":
                return QueuedCopy(plan, ids, slots, slot_runs=slot_runs)
        runs = page_runs(ids, self._rows_per_chunk)
        return QueuedCopy(self._plan(self.up, len(ids), len(runs)), ids, slots, runs=runs)

    def _load_steps(
        self, op: CudaOp, ids: Ids, slots: torch.Tensor, load_id: int, behind: torch.cuda.Event, raw: RawPart | None
    ) -> Iterator[int]:
        """Queues raw pages, then a group of layers each time it is resumed. `behind`: the end of work that may still
        use `slots`."""
        pair = self.up
        pair.kernel.wait_event(behind)
        try:
            load = self._plan_load(ids, slots)
            self._counts[load.plan.method] += 1
            if load.plan.method == "unstaged":
                pair.copy.wait_event(behind)
            op.began(pair.kernel if load.plan.method == "zero_copy" else pair.copy)
            for _ in self._raw_steps(pair, raw):
                yield 0
            yield from (self._staged_steps if load.plan.is_staged else self._direct_steps)(load, load_id)
        except Exception as error:  # noqa: BLE001 - kept in `op.error` and raised to the consumers of the load
            log.warning("a load could not be queued: %s", error)
            op.error = error
            self._counter.fail(load_id, error)
            op.began(pair.copy)  # unless it began before
        pair.kernel.wait_stream(pair.copy)  # which wrote to the pool itself, or may still read host pages
        op.ended(pair.kernel)

    def _record(self, load: QueuedCopy, load_id: int, first: int, end: int) -> None:
        """Record that layers [first, end) have arrived, on the stream that wrote them to the pool."""
        stream = self.up.copy if load.plan.method == "unstaged" else self.up.kernel
        for layer in range(first, end):
            self._counter.record(load_id, layer, stream)
        if not first:
            self._first_layer = torch.cuda.Event()
            self._first_layer.record(stream)

    def _plan(self, pair: StreamPair, num_pages: int, num_runs: int, slot_runs: int = 0) -> Plan:
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

    def _raw_steps(self, pair: StreamPair, raw: RawPart | None) -> Iterator[None]:
        """Queues one raw page each time it is resumed."""
        if raw is None:
            return
        assert self._raw_up is not None and self._raw_down is not None, "raw pages beside packed ones alone"
        with torch.cuda.stream(pair.kernel):
            raw = raw._replace(slots=pair.upload(raw.slots))
        for at in range(len(raw.first)):
            if pair is self.up:
                self._raw_up.load(raw, at)
            else:
                self._raw_down.store(raw, at)
            yield

    def _store_steps(
        self, op: CudaOp, slots: torch.Tensor, ids: Ids, ready: torch.cuda.Event, raw: RawPart | None
    ) -> Iterator[None]:
        """Queues one step of a store each time it is resumed. `ready`: the end of the work that wrote the slots."""
        pair = self.down
        pair.kernel.wait_event(ready)
        op.began(pair.kernel)
        try:
            if raw is not None:
                yield from self._raw_steps(pair, raw)
            else:
                yield from self._gather_steps(op, slots, ids)
        except Exception as error:  # noqa: BLE001 - kept in `op.error`, which the backup flow counts
            log.warning("a store could not be queued: %s", error)
            op.error = error
        # Stores end in submission order, whatever their methods.
        pair.copy.wait_stream(pair.kernel)
        op.ended(pair.copy)

    def _gather_steps(self, op: CudaOp, slots: torch.Tensor, ids: Ids) -> Iterator[None]:
        pair, runs = self.down, page_runs(ids, self._rows_per_chunk)
        plan = self._plan(pair, len(ids), len(runs))
        self._counts[plan.method] += 1
        with torch.cuda.stream(pair.kernel):
            store = QueuedCopy(plan, ids, pair.upload(slots), runs)
            if isinstance(self._mover, PagePacker):
                store.misfits = torch.zeros(len(ids), dtype=torch.int32, device=self._device)
        for first, end in plan.groups:
            for start, stop in self._chunks(plan, pair, first, end, len(ids)):
                with torch.cuda.stream(pair.kernel):
                    self._store_step(store, first, end, start, stop)
                yield
        if store.misfits is not None:
            pair.copy.wait_stream(pair.kernel)
            op.bring_misfits(store.misfits, pair.copy)

    def _direct_steps(self, load: QueuedCopy, load_id: int) -> Iterator[int]:
        """Queues a group of layers each time it is resumed, which are written to their slots without staging."""
        pair, plan = self.up, load.plan
        for first, end in plan.groups:
            if first:
                yield first
            if plan.method == "unstaged":
                assert load.slot_runs is not None and self._unstaged is not None
                for layer in range(first, end):
                    self._unstaged.load(load.slot_runs, layer, pair.copy.cuda_stream)
            else:
                assert self._zero_copy is not None
                with torch.cuda.stream(pair.kernel):
                    load.slots = pair.upload(load.slots)
                    self._zero_copy.load(pair.upload(torch.from_numpy(load.ids)), load.slots, first, end - first)
            self._record(load, load_id, first, end)

    def _staged_steps(self, load: QueuedCopy, load_id: int) -> Iterator[int]:
        """Queues a group of layers each time it is resumed. The copy of each chunk comes before the kernels of the one
        ahead of it, so that the link does not wait while the host launches these."""
        chunks = self._chunks_of_groups(load)
        following = next(chunks, None)
        if following is None:  # all pages are raw
            self._record(load, load_id, 0, self._mover.num_layers)
            return
        copied = self._queue_copy(load, *following)
        while following is not None:
            (first, end, start, stop), buffer = following, copied
            following = next(chunks, None)
            if following is not None:
                copied = self._queue_copy(load, *following)
            self._queue_scatter(load, buffer, first, end, start, stop)
            if stop == len(load.ids):
                self._record(load, load_id, first, end)
                if following is not None:
                    yield end

    def _chunks_of_groups(self, load: QueuedCopy) -> Iterator[tuple[int, int, int, int]]:
        """Layers [first, end) and pages [start, stop) of each chunk, in order."""
        for first, end in load.plan.groups:
            for start, stop in self._chunks(load.plan, self.up, first, end, len(load.ids)):
                yield first, end, start, stop

    def _queue_copy(self, load: QueuedCopy, first: int, end: int, start: int, stop: int) -> Buffer:
        """Queue the copy of layers [first, end) of the pages [start, stop) into a staging buffer, which is returned."""
        pair = self.up
        buffer = pair.next()
        pair.copy.wait_event(buffer.free)
        self._copy(pair, buffer, load, first, end, start, stop)
        buffer.filled.record(pair.copy)
        return buffer

    def _queue_scatter(self, load: QueuedCopy, buffer: Buffer, first: int, end: int, start: int, stop: int) -> None:
        """Queue what moves such a chunk from its buffer to its slots."""
        pair = self.up
        with torch.cuda.stream(pair.kernel):
            load.slots = pair.upload(load.slots)  # once, behind the first copies, which do not need them
            pair.kernel.wait_event(buffer.filled)
            staging = self._staging(buffer, stop - start, first, end)
            self._mover.scatter(staging, self._slots(load.slots, start, stop), first, end - first)
        buffer.free.record(pair.kernel)

    def _store_step(self, store: QueuedCopy, first: int, end: int, start: int, stop: int) -> None:
        """Queue layers [first, end) of the store's pages [start, stop)."""
        pair = self.down
        if store.plan.method == "zero_copy":
            assert self._zero_copy is not None
            self._zero_copy.store(store.slots, pair.upload(torch.from_numpy(store.ids)), first, end - first)
            return
        buffer = pair.next()
        pair.kernel.wait_event(buffer.free)
        staging = self._staging(buffer, stop - start, first, end)
        misfits = None if store.misfits is None else store.misfits[start:stop]
        gather(self._mover, self._slots(store.slots, start, stop), staging, first, end - first, misfits)
        buffer.filled.record(pair.kernel)
        pair.copy.wait_event(buffer.filled)
        self._copy(pair, buffer, store, first, end, start, stop)
        buffer.free.record(pair.copy)

    def _chunks(self, plan: Plan, pair: StreamPair, first: int, end: int, num_pages: int) -> list[tuple[int, int]]:
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

    def _staging(self, buffer: Buffer, num_pages: int, first: int, end: int) -> torch.Tensor:
        width = self._offsets[end] - self._offsets[first]
        return buffer.bytes[: num_pages * width].view(num_pages, width)

    def _copy(
        self, pair: StreamPair, buffer: Buffer, copy: QueuedCopy, first: int, end: int, start: int, stop: int
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
