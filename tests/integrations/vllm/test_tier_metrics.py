"""The tier's metrics in vLLM's own endpoint: vLLM's classes process them, from its manager to the text for
Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats, OffloadPromMetrics
from vllm.v1.kv_offload.base import OffloadingCounterMetadata
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from alert_case import metrics_of_plug_ins
from disk_case import Clock
from hicache.integrations.vllm.manager import miss_metrics
from hicache.integrations.vllm.tier_metrics import TierMetrics, metric_definitions
from hicache.metrics import Metrics
from vllm_tier_case import ROW_BYTES, key, scheduler

CHUNKS = [key(number) for number in range(20)]


class Endpoint:
    """A stand-in for vLLM's front end, for a connector of this configuration."""

    def __init__(self, extra: dict[str, Any]) -> None:
        given = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)
        kinds = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
        vllm_config: Any = SimpleNamespace(kv_transfer_config=given)
        self._metrics = OffloadPromMetrics(vllm_config, kinds, ["engine"], {0: ["0"]})

    def observe(self, stats: OffloadingConnectorStats | None) -> None:
        """Process the message that vLLM's processes exchange after a step."""
        if stats is not None:
            self._metrics.observe(stats.data)

    def value(self, name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"vllm:hicache_{name}", {"engine": "0", **labels})


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    unregister_vllm_metrics()
    tier = {"type": "HiCacheTier", "module_path": "hicache.integrations.vllm", "path": str(tmp_path)}
    yield Endpoint({"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier]})
    unregister_vllm_metrics()


@pytest.mark.smoke
def test_the_endpoint_says_what_the_disk_and_its_gate_did(tmp_path: Path, endpoint: Endpoint, clock: Clock) -> None:
    """The endpoint has the right pages, bytes, budget, hits and decisions. The counters of the endpoint count every
    event once."""
    with scheduler(tmp_path, budget="2MB", readers=1, prefill_tokens_per_s=1e9) as server:

        def reported(name: str, **labels: str) -> float | None:
            endpoint.observe(server.manager.get_stats())
            clock.now_s += 1.5
            return endpoint.value(name, store=server.tiers[0]._server.path, **labels)

        assert reported("disk_stored_pages") == 0
        server.store(CHUNKS)
        server.reset()
        assert reported("disk_stored_pages") == 20
        assert reported("disk_raw_bytes") == 20 * ROW_BYTES
        stats = server.tiers[0]._backend.stats()
        assert reported("disk_live_bytes") == stats.live_bytes < 20 * ROW_BYTES
        assert reported("disk_budget_bytes") == 2_000_000
        assert reported("tier_used_ratio", tier="disk") == stats.file_bytes / 2_000_000
        assert reported("disk_put_pages_total") == 20
        assert server.load(CHUNKS) == [True] * 20
        server.reset()
        for _ in range(3):
            assert reported("disk_hit_pages_total") == 20
        server.tiers[0].gate.on_read(1, 1e6)  # a disk that takes days to read a page
        for _ in range(2):
            assert server.load(CHUNKS) == [False] * 20
        decisions = {
            name: reported("load_gate_loads_total", decision=name) for name in ("unmeasured", "declined", "accepted")
        }
        assert decisions == {"unmeasured": 1, "declined": 2, "accepted": 0}
        assert reported("disk_breaker_state", direction="read") == 0


@pytest.mark.smoke
def test_the_alerts_read_metrics_that_exist() -> None:
    """The plug-ins declare every metric that an alert reads under vLLM. The name of a counter ends with `_total`."""
    declared = metric_definitions() | miss_metrics()
    names = {
        f"{name}_total" if isinstance(about, OffloadingCounterMetadata) else name for name, about in declared.items()
    }
    read = metrics_of_plug_ins("vllm")
    assert "vllm:hicache_disk_process_state" in read and read <= names


def test_a_store_that_begins_to_count_again_is_counted_on(endpoint: Endpoint, clock: Clock) -> None:
    """If a store process restarts, its counters begin at 0. vLLM's counters still never decrease."""
    counts, metrics = iter([5.0, 2.0, 2.0]), Metrics()
    metrics.read_from({"disk.hit_pages": ("counter", "hits")}, lambda: {"disk.hit_pages": next(counts)})
    tier = TierMetrics(metrics, "here", clock)
    for expected in (5, 7, 7):
        endpoint.observe(tier.take())
        clock.now_s += 1.5
        assert endpoint.value("disk_hit_pages_total", store="here") == expected
