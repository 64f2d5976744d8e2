"""Calls with wrong arguments or in a wrong state: each is refused with its own error, changes nothing, and leaks
nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import component_case
from hicache import CacheEngine, CacheRequest, DiskConfig, Lease, build_engine
from hicache.errors import (
    ConcurrentCall,
    DuplicateRequest,
    ForeignLease,
    HiCacheError,
    InvalidArgument,
    InvalidTokens,
    LeaseEnded,
    NotRunning,
    TokensMismatch,
)
from toy_model import GEOMETRY, compute, config, expected_kv, read, serve, settled
from transfer_hooks import before_each_move
from waiting import BOUND_S, eventually

TOKENS = np.arange(60)
EMPTY: tuple[Any, ...] = (np.empty(0, np.int64), [])
NO_TOKENS: tuple[Any, ...] = (
    np.arange(40).reshape(20, 2),
    np.int64(7),
    None,
    np.arange(40) + 0.5,
    [1.0, 2.0],
    np.ones(40, bool),
    ["a", "b"],
    np.full(40, 2**63 + 5, np.uint64),
    [[1, 2], [3]],
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CacheEngine]:
    """A started engine with three tiers. After the test all its accounts must hold."""
    disk = DiskConfig(path=str(tmp_path / "store"), budget_bytes=4 << 20)
    with build_engine(config(disk=disk), GEOMETRY) as started:
        serve(started, "before", np.arange(100, 140))
        started.flush()
        yield started
        settled(started)


def unchanged(
    engine: CacheEngine, call: Callable[[], object], error: type[HiCacheError], match: str | None = None
) -> None:
    """Assert that `call` raises, and that it changed nothing that the engine counts or holds."""
    before = engine.stats()
    with pytest.raises(error, match=match):
        call()
    engine.check()
    assert engine.stats() == before


def verbs(engine: CacheEngine, lease: Lease) -> tuple[Callable[[], object], ...]:
    """All verbs that take a lease, except `release`."""
    return (
        lambda: engine.commit(lease, TOKENS),
        lambda: engine.extend(lease, 5),
        lambda: engine.begin_forward([lease]),
        lambda: engine.track([lease]),
        lambda: engine.next_stop(lease, 0, 10),
    )


def test_tokens_that_are_no_run_of_ids_are_refused(engine: CacheEngine) -> None:
    """Every verb that takes tokens refuses tokens that are no sequence of ids, before it changes anything."""
    negative = np.array([1, -2, 3])
    for bad in (*NO_TOKENS, *EMPTY, negative):
        unchanged(engine, lambda bad=bad: engine.lookup(bad), InvalidTokens)
        unchanged(engine, lambda bad=bad: engine.prefetch("a", bad), InvalidTokens)
        unchanged(engine, lambda bad=bad: engine.acquire(CacheRequest("a", bad)), InvalidTokens)
    with engine.acquire(CacheRequest("b", TOKENS)) as lease:
        for bad in NO_TOKENS:
            unchanged(engine, lambda bad=bad: engine.commit(lease, bad), InvalidTokens)
        unchanged(engine, lambda: engine.commit(lease, negative), TokensMismatch)
        for nothing in EMPTY:  # an empty commit is valid while nothing has been computed
            engine.commit(lease, nothing)


def test_any_run_of_ids_is_taken(engine: CacheEngine) -> None:
    """Token ids may have any integer type that fits int64, in any sequence type; equal ids are the same prompt."""
    serve(engine, "a", TOKENS)
    for tokens in (np.arange(60, dtype=np.uint32), list(range(60)), torch.arange(60), TOKENS[::1]):
        with engine.acquire(CacheRequest("b", tokens)) as lease:  # type: ignore[arg-type]
            assert lease.cached_len == 56


def test_arguments_out_of_range_are_refused(engine: CacheEngine) -> None:
    """Errors name namespaces that are not valid UTF-8, counts that are negative or no integers, unknown modes, and ids
    that are no strings."""
    request: Any = CacheRequest

    def refused(name: str, *calls: Callable[[], object]) -> None:
        for call in calls:
            unchanged(engine, call, InvalidArgument, name)

    for space in ("\ud800", None, 5, b"tenant"):
        bad: Any = space
        refused("namespace=", lambda bad=bad: engine.lookup(TOKENS, bad))
        refused("namespace=", lambda bad=bad: engine.prefetch("a", TOKENS, bad))
        refused("namespace=", lambda bad=bad: engine.acquire(CacheRequest("a", TOKENS, bad)))
    for setting, values in (
        ("reserve_tokens", (-5, 2.5, True, "8", 2**63)),
        ("priority", (-1, 1.5, None, "high", 2**31, 2**1024, 10**5000)),
        ("next_turn_within_s", (-1, 86_401, math.nan, math.inf, "soon", True)),
        ("expected_uses", (-1, 0, 0.5, "many", True, 2**31, 2**1024)),
        ("max_cached_tokens", (-1, 0.5, "many", True)),
        ("branch_points", (5, None, (2**70,), (8, -1))),
    ):
        for value in values:
            wrong = request("a", TOKENS, **{setting: value})
            refused(f"{setting}=", lambda wrong=wrong: engine.acquire(wrong))
    for setting, value in (("expected_uses", 3), ("next_turn_within_s", 3.0)):
        both = request("a", TOKENS, session_end=True, **{setting: value})
        refused("session_end=", lambda both=both: engine.acquire(both))
    for name in (None, 5, b"a"):
        bad = name
        refused("request_id=", lambda bad=bad: engine.acquire(request(bad, TOKENS)))
        refused("request_id=", lambda bad=bad: engine.prefetch(bad, TOKENS))
    mode: Any = "nonsense"
    refused("tier='disk'", lambda: engine.reset(["host", "disk"]))  # type: ignore[list-item]
    refused("best_effort", lambda: engine.prefetch("a", TOKENS, mode=mode))
    with engine.acquire(CacheRequest("b", TOKENS)) as lease:
        for count in (-500, -1, 1.5, True, None, 10**5000, -(10**5000)):
            bad = count
            refused("num_tokens=", lambda bad=bad: engine.extend(lease, bad))
            refused("start=", lambda bad=bad: engine.next_stop(lease, bad, 8))
            refused("end=", lambda bad=bad: engine.next_stop(lease, 0, bad))
        assert lease.length == len(TOKENS) and len(engine.extend(lease, np.int64(0))) == 0  # type: ignore[arg-type]


def test_times_that_would_poison_an_estimate_are_refused(engine: CacheEngine) -> None:
    """Seconds and positions that are not finite, or that no pass can have, change no estimate. A lookup with an
    infinite wait waits for the I/O timeout."""
    for _ in range(200):
        engine.observe_prefill(8192, 0.5)
    for value in (math.inf, 1e308, math.nan, -1.0, "1", None, True, Decimal(1), torch.tensor(0.1), np.array([0.1])):
        bad: Any = value
        unchanged(engine, lambda bad=bad: engine.observe_prefill(100, bad), InvalidArgument, "seconds=")
        if value is not None:
            unchanged(engine, lambda bad=bad: engine.observe_prefill(100, 1, bad), InvalidArgument, "mean_position=")
        if value not in (math.inf, 1e308):
            unchanged(engine, lambda bad=bad: engine.lookup(TOKENS, "", bad), InvalidArgument, "disk_wait_s=")
    engine.observe_prefill(np.int64(8192), np.float32(0.5), 4096)
    assert engine.stats()["cost.prefill_tokens_per_second"] == pytest.approx(16384)
    before = np.arange(100, 140)
    assert engine.lookup(before, "", math.inf).device == 32


def test_arguments_of_wrong_types_are_refused(engine: CacheEngine) -> None:
    """Every verb that takes an argument refuses a wrong type of it."""
    for value in (None, "a", CacheRequest("a", TOKENS), object()):
        bad: Any = value
        unchanged(engine, lambda bad=bad: engine.release(bad), InvalidArgument, "for a lease")
        unchanged(engine, lambda bad=bad: engine.begin_forward(bad), InvalidArgument, "for a lease")
        for call in verbs(engine, bad):
            unchanged(engine, call, InvalidArgument, "for a lease")
        if not isinstance(value, CacheRequest):
            unchanged(engine, lambda bad=bad: engine.acquire(bad), InvalidArgument, "for a request")
        if not isinstance(value, str):
            unchanged(engine, lambda bad=bad: engine.cancel(bad), InvalidArgument, "request_id=")


def test_a_second_lease_of_one_request_is_refused(engine: CacheEngine) -> None:
    """A request id has one lease. A second lease is refused, and the first one stays valid."""
    with engine.acquire(CacheRequest("a", TOKENS)) as lease:
        unchanged(engine, lambda: engine.acquire(CacheRequest("a", np.arange(5))), DuplicateRequest)
        compute(engine, lease, TOKENS, 0, len(TOKENS))
        engine.commit(lease, TOKENS)


def test_a_commit_of_other_tokens_is_refused(engine: CacheEngine) -> None:
    """Committed tokens must begin with the prompt, of which the engine keeps its own copy, and with the tokens
    committed before. All committed tokens must have slots."""
    buffer = TOKENS.copy()
    lease = engine.acquire(CacheRequest("a", buffer))
    compute(engine, lease, TOKENS, 0, len(TOKENS))
    buffer[17] = 4
    unchanged(engine, lambda: engine.commit(lease, buffer), TokensMismatch, "token 17")
    unchanged(engine, lambda: engine.commit(lease, np.arange(61)), InvalidTokens)
    engine.commit(lease, TOKENS[:30])
    engine.extend(lease, 10)
    longer = np.concatenate([TOKENS, np.full(10, 7)])
    compute(engine, lease, longer, 60, 70)
    unchanged(engine, lambda: engine.commit(lease, [*TOKENS, -7]), InvalidTokens)  # type: ignore[arg-type]
    engine.commit(lease, longer)
    other = longer.copy()
    other[62] = 8  # in a page that was already committed
    unchanged(engine, lambda: engine.commit(lease, other), TokensMismatch, "token 62")
    engine.release(lease)
    assert engine.lookup(longer).device == 64


@pytest.mark.parametrize("end", ["release", "cancel"])
def test_a_lease_that_ended_is_refused(end: str, engine: CacheEngine) -> None:
    """A forward that returns after its request was aborted commits nothing, even if a new lease has the same id. The
    next request for the same prompt finds no page of it, and a request that got its slots keeps its own bytes."""
    lease = engine.acquire(CacheRequest("a", TOKENS))
    compute(engine, lease, TOKENS, 0, len(TOKENS))
    if end == "release":
        engine.release(lease)
    else:
        engine.cancel("a")
    for call in verbs(engine, lease):
        unchanged(engine, call, LeaseEnded)
    engine.release(lease)
    other = np.arange(200, 260)
    taker = engine.acquire(CacheRequest("a", other))
    compute(engine, taker, other, 0, len(other))
    for call in verbs(engine, lease):
        unchanged(engine, call, LeaseEnded)
    engine.release(lease)
    engine.commit(taker, other)
    assert engine.lookup(TOKENS).device == 0
    assert torch.equal(read(engine, taker, 60), expected_kv(other))
    engine.release(taker)
    assert engine.lookup(other).device == 56


@pytest.mark.parametrize("model", component_case.EACH_MODEL)
def test_a_lease_of_another_engine_is_refused(model: Any) -> None:
    """Every verb refuses a lease of another engine. The engine that gave the lease can release everything."""
    settings = component_case.config()
    with build_engine(settings, model) as ours, build_engine(settings, model) as theirs:
        lease = theirs.acquire(CacheRequest("a", TOKENS, reserve_tokens=16))
        same_id = ours.acquire(CacheRequest("a", TOKENS, reserve_tokens=16))
        for call in (*verbs(ours, lease), lambda: ours.release(lease)):
            unchanged(ours, call, ForeignLease)
        ours.release(same_id)
        theirs.release(lease)
        settled(ours)
        settled(theirs)


def test_work_before_start_and_after_close_is_refused() -> None:
    """Before `start` and after `close` only calls that release resources are accepted."""
    engine = build_engine(config(), GEOMETRY)

    def refused() -> None:
        for call in (
            lambda: engine.acquire(CacheRequest("a", TOKENS)),
            lambda: engine.prefetch("a", TOKENS),
            lambda: engine.lookup(TOKENS),
            engine.poll,
            engine.flush,
            engine.reset,
            lambda: engine.begin_forward([]),
            lambda: engine.track([]),
        ):
            with pytest.raises(NotRunning):
                call()

    refused()
    engine.start()
    engine.start()
    lease = engine.acquire(CacheRequest("a", TOKENS))
    engine.close()
    refused()
    for call in (lambda: engine.commit(lease, TOKENS), engine.start):
        with pytest.raises(NotRunning):
            call()
    engine.release(lease)  # close has released the lease
    engine.cancel("a")
    engine.close()
    engine.check()
    assert engine.stats()["engine.leases"] == 0


def test_a_call_during_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread waits inside a call, every verb of another thread is refused by name, including `close` and
    `release`. A call by the same thread, as in a signal handler, is refused too. Any thread may call after the call has
    ended."""
    gate = threading.Event()
    before_each_move(monkeypatch, lambda: gate.wait(BOUND_S))
    with build_engine(config(write_policy="write_through"), GEOMETRY) as engine:
        lease = engine.acquire(CacheRequest("a", TOKENS))
        engine.commit(lease, TOKENS)
        waiting = threading.Thread(target=engine.flush, name="the other", daemon=True)
        waiting.start()

        def is_refused() -> bool:
            try:
                engine.check()  # succeeds, without effect, before the flush begins
            except ConcurrentCall as error:
                return "the other" in str(error)
            return False

        eventually(is_refused)
        ends = (lambda: engine.release(lease), lambda: engine.cancel("a"), engine.close, engine.check, engine.start)
        for call in (*verbs(engine, lease), *ends, engine.poll, lambda: engine.acquire(CacheRequest("b", TOKENS))):
            with pytest.raises(ConcurrentCall):
                call()
        assert not lease.released and engine.stats()["engine.leases"] == 1
        gate.set()
        waiting.join(BOUND_S)

        class Calling:
            def __array__(self, *_: object, **__: object) -> np.ndarray:
                with pytest.raises(ConcurrentCall):
                    engine.poll()
                return TOKENS

        assert engine.lookup(Calling()).device == 56  # type: ignore[arg-type]
        engine.release(lease)
        settled(engine)


def test_a_failure_on_the_way_leaks_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception from any function below a call leaves no lock."""
    with build_engine(config(write_policy="write_through"), GEOMETRY) as engine:
        serve(engine, "a", TOKENS)
        engine.flush()
        full = engine.inspect.context.full
        with monkeypatch.context() as patch:
            patch.setattr(full.allocator, "alloc", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.acquire(CacheRequest("b", np.arange(80)))
        settled(engine)
        with monkeypatch.context() as patch:
            patch.setattr(full.transfer, "store", lambda *_: 1 / 0)
            with engine.acquire(CacheRequest("c", np.arange(300, 340))) as lease:
                compute(engine, lease, np.arange(300, 340), 0, 40)
                with pytest.raises(ZeroDivisionError):
                    engine.commit(lease, np.arange(300, 340))
        assert engine.stats()["device.protected_tokens"] == 0
