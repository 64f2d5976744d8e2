"""What the disk and its gate count, in vLLM's own metrics: hicache's families behind `vllm:hicache_`, with the
directory of the store as a label.

vLLM declares the families in the process of its API server, where there is no tier, and sends it what the tier reports
between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from hicache.flow.cost import CostModel
from hicache.integrations.vllm.gate import LoadGate
from hicache.metrics import Counter, MetricInfo, Metrics, flattened, joined_help
from hicache.stores.tier import register_tier
from hicache.tiers import DISK

EVERY_S = 1.0
_NOT_MEASURED = {"cost.load_bytes_per_second"}  # vLLM makes these loads


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """All families by name, as vLLM declares them."""
    metrics = Metrics()
    LoadGate(CostModel("auto", {DISK: 1}, metrics, time.monotonic), time.monotonic, metrics, job_bytes=1)
    dropped_jobs(metrics)
    misfit_pages(metrics)
    register_tier(metrics, "disk", dict, lambda queue: {})
    families: dict[str, list[MetricInfo]] = {}
    for name, info in metrics.describe().items():
        if name not in _NOT_MEASURED:
            families.setdefault(_family(info), []).append(info)
    kinds = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}
    return {
        family: kinds[members[0].type](joined_help(members), labelnames=("store", *sorted(members[0].labels)))
        for family, members in families.items()
    }


def dropped_jobs(metrics: Metrics) -> Counter:
    return metrics.counter("disk.dropped_jobs", "jobs of stores that the tier did not take, since too much waits")


def misfit_pages(metrics: Metrics) -> Counter:
    return metrics.counter("packing.misfit_pages", "chunks that did not fit their packed row, so not stored on disk")


def _family(info: MetricInfo) -> str:
    return f"vllm:hicache_{info.family}"


class TierMetrics:
    """Owned by the tier. `store`: the label. Reports what has changed, at most every `EVERY_S` seconds."""

    def __init__(self, metrics: Metrics, store: str, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._store = store
        self._clock = clock
        self._described = metrics.describe()
        self._told: dict[str, float] = {}
        self._next_s = clock()

    def take(self) -> OffloadingConnectorStats | None:
        """What is to be added to counters, and new values of gauges."""
        now_s = self._clock()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + EVERY_S
        stats = OffloadingConnectorStats()
        for name, number in flattened(self._metrics.snapshot()).items():
            value, told = float(number), self._told.get(name)  # flags and states too: it goes to another process
            if value == told or name in _NOT_MEASURED:
                continue
            self._told[name], info = value, self._described[name]
            labels = (self._store, *(text for _, text in sorted(info.labels.items())))
            if info.type == "gauge":
                stats.set_gauge(_family(info), value, labels)
            else:  # those of a store begin again with its process
                stats.increase_counter(_family(info), value - (told or 0) if value >= (told or 0) else value, labels)
        return stats
