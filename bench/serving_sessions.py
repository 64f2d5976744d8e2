"""Sessions of coding agents by the reference scheduler: with and without a disk, and in two orders.

    sessions         8 clients; makespan with device, host and disk, over the better of no disk and always loading
    sessions.order   32 clients; time to first token over that of first come, first served, mean and p99
    sessions.host    32 clients, with more sessions than both tiers hold (`sessions.py: Traffic`). The working set is 4
                     times the device, and the host, under `exclusive`, as large as the device. Makespan over no host
                     and over `write_through`; p99 of the time to first token over that of `write_through`; p99 of
                     the time that a call was blocked by a copy of evicted pages

Every run has a new engine, and a new store if it has a disk, which are empty at first. A helper of the serving bench.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
    generated_turns,
    read_turns,
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
_OVERTAKE_S = 15.0
_SESSIONS_TARGET, _MEAN_TARGET, _P99_TARGET = 1.0, 0.8, 1.1
_HOST_TARGET, _POLICY_TARGET, _HOST_P99_TARGET = 1 / 1.8, 0.8, 1.0
_EXPOSED_BOUND_S = 5e-3


@dataclass(frozen=True)
class SessionSizes:
    """Sizes of a run. `device_tokens`, `host_tokens`: sizes of the tiers; the host has the bytes of `host_tokens`
    device tokens. `answer`: tokens of an answer. `clients`: numbers of clients; here of the case with a disk, and of
    the cases without. `num_warm_up`: turns at the start that fill the tiers and do not count."""

    scale: Scale
    device_tokens: int
    host_tokens: int
    chunk: int
    answer: int
    clients: tuple[int, ...]
    num_warm_up: int = 0


REAL = SessionSizes(Scale(requests=300, block_tokens=8), 81_920, 65_536, 8192, 32, (8, 32))
TINY = SessionSizes(Scale(requests=40, block_tokens=8, shortest=16, longest=1500), 3072, 2048, 256, 4, (4, 12))

# The case of a host as large as the device, with a working set of four times the device.
TRAFFIC = Traffic(
    scale=Scale(requests=450, block_tokens=16, longest=16_384), num_sessions=64, system=400, first=2200, more=120
)
REAL_HOST = SessionSizes(TRAFFIC.scale, 65_536, 65_536, 8192, 16, (8, 32), 130)
TINY_TRAFFIC = Traffic(
    scale=Scale(requests=60, block_tokens=8, longest=1024), num_sessions=24, system=32, first=150, more=12
)
TINY_HOST = SessionSizes(TINY_TRAFFIC.scale, 1344, 1344, 256, 4, (4, 12), 30)


@dataclass(frozen=True)
class SessionRun:
    """The outcome of the turns that count: makespan, outputs and metrics."""

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


def measure_sessions(report: Report, served: ServedModel, trace: Path | None, folder: str) -> None:
    """Measure the cases of the disk and of the order. `trace`: a trace of agent sessions; None: generated sessions.
    `folder`: parent of the stores' folders."""
    bench = _SessionsBench.of(report, served, trace, folder)
    bench.tiers()
    bench.order()


def measure_sessions_host(report: Report, served: ServedModel) -> None:
    """Measure the case of a small host."""
    on_cuda = served.model.device.type == "cuda"
    sizes, workload = (REAL_HOST, traffic_of(TRAFFIC)) if on_cuda else (TINY_HOST, traffic_of(TINY_TRAFFIC))
    about = f"a working set of {workload.working_set / sizes.device_tokens:.2f} times the device"
    _SessionsBench(report, served, sizes, workload.turns, "", about).host()


class _SessionsBench:
    """Runs with one list of turns."""

    @classmethod
    def of(cls, report: Report, served: ServedModel, trace: Path | None, folder: str) -> _SessionsBench:
        """Choose the sizes for the device, and read a trace or generate turns."""
        sizes = REAL if served.model.device.type == "cuda" else TINY
        turns = read_turns(trace, sizes.scale) if trace else generated_turns(sizes.scale)
        return cls(report, served, sizes, turns, folder)

    def __init__(
        self,
        report: Report,
        served: ServedModel,
        sizes: SessionSizes,
        turns: Sequence[Turn],
        folder: str,
        about: str = "",
    ) -> None:
        self._report = report
        self._served = served
        self._sizes = sizes
        self._turns = turns
        self._folder = folder
        self._about = "; ".join([describe_turns(turns, sizes.scale.block_tokens), *filter(None, [about])])

    def tiers(self) -> None:
        """Measure the case of the disk."""
        clients = self._sizes.clients[0]
        without = self.run(clients, has_disk=False)
        always = self.run(clients, has_disk=True, prefill_tokens_per_s=0)
        with_disk = self.run(clients, has_disk=True)
        best_s = min(without.makespan_s, always.makespan_s)
        note = (
            f"{clients} clients; {self._about}; with a disk {with_disk}; always loading {always}; without it {without}"
        )
        self._case("serving.sessions", [with_disk.makespan_s], best_s, _SESSIONS_TARGET, note)

    def order(self) -> None:
        """Measure the case of the order, without a disk."""
        clients = self._sizes.clients[1]
        first_come = self.run(clients, max_overtake_s=0.0)
        with_disk = self.run(clients)
        note = f"{clients} clients; {self._about}; least left first {with_disk}; first come, first served {first_come}"
        self._case("serving.sessions.order", [with_disk.mean_s], first_come.mean_s, _MEAN_TARGET, note)
        self._case("serving.sessions.order.p99", [with_disk.p99_s], first_come.p99_s, _P99_TARGET, "")

    def host(self) -> None:
        """Measure the case of a host as large as the device, without a disk."""
        clients = self._sizes.clients[1]
        none = self.run(clients, host_bytes=0)
        copies = self.run(clients, write_policy="write_through")
        with_disk = self.run(clients, write_policy="exclusive")
        host_tokens = with_disk.stats["host.total_tokens"]
        assert isinstance(host_tokens, int)
        note = (
            f"{clients} clients; {self._about}; exclusive {with_disk}; write_through {copies}; without a host {none}; "
            "hits replayed one after the other: "
        )
        rates = replayed_hits(self._turns, self._sizes, host_tokens)
        note += ", ".join(f"{name} {rate:.3f}" for name, rate in rates.items())
        self._case("serving.sessions.host", [with_disk.makespan_s], none.makespan_s, _HOST_TARGET, note)
        self._case("serving.sessions.host.policy", [with_disk.makespan_s], copies.makespan_s, _POLICY_TARGET, "")
        self._case("serving.sessions.host.p99", [with_disk.p99_s], copies.p99_s, _HOST_P99_TARGET, "")
        exposed, stats = with_disk.stats["backup.exposed_seconds"], with_disk.stats
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
        *,
        has_disk: bool = False,
        max_overtake_s: float = _OVERTAKE_S,
        **settings: Any,
    ) -> SessionRun:
        sizes, token_bytes = self._sizes, self._served.token_bytes
        store = Path(tempfile.mkdtemp(prefix="hicache-sessions-", dir=self._folder or None))
        if has_disk:
            budget = len({block for turn in self._turns for block in turn.blocks}) * sizes.scale.block_tokens
            settings["disk"] = {"path": str(store / "store"), "budget_bytes": 3 * budget * token_bytes, "level": 0}
        settings.setdefault("host_bytes", sizes.host_tokens * token_bytes)
        settings |= {"device_tokens": sizes.device_tokens, "max_context_len": sizes.scale.longest + sizes.answer}
        try:
            with serving(self._served, chunk_tokens=sizes.chunk, **settings) as engine:
                if engine.engine.pool.device.type == "cuda":
                    warm_up(engine.engine, engine.runner, sizes.chunk, _MAX_RUNNING)
                engine.first_token_s("warm", np.zeros(sizes.chunk, np.int64), "warm")
                settings = {"max_pass_s": _MAX_PASS_S, "max_overtake_s": max_overtake_s}
                run = serve_turns(engine.scheduler(_MAX_RUNNING, **settings), self._turns, sizes, clients)
                return replace(run, stats=engine.engine.metrics())
        finally:
            shutil.rmtree(store, ignore_errors=True)


def serve_turns(scheduler: Scheduler, turns: Sequence[Turn], sizes: SessionSizes, clients: int) -> SessionRun:
    """Serve all turns in a closed loop of `clients`, each with one request at a time; returns the outcome of the turns
    after the warm-up."""
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
    """Return the share of blocks that each policy would hit if turns were served in sequence: its value on any GPU."""
    trace = trace_of(turns, sizes.scale.block_tokens, sizes.num_warm_up)
    device, host = sizes.device_tokens // trace.block_tokens, host_tokens // trace.block_tokens
    ways = {
        "no host": ReplaySettings(device, policy="auto"),
        "write_through": ReplaySettings(device, host, policy="auto", write_policy="write_through"),
        "exclusive": ReplaySettings(device, host, policy="auto", write_policy="exclusive"),
    }
    return {name: replay(trace, settings).hit_rate for name, settings in ways.items()}


def _p99_of(observed: HistogramValue) -> float:
    """Upper bound of the bucket with the 99th percentile of the observations; 0 for the lowest bucket."""
    num_below = itertools.accumulate(observed.counts)
    at = next(at for at, num in enumerate(num_below) if num >= 0.99 * observed.count)
    return (0.0, *observed.bounds[1:], math.inf)[at]
