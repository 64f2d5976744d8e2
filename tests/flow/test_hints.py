"""What a scheduler knows of later requests and of priorities, through `CacheRequest`."""

from __future__ import annotations

import numpy as np
import pytest

from hicache import CacheEngine, CacheRequest, build_engine
from toy_model import GEOMETRY, config, prompt, serve


def tokens_of(seed: int) -> np.ndarray:
    return prompt(seed, 33)


def held(engine: CacheEngine, tokens: np.ndarray) -> int:
    return engine.inspect.context.tree.match(tokens).device_len


def engine_of(policy: str = "auto") -> CacheEngine:
    return build_engine(config(eviction_policy=policy, host_bytes=0, device_tokens=128), GEOMETRY)


@pytest.mark.parametrize("hint", [{"expected_uses": 9}, {"priority": 9}])
def test_what_is_expected_or_has_priority_stays(hint: dict[str, int]) -> None:
    """The oldest prompt is still there when all others of its time are gone."""
    with engine_of() as engine:
        serve(engine, "kept", tokens_of(0), **hint)
        for n in range(1, 9):
            serve(engine, f"r{n}", tokens_of(n))
            engine.check()
        assert held(engine, tokens_of(0)) == 32 and held(engine, tokens_of(1)) == 0


@pytest.mark.parametrize("raised", [False, True])
def test_a_priority_counts_also_where_its_request_adds_no_page(raised: bool) -> None:
    """Under eviction_policy="priority" a prompt that a request of high priority used outlives newer ones."""
    with engine_of("priority") as engine:
        serve(engine, "first", tokens_of(0))
        if raised:
            with engine.acquire(CacheRequest("raises", tokens_of(0), priority=5)) as lease:
                assert lease.cached_len == 32
        for n in range(1, 5):
            serve(engine, f"r{n}", tokens_of(n))
        assert (held(engine, tokens_of(0)) == 32) == raised
        engine.check()


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_the_end_of_a_session_is_evicted_first(policy: str) -> None:
    """Though it is newer than the others, which lru evicts; what it has in common with one of them stays."""
    head, ends = prompt(0, 8), [prompt(n, 25) for n in (1, 2)]
    sessions = [np.concatenate([head, end]) for end in ends]
    with engine_of(policy) as engine:
        serve(engine, "goes on", sessions[0])
        serve(engine, "ends", sessions[1], expected_uses=0)
        assert serve(engine, "last", prompt(4, 85)).cached_len == 0
        engine.check()
        left = {"goes on": held(engine, sessions[0]), "ends": held(engine, sessions[1])}
        assert left["goes on"] >= 8 and (left["ends"] < left["goes on"]) == (policy == "auto"), left


def test_behind_a_branch_point_alone_a_session_leaves_nothing() -> None:
    """Also where no other prompt has come yet that has the system prompt in common."""
    tokens = tokens_of(0)
    with engine_of() as engine:
        serve(engine, "split", tokens[:17])
        serve(engine, "session", tokens, branch_points=(16,), expected_uses=0)
        for n in range(1, 5):
            serve(engine, f"r{n}", tokens_of(n))
        assert held(engine, tokens) == 16
        engine.check()
