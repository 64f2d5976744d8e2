"""Calls that no engine takes: each is refused by its own error, changes nothing, and leaks nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from component_case import STATES, WINDOWS
from component_case import config as component_config
from hicache import CacheEngine, CacheRequest, DiskConfig, Lease, build_engine
from hicache.errors import (
    DuplicateRequest,
    ForeignLease,
    HiCacheError,
    InvalidArgument,
    InvalidTokens,
    LeaseEnded,
    NotRunning,
    TokensMismatch,
)
from toy_model import GEOMETRY, compute, config, expected_kv, read, serve

TOKENS = np.arange(60)
BAD_TOKENS = {
    "two dimensions": (np.arange(40).reshape(20, 2), r"shape \[20, 2\]"),
    "one row": (np.arange(40)[None], r"shape \[1, 40\]"),
    "a number": (np.int64(7), r"shape \[\]"),
    "none": (None, r"shape \[\]"),
    "floats": (np.arange(40) + 0.5, "float64"),
    "a list of floats": ([1.0, 2.0], "float64"),
    "booleans": (np.ones(40, bool), "bool"),
    "text": (["a", "b"], "<U1"),
    "a negative id": (np.array([1, -2, 3]), "lowest token id is -2"),
    "an id beyond int64": (np.full(40, 2**63 + 5, np.uint64), "largest token id is 9223372036854775813"),
    "a ragged list": ([[1, 2], [3]], "cannot be read"),
    "nothing": (np.empty(0, np.int64), "no tokens"),
    "an empty list": ([], "no tokens"),
}
BAD_NAMESPACES = {"a lone surrogate": "\ud800", "none": None, "a number": 5, "bytes": b"tenant"}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CacheEngine]:
    """A started engine of three tiers, whose accounts are proved when the test is over."""
    disk = DiskConfig(path=str(tmp_path / "store"), budget_bytes=4 << 20)
    with build_engine(config(disk=disk), GEOMETRY) as started:
        serve(started, "before", np.arange(100, 140))
        started.flush()
        yield started
        started.flush()
        started.check()
        assert started.stats()["device.protected_tokens"] == 0


def unchanged(
    engine: CacheEngine, call: Callable[[], object], error: type[HiCacheError], match: str | None = None
) -> None:
    """`call` raises, and nothing that the engine counts or holds has changed."""
    before = engine.stats()
    with pytest.raises(error, match=match):
        call()
    engine.check()
    assert engine.stats() == before


@pytest.mark.parametrize("what", BAD_TOKENS)
def test_tokens_that_are_no_run_of_ids_are_refused(what: str, engine: CacheEngine) -> None:
    """Every verb that takes tokens names what is wrong with them, before it does anything."""
    tokens, message = BAD_TOKENS[what]
    bad: Any = tokens
    unchanged(engine, lambda: engine.lookup(bad), InvalidTokens, message)
    unchanged(engine, lambda: engine.prefetch("a", bad), InvalidTokens, message)
    unchanged(engine, lambda: engine.acquire(CacheRequest("a", bad)), InvalidTokens, message)
    with engine.acquire(CacheRequest("b", TOKENS)) as lease:
        if what == "a negative id":
            unchanged(engine, lambda: engine.commit(lease, bad), TokensMismatch, "token 0 of the commit is 1")
        elif message != "no tokens":  # of a request that has computed nothing yet, nothing is committed
            unchanged(engine, lambda: engine.commit(lease, bad), InvalidTokens, message)


@pytest.mark.parametrize("tokens", [np.arange(60, dtype=np.uint32), list(range(60)), torch.arange(60), TOKENS[::1]])
def test_any_run_of_ids_is_taken(tokens: Any, engine: CacheEngine) -> None:
    """Integers of any type that int64 can hold, in any sequence, are the same prompt."""
    assert serve(engine, "a", TOKENS).cached_len == 0
    assert engine.acquire(CacheRequest("b", tokens)).cached_len == 56
    engine.cancel("b")


@pytest.mark.parametrize("what", BAD_NAMESPACES)
def test_namespaces_that_no_key_can_hold_are_refused(what: str, engine: CacheEngine) -> None:
    """A namespace that is no text with a UTF-8 form is refused before it reaches a key."""
    bad: Any = BAD_NAMESPACES[what]
    unchanged(engine, lambda: engine.lookup(TOKENS, bad), InvalidArgument, "namespace=")
    unchanged(engine, lambda: engine.prefetch("a", TOKENS, bad), InvalidArgument, "namespace=")
    unchanged(engine, lambda: engine.acquire(CacheRequest("a", TOKENS, bad)), InvalidArgument, "namespace=")
    engine.poll()
    assert serve(engine, "honest", TOKENS, "honest").cached_len == 0


def test_numbers_and_names_out_of_range_are_refused(engine: CacheEngine) -> None:
    """Counts below zero or of another kind, unknown modes and ids that are no text are named with what they take."""
    request: Any = CacheRequest
    for reserve in (-5, 2.5, True, "8"):
        unchanged(engine, lambda at=reserve: engine.acquire(request("a", TOKENS, "", at)), InvalidArgument, "reserve_")
    for priority in (-1, 1.5, None, "high"):
        bad = request("a", TOKENS, priority=priority)
        unchanged(engine, lambda at=bad: engine.acquire(at), InvalidArgument, "priority=")
    for name in (None, 5, b"a"):
        unchanged(engine, lambda at=name: engine.acquire(request(at, TOKENS)), InvalidArgument, "request_id=")
        unchanged(engine, lambda at=name: engine.prefetch(at, TOKENS), InvalidArgument, "request_id=")  # type: ignore
    mode: Any = "nonsense"
    unchanged(
        engine, lambda: engine.prefetch("a", TOKENS, mode=mode), InvalidArgument, "auto, best_effort, wait_complete"
    )
    lease = engine.acquire(CacheRequest("b", TOKENS))
    for count in (-500, -1, 1.5, True, None):
        unchanged(engine, lambda at=count: engine.extend(lease, at), InvalidArgument, "num_tokens=")  # type: ignore
    assert lease.length == len(TOKENS) and len(engine.extend(lease, np.int64(0))) == 0
    engine.release(lease)


def test_a_second_lease_of_one_request_is_refused(engine: CacheEngine) -> None:
    """A request id holds one lease; the second is refused and the first goes on."""
    lease = engine.acquire(CacheRequest("a", TOKENS))
    unchanged(
        engine, lambda: engine.acquire(CacheRequest("a", np.arange(5))), DuplicateRequest, "a already has a lease"
    )
    compute(engine, lease, TOKENS, 0, len(TOKENS))
    engine.commit(lease, TOKENS)
    engine.release(lease)


def test_a_commit_of_other_tokens_is_refused(engine: CacheEngine) -> None:
    """What is committed begins with the lease's prompt and what it committed before, and has slots."""
    lease = engine.acquire(CacheRequest("a", TOKENS))
    compute(engine, lease, TOKENS, 0, len(TOKENS))
    other = TOKENS.copy()
    other[17] = 4
    unchanged(engine, lambda: engine.commit(lease, other), TokensMismatch, "token 17 of the commit is 4.*lease is 17")
    unchanged(engine, lambda: engine.commit(lease, np.arange(61)), InvalidTokens, "61 tokens.*slots for 60")
    engine.commit(lease, TOKENS[:30])
    engine.extend(lease, 10)
    longer = np.concatenate([TOKENS, np.full(10, 7)])
    compute(engine, lease, longer, 60, 70)
    unchanged(engine, lambda: engine.commit(lease, [*TOKENS, -7]), InvalidTokens, "lowest token id is -7")
    engine.commit(lease, longer)
    longer[62] = 8  # in a page that was committed
    unchanged(engine, lambda: engine.commit(lease, longer), TokensMismatch, "token 62")
    engine.release(lease)
    assert engine.lookup(np.concatenate([TOKENS, np.full(10, 7)])).device == 64


def test_a_lease_may_change_its_array_after_it_was_admitted(engine: CacheEngine) -> None:
    """The engine keeps its own copy of the prompt: a caller's buffer that is used again changes nothing."""
    buffer = TOKENS.copy()
    lease = engine.acquire(CacheRequest("a", buffer))
    buffer[:] = 3
    compute(engine, lease, TOKENS, 0, len(TOKENS))
    engine.commit(lease, TOKENS)
    with pytest.raises(TokensMismatch):
        engine.commit(lease, buffer)
    engine.release(lease)


def verbs(engine: CacheEngine, lease: Lease) -> dict[str, Callable[[], object]]:
    """All verbs that take a lease but `release`."""
    return {
        "commit": lambda: engine.commit(lease, TOKENS),
        "extend": lambda: engine.extend(lease, 5),
        "begin_forward": lambda: engine.begin_forward([lease]),
        "track": lambda: engine.track([lease]),
        "next_stop": lambda: engine.next_stop(lease, 0, 10),
    }


@pytest.mark.parametrize("end", ["release", "cancel"])
def test_a_lease_that_ended_is_refused(end: str, engine: CacheEngine) -> None:
    """A forward that returns after its request was aborted commits nothing: the next request for the same prompt finds
    no page of it, and a request that got its slots keeps its own bytes."""
    lease = engine.acquire(CacheRequest("a", TOKENS))
    compute(engine, lease, TOKENS, 0, len(TOKENS))
    if end == "release":
        engine.release(lease)
    else:
        engine.cancel("a")
    for call in verbs(engine, lease).values():
        unchanged(engine, call, LeaseEnded, "the lease of a was released")
    engine.release(lease)
    other = np.arange(200, 260)
    taker = engine.acquire(CacheRequest("b", other))
    compute(engine, taker, other, 0, len(other))
    unchanged(engine, lambda: engine.commit(lease, TOKENS), LeaseEnded)
    engine.commit(taker, other)
    assert engine.lookup(TOKENS).device == 0
    assert torch.equal(read(engine, taker, 60), expected_kv(other))
    engine.release(taker)


def test_a_new_lease_of_the_same_id_does_not_revive_the_old(engine: CacheEngine) -> None:
    """The id of an aborted request may be used again; the old lease stays ended."""
    old = engine.acquire(CacheRequest("a", TOKENS))
    engine.cancel("a")
    new = engine.acquire(CacheRequest("a", TOKENS))
    for call in verbs(engine, old).values():
        unchanged(engine, call, LeaseEnded)
    engine.release(old)
    compute(engine, new, TOKENS, 0, len(TOKENS))
    engine.commit(new, TOKENS)
    engine.release(new)
    assert engine.lookup(TOKENS).device == 56


@pytest.mark.parametrize("model", [GEOMETRY, WINDOWS, STATES], ids=["full", "window", "hybrid"])
def test_a_lease_of_another_engine_is_refused(model: Any) -> None:
    """No verb takes a lease that another engine gave, and the right one gets everything back."""
    with build_engine(component_config(), model) as ours, build_engine(component_config(), model) as theirs:
        lease = theirs.acquire(CacheRequest("a", TOKENS, reserve_tokens=16))
        same_id = ours.acquire(CacheRequest("a", TOKENS, reserve_tokens=16))
        for call in (*verbs(ours, lease).values(), lambda: ours.release(lease)):
            unchanged(ours, call, ForeignLease, "the lease of a belongs to another engine")
        ours.release(same_id)
        theirs.release(lease)
        for engine in (ours, theirs):
            engine.check()
            assert engine.stats()["engine.leases"] == engine.stats()["device.protected_tokens"] == 0


def test_work_before_start_and_after_close_is_refused() -> None:
    """Nothing is queued for threads that do not run: every verb says whether to start the engine or build another."""
    engine = build_engine(config(), GEOMETRY)

    def refused(why: str) -> None:
        for call in (
            lambda: engine.acquire(CacheRequest("a", TOKENS)),
            lambda: engine.prefetch("a", TOKENS),
            lambda: engine.lookup(TOKENS),
            engine.poll,
            engine.flush,
            lambda: engine.begin_forward([]),
            lambda: engine.track([]),
        ):
            with pytest.raises(NotRunning, match=why):
                call()

    refused("not started; call start")
    engine.start()
    engine.start()
    lease = engine.acquire(CacheRequest("a", TOKENS))
    engine.close()
    refused("closed; build another")
    with pytest.raises(NotRunning, match="closed"):
        engine.commit(lease, TOKENS)
    with pytest.raises(NotRunning, match="closed"):
        engine.start()
    engine.release(lease)  # close did it
    engine.cancel("a")
    engine.close()
    engine.check()
    assert engine.stats()["engine.leases"] == 0


def test_a_failure_on_the_way_leaks_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception from below, wherever it comes, leaves no lock behind."""
    with build_engine(config(), GEOMETRY) as engine:
        serve(engine, "a", TOKENS)
        engine.flush()

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(engine.inspect.context.full.allocator, "alloc", broken)
            with pytest.raises(ZeroDivisionError):
                engine.acquire(CacheRequest("b", np.arange(80)))
        engine.check()
        assert engine.stats()["device.protected_tokens"] == 0
        with monkeypatch.context() as patch:
            patch.setattr(engine.inspect.context.full.transfer, "store", broken)
            with engine.acquire(CacheRequest("c", np.arange(300, 340))) as lease:
                compute(engine, lease, np.arange(300, 340), 0, 40)
                with pytest.raises(ZeroDivisionError):
                    engine.commit(lease, np.arange(300, 340))
        assert engine.stats()["device.protected_tokens"] == 0


def test_priority_decides_who_stays() -> None:
    """Under eviction_policy="priority" a prompt that a request of high priority used outlives newer ones, also where
    that request added no page of its own."""
    first, second, third = (np.arange(n * 100, n * 100 + 40) for n in (1, 2, 3))
    settings = config(host_bytes=0, page_size=8, eviction_policy="priority")
    for raised in (False, True):
        with build_engine(settings, GEOMETRY) as engine:
            serve(engine, "a", first)
            if raised:
                with engine.acquire(CacheRequest("b", np.append(first, 7), priority=5)) as lease:
                    assert lease.cached_len == 40
            for n, tokens in enumerate((second, third, np.arange(400, 440))):
                serve(engine, f"c{n}", tokens)
            assert (engine.lookup(np.append(first, 7)).device == 40) == raised
            engine.check()
