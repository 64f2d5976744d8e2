"""The CUDA backend: the copy engine copies pages, and kernels in device memory gather and scatter them.

    ring of buffers   copy waits for `free` -> copies -> records `filled` -> kernel waits -> scatters -> records `free`

Loads ("up") are queued layer by layer, with an event after each layer. Some layers are queued when a load is submitted;
the other layers are queued before a forward pass waits for them, or when a caller asks for the state of a copy
(`LoadQueue`). Stores ("down") use the ring in reverse, at lower stream priority. The steps of a store are queued when a
caller asks for its state and no load waits for its first layer. So loads and forward passes do not wait for a long
store. No call here waits for the device, allocates staging memory or loops over pages in Python. Measurements and the
reasons for each choice: docs/all_results.md.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from hicache.errors import TransferError
from hicache.kernels.pack import PagePacker
from hicache.kernels.page_copy import PageMover
from hicache.kernels.zero_copy import ZeroCopyMover
from hicache.transfer.calibrate import measured_rates
from hicache.transfer.copies import UnstagedCopier, can_batch, copy_batched, copy_strided, need_bindings
from hicache.transfer.counter import LayerSink
from hicache.transfer.load_queue import LoadQueue
from hicache.transfer.plan import Plan, Shape, choose, intervals, next_power_of_two, page_runs, tapered
from hicache.transfer.segments import PageCopies, PageCopy, gather
from hicache.transfer.streams import Buffer, Chunk, CudaOp, QueuedCopy, StreamPair

log = logging.getLogger(__name__)

_MAX_LAST_BYTES = 32 << 20  # maximum size of the last chunk of a load, because its scatter of 20 us overlaps no copy
_STEPS_AT_ONCE = 2  # steps queued when a store is submitted, few enough to hardly delay a load that follows at once
_SUBMIT_S = 1.5e-3  # host time for steps of loads in one call: less than the first layer of a long load takes
_AHEAD = 4  # number of layers queued ahead of the layer for which a forward pass waits
_ENDED = object()


class CudaTransfer:
    """A `TransferBackend` on CUDA. `host`: pinned uint8 [pages, page_bytes]; pages need not be adjacent. Both
    directions share `staging_bytes`. `packer`, if given, packs the pages of `mover`'s pool; then all copies use
    staging."""

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
        self._page_copies = PageCopies(mover, packer)
        self._mover = self._page_copies.mover
        self._host = host
        self._counter = counter
        self._device = mover.table.device
        self._zero_copy = None if packer else ZeroCopyMover(mover, host)
        self._host_address = host.data_ptr()
        self._unstaged = None if packer else UnstagedCopier(mover, host, rows_per_chunk, device_page_tokens)
        self._rows_per_chunk = rows_per_chunk
        self._chunk_pages = max(1, chunk_tokens // mover.page_tokens)
        widest, widest_raw = (
            max(each.group_bytes(layer, 1) for layer in range(mover.num_layers)) for each in (self._mover, mover)
        )
        self._shape = partial(
            Shape,
            layer_bytes=widest,
            num_layers=mover.num_layers,
            grouped=mover.uniform,
            num_buffers=self._unstaged.num_buffers if self._unstaged else 0,
            piece_bytes=self._unstaged.piece_bytes if self._unstaged else 0,
            is_packed=packer is not None,
        )
        with torch.cuda.device(self._device):
            # Loads get more memory than stores: stores have wide groups and short chunks, and loads need the fewest
            # calls if one layer of many pages is copied at a time.
            self.up = StreamPair(staging_bytes * 3 // 4, self._device, -1, widest_raw, self._mover)
            self.down = StreamPair(staging_bytes // 4, self._device, 0, widest_raw, self._mover)
        buffer = self.up.ring[0].bytes
        self._rates = measured_rates(host, buffer, widest, self._zero_copy, mover)
        self._loads = LoadQueue()
        self._stores: deque[Iterator[None]] = deque()  # each iterator queues one step of a store when it is resumed
        # recorded when the first layer of the latest load has arrived; an unrecorded event counts as arrived
        self._first_layer = torch.cuda.Event()
        self._counts = {"unstaged": 0, "strided": 0, "batched": 0, "zero_copy": 0, "delayed": 0}

    def start(self) -> None:
        """Compile every kernel that a copy may need, so that no request waits for a compiler. Streams need no start."""
        with torch.cuda.device(self._device):
            for compiled in (*self._page_copies.movers, self.up.upload, self._zero_copy):
                if compiled is not None:
                    compiled.compile()
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        self._queue_load(sys.maxsize)
        self._issue(True)
        for stream in self._streams():
            stream.synchronize()

    def abandon(self, deadline_s: float) -> None:
        """Drop all steps that are not queued. Streams cannot be stopped, and the caller will release the memory that
        the streams use. Therefore this method waits for the streams until `deadline_s`."""
        for load_id in self._loads.clear():
            self._counter.fail(load_id, TransferError("the engine of this load has been deleted"))
        self._stores.clear()
        try:
            while not all(stream.query() for stream in self._streams()) and time.monotonic() < deadline_s:
                time.sleep(0.001)
        except RuntimeError as error:
            log.debug("the device has failed and runs no copies: %s", error)

    def stats(self) -> dict[str, float]:
        """Return the rates that plans are based on, and the number of copies by method."""
        return {**self._rates.stats(), **{f"{name}_copies": float(count) for name, count in self._counts.items()}}

    def load(self, pages: torch.Tensor, slots: torch.Tensor, load_id: int, rest: torch.Tensor | None = None) -> CudaOp:
        copies = self._page_copies.to_load(pages, slots, rest)
        behind = torch.cuda.Event()
        behind.record(torch.cuda.current_stream(self._device))
        is_device_idle = behind.query()
        kept = [copy.slots for copy in copies]
        op = CudaOp(sum([copy.num_bytes for copy in copies]), kept, partial(self._issue_load, load_id))
        self._loads.put(load_id, self._load_steps(op, copies, load_id, behind))
        self._counter.queue_on_demand(load_id, partial(self._queue_load, load_id))
        self._loads.queue_some(_SUBMIT_S)
        op.is_undelayed = is_device_idle and op.is_queued
        return op

    def store(self, slots: torch.Tensor, pages: torch.Tensor, rest: torch.Tensor | None = None) -> CudaOp:
        copy, ready = self._page_copies.to_store(slots, pages, rest), torch.cuda.Event()
        op = CudaOp(copy.num_bytes, [slots], self._issue)
        ready.record(torch.cuda.current_stream(self._device))
        self._stores.append(self._store_steps(op, copy, ready))
        if not self._first_layer.query():
            self._counts["delayed"] += 1
        elif len(self._stores) == 1:
            self._issue(False, _STEPS_AT_ONCE)
        return op

    def _streams(self) -> list[torch.cuda.Stream]:
        return [stream for pair in (self.up, self.down) for stream in (pair.copy, pair.kernel)]

    def _queue_load(self, load_id: int, layer: int = sys.maxsize - _AHEAD) -> None:
        """Queue all earlier loads, and this load up to `_AHEAD` layers after `layer`, for which a forward pass
        waits."""
        self._loads.queue_layers(load_id, layer + _AHEAD)

    def _issue_load(self, load_id: int, force: bool) -> None:
        """Queue steps of loads, and then of stores. With `force`, queue all steps of this load; otherwise queue only
        some steps of the first loads."""
        if force:
            self._queue_load(load_id)
        else:
            self._loads.queue_some(_SUBMIT_S)
            self._issue(False)

    def _plan_load(self, copies: Sequence[PageCopy]) -> list[QueuedCopy]:
        slots, ids = copies[0].slots, copies[0].segments[0].ids
        slot_runs = self._unstaged.runs(ids, slots.numpy()) if self._unstaged and slots.is_cpu else None
        if slot_runs is not None:
            plan = self._plan(self.up, copies, len(slot_runs), len(slot_runs))
            if plan.method == "unstaged":
                return [QueuedCopy(plan, copies[0], slots, slot_runs=slot_runs)]
        return self._plan_staged(self.up, copies)

    def _plan_staged(self, pair: StreamPair, copies: Sequence[PageCopy]) -> list[QueuedCopy]:
        runs = [[page_runs(segment.ids, self._rows_per_chunk) for segment in copy.segments] for copy in copies]
        plan = self._plan(pair, copies, sum(len(of_place) for of_copy in runs for of_place in of_copy))
        return [QueuedCopy(plan, copy, copy.slots, of_copy) for copy, of_copy in zip(copies, runs, strict=True)]

    def _load_steps(
        self, op: CudaOp, copies: Sequence[PageCopy], load_id: int, behind: torch.cuda.Event
    ) -> Iterator[int]:
        """Queue a group of layers each time the iterator is resumed. `behind`: an event at the end of the work that may
        still use the slots."""
        pair = self.up
        pair.kernel.wait_event(behind)
        try:
            loads = self._plan_load(copies)
            plan = loads[0].plan
            self._counts[plan.method] += 1
            if plan.method == "unstaged":
                pair.copy.wait_event(behind)
            op.began(pair.kernel if plan.method == "zero_copy" else pair.copy)
            yield from self._staged_steps(loads, load_id) if plan.is_staged else self._direct_steps(loads[0], load_id)
        except Exception as error:  # noqa: BLE001 - kept in `op.error`; the consumers of the load raise it
            log.warning("a load could not be queued: %s", error)
            op.error = error
            self._counter.fail(load_id, error)
            op.began(pair.copy)  # needed if the exception was raised before the first `began`
        pair.kernel.wait_stream(pair.copy)  # the copy stream may write to the pool, or still read host pages.
        op.ended(pair.kernel)

    def _record(self, load_id: int, first: int, end: int, stream: torch.cuda.Stream) -> None:
        """Record that layers [first, end) have arrived, on the stream that wrote these layers to the pool."""
        for layer in range(first, end):
            self._counter.record(load_id, layer, stream)
        if not first:
            self._first_layer = torch.cuda.Event()
            self._first_layer.record(stream)

    def _plan(self, pair: StreamPair, copies: Sequence[PageCopy], num_runs: int, slot_runs: int = 0) -> Plan:
        """Choose a plan. Counts are rounded up to powers of two, so that cached plans are reused often."""
        up, has_raw = pair is self.up, len(copies[-1].segments) > 1
        shape = self._shape(
            num_pages=next_power_of_two(sum(copy.num_pages for copy in copies)),
            num_runs=next_power_of_two(num_runs) if can_batch() else 1,
            slot_runs=next_power_of_two(slot_runs),
        )
        # An unpacked page needs at most as much of a staging buffer as two packed pages.
        buffer_bytes = pair.buffer_bytes // 2 if has_raw else pair.buffer_bytes
        return choose(self._rates.up if up else self._rates.down, shape, buffer_bytes, up=up)

    def _issue(self, force: bool, max_steps: float = math.inf) -> None:
        """Queue steps of stores if no load waits for its first layer. With `force`, queue steps of stores in any
        case."""
        while self._stores and max_steps > 0 and (force or self._first_layer.query()):
            if next(self._stores[0], _ENDED) is _ENDED:
                self._stores.popleft()
            max_steps -= 1

    def _store_steps(self, op: CudaOp, copy: PageCopy, ready: torch.cuda.Event) -> Iterator[None]:
        """Queue one step of a store each time the iterator is resumed. `ready`: an event at the end of the work that
        wrote the slots."""
        pair = self.down
        pair.kernel.wait_event(ready)
        op.began(pair.kernel)
        try:
            yield from self._gather_steps(op, copy)
        except Exception as error:  # noqa: BLE001 - kept in `op.error`, which the backup flow counts
            log.warning("a store could not be queued: %s", error)
            op.error = error
        # With this wait, stores end in submission order for any mixture of methods.
        pair.copy.wait_stream(pair.kernel)
        op.ended(pair.copy)

    def _gather_steps(self, op: CudaOp, copy: PageCopy) -> Iterator[None]:
        pair = self.down
        (store,) = self._plan_staged(pair, [copy])
        self._counts[store.plan.method] += 1
        with torch.cuda.stream(pair.kernel):
            store.slots = pair.upload(copy.slots)
            if isinstance(copy.mover, PagePacker):
                store.misfits = torch.zeros(copy.num_pages, dtype=torch.int32, device=self._device)
        for first, end in store.plan.groups:
            for start, stop in self._chunks(store, pair, first, end):
                with torch.cuda.stream(pair.kernel):
                    self._store_step(Chunk(store, first, end, start, stop, False))
                yield
        if store.misfits is not None:
            pair.copy.wait_stream(pair.kernel)
            op.bring_misfits(store.misfits, pair.copy)

    def _direct_steps(self, load: QueuedCopy, load_id: int) -> Iterator[int]:
        """Queue a group of layers each time the iterator is resumed. The layers are written to the slots without
        staging."""
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
                    load.slots, ids = pair.upload(load.slots), torch.from_numpy(load.pages.segments[0].ids)
                    self._zero_copy.load(pair.upload(ids), load.slots, first, end - first)
            self._record(load_id, first, end, pair.copy if plan.method == "unstaged" else pair.kernel)

    def _staged_steps(self, loads: Sequence[QueuedCopy], load_id: int) -> Iterator[int]:
        """Queue a group of layers each time the iterator is resumed. The copy of each chunk is queued before the
        scatter kernel of the previous chunk, so that the link does not wait while the host launches that kernel."""
        chunks = self._chunks_of_groups(loads)
        following = next(chunks, None)
        if following is None:  # the copy has no pages
            self._record(load_id, 0, self._mover.num_layers, self.up.kernel)
            return
        copied = self._queue_copy(following)
        while following is not None:
            chunk, buffer = following, copied
            following = next(chunks, None)
            if following is not None:
                copied = self._queue_copy(following)
            self._queue_scatter(chunk, buffer)
            if chunk.is_last:
                self._record(load_id, chunk.first, chunk.end, self.up.kernel)
                if following is not None:
                    yield chunk.end

    def _chunks_of_groups(self, loads: Sequence[QueuedCopy]) -> Iterator[Chunk]:
        for first, end in loads[0].plan.groups:
            spans = [(load, *span) for load in loads for span in self._chunks(load, self.up, first, end)]
            for at, (load, start, stop) in enumerate(spans, 1):
                yield Chunk(load, first, end, start, stop, at == len(spans))

    def _queue_copy(self, chunk: Chunk) -> Buffer:
        """Queue the copy of a chunk into a staging buffer, and return the buffer."""
        pair = self.up
        buffer = pair.next()
        pair.copy.wait_event(buffer.free)
        self._copy(pair, buffer, chunk)
        buffer.filled.record(pair.copy)
        return buffer

    def _queue_scatter(self, chunk: Chunk, buffer: Buffer) -> None:
        """Queue the kernel that scatters a chunk from its buffer to its slots."""
        pair, (load, first, end, start, stop, _) = self.up, chunk
        with torch.cuda.stream(pair.kernel):
            load.slots = pair.upload(load.slots)  # uploaded once, after the first copies, which do not need the slots
            pair.kernel.wait_event(buffer.filled)
            staging = load.staged(buffer, first, end, start, stop)
            load.pages.mover.scatter(staging, load.slots_of(start, stop), first, end - first)
        buffer.free.record(pair.kernel)

    def _store_step(self, chunk: Chunk) -> None:
        pair, (store, first, end, start, stop, _) = self.down, chunk
        if store.plan.method == "zero_copy":
            assert self._zero_copy is not None
            ids = pair.upload(torch.from_numpy(store.pages.segments[0].ids))
            self._zero_copy.store(store.slots, ids, first, end - first)
            return
        buffer = pair.next()
        pair.kernel.wait_event(buffer.free)
        staging = store.staged(buffer, first, end, start, stop)
        misfits = None if store.misfits is None else store.misfits[start:stop]
        gather(store.pages.mover, store.slots_of(start, stop), staging, first, end - first, misfits)
        buffer.filled.record(pair.kernel)
        pair.copy.wait_event(buffer.filled)
        self._copy(pair, buffer, chunk)
        buffer.free.record(pair.copy)

    def _chunks(self, copy: QueuedCopy, pair: StreamPair, first: int, end: int) -> list[tuple[int, int]]:
        """Divide a copy into chunks of pages that fit a staging buffer. Chunks of stores have at most the configured
        tokens. For loads, the last chunks of the last layers get smaller, because the scatter of these chunks overlaps
        no copy."""
        num_pages, ends = copy.pages.num_pages, copy.pages.mover.ends
        if copy.plan.method == "zero_copy":
            return [(0, num_pages)]
        width = ends[end] - ends[first]
        fit = max(1, pair.buffer_bytes // width)
        if pair is self.down:
            return intervals(num_pages, min(fit, self._chunk_pages))
        chunks = intervals(num_pages, fit)
        return chunks if ends[end] < ends[-1] else tapered(chunks, _MAX_LAST_BYTES // width)

    def _copy(self, pair: StreamPair, buffer: Buffer, chunk: Chunk) -> None:
        """Queue the copy of a chunk between the staging buffer and host pages: from the host for `up`, to the host for
        `down`. A layer of a raw page may be divided between two host pages."""
        copy, first, end, start, stop, _ = chunk
        up, pitch, stream, ends = pair is self.up, self._host.stride(0), pair.copy.cuda_stream, copy.pages.mover.ends
        width = ends[end] - ends[first]
        for segment, runs in zip(copy.pages.segments, copy.runs, strict=True):
            begin, until = segment.within(ends[first], ends[end])
            if begin == until:
                continue
            host_address = self._host_address + begin - segment.start
            address = buffer.address + begin - ends[first]
            if copy.plan.method == "batched":
                on_host = host_address + segment.ids[start:stop] * pitch
                in_buffer = address + np.arange(stop - start) * width
                dst, src = (in_buffer, on_host) if up else (on_host, in_buffer)
                # No work writes the source pages of a load, so the copy engine may read them in any order, which is
                # faster.
                copy_batched(dst, src, until - begin, up, stream)
                continue
            for page, rows, position in runs.within(start, stop):
                staged, hosted = (address + position * width, width), (host_address + page * pitch, pitch)
                dst_run, src_run = (staged, hosted) if up else (hosted, staged)
                copy_strided(*dst_run, *src_run, until - begin, rows, up, stream)
