"""SGLang's own controller and storage threads over our backend: bytes come back, and faults are misses."""

from __future__ import annotations

import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
import pytest
import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

import sglang_on_cpu
from disk_case import Gate
from hicache.errors import ConfigError
from hicache.integrations.sglang.host_pages import host_pages
from hicache.storage import describe
from hicache.storage.process.health import LIMITS
from sglang_case import Case, Server, clock, device_pool, host_pool, tokens, troubled
from store_server import served
from waiting import eventually

NUM_PAGES = 20
# Layout, whether pages are copied by address, and whether attention is latent: every pair of values.
SHAPES = [
    ("layer_first", False, False),
    ("layer_first", True, True),
    ("page_first", True, False),
    ("page_first", False, True),
    ("page_first_direct", True, False),
    ("page_first_direct", False, True),
]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("layout", "v1", "mla"), [*SHAPES, pytest.param("page_first", True, True, marks=pytest.mark.store_process)]
)
def test_pages_come_back_after_a_restart(tmp_path: Path, layout: str, v1: bool, mla: bool) -> None:
    """Byte by byte, up to the first page that was not stored; more pages than one batch of SGLang's has."""
    case = Case(tmp_path, layout, v1, mla, page_size=1 if layout == "layer_first" else 8)
    num_pages = 140 if case.page_size == 1 else NUM_PAGES
    with Server(case) as first:
        stored, num_tokens = first.backup(tokens(num_pages, case))
        assert num_tokens == num_pages * case.page_size
        assert first.prefetch(tokens(num_pages, case)) == stored
    with Server(case) as second:
        assert second.prefetch(tokens(num_pages + 2, case)) == stored
        assert second.prefetch(tokens(num_pages, case, first=9000)) == []
    [folder] = tmp_path.iterdir()
    found = describe(folder)
    assert (found.entries, found.identity["server"], found.identity["release"]) == (num_pages, "sglang", "0.5.23")


@pytest.mark.parametrize(("layout", "pieces", "mla"), SHAPES)
def test_a_page_is_one_run_of_bytes(tmp_path: Path, layout: str, pieces: bool, mla: bool) -> None:
    """All of SGLang's bytes of a page and no others, in either order."""
    case = Case(tmp_path, layout, mla=mla)
    pool = host_pool(case, device_pool(case))
    pages = host_pages("kv", pool, pieces=pieces)
    source, target = pages.locations(torch.arange(3 * case.page_size))[::2]
    before = pool.kv_buffer.clone()
    buffer = np.empty(pages.page_bytes, dtype=np.uint8)
    pages.gather(source, buffer)
    assert sorted(buffer) == sorted(pool.get_data_page(0).view(torch.uint8).numpy())
    pages.scatter(target, buffer)
    first, last = (pool.get_data_page(slot).view(torch.uint8) for slot in (0, 2 * case.page_size))
    assert torch.equal(first, last)
    changed = (pool.kv_buffer.view(torch.uint8) != before.view(torch.uint8)).sum()
    assert 0 < changed <= pages.page_bytes


@pytest.mark.smoke
@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.float16},
        {"dtype": torch.float8_e5m2},
        {"layout": "page_first_direct"},
        {"v1": False, "layout": "layer_first"},
        {"page_size": 4},
        {"model": "other"},
        {"mla": True},
        {"tp_size": 2},
        {"tp_size": 2, "tp_rank": 1},
        {"extra": {"salt": "tenant"}},
    ],
    ids="-".join,
)
def test_servers_that_mean_other_bytes_share_a_path_and_no_page(tmp_path: Path, changed: dict[str, Any]) -> None:
    """SGLang's keys name tokens alone, and theirs are equal."""
    is_fp8 = changed.get("dtype") == torch.float8_e5m2  # both kinds lie in host pools of plain bytes
    first = Case(tmp_path, dtype=torch.float8_e4m3fn if is_fp8 else torch.bfloat16)
    second = replace(first, **changed)
    with Server(first) as server:
        stored, _ = server.backup(tokens(NUM_PAGES, first))
    with Server(second) as server:
        assert server.prefetch(tokens(NUM_PAGES, second)) == []
        other, num_tokens = server.backup(tokens(NUM_PAGES, second))
        assert num_tokens == len(tokens(NUM_PAGES, second))
    for case, pages in ((first, stored), (second, other)):
        with Server(case) as server:
            assert server.prefetch(tokens(NUM_PAGES, case)) == pages


@pytest.mark.smoke
def test_ranks_share_what_they_hold_alike(tmp_path: Path) -> None:
    """Latent attention: rank 0 stores, and rank 1, which may start first, reads it and stores nothing. That takes a
    process which serves both; without one rank 1 does not start, and says why."""
    with served(tmp_path / "pages", tmp_path / "socket") as socket:
        case = Case(socket, mla=True, tp_size=2)
        with Server(replace(case, tp_rank=1)) as reader:
            assert reader.prefetch(tokens(8, case)) == []
            with Server(case) as writer:
                stored, num_tokens = writer.backup(tokens(8, case))
                assert num_tokens == 8 * case.page_size
            assert eventually(lambda: reader.prefetch(tokens(8, case))) == stored
            assert reader.backup(tokens(8, case, first=5000))[1] == 0
    [folder] = (tmp_path / "pages").iterdir()
    assert "tp=any" in str(describe(folder).identity["parallel"])
    with pytest.raises((ConfigError, ValueError), match="hicache store serve"):
        Server(replace(case, path=tmp_path / "alone", tp_rank=1))


@pytest.mark.smoke
@pytest.mark.parametrize("v1", [False, True])
@pytest.mark.parametrize("first_lost", [0, 3, NUM_PAGES - 1])
def test_pages_that_leave_between_look_up_and_load_are_computed(tmp_path: Path, first_lost: int, v1: bool) -> None:
    """The pages before them come, and SGLang computes the rest: its threads live, and it stores and loads again."""
    case = Case(tmp_path, v1=v1)
    prompt = tokens(NUM_PAGES, case)
    with Server(case) as server:
        stored, _ = server.backup(prompt)
        lost = server.hashes(prompt)[first_lost:]
        assert server.prefetch(prompt, lambda: server.lose(lost)) == stored[:first_lost]
        assert server.prefetch(prompt) == stored[:first_lost]
        stored, num_tokens = server.backup(prompt)
        assert num_tokens == len(prompt) and server.threads_live()
        found = server.prefetch(prompt)
        assert found[first_lost:] == stored[first_lost:] and len(found) == NUM_PAGES


@pytest.mark.smoke
def test_a_full_disk_keeps_what_was_stored(tmp_path: Path) -> None:
    """Pages that do not fit are not counted as stored; SGLang serves on, and stores again when there is room."""
    case = Case(tmp_path, extra={"level": 0, "budget": "16MB"})
    with troubled():
        server = Server(case)
    with server:
        stored, _ = server.backup(tokens(8, case))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        size = max(file.stat().st_size for file in tmp_path.glob("sglang-*/*") if file.is_file())
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            counts = [server.backup(tokens(32, case, first=2000 * n))[1] for n in range(2, 20)]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)
        assert counts[-1] == 0
        assert server.prefetch(tokens(8, case)) == stored
        clock.now_s += LIMITS.max_reopen_backoff_s
        eventually(lambda: server.backup(tokens(8, case, first=90_000))[1])
        assert len(server.prefetch(tokens(8, case, first=90_000))) == 8


@pytest.mark.smoke
@pytest.mark.parametrize("verb", ["contains", "get_into", "put"])
def test_a_frozen_disk_freezes_nothing(tmp_path: Path, verb: str) -> None:
    """Pages are misses if the medium does not answer, and SGLang goes on. A late answer writes no byte to memory that
    SGLang has freed, and stores none from it."""
    case = Case(tmp_path, extra={"readers": 2})
    with troubled() as stores:
        server = Server(case)
    with server:
        stored, _ = server.backup(tokens(NUM_PAGES, case))
        gate = Gate(verb)

        def freeze(called: str) -> None:
            clock.now_s += 2 * LIMITS.io_timeout_s * (called == verb)
            gate(called)

        stores[0].trouble = freeze
        if verb == "put":
            late, num_tokens = server.backup(tokens(NUM_PAGES, case, first=5000))
            assert num_tokens == 0
        else:
            late = []
            assert server.prefetch(tokens(NUM_PAGES, case)) == []
        assert gate.held
        memory = server.host.kv_buffer.view(torch.uint8)
        memory.random_()
        before = memory.clone()
        gate.open()
        eventually(server.backend.close)  # its threads have ended
        assert torch.equal(memory, before)
    with Server(case) as server:
        assert server.prefetch(tokens(NUM_PAGES, case)) == stored
        assert server.prefetch(tokens(NUM_PAGES, case, first=5000)) == late


@pytest.mark.smoke
def test_a_slow_disk_is_not_waited_for(tmp_path: Path) -> None:
    """While computing is faster SGLang is told that nothing is stored; the disk is asked again from time to time."""
    case = Case(tmp_path, extra={"prefill_tokens_per_s": 1000.0, "readers": 1})
    with troubled() as stores:
        server = Server(case)
    with server:
        stored, num_tokens = server.backup(tokens(NUM_PAGES, case))

        def slow(verb: str) -> None:
            clock.now_s += 2 * num_tokens / 1000 * (verb == "get_into")

        stores[0].trouble = slow
        assert server.prefetch(tokens(NUM_PAGES, case)) == stored
        assert server.prefetch(tokens(NUM_PAGES, case)) == []
        stores[0].trouble = lambda verb: None
        assert server.prefetch(tokens(NUM_PAGES, case)) == []
        clock.now_s += 61
        assert server.prefetch(tokens(NUM_PAGES, case)) == stored == server.prefetch(tokens(NUM_PAGES, case))
        counts = {name: value for name, value in server.backend.metrics.snapshot().items() if name.startswith("gate.")}
        assert counts == dict(zip(sorted(counts), (0, 1, 2, 2), strict=True))


@pytest.mark.smoke
def test_copies_to_the_host_show_the_speed_of_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own, as it submits them: the gate knows the speed from the second prompt on, although the disk has
    stored nothing yet. The bytes are copied as before, and a pool that is given back has its own method."""
    monkeypatch.setattr(MHATokenToKVPoolHost, "backup_from_device_all_layer", sglang_on_cpu.backup)
    case = Case(tmp_path)
    with troubled():
        server = Server(case)
    num_pages, slots = 1024 // case.page_size, torch.arange(1024) % 128
    with server:
        host, device, backend = server.host, server.controller.mem_pool_device, server.backend
        device.k_buffer[0].random_()
        for number in range(2):
            assert backend.batch_exists([f"{number} {page}" for page in range(num_pages)]) == 0
            clock.now_s += 1
            host.backup_from_device_all_layer_physical(device, slots, slots, "direct")
        assert backend.gate.wait_s(num_pages) == pytest.approx(1.0)
        buffer, index = sglang_on_cpu._rows(host, 0, 0, slots)
        assert torch.equal(buffer[index], device.k_buffer[0][slots])
    assert "backup_from_device_all_layer" not in vars(host)


@pytest.mark.smoke
def test_pages_of_other_sizes_are_refused(tmp_path: Path) -> None:
    """Nothing is read into them, nor stored from them."""
    with Server(Case(tmp_path)) as server:
        backend, slots = server.backend, torch.arange(server.case.page_size)
        for call in (
            lambda: backend.batch_get_v1(["a", "b"], slots),
            lambda: backend.batch_set_v1(["a"], None),
            lambda: backend.set("a", torch.zeros(3)),
            lambda: backend.get("a", torch.zeros(3)),
            lambda: backend.batch_set(["a", "b"], [torch.zeros(3)]),
        ):
            with pytest.raises(ValueError, match=r"pages? "):
                call()
        assert not backend.exists("a")


def test_generic_calls_clear_and_statistics(tmp_path: Path) -> None:
    """Targets are filled and returned, holes are None, batches are all or nothing, and `clear` empties the store."""
    with Server(Case(tmp_path, v1=False)) as server:
        backend, host = server.backend, server.host
        pages = [torch.randn(host.get_dummy_flat_data_page().shape).to(host.dtype) for _ in range(3)]
        assert backend.set("a", pages[0]) and backend.batch_set(["b", "d"], pages[1:])
        assert backend.exists("a") and not backend.exists("c")
        assert backend.batch_exists(["a", "b", "c", "d"]) == 2
        target = host.get_dummy_flat_data_page()
        assert backend.get("a", target) is target and torch.equal(target, pages[0])
        found = backend.batch_get(["a", "b", "c", "d"])
        assert [page is None for page in found] == [False, False, True, True] and torch.equal(found[1], pages[1])
        stats = backend.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([1, 2], [1, 2]) and min(stats.prefetch_bandwidth) > 0
        assert backend.get_stats().backup_pgs == []
        backend.clear()
        assert not backend.exists("a") and backend.set("a", pages[0])


def test_the_endpoint_of_the_server_shows_what_the_disk_does(tmp_path: Path) -> None:
    """Entries, bytes, budget, hits and the gate's decisions, by rank, once SGLang has asked for its own metrics."""
    case = Case(tmp_path, tp_size=2, tp_rank=1)
    ranks = {"tp_rank": "1", "pp_rank": "0", "attn_cp_rank": "0", "dp_rank": "0"}

    def value(name: str, **labels: str) -> float:
        return prometheus_client.REGISTRY.get_sample_value(f"hicache_{name}", {**ranks, **labels}) or 0.0

    def shown() -> list[float]:
        decided = value("load_gate_loads_total", decision="unmeasured")
        return [value("disk_stored_pages"), value("disk_hit_pages_total"), decided]

    before = shown()
    with troubled():
        server = Server(case)
    with server:
        server.backup(tokens(NUM_PAGES, case))
        server.prefetch(tokens(NUM_PAGES, case))

        def is_shown() -> bool:
            clock.now_s += 2
            server.backend.get_stats()
            return shown() == [NUM_PAGES, before[1] + NUM_PAGES, before[2] + 1]

        eventually(is_shown)
        assert value("disk_budget_bytes") == 64_000_000 and 0 < value("tier_used_ratio", tier="disk") < 1


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"extra": {"bugdet": 1}}, "bugdet"),
        ({"extra": {"path": "/dev/null"}}, "path"),
        ({"model": None}, "--served-model-name"),
    ],
)
def test_a_wrong_setting_stops_the_server_at_its_start(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    """With a message that names it."""
    with pytest.raises((ConfigError, ValueError), match=named):
        Server(replace(Case(tmp_path, page_size=64, dtype=torch.float32), **changed))
