"""Device and host under the write policy exclusive: they hold different pages, and exchange them in steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from component_case import EACH_MODEL, FULL, config, prefill, serve
from hicache import CacheEngine, CacheRequest, ModelGeometry, build_engine
from hicache.errors import TransferBusy
from hicache.flow.movement import Load
from stepped_transfer import SteppedTransfers
from toy_model import prompt, settled

# Pages of eight tokens: 16 on the device, and on the host as many, less the sink.
SIZES = {"device_tokens": 128, "host_bytes": 17 * 8 * 192, "write_policy": "exclusive"}
transfers: dict[CacheEngine, SteppedTransfers] = {}


@pytest.fixture
def engine() -> Iterator[CacheEngine]:
    engine = build_engine(config(**SIZES), FULL)
    transfers[engine] = SteppedTransfers(engine)  # a copy is made where it is waited for, and no earlier
    with engine:
        yield engine
        settled(engine)


def test_two_tiers_hold_what_one_as_large_as_both_would(engine: CacheEngine) -> None:
    """Two prompts of 15 pages take turns: each comes from the host whole while the other goes there, in steps of one
    page, and nothing is lost. All that goes down again is counted."""
    prompts = [prompt(n, 121) for n in range(2)]
    for n, tokens in enumerate(prompts):
        serve(engine, f"first{n}", tokens, FULL, 8)
    for n in range(4):
        tokens, other = prompts[n % 2], prompts[1 - n % 2]
        assert engine.lookup(tokens).host == 120 == engine.lookup(other).device
        with engine.acquire(CacheRequest(f"again{n}", tokens, reserve_tokens=0)) as lease:
            engine.flush()
            prefill(engine, lease, tokens, FULL)
        assert (lease.hit.device, lease.hit.host) == (0, 120)
        assert (engine.lookup(tokens).device, engine.lookup(other).host) == (120, 120)
    stats = engine.stats()
    assert stats["evict.host_lost_tokens"] == stats["evict.device_lost_tokens"] == 0
    assert stats["host.duplicate_tokens"] <= 2 * 8 < 3 * 120 - 2 * 8 <= stats["host.returned_tokens"]


def test_what_is_computed_though_the_host_has_it_is_a_duplicate(engine: CacheEngine) -> None:
    """It was not worth a load. The next victims take its places."""
    first, second = prompt(0, 121), prompt(1, 57)
    serve(engine, "first", first, FULL, 8)
    serve(engine, "second", second, FULL, 8)
    assert (engine.lookup(first).device, engine.lookup(first).host) == (64, 56)
    with engine.acquire(CacheRequest("again", first, max_cached_tokens=0)) as lease:
        assert lease.cached_len == 0
        prefill(engine, lease, first, FULL)
    engine.check()
    assert engine.stats()["host.duplicate_tokens"] == 0 and engine.lookup(second).host == 56


def test_of_a_load_that_fails_on_its_way_what_had_come_stays(engine: CacheEngine) -> None:
    """Its later pages are on the host still, and the next request has them."""
    prompts = [prompt(n, 121) for n in range(2)]
    for n, tokens in enumerate(prompts):
        serve(engine, f"first{n}", tokens, FULL, 8)
    start, up, left = engine.inspect.restore.start, transfers[engine].up[0], 4

    def starting(*args: Any) -> Load:
        nonlocal left
        left -= 1
        up.fails = ConnectionError("the link is down") if not left else None
        return start(*args)

    engine.inspect.restore.start = starting  # type: ignore[method-assign]
    with pytest.raises(TransferBusy):
        engine.acquire(CacheRequest("fails", prompts[0], reserve_tokens=0))
    engine.flush()
    engine.check()
    found = engine.lookup(prompts[0])
    assert (found.device, found.host) == (16, 104) and engine.lookup(prompts[1]).device < 120


@pytest.mark.parametrize("model", EACH_MODEL)
def test_each_kind_of_model_takes_turns(model: ModelGeometry) -> None:
    """Prompts that fit the two tiers together come back right, windows and states with them: what leaves the device
    with one of these is not saved, so that the host keeps its copy of it."""
    with build_engine(config(**{**SIZES, "host_bytes": 20 * 8 * 256}), model) as engine:
        assert (engine.inspect.context.exclusive is None) == (model is not FULL)
        for n in range(6):
            tokens = prompt(n % 2, 113)
            lease = serve(engine, f"turn{n}", tokens, model, 8)
            assert n < 2 or lease.hit.host > 0
        settled(engine)
