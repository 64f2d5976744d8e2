"""SGLang's own controller and storage threads over hicache's backend. All stored bytes are restored, and faults cause
misses."""

from __future__ import annotations

import json
import re
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
from sglang.srt.observability import metrics_collector
from sglang.srt.server_args import ServerArgs

import sglang_on_cpu
from alert_case import metrics_of_plug_ins
from disk_case import Gate
from hicache.cli import main
from hicache.errors import ConfigError
from hicache.integrations.sglang.host_pages import host_pages
from hicache.monitoring.client import MetricsClient
from hicache.monitoring.server_figures import SGLANG
from hicache.storage import describe
from hicache.storage.process.health import LIMITS
from sglang_case import Case, Server, clock, device_pool, host_pool, tokens, troubled
from store_server import served
from waiting import eventually

NUM_PAGES = 20
DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "grafana" / "sglang.json"
# Layout, whether pages are copied by address, and whether attention is latent. The rows cover every pair of values.
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
    """After a restart all pages up to the first missing one are restored byte by byte, in more pages than one batch of
    SGLang has."""
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
    """A page has all bytes that SGLang has for it and no others, whether or not it is copied by address."""
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
    """SGLang's keys only depend on tokens. Servers whose bytes differ may share a path; their pages have equal keys,
    but no server reads a page of another."""
    is_fp8 = changed.get("dtype") == torch.float8_e5m2  # host pools store both fp8 dtypes as plain bytes
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
    """With latent attention rank 0 stores pages, and rank 1, which may start first, reads them and stores nothing. The
    two ranks need one store process. Without a store process rank 1 does not start, and the error says why."""
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
    """Pages are evicted between look-up and load. The pages before the evicted ones are loaded, and SGLang computes the
    other pages. SGLang's threads continue, and SGLang stores and loads again."""
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
    """Pages that do not fit on the disk are not counted as stored. SGLang continues to serve, and stores again when
    there is free space."""
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
    """If the medium does not answer, its pages are misses, and SGLang continues. A late answer writes no byte to memory
    that SGLang has freed, and stores no byte from it."""
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
        eventually(server.backend.close)  # the threads of the backend have ended
        assert torch.equal(memory, before)
    with Server(case) as server:
        assert server.prefetch(tokens(NUM_PAGES, case)) == stored
        assert server.prefetch(tokens(NUM_PAGES, case, first=5000)) == late


@pytest.mark.smoke
def test_a_slow_disk_is_not_waited_for(tmp_path: Path) -> None:
    """While computing is faster than the disk, the backend tells SGLang that nothing is stored. The backend tries the
    disk again from time to time."""
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
    """SGLang submits copies to the host, and their times show the speed of prefill. The gate knows it from the second
    prompt on, although the disk has stored nothing. The bytes are copied as before. After the server has closed, the
    pool has its own method again."""
    monkeypatch.setattr(MHATokenToKVPoolHost, "backup_from_device_all_layer", sglang_on_cpu.backup)
    case = Case(tmp_path, extra={"prefill_tokens_per_s": "auto"})
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
    """Pages of another size raise an error: nothing is read into them, and nothing is stored from them."""
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
    """Generic calls: targets are filled and returned, missing pages are None, and a batch is stored completely or not
    at all. `clear` empties the store."""
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
    """SGLang's endpoint shows entries, bytes, budget, hits and the gate's decisions for each rank, after SGLang has
    read its own metrics."""
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


@pytest.mark.smoke
def test_top_and_the_alerts_read_what_the_endpoint_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`hicache top` shows the tiers, transfers and decisions of SGLang's endpoint. Its two ranks share one budget. The
    endpoint has every metric that `top`, an alert or a panel of the dashboard reads."""
    for rank in range(2):
        with troubled():
            server = Server(Case(tmp_path, tp_size=2, tp_rank=rank))
        with server:
            server.backup(tokens(NUM_PAGES, server.case))
            assert server.prefetch(tokens(NUM_PAGES, server.case))
            clock.now_s += 2
            server.backend.get_stats()
    record_requests()
    http, thread = prometheus_client.start_http_server(0, "127.0.0.1")
    try:
        client = MetricsClient(f"127.0.0.1:{http.server_port}")
        reading = client.read()
        assert main(["top", "--once", client.server]) == 0
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
    assert reading.about == {"model": "a model"}
    assert [reading.hit_rate(tier) for tier in reading.tiers] == [0.3, 0.2, 0.1]
    assert reading.get("tokens.reused") == 600 and reading.get("tokens.computed") == 400
    assert reading.get("used.disk") > 0 and reading.get("total.disk") == 64_000_000
    assert reading.get("gate.loaded unmeasured") >= 2 and reading.get("moved_bytes.disk writes") > 0
    shown = capsys.readouterr().out
    assert "running 1   waiting 2" in shown and "2.0 GB/s" in shown and "up " not in shown
    exported = {sample.name for family in prometheus_client.REGISTRY.collect() for sample in family.samples}
    read = metrics_of_plug_ins("sglang")
    assert "hicache_disk_process_state" in read and read <= exported
    assert {series.name for series in SGLANG.values()} <= exported
    expressions = [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]
    ]
    of_panels = [re.findall(r"\b(?:sglang:|hicache_)\w+", text) for text in expressions]
    assert all(of_panels) and {name for names in of_panels for name in names} <= exported


def record_requests() -> None:
    """Record a request, its copies and the host pool with SGLang's own collectors."""
    labels = {"model_name": "a model", "engine_type": "unified"}
    of_rank = {**labels, "tp_rank": 0, "moe_ep_rank": 0}
    scheduler = metrics_collector.SchedulerMetricsCollector(
        of_rank, ServerArgs(model_path="dummy"), enable_hierarchical_cache=True
    )
    gauges = {scheduler.num_running_reqs: 1, scheduler.num_queue_reqs: 2}
    gauges |= {scheduler.hicache_host_used_tokens: 500, scheduler.hicache_host_total_tokens: 2000}
    for gauge, value in gauges.items():
        gauge.labels(**of_rank).set(value)
    copies = metrics_collector.RadixCacheMetricsCollector(of_rank)
    copies.increment_load_back_num_bytes(3_000_000_000)
    copies.observe_load_back_duration(1.5)
    copies.increment_backup_num_bytes(1_000_000)
    copies.observe_backup_duration(1.0)
    requests = metrics_collector.TokenizerMetricsCollector(labels=labels)
    cached = {"device": 300, "host": 200, "storage": 100}
    requests.observe_one_finished_request(labels, 1000, 8, 600, 1.0, False, cached_tokens_details=cached)
    requests.observe_time_to_first_token(labels, 0.3, stream=True)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"extra": {"bugdet": 1}}, "bugdet"),
        ({"extra": {"path": "/dev/null"}}, "path"),
        ({"model": None}, "--served-model-name"),
    ],
)
def test_a_wrong_setting_stops_the_server_at_its_start(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    """A wrong setting stops the server at its start; the error names the setting."""
    with pytest.raises((ConfigError, ValueError), match=named):
        Server(replace(Case(tmp_path, page_size=64, dtype=torch.float32), **changed))
