"""What a scheduler knows of later requests: what queued ones expect to find is evicted last, on the device and on the
host, and hints and priorities of `CacheRequest` rank the rest."""

from __future__ import annotations

import numpy as np
import pytest

from hicache import CacheEngine, CacheRequest, build_engine
from toy_model import GEOMETRY, compute, config, prompt, serve

POLICIES = ["lru", "mru", "slru"]  # a list, a heap that keeps the oldest, and one of segments
TOKENS = np.arange(1, 33)  # as many as four host pages


def _prompt(number: int) -> np.ndarray:
    return TOKENS + 100 * number


def _device(engine: CacheEngine, number: int) -> int:
    return engine.lookup(_prompt(number)).device


def _serve(engine: CacheEngine, *numbers: int) -> None:
    for number in numbers:
        serve(engine, str(number), _prompt(number))
        engine.flush()


@pytest.mark.parametrize("expected", range(3))
@pytest.mark.parametrize("policy", POLICIES)
def test_the_device_keeps_what_is_expected(policy: str, expected: int) -> None:
    """Each of three prompts on a device that is full of them survives if it is expected and they are not, whichever
    would have gone first; where nothing else is left, it goes too."""
    with build_engine(config(device_tokens=100, host_bytes=0, eviction_policy=policy), GEOMETRY) as engine:
        _serve(engine, 0, 1, 2)
        engine.expect("queued", _prompt(expected))
        serve(engine, "new", np.arange(500, 564))  # as many tokens as the other two
        engine.check()
        assert all((_device(engine, number) == 28) == (number == expected) for number in range(3))
        serve(engine, "big", np.arange(600, 696))
        assert _device(engine, expected) < 28
        engine.cancel("queued")
        engine.check()


@pytest.mark.parametrize("expected", range(3))
@pytest.mark.parametrize("policy", POLICIES)
def test_the_host_keeps_what_is_expected(policy: str, expected: int) -> None:
    """Of a host that is full, what a queued request expects goes last."""
    settings = config(device_tokens=40, host_bytes=14 * 8 * 192, eviction_policy=policy)
    with build_engine(settings, GEOMETRY) as engine:
        _serve(engine, 0, 1, 2)
        engine.expect("queued", _prompt(expected))
        _serve(engine, 3, 4)
        engine.check()
        found = engine.lookup(_prompt(expected))
        assert found.device + found.host >= 24


def test_an_expectation_ends_with_its_request() -> None:
    """After `cancel`, and after `acquire` and `release`, the least recently used goes first again; two requests that
    expect one prefix both count."""
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


def test_an_expectation_follows_what_came_meanwhile() -> None:
    """Asked again, it covers pages that another request committed since, also where nodes were split."""
    with build_engine(config(device_tokens=128, host_bytes=0), GEOMETRY) as engine:
        serve(engine, "head", _prompt(0)[:17])
        engine.expect("queued", _prompt(0))
        serve(engine, "other", np.concatenate([_prompt(0)[:8], _prompt(7)[:16]]))  # splits the head
        serve(engine, "whole", _prompt(0))
        engine.expect("queued", _prompt(0))
        _serve(engine, 1, 2, 3, 4)
        assert _device(engine, 0) == 28
        engine.cancel("queued")
        engine.check()


@pytest.mark.parametrize("policy", ["write_through", "write_back", "exclusive"])
def test_what_makes_room_is_on_the_host(policy: str) -> None:
    """A request that is backed up and released, and whose slots are taken, finds its whole pages on the host."""
    settings = config(device_tokens=64, write_policy=policy)
    with build_engine(settings, GEOMETRY) as engine:
        tokens = np.concatenate([_prompt(0), _prompt(1)[:11]])
        with engine.acquire(CacheRequest("retracted", _prompt(0))) as lease:
            compute(engine, lease, _prompt(0), lease.cached_len, 32)
            engine.extend(lease, 11)
            compute(engine, lease, tokens, 32, 43)
            engine.commit(lease, tokens)
            engine.backup(lease)
        serve(engine, "next", _prompt(2)[:30])
        serve(engine, "next", _prompt(3)[:30])
        engine.flush()
        found = engine.lookup(tokens)
        assert found.device + found.host == 40 and found.host >= 24
        serve(engine, "back", tokens)
        engine.check()


def tokens_of(seed: int) -> np.ndarray:
    return prompt(seed, 33)


def held(engine: CacheEngine, tokens: np.ndarray) -> int:
    return engine.inspect.context.tree.match(tokens).full_len


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


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_the_end_of_a_session_is_evicted_first(policy: str) -> None:
    """Though it is newer than the others, under every policy; what it has in common with one of them stays."""
    head, ends = prompt(0, 8), [prompt(n, 25) for n in (1, 2)]
    sessions = [np.concatenate([head, end]) for end in ends]
    with engine_of(policy) as engine:
        serve(engine, "goes on", sessions[0])
        serve(engine, "ends", sessions[1], session_end=True)
        assert serve(engine, "last", prompt(4, 85)).cached_len == 0
        engine.check()
        left = {"goes on": held(engine, sessions[0]), "ends": held(engine, sessions[1])}
        assert 8 <= left["ends"] < left["goes on"] == 32, left


def test_what_the_end_of_a_session_shares_with_others_stays() -> None:
    """The beginning that several had in common counts the uses of all of them, also after one was the last of its
    session."""
    head = prompt(0, 32)
    with engine_of() as engine:
        for n in range(1, 5):
            hints = {"session_end": True} if n == 4 else {}
            serve(engine, f"r{n}", np.concatenate([head, prompt(n, 9)]), **hints)
        for n in range(5, 10):
            serve(engine, f"r{n}", tokens_of(n))
        assert held(engine, head) == 32
        engine.check()


def test_behind_a_branch_point_alone_a_session_leaves_nothing() -> None:
    """Also where no other prompt has come yet that has the system prompt in common."""
    tokens = tokens_of(0)
    with engine_of() as engine:
        serve(engine, "split", tokens[:17])
        serve(engine, "session", tokens, branch_points=(16,), session_end=True)
        for n in range(1, 5):
            serve(engine, f"r{n}", tokens_of(n))
        assert held(engine, tokens) == 16
        engine.check()
