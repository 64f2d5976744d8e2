"""Metrics of the stores and their gate in vLLM's metrics: hicache's families with the prefix `vllm:hicache_`, and the
directory of the store as a label.

vLLM declares the families in the process of its API server, which has no tier. The tier's values are sent to it between
steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from hicache.flow.cost import CostModel
from hicache.integrations.vllm.gate import LoadGate
from hicache.metrics import Counter, MetricInfo, Metrics, flattened, joined_help
from hicache.stores.side_by_side import register_reads
from hicache.stores.tier import register_tier
from hicache.tiers import DISK, REMOTE

EVERY_S = 1.0
_NOT_MEASURED = {"cost.load_bytes_per_second"}  # vLLM makes the loads from the CPU tier


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """All families by name, in the form in which vLLM declares them."""
    metrics = Metrics()
    LoadGate(CostModel("auto", {DISK: 1, REMOTE: 1}, metrics, time.monotonic), time.monotonic, metrics, job_bytes=1)
    dropped_jobs(metrics)
    misfit_pages(metrics)
    waited_requests(metrics)
    for store in (DISK, REMOTE):
        register_tier(metrics, store.name, dict, lambda queue: {})
    register_reads(metrics, lambda: 0)
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
    return metrics.counter(
        "disk.dropped_jobs", "jobs of stores that the tier refused, mostly because too many bytes wait"
    )


def waited_requests(metrics: Metrics) -> Counter:
    return metrics.counter("gate.waited_requests", "requests that waited for chunks that another node computed")


def misfit_pages(metrics: Metrics) -> Counter:
    return metrics.counter("packing.misfit_pages", "chunks that did not fit their packed row, so not stored on disk")


def _family(info: MetricInfo) -> str:
    return f"vllm:hicache_{info.family}"


class TierMetrics:
    """Owned by the tier. `store`: value of the label. Reports changed values at most every `EVERY_S` seconds."""

    def __init__(self, metrics: Metrics, store: str, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._store = store
        self._clock = clock
        self._described = metrics.describe()
        self._reported: dict[str, float] = {}
        self._next_s = clock()

    def take(self) -> OffloadingConnectorStats | None:
        """Increments of counters and new values of gauges since the last report; None if none is due."""
        now_s = self._clock()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + EVERY_S
        stats = OffloadingConnectorStats()
        for name, number in flattened(self._metrics.snapshot()).items():
            value, reported = (
                float(number),
                self._reported.get(name),
            )  # float also for flags and states, for serialization
            if value == reported or name in _NOT_MEASURED:
                continue
            self._reported[name], info = value, self._described[name]
            labels = (self._store, *(text for _, text in sorted(info.labels.items())))
            if info.type == "gauge":
                stats.set_gauge(_family(info), value, labels)
            else:  # a lower value: the counters of a store restart with its process
                stats.increase_counter(
                    _family(info), value - (reported or 0) if value >= (reported or 0) else value, labels
                )
        return stats
