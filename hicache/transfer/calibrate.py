"""What the link does between a device and the host's own pages: each way of copying, measured before its first use.

Two widths of piece give two equations, for the cost of a byte and that of a piece. Each copy is queued behind another,
so that what its issuing takes is not counted twice: that is the host's, and measured apart. Pages are written: they are
free at that time. May import torch, numpy, kernels and the rest of its package.
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
from hicache.kernels.direct_copy import DirectMover
from hicache.transfer.copies import can_batch, copy_batched, copy_strided
from hicache.transfer.plan import ASSUMED, MIN_PIECE_BYTES, Direction, Rates, Way

log = logging.getLogger(__name__)

_BYTES = 32 << 20
_LEAST_BYTES = 8 << 20  # of a copy: below this, latency is all that would be seen
_WIDER = 8  # times the narrowest pieces
_SAMPLES = 7


def measured_rates(
    host: torch.Tensor, near: torch.Tensor, layer_bytes: int, num_layers: int, direct: DirectMover, page_tokens: int
) -> Rates:
    """The rates between host pages `[pages, page_bytes]` and `near`, device memory that nobody uses.

    The assumed ones where the host is too small to show them or a measurement fails, which is logged.
    """
    layers = -(-MIN_PIECE_BYTES // layer_bytes)  # narrower pieces are avoided, and tell nothing of wider ones
    widths = [min(times * layers * layer_bytes, host.shape[1]) for times in (1, _WIDER)]
    counts = [min(len(host) - 1, _BYTES // width, near.numel() // width) for width in widths]
    if counts[0] * widths[0] < _LEAST_BYTES or widths[0] == widths[1] or min(counts) < 1:
        return ASSUMED
    try:
        with torch.cuda.device(near.device):
            link = _Link(host, near, list(zip(widths, counts, strict=True)))
            ids = torch.zeros(counts[1], dtype=torch.int64, device=near.device)  # all of them the sink
            slots = torch.zeros(len(ids) * page_tokens, dtype=torch.int64, device=near.device)
            (up_s, _), (down_s, _) = link.seconds(
                lambda: direct.load(ids, slots, 0, num_layers), lambda: direct.store(slots, ids, 0, num_layers)
            )
            return Rates(up=link.direction(True, up_s), down=link.direction(False, down_s))
    except (TransferError, RuntimeError) as error:
        log.warning("the link of %s could not be measured, assuming that of an H200: %s", near.device, error)
        return ASSUMED


class _Link:
    """Copies of `count` pieces of `width` bytes, for each of `pieces` (width, count)."""

    def __init__(self, host: torch.Tensor, near: torch.Tensor, pieces: list[tuple[int, int]]) -> None:
        self._host, self._near, self._pieces = host, near, pieces
        self._pitch = host.shape[1]
        self._first = host.data_ptr() + self._pitch  # page 0 is the sink
        self._stream = torch.cuda.Stream(near.device)
        self._blocker = torch.empty(_BYTES, dtype=torch.uint8, device=near.device)

    def direction(self, up: bool, direct_s: float) -> Direction:
        assumed = ASSUMED.up if up else ASSUMED.down
        strided = replace(self._way(self._strided, up), issue_s=0.0)  # one call, whatever the pieces
        batched = self._way(self._batched, up) if can_batch() else assumed.batched
        pages = self._pieces[1][1]
        return Direction(strided, batched, Way(pages * self._pitch / direct_s))

    def seconds(self, *copies: Callable[[], None]) -> list[tuple[float, float]]:
        """Of each copy, timed in turns, the least that it takes on the device, and its issuing on the host: whatever
        else goes on only ever adds to them."""
        found: list[list[tuple[float, float]]] = [[] for _ in copies]
        with torch.cuda.stream(self._stream):
            for turn in range(_SAMPLES + 1):
                for copy, samples in zip(copies, found, strict=True):
                    seconds = self._once(copy)
                    if turn:
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

    def _way(self, copy: Callable[[int, int, bool], None], up: bool) -> Way:
        """Solve seconds = bytes / rate + pieces * piece_s for the two widths."""
        (w0, n0), (w1, n1) = self._pieces
        (t0, issue_s), (t1, _) = self.seconds(*(partial(copy, w, n, up) for w, n in self._pieces))
        b0, b1 = w0 * n0, w1 * n1
        piece_s = max(0.0, (b1 * t0 - b0 * t1) / (b1 * n0 - b0 * n1))
        return Way(b1 / max(t1 - n1 * piece_s, 1e-9), piece_s, issue_s / n0)

    def _strided(self, width: int, count: int, up: bool) -> None:
        near, far = self._near.data_ptr(), self._first
        to, of = ((near, width), (far, self._pitch)) if up else ((far, self._pitch), (near, width))
        copy_strided(*to, *of, width, count, up, self._stream.cuda_stream)

    def _batched(self, width: int, count: int, up: bool) -> None:
        order = np.arange(count)
        near, far = self._near.data_ptr() + order * width, self._first + (order * 7919 % count) * self._pitch
        to, of = (near, far) if up else (far, near)
        copy_batched(to, of, width, up, self._stream.cuda_stream)
