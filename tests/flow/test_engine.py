"""The engine end to end on a toy model: bytes that went down come back, and everything is accounted for at every
step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from disk_case import PATIENCE_S
from hicache import CacheEngine, CacheRequest, DiskConfig, build_engine
from hicache.errors import (
    ConfigError,
    OutOfRows,
    OutOfSlots,
    PrefetchPending,
    PromptTooLong,
    ResourceExhausted,
    TransferError,
)
from hicache.storage.base import StoreMismatch
from toy_model import GEOMETRY, compute, config, expected_kv, read, serve

WHOLE_DEVICE = 128


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, length)


def empty(engine: CacheEngine) -> None:
    """After all is released and completed, every slot is free or evictable."""
    engine.flush()
    engine.check()
    stats = engine.stats()
    assert stats["device.free_tokens"] + stats["device.evictable_tokens"] == WHOLE_DEVICE
    assert stats["device.protected_tokens"] == stats["engine.leases"] == 0


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_prefix_comes_back_from_device_and_host(device: str, policy: str, page_size: int) -> None:
    """What was computed once is read back unchanged from the device, and from the host after it left the device."""
    with build_engine(config(device=device, write_policy=policy, page_size=page_size), GEOMETRY) as engine:
        first, others = prompt(1, 100), [prompt(n, 100) for n in (2, 3)]
        assert serve(engine, "a", first).cached_len == 0
        again = serve(engine, "b", first)
        assert (again.hit.device, again.cached_len) == (96, 96)
        assert engine.stats()["admit.hit_ratio"] == 96 / 200
        engine.flush()
        for n, other in enumerate(others):
            serve(engine, f"c{n}", other)
            engine.flush()
            engine.check()
        back = serve(engine, "d", first)
        assert back.hit.host > 0 and back.cached_len == 96
        empty(engine)


def test_all_three_tiers_and_a_restart(device: str, tmp_path: Path) -> None:
    """Pages that left device and host come back from disk, in this process and in the next one."""
    disk = DiskConfig(path=str(tmp_path / "store"), budget_bytes=4 << 20)
    prompts = [prompt(n, 90) for n in range(8)]
    for run in range(2):
        with build_engine(config(device=device, disk=disk, prefetch_mode="wait_complete"), GEOMETRY) as engine:
            hits = []
            for n, tokens in enumerate([*prompts, *prompts]):
                ticket = engine.prefetch(f"r{n}", tokens)
                while not ticket.ready:
                    engine.poll()
                hits.append(serve(engine, f"r{n}", tokens).hit)
                engine.flush()
                engine.check()
            assert sum(hit.disk for hit in hits[8:]) > 0
            assert (hits[0].disk > 0) == (run == 1)
            assert engine.lookup(prompts[0], disk_wait_s=PATIENCE_S).disk + engine.lookup(prompts[0]).host > 0
            empty(engine)


def test_the_host_tier_by_ratio() -> None:
    """`host_ratio` sizes the host tier as a multiple of the device's memory, and stands alone."""
    with build_engine(config(host_bytes="auto", host_ratio=2.0), GEOMETRY) as engine:
        device_bytes = sum(b.nbytes for layer in range(3) for b in engine.pool.layer_buffers(layer))
        pages = 2 * device_bytes // engine.inspect.context.full.host.page_bytes  # type: ignore[union-attr]
        assert engine.stats()["host.free_pages"] == pages - 1  # and the sink
        serve(engine, "a", prompt(1, 60))
        engine.flush()
        assert engine.stats()["host.evictable_tokens"] == 56
        empty(engine)
    with pytest.raises(ConfigError, match="host_ratio"):
        config(host_ratio=1.0)


def test_namespaces_never_meet(tmp_path: Path) -> None:
    """The same tokens under another namespace hit in no tier."""
    disk = DiskConfig(path=str(tmp_path / "store"), budget_bytes=4 << 20)
    with build_engine(config(disk=disk), GEOMETRY) as engine:
        tokens = prompt(1, 80)
        serve(engine, "a", tokens, "red")
        engine.flush()
        held = engine.lookup(tokens, "blue")
        assert (held.device, held.host, held.disk) == (0, 0, 0)
        assert serve(engine, "b", tokens, "blue").cached_len == 0
        engine.flush()
        assert serve(engine, "c", tokens, "red").cached_len == 72


def test_two_salts_share_a_store_and_no_page(tmp_path: Path) -> None:
    """Pages written under one salt are misses under another, in the same store."""
    disk = DiskConfig(path=str(tmp_path / "store"), budget_bytes=4 << 20)
    tokens = prompt(1, 80)
    with build_engine(config(disk=disk, salt="one"), GEOMETRY) as engine:
        serve(engine, "a", tokens)
        engine.flush()
        assert engine.lookup(tokens).device == 72
    with build_engine(config(disk=disk, salt="two"), GEOMETRY) as engine:
        assert engine.lookup(tokens, disk_wait_s=PATIENCE_S).disk == 0
    with build_engine(config(disk=disk, salt="one"), GEOMETRY) as engine:
        assert engine.lookup(tokens, disk_wait_s=PATIENCE_S).disk == 72


def test_a_store_of_another_model_is_refused(tmp_path: Path) -> None:
    """Opening a store with another model identity raises and names the field."""
    disk = DiskConfig(path=str(tmp_path / "store"), budget_bytes=4 << 20)
    build_engine(config(disk=disk), GEOMETRY).close()
    with build_engine(config(disk=disk), GEOMETRY):
        pass
    with pytest.raises(StoreMismatch, match="model"):
        build_engine(config(disk=disk, model_id="another"), GEOMETRY)


def test_requests_share_a_load_under_way() -> None:
    """A second request that matches pages still being loaded waits for the same load and reads the same bytes."""
    with build_engine(config(max_requests=3), GEOMETRY) as engine:
        first = prompt(1, 60)
        serve(engine, "a", first)
        engine.flush()
        for n in (2, 3):
            serve(engine, f"fill{n}", prompt(n, 60))
            engine.flush()
        assert engine.lookup(first).host > 0
        one = engine.acquire(CacheRequest("one", first))
        two = engine.acquire(CacheRequest("two", first))
        assert one.load_ids and set(two.load_ids) == set(one.load_ids)
        truth = expected_kv(first)
        for lease in (two, one):
            assert torch.equal(read(engine, lease, lease.cached_len), truth[: lease.cached_len])
            engine.release(lease)
        empty(engine)


def test_refused_requests_leave_no_trace() -> None:
    """A request that does not fit changes neither recency, structure, rows nor slots."""
    with build_engine(config(max_requests=1, host_bytes=0), GEOMETRY) as engine:
        serve(engine, "a", prompt(1, 60))
        lease = engine.acquire(CacheRequest("b", prompt(2, 60)))
        before = engine.stats()
        with pytest.raises(OutOfSlots, match=r"100 tokens requested, \d+ available, \d+ evictable"):
            engine.acquire(CacheRequest("c", prompt(3, 100)))
        with pytest.raises(OutOfRows, match="max_requests"):
            engine.acquire(CacheRequest("d", prompt(4, 10)))
        refused = {"admit.out_of_slots_attempts": 1, "admit.out_of_rows_attempts": 1}
        assert engine.stats() == {**before, **refused}
        with pytest.raises(PromptTooLong, match="device_tokens"):
            engine.acquire(CacheRequest("e", prompt(5, 200)))
        with pytest.raises(PromptTooLong, match="max_context_len"):
            engine.acquire(CacheRequest("f", prompt(5, 300)))
        engine.release(lease)
        engine.release(lease)
        assert serve(engine, "g", prompt(1, 60)).cached_len == 56
        empty(engine)


def test_a_failed_load_is_reported_and_leaks_nothing() -> None:
    """When a load fails, the reader is told, the pages stay on the host, and slots return with the last reader."""
    with build_engine(config(), GEOMETRY) as engine:
        first = prompt(1, 60)
        serve(engine, "a", first)
        engine.flush()
        for n in (2, 3):
            serve(engine, f"fill{n}", prompt(n, 60))
            engine.flush()
        mover = engine.inspect.context.full.transfer.mover  # type: ignore[union-attr]
        scatter = mover.scatter

        def broken(staging: torch.Tensor, slots: torch.Tensor, first_layer: int, num_layers: int) -> None:
            if first_layer == 1:
                raise RuntimeError("the link is down")
            scatter(staging, slots, first_layer, num_layers)

        mover.scatter = broken
        lease = engine.acquire(CacheRequest("b", first))
        assert lease.load_ids
        with pytest.raises(TransferError, match="the link is down"):
            compute(engine, lease, first, lease.cached_len, len(first))
        engine.flush()
        engine.check()
        with pytest.raises(TransferError):
            engine.commit(lease, first)
        engine.release(lease)
        engine.check()
        mover.scatter = scatter
        assert engine.stats()["restore.failures"] == 1
        assert serve(engine, "c", first).hit.host > 0
        empty(engine)


def test_a_failed_backup_leaves_pages_where_they_were() -> None:
    """When a backup fails, nothing is demoted and the host pages are freed."""
    with build_engine(config(), GEOMETRY) as engine:
        mover = engine.inspect.context.full.transfer.mover  # type: ignore[union-attr]
        gather = mover.gather

        def broken(*_: object) -> None:
            raise RuntimeError("no")

        mover.gather = broken
        serve(engine, "a", prompt(1, 60))
        engine.flush()
        mover.gather = gather
        engine.check()
        stats = engine.stats()
        assert stats["backup.failures"] == 1 and stats["host.evictable_tokens"] == 0
        assert serve(engine, "b", prompt(1, 60)).hit.device == 56
        empty(engine)


def test_cost_gate_declines_a_slow_load() -> None:
    """A load slower than computing is not started; the tokens count as computed and the estimates are published."""
    with build_engine(config(prefill_tokens_per_s=1e15), GEOMETRY) as engine:
        first = prompt(1, 60)
        for n, tokens in enumerate([first, prompt(2, 60), prompt(3, 60), first]):
            serve(engine, f"r{n}", tokens)
            engine.flush()
        assert engine.stats()["restore.declined_loads"] == 0  # no speed is known before the first load
        for n, tokens in enumerate([prompt(2, 60), prompt(3, 60), first]):
            lease = serve(engine, f"s{n}", tokens)
            engine.flush()
        stats = engine.stats()
        assert stats["restore.declined_loads"] > 0 and lease.hit.host == 0
        assert stats["restore.last_load_seconds"] > stats["restore.last_compute_seconds"] > 0
        empty(engine)


def test_prefetch_modes(tmp_path: Path) -> None:
    """best_effort never makes a request wait, wait_complete refuses admission until the end, cancel ends both."""
    disk = DiskConfig(path=str(tmp_path / "store"), budget_bytes=4 << 20)
    tokens = prompt(1, 90)
    with build_engine(config(disk=disk), GEOMETRY) as engine:
        serve(engine, "a", tokens)
        engine.flush()
    with build_engine(config(disk=disk), GEOMETRY) as engine:
        waiting = engine.prefetch("w", tokens, mode="wait_complete")
        assert not waiting.ready
        with pytest.raises(PrefetchPending):
            engine.acquire(CacheRequest("w", tokens))
        while not waiting.ready:
            engine.poll()
        assert waiting.landed_tokens == waiting.found_tokens == 88
        engine.check()
        engine.prefetch("x", tokens[:50], mode="wait_complete")
        engine.cancel("x")
        assert engine.prefetch("y", tokens, mode="best_effort").ready
        assert serve(engine, "w", tokens).hit.disk == 88
        empty(engine)


def test_a_prefetch_gives_device_pages_their_host_copy_back(tmp_path: Path) -> None:
    """Pages on the device that the host evicted get host copies from disk, and come back from those, unchanged."""
    disk = DiskConfig(path=str(tmp_path / "store"), budget_bytes=4 << 20)
    one, two = prompt(1, 60), prompt(2, 60)
    with build_engine(config(disk=disk, host_bytes=9 * 8 * 192), GEOMETRY) as engine:
        for name, tokens in (("a", one), ("b", two)):
            serve(engine, name, tokens)
            engine.flush()
        ticket = engine.prefetch("c", one, mode="wait_complete")
        while not ticket.ready:
            engine.poll()
        assert ticket.landed_tokens == 48 and engine.lookup(one).device == 56  # one page was still there
        engine.flush()
        engine.check()
        engine.release(engine.acquire(CacheRequest("d", prompt(3, 100))))  # takes the device, commits nothing
        assert engine.lookup(one).host > 0
        assert serve(engine, "e", one).hit.host > 0
        empty(engine)


def test_closing_keeps_what_was_committed(tmp_path: Path) -> None:
    """close() with leases open releases them, and what they committed is on disk."""
    disk = DiskConfig(path=str(tmp_path / "store"), budget_bytes=4 << 20)
    tokens = prompt(1, 90)
    engine = build_engine(config(disk=disk), GEOMETRY)
    engine.start()
    lease = engine.acquire(CacheRequest("a", tokens))
    compute(engine, lease, tokens, 0, 64)
    engine.commit(lease, tokens[:64])
    engine.close()
    engine.close()
    assert engine.stats()["disk.stored_pages"] == 8  # what is known goes on being told
    with build_engine(config(disk=disk), GEOMETRY) as reopened:
        assert reopened.lookup(tokens, disk_wait_s=PATIENCE_S).disk == 64


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations(device: str, policy: str, seed: int, tmp_path: Path) -> None:
    """Any interleaving of requests keeps every account exact and every reused byte right."""
    random_operations(device, policy, seed, tmp_path, steps=60)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("seed", range(10, 40))
def test_many_random_operations(device: str, policy: str, seed: int, tmp_path: Path) -> None:
    """The same, longer."""
    random_operations(device, policy, seed, tmp_path, steps=600)


def random_operations(
    device: str, policy: str, seed: int, tmp_path: Path, steps: int, computes_fast: bool = False
) -> None:
    rng = np.random.default_rng(seed)
    disk = DiskConfig(path=str(tmp_path / "store"), budget_bytes=1 << 20)
    stems = [prompt(n, 64) for n in range(8)]
    live: dict[str, tuple[object, np.ndarray, int]] = {}
    settings = config(
        device=device,
        write_policy=policy,
        disk=disk,
        page_size=int(rng.choice([1, 2, 4, 8])),
        host_bytes=int(rng.choice([10, 24])) * 8 * 192,
        prefill_tokens_per_s=1e15 if computes_fast else 0.0,
    )
    with build_engine(settings, GEOMETRY) as engine:
        for step in range(steps):
            action = rng.choice(["admit", "admit", "grow", "finish", "abort", "prefetch", "poll", "flush"])
            name = str(rng.choice(sorted(live))) if live else ""
            if action in ("admit", "prefetch"):
                stem = stems[rng.integers(len(stems))][: rng.integers(1, 65)]
                tokens = np.concatenate([stem, rng.integers(0, 3, rng.integers(0, 30))])
                space = str(rng.choice(["", "tenant"]))
                if action == "prefetch":
                    ticket = engine.prefetch(f"p{step}", tokens, space, mode="wait_complete")
                    while not ticket.ready and rng.random() < 0.99:
                        engine.poll()
                    if rng.random() < 0.3:
                        engine.cancel(f"p{step}")
                    engine.check()
                    continue
                try:
                    lease = engine.acquire(CacheRequest(f"r{step}", tokens, space))
                except ResourceExhausted:
                    engine.check()
                    continue
                truth = expected_kv(tokens, space)[: lease.cached_len]
                assert torch.equal(read(engine, lease, lease.cached_len), truth)
                live[f"r{step}"] = (lease, tokens, lease.cached_len)
            elif action == "grow" and name:
                lease, tokens, done = live[name]
                end = min(len(tokens), done + int(rng.integers(1, 40)))
                compute(engine, lease, tokens, done, end)  # type: ignore[arg-type]
                engine.commit(lease, tokens[:end])  # type: ignore[arg-type]
                live[name] = (lease, tokens, end)
                if end == len(tokens) and end < 200:
                    try:
                        engine.extend(lease, 3)  # type: ignore[arg-type]
                        live[name] = (lease, np.concatenate([tokens, rng.integers(0, 3, 3)]), end)
                    except OutOfSlots:
                        engine.check()
            elif action == "finish" and name:
                lease, tokens, done = live.pop(name)
                assert torch.equal(read(engine, lease, done), expected_kv(tokens[:done], lease.namespace))  # type: ignore
                engine.release(lease)  # type: ignore[arg-type]
            elif action == "abort" and name:
                live.pop(name)
                engine.cancel(name)
            elif action == "poll":
                engine.poll()
            elif action == "flush":
                engine.flush()
            engine.check()
        for name in live:
            engine.cancel(name)
        empty(engine)
