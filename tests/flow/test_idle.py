"""An idle step costs nothing: if no operation has ended, a step takes no lock, launches no kernel and calls no tier.

The tests measure no time. A profile hook lists every function that `poll()` calls, and a function mode lists every
operation on a tensor. `poll()` must return while another thread holds every lock that the engine can reach.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType

import pytest
from torch.overrides import TorchFunctionMode

import hicache
from hicache import CacheEngine, CacheRequest, DiskConfig, build_engine
from hicache.bench.counting import Calls
from toy_model import GEOMETRY, config, prompt, serve
from transfer_hooks import before_each_move
from waiting import BOUND_S

PACKAGE = Path(hicache.__file__).parent
LOCKS = (type(threading.Lock()), type(threading.RLock()))
# C functions that a step may call: for sizes and ends of containers, for ids, and for whether a queue is empty, all
# without a lock.
HARMLESS = {"len", "next", "all", "deque.extend", "SimpleQueue.empty", "get_ident", "getpid"}
OWN = {"engine.py", "flow"}
LOOKS = {"done", "is_set"}  # methods that return whether an operation has ended


class Operations(TorchFunctionMode):
    """A function mode that lists the operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))  # type: ignore[dict-item]


def reachable(root: object) -> Iterator[object]:
    """Every object that can be reached from `root`, except code, types, modules and threads."""
    seen, pending = {id(root)}, [root]
    while pending:
        at = pending.pop()
        yield at
        for other in gc.get_referents(at):
            if isinstance(other, (ModuleType, type, CodeType, FrameType, threading.Thread)):
                continue
            found = other.__closure__ or () if isinstance(other, FunctionType) else (other,)
            for item in found:
                if id(item) not in seen:
                    seen.add(id(item))
                    pending.append(item)


def ends_while_locks_are_held(engine: CacheEngine, timeout_s: float) -> bool:
    """Whether a step returns while this thread holds every lock of the engine, its tiers and queues."""
    held = [item for item in reachable(engine) if isinstance(item, LOCKS) and item.acquire(blocking=False)]
    assert held or engine.pool.device.type == "cuda"  # without a disk the CPU backend has no threads, so no locks
    try:
        stepping = threading.Thread(target=engine.poll, daemon=True)
        stepping.start()
        stepping.join(timeout_s)
        return not stepping.is_alive()
    finally:
        for lock in held:
            lock.release()


def costs_of_a_step(engine: CacheEngine, timeout_s: float = BOUND_S) -> list[str]:
    """Operations and calls of a step that an idle step must not make."""
    with Operations() as operations:
        calls = Calls()
        calls.record(engine.poll)
    functions = [(Path(code.co_filename), code.co_name) for _, code in calls.python]
    assert any(name == "poll" for _, name in functions)
    found = [f"operation {name}" for name in operations.names]
    for path, name in functions:
        own = PACKAGE in path.parents and path.relative_to(PACKAGE).parts[0] in OWN
        # These modules check for a fork, and for answers of the store process.
        own |= path.name in ("owner.py", "client.py")
        if not own and name not in LOOKS:
            found.append(f"call of {name} in {path.name}")
    found += [f"call of {name}" for name in calls.c if name not in HARMLESS]
    if not ends_while_locks_are_held(engine, timeout_s):
        found.append("wait for a lock")
    return found


@pytest.mark.parametrize("with_disk", [False, True])
def test_a_step_of_an_idle_engine_costs_nothing(device: str, with_disk: bool, tmp_path: Path) -> None:
    """The step of a new engine, of an engine that has served and flushed, and of one that holds a lease: each takes no
    lock, touches no tensor, and calls no tier except to check that no answer of a store is expected."""
    disk = DiskConfig(path=str(tmp_path / "store"), budget_bytes=4 << 20) if with_disk else None
    with build_engine(config(device=device, disk=disk), GEOMETRY) as engine:
        assert costs_of_a_step(engine) == []
        for n in (0, 1, 2, 0):  # each prompt needs most of the device
            serve(engine, "a", prompt(n, 100))
            engine.poll()  # evicts once, to free slots for the next page of a lease
            engine.flush()
        assert engine.stats()["backup.bytes"] > 0 and engine.stats()["restore.bytes"] > 0
        assert costs_of_a_step(engine) == []
        with engine.acquire(CacheRequest("open", prompt(1, 40))):
            engine.poll()
            engine.flush()
            assert costs_of_a_step(engine) == []


def test_a_step_with_transfers_in_flight_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a backup is in flight, steps only check whether it has ended. The first step after the end of the backup
    completes the backup."""
    gate = threading.Event()
    before_each_move(monkeypatch, lambda: gate.wait(BOUND_S))
    with build_engine(config(write_policy="write_through"), GEOMETRY) as engine:
        try:
            serve(engine, "a", prompt(1, 64))
            engine.poll()  # the first poll joins the operations of a copy in a property that locks before Python 3.12
            for _ in range(2):
                assert costs_of_a_step(engine) == []
            assert engine.stats()["backup.bytes"] == 0
        finally:
            gate.set()
        engine.flush()
        assert engine.stats()["backup.bytes"] > 0
