"""Engines that tell KV events, and a subscriber in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import block_index
from hicache import CacheEngine, CacheRequest, build_engine
from hicache.tree import DEVICE, FULL, HOST, RadixTree
from hicache.tree.events import block_hash
from toy_model import GEOMETRY, compute, config

_WAIT_S = 180.0


def in_memory(tree: RadixTree) -> dict[str, set[int]]:
    return {
        medium: {block_hash(key) for node in tree.nodes() if node.holds(FULL, tier) for key in tree.names.of(node)}
        for medium, tier in (("GPU", DEVICE), ("CPU", HOST))
    }


def serve(engine: CacheEngine, name: str, tokens: range) -> None:
    with engine.acquire(CacheRequest(name, list(tokens))) as lease:
        compute(engine, lease, lease.tokens.tokens, lease.cached_len, len(tokens))
        engine.commit(lease, list(tokens))
    engine.flush()


def subscribe(folder: Path, *module: str) -> None:
    """Serve prompts while a subscriber of another process listens; compare what it held at the end."""
    address, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    settings = config(kv_events=address, kv_events_replay=replay, kv_events_topic="kv", disk=None)
    with build_engine(settings, GEOMETRY) as engine:
        serve(engine, "before", range(50))
        program = [sys.executable, block_index.__file__, address, replay, *module]
        child = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        try:
            said, ready = list[str](), threading.Event()
            reader = threading.Thread(target=_listen, args=(child, said, ready))
            reader.start()
            end_s, number = time.monotonic() + _WAIT_S, 0
            while not ready.is_set() and child.poll() is None:
                assert time.monotonic() < end_s, "the subscriber gets nothing"
                number += 1
                time.sleep(0.05)  # what is to be replayed must not outgrow the buffer while the child starts
                serve(engine, f"r{number}", range(number * 64, number * 64 + 48))
            for again in range(20):
                serve(engine, f"a{again}", range(again * 1000, again * 1000 + 100))
            held = in_memory(engine.inspect.context.tree)
            engine.close()
            assert child.wait(_WAIT_S) == 0
        finally:
            child.kill()
            child.wait()
            reader.join(_WAIT_S)
    assert said[0] == "ready\n"
    assert json.loads(said[1]) == {**{medium: sorted(hashes) for medium, hashes in held.items()}, "DISK": []}
    assert held["GPU"] and held["CPU"]


def _listen(child: subprocess.Popen[str], said: list[str], ready: threading.Event) -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            said.append(line)
            ready.set()
