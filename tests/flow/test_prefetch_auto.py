"""Prefetches that pay: who waits for the disk and for how long, who shares a read, and what bounds what is read.

The clock stands but for what a test lets pass, and the reader reads what it lets through: no verdict depends on the
machine. Rates are measured as in service: by completed reads, completed loads and `observe_prefill`.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import hicache.stores
from disk_case import Clock, TroubledStore, page_keys, wait_until
from hicache import AdvancedConfig, CacheEngine, CacheRequest, EngineConfig, Prefetch, build_engine
from hicache.config import PrefetchMode
from hicache.disk import DiskTier
from hicache.errors import PrefetchPending
from hicache.layout import ModelGeometry
from hicache.serving.request import Request
from hicache.serving.scheduler import Scheduler
from memory_store import MemoryPageStore
from serving_case import geometry_of, plain_greedy, prompt, tiny_llama, tiny_runner
from toy_model import GEOMETRY, config, serve

PAGE = 8
SLOW, FAST = 1000.0, 0.001  # seconds of a call that reads two pages


class PacedStore(TroubledStore):
    """A store in memory whose reads, of two pages each where it is the disk, take `read_s` of the clock and wait until
    they are allowed.

    `held`: reads that wait; `landed`: how often each page was read; `sizes`: the pages of each read.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(MemoryPageStore(1 << 30))
        self.clock, self.read_s, self.held = clock, 0.0, 0
        self.landed: Counter[bytes] = Counter()
        self.sizes: list[int] = []
        self._allowed = threading.Semaphore(1 << 30)

    def hold(self) -> None:
        """No read from here on, but those that are allowed."""
        self._allowed = threading.Semaphore(0)

    def allow(self, num_reads: int = 1 << 20) -> None:
        self._allowed.release(num_reads)

    def get_into(self, keys, buffers, *, deadline_s=math.inf):  # type: ignore[no-untyped-def]
        self.sizes.append(len(keys))
        self.held += 1
        assert self._allowed.acquire(timeout=10)
        self.held -= 1
        self.clock.now_s += self.read_s
        ok = super().get_into(keys, buffers, deadline_s=deadline_s)
        self.landed.update(key for key, verified in zip(keys, ok, strict=True) if verified)
        return ok


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all engines that are built from here on."""
    clock = Clock()
    monkeypatch.setattr(hicache.stores, "DiskTier", functools.partial(DiskTier, clock=clock))
    return clock


@pytest.fixture
def store(clock: Clock) -> PacedStore:
    return PacedStore(clock)


def tokens_of(seed: int, length: int = 193) -> np.ndarray:
    """24 whole pages, which are read by three jobs."""
    return np.random.default_rng(seed).integers(0, 50, length)


def settings(**changes: object) -> EngineConfig:
    """Capacity for several such prompts on every tier, and one reader."""
    advanced = AdvancedConfig(transfer_chunk_tokens=16, disk_reader_threads=1, disk_io_timeout_s=1e8)
    values = {"device_tokens": 640, "host_bytes": 200 * PAGE * 192, "advanced": advanced}
    return config(**{**values, **changes})


def engine_of(store: PacedStore, **changes: object) -> CacheEngine:
    return build_engine(settings(**changes), GEOMETRY, store=store)


def fill(store: PacedStore, *prompts: np.ndarray) -> None:
    """Have the store hold the pages of some prompts, by an engine that ends."""
    with engine_of(store) as engine:
        for n, tokens in enumerate(prompts):
            serve(engine, f"f{n}", tokens)
            engine.flush()
    store.landed.clear()


def until(engine: CacheEngine, *handles: Prefetch) -> None:
    """Poll until they are ready; what has been read so far stays within all accounts."""

    def ready() -> bool:
        engine.poll()
        engine.check()
        return all(handle.ready for handle in handles)

    wait_until(ready)


def until_found(engine: CacheEngine, store: PacedStore, *handles: Prefetch) -> None:
    """Poll until the store has told what it holds for these, and the first read is held."""
    wait_until(lambda: engine.poll() or (all(handle.found_tokens for handle in handles) and store.held == 1))


def measure_disk(engine: CacheEngine, store: PacedStore, tokens: np.ndarray, read_s: float) -> None:
    """Let a prefetch that nobody gives up show how long reads take."""
    store.read_s = read_s
    until(engine, engine.prefetch("measure", tokens, mode="wait_complete"))
    engine.cancel("measure")


@contextmanager
def asked(store: PacedStore, read_s: float) -> Iterator[tuple[CacheEngine, Prefetch, np.ndarray]]:
    """An engine that computes a token a second and knows that a read takes `read_s`; the prefetch of "a", for tokens
    that the store has and reads when it is allowed; and these tokens."""
    one, two = tokens_of(1), tokens_of(2)
    fill(store, one, two)
    with engine_of(store) as engine:
        engine.observe_prefill(100, 100.0)
        measure_disk(engine, store, one, read_s)
        store.hold()
        yield engine, engine.prefetch("a", two), two


def admitted(engine: CacheEngine, name: str, tokens: np.ndarray) -> int:
    """Serve the request, comparing every byte that it reuses; returns its tokens from disk."""
    hit = serve(engine, name, tokens).hit
    engine.flush()
    engine.check()
    assert engine.inspect.prefetcher is not None and not engine.inspect.prefetcher.is_busy()
    assert engine.stats()["host.free_pages"] + engine.stats()["host.evictable_tokens"] / PAGE == 199
    return hit.disk


def test_the_first_request_after_a_restart_uses_what_lies_on_disk(store: PacedStore) -> None:
    """By default it waits for all of it, with no rate known; best_effort, admitted at once, uses nothing of it."""
    tokens = tokens_of(1)
    fill(store, tokens)
    for mode, expected in (("best_effort", 0), (None, 192)):
        with engine_of(store) as engine:
            store.hold()
            handle = engine.prefetch("a", tokens, mode=mode)  # type: ignore[arg-type]
            assert handle.ready == (mode == "best_effort")
            if mode is None:
                assert handle.mode == "auto"
                until_found(engine, store, handle)
                with pytest.raises(PrefetchPending):
                    engine.acquire(CacheRequest("a", tokens))
                store.allow()
                until(engine, handle)
                assert handle.ended and handle.landed_tokens == handle.found_tokens == 192
            lease = engine.acquire(CacheRequest("a", tokens))
            store.allow()
            assert lease.hit.disk == expected
            engine.release(lease)
            engine.flush()
            engine.check()


def test_a_server_that_restarts_answers_from_disk(store: PacedStore) -> None:
    """The scheduler's first request after a restart, with default settings, takes every whole page from the disk, and
    gets the tokens of the model without a cache."""
    model, tokens = tiny_llama(device="cpu"), prompt(300, seed=1)
    values = {"device_tokens": 512, "page_size": 4, "host_page_size": 16, "max_context_len": 1024, "model_id": "tiny"}
    settings = EngineConfig.from_dict({**values, "dtype": "float32", "max_requests": 8, "host_bytes": "1MiB"})
    for disk_tokens in (0, 288):
        with build_engine(settings, geometry_of(model), store=store) as engine:
            scheduler = Scheduler(engine, tiny_runner(model, engine), chunk_tokens=64)
            [output] = scheduler.run([Request("a", tokens, 4)])
            assert output.hit.disk == disk_tokens and output.tokens == plain_greedy(model, tokens, 4)
            # A pass that waits for a load does not count.
            assert (engine.stats()["cost.prefill_tokens_per_second"] > 0) == (disk_tokens == 0)
            engine.flush()
            engine.check()


def test_a_fast_disk_is_waited_for(store: PacedStore) -> None:
    """Where reading is estimated to be faster than computing, the request waits to the end; the estimate, of a disk
    that keeps its pace, is what the wait took."""
    with asked(store, FAST) as (engine, handle, tokens):
        until_found(engine, store, handle)
        assert not handle.ready and engine.stats()["prefetch.waited_requests"] == 1
        store.allow()
        until(engine, handle)
        stats = engine.stats()
        assert stats["prefetch.skipped_requests"] == stats["prefetch.gave_up_requests"] == 0
        assert (
            stats["prefetch.estimated_seconds"]
            == pytest.approx(stats["prefetch.waited_seconds"])
            == pytest.approx(12e-3)
        )
        assert admitted(engine, "a", tokens) == 192


def test_a_slow_disk_is_not_waited_for(store: PacedStore) -> None:
    """Where computing is estimated to be faster, the request is admitted as soon as the store has told what it holds,
    and nothing is read for it after that."""
    with asked(store, SLOW) as (engine, handle, tokens):
        until(engine, handle)
        assert not handle.ended and (handle.found_tokens, handle.landed_tokens) == (192, 0)
        assert engine.stats()["prefetch.skipped_requests"] == 1 and engine.stats()["prefetch.waited_requests"] == 0
        lease = engine.acquire(CacheRequest("a", tokens))
        assert lease.cached_len == 0 and handle.ended
        store.allow()
        engine.release(lease)
        assert admitted(engine, "b", tokens) <= 16  # what one call brought before it saw that nobody waits
        assert sum(store.landed.values()) <= 24 + 2


def test_a_disk_that_becomes_slow_is_given_up_and_what_landed_is_used(store: PacedStore) -> None:
    """As pages land the estimates are made anew: when the rest is faster to compute, the request is admitted with the
    pages that have landed."""
    with asked(store, FAST) as (engine, handle, tokens):
        until_found(engine, store, handle)
        store.allow(4)
        wait_until(lambda: engine.poll() or handle.landed_tokens == 64)
        assert not handle.ready
        store.read_s = SLOW
        store.allow(4)
        until(engine, handle)
        assert (handle.ended, handle.landed_tokens) == (False, 128)
        assert engine.stats()["prefetch.waited_requests"] == engine.stats()["prefetch.gave_up_requests"] == 1
        lease = engine.acquire(CacheRequest("a", tokens))
        store.allow()
        assert lease.hit.disk == 128
        engine.release(lease)
        admitted(engine, "b", tokens)


def test_little_of_an_unknown_disk_shows_that_it_is_slow(store: PacedStore, caplog: pytest.LogCaptureFixture) -> None:
    """Where no read has shown the rate, the first job of a reader brings 8 MiB, not eight pages of whatever size."""
    tokens, host_bytes = tokens_of(1), 32 * (2 << 20)
    geometry = ModelGeometry(layer_num=1, head_num=16, head_dim=2048)  # 2 MiB a page
    with build_engine(settings(host_bytes=host_bytes, device_tokens=256), geometry, store=store) as engine:
        with engine.acquire(CacheRequest("fill", tokens)) as lease:
            engine.commit(lease, tokens)
        engine.flush()
    with build_engine(settings(host_bytes=host_bytes, device_tokens=256), geometry, store=store) as engine:
        engine.observe_prefill(100, 100.0)
        store.read_s = 60.0  # of two pages, whose 16 tokens are computed in 16 s
        store.hold()
        handle = engine.prefetch("a", tokens)
        until_found(engine, store, handle)
        store.allow(2)
        until(engine, handle)
        assert (handle.ended, handle.landed_tokens) == (False, 4 * PAGE)
        assert not caplog.records  # no read had to fail for that
        store.allow()


def test_a_remote_store_is_asked_for_many_pages_at_once(store: PacedStore) -> None:
    """A prompt of 24 pages is one call where reads are fast; a slow store is asked for little at a time."""
    prompts = [tokens_of(seed) for seed in range(4)]
    fill(store, *prompts)
    with build_engine(settings(prefetch_mode="wait_complete"), GEOMETRY, remote=store) as engine:
        sizes: list[list[int]] = []
        for read_s, tokens in zip((1e-3, 1e-3, 10.0, 10.0), prompts, strict=True):
            store.read_s = read_s
            del store.sizes[:]
            handle = engine.prefetch("a", tokens)
            until(engine, handle)
            assert handle.landed_tokens == 192
            engine.cancel("a")
            sizes.append(list(store.sizes))
    assert sizes[1] == [24] and sizes[3] == [1] * 24, sizes


@pytest.mark.parametrize("silent", ["contains", "get_into"])
@pytest.mark.parametrize("speed", [None, 500.0])
def test_without_rates_a_wait_is_bounded(silent: str, speed: float | None, store: PacedStore, clock: Clock) -> None:
    """While the disk's rate is unknown and nothing lands, a request waits for as long as computing would take: at
    an assumed 1000 tokens a second where none was measured."""
    tokens, opened = tokens_of(1), threading.Event()
    fill(store, tokens)
    store.trouble = lambda verb: verb != silent or opened.wait(10)
    with engine_of(store) as engine:
        if speed is not None:
            engine.observe_prefill(1000, 1000 / speed)
        handle = engine.prefetch("a", tokens)
        compute_s = 192 / (speed or 1000.0)
        for passed_s, ready in ((0.0, False), (0.99 * compute_s, False), (0.02 * compute_s, True)):
            clock.now_s += passed_s
            wait_until(lambda: engine.poll() or silent == "contains" or handle.found_tokens == 192)
            engine.poll()
            assert handle.ready == ready
        assert engine.stats()["prefetch.gave_up_requests"] == 1
        assert engine.acquire(CacheRequest("a", tokens)).cached_len == 0
        opened.set()


def test_an_old_rate_is_forgotten(store: PacedStore, clock: Clock) -> None:
    """A disk that was slow is tried again after a while: nobody would read from it and find that it is fast again."""
    prompts = [tokens_of(n) for n in range(3)]
    fill(store, *prompts)
    with engine_of(store) as engine:
        engine.observe_prefill(100, 100.0)
        measure_disk(engine, store, prompts[0], SLOW)
        store.read_s = FAST
        store.hold()
        handle = engine.prefetch("a", prompts[1])
        until(engine, handle)
        engine.cancel("a")
        store.allow()
        engine.flush()
        clock.now_s += 100
        handle = engine.prefetch("b", prompts[2])
        until(engine, handle)
        assert handle.ended and handle.landed_tokens == 192


def test_who_waits_for_others_counts_their_reads(store: PacedStore) -> None:
    """The reads of requests that came before are part of the estimate: the first waits, the one behind it computes."""
    prompts = [tokens_of(n) for n in range(3)]
    fill(store, *prompts)
    with engine_of(store) as engine:
        measure_disk(engine, store, prompts[0], 1.0)  # 12 s for each prompt
        engine.observe_prefill(192, 18.0)
        store.hold()
        first, second = engine.prefetch("a", prompts[1]), engine.prefetch("b", prompts[2])
        until_found(engine, store, first, second)
        assert (first.ready, second.ready) == (False, True)
        store.allow()
        until(engine, first, second)
        assert admitted(engine, "a", prompts[1]) == 192


@pytest.mark.parametrize("mode", ["auto", "wait_complete"])
@pytest.mark.parametrize("cancelled", [None, 0, 1])
def test_requests_for_the_same_pages_share_one_read(
    mode: PrefetchMode, cancelled: int | None, store: PacedStore
) -> None:
    """Two equal prompts, one that begins with their first half, and one that ends before: every page is read once,
    whoever leaves meanwhile, and all find theirs."""
    same, half = tokens_of(1), tokens_of(1, 105)
    fork = np.concatenate([same[:96], tokens_of(2, 97)])
    prompts = [same, same, fork, half]
    fill(store, same, fork)
    with engine_of(store) as engine:
        store.hold()
        handles = [engine.prefetch(str(n), tokens, mode=mode) for n, tokens in enumerate(prompts)]
        until_found(engine, store, *handles)
        assert engine.stats()["prefetch.shared_requests"] == 3
        store.allow(2)
        if cancelled is not None:
            engine.cancel(str(cancelled))
        assert [handle.ready for handle in handles] == [n == cancelled for n in range(4)]
        store.allow()
        until(engine, *handles)
        assert set(store.landed.values()) == {1}
        assert set(store.landed) == set(page_keys(engine, same[:192]) + page_keys(engine, fork[:192]))
        for n, tokens in enumerate(prompts):
            if n != cancelled:
                whole = (len(tokens) - 1) // PAGE * PAGE
                assert handles[n].landed_tokens == handles[n].found_tokens == whole
                with engine.acquire(CacheRequest(str(n), tokens)) as lease:
                    assert lease.cached_len == whole
        engine.flush()
        engine.check()


def test_a_read_goes_no_further_than_somebody_wants(store: PacedStore) -> None:
    """When the request with the long prompt is gone, its read ends with the pages that another shares; when all are
    gone, at once."""
    long, short = tokens_of(1), tokens_of(1, 50)
    fill(store, long)
    for gone in (["long"], ["short", "long"]):
        with engine_of(store) as engine:
            store.landed.clear()
            store.hold()
            handles = {"long": engine.prefetch("long", long), "short": engine.prefetch("short", short)}
            until_found(engine, store, *handles.values())
            for name in gone:
                engine.cancel(name)
            store.allow(4)
            until(engine, *handles.values())
            store.allow()
            engine.flush()
            engine.check()
            assert sum(store.landed.values()) <= (2 if len(gone) == 2 else 8 + 2)
            assert handles["short"].landed_tokens == (48 if len(gone) == 1 else 0)


@pytest.mark.parametrize("leaves", ["acquire", "cancel", "forget"])
def test_a_share_of_the_host_bounds_what_waits(leaves: str, store: PacedStore, clock: Clock) -> None:
    """What is read for requests that were not admitted stays within `prefetch_host_share`; the rest is read when these
    are admitted, or gone."""
    prompts = [tokens_of(n) for n in range(3)]
    fill(store, *prompts)
    with engine_of(store, prefetch_host_share=0.151) as engine:  # 30 pages
        handles = {n: engine.prefetch(str(n), tokens) for n, tokens in enumerate(prompts)}

        def landed() -> list[int]:
            clock.now_s += 1e-6
            engine.poll()
            engine.check()
            assert engine.stats()["prefetch.claimed_pages"] <= 30
            return [handle.landed_tokens for handle in handles.values()]

        wait_until(lambda: sum(landed()) == 30 * PAGE)
        assert handles[0].ended and not handles[1].ready
        for n in (0, 1):
            if leaves == "acquire":
                with engine.acquire(CacheRequest(str(n), prompts[n])) as lease:
                    assert lease.hit.disk == 192
            elif leaves == "cancel":
                engine.cancel(str(n))
            del handles[n]
            clock.now_s += 0.051
            wait_until(lambda: landed()[0] == 192)
        until(engine, handles[2])
        stats = engine.stats()
        assert stats["prefetch.postponed_requests"] >= 2 and stats["prefetch.retries"] >= 2
        assert admitted(engine, "2", prompts[2]) == 192


def test_nobody_waits_for_room_that_nobody_will_make(store: PacedStore) -> None:
    """A prompt may exceed the share while it is the only one. Larger than the host, it gets what fits and does not wait
    for more; a share of 0 reads nothing."""
    tokens = tokens_of(1)
    fill(store, tokens)
    for mode in ("auto", "wait_complete", "timeout"):
        for host_pages, share, landed in ((200, 0.05, 24), (17, 0.5, 16), (17, 1.0, 16), (200, 0.0, 0)):
            with engine_of(store, prefetch_host_share=share, host_bytes=host_pages * PAGE * 192) as engine:
                handle = engine.prefetch("a", tokens, mode=mode)  # type: ignore[arg-type]
                until(engine, handle)
                assert handle.landed_tokens == landed * PAGE
                with engine.acquire(CacheRequest("a", tokens)) as lease:
                    assert lease.hit.disk == landed * PAGE
                engine.flush()
                engine.check()


def test_a_full_read_queue_delays_and_loses_nothing(store: PacedStore, clock: Clock) -> None:
    """With a queue of one job, several prompts come in after all, each as far as it goes at a time."""
    prompts = [tokens_of(n) for n in range(3)]
    fill(store, *prompts)
    advanced = AdvancedConfig(disk_reader_threads=1, disk_queue_jobs=1, disk_io_timeout_s=1e8)
    with engine_of(store, advanced=advanced) as engine:
        handles = [engine.prefetch(str(n), tokens) for n, tokens in enumerate(prompts)]

        def all_landed() -> bool:
            clock.now_s += 1e-3
            engine.poll()
            engine.check()
            return all(handle.landed_tokens == 192 for handle in handles)

        wait_until(all_landed)
        assert engine.stats()["prefetch.refused_jobs"] > 0
        assert set(store.landed.values()) == {1}
        for n, tokens in enumerate(prompts):
            assert admitted(engine, str(n), tokens) == 192


def test_a_locked_host_is_tried_again(store: PacedStore, clock: Clock) -> None:
    """A prefetch that finds no host page comes in when there is one, while its request waits."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with engine_of(store) as engine:
        host = engine.inspect.context.full.host
        taken = host.alloc(host.available())
        assert taken is not None
        handle = engine.prefetch("a", tokens)
        wait_until(lambda: engine.poll() or handle.ready)
        assert handle.landed_tokens == 0 and not handle.ended
        host.free(taken)
        clock.now_s += 0.06
        wait_until(lambda: engine.poll() or handle.landed_tokens == 192)
        assert engine.stats()["prefetch.retries"] > 0
        assert admitted(engine, "a", tokens) == 192


def test_measured_rates_gate_loads_too() -> None:
    """What the host holds is loaded where computing was seen to be slow, and computed where it was seen to be fast."""
    prompts = [tokens_of(n) for n in range(4)]
    for seconds, loads in ((1e9, True), (1e-12, False)):
        with build_engine(settings(device_tokens=256), GEOMETRY) as engine:
            for n, tokens in enumerate([*prompts, prompts[0]]):
                serve(engine, f"r{n}", tokens)
                engine.flush()
            assert engine.stats()["restore.bytes"] > 0 and engine.stats()["restore.declined_loads"] == 0
            engine.observe_prefill(1000, seconds)
            assert (serve(engine, "s", prompts[2]).hit.host > 0) == loads
            engine.flush()
            assert (engine.stats()["restore.declined_loads"] > 0) != loads
            assert engine.stats()["cost.load_bytes_per_second"] > 0
            engine.check()


def test_a_load_that_was_held_up_shows_no_speed_of_the_link() -> None:
    """Its time is that of the pass before it, or of the host, which launches a pass between its layers: by such times
    loads would be declined that the link brings faster than they are computed."""
    prompts = [tokens_of(n) for n in range(4)]
    with build_engine(settings(device_tokens=256), GEOMETRY) as engine:
        for n, tokens in enumerate(prompts):
            serve(engine, f"r{n}", tokens)
            engine.flush()
        for is_undelayed in (False, True):
            with engine.acquire(CacheRequest(f"s{is_undelayed}", prompts[is_undelayed])) as lease:
                assert lease.hit.host > 0
                for load in engine.inspect.restore.in_flight():
                    for op in load.ops:
                        op.is_undelayed = is_undelayed
                engine.flush()
            assert (engine.stats()["cost.load_bytes_per_second"] > 0) == is_undelayed
            assert engine.stats()["restore.bytes"] > 0
        engine.check()
