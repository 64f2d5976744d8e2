"""The engine end to end on a toy model with full pages, windows or recurrent states: all bytes that leave the device
can be restored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from component_case import (
    EACH_MODEL,
    FULL,
    MODELS,
    PACKABLE,
    POLICIES,
    STATES,
    WIDER,
    WINDOWS,
    WITH_COMPONENTS,
    compute,
    config,
    prefill,
    serve,
    verify,
)
from disk_case import page_keys
from hicache import CacheEngine, CacheRequest, DiskConfig, ModelGeometry, build_engine
from hicache.engine import LookupResult
from hicache.errors import OutOfRows, OutOfSlots, PromptTooLong
from hicache.pages.key import PageHasher, component_keys
from hicache.storage import store_folders
from hicache.tiers import MAMBA, SWA, Component
from toy_model import prompt, settled
from waiting import BOUND_S

# Every pair of model, policy and page size.
PAIRS = [
    pytest.param(model, policy, (1, 4, 8)[(i + j) % 3], id=f"{kind}-{policy}")
    for i, (kind, model) in enumerate(MODELS.items())
    for j, policy in enumerate(POLICIES)
]


def disk_at(path: Path) -> DiskConfig:
    return DiskConfig(path=str(path / "store"), budget_bytes=4 << 20)


def fill(engine: CacheEngine, model: ModelGeometry, *seeds: int, length: int = 61) -> None:
    """Serve other prompts, which fill the device."""
    for seed in seeds:
        serve(engine, f"fill{seed}", prompt(seed, length), model)


@pytest.mark.parametrize(("model", "policy", "page_size"), PAIRS)
def test_a_prefix_is_restored_from_device_and_host(
    device: str, model: ModelGeometry, policy: str, page_size: int
) -> None:
    """A repeated prompt hits up to its last checkpoint on the device, and on the host after other prompts filled the
    device. Another tenant has no hit."""
    with build_engine(config(device=device, write_policy=policy, page_size=page_size), model) as engine:
        first = prompt(1, 61)
        assert serve(engine, "a", first, model).cached_len == 0
        assert serve(engine, "b", first, model).hit.device == 56
        assert engine.lookup(first, "tenant").device == 0
        fill(engine, model, 2, 3, 4)
        back = serve(engine, "c", first, model)
        assert back.hit.host > 0 and back.cached_len == 56
        settled(engine)
        stats = engine.stats()
        if model is FULL:
            assert stats["device.free_tokens"] + stats["device.evictable_tokens"] == 128


@pytest.mark.parametrize("model", EACH_MODEL)
def test_a_conversation_hits_its_previous_turns(model: ModelGeometry) -> None:
    """The next turn also reuses the answer of the previous one: decoding leaves states in the cache, and the window
    ends with the answer."""
    with build_engine(config(), model) as engine:
        tokens = prompt(1, 30)
        with engine.acquire(CacheRequest("a", tokens)) as lease:
            prefill(engine, lease, tokens, model)
            for at in range(30, 55):
                tokens = np.append(tokens, at % 7)
                engine.extend(lease, 1)
                compute(engine, lease, tokens, at, at + 1, model)
                engine.track([lease])
            engine.commit(lease, tokens)
        # The hit, of 55 stored tokens in pages of 8; decoding keeps a state every 16 tokens.
        assert serve(engine, "b", np.concatenate([tokens, prompt(2, 9)]), model).cached_len == 48
        settled(engine)


@pytest.mark.parametrize(
    ("model", "name", "sizes", "num_pages"),
    [
        # A node that was not split loads all its window pages; otherwise the pages that contain the last 12 tokens are
        # loaded.
        pytest.param(WINDOWS, SWA, {"window_tokens": 80}, (2, 5), id="window"),
        pytest.param(STATES, MAMBA, {"mamba_size": 4, "max_requests": 1}, (1,), id="hybrid"),
    ],
)
def test_only_pages_of_the_host_are_loaded(
    model: ModelGeometry, name: Component, sizes: dict[str, int], num_pages: tuple[int, ...]
) -> None:
    """If the device has the full pages of a prefix, but lost its window or state, only the window or state is
    loaded."""
    with build_engine(config(device_tokens=512, **sizes), model) as engine:
        first = prompt(1, 41)
        serve(engine, "a", first, model)
        fill(engine, model, 2, 3, length=41)
        before = engine.stats()["restore.bytes"]
        lease = serve(engine, "b", first, model)
        assert lease.hit.device == lease.cached_len == 40
        page_bytes = engine.inspect.context.by_name[name].host.page_bytes
        assert (engine.stats()["restore.bytes"] - before) / page_bytes in num_pages
        settled(engine)


def test_long_prompts_pass_through_few_window_slots() -> None:
    """A prompt longer than the window pool is served in chunks. Windows before the last one are evicted."""
    with build_engine(config(window_tokens=64, device_tokens=512, max_context_len=512), WINDOWS) as engine:
        tokens = prompt(1, 300)
        with pytest.raises(PromptTooLong, match="reserve_tokens"):
            engine.acquire(CacheRequest("whole", tokens))
        serve(engine, "a", tokens, WINDOWS, chunk=16)
        assert serve(engine, "b", tokens, WINDOWS, chunk=16).cached_len == 296
        assert engine.stats()["evict.window_tokens"] > 0
        settled(engine)


def test_chunks_leave_states_at_their_ends() -> None:
    """A prompt in chunks can be continued from each chunk's end, from its last checkpoint and from the end itself."""
    with build_engine(config(page_size=1, host_bytes=0, mamba_chunk_tokens=8), STATES) as engine:
        tokens = prompt(1, 83)
        serve(engine, "a", tokens, STATES, chunk=32)
        for asked, reused in ((84, 83), (83, 80), (70, 64), (40, 32)):
            more = np.concatenate([tokens[:asked], prompt(9, max(0, asked - 83))])
            with engine.acquire(CacheRequest(f"b{asked}", more)) as lease:
                assert lease.cached_len == reused
                verify(engine, lease, more, reused, STATES)
        settled(engine)


@pytest.mark.parametrize("model", EACH_MODEL)
def test_nothing_is_hashed_where_no_tier_asks_for_keys(model: ModelGeometry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a host tier, stores and events, no page gets a key, whichever pages are committed, evicted, expected or
    looked up."""
    monkeypatch.setattr(PageHasher, "chain", None)
    with build_engine(config(host_bytes=0, page_size=8, mamba_size=6, device_tokens=768), model) as engine:
        for number in range(16):
            tokens = prompt(number, 57)
            engine.expect(f"r{number}", tokens)
            with engine.acquire(CacheRequest(f"r{number}", tokens, expected_uses=2)) as lease:
                prefill(engine, lease, tokens, model)
            assert engine.lookup(tokens).device == 56
        assert any(count for name, count in engine.stats().items() if name.startswith("evict."))
        settled(engine)


def test_a_branching_point_gets_a_state() -> None:
    """Of two prompts that branch after a common prefix, the second keeps a state at the branch point, and the third
    starts from this state."""
    with build_engine(config(page_size=1, host_bytes=0), STATES) as engine:
        asked = [np.concatenate([prompt(1, 40), prompt(n, 23)]) for n in (2, 3, 4)]
        reused = [serve(engine, f"r{n}", tokens, STATES).cached_len for n, tokens in enumerate(asked)]
        assert reused == [0, 0, 40]
        settled(engine)


@pytest.mark.parametrize(("branch_points", "hit"), [((), 64), ((96,), 96), ((97, 5), 96)])
def test_a_second_user_of_a_shared_prefix_hits(branch_points: tuple[int, ...], hit: int) -> None:
    """A first prompt keeps states at positions where later prompts may branch. The second prompt that shares its
    beginning starts from at least half of it, or from all of it if the request names the branch point."""
    settings = config(mamba_prefill_interval=16, device_tokens=512, host_bytes=0, page_size=8)
    with build_engine(settings, STATES) as engine:
        for seed, reused in ((2, 0), (3, hit)):
            tokens = np.concatenate([prompt(1, 96), prompt(seed, 21)])
            with engine.acquire(CacheRequest(f"r{seed}", tokens, branch_points=branch_points)) as lease:
                assert lease.cached_len == reused
                prefill(engine, lease, tokens, STATES)
        settled(engine)


def test_a_store_serves_one_model_and_tells_salts_apart(tmp_path: Path) -> None:
    """Pages that were written under one salt, or by one model, are misses under another. Each model has its own store,
    and finds it again."""
    tokens = prompt(1, 80)
    runs = (("one", "m", 0), ("two", "m", 0), ("one", "another", 0), ("one", "m", 72), ("one", "another", 72))
    for salt, model_id, disk_len in runs:
        with build_engine(config(disk=disk_at(tmp_path), salt=salt, model_id=model_id), FULL) as engine:
            assert engine.lookup(tokens, disk_wait_s=BOUND_S).disk == disk_len
            if salt == "one":
                serve(engine, "a", tokens, FULL)
    assert len(store_folders(disk_at(tmp_path).path)) == 2


@pytest.mark.parametrize("policy", ["write_through", "write_back", "exclusive"])
@pytest.mark.parametrize("model", EACH_MODEL)
def test_a_small_host_gets_the_beginning(model: ModelGeometry, policy: str) -> None:
    """If the host lacks capacity for all pages that are evicted or committed together, it gets the pages that are
    evicted last, and of these the beginning. The host gets no window or state without the full page that belongs to
    it."""
    sizes = {"device_tokens": 512, "window_tokens": 640, "host_states": 4, "write_policy": policy}
    with build_engine(config(host_bytes=13 * 8 * (160 if model is STATES else 256), **sizes), model) as engine:
        index, prompts = engine.inspect.context.full.pages, [prompt(1, 81), prompt(2, 81)]
        if policy == "write_through":
            prompts = [np.concatenate(prompts)]
        for n, tokens in enumerate(prompts):
            serve(engine, f"r{n}", tokens, model)
        if policy != "write_through":
            with engine.acquire(CacheRequest("a", prompt(8, 256))), engine.acquire(CacheRequest("b", prompt(9, 256))):
                engine.check()
        on_host = [[key in index for key in page_keys(engine, tokens)] for tokens in reversed(prompts)]
        num_pages = index.pool.num_pages
        assert 10 < num_pages < 20
        assert [held for of_prompt in on_host for held in of_prompt] == [n < num_pages for n in range(20)]
        for component in engine.inspect.context.components:
            assert {*component.pages} <= {*component_keys(component.name, [*index])}
        settled(engine)


def test_a_window_whose_full_page_did_not_fit_when_packed_is_none() -> None:
    """If a raw full page finds no second free page on the host, the host does not keep its window either, though the
    window fits."""
    sizes = {"device_tokens": 512, "window_tokens": 640, "host_bytes": 24000, "write_policy": "write_through"}
    with build_engine(config(**sizes, kv_packing="4", **PACKABLE), WIDER["window"]) as engine:
        full = engine.inspect.context.full.pages
        serve(engine, "a", prompt(1, 49), WIDER["window"])
        locked = full.rows_held()
        full.lock(locked)
        with engine.acquire(CacheRequest("b", prompt(2, 65))) as lease:
            prefill(engine, lease, prompt(2, 65), WIDER["window"])
        engine.flush()
        full.unlock(locked)
        assert engine.stats()["packing.dropped_pages"] > 0
        windows = engine.inspect.context.by_name[SWA].pages
        assert {*windows} <= {*component_keys(SWA, [*full])}
        settled(engine)


def test_uses_count_when_a_request_ends() -> None:
    """A full host keeps the prompt of the request that ended last, whichever request began first."""
    sizes = {"device_tokens": 512, "host_bytes": 15 * 8 * 192, "write_policy": "write_through"}
    with build_engine(config(**sizes), FULL) as engine:
        first, second = prompt(1), prompt(2)
        serve(engine, "a", first, FULL)
        with engine.acquire(CacheRequest("b", first)):
            serve(engine, "c", second, FULL)
        fill(engine, FULL, 3)
        context = engine.inspect.context
        keys = [context.tree.prompt_keys(context.tree.match(at[:56]), at[:56]) for at in (first, second)]
        assert [of_prompt[-1] in context.full.pages for of_prompt in keys] == [True, False]
        settled(engine)


@pytest.mark.parametrize("model", EACH_MODEL)
def test_a_reset_drops_unused_pages(model: ModelGeometry) -> None:
    """After a reset of the device a prompt hits on the host; after a reset of both tiers it hits nothing. A reset keeps
    the pages of a lease, and returns False. Without a lease a reset frees every page and slot."""
    nothing = LookupResult(0, 0, 0, missed={"evicted": 56, "tail": 5})
    with build_engine(config(write_policy="write_through"), model) as engine:
        first, second = prompt(1, 61), prompt(2, 61)
        for name, tokens in (("a", first), ("b", second)):
            serve(engine, name, tokens, model)
        engine.flush()
        assert engine.reset(["device"]) and engine.lookup(first).device == 0
        assert serve(engine, "c", first, model).hit.host == 56
        engine.flush()
        with engine.acquire(CacheRequest("d", first)):
            assert not engine.reset()
            assert engine.lookup(first).device == 56
            assert engine.lookup(second) == nothing
        engine.flush()
        assert engine.reset()
        assert engine.lookup(first) == nothing
        assert engine.stats()["device.free_tokens"] == 128
        assert serve(engine, "e", first, model).cached_len == 0
        settled(engine)


@pytest.mark.parametrize(("mamba_size", "runs_same"), [(4, False), (5, True)])
def test_a_state_outside_of_the_prefix_is_evictable(mamba_size: int, runs_same: bool) -> None:
    """The next request needs two states, and two can be evicted while another request runs. The state of its prefix is
    only on the host, or the running request has locked it."""
    with build_engine(config(mamba_size=mamba_size, device_tokens=512), STATES) as engine:
        first = prompt(1, 41)
        for n in (1, 2, 3):
            serve(engine, f"a{n}", prompt(n, 41), STATES)
        with engine.acquire(CacheRequest("running", first if runs_same else prompt(9, 41))):
            assert engine.stats()["device.used_states"] == mamba_size
            with engine.acquire(CacheRequest("next", first)) as lease:
                assert lease.cached_len == 40
                verify(engine, lease, first, 40, STATES)
        settled(engine)


@pytest.mark.parametrize("model", WITH_COMPONENTS)
def test_windows_before_a_load_are_evictable(model: ModelGeometry) -> None:
    """A prefix whose end is loaded from the host needs no window or state of the part that the device has. If the
    request only fits after their eviction, it is admitted."""
    one = prompt(1, 121)
    sizes = {"device_tokens": 512, "mamba_size": 4, "max_requests": 2, "write_policy": "write_through"}
    with build_engine(config(**sizes), model) as engine:
        serve(engine, "a", one, model, chunk=40)
        engine.reset(("device",))
        with engine.acquire(CacheRequest("b", one[:41], max_cached_tokens=0)) as lease:
            prefill(engine, lease, one[:41], model)
        engine.flush()
        running = engine.acquire(CacheRequest("runs", prompt(3, 9), reserve_tokens=0))
        tokens = np.concatenate([one[:120], prompt(2, 80)])
        with engine.acquire(CacheRequest("next", tokens, reserve_tokens=72)) as lease:
            assert (lease.hit.device, lease.hit.host) == (40, 80)
            verify(engine, lease, tokens, 120, model)
        engine.release(running)
        settled(engine)


def test_windows_before_the_last_one_are_evictable() -> None:
    """Within the node in which the last window of a prefix begins, window slots before that window are evicted when
    they are needed."""
    sizes = {"device_tokens": 512, "max_context_len": 512, "host_bytes": 0, "page_size": 8}
    with build_engine(config(**sizes), WINDOWS) as engine:
        one = prompt(1, 193)
        serve(engine, "a", one, WINDOWS, chunk=64)
        tokens = np.concatenate([one[:184], prompt(2, 80)])
        with engine.acquire(CacheRequest("b", tokens, reserve_tokens=72)) as lease:
            assert lease.cached_len == 184
            verify(engine, lease, tokens, 184, WINDOWS)
        settled(engine)


def test_refused_requests_leave_no_trace() -> None:
    """A refused request changes neither recency, tree, rows nor slots. No counter changes except the counters of
    refused requests; the load that it would have needed is not counted."""
    with build_engine(config(max_requests=1), FULL) as engine:
        serve(engine, "a", prompt(1, 60), FULL)
        fill(engine, FULL, 2, length=120)
        lease = engine.acquire(CacheRequest("b", prompt(2, 60)))
        before = engine.stats()
        with pytest.raises(OutOfSlots):
            engine.acquire(CacheRequest("c", np.append(prompt(1, 56), prompt(3, 44))))
        with pytest.raises(OutOfRows, match="max_requests"):
            engine.acquire(CacheRequest("d", prompt(1, 50)))
        refused = {"admit.out_of_slots_attempts": 1, "admit.out_of_rows_attempts": 1}
        assert engine.stats() == {**before, **refused}
        with pytest.raises(PromptTooLong, match="device_tokens"):
            engine.acquire(CacheRequest("e", prompt(5, 200)))
        with pytest.raises(PromptTooLong, match="max_context_len"):
            engine.acquire(CacheRequest("f", prompt(5, 300)))
        engine.release(lease)
        engine.release(lease)
        assert serve(engine, "g", prompt(1, 60), FULL).cached_len == 56
        settled(engine)


def test_close_keeps_committed_pages(tmp_path: Path) -> None:
    """close() releases open leases, and their committed pages are on disk."""
    tokens = prompt(1, 90)
    engine = build_engine(config(disk=disk_at(tmp_path)), FULL)
    engine.start()
    prefill(engine, engine.acquire(CacheRequest("a", tokens)), tokens, FULL, 64)
    engine.close()
    engine.close()
    assert engine.stats()["disk.stored_pages"] == 8  # after close, stats still return the last known values
    with build_engine(config(disk=disk_at(tmp_path)), FULL) as reopened:
        assert reopened.lookup(tokens, disk_wait_s=BOUND_S).disk == 64
