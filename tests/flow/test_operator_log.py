"""Warnings for operators: each is logged once and names a setting."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from disk_case import TroubledStore
from hicache import build_engine
from hicache.storage import LmdbPageStore, PageFormat
from memory_store import MemoryPageStore
from toy_model import GEOMETRY, config, flush_error, serve
from toy_model import prompt as prompt_of

PAGE_BYTES = 8 * 192


def prompt(seed: int) -> np.ndarray:
    return prompt_of(seed, 65)


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hicache")


def test_a_load_that_does_not_pay(caplog: pytest.LogCaptureFixture) -> None:
    """The engine reports the first load that is replaced by recomputation, with both estimates."""
    settings = {"device_tokens": 80, "host_bytes": 40 * PAGE_BYTES, "prefill_tokens_per_s": 1e12}
    with build_engine(config(**settings), GEOMETRY) as engine:
        for n in range(12):
            serve(engine, f"r{n}", prompt(n % 2))
            engine.flush()
        assert engine.stats()["restore.declined_loads"] > 1
    (line,) = lines(caplog, "computed again")
    assert "prefill_tokens_per_s" in line


def test_a_disk_that_is_too_slow_for_the_host(caplog: pytest.LogCaptureFixture) -> None:
    """The engine reports the first tokens that leave the host before the store has them, also for a store of the
    caller."""
    store = TroubledStore(MemoryPageStore(1 << 30))
    store.trouble = lambda verb: verb != "put" or 1 / 0  # the store accepts no pages
    with build_engine(config(device_tokens=256, host_bytes=20 * PAGE_BYTES), GEOMETRY, store=store) as engine:
        for seed in range(4):
            serve(engine, f"r{seed}", prompt(seed))
            assert flush_error(engine) is not None
        assert engine.stats()["evict.host_lost_tokens"] >= 64
    assert len(lines(caplog, "leave the host before a store has them")) == 1


def test_a_budget_that_is_reached(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The store reports its first eviction, and no later one."""
    rng = np.random.default_rng(0)
    page_bytes = 1 << 16
    formats = [PageFormat(page_bytes)]
    with closing(LmdbPageStore(tmp_path, identity={"m": 1}, formats=formats, budget_bytes=8 << 20)) as store:
        for n in range(300):
            store.put([(n.to_bytes(8, "big"), rng.integers(0, 255, page_bytes, dtype=np.uint8))])
        assert store.stats().evicted > 100
    (line,) = lines(caplog, "budget")
    assert str(8 << 20) in line
