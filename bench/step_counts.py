"""Counts the calls that requests cause on the scheduler's thread, and the files and classes of the called functions.

    requests.<model>.<request>   three requests of 192 tokens: miss, prefetch (from the disk, with its load), commit
                                 (with its backup and its write to the disk), and all together:
        .calls                   Python calls in source files of hicache
        .files, .classes         the source files and the classes that define the called functions
    prompt.<tier>.calls, .ms     a prompt of 128k tokens that is new (cold), or on the device, the host or the disk:
                                 all verbs from prefetch to release, with the polls that they need
    poll.<mode>.<number>.calls, .ms
                                 a poll without news while this number of requests wait for a store that does not answer
    join.calls, .ms              `join` of 120k tokens that a prefetch read while the prompt was computed
    host_page.bytes              memory of the bookkeeping of one host page in Python and numpy, without its key

Counts do not depend on timing, because a store in memory answers only between two counted calls, and all copies end
between two counted calls. The calls that receive these answers are not counted. Times are processor time of the thread
over a real disk, with a pause of a millisecond between two calls.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

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
    StateGeometry,
    build_engine,
)
from hicache.bench.common import BenchUnavailable, Report, no_collection, percentile
from hicache.bench.counting import Calls, Function, classes_of, modules_of
from hicache.bench.throttled import ThrottledStore
from hicache.config import PrefetchMode
from hicache.pages.key import Tokens
from hicache.storage import PageBuffer
from hicache.transfer.cpu import CpuOp, CpuTransfer

NAME = "steps"
DESCRIPTION = "calls of the scheduler's thread: counts, files and classes of requests, and their times"

T = TypeVar("T")
DISK_JOB_PAGES = 32  # maximum pages of a disk job, for small pages
STEP_S = 0.01  # seconds between two polls without news
CHUNK_TOKENS = 8192
PAGE_TOKENS = 64  # tokens of a host page
FILLED_PAGES = 20_480
SHORT_TOKENS, LONG_TOKENS = 192, 131_072
JOIN_COMPUTED_TOKENS = CHUNK_TOKENS  # tokens computed before the join, which loads the other 120k tokens
TIERS = ("cold", "device", "host", "disk")
MODES: tuple[PrefetchMode, ...] = ("auto", "wait_complete")
WAITING = (10, 1000, 10_000)
COMPARED = 64  # maximum number of requests that one poll compares again after an event
SAMPLES, TIMED_POLLS = 5, 100
KEY_BYTES = sys.getsizeof(bytes(32))
_SETTLED_POLLS = 9  # polls have no news if the median count of this many polls is equal twice in a row
_STATE = StateGeometry(((2,),), (2,), torch.float16, torch.float16)
MODELS = {
    "full": ModelGeometry(1, 1, 4),
    "hybrid": ModelGeometry(2, 1, 4, layer_kinds=("full", "recurrent"), state=_STATE),
}


class GatedStore(ThrottledStore):
    """A store in memory that answers only while `gate` is set. It stores the size of each page, but not the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self._sizes = dict[bytes, int]()

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        self.gate.wait()
        return [key in self._sizes for key in keys]

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        self.gate.wait()
        return [self._sizes.get(key) == buffer.nbytes for key, buffer in zip(keys, buffers, strict=True)]

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        self.gate.wait()
        self._sizes |= {key: page.nbytes for key, page in items}
        return [True] * len(items)


class SilentStore(GatedStore):
    """A store that reports every page as present, but reads no page until `gate` is set."""

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        return [True] * len(keys)


class Meter(Protocol):
    """Measures the calls of one engine's methods, and sums the measurements by name."""

    @property
    def store(self) -> GatedStore | None:
        """The store of the engine. Returns None if the engine has a real disk."""
        ...

    def call(self, engine: CacheEngine, name: str, work: Callable[[], T]) -> T: ...


class CallMeter:
    """Records calls. All copies and store jobs end before each call. No store job ends during a call."""

    def __init__(self) -> None:
        self.store = GatedStore()
        self._calls: dict[str, Calls] = {}

    def call(self, engine: CacheEngine, name: str, work: Callable[[], T]) -> T:
        end_transfers(engine)
        self.store.gate.clear()
        try:
            return self._calls.setdefault(name, Calls()).record(work)
        finally:
            self.store.gate.set()

    def functions(self, *names: str) -> list[Function]:
        """Return the functions of hicache that were called under the given names, or under all names."""
        return [function for name in names or self._calls for function in self._calls[name].in_package()]


class TimeMeter:
    """Sums the processor time of the calling thread. A pause before each call lets the engine's threads work."""

    store: GatedStore | None = None

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def call(self, engine: CacheEngine, name: str, work: Callable[[], T]) -> T:
        time.sleep(1e-3)
        start = time.thread_time()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - start
        return result


def end_transfers(engine: CacheEngine) -> None:
    """Wait until all copies in flight have ended, and receive the stores' answers to all jobs in flight."""
    for component in engine.inspect.context.components:
        if component.has_host:
            assert isinstance(component.transfer, CpuTransfer)
            for worker in (component.transfer.up, component.transfer.down):
                barrier = CpuOp(0)
                worker.put(barrier, lambda: None)
                barrier.wait()
    for tier in engine.inspect.context.stores.values():
        while tier.reads.in_flight or tier.writes.in_flight:
            tier.wait(STEP_S)
            tier.poll()


def is_idle(engine: CacheEngine) -> bool:
    """Return whether no copy and no store job is in flight."""
    inspect = engine.inspect
    transfers = (inspect.copies, *inspect.writes, inspect.prefetcher)
    return not any(transfer is not None and transfer.is_busy() for transfer in transfers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Do nothing, because this benchmark has no arguments."""


def run(args: argparse.Namespace, report: Report) -> None:
    if args.device.type != "cpu":
        raise BenchUnavailable("the scheduler's thread is on the CPU; use --device cpu")
    torch.set_num_threads(1)
    loads = [os.getloadavg()[0]]
    for model in MODELS:
        three_requests(model)  # the first run fills caches of the process
        _report_requests(report, model, three_requests(model))
    _report_prompt(report, LONG_TOKENS)
    _report_join(report, LONG_TOKENS)
    for mode in MODES:
        for number in WAITING:
            _report_polls(report, mode, number)
    note = f"without its key, a Python object of {KEY_BYTES} bytes"
    report.case("host_page.bytes", [page_bookkeeping_bytes() - KEY_BYTES], "bytes", better="lower", note=note)
    loads.append(os.getloadavg()[0])
    note = "of the machine, before and after; 1 is this benchmark"
    report.case("load", loads, "processes", better="lower", note=note)


# Engines


@contextmanager
def _engine(geometry: ModelGeometry, store: GatedStore | None, **settings: Any) -> Iterator[CacheEngine]:
    """Build an engine over `store`, or over a temporary disk if `store` is None."""
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            max_requests=8,
            dtype="float16",
            model_id="bench",
            write_policy="write_through",
            disk=DiskConfig(path=folder, budget_bytes=1 << 30) if store is None else None,
            # A single reader answers jobs in order. The timeout is long, because the disk of a busy machine may be
            # slow.
            advanced=AdvancedConfig(disk_reader_threads=1, disk_io_timeout_s=600.0),
            **settings,
        )
        with build_engine(config, geometry, store=store) as engine:
            for tier in engine.inspect.context.stores.values():
                tier.job_pages = DISK_JOB_PAGES
            yield engine


def _tokens(seed: int, number: int) -> Tokens:
    """Return `number` tokens, which are complete pages, and one more token, which no tier stores."""
    return np.random.default_rng(seed).integers(0, 100_000, number + 1)


def _poll_until(meter: Meter, engine: CacheEngine, name: str, done: Callable[[], bool]) -> None:
    while not done():
        meter.call(engine, name, engine.poll)


def _compute(meter: Meter, engine: CacheEngine, name: str, lease: Lease, tokens: Tokens) -> None:
    """Compute the prompt from the end of its cached prefix, in chunks."""
    start = lease.cached_len
    while start < len(tokens):
        chunk_end = min(start + CHUNK_TOKENS, len(tokens))
        start = meter.call(engine, name, lambda: engine.next_stop(lease, start, chunk_end))  # noqa: B023
        if lease.length < start:
            meter.call(engine, name, lambda: engine.extend(lease, start - lease.length))  # noqa: B023
        meter.call(engine, name, lambda: engine.begin_forward([lease]))
        meter.call(engine, name, lambda: engine.commit(lease, tokens[:start]))  # noqa: B023
        meter.call(engine, name, engine.poll)


# Three requests


def three_requests(model: str) -> CallMeter:
    """Record the calls of three requests: a miss; a commit with its backup and its write to disk; and a prefetch from
    the disk with its load."""
    meter, tokens = CallMeter(), _tokens(0, SHORT_TOKENS)
    sizes = {"device_tokens": 1024, "host_bytes": 1 << 16, "max_context_len": 1024}
    pages = {"page_size": 16, "host_page_size": 16, "mamba_chunk_tokens": 16}
    modes = {"prefetch_mode": "wait_complete", "prefill_tokens_per_s": 0}
    with _engine(MODELS[model], meter.store, **sizes, **pages, **modes) as engine:
        request = CacheRequest("first", tokens)
        lease = meter.call(engine, "miss", lambda: engine.acquire(request))
        meter.call(engine, "miss", lambda: engine.begin_forward([lease]))
        _compute(meter, engine, "commit", lease, tokens)
        _poll_until(meter, engine, "commit", lambda: is_idle(engine))
        meter.call(engine, "miss", lambda: engine.release(lease))
        engine.flush()
        engine.reset()
        handle = meter.call(engine, "prefetch", lambda: engine.prefetch("second", tokens))
        _poll_until(meter, engine, "prefetch", lambda: handle.ready)
        lease = meter.call(engine, "prefetch", lambda: engine.acquire(CacheRequest("second", tokens)))
        assert lease.hit.disk == SHORT_TOKENS, f"{lease.hit} of a prompt on the disk"
        meter.call(engine, "prefetch", lambda: engine.begin_forward([lease]))
        _poll_until(meter, engine, "prefetch", lambda: is_idle(engine))
        engine.release(lease)
        engine.check()
    return meter


def _report_requests(report: Report, model: str, meter: CallMeter) -> None:
    for request, names in {"all": (), "miss": ("miss",), "prefetch": ("prefetch",), "commit": ("commit",)}.items():
        functions = meter.functions(*names)
        counts = {
            "calls": [function.module for function in functions],
            "files": modules_of(functions),
            "classes": classes_of(functions),
        }
        for unit, counted in counts.items():
            num_outside = sum(not name.startswith("hicache.storage.") for name in counted)
            note = f"{num_outside} outside hicache.storage"
            report.case(f"requests.{model}.{request}.{unit}", [len(counted)], unit, better="lower", note=note)


# A long prompt


def long_prompt(meter: Meter, num_tokens: int) -> None:
    """Serve one prompt four times: it is computed, then found on the device, on the host and on the disk."""
    sizes = {
        "device_tokens": num_tokens + CHUNK_TOKENS,
        "host_bytes": (3 * num_tokens + CHUNK_TOKENS) * 16,
        "max_context_len": 2 * num_tokens,
        "prefill_tokens_per_s": 0,
        "prefetch_mode": "wait_complete",
    }
    tokens = _tokens(0, num_tokens)
    with _engine(MODELS["full"], meter.store, **sizes) as engine:
        for seed, tier in enumerate(TIERS, 1):
            _warm_up(engine, seed)
            if tier == "host":
                engine.reset(("device",))
            elif tier == "disk":
                engine.reset()
                handle = meter.call(engine, tier, lambda: engine.prefetch(tier, tokens))  # noqa: B023
                _poll_until(meter, engine, tier, lambda: handle.ready)  # noqa: B023
            request = CacheRequest(tier, tokens, reserve_tokens=CHUNK_TOKENS)
            lease = meter.call(engine, tier, lambda: engine.acquire(request))  # noqa: B023
            hit = lease.hit
            found = {"cold": num_tokens - lease.cached_len, "device": hit.device, "host": hit.host, "disk": hit.disk}
            assert found[tier] == num_tokens, f"{hit} of a prompt of {num_tokens} tokens: {tier}"
            _compute(meter, engine, tier, lease, tokens)
            _poll_until(meter, engine, tier, lambda: is_idle(engine))
            meter.call(engine, tier, lambda: engine.release(lease))  # noqa: B023
            _poll_until(meter, engine, tier, lambda: is_idle(engine))
            engine.flush()
        engine.check()


def _warm_up(engine: CacheEngine, seed: int) -> None:
    """Serve one short prompt, so that the first use of each code path is not measured."""
    tokens = _tokens(seed, CHUNK_TOKENS // 8)
    with engine.acquire(CacheRequest("warm", tokens)) as lease:
        engine.commit(lease, tokens)
    engine.flush()


def _report_prompt(report: Report, num_tokens: int) -> None:
    counted = CallMeter()
    long_prompt(counted, num_tokens)
    seconds: dict[str, list[float]] = {tier: [] for tier in TIERS}
    for _ in range(SAMPLES):
        timed = TimeMeter()
        with no_collection():
            long_prompt(timed, num_tokens)
        for tier in TIERS:
            seconds[tier].append(timed.seconds[tier])
    for tier in TIERS:
        _report_call(report, f"prompt.{tier}", counted, tier, seconds[tier])


def _report_call(report: Report, title: str, counted: CallMeter, name: str, seconds: Sequence[float]) -> None:
    functions = counted.functions(name)
    note = f"in {len(modules_of(functions))} files, {len(classes_of(functions))} classes"
    report.case(f"{title}.calls", [len(functions)], "calls", better="lower", note=note)
    report.time(f"{title}.ms", seconds, "ms", note=_range(seconds))


def _range(seconds: Sequence[float]) -> str:
    return f"{min(seconds) * 1e3:.3g} to {max(seconds) * 1e3:.3g} ms of the thread"


# Join


def joined_prompt(meter: Meter, num_tokens: int) -> None:
    """Compute the first chunk of a prompt while the disk reads the rest, and then call `join` to load the rest."""
    sizes = {
        "device_tokens": num_tokens + CHUNK_TOKENS,
        "host_bytes": (2 * num_tokens + CHUNK_TOKENS) * 16,
        "max_context_len": 2 * num_tokens,
        "prefetch_mode": "auto",
    }
    tokens = _tokens(0, num_tokens)
    with _engine(MODELS["full"], meter.store, **sizes) as engine:
        with engine.acquire(CacheRequest("first", tokens)) as lease:
            engine.commit(lease, tokens)
        engine.flush()
        engine.reset()
        handle = engine.prefetch("second", tokens, overlaps=True)
        _poll_until(meter, engine, "poll", lambda: handle.ready)
        lease = engine.acquire(CacheRequest("second", tokens))
        assert not lease.cached_len, f"{lease.hit} of a prompt that is computed while it is read"
        engine.commit(lease, tokens[:JOIN_COMPUTED_TOKENS])
        _poll_until(meter, engine, "poll", lambda: handle.ended)
        meter.call(engine, "join", lambda: engine.join(lease, JOIN_COMPUTED_TOKENS))
        assert lease.cached_len == num_tokens, f"{lease.cached_len} tokens are there after a join"
        engine.release(lease)
        engine.flush()
        engine.check()


def _report_join(report: Report, num_tokens: int) -> None:
    counted, seconds = CallMeter(), list[float]()
    joined_prompt(counted, num_tokens)
    for _ in range(SAMPLES):
        timed = TimeMeter()
        with no_collection():
            joined_prompt(timed, num_tokens)
        seconds.append(timed.seconds["join"])
    _report_call(report, "join", counted, "join", seconds)


# Polls without news


@contextmanager
def waiting_requests(mode: PrefetchMode, number: int) -> Iterator[CacheEngine]:
    """Yield an engine in which `number` requests of one page each wait for a `SilentStore`, and in which polls have no
    more news.

    Mode `auto` always chooses the load, because `prefill_tokens_per_s` is 0.
    """
    store = SilentStore()
    store.gate.clear()
    host_bytes = 2 * number * PAGE_TOKENS * 16 + (1 << 20)
    sizes = {"device_tokens": CHUNK_TOKENS, "host_bytes": host_bytes, "max_context_len": CHUNK_TOKENS}
    with _engine(MODELS["full"], store, prefetch_mode=mode, prefill_tokens_per_s=0, **sizes) as engine:
        try:
            prompts = {str(n): _tokens(n, PAGE_TOKENS) for n in range(number)}
            for name, tokens in prompts.items():
                engine.expect(name, tokens)
            handles = [engine.prefetch(name, tokens) for name, tokens in prompts.items()]
            for _ in range(number // COMPARED):
                calls_of_poll(engine)
            before, after = math.inf, math.nan
            while after != before:
                before, after = after, percentile([calls_of_poll(engine) for _ in range(_SETTLED_POLLS)], 50)
            assert not any(handle.ready for handle in handles), "each request waits"
            yield engine
            for name in prompts:
                engine.cancel(name)
        finally:
            store.gate.set()


def calls_of_poll(engine: CacheEngine) -> int:
    """Return the number of calls of one poll, `STEP_S` after the last poll."""
    time.sleep(STEP_S)
    calls = Calls()
    calls.record(engine.poll)
    return len(calls.in_package())


def _report_polls(report: Report, mode: PrefetchMode, number: int) -> None:
    meter = TimeMeter()
    with waiting_requests(mode, number) as engine, no_collection():
        counts = [calls_of_poll(engine) for _ in range(_SETTLED_POLLS)]
        for n in range(TIMED_POLLS):
            time.sleep(STEP_S)
            meter.call(engine, str(n), engine.poll)
    seconds = [*meter.seconds.values()]
    report.case(f"poll.{mode}.{number}.calls", counts, "calls", better="lower")
    report.time(f"poll.{mode}.{number}.ms", seconds, "ms", note=_range(seconds))


# Memory


def page_bookkeeping_bytes() -> float:
    """Return the bytes that one more host page takes, including its key. To measure this, compares two engines of
    different sizes. All their pages are on the host and in the store, and not on the device."""
    _bookkeeping_bytes(CHUNK_TOKENS // PAGE_TOKENS)  # the first run makes imports, which are not measured
    small, large = (_bookkeeping_bytes(num_pages) for num_pages in (FILLED_PAGES // 2, FILLED_PAGES))
    return (large - small) / (FILLED_PAGES // 2)


def _bookkeeping_bytes(num_pages: int) -> int:
    """Return the bytes that Python and numpy allocate for an engine whose `num_pages` host pages are all filled."""
    sizes = {
        "device_tokens": 2 * CHUNK_TOKENS,
        "host_bytes": num_pages * PAGE_TOKENS * 16,
        "max_context_len": CHUNK_TOKENS,
    }
    prompt_pages = CHUNK_TOKENS // 2 // PAGE_TOKENS
    gc.collect()
    tracemalloc.start()
    try:
        with _engine(MODELS["full"], None, **sizes) as engine:
            for seed in range(num_pages // prompt_pages):
                tokens = _tokens(seed, prompt_pages * PAGE_TOKENS)
                with engine.acquire(CacheRequest("fill", tokens)) as lease:
                    engine.commit(lease, tokens)
                engine.flush()
            engine.reset(("device",))
            del tokens, lease
            gc.collect()
            return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
