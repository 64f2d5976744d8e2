"""Costs of the engine's calls, counted in function calls instead of time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from component_case import STATES
from costs import calls_of
from disk_case import Clock, Gate
from hicache import (
    AdvancedConfig,
    CacheEngine,
    CacheRequest,
    DiskConfig,
    LookupResult,
    ModelGeometry,
    Prefetch,
    build_engine,
)
from hicache.config import PrefetchMode
from hicache.pages.writes import Round, WriteScheduler
from hicache.storage.process.client import ClientQueue, StoreClient
from prefetch_case import PacedStore
from prefetch_case import engine_of as paced_engine
from toy_model import GEOMETRY, config
from waiting import BOUND_S, eventually

PAGE = 8
MAX_JOBS = 8  # that one poll submits to a store
IDLE_POLL_CALLS = 64  # largest cost of a poll that finds no answer
PAGE_READ_CALLS = 4  # largest cost of reading a page of a long prompt
CHUNK_CALLS = 540  # largest cost of a chunk of a computed prompt
SHORT_PROMPT_CALLS = 950  # largest cost of a prefetch of 24 pages


def engine_of(
    path: Path, num_pages: int, queue_jobs: int = 1024, model: ModelGeometry = GEOMETRY, **more: object
) -> CacheEngine:
    disk = DiskConfig(path=str(path), budget_bytes=64 << 20)
    advanced = AdvancedConfig(transfer_chunk_tokens=16, disk_queue_jobs=queue_jobs)
    tokens = (num_pages + 16) * PAGE
    sizes = {"device_tokens": tokens, "host_bytes": tokens * 192, "max_context_len": tokens, **more}
    return build_engine(config(**sizes, disk=disk, prefetch_mode="wait_complete", advanced=advanced), model)


def calls_until(engine: CacheEngine, *handles: Prefetch) -> list[int]:
    """The number of calls of each poll until these prefetches are ready. Before each poll the store has answered all
    jobs that it got."""
    steps, disk = [], engine.inspect.context.disk
    while not all(handle.ready for handle in handles):
        eventually(lambda: (disk.poll(), not disk.reads.in_flight)[1])
        steps.append(calls_of(engine.poll))
    return steps


def compute(engine: CacheEngine, tokens: np.ndarray) -> None:
    with engine.acquire(CacheRequest("first", tokens)) as lease:
        engine.commit(lease, tokens)
    engine.flush()


def test_a_prompt_from_the_disk_is_linear_in_its_length(tmp_path: Path) -> None:
    """Reading and admitting 1024 pages takes about four times the calls of 256 pages. Jobs of one poll share most
    calls."""
    tokens = np.random.default_rng(0).integers(0, 1 << 20, 1024 * PAGE + 1)
    with engine_of(tmp_path, 1024) as engine:
        compute(engine, tokens)
    read, admit = {}, {}
    for num_pages in (256, 1024):
        with engine_of(tmp_path, 1024) as engine:
            prompt = tokens[: num_pages * PAGE + 1]
            handle = engine.prefetch("again", prompt)
            read[num_pages] = sum(calls_until(engine, handle))
            leases = []
            admit[num_pages] = calls_of(lambda: leases.append(engine.acquire(CacheRequest("again", prompt))))  # noqa: B023
            assert leases[0].hit.disk == num_pages * PAGE
            engine.release(leases[0])
            engine.check()
    assert read[1024] < min(5 * read[256], PAGE_READ_CALLS * 1024)
    assert admit[1024] < 5 * admit[256]


def test_a_chunk_of_a_new_prompt_costs_few_calls(tmp_path: Path) -> None:
    """Slots, commit and backup of a chunk take the same calls for a chunk of 4 and of 64 pages, with few and with many
    pages before it."""
    tokens, calls = np.random.default_rng(0).integers(0, 1 << 20, 512 * PAGE), list[int]()
    with engine_of(tmp_path, 512) as engine:
        lease = engine.acquire(CacheRequest("long", tokens, reserve_tokens=4 * PAGE))

        def compute_chunk(end: int) -> None:
            if lease.length < end:
                engine.extend(lease, end - lease.length)
            engine.begin_forward([lease])
            engine.commit(lease, tokens[:end])

        for end in (*range(4 * PAGE, 64 * PAGE, 4 * PAGE), *range(64 * PAGE, len(tokens) + 1, 64 * PAGE)):
            calls.append(calls_of(lambda: compute_chunk(end)))  # noqa: B023
            engine.flush()
        engine.release(lease)
        engine.check()
    assert max(calls) < CHUNK_CALLS


def test_a_short_prompt_from_the_disk_costs_few_calls(tmp_path: Path) -> None:
    """A prefetch of 24 pages takes few calls from its start until it is ready."""
    tokens = np.random.default_rng(0).integers(0, 1 << 20, 24 * PAGE + 1)
    with engine_of(tmp_path, 32) as engine:
        compute(engine, tokens)
    with engine_of(tmp_path, 32) as engine:
        handles: list[Prefetch] = []
        started = calls_of(lambda: handles.append(engine.prefetch("again", tokens)))
        assert started + sum(calls_until(engine, *handles)) < SHORT_PROMPT_CALLS
        assert handles[0].read_tokens == 24 * PAGE


def test_a_poll_gives_a_store_few_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll gives a store few jobs, however long a prompt is and however many of its pages wait. The limit holds for
    writes and for reads."""
    jobs, submit = list[object](), ClientQueue.submit
    monkeypatch.setattr(ClientQueue, "submit", lambda queue, *more: jobs.extend(more) or submit(queue, *more))

    def most_jobs(done: Callable[[], bool]) -> int:
        """Poll until `done`; returns the largest number of jobs of a poll."""
        counts = [len(jobs)]

        def poll() -> bool:
            jobs.clear()
            engine.poll()
            counts.append(len(jobs))
            return done()

        eventually(poll, engine.stats)
        jobs.clear()
        return max(counts)

    tokens = np.random.default_rng(0).integers(0, 1 << 20, 1024 * PAGE + 1)
    with engine_of(tmp_path, 1024, host_bytes=3 * 1024 * PAGE * 192) as engine:
        with engine.acquire(CacheRequest("first", tokens)) as lease:
            engine.commit(lease, tokens)
        assert most_jobs(lambda: engine.stats()["persist.bytes"] == 1024 * PAGE * 192) <= MAX_JOBS
    with engine_of(tmp_path, 1024) as engine:
        handle = engine.prefetch("again", tokens)
        assert most_jobs(lambda: handle.ready) <= MAX_JOBS
        assert handle.read_tokens == 1024 * PAGE
        engine.cancel("again")
        engine.flush()
        engine.check()


def test_each_written_page_tells_the_store_few_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt grows by one page at a time, as in decoding. Each written page reports at most four keys to the store,
    however long the prompt has become."""
    told, used = list[bytes](), StoreClient.used
    monkeypatch.setattr(StoreClient, "used", lambda client, keys: told.extend(keys) or used(client, keys))
    tokens = np.random.default_rng(0).integers(0, 1 << 20, 256 * PAGE)
    with engine_of(tmp_path, 256) as engine, engine.acquire(CacheRequest("a", tokens)) as lease:
        for end in range(PAGE, len(tokens) + 1, PAGE):
            engine.commit(lease, tokens[:end])
            engine.flush()
        assert engine.stats()["persist.bytes"] == 256 * PAGE * 192
        assert 0 < len(told) <= 4 * 256


def test_a_step_asks_a_write_budget_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the budget refuses pages, a step without answers asks it again only after its clock has advanced. A flush
    writes these pages, and afterwards the budget bounds later writes again."""
    rounds, next_round, clock = list[Round](), WriteScheduler.next_round, Clock()
    monkeypatch.setattr(WriteScheduler, "next_round", lambda each: rounds.append(next_round(each)) or rounds[-1])
    disk = DiskConfig(path=str(tmp_path / "s"), budget_bytes=4 << 20, write_budget="1kB")  # allows 20 pages at once
    with build_engine(config(disk=disk, write_policy="write_through"), GEOMETRY, clock=clock) as engine:
        copies, (writes,) = engine.inspect.copies, engine.inspect.writes

        def compute(name: str, seed: int) -> None:
            tokens = np.random.default_rng(seed).integers(0, 1 << 20, 8 * PAGE + 1)
            with engine.acquire(CacheRequest(name, tokens)) as lease:
                engine.commit(lease, tokens)
            eventually(lambda: engine.poll() or not (copies.is_busy() or writes.is_busy()))

        clock.now_s += 30  # the budget starts empty
        for n in range(4):
            compute(f"r{n}", n)
        assert 0 < engine.stats()["persist.bytes"] < 32 * PAGE * 192
        rounds.clear()
        for _ in range(50):
            engine.poll()
        assert not rounds
        clock.now_s += 0.1
        engine.poll()
        assert rounds == [[]]
        engine.flush()
        assert engine.stats()["persist.bytes"] == 32 * PAGE * 192
        compute("later", 5)
        assert engine.stats()["persist.bytes"] == 32 * PAGE * 192
        engine.check()


def test_a_hybrid_prompt_without_states_costs_linear_time(tmp_path: Path) -> None:
    """Two prompts differ in their last page, and the disk has no state of their common prefix. A lookup of the second
    takes about four times the calls for 1024 pages as for 256."""
    lookups = {}
    for num_pages in (256, 1024):
        tokens = np.random.default_rng(0).integers(0, 1 << 20, num_pages * PAGE + 1)
        path, sizes = tmp_path / str(num_pages), {"mamba_size": 16, "host_states": 12, "mamba_chunk_tokens": PAGE}
        with engine_of(path, 1024, model=STATES, **sizes) as engine:
            compute(engine, tokens[:-1])
        with engine_of(path, 1024, model=STATES, **sizes) as engine:
            found: list[LookupResult] = []
            other = np.concatenate([tokens[: -2 * PAGE], np.zeros(2 * PAGE, np.int64)])
            lookups[num_pages] = calls_of(lambda: found.append(engine.lookup(other, disk_wait_s=BOUND_S)))  # noqa: B023
            assert found[0].disk_known and found[0].disk == 0
    assert lookups[1024] < 5 * lookups[256]


def test_a_prompt_that_the_queue_of_reads_cannot_take(store: PacedStore) -> None:
    """A prompt fills the queue of reads many times. A poll that finds the queue full costs few calls a page."""
    tokens, steps = np.random.default_rng(0).integers(0, 1 << 20, 1024 * PAGE + 1), list[int]()
    sizes = {"device_tokens": 1040 * PAGE, "host_bytes": 1040 * PAGE * 192, "max_context_len": 1040 * PAGE}
    with paced_engine(store, **sizes) as engine:
        compute(engine, tokens)
    advanced = AdvancedConfig(transfer_chunk_tokens=16, disk_queue_jobs=1, disk_reader_threads=1, disk_io_timeout_s=1e8)
    with paced_engine(store, **sizes, advanced=advanced) as engine:
        store.hold()
        handle = engine.prefetch("again", tokens)
        eventually(lambda: steps.append(calls_of(engine.poll)) or engine.stats()["prefetch.refused_jobs"])
        store.allow(1 << 20)
        eventually(lambda: steps.append(calls_of(engine.poll)) or handle.ready)
        assert handle.read_tokens == 1024 * PAGE
    assert max(steps) < 3 * 1024


def calls_of_quiet_poll(engine: CacheEngine, store: PacedStore, number: int) -> float:
    """The median calls of a poll, over polls 10 ms apart. By then the policy has compared each of `number` requests
    since the last change."""
    calls = []
    for _ in range(100 + number // 25):
        store.clock.now_s += 1e-2
        calls.append(calls_of(engine.poll))
    return float(np.median(calls[-20:]))


@pytest.mark.parametrize(
    ("mode", "host_pages"), [("auto", 4000), ("auto", 60), ("wait_complete", 60), ("best_effort", 60)]
)
def test_a_poll_costs_the_same_however_many_prefetches_wait(
    mode: PrefetchMode, host_pages: int, store: PacedStore
) -> None:
    """A poll without news takes the same calls for 10 and for 1000 prefetches, with and without free host pages."""
    rng, quiet = np.random.default_rng(0), dict[int, float]()
    prompts = [rng.integers(0, 1 << 20, 2 * PAGE + 1) for _ in range(1000)]
    with paced_engine(store, host_bytes=4000 * PAGE * 192, device_tokens=40_000) as engine:
        for prompt in prompts:
            with engine.acquire(CacheRequest("fill", prompt)) as lease:
                engine.commit(lease, prompt)
        engine.flush()
    for number in (10, 1000):
        store.hold()
        with paced_engine(store, host_bytes=host_pages * PAGE * 192) as engine:
            handles = [engine.prefetch(str(n), prompt, mode=mode) for n, prompt in enumerate(prompts[:number])]
            prefetcher, stats = engine.inspect.prefetcher, engine.stats
            assert prefetcher is not None

            def is_answered() -> bool:
                num_found = sum(handle.found_tokens > 0 for handle in handles)  # noqa: B023
                return num_found >= max(10, stats()["prefetch.queued_reads"]) and store.held == 1  # noqa: B023

            eventually(lambda: not prefetcher.poll() and is_answered())  # noqa: B023
            quiet[number] = calls_of_quiet_poll(engine, store, number)
            assert engine.stats()["prefetch.waiting_requests"] == number
            store.allow(1 << 20)
    assert quiet[1000] < quiet[10] + IDLE_POLL_CALLS


def test_a_poll_costs_the_same_while_ten_thousand_prefetches_wait(store: PacedStore) -> None:
    """A poll without news takes few calls while ten thousand prefetches wait for a store that does not answer."""
    rng, quiet = np.random.default_rng(0), dict[int, float]()
    for number in (10, 1000, 10_000):
        gate = store.trouble = Gate("contains")
        with paced_engine(store) as engine:
            for n in range(number):
                engine.prefetch(str(n), rng.integers(0, 1 << 20, 2 * PAGE + 1))
            quiet[number] = calls_of_quiet_poll(engine, store, number)
            assert engine.stats()["prefetch.waiting_requests"] == number
            gate.open()
    assert quiet[10_000] < quiet[10] + IDLE_POLL_CALLS


def test_the_cost_of_prefetches_is_linear_in_their_number(tmp_path: Path) -> None:
    """200 queued requests take about four times the calls of 50, and no single request costs more."""
    prompts = [np.random.default_rng(n).integers(0, 1 << 20, 2 * PAGE + 1) for n in range(200)]
    with engine_of(tmp_path, 2000) as engine:
        for prompt in prompts:
            compute(engine, prompt)
    polls, longest = {}, {}
    for number in (50, 200):
        with engine_of(tmp_path, 2000) as engine:
            handles: list[Prefetch] = []
            starts = [calls_of(lambda: handles.append(engine.prefetch(str(n), prompts[n]))) for n in range(number)]  # noqa: B023
            steps = calls_until(engine, *handles)
            assert sum(handle.read_tokens for handle in handles) == number * 2 * PAGE
            polls[number] = sum(steps)
            longest[number] = max(*starts, *(calls_of(lambda: engine.cancel(str(n))) for n in range(number)))  # noqa: B023
            engine.flush()
            engine.check()
    assert polls[200] < 8 * polls[50]
    assert longest[200] < 2 * longest[50]
