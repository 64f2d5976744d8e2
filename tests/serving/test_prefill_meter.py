"""The prefill meter: which passes count, with which tokens and times."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from disk_case import Clock
from hicache import CacheEngine, CacheRequest, Hit, Lease, build_engine
from hicache.serving import Request
from hicache.serving.passes import Chunk
from hicache.serving.prefill_meter import PrefillMeter, PrefillPace
from hicache.serving.request_queue import ScheduledRequest
from toy_model import GEOMETRY, compute, config, serve

TOKENS = np.arange(96, dtype=np.int64)


def speed(engine: CacheEngine) -> float:
    return engine.stats()["cost.prefill_tokens_per_second"]


def chunk(lease: Lease, start: int, end: int) -> Chunk:
    return Chunk(lease, TOKENS, start, end)


def test_the_engine_learns_the_speed_of_passes_over_prompts() -> None:
    """A pass counts once, with the tokens of all its prompts and its own time, so the result is the speed of the
    device, not of a request. A pass that only decodes, raises, or waits for a load does not count."""
    clock = Clock()
    with build_engine(config(), GEOMETRY) as engine:
        meter = PrefillMeter(engine, clock)
        assert meter.saved_s(Hit(device=8)) == {}, "nothing was measured yet"
        with engine.acquire(CacheRequest("a", TOKENS[:65])) as lease, engine.acquire(CacheRequest("b", [5])) as other:
            with meter.measure([Chunk(other, TOKENS, 0, 1)]):
                clock.now_s += 100
            with pytest.raises(ZeroDivisionError), meter.measure([chunk(lease, 0, 64)]):
                raise ZeroDivisionError
            assert speed(engine) == 0
            with meter.measure([chunk(lease, 0, 16), chunk(lease, 16, 32), Chunk(other, TOKENS, 0, 1)]):
                clock.now_s += 2
            assert speed(engine) == pytest.approx(16)
            assert meter.saved_s(Hit(device=8, disk=24)) == pytest.approx(
                {"device": 0.5, "host": 0, "disk": 1.5, "remote": 0}
            )
        for n in range(3):  # more than the device holds, so the first prompt is then on the host
            serve(engine, f"r{n}", TOKENS + n)
            engine.flush()
        with engine.acquire(CacheRequest("c", TOKENS)) as lease:
            assert lease.hit.host and not all(load.completed for load in lease.loads)
            for seconds, loading in ((1000, True), (1, False)):
                with meter.measure([chunk(lease, lease.cached_len, 96)]):
                    clock.now_s += seconds
                assert (speed(engine) == pytest.approx(16)) == loading
                engine.flush()


def test_the_pace_follows_the_position_and_the_machine() -> None:
    """The measured cost of attention makes a pass after a long cached prefix shorter than one at the beginning of a
    prompt. If the machine becomes slower, later passes are shorter."""

    def seconds(start: int, num_tokens: int, slowness: float) -> float:
        return slowness * num_tokens * (1 + (start + num_tokens / 2) / 16_384) / 4000

    pace, where, size = PrefillPace(0.5, math.inf), 0, 2048
    passes: list[list[float]] = []
    for slowness, starts in ((1, (0, 0, 8192, 16_384)), (1, (100_000, 0, 120_000)), (5, (0,) * 6)):
        passes.append([])
        for start in starts:
            request = ScheduledRequest(Request("a", np.zeros(1, dtype=np.int64), 1), 0, 0.0)
            request.kv_len = where = start
            size = min(8192, pace.budget(8192, True).share_of(request)) if len(passes) > 1 else size
            passes[-1].append(seconds(where, size, slowness))
            pace.observe(size, passes[-1][-1], where + size / 2)
    assert all(0.25 < took <= 0.5 for took in passes[1])
    assert passes[2][0] > 0.5 and all(0.25 < took <= 0.5 for took in passes[2][1:])


@pytest.mark.gpu
def test_passes_on_the_device_are_timed_there() -> None:
    """On CUDA a pass counts when the device has finished it, with its time on the device."""
    with build_engine(config(device="cuda"), GEOMETRY) as engine:
        meter = PrefillMeter(engine)
        with engine.acquire(CacheRequest("a", TOKENS)) as lease:
            with meter.measure([chunk(lease, 0, 96)]):
                compute(engine, lease, TOKENS, 0, 96)
            assert speed(engine) == 0
            torch.cuda.synchronize()
            meter.report()
            assert speed(engine) > 0
