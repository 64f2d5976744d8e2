"""Engines that publish KV events, and a subscriber in its own process."""

from __future__ import annotations

import itertools
import json
import select
from itertools import pairwise
from pathlib import Path

import block_index
from hicache import CacheEngine, CacheRequest, build_engine
from hicache.pages.events import block_hash
from programs import program
from toy_model import GEOMETRY, compute, config
from waiting import eventually


def in_memory(engine: CacheEngine) -> dict[str, dict[int, int | None]]:
    """The blocks that the device and the host hold, with their parents."""
    context = engine.inspect.context
    assert context.watch is not None
    of_medium = {
        "GPU": [context.tree.event_pages(node.rows) for node in context.tree.nodes()],
        "CPU": context.watch.announced([*context.full.pages]),
    }
    return {
        medium: {
            block_hash(key): None if before is None else block_hash(before)
            for pages in held
            for before, key in pairwise([pages.previous_key, *pages.keys])
        }
        for medium, held in of_medium.items()
    }


def serve(engine: CacheEngine, name: str, tokens: range) -> None:
    with engine.acquire(CacheRequest(name, list(tokens))) as lease:
        compute(engine, lease, lease.tokens.tokens, lease.cached_len, len(tokens))
        engine.commit(lease, list(tokens))
    engine.flush()


def subscribe(folder: Path, *module: str) -> None:
    """Serve prompts while a subscriber in another process listens. At the end compare the blocks of the subscriber with
    those of the engine."""
    address, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    settings = config(kv_events=address, kv_events_replay=replay, kv_events_topic="kv", disk=None)
    numbers = itertools.count(1)
    with (
        build_engine(settings, GEOMETRY) as engine,
        program(block_index.__file__, address, replay, *module) as subscriber,
    ):
        assert subscriber.stdout is not None
        stdout = subscriber.stdout

        def hears() -> bool:
            number = next(numbers)
            serve(engine, f"r{number}", range(number * 64, number * 64 + 48))
            # The buffer must hold all batches that are replayed until the subscriber has started.
            return bool(select.select([stdout], [], [], 0.05)[0])

        serve(engine, "before", range(50))
        eventually(hears)
        assert stdout.readline() == "ready\n"
        for again in range(20):
            serve(engine, f"a{again}", range(again * 1000, again * 1000 + 100))
        held = in_memory(engine)
        engine.close()
        said, errors = subscriber.communicate()
    assert subscriber.returncode == 0, errors
    assert json.loads(said) == {**{medium: sorted(hashes) for medium, hashes in held.items()}, "DISK": []}
    assert held["GPU"] and held["CPU"]
