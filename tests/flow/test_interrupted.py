"""An error inside a call, for example from Ctrl-C: either the call has changed nothing, or the engine refuses further
calls."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from component_case import MODELS, compute, config, prefill, verify
from failing_calls import fails_at
from hicache import CacheRequest, DiskConfig, Lease, build_engine
from hicache.errors import HiCacheError, InvariantError, NotRunning
from hicache.storage import open_existing
from hicache.tiers import FULL
from memory_store import MemoryPageStore
from toy_model import GEOMETRY, prompt, settled
from toy_model import config as plain_config
from waiting import eventually

TOKENS = np.concatenate([prompt(0, 73), prompt(9, 20)])
OTHER = prompt(11, 80)


def test_an_engine_closes_after_an_interrupt_inside_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt loses the outcome of a write before it is counted, so the write counts as in flight for ever. The
    next calls raise, the slots of a lease are not freed into wrong accounts, close returns, and the store has the
    acknowledged pages."""
    settings = plain_config(disk=DiskConfig(path=str(tmp_path), budget_bytes=8 << 20))
    with build_engine(settings, GEOMETRY) as engine:
        (writes,) = engine.inspect.writes

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with engine.acquire(CacheRequest("a", np.arange(100))) as lease:
            engine.commit(lease, np.arange(100))
        lease = engine.acquire(CacheRequest("b", np.arange(20)))
        with monkeypatch.context() as patch:
            patch.setattr(writes, "_end", interrupted)

            def is_interrupted() -> bool:
                try:
                    engine.poll()
                except KeyboardInterrupt:
                    return True
                return False

            eventually(is_interrupted)
        free = engine.stats()["device.free_tokens"]
        for call in (engine.flush, engine.poll, engine.start, lambda: engine.extend(lease, 1)):
            with pytest.raises(NotRunning, match="KeyboardInterrupt"):
                call()
        engine.release(lease)
        engine.cancel("b")
        assert lease.released and engine.stats()["device.free_tokens"] == free
    with pytest.raises(NotRunning, match="is closed"):
        engine.start()
    store = open_existing(tmp_path)
    assert store.stats().entries == 96 // 8
    store.check()
    store.close()


def test_an_engine_that_finds_its_accounts_wrong_takes_no_further_calls() -> None:
    """A copy in flight loses the lock on its pages, as by a bug. The poll that applies the copy raises, and later calls
    are refused except those that release resources. An error of `check` refuses no later call."""
    engine = build_engine(plain_config(write_policy="write_through"), GEOMETRY)
    engine.start()
    with engine.acquire(CacheRequest("a", TOKENS)) as lease:
        engine.commit(lease, TOKENS)
    full = engine.inspect.context.full
    full.pages.order.num_evictable += 1
    with pytest.raises(InvariantError, match="evictable"):
        engine.check()
    full.pages.order.num_evictable -= 1
    (copy,) = engine.inspect.copies._backups
    full.pages.unlock(copy.pages[FULL].rows)
    with pytest.raises(AssertionError, match="unlocked more often"):
        while True:
            engine.poll()
    with pytest.raises(NotRunning, match="poll"):
        engine.poll()
    engine.close()


class Crowded:
    """An engine whose device is full of prompts that the host has too. Each method prepares one call and returns it."""

    def __init__(self, kind: str, policy: str) -> None:
        self.model = MODELS[kind]
        settings = config(write_policy=policy, mamba_size=8, window_tokens=160, eviction_policy="auto")
        store = MemoryPageStore(1 << 20) if policy == "write_through" else None
        self.engine = build_engine(settings, self.model, store=store)
        self.engine.start()
        for number in range(3):
            tokens = prompt(number, 73)
            with self.engine.acquire(CacheRequest(f"before {number}", tokens)) as lease:
                prefill(self.engine, lease, tokens, self.model)
            self.engine.flush()

    def prefetch(self) -> Callable[[], object]:
        self.engine.reset()
        return lambda: self.engine.prefetch("a", TOKENS)

    def acquire(self) -> Callable[[], object]:
        """Prepare an `acquire` that loads a prefix and evicts other pages for it."""
        self.engine.prefetch("a", TOKENS)
        self.engine.expect("a", TOKENS)
        self.engine.flush()
        return lambda: self.engine.acquire(CacheRequest("a", TOKENS, reserve_tokens=24))

    def extend(self) -> Callable[[], object]:
        lease = self.engine.acquire(CacheRequest("a", prompt(11, 90), reserve_tokens=24))
        return lambda: self.engine.extend(lease, 30)

    def commit(self) -> Callable[[], object]:
        """Prepare a `commit` of tokens of which another request has committed the first half."""
        return self._commit_second(40, 72)

    def commit_within(self) -> Callable[[], object]:
        """Prepare a `commit` of tokens that another request has committed together with more tokens. The commit ends
        within a node, at a position without a state."""
        return self._commit_second(72, 40)

    def _commit_second(self, first_end: int, second_end: int) -> Callable[[], object]:
        one = self.engine.acquire(CacheRequest("a", OTHER[: first_end + 1]))
        self.engine.flush()
        two = self.engine.acquire(CacheRequest("b", OTHER[:second_end]))
        for lease, end in ((one, first_end), (two, second_end)):
            compute(self.engine, lease, OTHER, 0, end, self.model)
        self.engine.commit(one, OTHER[:first_end])
        self.engine.flush()
        return lambda: self.engine.commit(two, OTHER[:second_end])

    def release(self) -> Callable[[], object]:
        lease = self.engine.acquire(CacheRequest("a", OTHER[:72], expected_uses=3))
        compute(self.engine, lease, OTHER, 0, 64, self.model)
        self.engine.commit(lease, OTHER[:64])
        return lambda: self.engine.release(lease)


VERBS = ("prefetch", "acquire", "extend", "commit", "commit_within", "release")
CASES = [(policy, verb) for policy in ("write_through", "write_back", "exclusive") for verb in VERBS]


def require_unchanged(kind: str, policy: str, verb: str, every: int) -> None:
    number = every // 2
    while True:
        crowded = Crowded(kind, policy)
        engine, call = crowded.engine, getattr(crowded, verb)()
        waiting = engine.stats().get("prefetch.waiting_requests")
        if not fails_at(call, number, anywhere=False):
            engine.close()
            return
        engine.check()
        engine.flush()
        engine.check()
        assert engine.stats().get("prefetch.waiting_requests") == waiting
        found = call()  # the repeated call succeeds, and the request reads the true values
        if isinstance(found, Lease):
            verify(engine, found, TOKENS, found.cached_len, crowded.model)
        for name in ("a", "b"):
            engine.cancel(name)
        settled(engine)
        engine.close()
        number += every


@pytest.mark.parametrize("kind", MODELS)
def test_a_call_that_raises_has_changed_nothing(kind: str) -> None:
    """If a function below a call raises, all accounts hold, the same call succeeds when it is repeated, and at the end
    no request holds anything."""
    for policy, verb in CASES:
        require_unchanged(kind, policy, verb, 13 if verb == "commit_within" else 83)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", MODELS)
def test_no_call_that_raises_has_changed_anything(kind: str) -> None:
    """If any of the functions below a call raises, the call has changed nothing, as above."""
    for policy, verb in CASES:
        require_unchanged(kind, policy, verb, 1)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", MODELS)
def test_an_engine_knows_that_a_call_was_left_half_done(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """If an error is raised in the middle of the tree or of an allocator, either every account holds, or the engine
    refuses further calls. The engine closes in both cases."""
    # pytest would keep the records, and with their tracebacks the memory of thousands of engines.
    caplog.set_level(logging.CRITICAL + 1, "hicache")
    for policy, verb in CASES:
        number = refused = 0
        while True:
            crowded = Crowded(kind, policy)
            engine, call = crowded.engine, getattr(crowded, verb)()
            with contextlib.closing(engine):
                if not fails_at(call, number, anywhere=True):
                    break
                try:
                    engine.poll()
                except NotRunning:
                    refused += 1
                else:
                    engine.check()
                    with contextlib.suppress(HiCacheError):
                        call()
                    engine.check()
            number += 5
        assert refused < number // 5
        gc.collect()  # a closed engine is part of a reference cycle
