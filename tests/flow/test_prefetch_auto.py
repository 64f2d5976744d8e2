"""Prefetches in mode "auto": which request waits for the disk, and for how long.

No result depends on the machine (prefetch_case.py). Rates are measured as in production: by completed reads, completed
loads and `observe_prefill`.
"""

from __future__ import annotations

import pytest

from disk_case import Clock, Gate
from hicache import CacheRequest, Prefetch, build_engine
from hicache.config import PrefetchMode
from hicache.errors import PrefetchPending
from hicache.flow.cost import LoadEstimate
from hicache.layout import ModelGeometry
from prefetch_case import (
    FAST,
    PAGE,
    SLOW,
    PacedStore,
    engine_of,
    fill,
    measure_disk,
    pending_prefetch,
    settings,
    tokens_from_disk,
    tokens_of,
    until_found,
    until_landed,
)
from toy_model import GEOMETRY, serve, settled, until_ready
from waiting import eventually


@pytest.mark.parametrize("mode", ["best_effort", "wait_complete", None])
def test_the_first_request_after_a_restart_hits_the_disk(mode: PrefetchMode | None, store: PacedStore) -> None:
    """In the default mode the first request waits for all pages of the disk, although no rate is known. In mode
    "best_effort" the request is admitted at once and uses no page of the disk."""
    tokens = tokens_of(1)
    fill(store, tokens)
    with engine_of(store) as engine:
        store.hold()
        handle = engine.prefetch("a", tokens, mode=mode)
        assert handle.mode == (mode or "auto") and handle.ready == (mode == "best_effort")
        if mode != "best_effort":
            until_found(engine, store, handle)
            with pytest.raises(PrefetchPending):
                engine.acquire(CacheRequest("a", tokens))
            store.allow()
            until_ready(engine, handle)
            assert handle.ended and handle.read_tokens == handle.found_tokens == 192
        with engine.acquire(CacheRequest("a", tokens)) as lease:
            store.allow()
            assert lease.hit.disk == (0 if mode == "best_effort" else 192)
        settled(engine)


def test_a_fast_disk_is_waited_for(store: PacedStore) -> None:
    """If reading is estimated to be faster than computing, the request waits until all pages are read. For a disk with
    a constant rate, the estimate is the actual wait."""
    with pending_prefetch(store, read_s=FAST) as (engine, handle, tokens):
        until_found(engine, store, handle)
        assert not handle.ready and engine.stats()["prefetch.waited_requests"] == 1
        store.allow()
        until_ready(engine, handle)
        stats = engine.stats()
        assert stats["prefetch.skipped_requests"] == stats["prefetch.abandoned_requests"] == 0
        assert stats["prefetch.estimated_seconds"] == pytest.approx(12e-3)
        assert stats["prefetch.waited_seconds"] == pytest.approx(12e-3)
        assert tokens_from_disk(engine, "a", tokens) == 192


def test_a_slow_disk_is_not_waited_for(store: PacedStore) -> None:
    """If computing is estimated to be faster, the request is admitted as soon as the store has reported its pages. No
    new read for the request begins after that."""
    with pending_prefetch(store, read_s=SLOW) as (engine, handle, tokens):
        until_ready(engine, handle)
        assert not handle.ended and (handle.found_tokens, handle.read_tokens) == (192, 0)
        assert engine.stats()["prefetch.skipped_requests"] == 1 and engine.stats()["prefetch.waited_requests"] == 0
        lease = engine.acquire(CacheRequest("a", tokens))
        assert lease.cached_len == 0 and handle.ended
        store.allow()
        engine.release(lease)
        assert tokens_from_disk(engine, "b", tokens) <= 16  # pages of a read that had begun
        assert sum(store.num_reads.values()) <= 24 + 2


def test_a_wait_for_a_slowing_disk_ends_and_read_pages_are_used(store: PacedStore) -> None:
    """Each landed page updates the estimates. If the other pages are faster to compute, the request is admitted with
    the pages that have landed."""
    with pending_prefetch(store, read_s=FAST) as (engine, handle, tokens):
        until_found(engine, store, handle)
        store.allow(4)
        until_landed(engine, handle, 64)
        assert not handle.ready
        store.read_s = SLOW
        store.allow(4)
        eventually(lambda: store.held == 1 and sum(store.num_reads.values()) == 24 + 16)  # the next job has begun
        until_ready(engine, handle)
        assert (handle.ended, handle.read_tokens) == (False, 128)
        assert engine.stats()["prefetch.waited_requests"] == engine.stats()["prefetch.abandoned_requests"] == 1
        lease = engine.acquire(CacheRequest("a", tokens))
        store.allow()
        assert lease.hit.disk == 128
        engine.release(lease)
        tokens_from_disk(engine, "b", tokens)


def test_little_of_an_unknown_disk_shows_that_it_is_slow(store: PacedStore, caplog: pytest.LogCaptureFixture) -> None:
    """While no read has shown the rate of a disk, the first job of a reader reads 8 MiB, not eight pages of any
    size."""
    tokens, host_bytes = tokens_of(1), 32 * (2 << 20)
    geometry = ModelGeometry(layer_num=1, head_num=16, head_dim=2048)  # 2 MiB a page
    with build_engine(settings(host_bytes=host_bytes, device_tokens=256), geometry, store=store) as engine:
        with engine.acquire(CacheRequest("fill", tokens)) as lease:
            engine.commit(lease, tokens)
        engine.flush()
    with build_engine(settings(host_bytes=host_bytes, device_tokens=256), geometry, store=store) as engine:
        engine.observe_prefill(100, 100.0)
        store.read_s = 60.0  # seconds of a read of two pages, whose 16 tokens are computed in 16 s
        store.hold()
        handle = engine.prefetch("a", tokens)
        until_found(engine, store, handle)
        store.allow(4)
        until_ready(engine, handle)
        assert (handle.ended, handle.read_tokens) == (False, 4 * PAGE)
        assert not caplog.records  # no read failed
        store.allow()


@pytest.mark.parametrize(("read_s", "sizes"), [(1e-3, [24]), (0.0375, [11, 13])])
def test_a_remote_store_is_asked_for_many_pages_at_once(read_s: float, sizes: list[int], store: PacedStore) -> None:
    """A prompt of 24 pages is one call if reads are fast. A slow store gets calls of a quarter of a second: 13 pages if
    24 pages take 0.45 s."""
    prompts = [tokens_of(seed) for seed in range(2)]
    fill(store, *prompts)
    store.read_s = read_s
    with build_engine(settings(prefetch_mode="wait_complete"), GEOMETRY, remote=store) as engine:
        for tokens in prompts:
            del store.sizes[:]
            handle = engine.prefetch("a", tokens)
            until_ready(engine, handle)
            assert handle.read_tokens == 192
            engine.cancel("a")
    assert sorted(store.sizes) == sizes


@pytest.mark.parametrize(("silent", "speed"), [("contains", None), ("get_into", 500.0)])
def test_without_rates_a_wait_is_bounded(silent: str, speed: float | None, store: PacedStore, clock: Clock) -> None:
    """While the disk's rate is unknown and no page lands, a request waits as long as computing would take. If no speed
    was measured, 1000 tokens a second are assumed."""
    tokens = tokens_of(1)
    fill(store, tokens)
    gate = store.trouble = Gate(silent)
    with engine_of(store) as engine:
        if speed is not None:
            engine.observe_prefill(1000, 1000 / speed)
        handle = engine.prefetch("a", tokens)
        compute_s = 192 / (speed or 1000.0)
        for passed_s, ready in ((0.0, False), (0.99 * compute_s, False), (0.02 * compute_s, True)):
            clock.now_s += passed_s
            eventually(lambda: engine.poll() or silent == "contains" or handle.found_tokens == 192)
            engine.poll()
            assert handle.ready == ready
        assert engine.stats()["prefetch.abandoned_requests"] == 1
        assert engine.acquire(CacheRequest("a", tokens)).cached_len == 0
        gate.open()


def test_a_timeout_ends_at_its_deadline(store: PacedStore, clock: Clock) -> None:
    """In mode "timeout" a request waits until `prefetch_timeout_s` have passed, whatever has been read. A single poll
    reports the end."""
    tokens = tokens_of(1)
    fill(store, tokens)
    store.hold()
    with engine_of(store, prefetch_timeout_s=5.0) as engine:
        handle, reported = engine.prefetch("a", tokens, mode="timeout"), list[Prefetch]()
        handle.on_change = reported.append
        until_found(engine, store, handle)
        clock.now_s += 4.9
        engine.poll()
        assert not handle.ready and not reported
        clock.now_s += 0.1
        engine.poll()
        engine.poll()
        assert handle.ready and not handle.ended and reported == [handle]


def test_an_old_rate_is_forgotten(store: PacedStore, clock: Clock) -> None:
    """The rate of a slow disk expires, so that a later request reads from it and measures it again."""
    prompts = [tokens_of(n) for n in range(3)]
    fill(store, *prompts)
    with engine_of(store) as engine:
        engine.observe_prefill(100, 100.0)
        measure_disk(engine, store, prompts[0], SLOW)
        store.read_s = FAST
        store.hold()
        handle = engine.prefetch("a", prompts[1])
        until_ready(engine, handle)
        engine.cancel("a")
        store.allow()
        prefetcher = engine.inspect.prefetcher
        eventually(lambda: engine.poll() or not (prefetcher and prefetcher.is_busy()))
        clock.now_s += 100
        store.hold()
        handle = engine.prefetch("b", prompts[2])
        until_found(engine, store, handle)
        store.allow(4)
        until_landed(engine, handle, 64)
        assert not handle.ready  # the landed pages determine the rate now
        store.allow()
        until_ready(engine, handle)
        assert handle.ended and handle.read_tokens == 192


def test_measured_rates_gate_loads_too() -> None:
    """Pages of the host are loaded if the measured prefill is slow, and recomputed if it is fast."""
    prompts = [tokens_of(n) for n in range(4)]
    for seconds, loads in ((1e6, True), (1e-12, False)):
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


@pytest.mark.parametrize("beside", [0, 1])
def test_a_load_counts_earlier_loads_and_delayed_requests(beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load takes 1.5 times as long as computing. The engine makes the load if another request runs, and recomputes if
    no other request runs. The bytes of a load are queued behind those of loads in flight."""
    prompts = [tokens_of(n) for n in range(4)]
    with build_engine(settings(device_tokens=256), GEOMETRY) as engine:
        for n, tokens in enumerate([*prompts, prompts[0]]):
            serve(engine, f"r{n}", tokens)
            engine.flush()
        copies = engine.inspect.copies
        idle_s = copies.estimate(1000, 0, 8, 0).load_s
        for n in range(beside):
            engine.acquire(CacheRequest(f"other {n}", tokens_of(9, 9)))
        with monkeypatch.context() as patch:
            patch.setattr(copies, "estimate", lambda _bytes, _start, _end, others: LoadEstimate(1.5, 1.0, others))
            engine.expect("s", prompts[2])
            lease = engine.acquire(CacheRequest("s", prompts[2]))
        assert (lease.hit.host > 0) == bool(beside)
        ahead = sum(load.num_bytes for load in copies.loads)
        assert idle_s and copies.estimate(1000, 0, 8, 0).load_s == pytest.approx(idle_s * (1 + ahead / 1000))
        assert (ahead > 0) == bool(beside)
        engine.cancel("s")


def test_a_load_that_was_held_up_shows_no_speed_of_the_link() -> None:
    """The measured time of a delayed load includes the pass before it, or gaps between launches of its layers. A rate
    from this time would decline loads that are faster than recomputing."""
    prompts = [tokens_of(n) for n in range(4)]
    with build_engine(settings(device_tokens=256), GEOMETRY) as engine:
        for n, tokens in enumerate(prompts):
            serve(engine, f"r{n}", tokens)
            engine.flush()
        for is_undelayed in (False, True):
            with engine.acquire(CacheRequest(f"s{is_undelayed}", prompts[is_undelayed])) as lease:
                assert lease.hit.host > 0
                for load in engine.inspect.copies.loads:
                    for op in load.operations:
                        op.is_undelayed = is_undelayed
                engine.flush()
            assert (engine.stats()["cost.load_bytes_per_second"] > 0) == is_undelayed
            assert engine.stats()["restore.bytes"] > 0
        engine.check()


def test_pages_in_no_store_do_not_count_for_waiting(store: PacedStore) -> None:
    """A store has eight of the 24 pages of a prompt. Computing these eight costs less than reading them; computing all
    24 costs more."""
    one, two = tokens_of(1), tokens_of(2)
    fill(store, one, two[: 8 * PAGE + 1])
    with engine_of(store) as engine:
        engine.observe_prefill(100, 100.0)
        measure_disk(engine, store, one, 25.0)  # per two pages: eight take 100 s to read, 64 s to compute
        store.hold()
        handle = engine.prefetch("a", two)
        until_ready(engine, handle)
        assert not handle.ended and engine.stats()["prefetch.skipped_requests"] == 1
        engine.cancel("a")
        store.allow()
