"""The cost of a scheduler's calls, in two parts: `times`, and the `counts` of `step_counts.py`.

Part `times` measures each call by the length of a prompt, and by the number of queued requests:

    <call>.<component>.page<size>.<tokens>         one prompt is computed, then found on the device, host and disk
    queued.<call>.<component>.<count>              a short request runs each step, while others wait for a page each

    submit                 prefetch, and expect if requests are queued
    acquire.<tier>         of a prompt that is new, or completely on that tier
    poll.<tier>            while it is backed up and written (new), loaded (host), read (disk)
    commit, extend         of a chunk; of a decoded token
    release, release.disk  of a request; of a request whose prompt was read from the disk
    cancel                 of a request whose prefetch has ended

A value is the longest call; p99 is in the note. It is processor time of the thread, without other processes and the
engine's other threads, which share the interpreter; the longest elapsed time is in the note. The ceiling is the longest
call of the next shorter prompt times the ratio of the lengths, or of the next shorter queue, and at least a
millisecond: a ratio of 2 means twice linear growth, or twice no growth. The model has one or two layers of one head,
and nothing is computed. One thread, with the garbage collector off.

Part `counts` has the Python calls, source files and classes of complete requests, and the memory of a page.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from hicache import (
    AdvancedConfig,
    CacheEngine,
    CacheRequest,
    DiskConfig,
    EngineConfig,
    Lease,
    ModelGeometry,
    Prefetch,
    StateGeometry,
    build_engine,
)
from hicache.bench import step_counts
from hicache.bench.common import BenchUnavailable, Case, Report, no_collection, percentile
from hicache.errors import ResourceExhausted
from hicache.tree.key import Tokens

NAME = "steps"
DESCRIPTION = (
    "calls of the scheduler's thread: times by the length of a prompt and of the queue; counts, files, classes"
)
PARTS = ("times", "counts")

T = TypeVar("T")
TARGET = 2.0
PAGES = (16, 64)
CHUNK = 8192
MAX_ROUNDS, ROUND_TOKENS = 50, 1 << 20
NOTICED_MS = 1.0
DECODED = 16
RUNNING_TOKENS = 1024
ADMITTED = 50  # admitted requests among those that waited; the others are cancelled
BURST = 50  # requests that are submitted between two steps
STEADY = 10 * BURST  # a shorter queue ends before the readers reach their maximum pages per step
STEP_S = 1e-3
_STATE = StateGeometry(((2,),), (2,), torch.float16, torch.float16)
MODELS = {
    "full": ModelGeometry(1, 1, 4),
    "window": ModelGeometry(2, 1, 4, layer_kinds=("full", "window"), window=512),
    "state": ModelGeometry(2, 1, 4, layer_kinds=("full", "recurrent"), state=_STATE),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=PARTS, help="one of the two parts; its result gets a file of its own")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 131_072, 1 << 20], help="of the prompts")
    parser.add_argument("--queued", type=int, nargs="+", default=[1, 1000, 10_000], help="requests that wait")


def run(args: argparse.Namespace, report: Report) -> None:
    if args.device.type != "cpu":
        raise BenchUnavailable("the scheduler's thread is on the CPU; use --device cpu")
    torch.set_num_threads(1)
    if args.only:
        report.bench = f"{NAME}-{args.only}"  # a part does not replace the results of both
    loads = [os.getloadavg()[0]]
    if args.only != "times":
        step_counts.measure(report)
    if args.only != "counts":
        _time_calls(args, report)
    loads.append(os.getloadavg()[0])
    report.case(
        "load", loads, "processes", better="lower", note="of the machine, before and after; 1 is this benchmark"
    )


def _time_calls(args: argparse.Namespace, report: Report) -> None:
    measured: dict[int, Calls]
    for component, page_size in itertools.product(MODELS, PAGES):
        model = Model(component, page_size)
        measured = {}
        for num_tokens in sorted(args.tokens):
            with tempfile.TemporaryDirectory() as folder, no_collection():
                measured[num_tokens] = _prompt(model, num_tokens, Path(folder))
        _report(report, f"{component}.page{page_size}", measured, linear=True)
    for component in MODELS:
        measured, model = {}, Model(component, PAGES[-1])  # one page each: its size makes no difference
        with tempfile.TemporaryDirectory() as folder, no_collection():
            documents = _fill(model, max(args.queued), Path(folder))
            for number in sorted(args.queued):
                measured[number] = _queue(model, number, documents, Path(folder))
        _report(report, component, measured, linear=False)


@dataclass
class Calls:
    """Seconds of each call by name: processor time of the thread (`computed`), and elapsed time."""

    computed: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    elapsed: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def time(self, name: str, call: Callable[..., T], *arguments: object) -> T:
        clock, start = time.perf_counter(), time.thread_time()
        result = call(*arguments)
        self.computed[name].append(time.thread_time() - start)
        self.elapsed[name].append(time.perf_counter() - clock)
        return result


def _report(report: Report, what: str, measured: dict[int, Calls], *, linear: bool) -> None:
    """Add the cases of each call at each size, compared with the next smaller size."""
    for name in measured[max(measured)].computed:
        before: tuple[int, float] | None = None
        for size, calls in measured.items():
            if name not in calls.computed:
                continue
            case = _case(f"{'' if linear else 'queued.'}{name}.{what}.{size}", calls, name)
            if before is not None:
                ceiling = max(NOTICED_MS, before[1] * (size / before[0] if linear else 1))
                case = replace(case, ceiling=ceiling, ratio=case.value / ceiling, target=TARGET)
            report.add(case)
            if linear or size >= STEADY:
                before = size, case.value


def _case(title: str, calls: Calls, name: str) -> Case:
    values = [s * 1e3 for s in calls.computed[name]]
    p10, p50, p90, p99 = (percentile(values, p) for p in (10, 50, 90, 99))
    note = f"p99 {p99:.3g} ms; {max(calls.elapsed[name]) * 1e3:.3g} ms by the clock"
    return Case(
        name=title,
        value=max(values),
        unit="ms",
        better="lower",
        samples=len(values),
        p10=p10,
        p50=p50,
        p90=p90,
        note=note,
    )


@dataclass(frozen=True)
class Model:
    """One component in pages of one size, and engines for it."""

    component: str
    page_size: int

    def engine(self, device_tokens: int, host_tokens: int, folder: Path | None, **changes: Any) -> CacheEngine:
        if self.component == "window":
            changes["window_tokens"] = min(device_tokens, 8 * CHUNK)
        config = EngineConfig(
            device_tokens=device_tokens, host_bytes=host_tokens * 64, page_size=self.page_size,
            host_page_size=self.page_size, max_requests=4, max_context_len=device_tokens, dtype="float16",
            model_id="bench", prefill_tokens_per_s=0, prefetch_mode="wait_complete", mamba_chunk_tokens=self.page_size,
            advanced=AdvancedConfig(disk_io_timeout_s=600.0),  # the disk of a busy machine may stall
            disk=None if folder is None else DiskConfig(path=str(folder / "store"), budget_bytes=8 << 30), **changes,
        )  # fmt: skip
        return build_engine(config, MODELS[self.component])


def _request(engine: CacheEngine, name: str, tokens: Tokens) -> CacheRequest:
    return CacheRequest(name, tokens, reserve_tokens=CHUNK if engine.takes_chunks else None)


def _tokens(seed: int, number: int) -> Tokens:
    """Random tokens: complete pages, and a last token, which is always computed."""
    return np.random.default_rng(seed).integers(0, 150_000, number + 1)


def _compute(calls: Calls, engine: CacheEngine, lease: Lease, tokens: Tokens) -> None:
    """Prefill in chunks, one per step, and decode a few tokens."""
    start = lease.cached_len
    while start < len(tokens):
        start = engine.next_stop(lease, start, min(start + CHUNK, len(tokens)))
        if lease.length < start:
            _when_there_is_room(engine, lambda: engine.extend(lease, start - lease.length))  # noqa: B023
        calls.time("commit", engine.commit, lease, tokens[:start])
        calls.time("poll.new", engine.poll)
    for _ in range(DECODED):
        calls.time("extend", engine.extend, lease, 1)


def _prompt(model: Model, num_tokens: int, folder: Path) -> Calls:
    """Measure a prompt that is computed, then found on every tier."""
    calls, tokens = Calls(), _tokens(0, num_tokens)
    rounds = max(3, min(MAX_ROUNDS, ROUND_TOKENS // num_tokens))
    device_tokens, spare = num_tokens + CHUNK // 8, 4 * CHUNK  # of two prompts, the device holds one
    with model.engine(device_tokens, 2 * num_tokens + spare, None) as engine:
        _serve(calls, engine, "new", tokens)
        engine.flush()
        for _ in range(rounds):
            _serve(calls, engine, "device", tokens)
        other = _tokens(1, num_tokens)
        _serve(Calls(), engine, "new", other)  # evicts the first prompt from the device
        for turn in range(rounds):
            engine.flush()
            _serve(calls, engine, "host", (tokens, other)[turn % 2])
        engine.check()
    with model.engine(device_tokens, num_tokens + spare, folder) as engine:
        _serve(calls, engine, "new", tokens)
        engine.flush()
    for _ in range(max(1, min(10, rounds // 2))):
        with model.engine(device_tokens, num_tokens + spare, folder) as engine:
            handle = calls.time("submit", engine.prefetch, "disk", tokens)
            _until(lambda: handle.ready, lambda: calls.time("poll.disk", engine.poll))  # noqa: B023
            _serve(calls, engine, "disk", tokens)
    return calls


def _serve(calls: Calls, engine: CacheEngine, tier: str, tokens: Tokens) -> None:
    """Serve one request whose prompt is completely on `tier`."""
    lease = calls.time(f"acquire.{tier}", engine.acquire, _request(engine, tier, tokens))
    found = {"new": 0, "device": lease.hit.device, "disk": lease.hit.disk, "host": lease.cached_len - lease.hit.disk}
    if found[tier] != (0 if tier == "new" else len(tokens) - 1) or (tier == "host" and not lease.hit.host):
        raise AssertionError(f"{lease.hit}, where {len(tokens) - 1} tokens are on the {tier}")
    _compute(calls, engine, lease, tokens)
    if tier == "host":
        for _ in range(20):
            calls.time("poll.host", engine.poll)
            time.sleep(STEP_S)
    calls.time("release.disk" if tier == "disk" else "release", engine.release, lease)


def _until(done: Callable[[], bool], step: Callable[[], object]) -> None:
    while not done():
        step()
        time.sleep(STEP_S)  # stands for a forward pass, during which other threads run


def _when_there_is_room(engine: CacheEngine, call: Callable[[], T]) -> T:
    """Call until it succeeds; poll while backups or loads in flight hold the memory that it needs."""
    while True:
        try:
            return call()
        except ResourceExhausted:
            engine.poll()
            time.sleep(STEP_S)


def _fill(model: Model, number: int, folder: Path) -> list[Tokens]:
    """Write prompts of one page each to the disk."""
    documents = [_tokens(2 + n, model.page_size) for n in range(number)]
    with _queue_engine(model, number, folder) as engine:
        for tokens in documents:
            with _when_there_is_room(engine, lambda: engine.acquire(_request(engine, "new", tokens))) as lease:  # noqa: B023
                engine.commit(lease, tokens[:-1])
        engine.flush()
    return documents


def _queue_engine(model: Model, number: int, folder: Path) -> CacheEngine:
    """Build an engine whose device holds a few running requests, and whose host holds all queued ones."""
    return model.engine(8 * RUNNING_TOKENS, 8 * model.page_size * number + 64 * CHUNK, folder, prefetch_host_share=1.0)


def _queue(model: Model, number: int, documents: Sequence[Tokens], folder: Path) -> Calls:
    """Measure rounds of `number` requests that are submitted in bursts, wait for the disk and are admitted."""
    calls, rounds = Calls(), max(1, min(20, 2000 // number, len(documents) // number))
    running = (_tokens(1 << 20 | n, RUNNING_TOKENS) for n in itertools.count())
    with _queue_engine(model, len(documents), folder) as engine:
        for turn in range(rounds):
            waiting: list[Prefetch] = []
            for n, tokens in enumerate(documents[turn * number : (turn + 1) * number]):
                waiting.append(calls.time("submit", _submit, engine, f"q{n}", tokens))
                if n % BURST == BURST - 1:
                    _step(calls, engine, next(running))
            _until(lambda: all(p.ready for p in waiting), lambda: _step(calls, engine, next(running)))  # noqa: B023
            for n, tokens in enumerate(documents[turn * number : (turn + 1) * number]):
                if n < ADMITTED:
                    _admit(calls, engine, f"q{n}", tokens)
                else:
                    calls.time("cancel", engine.cancel, f"q{n}")
        engine.flush()
        engine.check()
    return calls


def _submit(engine: CacheEngine, name: str, tokens: Tokens) -> Prefetch:
    engine.expect(name, tokens)
    return engine.prefetch(name, tokens)


def _step(calls: Calls, engine: CacheEngine, tokens: Tokens) -> None:
    """Run a new request from admission to release."""
    calls.time("poll", engine.poll)
    request = _request(engine, "running", tokens)
    lease = _when_there_is_room(engine, lambda: calls.time("acquire.new", engine.acquire, request))
    calls.time("commit", engine.commit, lease, tokens[:-1])
    calls.time("extend", engine.extend, lease, 1)
    calls.time("release", engine.release, lease)


def _admit(calls: Calls, engine: CacheEngine, name: str, tokens: Tokens) -> None:
    request = _request(engine, name, tokens)
    lease = _when_there_is_room(engine, lambda: calls.time("acquire.disk", engine.acquire, request))
    if lease.hit.disk != len(tokens) - 1:
        raise AssertionError(f"{lease.hit}, where {len(tokens) - 1} tokens were read from the disk")
    calls.time("release", engine.release, lease)
