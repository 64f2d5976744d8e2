"""The store of the vLLM, SGLang and LMCache plug-ins with a Redis server behind its disk, which hangs and dies."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import redis_server
from hicache.integrations.config import ServerStoreConfig
from hicache.integrations.server_store import ServerStore
from hicache.storage import PageFormat, chain
from redis_server import running

pytestmark = [pytest.mark.remote, pytest.mark.skipif(redis_server.MISSING != "", reason=redis_server.MISSING)]

PAGE_BYTES = 64 << 10
PAGES = {b"%d" % n: np.random.default_rng(n).integers(0, 256, PAGE_BYTES, dtype=np.uint8) for n in range(12)}


def opened(path: Path, remote: str) -> ServerStore:
    config = ServerStoreConfig(path=str(path), remote=remote)
    return ServerStore.open(config, {"server": "vllm 0.32", "model": "m"}, (PageFormat(PAGE_BYTES),))


def put(server: ServerStore) -> None:
    """Page by page, and the memory is used again at once."""
    memory = np.zeros(PAGE_BYTES, np.uint8)
    for name, page in PAGES.items():
        memory[:] = page
        assert server.store.put([(server.keys([name])[0], memory)]) == [True]
        memory[:] = 0


def require_all(server: ServerStore) -> None:
    pages = np.zeros((len(PAGES), PAGE_BYTES), np.uint8)
    assert server.store.get_into(server.keys(list(PAGES)), list(pages)) == [True] * len(PAGES)
    assert np.array_equal(pages, np.stack([*PAGES.values()]))


def test_a_server_that_hangs_holds_up_no_write(tmp_path: Path) -> None:
    """The disk takes every page meanwhile; the server has them when it goes on, and another machine reads them."""
    with running() as redis:
        remote = f"{redis.url}?timeout=60"
        with closing(opened(tmp_path / "a", remote)) as first:
            redis.freeze()
            try:
                put(first)
                require_all(first)
            finally:
                redis.thaw()
        with closing(opened(tmp_path / "b", remote)) as second:
            require_all(second)
            assert second.store.stats().entries == 0


def test_a_server_that_hangs_holds_up_no_read(tmp_path: Path) -> None:
    """What the disk holds is read meanwhile, and the rest is a miss. When the server goes on, it is read too, and what
    it sends late reaches no buffer."""
    near, far = list(PAGES)[:6], list(PAGES)[6:]
    with running() as redis:
        remote = f"{redis.url}?timeout=600"
        with closing(opened(tmp_path / "a", remote)) as first:
            put(first)
        with closing(opened(tmp_path / "b", remote)) as second:
            for name in near:
                assert second.store.put([(second.keys([name])[0], PAGES[name])]) == [True]
            pages = np.zeros((len(PAGES), PAGE_BYTES), np.uint8)
            redis.freeze()
            try:
                for _ in range(3):
                    found = second.store.get_into(second.keys([*near, *far]), list(pages))
                    assert found == [True] * len(near) + [False] * len(far)
                    assert second.store.contains(second.keys([*far, *near])) == [False] * len(far) + [True] * len(near)
            finally:
                redis.thaw()
            assert np.array_equal(pages[: len(near)], np.stack([PAGES[name] for name in near]))
            give_up_s = time.monotonic() + redis_server.PATIENCE_S
            while second.store.contains(second.keys(far)) != [True] * len(far):
                assert time.monotonic() < give_up_s
                time.sleep(0.05)
            assert not pages[len(near) :].any()
            require_all(second)


def test_a_server_that_dies_costs_the_pages_that_it_was_to_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay on the disk; what is put after its restart reaches it."""
    monkeypatch.setattr(chain, "PAUSE_S", 0.0)
    with running() as redis:
        with closing(opened(tmp_path / "a", redis.url)) as first:
            redis.kill()
            put(first)
            first.store.sync()
            require_all(first)
            redis.start()
            first.store.delete(first.keys(list(PAGES)))
            put(first)
        with closing(opened(tmp_path / "b", redis.url)) as second:
            require_all(second)
