"""A process or an engine ends without `close`: threads stop, the exit status is kept, and the store is complete.

A forked child ends nothing of its parent.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache import CacheRequest, DiskConfig, EngineConfig, ModelGeometry, build_engine
from hicache.errors import ConcurrentCall
from hicache.storage import open_existing
from programs import Program, output
from waiting import eventually

# A program that ends its interpreter while its engines are busy, one with a disk and one without. The program first
# prints how many pages the store has acknowledged.
PROGRAM = """
import atexit, os, signal, sys, threading
import numpy as np
import hicache.engine
from hicache import CacheRequest, DiskConfig, EngineConfig, ModelGeometry, build_engine

folder, ending, *tiers = sys.argv[1:]
engines = {}
for tier in tiers:
    disk = DiskConfig(path=folder, budget_bytes=32 << 20) if tier == "disk" else None
    config = EngineConfig(device_tokens=8192, host_bytes=24 << 20, page_size=16, host_page_size=64, max_requests=8,
                          max_context_len=4096, dtype="float32", model_id="m", disk=disk,
                          write_policy="write_through")
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
    hicache.engine._EXIT_S = 1.0
    never, hung = threading.Event(), threading.Event()
    engines["memory"].inspect.context.full.transfer.mover.gather = lambda *_, **__: (hung.set(), never.wait())
    os.kill(engines["disk"].inspect.context.disk.pid, signal.SIGSTOP)
for number in range(1, 3):
    serve(number)
if ending == "hang":
    while not hung.is_set():
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
    with Program(PROGRAM, folder, ending, *tiers, is_torn_down=ending == "end") as program:
        acknowledged, printed = program.communicate()
    assert program.returncode == status, printed
    assert printed.count("Traceback") == (ending in ("error", "interrupt")), printed
    # Frames in a traceback have the path of the checkout, which may be called hicache.
    assert not [line for line in printed.splitlines() if "hicache" in line and not line.startswith("  File ")], printed
    if "disk" in tiers:
        store = open_existing(folder)
        assert 0 < int(acknowledged) <= store.stats().entries
        store.check()
        store.close()


@pytest.mark.parametrize("ending", STATUS)
def test_the_callers_status_survives(ending: str, tmp_path: Path) -> None:
    """However a process ends with open and busy engines, its status is that of the caller. The process prints only the
    caller's output, and the store opens again with every acknowledged page."""
    require_end(tmp_path, ending, STATUS[ending], "disk", "memory")


def test_what_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    """If a copy and a store never return, the process still ends with the caller's status."""
    require_end(tmp_path, "hang", 3, "disk", "memory")


def test_an_engine_that_is_dropped_stops_its_threads(tmp_path: Path) -> None:
    """The threads of an engine that was never closed end when it has no references, and its store can be opened
    again."""
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


def test_the_end_waits_for_the_call_of_another_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The exit hook touches no store while a daemon thread is inside a call of the engine. After the hook no call can
    begin."""
    config = EngineConfig(
        device_tokens=1024, host_bytes=8 << 20, host_page_size=16, model_id="m", disk=DiskConfig(path=str(tmp_path))
    )
    engine = build_engine(config, ModelGeometry(layer_num=2, head_num=2, head_dim=16))
    engine.start()
    (tier,) = engine.inspect.context.stores.values()
    inside, go_on, order = threading.Event(), threading.Event(), list[str]()
    find, left, sleep = tier.find, tier.abandon, time.sleep

    def found(*of: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        order.append("answered")
        return find(*of)

    def abandoned(within_s: float) -> None:
        order.append("abandoned")
        left(within_s)

    monkeypatch.setattr(tier, "find", found)
    monkeypatch.setattr(tier, "abandon", abandoned)
    caller = threading.Thread(target=engine.lookup, args=(np.arange(100),))
    caller.start()
    assert inside.wait(60)
    monkeypatch.setattr(time, "sleep", lambda seconds: (go_on.set(), sleep(seconds)))  # then the hook tries again
    assert engine._finalizer is not None
    end = threading.Thread(target=engine._finalizer)
    end.start()
    end.join(60)
    caller.join(60)
    assert order == ["answered", "abandoned"]
    with pytest.raises(ConcurrentCall):
        engine.poll()


# A process with an engine, a tensor cache and a remote store forks. Each child ends in its own way after its parent has
# stored more; the last child outlives all others. The program prints the results of the children and the stores.
FORKS = """
import contextlib, os, sys
from pathlib import Path
import numpy as np, torch
from hicache import CacheRequest, DiskConfig, EngineConfig, ModelGeometry, build_engine
from hicache.errors import NotRunning
from hicache.storage import LmdbPageStore, PageFormat, open_existing
from hicache.storage.remote import RemotePageStore
from hicache.prefix_cache.tensor_cache import HiCache

root = Path(sys.argv[1])
disk = DiskConfig(path=str(root / "pages"), budget_bytes=32 << 20)
config = EngineConfig(device_tokens=1024, host_bytes=1 << 20, page_size=16, host_page_size=16, max_requests=4,
                      max_context_len=1024, dtype="float32", model_id="m", disk=disk)
engine = build_engine(config, ModelGeometry(layer_num=2, head_num=1, head_dim=8))
engine.start()
cache = HiCache(1, 2, root / "tensors", l2_bytes=1 << 20, disk_bytes=8 << 20, block_bytes=4096)
verbs = dict.fromkeys(RemotePageStore.__abstractmethods__, lambda *_: None)
about = {"identity": {"m": 1}, "formats": [PageFormat(4096)], "level": 0, "cipher": None}
remote = type("ConnectedStore", (RemotePageStore,), verbs)("of a server", **about)
page = np.zeros(2048, np.uint8)
store = LmdbPageStore(root / "own", identity={"m": 1}, formats=[PageFormat(2048)], budget_bytes=8 << 20)

def serve(number):
    tokens = np.arange(400) + 1000 * number
    with engine.acquire(CacheRequest(str(number), tokens)) as lease:
        engine.commit(lease, tokens)
    engine.flush()
    store.put([(str(number).encode(), page)])
    cache.put(str(number), torch.full((1000,), number))

def use():
    lease = leases[0]
    verbs = [lambda: engine.acquire(CacheRequest("a", np.arange(100))), lambda: engine.commit(lease, np.arange(9)),
             engine.poll, engine.flush, engine.start, lambda: engine.lookup(np.arange(100)), lambda: cache.get("1"),
             lambda: cache.put("x", torch.zeros(1)), lambda: store.contains([b"k"]), lambda: store.delete([b"k"]),
             lambda: store.put([(b"k", page)]), lambda: store.touch([b"k"]), lambda: remote.contains([b"k"]),
             lambda: remote.put([(b"k", np.zeros(4096, np.uint8))])]
    taken = 0
    for verb in verbs:
        with contextlib.suppress(NotRunning):
            verb()
            taken += 1
    engine.release(lease)
    engine.cancel("held")
    for owner in (engine, cache, store, remote, engine.inspect.context.disk):
        owner.close()
    os._exit(taken)

def leave():
    with contextlib.closing(store), cache, contextlib.closing(engine):
        sys.exit(0)

def live():
    os.read(go[0], 1)

serve(0)
leases = [engine.acquire(CacheRequest("held", np.arange(50)))]
children, go = [], os.pipe()
for ends in (lambda: sys.exit(0), leave, use, live):
    own = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go[1])
        os.read(own[0], 1)
        ends()
        os._exit(0)
    children.append((pid, own[1]))
for number in range(1, 12):
    serve(number)
for pid, begin in children:
    os.write(begin, b"x")
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in children[:3]], flush=True)
store.check()
engine.check()
assert store.stats().entries == 12 and not (root / "own" / "index.mdb").exists()
assert engine.stats()["disk.stored_pages"] == 12 * 25
assert all(cache.get(str(number))[0] == number for number in range(12))
cache.check()
engine.release(leases[0])
engine.close()
cache.close()
store.close()
again = open_existing(root / "pages")
print(again.stats().entries, again.rebuilt_pages)
again.close()
os.close(go[1])
os.waitpid(children[3][0], 0)
"""


def test_a_fork_ends_nothing_of_its_parents(tmp_path: Path) -> None:
    """A child that exits, or closes or uses inherited objects, changes nothing of its parent; the uses by the child are
    refused by name. A child that continues to run does not keep the store locked."""
    assert output(FORKS, tmp_path).splitlines() == ["[0, 0, 0]", "300 None"]
