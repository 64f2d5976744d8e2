"""The end of a process, or of an engine, that nobody closed: threads stop, the status stays, the store is whole."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache import CacheRequest, DiskConfig, EngineConfig, ModelGeometry, build_engine
from hicache.storage import open_existing

RUNS = 4

# Loads the library once, then forks: each child works, and ends its interpreter while its engine is busy. Prints the
# status of each child, as waitpid gives it, and the pages that the store had acknowledged in it.
PROGRAM = """
import atexit, json, os, sys, threading
from pathlib import Path
import numpy as np
from hicache import CacheRequest, DiskConfig, EngineConfig, ModelGeometry, build_engine
import hicache.engine

folder, ending, tiers, hang, runs = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])
children = []
for run in range(runs):
    child = os.fork()
    if not child:
        break
    status = os.waitpid(child, 0)[1]
    acknowledged = Path(folder, f"{run}.txt")
    children.append([os.waitstatus_to_exitcode(status), int(acknowledged.read_text())])
else:
    print(json.dumps(children))
    os._exit(0)

disk = DiskConfig(path=f"{folder}/{run}", budget_bytes=32 << 20) if tiers == "disk" else None
config = EngineConfig(device_tokens=8192, host_bytes=24 << 20, page_size=16, host_page_size=64, max_requests=8,
                      max_context_len=4096, dtype="float32", model_id="m", disk=disk)
engine = build_engine(config, ModelGeometry(layer_num=8, head_num=2, head_dim=16))
if ending == "atexit close":
    atexit.register(engine.close)
engine.start()

def serve(number):
    tokens = np.arange(2000) + number * 5000
    lease = engine.acquire(CacheRequest(f"r{number}", tokens))
    engine.commit(lease, tokens)
    engine.release(lease)
    engine.poll()

serve(0)
engine.flush()
Path(folder, f"{run}.txt").write_text(str(int(engine.stats().get("disk.stored_pages", 0))))
if hang:
    hicache.engine._EXIT_S = 0.2
    entered, never = threading.Event(), threading.Event()
    def hangs(*_, **__):
        entered.set()
        never.wait()
    if hang == "copy":
        engine.inspect.context.full.transfer.mover.gather = hangs
    else:
        engine.inspect.context.disk.store.put = hangs
for number in range(1, 3):
    serve(number)
if hang:
    while not entered.is_set():
        engine.poll()
if ending == "exit":
    sys.exit(3)
if ending == "error":
    raise RuntimeError("a bug of the caller")
if ending == "interrupt":
    raise KeyboardInterrupt
"""
STATUS = {"exit": 3, "error": 1, "interrupt": -signal.SIGINT, "end": 0, "atexit close": 0}


def run(tmp_path: Path, ending: str, tiers: str, hang: str = "", runs: int = RUNS) -> tuple[list[Any], str]:
    """Status and acknowledged pages of each child, and what all of them said on the standard error."""
    arguments = [str(tmp_path), ending, tiers, hang, str(runs)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    children: list[Any] = json.loads(done.stdout)
    return children, done.stderr


@pytest.mark.parametrize("tiers", ["disk", "no disk"])
@pytest.mark.parametrize("ending", STATUS)
def test_the_callers_status_survives(ending: str, tiers: str, tmp_path: Path) -> None:
    """However a process ends with an engine open and busy, its status is the caller's, nothing is said but the caller's
    own words, and the store opens again with every page that was acknowledged."""
    children, said = run(tmp_path, ending, tiers)
    assert [status for status, _ in children] == [STATUS[ending]] * RUNS, said
    assert said.count("Traceback") == (RUNS if ending in ("error", "interrupt") else 0), said
    assert "hicache" not in said, said
    for number, (_, acknowledged) in enumerate(children):
        if tiers == "disk":
            store = open_existing(tmp_path / str(number))
            assert acknowledged <= store.stats().entries and acknowledged > 0
            store.check()
            store.close()


@pytest.mark.parametrize("hang", ["copy", "put"])
def test_what_hangs_does_not_keep_the_process(hang: str, tmp_path: Path) -> None:
    """A copy or a store that never returns: the process ends all the same, with the caller's status."""
    children, said = run(tmp_path, "exit", "disk", hang, runs=1)
    assert [status for status, _ in children] == [3], said


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
    left = {thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()}
    assert not {name for name in left if not name.startswith("hicache-disk-compress")}
    open_existing(tmp_path).close()
