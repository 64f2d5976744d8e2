"""Knowledge of later requests. Device and host evict pages last if queued requests expect them; hints and priorities of
`CacheRequest` rank the other pages."""

from __future__ import annotations

import numpy as np
import pytest

from hicache import CacheEngine, CacheRequest, build_engine
from toy_model import GEOMETRY, config, prompt, serve

POLICIES = ["lru", "mru", "slru"]  # policies that use a list, a heap that keeps the oldest, and a heap of segments
TOKENS = np.arange(1, 33)  # tokens of four host pages


def _prompt(number: int) -> np.ndarray:
    return TOKENS + 100 * number


def _device(engine: CacheEngine, number: int) -> int:
    return engine.lookup(_prompt(number)).device


def _serve(engine: CacheEngine, *numbers: int) -> None:
    for number in numbers:
        serve(engine, str(number), _prompt(number))
        engine.flush()


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("expected", range(3))
@pytest.mark.parametrize("policy", POLICIES)
def test_an_expected_prompt_is_evicted_last(policy: str, expected: int, tier: str) -> None:
    """Of three prompts that fill a tier, the expected one stays, whichever policy ranks the others."""
    sizes = (
        {"device_tokens": 100, "host_bytes": 0}
        if tier == "device"
        else {"device_tokens": 40, "host_bytes": 14 * 8 * 192}
    )
    with build_engine(config(**sizes, eviction_policy=policy), GEOMETRY) as engine:
        _serve(engine, 0, 1, 2)
        engine.expect("queued", _prompt(expected))
        _serve(engine, 3, 4)
        engine.check()
        found = engine.lookup(_prompt(expected))
        assert found.device + found.host >= 24
        serve(engine, "big", np.arange(600, 600 + sizes["device_tokens"] - 4))
        assert tier == "host" or _device(engine, expected) < 28
        engine.cancel("queued")
        engine.check()


def test_an_expectation_ends_with_its_request() -> None:
    """After `cancel`, or `acquire` and `release`, an expectation has ended, and the least recently used page is evicted
    first again. Two requests that expect one prefix both count."""
    with build_engine(config(device_tokens=100, host_bytes=0), GEOMETRY) as engine:
        _serve(engine, 0, 1, 2)
        for name in ("one", "two"):
            engine.expect(name, _prompt(0))
        engine.cancel("one")
        assert engine.stats()["admit.expected_requests"] == 1
        serve(engine, "new", _prompt(3)[:30])
        assert _device(engine, 0) == 28 > _device(engine, 1)
        with engine.acquire(CacheRequest("two", _prompt(0))):
            assert engine.stats()["admit.expected_requests"] == 0
        for number in (2, 3):
            serve(engine, "again", _prompt(number)[:30])
        serve(engine, "last", _prompt(5)[:30])
        engine.check()
        assert _device(engine, 0) < 28


def test_an_expectation_includes_pages_added_later() -> None:
    """A second `expect` of a request also covers pages that another request has committed since, even if nodes were
    split."""
    with build_engine(config(device_tokens=128, host_bytes=0), GEOMETRY) as engine:
        serve(engine, "head", _prompt(0)[:17])
        engine.expect("queued", _prompt(0))
        serve(engine, "other", np.concatenate([_prompt(0)[:8], _prompt(7)[:16]]))  # splits the node of the head
        serve(engine, "whole", _prompt(0))
        engine.expect("queued", _prompt(0))
        _serve(engine, 1, 2, 3, 4)
        assert _device(engine, 0) == 28
        engine.cancel("queued")
        engine.check()


def tokens_of(seed: int) -> np.ndarray:
    return prompt(seed, 33)


def held(engine: CacheEngine, tokens: np.ndarray) -> int:
    return engine.inspect.context.tree.match(tokens).full_len


def engine_of(policy: str = "auto") -> CacheEngine:
    return build_engine(config(eviction_policy=policy, host_bytes=0, device_tokens=128), GEOMETRY)


@pytest.mark.parametrize("hint", [{"expected_uses": 9}, {"priority": 9}])
def test_expected_and_prioritized_pages_are_not_evicted(hint: dict[str, int]) -> None:
    """The oldest prompt stays if it has expected uses or a priority, while all other prompts of the same age are
    evicted."""
    with engine_of() as engine:
        serve(engine, "kept", tokens_of(0), **hint)
        for n in range(1, 9):
            serve(engine, f"r{n}", tokens_of(n))
            engine.check()
        assert held(engine, tokens_of(0)) == 32 and held(engine, tokens_of(1)) == 0


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_the_end_of_a_session_is_evicted_first(policy: str) -> None:
    """The prompt of an ended session is evicted before older ones, under every policy. The pages that it shares with
    one of them stay."""
    head, ends = prompt(0, 8), [prompt(n, 25) for n in (1, 2)]
    sessions = [np.concatenate([head, end]) for end in ends]
    with engine_of(policy) as engine:
        serve(engine, "goes on", sessions[0])
        serve(engine, "ends", sessions[1], session_end=True)
        assert serve(engine, "last", prompt(4, 85)).cached_len == 0
        engine.check()
        left = {"goes on": held(engine, sessions[0]), "ends": held(engine, sessions[1])}
        assert 8 <= left["ends"] < left["goes on"] == 32, left


def test_shared_pages_of_an_ended_session_are_kept() -> None:
    """The beginning that several sessions share counts the uses of all of them, also after one of these sessions has
    ended."""
    head = prompt(0, 32)
    with engine_of() as engine:
        for n in range(1, 5):
            hints = {"session_end": True} if n == 4 else {}
            serve(engine, f"r{n}", np.concatenate([head, prompt(n, 9)]), **hints)
        for n in range(5, 10):
            serve(engine, f"r{n}", tokens_of(n))
        assert held(engine, head) == 32
        engine.check()


def test_a_session_end_evicts_only_pages_after_the_branch_point() -> None:
    """The end of a session does not evict the system prompt, even if no other prompt has used it yet."""
    tokens = tokens_of(0)
    with engine_of() as engine:
        serve(engine, "split", tokens[:17])
        serve(engine, "session", tokens, branch_points=(16,), session_end=True)
        for n in range(1, 5):
            serve(engine, f"r{n}", tokens_of(n))
        assert held(engine, tokens) == 16
        engine.check()
