"""Engines in two processes over one real server: what one computed is a hit for the other, byte for byte, and a server
that hangs or dies costs hits and nothing else."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import redis_server
import s3_server
from disk_case import wait_until
from hicache import AdvancedConfig, CacheEngine, Hit, RemoteConfig, build_engine
from hicache.bench import mooncake_server
from hicache.storage import PageFormat, open_store
from hicache.tree import REMOTE
from toy_model import GEOMETRY, config, serve

pytestmark = pytest.mark.remote

PROMPT_LEN, CACHED_LEN, NUM_PROMPTS = 90, 88, 3
SERVERS = ("redis", "s3", "mooncake")
QUEUES = ("reads", "writes")


class Server(NamedTuple):
    """`freeze`, `thaw`, `kill`: of the process that holds the pages."""

    url: str
    freeze: Callable[[], object]
    thaw: Callable[[], object]
    kill: Callable[[], object]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Calls to it wait for 5 seconds at most, but for those of Mooncake, which end as its library likes."""
    with contextlib.ExitStack() as stack:
        if request.param == "mooncake":
            if missing := mooncake_server.missing():
                pytest.skip(missing)
            mooncake = stack.enter_context(mooncake_server.running(64 << 20))
            assert mooncake.owner is not None
            send = mooncake.owner.send_signal
            stack.callback(send, signal.SIGCONT)
            stop = (lambda: send(signal.SIGSTOP), lambda: send(signal.SIGCONT), lambda: send(signal.SIGKILL))
            yield Server(f"{mooncake.url}?buffer=16MiB", *stop)
            return
        module = redis_server if request.param == "redis" else s3_server
        if module.MISSING:
            pytest.skip(module.MISSING)
        for name, value in s3_server.CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        process = stack.enter_context(module.running())
        options = "&" if "?" in process.url else "?"
        yield Server(f"{process.url}{options}timeout=5", process.freeze, process.thaw, process.kill)


def prompt(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, PROMPT_LEN)


def engine_at(url: str) -> CacheEngine:
    advanced = AdvancedConfig(disk_io_timeout_s=0.5, disk_reopen_backoff_s=0.01)
    remote = RemoteConfig(url=url, io_timeout_s=0.5)
    return build_engine(config(remote=remote, advanced=advanced, prefetch_mode="wait_complete"), GEOMETRY)


def ask(engine: CacheEngine, name: str, tokens: np.ndarray) -> Hit:
    """Prefetch and serve a request: what it reuses is compared with what was computed."""
    handle = engine.prefetch(name, tokens)
    wait_until(lambda: (engine.poll(), handle.ready)[1])
    hit = serve(engine, name, tokens).hit
    assert engine.inspect.backup is not None
    engine.inspect.backup.wait()  # copies in flight hold slots
    engine.poll()
    return hit


def fill(url: str) -> None:
    """Serve every prompt in an engine of its own, until the server has all pages."""
    with engine_at(url) as engine:
        for seed in range(NUM_PROMPTS):
            ask(engine, f"a{seed}", prompt(seed))
        engine.flush()
        engine.check()
        print(int(engine.stats()["remote.put_pages"]))


def filled(server: Server) -> Server:
    """Another process has served every prompt."""
    command = [sys.executable, __file__, server.url]
    told = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert told.stdout.split()[-1] == str(NUM_PROMPTS * 11), told.stderr
    return server


def test_two_processes_share_what_one_computed(server: Server) -> None:
    with engine_at(filled(server).url) as engine:
        for seed in range(NUM_PROMPTS):
            assert ask(engine, f"b{seed}", prompt(seed)) == Hit(remote=CACHED_LEN)
        engine.flush()
        engine.check()
        assert engine.stats()["remote.corrupt_pages"] == 0


def test_a_server_that_hangs_and_one_that_dies_cost_hits_alone(server: Server) -> None:
    """In the middle of a run: requests go on, each with the values of its own tokens, the stall is counted, and what
    comes after the server answers again is served from it."""
    with engine_at(filled(server).url) as engine:
        assert ask(engine, "b", prompt(0)) == Hit(remote=CACHED_LEN)
        server.freeze()
        for seed in (1, 7, 8):
            assert ask(engine, f"c{seed}", prompt(seed)).tokens in (0, CACHED_LEN)
        troubled = ("stalled_jobs", "failures", "refused_jobs")
        wait_until(
            lambda: (engine.poll(), sum(engine.stats()[f"remote.{io}_{t}"] for io in QUEUES for t in troubled))[1] > 0
        )
        server.thaw()
        wait_until(lambda: (engine.poll(), not engine.inspect.context.stores[REMOTE].reads.refuses())[1])
        engine.flush()
        engine.check()
        server.kill()
        for seed in (2, 9):
            assert ask(engine, f"d{seed}", prompt(seed)).remote in (0, CACHED_LEN)
        assert ask(engine, "e", prompt(9)).tokens == CACHED_LEN
        engine.check()


@pytest.mark.skipif(bool(mooncake_server.missing()), reason=mooncake_server.missing())
def test_a_full_pool_is_written_to_when_it_has_room() -> None:
    """While every value in a Mooncake pool has a lease, pages are not stored, requests go on, and nothing counts as a
    failure, however often; what is used once there is room is stored."""
    one_hour_ms, page_bytes = 3_600_000, (1 << 20, 16 << 10, 512)
    formats = [PageFormat(num_bytes) for num_bytes in page_bytes]
    with mooncake_server.running(16 << 20, lease_ms=one_hour_ms) as server:
        other = open_store(server.url, identity={"model": "another"}, formats=formats)
        keys = [b"%d" % n for n in range(1 << 16)]
        left = iter(keys)
        for num_bytes in page_bytes:
            batch = [(key, np.zeros(num_bytes, np.uint8)) for key in itertools.islice(left, 16)]
            while any(other.put(batch)):
                other.contains([key for key, _ in batch])
                batch = [(key, page) for key, (_, page) in zip(left, batch, strict=False)]
        with engine_at(server.url) as engine:
            for n in range(8):
                assert ask(engine, f"a{n}", prompt(n)) == Hit()
                engine.flush()
            stats = engine.stats()
            assert stats["remote_persist.failed_pages"] == 8 * 11 and stats["remote.put_pages"] == 0
            assert stats["remote.writes_failures"] == stats["remote.write_errors"] == 0
            assert other.delete(keys) > 0
            ask(engine, "b", prompt(7))
            engine.flush()
            assert engine.stats()["remote.put_pages"] == 11
            engine.check()
        other.close()


if __name__ == "__main__":
    fill(sys.argv[1])
