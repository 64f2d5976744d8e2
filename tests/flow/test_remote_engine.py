"""The remote tier of an engine: pages that one engine computed are hits for another, and failures of the remote store
only cost hits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import component_case
from disk_case import Clock, Gate, LossyStore, TroubledStore, page_keys
from hicache import AdvancedConfig, CacheEngine, Hit, ModelGeometry, RemoteConfig, build_engine
from hicache.build.store_tiers import num_remote_readers
from hicache.errors import ConfigError
from hicache.storage import PageStore
from memory_store import MemoryPageStore
from toy_model import GEOMETRY, config, flush_error, serve, settled, until_ready
from toy_model import prompt as prompt_of
from waiting import BOUND_S, eventually

PROMPT_LEN, CACHED_LEN = 90, 88  # pages of 8 tokens
BUDGET = 1 << 20


def prompt(seed: int) -> np.ndarray:
    return prompt_of(seed, PROMPT_LEN)


def engine_over(shared: PageStore | None, disk: PageStore | None = None, **changes: object) -> CacheEngine:
    return build_engine(config(**{"prefetch_mode": "wait_complete", **changes}), GEOMETRY, store=disk, remote=shared)


def fill(shared: PageStore | None, disk: PageStore | None, tokens: np.ndarray) -> None:
    """Store the pages of a prompt through an engine that ends."""
    with engine_over(shared, disk) as engine:
        ask(engine, "fill", tokens)


def ask(engine: CacheEngine, name: str, tokens: np.ndarray, namespace: str = "") -> Hit:
    """Prefetch and serve a request, and compare the reused bytes with the computed ones."""
    until_ready(engine, engine.prefetch(name, tokens, namespace))
    hit = serve(engine, name, tokens, namespace).hit
    engine.inspect.copies.wait()  # copies in flight hold slots
    engine.poll()
    return hit


def test_an_engine_hits_pages_computed_by_another(device: str) -> None:
    """A second engine reuses the pages byte for byte, without a disk. A tenant only hits its own prompts."""
    shared = MemoryPageStore(BUDGET)
    with engine_over(shared, device=device) as first, engine_over(shared, device=device) as second:
        assert ask(first, "a", prompt(0)) == Hit() and ask(first, "t", prompt(1), "tenant") == Hit()
        settled(first)
        assert second.lookup(prompt(0), disk_wait_s=BOUND_S).remote == CACHED_LEN
        assert ask(second, "b", prompt(0)) == Hit(remote=CACHED_LEN)
        assert ask(second, "c", prompt(0)) == Hit(device=CACHED_LEN)
        assert ask(second, "d", prompt(1)) == Hit()
        assert ask(second, "e", prompt(1), "tenant") == Hit(remote=CACHED_LEN)
        settled(second)
        stats = second.stats()
        assert stats["admit.remote_hit_tokens"] == 2 * CACHED_LEN and stats["remote_prefetch.bytes"] > 0
        assert first.stats()["remote_persist.bytes"] == 2 * CACHED_LEN * 192


def test_a_page_that_a_store_lost_is_computed_once(device: str) -> None:
    """A store has lost one page, and later pages are already on the host when the recomputed page is backed up. Then
    the complete prompt is found."""
    shared = LossyStore(BUDGET)
    fill(shared, None, prompt(0))
    with engine_over(shared, device=device) as engine:
        shared.lost = page_keys(engine, prompt(0))[2]
        assert ask(engine, "a", prompt(0)) == Hit(remote=16)
        assert engine.stats()["prefetch.lost_pages"] == 1
        assert engine.reset(("device",))
        assert ask(engine, "b", prompt(0)) == Hit(host=24, remote=CACHED_LEN - 24), "on the host, by a read or a copy"
        assert engine.stats()["remote_prefetch.bytes"] == 10 * 8 * 192
        settled(engine)


def test_pages_lost_by_the_disk_are_read_from_the_remote_store(device: str) -> None:
    """A page on disk that does not verify is deleted and read from the remote store. The complete prompt is found, and
    no later page is read twice."""
    shared, disk = MemoryPageStore(BUDGET), LossyStore(BUDGET)
    fill(shared, disk, prompt(0))
    with engine_over(shared, disk, device=device) as engine:
        disk.lost = page_keys(engine, prompt(0))[2]
        handle = engine.prefetch("a", prompt(0))
        until_ready(engine, handle)
        assert (handle.found_tokens, handle.read_tokens) == (CACHED_LEN, CACHED_LEN)
        assert serve(engine, "a", prompt(0)).hit == Hit(disk=CACHED_LEN - 8, remote=8)
        assert engine.stats()["remote_prefetch.bytes"] == 8 * 192
        settled(engine)


def test_the_disk_is_looked_up_first_and_stores_remote_pages(device: str) -> None:
    """If the disk only has the beginning of a prompt, the prompt is read from both stores. Afterwards the disk has all
    of it."""
    shared, disk = MemoryPageStore(BUDGET), MemoryPageStore(BUDGET)
    fill(shared, None, prompt(0))
    fill(None, disk, prompt(0)[:41])
    with engine_over(shared, disk, device=device) as both:
        held = both.lookup(prompt(0), disk_wait_s=BOUND_S)
        assert (held.disk, held.remote, held.disk_known) == (40, CACHED_LEN - 40, True)
        assert ask(both, "c", prompt(0)) == Hit(disk=40, remote=CACHED_LEN - 40)
        settled(both)
    with engine_over(None, disk, device=device) as alone:
        assert ask(alone, "d", prompt(0)) == Hit(disk=CACHED_LEN)
        settled(alone)


@pytest.mark.parametrize("tier", ["disk", "remote"])
@pytest.mark.parametrize("model", component_case.WITH_COMPONENTS)
def test_windows_and_states_count_for_the_tier_that_has_them(tier: str, model: ModelGeometry) -> None:
    """If memory has the full pages but lost their windows or states, a lookup counts the tokens for the tier that has
    these."""
    tokens, both = prompt_of(1, 57), {"disk": MemoryPageStore(1 << 20), "remote": MemoryPageStore(1 << 20)}
    with build_engine(component_case.config(), model, **{tier if tier == "remote" else "store": both[tier]}) as engine:
        component_case.serve(engine, "a", tokens, model)
    settings = component_case.config(prefetch_mode="wait_complete")
    with build_engine(settings, model, store=both["disk"], remote=both["remote"]) as engine:
        until_ready(engine, engine.prefetch("b", tokens))
        engine.cancel("b")
        engine.inspect.context.components[-1].pages.evict_all()
        found = engine.lookup(tokens, disk_wait_s=BOUND_S)
        assert (found.disk, found.remote) == ((56, 0) if tier == "disk" else (0, 56))
        settled(engine)


@pytest.mark.parametrize("verb", ["contains", "get_into", "put"])
def test_a_frozen_remote_store_delays_no_request(verb: str, clock: Clock) -> None:
    """While the remote tier does not answer, pages are read from the disk, and no other transfer uses the host pages of
    the hung call."""
    remote, disk, gate = TroubledStore(MemoryPageStore(BUDGET)), MemoryPageStore(BUDGET), Gate(verb)
    fill(remote, None, prompt(0))
    fill(None, disk, prompt(0)[:41])
    hung = "writes" if verb == "put" else "reads"
    with engine_over(remote, disk, advanced=AdvancedConfig(disk_io_timeout_s=1e9)) as engine:
        remote.trouble = gate
        handle = engine.prefetch("c", prompt(0))
        if verb != "put":
            read_tokens = 40 if verb == "get_into" else 0  # no read begins before all stores have reported their pages
            eventually(lambda: engine.poll() or gate.held > 0, engine.stats)
            eventually(lambda: engine.poll() or engine.stats()["prefetch.read_tokens"] == read_tokens, engine.stats)
            assert not handle.ready
            clock.now_s += 11
        until_ready(engine, handle)
        hit = serve(engine, "c", prompt(0)).hit
        assert hit == (Hit(disk=40, remote=CACHED_LEN - 40) if verb == "put" else Hit(disk=40))
        if verb == "put":
            eventually(lambda: engine.poll() or gate.held > 0, engine.stats)
            clock.now_s += 11
        engine.inspect.copies.wait()
        for seed in (1, 2, 3, 4):
            assert ask(engine, f"d{seed}", prompt(seed)) == Hit()
        eventually(lambda: engine.poll() or disk.stats().entries == 5 * 11, engine.stats)
        assert engine.stats()[f"remote.{hung}_stalled_jobs"] > 0
        assert engine.stats()[f"disk.{hung}_stalled_jobs"] == 0
        gate.open()

        def is_back() -> bool:
            clock.now_s += 3600
            return flush_error(engine) is None

        eventually(is_back, engine.stats)
        settled(engine)


def test_ranks_of_the_same_kv_have_one_writer(tmp_path: Path) -> None:
    """With backup=none, an engine reads a store given by URL and writes nothing to it."""
    url = f"lmdb://{tmp_path / 'shared'}?budget=64MiB"
    with engine_over(None, remote=RemoteConfig(url=url)) as writer:
        ask(writer, "a", prompt(0))
        settled(writer)
    with engine_over(None, remote=RemoteConfig(url=url, backup="none")) as reader:
        assert ask(reader, "b", prompt(0)) == Hit(remote=CACHED_LEN)
        assert ask(reader, "c", prompt(1)) == Hit()
        settled(reader)
        assert reader.stats()["remote.put_pages"] == 0 and "remote_persist.bytes" not in reader.stats()


def test_settings_that_cannot_be() -> None:
    """The remote tier needs host pages and a model's identity, its settings must be of their class, and an engine has
    at most one remote tier."""
    url = RemoteConfig(url="own-store://:secret@host")
    for changes, setting in (
        ({"remote": url, "host_bytes": 0}, "host"),
        ({"remote": url, "model_id": ""}, "model_id"),
        ({"remote": {"url": "own-store://x"}}, "RemoteConfig"),
    ):
        with pytest.raises(ConfigError, match=setting):
            config(**changes)
    with pytest.raises(ConfigError):
        engine_over(MemoryPageStore(BUDGET), remote=url)
    with pytest.raises(ConfigError, match="url"):
        RemoteConfig(url="")
    assert "secret" not in repr(url)


def test_as_many_threads_read_as_fill_the_link() -> None:
    """The remote tier uses one thread if a connection takes several requests at a time, otherwise four, unless the
    setting gives a number."""
    for url, num_readers in (
        ("mooncake://master:50051?replicas=2", 1),
        (" MOONCAKE://master", 1),
        ("s3://bucket", 4),
        ("lmdb:///mnt/pages", 4),
        ("own-store://mooncake://host", 4),
    ):
        assert num_remote_readers(RemoteConfig(url=url)) == num_readers
        assert num_remote_readers(RemoteConfig(url=url, reader_threads=3)) == 3
