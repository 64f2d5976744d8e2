"""Measures the cost of each copy method between a device and the engine's own host pages, before the pages are first
used.

Copies of two widths give two equations for two unknowns: the costs of a byte and of a piece. Each copy is queued behind
other work, so that the device time does not include the host's time to issue the copy. That time is measured
separately. The copies write to host pages, which are all free at that time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from hicache.errors import TransferError
from hicache.kernels.page_copy import PageMover
from hicache.kernels.zero_copy import ZeroCopyMover
from hicache.transfer.copies import can_batch, copy_batched, copy_strided
from hicache.transfer.plan import ASSUMED, MIN_PIECE_BYTES, CopyCost, LinkDirection, Rates

log = logging.getLogger(__name__)

_BYTES = 32 << 20
_MIN_BYTES = 8 << 20  # minimum size of a copy: a smaller copy would only show its latency
_WIDER = 8  # width of the wide pieces, relative to the narrow pieces
_SAMPLES = 7


def measured_rates(
    host: torch.Tensor, buffer: torch.Tensor, layer_bytes: int, zero_copy: ZeroCopyMover | None, mover: PageMover
) -> Rates:
    """Measure the rates between host pages `[pages, page_bytes]` and `buffer`, unused device memory.

    `layer_bytes`: bytes of the widest layer of a page. `zero_copy` copies between host pages and the buffers of `mover`
    without staging; None if that is not possible. If there are too few pages to measure, or if a measurement fails,
    returns the assumed rates. A failure is logged.
    """
    # plans avoid narrower pieces, and narrower pieces have other costs
    layers = -(-MIN_PIECE_BYTES // layer_bytes)
    widths = [min(times * layers * layer_bytes, host.shape[1]) for times in (1, _WIDER)]
    counts = [min(len(host) - 1, _BYTES // width, buffer.numel() // width) for width in widths]
    if counts[0] * widths[0] < _MIN_BYTES or widths[0] == widths[1] or min(counts) < 1:
        return ASSUMED
    try:
        with torch.cuda.device(buffer.device):
            link = _Link(host, buffer, list(zip(widths, counts, strict=True)))
            if zero_copy is None:
                return Rates(up=link.direction(True), down=link.direction(False))
            ids = torch.zeros(counts[1], dtype=torch.int64, device=buffer.device)  # every id is 0, the page for padding
            slots = torch.zeros(len(ids) * mover.page_tokens, dtype=torch.int64, device=buffer.device)
            (up_s, _), (down_s, _) = link.seconds(
                lambda: zero_copy.load(ids, slots, 0, mover.num_layers),
                lambda: zero_copy.store(slots, ids, 0, mover.num_layers),
            )
            return Rates(up=link.direction(True, up_s), down=link.direction(False, down_s))
    except (TransferError, RuntimeError) as error:
        log.warning("the link of %s could not be measured; the rates of an H200 are assumed: %s", buffer.device, error)
        return ASSUMED


class _Link:
    """Times copies of `count` pieces of `width` bytes, for each of `pieces` (width, count)."""

    def __init__(self, host: torch.Tensor, buffer: torch.Tensor, pieces: list[tuple[int, int]]) -> None:
        self._buffer = buffer
        self._pieces = pieces
        self._page_bytes = host.shape[1]
        self._pitch = host.stride(0)
        self._first = host.data_ptr() + self._pitch  # page 0 is for padding
        self._stream = torch.cuda.Stream(buffer.device)
        self._blocker = torch.empty(_BYTES, dtype=torch.uint8, device=buffer.device)

    def direction(self, up: bool, zero_copy_s: float | None = None) -> LinkDirection:
        assumed = ASSUMED.up if up else ASSUMED.down
        strided = replace(self._cost(self._strided, up), issue_s=0.0)  # one call for any number of pieces
        batched = self._cost(self._batched, up) if can_batch() else assumed.batched
        if zero_copy_s is None:
            return LinkDirection(strided, batched, assumed.zero_copy)
        return LinkDirection(strided, batched, CopyCost(self._pieces[1][1] * self._page_bytes / zero_copy_s))

    def seconds(self, *copies: Callable[[], None]) -> list[tuple[float, float]]:
        """Time `copies` in turns. Returns for each copy the minimum time on the device and the minimum time of issuing
        the copy on the host, in seconds. The minimum is used because other work on the machine can only add time."""
        found: list[list[tuple[float, float]]] = [[] for _ in copies]
        with torch.cuda.stream(self._stream):
            for sample in range(_SAMPLES + 1):
                for copy, samples in zip(copies, found, strict=True):
                    seconds = self._once(copy)
                    if sample:
                        samples.append(seconds)
        return [(min(device_s for device_s, _ in samples), min(host_s for _, host_s in samples)) for samples in found]

    def _once(self, copy: Callable[[], None]) -> tuple[float, float]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(64):  # keeps the stream busy while the copy is issued
            self._blocker.zero_()
        begin.record()
        start = time.perf_counter()
        copy()
        issued = time.perf_counter() - start
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, issued

    def _cost(self, copy: Callable[[int, int, bool], None], up: bool) -> CopyCost:
        """Compute the cost of a byte and of a piece from seconds = bytes / bytes_per_s + pieces * piece_s for the two
        widths."""
        (w0, n0), (w1, n1) = self._pieces
        (t0, issue_s), (t1, _) = self.seconds(*(partial(copy, w, n, up) for w, n in self._pieces))
        b0, b1 = w0 * n0, w1 * n1
        piece_s = max(0.0, (b1 * t0 - b0 * t1) / (b1 * n0 - b0 * n1))
        return CopyCost(b1 / max(t1 - n1 * piece_s, 1e-9), piece_s, issue_s / n0)

    def _strided(self, width: int, count: int, up: bool) -> None:
        buffer, host = (self._buffer.data_ptr(), width), (self._first, self._pitch)
        dst, src = (buffer, host) if up else (host, buffer)
        copy_strided(*dst, *src, width, count, up, self._stream.cuda_stream)

    def _batched(self, width: int, count: int, up: bool) -> None:
        order = np.arange(count)
        buffer, host = self._buffer.data_ptr() + order * width, self._first + (order * 7919 % count) * self._pitch
        dst, src = (buffer, host) if up else (host, buffer)
        copy_batched(dst, src, width, up, self._stream.cuda_stream)
