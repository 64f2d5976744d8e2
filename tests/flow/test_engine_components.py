"""The engine with windows and with recurrent states: whatever the order of events, a pass reads the truth."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from component_case import STATES, WINDOW, WINDOWS, compute, config, verify
from hicache import CacheEngine, CacheRequest, Lease, ModelGeometry, build_engine
from hicache.errors import ConfigError, OutOfRows, OutOfSlots, PromptTooLong, ResourceExhausted, TransferError
from hicache.tree import MAMBA, SWA

MODELS = [pytest.param(WINDOWS, id="windows"), pytest.param(STATES, id="states")]
POLICIES = ["write_through", "write_through_selective", "write_back"]


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, length)


def prefill(engine: CacheEngine, lease: Lease, tokens: np.ndarray, model: ModelGeometry, chunk: int = 1 << 30) -> None:
    """The rest of a prompt, in chunks that stop where the engine says."""
    start = lease.cached_len
    while start < len(tokens):
        end = engine.next_stop(lease, start, min(len(tokens), start + chunk))
        if end > lease.length:
            engine.flush()  # a backup in flight locks its source
            engine.extend(lease, end - lease.length)
        compute(engine, lease, tokens, start, end, model)
        engine.commit(lease, tokens[:end])
        start = end


def decode(engine: CacheEngine, lease: Lease, tokens: np.ndarray, count: int, model: ModelGeometry) -> np.ndarray:
    for _ in range(count):
        tokens = np.append(tokens, len(tokens) % 7)
        engine.extend(lease, 1)
        compute(engine, lease, tokens, len(tokens) - 1, len(tokens), model)
        engine.track([lease])
    engine.commit(lease, tokens)
    return tokens


def serve(
    engine: CacheEngine, name: str, tokens: np.ndarray, model: ModelGeometry, chunk: int = 1 << 30, extra: int = 0
) -> tuple[Lease, np.ndarray]:
    with engine.acquire(CacheRequest(name, tokens, reserve_tokens=chunk)) as lease:
        prefill(engine, lease, tokens, model, chunk)
        tokens = decode(engine, lease, tokens, extra, model)
    return lease, tokens


def settled(engine: CacheEngine) -> None:
    engine.flush()
    engine.check()
    stats = engine.stats()
    assert stats["device.protected_tokens"] == stats["engine.leases"] == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page_size", [1, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_prefix_comes_back_from_device_and_host(device: str, policy: str, page_size: int, model: ModelGeometry) -> None:
    """A prompt asked again hits up to its last checkpoint on the device, and from the host after others took over."""
    with build_engine(config(device=device, write_policy=policy, page_size=page_size), model) as engine:
        first = prompt(1, 61)
        assert serve(engine, "a", first, model)[0].cached_len == 0
        assert serve(engine, "b", first, model)[0].hit.device == 56
        engine.flush()
        for n in (2, 3, 4):
            serve(engine, f"c{n}", prompt(n, 61), model)
            engine.flush()
            engine.check()
        back = serve(engine, "d", first, model)[0]
        assert back.hit.host > 0 and back.cached_len == 56
        settled(engine)


@pytest.mark.parametrize("model", MODELS)
def test_a_conversation_goes_on_where_it_was(model: ModelGeometry) -> None:
    """The next turn reuses the answer too: decoding leaves states behind, and windows end with it."""
    with build_engine(config(), model) as engine:
        _, tokens = serve(engine, "a", prompt(1, 30), model, extra=25)
        longer = np.concatenate([tokens, prompt(2, 9)])
        lease, _ = serve(engine, "b", longer, model)
        assert lease.cached_len == 48  # of 55 stored tokens in pages of 8, states every 16 tokens of decoding
        settled(engine)


def test_states_only_the_host_has_come_back_alone() -> None:
    """When the device has the pages of a prefix and lost its state, only the state is loaded."""
    with build_engine(config(mamba_size=4, device_tokens=512, max_requests=1), STATES) as engine:
        first = prompt(1, 41)
        serve(engine, "a", first, STATES)
        engine.flush()
        for n in (2, 3):
            serve(engine, f"b{n}", prompt(n, 41), STATES)
            engine.flush()
        before = engine.stats()["restore.bytes"]
        lease, _ = serve(engine, "c", first, STATES)
        assert lease.hit.device == lease.cached_len == 40
        engine.flush()
        moved = engine.stats()["restore.bytes"] - before
        assert moved == engine.inspect.context.by_name[MAMBA].host.page_bytes  # type: ignore[union-attr]
        settled(engine)


def test_windows_only_the_host_has_come_back_alone() -> None:
    """When the device has the full pages of a prefix and lost its window, only the window's pages are loaded."""
    with build_engine(config(window_tokens=80, device_tokens=512), WINDOWS) as engine:
        first = prompt(1, 41)
        serve(engine, "a", first, WINDOWS)
        engine.flush()
        for n in (2, 3):
            serve(engine, f"b{n}", prompt(n, 41), WINDOWS)
            engine.flush()
        before = engine.stats()["restore.bytes"]
        lease, _ = serve(engine, "c", first, WINDOWS)
        assert lease.hit.device == lease.cached_len == 40
        engine.flush()
        moved = (engine.stats()["restore.bytes"] - before) / engine.inspect.context.by_name[SWA].host.page_bytes  # type: ignore
        assert moved in (2, 5)  # the pages that the last 12 tokens lie in, or all of an uncut node
        settled(engine)


def test_windows_are_not_mapped_for_a_request_that_gets_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where admission fails at its last step, nodes of the tree have not been given window slots that nobody counts."""
    with build_engine(config(window_tokens=80, device_tokens=512), WINDOWS) as engine:
        first = prompt(1, 41)
        for n, tokens in enumerate((first, prompt(2, 41), prompt(3, 41))):
            serve(engine, f"a{n}", tokens, WINDOWS)
            engine.flush()
        with monkeypatch.context() as patch:
            patch.setattr(engine.req_to_token, "alloc", lambda _: None)
            with pytest.raises(OutOfRows):
                engine.acquire(CacheRequest("b", first))
        engine.check()
        assert serve(engine, "c", first, WINDOWS)[0].cached_len == 40
        settled(engine)


def test_long_prompts_pass_through_few_window_slots() -> None:
    """A prompt longer than the window pool is served in chunks; windows before its last one are evicted."""
    with build_engine(config(window_tokens=64, device_tokens=512, max_context_len=512), WINDOWS) as engine:
        tokens = prompt(1, 300)
        with pytest.raises(PromptTooLong, match="reserve_tokens"):
            engine.acquire(CacheRequest("whole", tokens))
        serve(engine, "a", tokens, WINDOWS, chunk=16)
        lease, _ = serve(engine, "b", tokens, WINDOWS, chunk=16)
        assert lease.cached_len == 296
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


def test_a_branching_point_gets_a_state() -> None:
    """Two prompts that branch after a common prefix: the second keeps a state there, and the third starts from it."""
    with build_engine(config(page_size=1, host_bytes=0), STATES) as engine:
        stem = prompt(1, 40)
        asked = [np.concatenate([stem, prompt(n, 23)]) for n in (2, 3, 4)]
        reused = [serve(engine, f"r{n}", tokens, STATES)[0].cached_len for n, tokens in enumerate(asked)]
        assert reused == [0, 0, 40]
        settled(engine)


def test_a_failed_load_of_a_window_or_state_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the copy of a window or state fails, the reader is told, nothing is counted as loaded, and a retry works."""
    for model in (WINDOWS, STATES):
        with build_engine(config(), model) as engine:
            first = prompt(1, 61)
            serve(engine, "a", first, model)
            engine.flush()
            for n in (2, 3, 4):
                serve(engine, f"c{n}", prompt(n, 61), model)
                engine.flush()
            component = engine.inspect.context.components[1]
            mover = component.transfer.mover  # type: ignore[union-attr]
            scatter = mover.scatter

            def broken(*_: object) -> None:
                raise RuntimeError("the link is down")

            monkeypatch.setattr(mover, "scatter", broken)
            lease = engine.acquire(CacheRequest("b", first))
            with pytest.raises(TransferError, match="the link is down"):
                compute(engine, lease, first, lease.cached_len, len(first), model)
            engine.flush()
            engine.check()
            engine.release(lease)
            engine.check()
            monkeypatch.setattr(mover, "scatter", scatter)
            assert serve(engine, "d", first, model)[0].cached_len == 56
            settled(engine)


def test_bad_settings_are_named() -> None:
    """What these models cannot work with is said at build time."""
    with pytest.raises(ConfigError, match="window_tokens"):
        build_engine(config(window_tokens=2 * WINDOW), WINDOWS)
    with pytest.raises(ConfigError, match="mamba_track_interval"):
        config(mamba_track_interval=12)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_random_operations(device: str, policy: str, model: ModelGeometry, seed: int) -> None:
    """Any interleaving of requests keeps every account exact and every pass right."""
    random_operations(device, policy, model, seed, steps=50)


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(10, 25))
def test_many_random_operations(device: str, policy: str, model: ModelGeometry, seed: int) -> None:
    """The same, longer."""
    random_operations(device, policy, model, seed, steps=400)


def random_operations(device: str, policy: str, model: ModelGeometry, seed: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    stems = [prompt(n, 64) for n in range(6)]
    live: dict[str, tuple[Lease, np.ndarray, int]] = {}
    settings = config(
        device=device,
        write_policy=policy,
        page_size=int(rng.choice([1, 2, 4, 8])),
        host_bytes=int(rng.choice([14, 40])) * 8 * 256,
        host_states=int(rng.choice([2, 6])),
        mamba_size=int(rng.choice([8, 14])),
        window_tokens=int(rng.choice([56, 96])),
        eviction_policy=str(rng.choice(["lru", "lfu", "fifo", "slru"])),
    )
    with build_engine(settings, model) as engine:
        for step in range(steps):
            action = rng.choice(["admit", "admit", "grow", "grow", "decode", "finish", "abort", "poll", "flush"])
            name = str(rng.choice(sorted(live))) if live else ""
            if action == "admit":
                stem = stems[rng.integers(len(stems))][: rng.integers(1, 65)]
                tokens = np.concatenate([stem, rng.integers(0, 3, rng.integers(0, 30))])
                space = str(rng.choice(["", "tenant"]))
                try:
                    lease = engine.acquire(CacheRequest(f"r{step}", tokens, space, reserve_tokens=16))
                except ResourceExhausted:
                    engine.check()
                    continue
                live[f"r{step}"] = (lease, tokens, lease.cached_len)
            elif action == "grow" and name:
                live[name] = grow(engine, *live[name], model, rng)
            elif action == "decode" and name and live[name][2] == len(live[name][1]) < 200:
                live[name] = one_more(engine, *live[name], model)
            elif action == "finish" and name:
                lease, tokens, done = live.pop(name)
                verify(engine, lease, tokens, done, model)
                engine.commit(lease, tokens[:done])
                engine.release(lease)
            elif action == "abort" and name:
                live.pop(name)
                engine.cancel(name)
            elif action == "poll":
                engine.poll()
            elif action == "flush":
                engine.flush()
            engine.check()
        for name in live:
            engine.cancel(name)
        settled(engine)


def grow(
    engine: CacheEngine, lease: Lease, tokens: np.ndarray, done: int, model: ModelGeometry, rng: np.random.Generator
) -> tuple[Lease, np.ndarray, int]:
    end = engine.next_stop(lease, done, min(len(tokens), done + int(rng.integers(1, 17))))
    if end == done:
        return lease, tokens, done
    try:
        if end > lease.length:
            engine.extend(lease, end - lease.length)
    except OutOfSlots:
        return lease, tokens, done
    compute(engine, lease, tokens, done, end, model)
    engine.commit(lease, tokens[:end])
    return lease, tokens, end


def one_more(
    engine: CacheEngine, lease: Lease, tokens: np.ndarray, done: int, model: ModelGeometry
) -> tuple[Lease, np.ndarray, int]:
    for _ in range(5):
        try:
            engine.extend(lease, done + 1 - lease.length)
        except OutOfSlots:
            break
        tokens = np.append(tokens, torch.tensor(done % 7).item())
        compute(engine, lease, tokens, done, done + 1, model)
        done += 1
        engine.track([lease])
    return lease, tokens, done
