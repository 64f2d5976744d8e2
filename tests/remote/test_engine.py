"""Engines in two processes over one real server. Pages that one computed are hits for the other, byte for byte. A
server that hangs or dies only costs hits."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from full_pool import full_pool
from hicache import AdvancedConfig, CacheEngine, Hit, RemoteConfig, build_engine
from hicache.bench.remote_servers import MooncakeServer, Server
from hicache.errors import NotStored
from hicache.tiers import REMOTE
from programs import program
from toy_model import GEOMETRY, config, serve
from waiting import eventually

pytestmark = pytest.mark.remote

PROMPT_LEN, CACHED_LEN, NUM_PROMPTS = 90, 88, 8
TROUBLES = [
    f"remote.{io}_{what}" for io in ("reads", "writes") for what in ("stalled_jobs", "failures", "refused_jobs")
]


def prompt(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, PROMPT_LEN)


def engine_at(url: str, io_timeout_s: float = 60.0) -> CacheEngine:
    """An engine over `url`. `io_timeout_s`: seconds after which a call counts as stalled."""
    advanced = AdvancedConfig(disk_io_timeout_s=io_timeout_s, disk_reopen_backoff_s=0.01)
    remote = RemoteConfig(url=url, io_timeout_s=io_timeout_s)
    return build_engine(config(remote=remote, advanced=advanced, prefetch_mode="wait_complete"), GEOMETRY)


def ask(engine: CacheEngine, name: str, tokens: np.ndarray) -> Hit:
    """Prefetch and serve a request, and compare the reused tokens with computed ones."""
    handle = engine.prefetch(name, tokens)
    eventually(lambda: (engine.poll(), handle.ready)[1])
    hit = serve(engine, name, tokens).hit
    engine.inspect.copies.wait()  # copies in flight hold slots
    engine.poll()
    return hit


def fill(url: str) -> None:
    """Serve every prompt in a separate engine, until the server has all pages."""
    with engine_at(url) as engine:
        for seed in range(NUM_PROMPTS):
            ask(engine, f"a{seed}", prompt(seed))
            engine.flush()  # before the next prompt evicts its pages
        engine.check()
        print(int(engine.stats()["remote.put_pages"]))


def filled(server: Server) -> Server:
    """Another process has served every prompt."""
    with program(__file__, server.url) as other:
        printed, errors = other.communicate()
    assert printed.split()[-1:] == [str(NUM_PROMPTS * 11)], errors
    return server


@pytest.mark.parametrize("server", ["s3", pytest.param("mooncake", marks=pytest.mark.smoke)], indirect=True)
def test_two_processes_share_what_one_computed(server: Server) -> None:
    """All pages of each prompt except the last one are hits."""
    with engine_at(filled(server).url) as engine:
        for seed in range(3):
            assert ask(engine, f"b{seed}", prompt(seed)) == Hit(remote=CACHED_LEN)
        engine.flush()
        engine.check()
        assert engine.stats()["remote.corrupt_pages"] == 0


@pytest.mark.parametrize("server", [pytest.param("s3", marks=pytest.mark.smoke), "mooncake"], indirect=True)
def test_a_server_that_hangs_and_one_that_dies_cost_hits_alone(server: Server) -> None:
    """A server hangs during a run. Requests continue, each with the values of its own tokens, and the stall is counted.
    When the server answers again, it serves hits. When the server dies, requests continue too."""
    seeds = iter(range(NUM_PROMPTS))

    def hits_remotely() -> bool:
        """Whether a new prompt hits. On a busy machine a call may take longer than a stall, so several prompts are
        tried."""
        return ask(engine, f"b{(seed := next(seeds))}", prompt(seed)).remote == CACHED_LEN

    with engine_at(filled(server).url, io_timeout_s=1.0) as engine:
        eventually(hits_remotely)
        server.freeze()
        try:
            for seed in (next(seeds), 17, 18):
                assert ask(engine, f"c{seed}", prompt(seed)).tokens in (0, CACHED_LEN)
            eventually(lambda: (engine.poll(), sum(engine.stats()[name] for name in TROUBLES))[1] > 0, engine.stats)
        finally:
            server.thaw()
        eventually(lambda: (engine.poll(), not engine.inspect.context.stores[REMOTE].reads.refuses())[1], engine.stats)
        eventually(hits_remotely)
        engine.flush()
        engine.check()
        server.kill()
        for seed in (next(seeds), 19):
            assert ask(engine, f"d{seed}", prompt(seed)).remote in (0, CACHED_LEN)
        assert ask(engine, "e", prompt(19)).tokens == CACHED_LEN
        engine.check()


@pytest.mark.skipif(bool(MooncakeServer.missing()), reason=MooncakeServer.missing())
def test_a_full_pool_is_written_to_when_it_has_room() -> None:
    """While every value in a Mooncake pool has a lease, pages are not stored and flushes say so, requests go on, and
    nothing counts as a failure of the store. Once the pool has room, a flush stores the pages that the host has."""
    with full_pool() as (server, other, keys), engine_at(f"{server.url}?timeout=60") as engine:
        for n in range(8):
            assert ask(engine, f"a{n}", prompt(n)) == Hit()
            with pytest.raises(NotStored):
                engine.flush()
        stats = engine.stats()
        assert stats["remote_persist.failed_pages"] >= 8 * 11 and stats["remote.put_pages"] == 0
        assert stats["remote.writes_failures"] == stats["remote.write_errors"] == 0
        assert other.delete(keys) > 0
        ask(engine, "b", prompt(7))
        engine.flush()
        assert engine.stats()["remote.put_pages"] >= 11
        engine.check()


if __name__ == "__main__":
    fill(sys.argv[1])
