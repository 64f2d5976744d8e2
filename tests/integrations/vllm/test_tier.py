"""The secondary tier under vLLM's own tiering manager, CPU tier and factory. The scheduler runs without a model."""

from __future__ import annotations

import errno
import random
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from disk_case import Clock
from hicache.storage import LmdbPageStore, StoreError
from hicache.storage.process.health import LIMITS
from hicache.stores.tier import StoreTier
from vllm_tier_case import CONFIG, NUM_CHUNKS, ROW_BYTES, content, key, scheduler
from waiting import BOUND_S

CHUNKS = [key(number) for number in range(20)]


class Gate:
    """A gate that blocks calls of a method of the store while it is closed. `inside`: number of calls that have begun
    and not ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.open = threading.Event()
        self.open.set()
        self.inside = 0
        original = getattr(LmdbPageStore, method)

        def waiting(*args: Any, **kwargs: Any) -> Any:
            self.inside += 1
            assert self.open.wait(BOUND_S)
            try:
                return original(*args, **kwargs)
            finally:
                self.inside -= 1

        monkeypatch.setattr(LmdbPageStore, method, waiting)


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["in threads", pytest.param("in processes", marks=pytest.mark.store_process)])
def test_bytes_that_went_down_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str) -> None:
    """Stored chunks are loaded with the same bytes after a reset of the CPU tier, and in a second server. A chunk that
    was never stored is a miss. In the end vLLM can unmap its CPU tier."""
    with scheduler(tmp_path) as first:
        first.store(CHUNKS)
        first.reset()
        assert first.load([*CHUNKS, key(99)]) == [True] * 20 + [False]
    with scheduler(tmp_path) as second:
        assert second.load([*CHUNKS, key(99)]) == [True] * 20 + [False]
        assert second.load([key(0, group=1)]) == [False]
    assert "Failed to close mmap_obj" not in caplog.text


def _changed(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    groups = (replace(CONFIG.groups[0], layer_names=("a", "c")),)
    other = path / "model"
    other.mkdir()
    (other / "config.json").write_text("{}")
    yield "model", {"model": replace(CONFIG.model, name="other")}
    yield "dtype", {"model": replace(CONFIG.model, dtype="float16")}
    yield "layers", {"groups": groups}
    yield "block size", {"groups": (replace(CONFIG.groups[0], tokens_per_block=64),)}
    yield "hash size", {"cache": replace(CONFIG.cache, tokens_per_hash=16)}
    yield "layout", {"kv_cache_layout": "BLHNC"}
    yield "parallel", {"parallel": replace(CONFIG.parallel, tp_size=2)}
    yield "row", {"worker_kv_bytes_per_block": ROW_BYTES // 2}
    yield "salt", {"salt": "tenant"}
    yield "folder", {"model": replace(CONFIG.model, name=str(other))}


@pytest.mark.smoke
def test_the_memory_of_the_cpu_tier_has_no_name_once_the_tier_is_there(tmp_path: Path) -> None:
    """When the tier is open, all workers have mapped the memory of the CPU tier, and its file is removed. The files of
    a killed server are removed too, and the tier works."""
    left = Path(f"/dev/shm/vllm_offload_{uuid.uuid4().hex}.mmap")
    left.write_bytes(b"left")
    with scheduler(tmp_path) as opened:
        assert not left.exists()
        assert not list(Path("/dev/shm").glob(f"vllm_offload_{opened.config.engine_id}*"))
        opened.store([key(1)])
        opened.reset()
        assert opened.load([key(1)]) == [True]


@pytest.mark.smoke
def test_servers_that_differ_see_nothing_of_each_other(tmp_path: Path) -> None:
    """Servers that differ in any setting, or only in the weights under one model name, find no pages of each other in
    one folder."""
    pages = tmp_path / "pages"
    with scheduler(pages) as first:
        first.store(CHUNKS)
    for what, changed in _changed(tmp_path):
        with scheduler(pages, **changed) as second:
            assert second.load(CHUNKS) == [False] * 20, what
    for version in (1, 2):
        (tmp_path / "model" / "model.safetensors").write_bytes(bytes([version]) * (1 << 20))
        with scheduler(pages, **changed) as trained:
            assert trained.load(CHUNKS) == [False] * 20
            trained.store(CHUNKS, version)
    with scheduler(pages) as again:
        assert again.load(CHUNKS) == [True] * 20


@pytest.mark.smoke
@pytest.mark.parametrize("seed", range(2))
def test_failures_and_delays_cost_hits_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, seed: int
) -> None:
    """If a store randomly fails, loses pages or is slow, all loaded bytes are right, every job ends, and no row stays
    pinned."""
    rng = random.Random(seed)

    def faulty(original: Any) -> Any:
        def call(self: LmdbPageStore, items: Any, *args: Any, **kwargs: Any) -> Any:
            kind = rng.random()
            if kind < 0.1:
                raise OSError(5, "injected")
            if kind < 0.2:
                raise StoreError("injected")
            if kind < 0.25:
                raise RuntimeError("injected")
            if kind < 0.35:
                clock.now_s += 2 * LIMITS.io_timeout_s
            return [ok and rng.random() < 0.9 for ok in original(self, items, *args, **kwargs)]

        return call

    for method in ("contains", "get_into", "put"):
        monkeypatch.setattr(LmdbPageStore, method, faulty(getattr(LmdbPageStore, method)))
    hits = 0
    with scheduler(tmp_path) as server:
        for _ in range(40):
            start = rng.randrange(40)
            chunks = [key(number) for number in range(start, start + rng.randrange(1, 16))]
            hits += sum(server.load(chunks))
            server.store(chunks)
            clock.now_s += LIMITS.reopen_backoff_s
            if rng.random() < 0.3:
                server.reset()
        everything = [key(1000 + number) for number in range(NUM_CHUNKS)]
        server.store(everything)
        assert hits


@pytest.mark.smoke
def test_a_load_that_fails_is_not_tried_again_by_the_same_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request does not retry a failed load, because it would find the chunk in each step and never run. Chunks that
    were read before are kept."""
    with scheduler(tmp_path) as server:
        server.store(CHUNKS)
        server.reset()
        original, lost = LmdbPageStore.get_into, content(CHUNKS[3]).tobytes()

        def missing(self: LmdbPageStore, keys: Any, pages: Any, *, deadline_s: float) -> list[bool]:
            found = original(self, keys, pages, deadline_s=deadline_s)
            return [ok and page.tobytes() != lost for ok, page in zip(found, pages, strict=True)]

        monkeypatch.setattr(LmdbPageStore, "get_into", missing)
        found = server.load(CHUNKS)
        assert found[:3] == [True] * 3 and not found[3] and found[8:] == [True] * 12


@pytest.mark.smoke
def test_rows_are_kept_while_a_thread_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """While a read stalls, its job stays open, other requests are answered, and a reset waits for its end."""
    gate = Gate(monkeypatch, "get_into")
    with scheduler(tmp_path) as server:
        server.store(CHUNKS)
        server.reset()
        gate.open.clear()
        with server.request() as context:
            server.until(lambda: server.manager.lookup(CHUNKS[0], context).name == "HIT_PENDING" and gate.inside > 0)
            clock.now_s += 2 * LIMITS.io_timeout_s
            assert server.load([key(77)]) == [False]
            assert server.manager.has_pending_work()
            with monkeypatch.context() as patched:  # the stalled thread continues when the reset waits for it
                patched.setattr(StoreTier, "wait", lambda tier, seconds: gate.open.set())
                server.reset()
            assert gate.inside == 0 and not server.manager.has_pending_work()
        assert server.load(CHUNKS[:1]) in ([True], [False])


def test_stores_that_wait_pin_three_quarters_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores that wait for a slow disk pin at most three quarters of the rows. The other rows of vLLM's CPU tier stay
    usable."""
    gate = Gate(monkeypatch, "put")
    with scheduler(tmp_path) as server:
        gate.open.clear()
        for start in range(0, 3 * NUM_CHUNKS, 4):
            with server.request() as context:
                output = server.manager.prepare_store([key(start + i) for i in range(4)], context)
                assert output is not None
                server.manager.complete_store(output.keys_to_store, context)
            server.step()
        gate.open.set()
        server.until(lambda: not server.manager.has_pending_work())
        assert server.tiers[0].dropped_jobs.value == 3 * NUM_CHUNKS // 4 - 3 * NUM_CHUNKS // 16


def test_hashes_that_change_with_the_process_are_not_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hashes that differ in each process, like those of xxhash, are not stored. Hashes of xxhash are short. The log
    names the remedy once."""
    short = [key(number, hash_bytes=16) for number in range(4)]
    with scheduler(tmp_path) as server:
        server.store(short)
        server.reset()
        assert server.load(short) == [False] * 4
    remedy = "--prefix-caching-hash-algo sha256"
    [_] = {record for record in caplog.records if remedy in record.message}  # two loggers report each record


@pytest.mark.smoke
def test_a_full_disk_damage_and_another_writer_cost_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full disk, a damaged store, or a store that another process has open, vLLM continues with its CPU tier."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with scheduler(tmp_path / "full") as server, monkeypatch.context() as patched:
        patched.setattr(LmdbPageStore, "put", full)
        server.store(CHUNKS)
        assert server.load(CHUNKS) == [True] * 20
        server.reset()
        assert server.load(CHUNKS) == [False] * 20
    with scheduler(tmp_path / "two") as first, scheduler(tmp_path / "two") as second:
        first.store(CHUNKS[:10])
        second.store(CHUNKS)
        second.reset()
        assert second.load(CHUNKS) == [False] * 20
    with scheduler(tmp_path / "two") as first:
        first.store(CHUNKS)
    [data] = (tmp_path / "two").glob("*/store.json")
    data.write_bytes(b"\xff" * data.stat().st_size)
    with scheduler(tmp_path / "two") as damaged:
        damaged.store(CHUNKS)
        damaged.reset()
        assert damaged.load(CHUNKS) == [False] * 20
