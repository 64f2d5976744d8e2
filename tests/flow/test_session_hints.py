"""Hints about sessions: pages of an ended session are evicted first and not copied, and a prompt is kept until its
next turn."""

from __future__ import annotations

import numpy as np
import pytest

import component_case
from costs import lines_of
from disk_case import Clock
from hicache import CacheEngine, CacheRequest, ModelGeometry, build_engine
from hicache.pages.key import component_keys
from memory_store import MemoryPageStore
from toy_model import GEOMETRY, config, prompt, serve, settled
from waiting import eventually

PAGE_BYTES = 8 * 192
WRITE_POLICIES = ["write_through", "write_back", "exclusive"]


def stored(engine: CacheEngine, tokens: np.ndarray) -> int:
    """Empty the memory tiers; returns the tokens of the prompt that the store has."""
    assert engine.reset()
    eventually(lambda: engine.lookup(tokens, disk_wait_s=10.0).disk_known)
    found = engine.lookup(tokens, disk_wait_s=10.0)
    assert not found.device and not found.host
    return found.disk


def fill(engine: CacheEngine, *seeds: int) -> None:
    """Serve prompts, each of which takes half of the device."""
    for seed in seeds:
        serve(engine, f"fill {seed}", prompt(seed, 65))
        engine.flush()


@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_nothing_of_an_ended_session_is_saved_any_more(policy: str) -> None:
    """The last turn of a session has the hint `session_end`. The pages of this turn, and unsaved pages of the turn
    before, are neither on the host nor in the store after the device has evicted them. A session that continues is
    stored."""
    settings = config(device_tokens=136, host_bytes=60 * PAGE_BYTES, write_policy=policy)
    goes_on, ends = prompt(1, 49), prompt(2, 49)
    with build_engine(settings, GEOMETRY, store=MemoryPageStore(8 << 20)) as engine:
        for name, tokens in (("goes on", goes_on), ("ends", ends)):
            for turn, length in enumerate((25, 49)):
                if (name, turn) != ("ends", 1):
                    serve(engine, f"{name} {turn}", tokens[:length])
                serve(engine, f"{name} {turn} again", tokens[:length], session_end=(name, turn) == ("ends", 1))
                engine.flush()
        fill(engine, 10, 11, 12)
        assert engine.lookup(ends).device == 0 and engine.lookup(ends).host <= 24
        assert (stored(engine, goes_on), stored(engine, ends)) == (48, 24)  # the first turn of "ends" was flushed
        settled(engine)


def test_a_session_that_continues_after_its_end_hint_is_unaffected() -> None:
    """The pages of the session are found, and from then on they are saved, and evicted in the usual order."""
    settings = config(device_tokens=136, host_bytes=60 * PAGE_BYTES, eviction_policy="lru")
    tokens = prompt(1, 57)
    with build_engine(settings, GEOMETRY, store=MemoryPageStore(8 << 20)) as engine:
        serve(engine, "ends", tokens[:49], session_end=True)
        engine.flush()
        assert engine.stats()["host.used_tokens"] == 0
        assert serve(engine, "goes on", tokens).cached_len == 48
        engine.flush()
        fill(engine, 10)
        assert engine.lookup(tokens).device == 56
        assert stored(engine, tokens) == 56
        settled(engine)


@pytest.mark.parametrize("model", component_case.WITH_COMPONENTS)
def test_the_end_reaches_windows_and_states_that_left_before(model: ModelGeometry) -> None:
    """Windows and states of earlier turns that are only on the host are evicted first too."""
    sizes = {"device_tokens": 512, "window_tokens": 56, "mamba_size": 6, "write_policy": "exclusive"}
    with build_engine(component_case.config(**sizes), model) as engine:
        for turn in (1, 2, 3):
            tokens = prompt(1, 32 * turn + 1)
            with engine.acquire(CacheRequest(f"r{turn}", tokens, reserve_tokens=8, session_end=turn == 3)) as lease:
                component_case.prefill(engine, lease, tokens, model, chunk=8)
            component_case.serve(engine, f"other {turn}", prompt(turn + 1, 41), model, 8)
        tree, component = engine.inspect.context.tree, engine.inspect.context.components[1]
        keys = component_keys(component.name, tree.prompt_keys(tree.match(tokens[:96]), tokens[:96]))
        found = component.pages.held(keys)
        assert len(found) and component.pages.order.has_ended[found].all()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_prompt_is_kept_until_its_next_turn_or_its_time(tier: str) -> None:
    """The oldest prompt has a hint for its next turn. This prompt stays, and a later prompt of another tenant is
    evicted instead. The hint ends after four times the given time, or when the prompt is used."""
    clock = Clock()
    host_pages = 0 if tier == "device" else 20
    sizes = {"device_tokens": 168 if tier == "device" else 72, "host_bytes": host_pages * PAGE_BYTES}
    settings = config(**sizes, write_policy="write_through")  # the host has the prompt before the hint

    def held(seed: int) -> bool:
        found = engine.lookup(prompt(seed, 49), "" if seed == 1 else "another tenant")
        return found.device + found.host == 48

    for used in (True, False):
        with build_engine(settings, GEOMETRY, clock=lambda: clock.now_s) as engine:
            serve(engine, "kept", prompt(1, 49), next_turn_within_s=10)
            engine.flush()
            for seed in (2, 3, 4, 5):
                clock.now_s += 9.9
                engine.poll()
                serve(engine, f"other {seed}", prompt(seed, 49), "another tenant")
                engine.flush()
                engine.check()
            assert held(1) and not held(2)
            assert engine.stats()["evict.kept_tokens"] == engine.lookup(prompt(1, 49)).device
            if used:
                serve(engine, "next turn", prompt(1, 49))
                engine.flush()
            else:
                clock.now_s += 1
                engine.poll()
            assert engine.stats()["evict.kept_tokens"] == 0
            for seed in (6, 7, 8, 9):
                serve(engine, f"later {seed}", prompt(seed, 49), "another tenant")
                engine.flush()
            assert not held(1)
            settled(engine)


def test_a_beginning_that_prompts_share_counts_once() -> None:
    """Sessions with one system prompt are all kept if together they fit in nine tenths of the device. The sessions
    would not fit if each of them counted the system prompt."""
    system = prompt(0, 60)
    sessions = [np.concatenate([system, prompt(seed, 9)]) for seed in range(1, 7)]
    with build_engine(config(device_tokens=128, host_bytes=0), GEOMETRY) as engine:
        for number, tokens in enumerate(sessions):
            serve(engine, f"session {number}", tokens, next_turn_within_s=600)
        assert engine.stats()["evict.kept_tokens"] == 60 + 6 * 8 <= 0.9 * 128
        for number in range(8):
            serve(engine, f"other {number}", prompt(100 + number, 17))
        assert all(engine.lookup(np.append(tokens, 1)).device == 68 for tokens in sessions)
        settled(engine)


def test_the_cost_of_a_hint_does_not_grow_with_other_hints() -> None:
    """A hint and a snapshot of the metrics execute about the same number of lines for 50 kept prompts as for 4. Prompts
    that both tiers have evicted are not counted."""
    with build_engine(
        config(device_tokens=1024, host_bytes=64 * PAGE_BYTES, write_policy="exclusive"), GEOMETRY
    ) as engine:
        at_end, of_stats = list[int](), list[int]()
        for number in range(100):
            tokens = prompt(number, 17)
            lease = engine.acquire(CacheRequest(f"r{number}", tokens, next_turn_within_s=86400))
            engine.commit(lease, tokens)
            at_end.append(lines_of(lambda: engine.release(lease)))  # noqa: B023
            of_stats.append(lines_of(engine.stats))
            engine.flush()
            engine.check()
        few, many = slice(2, 5), slice(45, 55)
        assert np.median(at_end[many]) < 1.2 * np.median(at_end[few])
        assert max(of_stats[2:]) == min(of_stats[2:])
        context = engine.inspect.context
        assert 0 < context.full.resident.order.num_kept * context.tree.page_size <= 0.9 * 1024


def test_a_hint_of_pages_that_the_host_lacks_ends_no_other_one_there() -> None:
    """The host keeps a prompt with a hint. A later hint for a long prompt that only the device has would use the rest
    of the host's nine tenths, but does not end the first hint."""
    settings = config(device_tokens=512, host_bytes=21 * PAGE_BYTES, write_policy="exclusive")
    with build_engine(settings, GEOMETRY) as engine:
        kept, index = prompt(1, 49), engine.inspect.context.full.pages
        serve(engine, "first", kept)
        for seed in range(2, 13):
            serve(engine, f"other {seed}", prompt(seed, 49))
            engine.flush()
        assert engine.reset(["device"])
        assert serve(engine, "kept", kept, next_turn_within_s=600).hit.host == 48
        engine.flush()
        assert index.order.num_kept == 6
        serve(engine, "long", prompt(20, 145), next_turn_within_s=600)
        assert index.order.num_kept == 6
        settled(engine)
