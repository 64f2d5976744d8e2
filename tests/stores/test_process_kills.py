"""Engines continue to serve while their store processes are killed and restarted."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from component_case import PACKABLE, WIDER, config, prefill
from hicache import AdvancedConfig, CacheEngine, CacheRequest, DiskConfig, ModelGeometry, build_engine
from hicache.errors import ResourceExhausted
from hicache.pages.states import RAW
from hicache.storage import open_existing
from hicache.tiers import DISK
from toy_model import flush_error, prompt, settled
from waiting import eventually

pytestmark = [pytest.mark.store_process, pytest.mark.timeout(1800)]
NUM_PROMPTS = 12


def engine_at(path: Path, kind: str, packing: str) -> CacheEngine:
    """An engine in bfloat16, so that some packed pages do not fit."""
    advanced = AdvancedConfig(disk_reader_threads=2, disk_reopen_backoff_s=0.01, disk_max_reopen_backoff_s=0.05)
    disk = DiskConfig(path=str(path), budget_bytes=64 << 20)
    changes = {"disk": disk, "advanced": advanced, "kv_packing": packing, **PACKABLE}
    # A prompt of 90 tokens fits in the window slots without chunks.
    return build_engine(config(**changes, window_tokens=192, prefetch_mode="best_effort"), WIDER[kind])


def tokens_of(number: int) -> np.ndarray:
    return prompt(number, 90)


@pytest.mark.parametrize(
    ("kind", "packing", "kills"),
    [
        ("full", "4", 4),
        *(pytest.param(kind, "3" if kind == "full" else "off", 100, marks=pytest.mark.long) for kind in WIDER),
    ],
)
def test_killed_processes_lose_nothing_that_was_acknowledged(
    kind: str, packing: str, kills: int, tmp_path: Path
) -> None:
    """While requests are served from all tiers, the store process is killed repeatedly at random moments. Each
    reused byte is right. In the end the store has every page that it acknowledged, and no page that does not fit
    when packed."""
    rng, acknowledged, raw = np.random.default_rng(kills), set[bytes](), set[bytes]()
    with engine_at(tmp_path / "s", kind, packing) as engine:
        context = engine.inspect.context
        assert context.disk is not None
        client = context.disk
        for turn in range(kills):
            for step in range(int(rng.integers(1, 5))):
                tokens = tokens_of(int(rng.integers(NUM_PROMPTS)))
                engine.prefetch(f"{turn}.{step}", tokens)
                for _ in range(int(rng.integers(4))):
                    engine.poll()
                request = CacheRequest(f"{turn}.{step}", tokens)
                eventually(lambda request=request: _is_served(engine, request, WIDER[kind]))
            if not turn:
                flush_error(engine)
            pages, held = context.full.pages, context.full.pages.rows_held()
            raw.update(pages.table.keys_of(held[pages.has(held, RAW)]))
            acknowledged.update(pages.table.keys_of(held[pages.stored[held] & DISK.bit != 0]))
            with contextlib.suppress(ProcessLookupError):
                os.kill(client.pid, signal.SIGKILL)
            if rng.random() < 0.7:
                eventually(lambda: engine.poll() or client.find((b"key",), 0.01))
        eventually(lambda: flush_error(engine) is None)
        settled(engine)
        assert client.times_lost >= kills // 2 and acknowledged - raw and bool(raw) == (packing != "off")
    with contextlib.closing(open_existing(tmp_path / "s")) as store:
        store.check()
        assert all(store.contains(sorted(acknowledged - raw))) and not any(store.contains(sorted(raw)))


def _is_served(engine: CacheEngine, request: CacheRequest, model: ModelGeometry) -> bool:
    """Serve a request. False if copies to the host still hold the slots that the request needs."""
    try:
        with engine.acquire(request) as lease:
            prefill(engine, lease, request.tokens, model)  # compares the reused tokens with the true values
    except ResourceExhausted:
        engine.poll()
        return False
    return True
