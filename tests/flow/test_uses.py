"""Counts of uses: only a request that uses a prompt counts, and pages keep their counts when they move from tier to
tier."""

from __future__ import annotations

import numpy as np
import pytest

from hicache import CacheEngine, CacheRequest, build_engine
from stepped_transfer import SteppedTransfers
from toy_model import GEOMETRY, config, prompt, settled

PAGE_BYTES = 8 * 192


def held(engine: CacheEngine, tokens: np.ndarray) -> int:
    return engine.lookup(tokens).device


def compute(engine: CacheEngine, name: str, tokens: np.ndarray, **hints: object) -> None:
    with engine.acquire(CacheRequest(name, tokens, **hints)) as lease:  # type: ignore[arg-type]
        engine.commit(lease, tokens)


def empty_device(engine: CacheEngine) -> None:
    """Evict all pages of the device by two other prompts, which fill it and are not computed."""
    engine.flush()
    with engine.acquire(CacheRequest("a", prompt(98, 256))), engine.acquire(CacheRequest("b", prompt(99, 256))):
        engine.flush()
    assert engine.reset(("device",))
    engine.check()


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_the_page_used_last_is_evicted_last(policy: str) -> None:
    """One prompt was used before another. All its pages are evicted before any page of the second prompt, also after
    other evictions and copies."""
    cold, hot = (np.random.default_rng(n).integers(0, 50, 49) for n in (1, 2))
    with build_engine(config(device_tokens=112, write_policy=policy), GEOMETRY) as engine:
        compute(engine, "cold", cold)
        compute(engine, "hot", hot)
        for n in range(2):
            compute(engine, f"other{n}", np.random.default_rng(10 + n).integers(0, 50, 16))
            engine.flush()
            engine.check()
        assert held(engine, hot) == 48 and held(engine, cold) < 48


@pytest.mark.parametrize("policy", ["lfu", "slru"])
def test_uses_are_copied_to_the_host_with_evicted_pages(policy: str) -> None:
    """A prompt that was often used on the device stays on the host longer than a prompt that was evicted later."""
    sizes = {"host_bytes": 15 * PAGE_BYTES, "eviction_policy": policy, "write_policy": "write_back"}
    with build_engine(config(**sizes), GEOMETRY) as engine:
        often, once = prompt(1, 57), prompt(2, 57)
        for n in range(20):
            compute(engine, f"often{n}", often)
        compute(engine, "once", once)
        compute(engine, "x", prompt(3, 121))  # the device evicts both to the host, which is now full
        compute(engine, "y", prompt(4, 53))  # the device evicts seven pages of x to the host
        assert (engine.lookup(often).host, engine.lookup(once).host) == (56, 8)
        settled(engine)


@pytest.mark.parametrize("way", ["landed", "in flight", "divided in flight", "used before", "evicted later"])
def test_announced_uses_take_effect_on_the_host(way: str) -> None:
    """The host keeps a prompt with expected uses and evicts one whose session has ended. When the caller gives the
    hint, their pages are on the host, in flight, or only on the device."""
    policy = "write_back" if way == "evicted later" else "write_through"
    sizes = {"device_tokens": 512, "host_bytes": 31 * PAGE_BYTES, "eviction_policy": "auto", "write_policy": policy}
    engine = build_engine(config(**sizes), GEOMETRY)
    SteppedTransfers(engine)
    with engine:
        again, ended = prompt(1, 81), prompt(2, 81)  # ten of thirty host pages each
        for name, tokens, hint in (("again", again, {"expected_uses": 5}), ("ended", ended, {"session_end": True})):
            if way == "used before":
                compute(engine, f"{name} before", tokens[:41])
                engine.flush()
            lease = engine.acquire(CacheRequest(name, tokens, **hint))
            engine.commit(lease, tokens)
            if way == "landed":
                engine.flush()
            if way == "divided in flight":
                compute(engine, f"{name} in part", np.concatenate([tokens[:40], prompt(3, 9)]))
            engine.release(lease)
            engine.flush()
            engine.check()
        for n in range(2):
            empty_device(engine)
            compute(engine, f"next{n}", prompt(4 + n, 117))  # fourteen pages
        empty_device(engine)
        assert engine.lookup(again).host == 80 and engine.lookup(ended).host <= 40
        settled(engine)
