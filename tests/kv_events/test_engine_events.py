"""KV events of whole engines: what a router holds after them is what the tiers hold."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path

import pytest

import block_index
import engine_fuzz
from block_index import BlockIndex, read_lines
from engine_fuzz import EngineFuzz
from hicache import CacheEngine, ConfigError, DiskConfig, EngineConfig, build_engine
from hicache.replay.simulation import ReplaySettings, replay
from hicache.replay.trace import read_trace
from hicache.tree.events import block_hash
from kv_events_case import in_memory, serve, subscribe
from server_case import TINY, serving
from toy_model import GEOMETRY, config
from waiting import eventually


class Listening(EngineFuzz):
    """A history whose events go to `stream`, with a small store in its folder. `index`: the router's view before the
    engine was closed; `in_memory`, `on_disk`: what its tiers held then."""

    def __init__(self, kind: str, seed: int, folder: Path) -> None:
        self.stream = folder / "events.jsonl"
        super().__init__(kind, seed, folder)

    def _settings(self, folder: Path | None) -> EngineConfig:
        settings = super()._settings(folder)
        assert isinstance(settings, EngineConfig) and settings.disk is not None
        disk = dataclasses.replace(settings.disk, budget_bytes=1 << 20)
        return dataclasses.replace(settings, kv_events=f"file:{self.stream}", disk=disk)

    def settle(self) -> None:
        super().settle()
        disk = self.engine.inspect.context.disk
        assert disk is not None
        eventually(lambda: disk.poll() or not (disk.reads.under_way or disk.writes.under_way))
        self.engine.flush()
        _wait_until_written(self.engine)
        self.in_memory, self.index = in_memory(self.engine), BlockIndex()
        for batch in read_lines(self.stream):
            self.index.apply(batch.events)
        store = self.faults.stores[-1]
        keys = [key for verb, keys in store.calls if verb != "reopen" for key in keys]
        held = {block_hash(key) for key, found in zip(keys, store.inner.contains(keys), strict=True) if found}
        self.on_disk = held & self.index.blocks.keys()  # others are of windows and states


def _wait_until_written(engine: CacheEngine) -> None:
    eventually(lambda: not engine.stats()["kv_events.waiting_blocks"], engine.stats)


@pytest.mark.parametrize("kind", engine_fuzz.MODELS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
def test_a_router_holds_what_the_tiers_hold_after_any_history(kind: str, seed: int, tmp_path: Path) -> None:
    """After random requests, aborts, evictions, failed copies and disk faults, then after a second engine over the same
    store, the blocks of each medium are those of the events, with the tokens and parents that the tree has."""
    first = Listening(kind, seed, tmp_path)
    first.run(250)
    _same(first)
    assert first.on_disk == first.index.held["DISK"]
    assert first.index.blocks
    second = Listening(kind, seed, tmp_path)
    second.run(250)
    _same(second)
    assert second.index.held["DISK"] <= second.on_disk  # what nobody has asked for since the start is not told
    last = read_lines(second.stream)[-1]
    assert last.events == [block_index.AllBlocksCleared()]


def _same(history: Listening) -> None:
    tree, index = history.engine.inspect.context.tree, history.index
    assert {medium: index.held[medium] for medium in ("GPU", "CPU")} == history.in_memory
    for node in tree.nodes():
        tokens, page = node.run.tokens.tolist(), tree.page_size
        for number, key in enumerate(tree.names.of(node)):
            assert index.blocks[block_hash(key)][1] == tuple(tokens[number * page : (number + 1) * page])


def test_an_address_that_cannot_be_used_leaves_the_disk_free(tmp_path: Path) -> None:
    """The engine is not built, and the next attempt has the store."""
    settings = config(kv_events=f"file:{tmp_path}", disk=_disk(tmp_path))
    with pytest.raises(ConfigError, match="kv_events"):
        build_engine(settings, GEOMETRY)
    with build_engine(dataclasses.replace(settings, kv_events=""), GEOMETRY) as engine:
        serve(engine, "r", range(96))


def test_what_the_store_evicts_and_what_it_kept_from_before_is_told(tmp_path: Path) -> None:
    """A store that is too small for all prompts tells what it dropped; a later engine tells what it finds."""
    settings = config(kv_events=f"file:{tmp_path / 'events'}", disk=_disk(tmp_path))
    with build_engine(settings, GEOMETRY) as engine:
        for number in range(60):
            serve(engine, f"r{number}", range(number * 100, number * 100 + 96))
        evicted = engine.stats()["disk.evicted_pages"]
        stored = engine.stats()["disk.stored_pages"]
        index = _index_of(engine, tmp_path / "events")
        assert evicted > 0
        assert len(index.held["DISK"]) == stored
        assert sum(len(e.block_hashes) for e in _removals(tmp_path / "events")) >= evicted
    last = [59 * 100 + n for n in range(96)]
    with build_engine(settings, GEOMETRY) as engine:
        assert not _index_of(engine, tmp_path / "events").held["DISK"]
        found = engine.prefetch("again", last, mode="wait_complete")
        eventually(lambda: engine.poll() or found.ready)
        engine.cancel("again")
        index = _index_of(engine, tmp_path / "events")
        assert found.landed_tokens == 88  # the last page is never looked for
        assert len(index.held["DISK"]) == len(index.held["CPU"]) == 11


def _disk(folder: Path) -> DiskConfig:
    return DiskConfig(path=str(folder / "store"), budget_bytes=1 << 20)


def _removals(path: Path) -> list[block_index.BlockRemoved]:
    events = [event for batch in read_lines(path) for event in batch.events]
    return [e for e in events if isinstance(e, block_index.BlockRemoved) and e.medium == "DISK"]


def _index_of(engine: CacheEngine, path: Path) -> BlockIndex:
    engine.poll()
    _wait_until_written(engine)
    index = BlockIndex()
    for batch in read_lines(path):
        index.apply(batch.events)
    return index


def test_a_subscriber_in_another_process_holds_what_the_tiers_hold(tmp_path: Path) -> None:
    """Over ZeroMQ, decoded with twins of vLLM's classes; batches from before the subscription are replayed."""
    subscribe(tmp_path)


def test_a_reader_that_does_not_read_holds_nothing_up(tmp_path: Path) -> None:
    """An engine whose events nobody takes out of a full pipe serves on; what had no room is a gap in the numbers."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    advanced = dataclasses.replace(config().advanced, kv_events_queue_blocks=8)
    with build_engine(config(kv_events=f"file:{pipe}", advanced=advanced), GEOMETRY) as engine:
        number = 0
        while engine.stats()["kv_events.dropped_batches"] < 5:  # the pipe takes 64 KiB
            number += 1
            serve(engine, f"r{number}", range(number * 100, number * 100 + 96))
        read = b""
        while engine.stats()["kv_events.waiting_blocks"]:
            read += _available(reader)
        stats = engine.stats()
        closing = threading.Thread(target=engine.close)
        closing.start()
        while closing.is_alive():
            read += _available(reader)
        read += _available(reader)
        os.close(reader)
    numbers = [json.loads(line)["sequence"] for line in read.decode().splitlines()]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] + 1 - len(numbers) == stats["kv_events.dropped_batches"]
    assert len(numbers) == stats["kv_events.sent_batches"] + 1


def _available(reader: int) -> bytes:
    try:
        return os.read(reader, 1 << 16)
    except BlockingIOError:
        return b""


def test_a_server_tells_its_events_and_records_its_requests(tmp_path: Path) -> None:
    """`hicache serve --kv-events` writes what its requests stored, and ends the stream. With --record every request is
    in the trace with its lengths, and a repeated prompt hits in the replay."""
    stream, recorded = tmp_path / "events", tmp_path / "trace.jsonl"
    first, second = list(range(100, 164)), list(range(180, 244))
    with serving(tmp_path, *TINY, "--kv-events", f"file:{stream}", "--record", str(recorded)) as server:
        for prompt in (first, first, second):
            server.client().completions.create(model="random", prompt=prompt, max_tokens=2, temperature=0)
        server.wait_idle()
        assert server.metric("hicache_kv_events_dropped_batches_total") == 0
        assert server.end() == 0
    index = BlockIndex()
    batches = read_lines(stream)
    for batch in batches[:-1]:
        index.apply(batch.events)
    told = [token for _, tokens in index.blocks.values() for token in tokens]
    assert told[:64] == first
    assert batches[-1].events[-1] == block_index.AllBlocksCleared()
    trace = read_trace(recorded)
    assert [(request.input_tokens, request.output_tokens) for request in trace.requests] == [(64, 2)] * 3
    hits = replay(trace, ReplaySettings(None)).device_tokens.tolist()
    assert hits == [0, len(trace.requests[0].blocks) * trace.block_tokens, 0] and hits[1] > 0
