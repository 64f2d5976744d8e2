"""KV events of complete engines: the blocks that a router knows from them are those of the tiers."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from pathlib import Path

import pytest

import block_index
import engine_fuzz
from block_index import BlockIndex, read_lines
from cases import long
from engine_fuzz import EngineFuzz
from hicache import CacheEngine, ConfigError, DiskConfig, EngineConfig, build_engine
from hicache.pages.events import block_hash
from hicache.replay.simulation import ReplaySettings, replay
from hicache.replay.trace import read_trace
from kv_events_case import in_memory, serve, subscribe
from memory_store import MemoryPageStore
from server_case import TINY, serving
from toy_model import GEOMETRY, config, flush_error
from waiting import eventually


class Listening(EngineFuzz):
    """A history whose events go to `stream`, with a small store in its folder. `index`: the router's view before the
    engine was closed; `in_memory`, `on_disk`: the blocks that its tiers held then."""

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
        eventually(lambda: disk.poll() or not (disk.reads.in_flight or disk.writes.in_flight))
        flush_error(self.engine)
        _wait_until_written(self.engine)
        self.in_memory, self.index = in_memory(self.engine), BlockIndex()
        for batch in read_lines(self.stream):
            self.index.apply(batch.events)
        store = self.faults.stores[-1]
        keys = [key for verb, keys in store.calls if verb != "reopen" for key in keys]
        held = {block_hash(key) for key, found in zip(keys, store.inner.contains(keys), strict=True) if found}
        self.on_disk = held & self.index.blocks.keys()  # other keys are of windows and states


def _wait_until_written(engine: CacheEngine) -> None:
    eventually(lambda: not engine.stats()["kv_events.waiting_blocks"], engine.stats)


@pytest.mark.parametrize("kind", engine_fuzz.MODELS)
@pytest.mark.parametrize(("seed", "num_steps"), [(0, 120), *long(*((seed, 250) for seed in range(4)))])
def test_a_router_has_the_blocks_of_the_tiers_after_any_history(
    kind: str, seed: int, num_steps: int, tmp_path: Path
) -> None:
    """After random requests, aborts, evictions, failed copies and disk faults, then after a second engine over the same
    store, the blocks of each medium are those of the events. Each block is reported once, after its parent, with the
    tokens of the tree. Blocks without a stored parent are not reported."""
    first = Listening(kind, seed, tmp_path)
    first.run(num_steps)
    _same(first)
    assert first.index.held["DISK"] <= first.on_disk
    untold = first.on_disk - first.index.held["DISK"]
    assert not any(_is_known(first.index, first.index.blocks[name][0]) for name in untold)
    assert first.index.blocks
    second = Listening(kind, seed, tmp_path)
    second.run(num_steps)
    _same(second)
    assert (
        second.index.held["DISK"] <= second.on_disk
    )  # pages that no request has used since the start are not reported
    last = read_lines(second.stream)[-1]
    assert last.events == [block_index.AllBlocksCleared()]


def _same(history: Listening) -> None:
    tree, index = history.engine.inspect.context.tree, history.index
    held = history.in_memory
    assert index.held["GPU"] == held["GPU"].keys() and index.held["CPU"] <= held["CPU"].keys()
    assert not any(_is_known(index, held["CPU"][name]) for name in held["CPU"].keys() - index.held["CPU"])
    for node in tree.nodes():
        tokens, page = node.run.tokens.tolist(), tree.page_size
        for number, key in enumerate(tree.keys_of(node)):
            assert index.blocks[block_hash(key)][1] == tuple(tokens[number * page : (number + 1) * page])


def _is_known(index: BlockIndex, parent: int | None) -> bool:
    """Whether a block begins a prompt, or a medium holds its parent."""
    return parent is None or index.knows(parent)


def test_an_address_that_cannot_be_used_leaves_the_disk_free(tmp_path: Path) -> None:
    """If an address for events cannot be used, the engine is not built, and the next attempt can open the store."""
    settings = config(kv_events=f"file:{tmp_path}", disk=_disk(tmp_path))
    with pytest.raises(ConfigError, match="kv_events"):
        build_engine(settings, GEOMETRY)
    with build_engine(dataclasses.replace(settings, kv_events=""), GEOMETRY) as engine:
        serve(engine, "r", range(96))


def test_pages_of_a_custom_store_are_reported_when_found(tmp_path: Path) -> None:
    """A custom store does not report the pages that it loses. A page that a read misses is reported as removed, and as
    stored when it is written again."""
    stream, prompt = tmp_path / "events", range(96)
    store = MemoryPageStore(1 << 20)
    with build_engine(config(kv_events=f"file:{stream}", disk=None), GEOMETRY, store=store) as engine:
        serve(engine, "first", prompt)
        tree = engine.inspect.context.tree
        keys = [key for node in tree.nodes() for key in tree.keys_of(node)]
        for lost in (keys[4:5], []):
            engine.reset()
            store.delete(lost)
            found = engine.prefetch("again", list(prompt), mode="wait_complete")
            eventually(lambda found=found: engine.poll() or found.ready)
            held = _index_of(engine, stream).held
            assert held["DISK"] == {block_hash(key) for key in keys if key not in lost}
            assert len(held["CPU"]) == (4 if lost else 11)
            engine.cancel("again")
            serve(engine, "again", prompt)


@pytest.mark.long
@pytest.mark.store_process
def test_pages_of_a_restarted_disk_are_reported_when_found(tmp_path: Path) -> None:
    """After a restart of the disk its last evictions are unknown. So all blocks of the disk are reported as removed. A
    block is reported as stored again when a read finds it."""
    stream, prompt = tmp_path / "events", range(96)
    advanced = dataclasses.replace(config().advanced, disk_reopen_backoff_s=1e-3)
    settings = config(kv_events=f"file:{stream}", disk=_disk(tmp_path), advanced=advanced)
    with build_engine(settings, GEOMETRY) as engine:
        serve(engine, "first", prompt)
        disk = engine.inspect.context.disk
        assert disk is not None and len(_index_of(engine, stream).held["DISK"]) == 12
        os.kill(disk.pid, signal.SIGKILL)
        eventually(lambda: engine.poll() or disk.times_lost)
        assert not _index_of(engine, stream).held["DISK"]
        eventually(lambda: engine.poll() or disk.is_open)
        engine.reset()
        found = engine.prefetch("again", list(prompt), mode="wait_complete")
        eventually(lambda: engine.poll() or found.ready)
        assert len(_index_of(engine, stream).held["DISK"]) == found.read_tokens // 8 == 11


def _disk(folder: Path) -> DiskConfig:
    return DiskConfig(path=str(folder / "store"), budget_bytes=1 << 20)


def _index_of(engine: CacheEngine, path: Path) -> BlockIndex:
    engine.poll()
    _wait_until_written(engine)
    index = BlockIndex()
    for batch in read_lines(path):
        index.apply(batch.events)
    return index


def test_a_subscriber_in_another_process_has_the_blocks_of_the_tiers(tmp_path: Path) -> None:
    """A subscriber in another process receives events over ZeroMQ and decodes them with twins of vLLM's classes.
    Batches from before its subscription are replayed."""
    subscribe(tmp_path)


def test_a_reader_that_does_not_read_holds_nothing_up(tmp_path: Path) -> None:
    """An engine continues if no process reads events from a full pipe. Lost events are a gap in the sequence
    numbers."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    advanced = dataclasses.replace(config().advanced, kv_events_queue_blocks=8)
    with build_engine(config(kv_events=f"file:{pipe}", advanced=advanced), GEOMETRY) as engine:
        number = 0
        while engine.stats()["kv_events.dropped_batches"] < 5:  # a pipe holds 64 KiB
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
    """`hicache serve --kv-events` writes the events of its requests, and ends the stream. With --record every request
    is in the trace with its lengths, and a repeated prompt hits in the replay."""
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
    reported = [token for _, tokens in index.blocks.values() for token in tokens]
    assert reported[:64] == first
    assert batches[-1].events[-1] == block_index.AllBlocksCleared()
    trace = read_trace(recorded)
    assert [(request.input_tokens, request.output_tokens) for request in trace.requests] == [(64, 2)] * 3
    hits = replay(trace, ReplaySettings(None)).device_tokens.tolist()
    assert hits == [0, len(trace.requests[0].blocks) * trace.block_tokens, 0] and hits[1] > 0
