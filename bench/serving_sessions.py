"""Measures sessions of coding agents under the reference scheduler. The sessions need more KV than device and host can
store.

32 clients send the turns of `sessions.py: Traffic`. The working set is 4 times as large as the device tier, and the
host tier is as large as the device tier. The cases `sessions.host` measure the write policy `exclusive`. They compare
its makespan and its p99 of the time to first token with `write_through`, and its makespan with a run without a host.
Another case is the p99 of the time for which copies of evicted pages blocked a call. Every run has a new engine. The
benchmarks `serving` and `both` use this module.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hicache.bench.common import Report, percentile
from hicache.bench.serving_case import ServedModel, serving
from hicache.bench.sessions import (
    Prompts,
    Scale,
    Traffic,
    Turn,
    TurnQueue,
    describe_turns,
    trace_of,
    traffic_of,
)
from hicache.metrics import HistogramValue, MetricValue
from hicache.replay.simulation import ReplaySettings, replay
from hicache.serving import Request, Scheduler
from hicache.serving.request import RequestOutput
from hicache.serving.warm_up import warm_up

_MAX_RUNNING = 32
_MAX_PASS_S = 0.5  # the default of `hicache serve`
_HOST_TARGET, _POLICY_TARGET, _HOST_P99_TARGET = 1 / 1.8, 0.8, 1.0
_EXPOSED_BOUND_S = 5e-3


@dataclass(frozen=True)
class SessionSizes:
    """Sizes of a run. `device_tokens`, `host_tokens`: sizes of the tiers; the host has the bytes that `host_tokens`
    tokens take on the device. `answer`: tokens of an answer. `clients`: numbers of clients, with a run for each number.
    `num_warm_up`: number of turns at the start that fill the tiers and do not count."""

    scale: Scale
    device_tokens: int
    host_tokens: int
    chunk: int
    answer: int
    clients: tuple[int, ...]
    num_warm_up: int = 0


TRAFFIC = Traffic(
    scale=Scale(requests=450, block_tokens=16, longest=16_384), num_sessions=64, system=400, first=2200, more=120
)
REAL_HOST = SessionSizes(TRAFFIC.scale, 65_536, 65_536, 8192, 16, (32,), 130)
TINY_TRAFFIC = Traffic(
    scale=Scale(requests=60, block_tokens=8, longest=1024), num_sessions=24, system=32, first=150, more=12
)
TINY_HOST = SessionSizes(TINY_TRAFFIC.scale, 1344, 1344, 256, 4, (12,), 30)


@dataclass(frozen=True)
class SessionRun:
    """The outcome of a run, without the warm-up turns: makespan, outputs and metrics."""

    makespan_s: float
    outputs: Sequence[RequestOutput]
    stats: Mapping[str, MetricValue]

    @property
    def first_s(self) -> list[float]:
        return [output.ttft_s for output in self.outputs]

    @property
    def mean_s(self) -> float:
        return sum(self.first_s) / len(self.first_s)

    @property
    def p99_s(self) -> float:
        return percentile(self.first_s, 99)

    def __str__(self) -> str:
        cached = sum(output.hit.tokens for output in self.outputs)
        share = cached / sum(output.prompt_tokens for output in self.outputs)
        return f"{self.makespan_s:.1f} s, first token {self.mean_s:.2f} s (p99 {self.p99_s:.2f}), {share:.3f} cached"


def measure_sessions_host(report: Report, served: ServedModel) -> None:
    """Measure the cases `sessions.host`."""
    on_cuda = served.model.device.type == "cuda"
    sizes, workload = (REAL_HOST, traffic_of(TRAFFIC)) if on_cuda else (TINY_HOST, traffic_of(TINY_TRAFFIC))
    about = f"a working set of {workload.working_set / sizes.device_tokens:.2f} times the device"
    _SessionsBench(report, served, sizes, workload.turns, about).host()


class _SessionsBench:
    """Runs that all serve the same list of turns."""

    def __init__(
        self,
        report: Report,
        served: ServedModel,
        sizes: SessionSizes,
        turns: Sequence[Turn],
        about: str,
    ) -> None:
        self._report = report
        self._served = served
        self._sizes = sizes
        self._turns = turns
        self._about = f"{describe_turns(turns, sizes.scale.block_tokens)}; {about}"

    def host(self) -> None:
        """Measure runs with a host as large as the device, and without a disk."""
        (clients,) = self._sizes.clients
        none = self.run(clients, host_bytes=0)
        copies = self.run(clients, write_policy="write_through")
        exclusive = self.run(clients, write_policy="exclusive")
        host_tokens = exclusive.stats["host.total_tokens"]
        assert isinstance(host_tokens, int)
        note = (
            f"{clients} clients; {self._about}; exclusive {exclusive}; write_through {copies}; without a host {none}; "
            "hits replayed one after the other: "
        )
        rates = replayed_hits(self._turns, self._sizes, host_tokens)
        note += ", ".join(f"{name} {rate:.3f}" for name, rate in rates.items())
        self._case("serving.sessions.host", [exclusive.makespan_s], none.makespan_s, _HOST_TARGET, note)
        self._case("serving.sessions.host.policy", [exclusive.makespan_s], copies.makespan_s, _POLICY_TARGET, "")
        self._case("serving.sessions.host.p99", [exclusive.p99_s], copies.p99_s, _HOST_P99_TARGET, "")
        exposed, stats = exclusive.stats["backup.exposed_seconds"], exclusive.stats
        assert isinstance(exposed, HistogramValue)
        note = (
            f"{exposed.count} copies, of which {sum(exposed.counts[1:])} were waited for, {exposed.sum:.3f} s in all; "
            f"{stats['admit.exchange_pending_attempts']:.0f} admissions put off, {stats['exchange.loads']:.0f} steps "
            f"of loads; {stats['host.returned_tokens']:.0f} tokens dropped as duplicates and copied again"
        )
        self._case("serving.sessions.host.exposed", [_p99_of(exposed)], _EXPOSED_BOUND_S, 1.0, note)

    def _case(self, name: str, seconds: list[float], ceiling_s: float, target: float, note: str) -> None:
        on_cuda = self._served.model.device.type == "cuda"
        self._report.case(
            name, seconds, "s", better="lower", ceiling=ceiling_s, target=target if on_cuda else None, note=note
        )

    def run(
        self,
        clients: int,
        **settings: Any,
    ) -> SessionRun:
        sizes, token_bytes = self._sizes, self._served.token_bytes
        settings.setdefault("host_bytes", sizes.host_tokens * token_bytes)
        settings |= {"device_tokens": sizes.device_tokens, "max_context_len": sizes.scale.longest + sizes.answer}
        with serving(self._served, chunk_tokens=sizes.chunk, **settings) as engine:
            if engine.engine.pool.device.type == "cuda":
                warm_up(engine.engine, engine.runner, sizes.chunk, _MAX_RUNNING)
            engine.first_token_s("warm", np.zeros(sizes.chunk, np.int64), "warm")
            run = serve_turns(engine.scheduler(_MAX_RUNNING, max_pass_s=_MAX_PASS_S), self._turns, sizes, clients)
            return replace(run, stats=engine.engine.metrics())


def serve_turns(scheduler: Scheduler, turns: Sequence[Turn], sizes: SessionSizes, clients: int) -> SessionRun:
    """Serve all turns in a closed loop. There are `clients` clients, each with one open request at a time. Returns the
    outcome of the turns after the warm-up."""
    prompts, left = Prompts(sizes.scale.block_tokens, 0), TurnQueue(turns)
    outputs: list[RequestOutput] = []
    start_s, num_warm_up = time.perf_counter(), sizes.num_warm_up
    while len(outputs) < len(turns):
        while scheduler.num_unfinished < clients and (taken := left.take()) is not None:
            number, turn = taken
            scheduler.submit(Request(str(number), np.array(prompts.of(turn), dtype=np.int64), sizes.answer))
        for output in scheduler.step():
            if output.error is not None:
                raise output.error
            left.answered(turns[int(output.request_id)])
            outputs.append(output)
            if len(outputs) == num_warm_up:
                start_s = time.perf_counter()
    return SessionRun(time.perf_counter() - start_s, outputs[num_warm_up:], {})


def replayed_hits(turns: Sequence[Turn], sizes: SessionSizes, host_tokens: int) -> dict[str, float]:
    """Return the hit rate of each write policy: hit blocks divided by all blocks of the prompts. The turns are replayed
    one after another without a GPU, so the result does not depend on the machine."""
    trace = trace_of(turns, sizes.scale.block_tokens, sizes.num_warm_up)
    device, host = sizes.device_tokens // trace.block_tokens, host_tokens // trace.block_tokens
    ways = {
        "no host": ReplaySettings(device, policy="auto"),
        "write_through": ReplaySettings(device, host, policy="auto", write_policy="write_through"),
        "exclusive": ReplaySettings(device, host, policy="auto", write_policy="exclusive"),
    }
    return {name: replay(trace, settings).hit_rate for name, settings in ways.items()}


def _p99_of(observed: HistogramValue) -> float:
    """Return the upper bound of the bucket that contains the 99th percentile of the observations; 0 if it is the lowest
    bucket."""
    num_below = itertools.accumulate(observed.counts)
    at = next(at for at, num in enumerate(num_below) if num >= 0.99 * observed.count)
    return (0.0, *observed.bounds[1:], math.inf)[at]
