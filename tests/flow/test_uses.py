"""Only a use is a use: copies of what is cached change nothing about what is evicted next."""

from __future__ import annotations

import numpy as np
import pytest

from hicache import CacheEngine, CacheRequest, build_engine
from toy_model import GEOMETRY, config


def held(engine: CacheEngine, tokens: np.ndarray) -> int:
    return engine.lookup(tokens).device


def compute(engine: CacheEngine, name: str, tokens: np.ndarray) -> None:
    with engine.acquire(CacheRequest(name, tokens)) as lease:
        engine.commit(lease, tokens)


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_what_was_used_last_goes_last(policy: str) -> None:
    """One prompt was used before another: whatever is evicted and copied meanwhile, the first goes whole before any of
    the second."""
    cold, hot = (np.random.default_rng(n).integers(0, 50, 49) for n in (1, 2))
    with build_engine(config(device_tokens=112, write_policy=policy), GEOMETRY) as engine:
        compute(engine, "cold", cold)
        compute(engine, "hot", hot)
        for n in range(2):
            compute(engine, f"other{n}", np.random.default_rng(10 + n).integers(0, 50, 16))
            engine.flush()
            engine.check()
        assert held(engine, hot) == 48 and held(engine, cold) < 48
