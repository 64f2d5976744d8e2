"""Packed pages beside a forward of the 8B geometry: what a load hides, and what it costs a batch that decodes.

    overlap   new tokens over a prefix that is loaded meanwhile, layer by layer, as in the overlap bench
    decode    steps of a batch over KV that stays on the device, back to back within a load at full speed. On CUDA a
              step is a captured graph, as servers have it, so that launching it is no part of the figure

A helper of the bench of packed pages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial

import torch

from hicache.bench.common import Report
from hicache.bench.forward8b import Forward, ForwardShape
from hicache.bench.overlap import CONTIGUOUS, Order, beside_load, measure_overlap
from hicache.bench.packed_sample import KvSample
from hicache.bench.stage import Stage

OVERLAP_TARGET, DECODE_TARGET = 0.93, 1.02
_BATCH = 64


def measure_forwards(
    report: Report, shape: ForwardShape, sample: KvSample, device: torch.device, tokens: int, samples: int, new: int
) -> None:
    """`tokens`: of the prefix. `new`: tokens of the forward that overlaps its load."""
    with closing(Stage(shape, CONTIGUOUS, tokens, device, kv_packing="4", sample=sample)) as stage:
        measure_overlap(report, stage, samples, Order(CONTIGUOUS, "packed.overlap.", target=OVERLAP_TARGET), new)
        _decode(report, stage, samples)
        stage.rig.verify()


def _decode(report: Report, stage: Stage, samples: int) -> None:
    slots, device = stage.new_slots, stage.device
    batch = min(_BATCH, len(slots) // 2)
    forward = Forward(stage.shape, stage.rig.pool, slots[:-batch], slots[-batch:])
    stage.rig.counter.set_consumer(-1)
    step: Callable[[], object] = partial(forward, forward.suffix(batch))
    if device.type == "cuda":
        step = _captured(step, device)
    what = f"steps of {batch} rows, which read {len(slots)} tokens of KV"
    beside_load(report, stage, samples, "packed.decode", what, step, DECODE_TARGET)


def _captured(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay
