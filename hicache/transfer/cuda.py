"""The CUDA backend: the copy engine moves whole runs of pages, kernels in device memory do the scattering.

Up, per group of layers: a strided copy brings the group's segment of each page into one of a ring of staging buffers, a
kernel scatters it to the slots, an event a layer is recorded. The whole load is queued before the forward. Down is the
reverse, at lower stream priority. Nothing here waits for the device, allocates, or loops over pages in Python.

    ring of buffers   copy waits for `free` -> copies -> records `filled` -> kernel waits -> scatters -> records `free`

Figures and the reasons for each choice: docs/performance.md. May import torch, numpy, cuda.bindings, layout, kernels,
config and errors.
"""

from __future__ import annotations

import numpy as np
import torch

from hicache.errors import ConfigError, TransferError
from hicache.kernels.page_copy import PageMover
from hicache.transfer.counter import LayerTransferCounter
from hicache.transfer.plan import Ids, down_group, runs, spans, up_group

try:
    from cuda.bindings import runtime as cudart
except ImportError:
    cudart = None

_RING = 3
_PAGES_PER_RUN = 4  # shorter runs on average than this go as one batched copy


class CudaOp:
    """A copy on the streams: done when its last event is. Holds the index tensors that the streams still read."""

    def __init__(self, num_bytes: int, keep: tuple[torch.Tensor, ...]) -> None:
        self.num_bytes = num_bytes
        self.error: Exception | None = None
        self._keep = keep
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def began(self, stream: torch.cuda.Stream) -> None:
        self._begin.record(stream)

    def ended(self, stream: torch.cuda.Stream) -> None:
        self._end.record(stream)

    def done(self) -> bool:
        return bool(self._end.query())

    def wait(self) -> None:
        self._end.synchronize()

    def seconds(self) -> float:
        return float(self._begin.elapsed_time(self._end)) / 1e3


class _Buffer:
    """One staging buffer of a ring, and the events of its two users."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
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

    def next(self) -> _Buffer:
        self._turn += 1
        return self._ring[self._turn % _RING]


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
        staging_bytes: int,
        chunk_tokens: int,
    ) -> None:
        if cudart is None:
            raise ConfigError("the CUDA backend needs the package cuda-bindings: pip install cuda-bindings")
        self._host, self._mover, self._counter, self._device = host, mover, counter, device
        self._rows_per_chunk, self._page_tokens = rows_per_chunk, page_tokens
        self._chunk_pages = max(1, chunk_tokens // page_tokens)
        self._offsets = np.concatenate([[0], np.cumsum(layer_page_bytes)]).astype(np.int64)
        widest, layers = max(layer_page_bytes), len(layer_page_bytes)
        single = not mover.uniform
        self._up_groups = spans(layers, 1 if single else up_group(widest, layers))
        self._down_groups = spans(layers, 1 if single else down_group(widest, layers))
        with torch.cuda.device(device):
            self._up = _Lane(staging_bytes // 2, device, -1, self._widest(self._up_groups))
            self._down = _Lane(staging_bytes // 2, device, 0, self._widest(self._down_groups))
        self._any_order = cudart.cudaMemcpyAttributes()
        self._any_order.srcAccessOrder = cudart.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderAny
        self._stream_order = cudart.cudaMemcpyAttributes()
        self._stream_order.srcAccessOrder = cudart.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream

    def start(self) -> None:
        """Nothing to start: streams run by themselves."""

    def close(self) -> None:
        for lane in (self._up, self._down):
            lane.copy.synchronize()
            lane.kernel.synchronize()

    def load(self, pages: torch.Tensor, slots: torch.Tensor, load_id: int) -> CudaOp:
        op = CudaOp(len(pages) * int(self._offsets[-1]), (slots,))
        lane, ids = self._up, pages.numpy()
        lane.kernel.wait_stream(torch.cuda.current_stream(self._device))
        op.began(lane.copy)
        try:
            for first, end in self._up_groups:
                for start, stop in self._chunks(lane, first, end, len(ids)):
                    buffer = lane.next()
                    lane.copy.wait_event(buffer.free)
                    staging = self._copy(lane, buffer, ids[start:stop], first, end, up=True)
                    buffer.filled.record(lane.copy)
                    lane.kernel.wait_event(buffer.filled)
                    with torch.cuda.stream(lane.kernel):
                        self._mover.scatter(staging, self._slots(slots, start, stop), first, end - first)
                    buffer.free.record(lane.kernel)
                with torch.cuda.stream(lane.kernel):
                    for layer in range(first, end):
                        self._counter.record(load_id, layer)
        except TransferError as error:
            op.error = error
            self._counter.fail(load_id, error)
        op.ended(lane.kernel)
        return op

    def store(self, slots: torch.Tensor, pages: torch.Tensor) -> CudaOp:
        op = CudaOp(len(pages) * int(self._offsets[-1]), (slots,))
        lane, ids = self._down, pages.numpy()
        lane.kernel.wait_stream(torch.cuda.current_stream(self._device))
        op.began(lane.kernel)
        try:
            for first, end in self._down_groups:
                for start, stop in self._chunks(lane, first, end, len(ids)):
                    buffer = lane.next()
                    lane.kernel.wait_event(buffer.free)
                    staging = self._staging(buffer, stop - start, first, end)
                    with torch.cuda.stream(lane.kernel):
                        self._mover.gather(self._slots(slots, start, stop), staging, first, end - first)
                    buffer.filled.record(lane.kernel)
                    lane.copy.wait_event(buffer.filled)
                    self._copy(lane, buffer, ids[start:stop], first, end, up=False)
                    buffer.free.record(lane.copy)
        except TransferError as error:
            op.error = error
        op.ended(lane.copy)
        return op

    def _widest(self, groups: list[tuple[int, int]]) -> int:
        return int(max(self._offsets[end] - self._offsets[first] for first, end in groups))

    def _chunks(self, lane: _Lane, first: int, end: int, num_pages: int) -> list[tuple[int, int]]:
        """Chunks of pages that fit a staging buffer; down they also stay within the chunk of tokens configured."""
        fit = max(1, lane.buffer_bytes // int(self._offsets[end] - self._offsets[first]))
        return spans(num_pages, fit if lane is self._up else min(fit, self._chunk_pages))

    def _slots(self, slots: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return slots[start * self._page_tokens : stop * self._page_tokens]

    def _staging(self, buffer: _Buffer, num_pages: int, first: int, end: int) -> torch.Tensor:
        width = int(self._offsets[end] - self._offsets[first])
        return buffer.bytes[: num_pages * width].view(num_pages, width)

    def _copy(self, lane: _Lane, buffer: _Buffer, ids: Ids, first: int, end: int, *, up: bool) -> torch.Tensor:
        """Queue the copy of layers [first, end) of host pages `ids` from (up) or to (down) the buffer."""
        staging = self._staging(buffer, len(ids), first, end)
        width, pitch = staging.shape[1], self._host.shape[1]
        host = self._host.data_ptr() + int(self._offsets[first])
        device = buffer.bytes.data_ptr()
        page, count, position = runs(ids, self._rows_per_chunk)
        if len(page) * _PAGES_PER_RUN > len(ids) and len(page) > 1:
            host_at, device_at = host + ids * pitch, device + np.arange(len(ids)) * width
            # Up, the source is a page that nobody writes: the engine may read it in any order, which is faster.
            dst, src, order = (device_at, host_at, self._any_order) if up else (host_at, device_at, self._stream_order)
            status = cudart.cudaMemcpyBatchAsync(
                dst.tolist(), src.tolist(), [width] * len(ids), len(ids), [order], [0], 1, lane.copy.cuda_stream
            )
            _raise_on(status)
            return staging
        kind = cudart.cudaMemcpyKind
        for at, rows, row in zip(page.tolist(), count.tolist(), position.tolist(), strict=True):
            near, far = device + row * width, host + at * pitch
            if up:
                args = (near, width, far, pitch, width, rows, kind.cudaMemcpyHostToDevice)
            else:
                args = (far, pitch, near, width, width, rows, kind.cudaMemcpyDeviceToHost)
            _raise_on(cudart.cudaMemcpy2DAsync(*args, lane.copy.cuda_stream))
        return staging


def _raise_on(status: tuple[object, ...]) -> None:
    if int(status[0]) != 0:  # type: ignore[call-overload]
        raise TransferError(f"the copy engine refused a copy: {status[0]}")
