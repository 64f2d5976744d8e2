"""Windows and recurrent states on disk: they are persisted with their pages, prefetched and restored, and what comes
back is what a pass wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from component_case import STATES, WINDOW, WINDOWS, compute, config
from hicache import AdvancedConfig, CacheEngine, CacheRequest, DiskConfig, ModelGeometry, build_engine
from hicache.storage import pages
from hicache.tree import FULL, HOST, MAMBA, SWA, Tier

MODELS = [pytest.param(WINDOWS, id="window"), pytest.param(STATES, id="hybrid")]
PAGE = 8


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, length)


def engine_at(path: Path, model: ModelGeometry, **changes: object) -> CacheEngine:
    settings = {"prefetch_mode": "wait_complete", "advanced": AdvancedConfig(disk_reader_threads=2), **changes}
    return build_engine(config(disk=DiskConfig(path=str(path), budget_bytes=8 << 20), **settings), model)


def serve(engine: CacheEngine, name: str, tokens: np.ndarray, model: ModelGeometry) -> tuple[int, int]:
    """Prefetch, admit, compute the rest against the truth, commit; returns cached tokens and those of the disk."""
    handle = engine.prefetch(name, tokens)
    while not handle.ready:
        engine.poll()
    with engine.acquire(CacheRequest(name, tokens)) as lease:
        start = lease.cached_len
        while start < len(tokens):
            end = engine.next_stop(lease, start, len(tokens))
            compute(engine, lease, tokens, start, end, model)
            engine.commit(lease, tokens[:end])
            start = end
        return lease.cached_len, lease.hit.disk


def settled(engine: CacheEngine) -> None:
    engine.flush()
    engine.check()
    assert engine.stats()["engine.leases"] == engine.stats()["device.protected_tokens"] == 0


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("model", MODELS)
def test_a_restart_finds_windows_and_states(tmp_path: Path, model: ModelGeometry, policy: str, device: str) -> None:
    """After a restart a prompt hits on disk up to its last checkpoint, and passes read what they wrote before."""
    asked = [prompt(seed, 61) for seed in range(4)]
    with engine_at(tmp_path / "s", model, write_policy=policy, device=device) as engine:
        for seed, tokens in enumerate(asked):
            for turn in range(3):
                serve(engine, f"{turn}.{seed}", tokens, model)
                engine.flush()
        settled(engine)
    found = 0
    with engine_at(tmp_path / "s", model, write_policy=policy, device=device) as engine:
        for seed, tokens in enumerate(asked):
            before = engine.lookup(tokens, disk_wait_s=20.0)
            assert (before.device, before.host) == (0, 0)
            cached_len, disk_len = serve(engine, f"again.{seed}", tokens, model)
            assert cached_len == disk_len == before.disk
            found += before.disk
            engine.flush()
        settled(engine)
    # The other policies copy what was used twice, or evicted: the device loses or keeps some of it before.
    assert found == 4 * 56 if policy != "write_back" else found >= 56


@pytest.mark.parametrize("model", MODELS)
def test_what_the_disk_lacks_is_computed_again(tmp_path: Path, model: ModelGeometry) -> None:
    """Where the disk lost the state or a window page, a prompt hits only as far as all components reach."""
    tokens = prompt(1, 61)
    with engine_at(tmp_path / "s", model) as engine:
        serve(engine, "a", tokens, model)
        engine.flush()
        context = engine.inspect.context
        assert context.disk is not None
        names, name = context.tree.names, MAMBA if model is STATES else SWA
        keys = names.of_prompt(context.tree.match(tokens[:56]), tokens[:56])
        assert context.disk.store.delete(names.of_component(name, keys[-1:])) == 1
    with engine_at(tmp_path / "s", model) as engine:
        assert engine.lookup(tokens, disk_wait_s=20.0).disk < 56
        cached_len, disk_len = serve(engine, "b", tokens, model)
        assert cached_len == disk_len < 56
        settled(engine)


def test_only_the_last_window_is_read(tmp_path: Path) -> None:
    """A prefix of many pages brings the window pages of its last window alone."""
    tokens = prompt(1, 121)
    with engine_at(tmp_path / "s", WINDOWS, device_tokens=256, window_tokens=256) as engine:
        for end in range(PAGE, 121, PAGE):  # every page was once the last
            serve(engine, f"a{end}", tokens[: end + 1], WINDOWS)
            engine.flush()
    with engine_at(tmp_path / "s", WINDOWS, device_tokens=256, window_tokens=256) as engine:
        assert serve(engine, "b", tokens, WINDOWS) == (120, 120)
        held = engine.inspect.context.tree.values(SWA, HOST)
        assert sum(map(len, held)) == -(-WINDOW // PAGE)
        settled(engine)


@pytest.mark.parametrize("model", MODELS)
def test_states_and_windows_are_evicted_before_their_pages(tmp_path: Path, model: ModelGeometry) -> None:
    """In the disk's order of use, what belongs to the end of a prefix comes before the pages that it continues."""
    tokens = prompt(1, 61)
    with engine_at(tmp_path / "s", model) as engine:
        for turn in range(2):
            serve(engine, f"r{turn}", tokens, model)
            engine.flush()
        context = engine.inspect.context
        assert context.disk is not None
        context.disk.store.sync()
        order = [key for key, _ in pages(context.disk.store)]  # type: ignore[arg-type]
        page_keys = context.tree.names.of_prompt(context.tree.match(tokens[:56]), tokens[:56])
        name = MAMBA if model is STATES else SWA
        others = [order.index(key) for key in context.tree.names.of_component(name, page_keys) if key in order]
        assert others and max(others) < min(order.index(key) for key in page_keys)


def test_a_component_that_only_the_disk_has_comes_back_to_held_pages(tmp_path: Path) -> None:
    """Where memory kept the pages of a prefix and lost its state, the prefetch brings the state alone."""
    first, rest = prompt(1, 61), prompt(2, 30)
    with engine_at(tmp_path / "s", STATES, device_tokens=512, host_bytes=400 * 8 * 256) as engine:
        for name, tokens in (("a", first), ("b", np.concatenate([first[:56], rest]))):
            serve(engine, name, tokens, STATES)
            engine.flush()
        context = engine.inspect.context
        node = context.tree.match(first[:56]).nodes[-1]
        for tier in Tier:
            context.free(context.tree.drop(node, MAMBA, tier))
        assert node.holds(FULL, HOST) and node.children
        before = engine.stats()["prefetch.bytes"]
        cached_len, _ = serve(engine, "c", first, STATES)
        assert cached_len == 56
        assert engine.stats()["prefetch.bytes"] - before == context.by_name[MAMBA].host.page_bytes
        settled(engine)


def test_a_second_user_of_a_shared_prefix_hits() -> None:
    """States are kept within a first prompt where others may branch off: the second prompt that shares its beginning
    starts from at least half of it, and from all of it where the request names the branch point."""
    stem = prompt(1, 96)
    asked = [np.concatenate([stem, prompt(seed, 21)]) for seed in (2, 3)]
    for branch_points, hit in (((), 64), ((96,), 96), ((97, 5), 96)):
        with build_engine(
            config(mamba_prefill_interval=16, device_tokens=512, host_bytes=0, page_size=8), STATES
        ) as engine:
            reused = []
            for seed, tokens in enumerate(asked):
                with engine.acquire(CacheRequest(f"r{seed}", tokens, branch_points=branch_points)) as lease:
                    reused.append(start := lease.cached_len)
                    while start < len(tokens):
                        end = engine.next_stop(lease, start, len(tokens))
                        compute(engine, lease, tokens, start, end, STATES)
                        engine.commit(lease, tokens[:end])
                        start = end
            assert reused == [0, hit]
            settled(engine)
