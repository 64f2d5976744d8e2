"""Device time of kernels that are shorter than their launches: many are queued before the first begins.

A busy engine queues far ahead of the device, so only the device time counts. Launch cost on the host is not included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hicache.bench.common import Timer, interleave, wall_timer

_SLEEP_CYCLES = 400_000  # per run: at least 0.2 ms, longer than the host takes to queue it

Run = Callable[[], object]


def queued_timer(device: torch.device, repeat: int) -> Timer:
    """Device seconds of one of `repeat` runs in a row, all queued before the first begins; else the host's clock."""
    if device.type != "cuda":
        return wall_timer()

    def measure(run: Run) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        torch.cuda._sleep(_SLEEP_CYCLES * repeat)
        start.record()
        for _ in range(repeat):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeat

    return measure


def seconds_each(
    variants: Mapping[str, Run], *, samples: int, device: torch.device, repeat: int = 8
) -> dict[str, list[float]]:
    """Device seconds of one run of each variant, timed in turns, each as one of `repeat` in a row."""
    return interleave(variants, samples=samples, timer=queued_timer(device, repeat))
