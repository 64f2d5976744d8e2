"""Reasons why tokens of prompts were computed: the counters of an engine add up to the computed tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hicache import CacheEngine, build_engine
from hicache.storage import PageBuffer
from memory_store import MemoryPageStore
from toy_model import GEOMETRY, config, prompt, serve, settled, until_ready
from waiting import eventually

PAGE_BYTES = 8 * 192
COMPLETE = 48  # tokens in complete pages of a prompt of 49


def counted(engine: CacheEngine) -> dict[str, float]:
    """The counters by reason, without zeros."""
    found = {
        name.removeprefix("admit.").removesuffix("_missed_tokens"): value
        for name, value in engine.stats().items()
        if name.endswith("_missed_tokens")
    }
    assert sum(found.values()) == engine.stats()["admit.computed_tokens"]
    return {reason: value for reason, value in found.items() if value}


def test_new_and_evicted_pages_are_distinguished() -> None:
    """A prompt counts differently when it is new, when it is repeated, and when other prompts have evicted it from
    device and host. The ages of the evicted pages are observed."""
    settings = config(device_tokens=136, host_bytes=24 * PAGE_BYTES, eviction_policy="lru")
    tokens = prompt(1, 49)
    with build_engine(settings, GEOMETRY) as engine:
        assert engine.lookup(tokens).missed == {"never_stored": COMPLETE, "tail": 1}
        assert serve(engine, "new", tokens).missed == {"never_stored": COMPLETE, "tail": 1}
        assert serve(engine, "again", tokens).missed == {"tail": 1}
        assert engine.lookup(prompt(1, 49)).missed == {"tail": 1}
        for seed in range(10, 18):
            serve(engine, f"other {seed}", prompt(seed, 65))
            engine.flush()
        assert engine.lookup(tokens).missed == {"evicted": COMPLETE, "tail": 1}
        assert serve(engine, "evicted", tokens).missed == {"evicted": COMPLETE, "tail": 1}
        assert counted(engine)["evicted"] == COMPLETE
        ages = engine.metrics()["evict.host_age_seconds"]
        assert ages.count * 8 >= 8 * 64 - 24 * 8 - 136  # a page has 8 tokens
        settled(engine)


def test_pages_that_cost_more_to_load_count_as_gate() -> None:
    """If computing takes no time, a prompt that the device has evicted is not loaded from the host or a store, and its
    tokens count as "gate"."""
    settings = config(device_tokens=136, host_bytes=60 * PAGE_BYTES, prefill_tokens_per_s=1e12, eviction_policy="lru")
    tokens = prompt(1, 49)
    with build_engine(settings, GEOMETRY, store=MemoryPageStore(8 << 20)) as engine:
        serve(engine, "new", tokens)
        engine.flush()
        for seed in (10, 11, 12):
            serve(engine, f"other {seed}", prompt(seed, 65))
            engine.flush()
        engine._cost.observe_load(1, 1.0)
        assert engine.lookup(tokens).host == COMPLETE
        assert serve(engine, "declined", tokens).missed == {"gate": COMPLETE, "tail": 1}
        assert counted(engine)["gate"] == COMPLETE
        settled(engine)


class Unreadable(MemoryPageStore):
    """A store whose reads fail."""

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = 0.0) -> list[bool]:
        return [False] * len(keys)


@pytest.mark.parametrize(
    ("kind", "speed", "reason"), [(MemoryPageStore, 1e12, "gate"), (Unreadable, 0, "failed")], ids=["gate", "failed"]
)
def test_pages_of_a_store_that_are_not_read(kind: type[MemoryPageStore], speed: float, reason: str) -> None:
    """Pages of a store are not read if computing costs less than waiting, or if the store announces pages and cannot
    read them."""
    settings = config(device_tokens=136, host_bytes=60 * PAGE_BYTES, prefill_tokens_per_s=speed)
    tokens = prompt(1, 49)
    with build_engine(settings, GEOMETRY, store=kind(8 << 20)) as engine:
        serve(engine, "new", tokens)
        engine.flush()
        assert engine.reset()
        eventually(lambda: engine.lookup(tokens, disk_wait_s=10.0).disk == COMPLETE)
        engine._cost.observe_reads([(1, 1.0)])
        until_ready(engine, engine.prefetch("again", tokens))
        assert serve(engine, "again", tokens).missed == {reason: COMPLETE, "tail": 1}
        assert counted(engine)[reason] == COMPLETE
        settled(engine)


def test_without_a_host_the_engine_knows_no_reason() -> None:
    settings = config(device_tokens=136, host_bytes=0)
    with build_engine(settings, GEOMETRY) as engine:
        assert serve(engine, "new", prompt(1, 49)).missed == {"unknown": 49}
        assert serve(engine, "again", prompt(1, 49)).missed == {"unknown": 1}
        assert counted(engine) == {"unknown": 50}
