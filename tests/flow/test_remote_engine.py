"""The remote tier of an engine: what one engine computed is a hit for another, and trouble there costs hits alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from disk_case import PATIENCE_S, TroubledStore, failing, wait_until
from hicache import AdvancedConfig, CacheEngine, Hit, RemoteConfig, build_engine
from hicache.errors import ConfigError
from hicache.storage import PageStore
from hicache.stores import num_remote_readers
from memory_store import MemoryPageStore
from toy_model import GEOMETRY, config, serve

PROMPT_LEN, CACHED_LEN = 90, 88  # pages of 8 tokens
BUDGET = 1 << 20


def prompt(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, PROMPT_LEN)


def engine_over(shared: PageStore | None, disk: PageStore | None = None, **changes: object) -> CacheEngine:
    advanced = AdvancedConfig(disk_io_timeout_s=0.2, disk_reopen_backoff_s=1e-3, disk_max_reopen_backoff_s=1e-3)
    changes = {"prefetch_mode": "wait_complete", "advanced": advanced, **changes}
    return build_engine(config(**changes), GEOMETRY, store=disk, remote=shared)


def ask(engine: CacheEngine, name: str, tokens: np.ndarray, namespace: str = "") -> Hit:
    """Prefetch and serve a request: what it reuses is compared with what was computed."""
    handle = engine.prefetch(name, tokens, namespace)
    wait_until(lambda: (engine.poll(), handle.ready)[1])
    hit = serve(engine, name, tokens, namespace).hit
    assert engine.inspect.backup is not None
    engine.inspect.backup.wait()  # copies in flight hold slots
    engine.poll()
    return hit


def settled(engine: CacheEngine) -> None:
    engine.flush()
    engine.check()


def test_what_one_engine_computed_another_finds(device: str) -> None:
    """Byte for byte, and with no disk in between; of a tenant's prompts only that tenant's."""
    shared = MemoryPageStore(BUDGET)
    with engine_over(shared, device=device) as first, engine_over(shared, device=device) as second:
        assert ask(first, "a", prompt(0)) == Hit() and ask(first, "t", prompt(1), "tenant") == Hit()
        settled(first)
        assert second.lookup(prompt(0), disk_wait_s=PATIENCE_S).remote == CACHED_LEN
        assert ask(second, "b", prompt(0)) == Hit(remote=CACHED_LEN)
        assert ask(second, "c", prompt(0)) == Hit(device=CACHED_LEN)
        assert ask(second, "d", prompt(1)) == Hit()
        assert ask(second, "e", prompt(1), "tenant") == Hit(remote=CACHED_LEN)
        settled(second)
        stats = second.stats()
        assert stats["admit.remote_hit_tokens"] == 2 * CACHED_LEN and stats["remote_prefetch.bytes"] > 0
        assert first.stats()["remote_persist.bytes"] == 2 * CACHED_LEN * 192


def test_the_disk_is_asked_first_and_takes_what_the_remote_tier_gave(device: str) -> None:
    """A prompt of which the disk has the beginning comes from both; afterwards the disk has all of it."""
    shared, disk = MemoryPageStore(BUDGET), MemoryPageStore(BUDGET)
    with engine_over(shared, device=device) as other:
        ask(other, "a", prompt(0))
        settled(other)
    with engine_over(None, disk, device=device) as alone:
        ask(alone, "b", prompt(0)[:41])
        settled(alone)
    with engine_over(shared, disk, device=device) as both:
        held = both.lookup(prompt(0), disk_wait_s=PATIENCE_S)
        assert (held.disk, held.remote, held.disk_known) == (40, CACHED_LEN - 40, True)
        assert ask(both, "c", prompt(0)) == Hit(disk=40, remote=CACHED_LEN - 40)
        settled(both)
    with engine_over(None, disk, device=device) as alone:
        assert ask(alone, "d", prompt(0)) == Hit(disk=CACHED_LEN)
        settled(alone)


def test_a_prompt_that_leaves_another_in_the_middle_of_a_node_finds_nothing_of_its_rest(device: str) -> None:
    """The pages that it lacks tell all that follow apart, though their tokens are those of the other prompt."""
    shared, disk, tokens = MemoryPageStore(BUDGET), MemoryPageStore(BUDGET), prompt(0)
    shorter = np.concatenate([tokens[:16], tokens[32:]])
    with engine_over(shared, disk, device=device) as engine:
        ask(engine, "a", tokens)
        settled(engine)
        assert engine.lookup(shorter, disk_wait_s=PATIENCE_S).disk == 0
        assert ask(engine, "b", shorter) == Hit(device=16)
        settled(engine)


@pytest.mark.parametrize("verb", ["contains", "get_into", "put"])
def test_a_failing_remote_tier_costs_its_hits_alone(verb: str) -> None:
    """Whatever it fails at, the disk serves on, the failures are counted, and it is used again when it works."""
    remote, disk = TroubledStore(MemoryPageStore(BUDGET)), MemoryPageStore(BUDGET)
    with engine_over(remote) as other:
        ask(other, "a", prompt(0))
        settled(other)
    with engine_over(remote, disk) as engine:
        remote.trouble = failing(OSError("no route to host"), verb)
        for seed in (0, 1, 2, 3, 4):
            hit = ask(engine, f"b{seed}", prompt(seed))
            assert hit == (Hit(remote=CACHED_LEN) if verb == "put" and not seed else Hit())
            settled(engine)
        assert ask(engine, "c", prompt(2)).tokens == CACHED_LEN and disk.stats().entries == 5 * 11
        stats = engine.stats()
        assert stats["remote.reads_failures"] + stats["remote.writes_failures"] > 0
        assert stats["disk.reads_failures"] + stats["disk.writes_failures"] == 0
        remote.trouble = lambda verb: None
        wait_until(lambda: ask(engine, "d", prompt(5)).tokens + remote.inner.stats().entries > 11 + CACHED_LEN)
        settled(engine)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opens at the end, so that no thread stays behind."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("verb", ["contains", "get_into", "put"])
def test_a_hung_remote_tier_holds_nobody_up(verb: str, gate: threading.Event) -> None:
    """What the disk has of a prompt is served while the remote tier does not answer, and what the hung call uses is
    used by nobody else until it returns."""
    remote, disk = TroubledStore(MemoryPageStore(BUDGET)), MemoryPageStore(BUDGET)
    with engine_over(remote) as other:
        ask(other, "a", prompt(0))
        settled(other)
    with engine_over(None, disk) as alone:
        ask(alone, "b", prompt(0)[:41])
        settled(alone)
    with engine_over(remote, disk) as engine:
        remote.trouble = lambda called: gate.wait(PATIENCE_S) if called == verb else None
        hit = ask(engine, "c", prompt(0))
        assert hit == (Hit(disk=40, remote=CACHED_LEN - 40) if verb == "put" else Hit(disk=40))
        for seed in (1, 2, 3, 4):
            assert ask(engine, f"d{seed}", prompt(seed)) == Hit()
        wait_until(lambda: (engine.poll(), disk.stats().entries == 5 * 11)[1])
        hung = "writes" if verb == "put" else "reads"
        wait_until(lambda: (engine.poll(), engine.stats()[f"remote.{hung}_stalled_jobs"] > 0)[1])
        assert engine.stats()[f"disk.{hung}_stalled_jobs"] == 0
        gate.set()
        remote.trouble = lambda called: None
        settled(engine)


def test_ranks_of_the_same_kv_have_one_writer(tmp_path: Path) -> None:
    """Of a store by URL, an engine with backup=none reads and writes nothing."""
    url = f"lmdb://{tmp_path / 'shared'}?budget=64MiB"
    with engine_over(None, remote=RemoteConfig(url=url)) as writer:
        ask(writer, "a", prompt(0))
        settled(writer)
    with engine_over(None, remote=RemoteConfig(url=url, backup="none")) as reader:
        assert ask(reader, "b", prompt(0)) == Hit(remote=CACHED_LEN)
        assert ask(reader, "c", prompt(1)) == Hit()
        settled(reader)
        assert reader.stats()["remote.put_pages"] == 0 and "remote_persist.bytes" not in reader.stats()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"remote": RemoteConfig(url="redis://x"), "host_bytes": 0}, "the remote tier needs host pages"),
        ({"remote": RemoteConfig(url="redis://x"), "model_id": ""}, "the remote tier needs model_id"),
        ({"remote": {"url": "redis://x"}}, "is not a RemoteConfig"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)


def test_one_remote_store_at_a_time() -> None:
    """Neither a URL beside a store of one's own nor an empty one."""
    with pytest.raises(ConfigError, match="give one of them"):
        engine_over(MemoryPageStore(BUDGET), remote=RemoteConfig(url="redis://x"))
    with pytest.raises(ConfigError, match="remote url is empty"):
        RemoteConfig(url="")
    assert "secret" not in repr(RemoteConfig(url="redis://:secret@host"))


@pytest.mark.parametrize(
    ("url", "num_readers"),
    [
        ("mooncake://master:50051?replicas=2", 1),
        ("REDIS://host", 1),
        ("rediss://host", 1),
        ("redis+unix:///run/redis.sock", 1),
        ("s3://bucket", 4),
        ("lmdb:///mnt/pages", 4),
        ("redis://host,s3://bucket", 4),
        ("own-store://redis://host", 4),
    ],
)
def test_as_many_threads_read_as_fill_the_link(url: str, num_readers: int) -> None:
    assert num_remote_readers(RemoteConfig(url=url)) == num_readers
    assert num_remote_readers(RemoteConfig(url=url, reader_threads=3)) == 3
