"""The end of a process, or of an engine, that nobody closed: threads stop, the status stays, the store is whole."""

from __future__ import annotations

import gc
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from hicache import CacheRequest, DiskConfig, EngineConfig, ModelGeometry, build_engine
from hicache.storage import open_existing
from programs import Program
from waiting import eventually

# Ends its interpreter while its engines are busy, one with a disk and one without. Prints how many pages the store had
# acknowledged before.
PROGRAM = """
import atexit, sys, threading
import numpy as np
import hicache.abandoned
from hicache import CacheRequest, DiskConfig, EngineConfig, ModelGeometry, build_engine

folder, ending, *tiers = sys.argv[1:]
engines = {}
for tier in tiers:
    disk = DiskConfig(path=folder, budget_bytes=32 << 20) if tier == "disk" else None
    config = EngineConfig(device_tokens=8192, host_bytes=24 << 20, page_size=16, host_page_size=64, max_requests=8,
                          max_context_len=4096, dtype="float32", model_id="m", disk=disk)
    engines[tier] = engine = build_engine(config, ModelGeometry(layer_num=8, head_num=2, head_dim=16))
    if ending == "atexit close":
        atexit.register(engine.close)
    engine.start()

def serve(number):
    tokens = np.arange(2000) + number * 5000
    for engine in engines.values():
        lease = engine.acquire(CacheRequest(f"r{number}", tokens))
        engine.commit(lease, tokens)
        engine.release(lease)
        engine.poll()

serve(0)
for engine in engines.values():
    engine.flush()
print(int(engines["disk"].stats()["disk.stored_pages"]) if "disk" in engines else 0, flush=True)
if ending == "hang":
    hicache.abandoned._EXIT_S = 1.0
    never, hung = threading.Event(), {"copy": threading.Event(), "put": threading.Event()}
    def hangs(what):
        return lambda *_, **__: (hung[what].set(), never.wait())
    engines["memory"].inspect.context.full.transfer.mover.gather = hangs("copy")
    engines["disk"].inspect.context.disk.store.put = hangs("put")
for number in range(1, 3):
    serve(number)
if ending == "hang":
    while not all(event.is_set() for event in hung.values()):
        for engine in engines.values():
            engine.poll()
if ending in ("exit", "hang"):
    sys.exit(3)
if ending == "error":
    raise RuntimeError("a bug of the caller")
if ending == "interrupt":
    raise KeyboardInterrupt
"""
STATUS = {"exit": 3, "error": 1, "interrupt": -signal.SIGINT, "end": 0, "atexit close": 0}


def require_end(folder: Path, ending: str, status: int, *tiers: str) -> None:
    with Program(PROGRAM, folder, ending, *tiers) as program:
        acknowledged, said = program.communicate()
    assert program.returncode == status, said
    assert said.count("Traceback") == (ending in ("error", "interrupt")), said
    # Of a traceback, the lines of its frames have the path of the checkout, which may be called hicache.
    assert not [line for line in said.splitlines() if "hicache" in line and not line.startswith("  File ")], said
    if "disk" in tiers:
        store = open_existing(folder)
        assert 0 < int(acknowledged) <= store.stats().entries
        store.check()
        store.close()


@pytest.mark.parametrize("ending", STATUS)
def test_the_callers_status_survives(ending: str, tmp_path: Path) -> None:
    """However a process ends with engines open and busy, its status is the caller's, nothing is said but the caller's
    own words, and the store opens again with every page that was acknowledged."""
    require_end(tmp_path, ending, STATUS[ending], "disk", "memory")


@pytest.mark.long
@pytest.mark.parametrize("tier", ["disk", "memory"])
@pytest.mark.parametrize("ending", STATUS)
def test_the_callers_status_survives_each_time(ending: str, tier: str, tmp_path: Path) -> None:
    """The same with one engine, of either kind, over many processes."""
    for run in range(10):
        require_end(tmp_path / str(run), ending, STATUS[ending], tier)


def test_what_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    """A copy and a store that never return: the process ends all the same, with the caller's status."""
    require_end(tmp_path, "hang", 3, "disk", "memory")


def test_an_engine_that_is_dropped_stops_its_threads(tmp_path: Path) -> None:
    """An engine without a reference, never closed: its threads end, and the store can be opened again."""
    before = set(threading.enumerate())
    config = EngineConfig(
        device_tokens=1024, host_bytes=8 << 20, host_page_size=16, model_id="m", disk=DiskConfig(path=str(tmp_path))
    )
    engine = build_engine(config, ModelGeometry(layer_num=2, head_num=2, head_dim=16))
    engine.start()
    with engine.acquire(CacheRequest("r", np.arange(500))) as lease:
        engine.commit(lease, np.arange(500))
    assert len(set(threading.enumerate()) - before) >= 3
    del engine, lease
    gc.collect()

    def left() -> set[str]:
        names = {thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()}
        return {name for name in names if not name.startswith("hicache-disk-compress")}

    eventually(lambda: not left(), left)
    open_existing(tmp_path).close()
