"""What a scheduler knows of later requests, through `CacheRequest`, under the policy auto."""

from __future__ import annotations

import numpy as np
import pytest

from hicache import CacheEngine, CacheRequest, build_engine
from hicache.errors import InvalidArgument
from toy_model import GEOMETRY, compute, config, serve


def tokens_of(seed: int, length: int = 33) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, length)


def ask(engine: CacheEngine, name: str, tokens: np.ndarray, **hints: object) -> int:
    """Serve a request with hints; returns its cached tokens."""
    with engine.acquire(CacheRequest(name, tokens, **hints)) as lease:  # type: ignore[arg-type]
        compute(engine, lease, tokens, lease.cached_len, len(tokens))
        engine.commit(lease, tokens)
    return lease.cached_len


def held(engine: CacheEngine, tokens: np.ndarray) -> int:
    return engine.inspect.context.tree.match(tokens).device_len


def engine_of(policy: str = "auto") -> CacheEngine:
    return build_engine(config(eviction_policy=policy, host_bytes=0, device_tokens=128), GEOMETRY)


@pytest.mark.parametrize("hint", [{"expected_uses": 9}, {"priority": 9}])
def test_what_is_expected_or_has_priority_stays(hint: dict[str, int]) -> None:
    """The oldest prompt is still there when all others of its time are gone."""
    with engine_of() as engine:
        ask(engine, "kept", tokens_of(0), **hint)
        for n in range(1, 9):
            ask(engine, f"r{n}", tokens_of(n))
            engine.check()
        assert held(engine, tokens_of(0)) == 32 and held(engine, tokens_of(1)) == 0


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_the_end_of_a_session_is_evicted_first(policy: str) -> None:
    """Though it is newer than the others, which lru evicts; what it has in common with one of them stays."""
    head, ends = tokens_of(0, 8), [tokens_of(n, 25) for n in (1, 2)]
    sessions = [np.concatenate([head, end]) for end in ends]
    with engine_of(policy) as engine:
        ask(engine, "goes on", sessions[0])
        ask(engine, "ends", sessions[1], expected_uses=0)
        assert ask(engine, "last", tokens_of(4, 85)) == 0
        engine.check()
        left = {"goes on": held(engine, sessions[0]), "ends": held(engine, sessions[1])}
        assert left["goes on"] >= 8 and (left["ends"] < left["goes on"]) == (policy == "auto"), left


def test_behind_a_branch_point_alone_a_session_leaves_nothing() -> None:
    """Also where no other prompt has come yet that has the system prompt in common."""
    tokens = tokens_of(0)
    with engine_of() as engine:
        ask(engine, "split", tokens[:17])
        ask(engine, "session", tokens, branch_points=(16,), expected_uses=0)
        for n in range(1, 5):
            serve(engine, f"r{n}", tokens_of(n))
        assert held(engine, tokens) == 16
        engine.check()


def test_a_hint_that_is_no_number_is_refused() -> None:
    with engine_of() as engine:
        for wrong in (-1, 0.5, "many", True):
            with pytest.raises(InvalidArgument, match="expected_uses"):
                engine.acquire(CacheRequest("a", tokens_of(0), expected_uses=wrong))  # type: ignore[arg-type]
