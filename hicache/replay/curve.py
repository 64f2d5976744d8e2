"""The miss ratio of one tier by its size, under `lru` and under optimal eviction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hicache.replay.optimal import lru_hits_by_size, optimal_hits
from hicache.replay.trace import Trace

_HALVINGS, _SIZES_EACH = 10, 2


@dataclass(frozen=True)
class CurvePoint:
    """The shares of requested blocks that a single device tier misses under `lru` and under optimal eviction. `blocks`:
    size of the tier."""

    blocks: int
    lru: float
    optimal: float


def miss_ratio_curve(trace: Trace) -> list[CurvePoint]:
    """Return the miss ratios of one tier for ascending sizes, two sizes per doubling.

    The last size is the smallest tier in which `lru` has as few misses as in a tier without a limit."""
    prompts, first = trace.prefixes, trace.num_warm_up
    num_blocks = max(1, sum(len(ids) for ids in prompts[first:]))
    hits = lru_hits_by_size(prompts, first)
    largest = max(1, int(np.searchsorted(hits, hits[-1])))
    steps = range(_HALVINGS * _SIZES_EACH, -1, -1)
    points = []
    for blocks in dict.fromkeys(-int(-largest // 2 ** (step / _SIZES_EACH)) for step in steps):
        best = optimal_hits([ids[:blocks] for ids in prompts], blocks)[first:].sum()
        points.append(CurvePoint(blocks, 1 - int(hits[blocks]) / num_blocks, 1 - int(best) / num_blocks))
    return points
